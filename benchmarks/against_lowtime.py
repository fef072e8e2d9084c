"""Section a: against lowtime on the same profile, time first and then the plans themselves."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.report import Section, megabytes, percent, ratio, seconds, table
from benchmarks.running import in_fresh_process, note, profile_file
from benchmarks.tables import noisy_profile
from envplan import Pipeline, Profile
from envplan.solve import Frontier, trace_frontier
from envplan.units import j_from_10fj, s_from_ns

QUANTUM_S = 0.001
OURS_EACH = 5  # fresh processes of ours before lowtime, and as many after it
SHOWN = 8


@dataclass(frozen=True)
class Shape:
    """What to compare at, and the ratio to reach over [T_min, T_star]."""

    stages: int
    microbatches: int
    runs: int
    least_ratio: float
    slow: bool = False

    def __str__(self) -> str:
        return f"{self.stages} x {self.microbatches}"


SHAPES = (Shape(4, 8, 3, 2_000), Shape(4, 32, 1, 10_000, slow=True))


def run(quick: bool, folder: Path) -> Section:
    """Time whole frontiers beside lowtime's, in fresh processes."""
    section = Section("Against lowtime")
    section.paragraphs.append(
        "The same CSV (115 frequencies an operation, 0.2% noise) and graph; lowtime with quanta of "
        f"{1000 * QUANTUM_S:g} ms, 70 W. Every run in a fresh process, ours before and after "
        "lowtime's. lowtime: constructor and `run()` to its end, graph built and exponentials "
        "fitted before. Ours: pipeline, network and trace, the first (cold) one of each process, "
        "median; the frontier object is ready to look plans up. lowtime can only walk from T_max."
    )
    for shape in SHAPES:
        if not (quick and shape.slow):
            _compare(section, shape, folder)
    return section


def _compare(section: Section, shape: Shape, folder: Path) -> None:
    job: dict[str, Any] = {
        "profile": profile_file(folder, noisy_profile(shape.stages)),
        "stages": shape.stages,
        "microbatches": shape.microbatches,
    }
    plans_file = folder / f"lowtime-{shape.stages}x{shape.microbatches}.npz"
    ours: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    theirs: list[dict[str, Any]] = []

    def run_ours() -> None:
        for _ in range(OURS_EACH):
            for full, results in ours.items():
                results.append(in_fresh_process("trace", **job, full=full))

    for k in range(shape.runs):
        run_ours()
        note(f"lowtime at {shape}, run {k + 1} of {shape.runs}")
        theirs.append(
            in_fresh_process("lowtime", **job, quantum_s=QUANTUM_S, plans_file=str(plans_file))
        )
    run_ours()
    section.paragraphs.append(f"### {shape}\n\n" + _times_table(ours, theirs))
    factor = median(r["wall_s"] for r in theirs) / _cold(ours[False], "wall_s")
    section.target(
        f"a: {shape}, [T_min, T_star] against lowtime",
        f"at least {shape.least_ratio:,.0f}x",
        ratio(factor),
        factor >= shape.least_ratio,
    )

    note(f"plans of both at {shape}")
    pipeline = Pipeline("1f1b", num_stages=shape.stages, num_microbatches=shape.microbatches)
    frontier = trace_frontier(pipeline, Profile.read_csv(job["profile"]))
    with np.load(plans_file) as plans:
        duels = [
            duel(frontier, frequencies, float(stated))
            for stated, frequencies in zip(
                plans["stated_time_s"], plans["frequency_mhz"], strict=True
            )
            if stated <= 1.1 * frontier.min_energy_time
        ]
    section.paragraphs.append(_duels_text(frontier, duels))
    worse = sum(d.our_energy_j > d.their_energy_j for d in duels)
    section.target(
        f"a: {shape}, plans of ours that use more energy than lowtime's",
        f"0 of {len(duels)}",
        str(worse),
        worse == 0,
    )
    section.raw.append(
        {
            "stages": shape.stages,
            "microbatches": shape.microbatches,
            "quantum_s": QUANTUM_S,
            "frontier": ours[False],
            "full_frontier": ours[True],
            "lowtime": theirs,
            "plans": [asdict(d) for d in duels],
        }
    )


def _cold(results: list[dict[str, Any]], clock: str) -> float:
    firsts: list[float] = [r[clock][0] for r in results]
    return median(firsts)


def _times_table(ours: dict[bool, list[dict[str, Any]]], theirs: list[dict[str, Any]]) -> str:
    their_wall = median(r["wall_s"] for r in theirs)
    their_cpu = median(r["cpu_s"] for r in theirs)
    fit, build = (median(r[key] for r in theirs) for key in ("fit_s", "build_s"))
    rows = []
    for results, what in ((ours[False], "T_star to T_min"), (ours[True], "T_max to T_min")):
        wall, cpu = _cold(results, "wall_s"), _cold(results, "cpu_s")
        warm = median(t for r in results for t in r["wall_s"][1:])
        rows.append(
            [
                f"envplan, {what}",
                seconds(wall),
                ratio(their_wall / wall),
                ratio(their_cpu / cpu),
                seconds(warm),
                *_memory(results),
            ]
        )
    rows.append(["lowtime, T_max to T_min", seconds(their_wall), "1x", "1x", "", *_memory(theirs)])
    return (
        table(
            ["", "time", "faster", "by CPU time", "warm", "peak memory", "of it for this"],
            rows,
        )
        + f"\n\nNot counted for lowtime: {seconds(fit)} fitting exponentials, {seconds(build)} "
        f"building its graph. It walked {theirs[-1]['iterations']:,} quanta; its time is the "
        f"median of {len(theirs)}, ours of {len(ours[False])}."
    )


def _memory(results: list[dict[str, Any]]) -> list[str]:
    peak = median(r["memory_peak"] for r in results)
    before = median(r["memory_before"] for r in results)
    return [megabytes(peak), megabytes(peak - before)]


@dataclass(frozen=True)
class Duel:
    """A plan of lowtime's, replayed, and ours for the time it really takes."""

    stated_time_s: float
    real_time_s: float
    their_energy_j: float
    our_time_s: float
    our_energy_j: float
    lower_bound_j: float

    def gap(self, energy: float) -> float:
        """Fraction above the least relaxed energy at the real time."""
        return energy / self.lower_bound_j - 1


def duel(frontier: Frontier, frequency_mhz: NDArray[np.int32], stated_time_s: float) -> Duel:
    """Replay a plan exactly from the profile's own times and energies, and plan for its time.

    Args:
        frequency_mhz: of every operation, (N,); each names one row of its table.
    """
    pipeline, profile = frontier.pipeline, frontier.profile
    rows = []
    for op, frequency in zip(pipeline.operations, frequency_mhz.tolist(), strict=True):
        frequencies = profile.table(op.profile_stage, op.instruction).frequency_mhz
        rows.append(int(np.flatnonzero(frequencies == frequency)[0]))
    replayed = frontier.problem.replay(np.array(rows, np.int32))
    real_time = s_from_ns(replayed.makespan_ns)
    plan = frontier.plan(real_time)
    return Duel(
        stated_time_s=stated_time_s,
        real_time_s=real_time,
        their_energy_j=j_from_10fj(replayed.energy_10fj),
        our_time_s=plan.iteration_time,
        our_energy_j=plan.energy,
        lower_bound_j=frontier.energy_at(real_time),
    )


def _duels_text(frontier: Frontier, duels: list[Duel]) -> str:
    on_frontier = [d for d in duels if d.real_time_s <= frontier.min_energy_time]
    worse = [d for d in duels if d.our_energy_j > d.their_energy_j]
    saved = [1 - d.our_energy_j / d.their_energy_j for d in on_frontier]
    late = max(d.real_time_s - d.stated_time_s for d in duels)
    shown = np.linspace(len(on_frontier) - 1, 0, SHOWN).round().astype(int).tolist()
    header = ["lowtime says", "really takes", "its energy", "its gap"]
    return (
        f"T_min {frontier.min_time:.6f} s, T_star {frontier.min_energy_time:.6f} s. lowtime's "
        "plans replayed exactly with the profile's times, and ours for the time each really takes; "
        "gaps are above the least relaxed energy at that time.\n\n"
        + table(
            [*header, "our time", "our energy", "our gap"],
            [_duel_row(on_frontier[k]) for k in shown],
        )
        + f"\n\nOf {len(duels)} plans of lowtime's up to 1.1 T_star ({len(on_frontier)} on [T_min, "
        f"T_star]), ours use more energy {len(worse)} times. On the frontier ours save "
        f"{percent(min(saved))} to {percent(max(saved))} (mean {percent(float(np.mean(saved)))}); "
        f"lowtime's end up to {seconds(late)} later than it says, its fastest in "
        f"{min(d.real_time_s for d in duels):.6f} s."
    )


def _duel_row(d: Duel) -> list[str]:
    return [
        f"{d.stated_time_s:.3f} s",
        f"{d.real_time_s:.6f} s",
        f"{d.their_energy_j:.2f} J",
        percent(d.gap(d.their_energy_j)),
        f"{d.our_time_s:.6f} s",
        f"{d.our_energy_j:.2f} J",
        percent(d.gap(d.our_energy_j)),
    ]
