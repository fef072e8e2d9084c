"""What was published beside what we get, on the measured profiles: the tables of docs/results.md.

`python -m benchmarks.results docs/results.md` (or `make results`) makes them anew, and leaves the
text around them as it is. They are the same on every machine, but for gaps after polishing; how
long it took goes to the terminal.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Final

import numpy as np
import pandas as pd
from tools.sosp24.data import DATA, WAITING_W, WORKLOADS, Runs, Workload, read_runs
from tools.sosp24.stages import STAGE_PROFILES
from tools.sosp24.workloads import profile_name

from benchmarks.report import table
from envplan import (
    Frontier,
    Pipeline,
    Plan,
    Profile,
    builtin_profiles,
    plan_from_clocks,
    strong_scaling,
    trace_frontier,
)
from envplan._io.files import atomic_write
from envplan.plan.build import beyond_raw_rows
from envplan.planners import Entry, EnvPipe, compare
from envplan.profile.job import pipeline_of_job
from envplan.profile.smoothing import jumps
from envplan.units import ENERGY_UNITS_PER_J

MICROBATCHES: Final = (12, 24, 48, 96)
GAP_MICROBATCHES: Final = (*MICROBATCHES, 256)
SLOWDOWNS: Final = (0.0, 0.01, 0.02, 0.05, 0.1)
STRAGGLERS: Final = (1.05, 1.1, 1.2, 1.3, 1.4, 1.5)
STRAGGLER: Final = 0.2
GLOBAL_BATCH: Final = 1536  # microbatches over all pipelines, as in Perseus's emulation
POLISHED_AIM, POLISH_S = 0.2, 60.0

#: The artifact's names of the stage profiles' frontiers.
FRONTIERS: Final = {
    "sosp24-a100sxm-gpt3-175b-8stage": ("a100_sxm", "gpt3-175b"),
    "sosp24-a40-gpt3-175b-8stage": ("a40", "gpt3-175b"),
    "sosp24-a100sxm-bloom-176b-8stage": ("a100_sxm", "bloom"),
    "sosp24-a40-bloom-176b-8stage": ("a40", "bloom"),
}
#: The rows of stage_profile/ are a tenth of a stage on one of 8 GPUs.
TIME_SCALE, ENERGY_SCALE = 10.0, 80.0

#: Table 3 as far as it is in the material that the artifact came with: Perseus, EnvPipe, percent.
TABLE_3: Final = {"a100-gpt3-xl-4stage": ("13.2", "8.8"), "a40-gpt3-2.7b-8stage": ("21.1", "21.7")}
#: The most of Table 4, percent: intrinsic and extrinsic bloat together (as in the SOSP talk).
TABLE_4: Final = {
    "a100-gpt3-xl-4stage": 15.5,
    "a100-bloom-3b-4stage": 15.6,
    "a100-bert-huge-uncased-4stage": 16.9,
    "a100-t5-3b-4stage": 18.0,
    "a100-wide-resnet101_8-4stage": 12.7,
    "a40-gpt3-2.7b-8stage": 26.0,
    "a40-bloom-3b-8stage": 26.4,
    "a40-bert-huge-uncased-8stage": 24.1,
    "a40-t5-3b-8stage": 28.5,
    "a40-wide-resnet101_8-8stage": 26.3,
}


def main(path: str) -> None:
    """Put new tables into the page, in its order; they are made side by side."""
    parts = (_jobs, _large, _noise, _gaps, _scaling, _v100)
    with ProcessPoolExecutor(len(parts)) as pool:
        made = [future.result() for future in [pool.submit(part) for part in parts]]
    text = Path(path).read_text(encoding="utf-8")
    atomic_write(path, with_tables(text, [one for part in made for one in part]))


def with_tables(text: str, tables: Sequence[str]) -> str:
    """A page in Markdown with its tables replaced by others, in their order."""
    blocks = text.strip().split("\n\n")
    places = [k for k, block in enumerate(blocks) if block.startswith("|")]
    for k, one in zip(places, tables, strict=True):
        blocks[k] = one
    return "\n\n".join(blocks) + "\n"


def _jobs() -> list[str]:
    """The real jobs, beside Tables 3 and 4."""
    jobs = [Job.of(workload) for workload in WORKLOADS.values()]
    return [_no_straggler(jobs), _zeus(jobs), _straggled(jobs)]


@dataclass(frozen=True)
class Job:
    """One of the artifact's real jobs, measured and predicted.

    Attributes:
        workload, runs: which, and its runs.
        frontier: of its profile.
        baseline_time, baseline_energy: measured under the highest power limit, s and J.
        highest: predicted at the highest clock.
    """

    workload: Workload
    runs: Runs
    frontier: Frontier
    baseline_time: float
    baseline_energy: float
    highest: Plan

    @classmethod
    def of(cls, workload: Workload) -> Job:
        """Read the runs of a workload and trace its frontier."""
        begin = time.perf_counter()
        profile = Profile.builtin(profile_name(workload))
        frontier = trace_frontier(profile.pipeline(), profile)
        limits = zeus_rows(workload, "global")
        base = limits.loc[limits["power_limit_0"].idxmax()]
        highest = frontier.max_frequency_plan()
        _say(f"{profile.name}: traced in {time.perf_counter() - begin:.1f} s")
        return cls(
            workload, read_runs(workload.name), frontier, base["time"], base["energy"], highest
        )

    @property
    def fastest(self) -> int:
        """The number of Perseus's fastest run."""
        times = np.where(self.runs.planned, self.runs.iteration_time_s, np.inf)
        return self.runs.keys[int(times.argmin())][1]

    def measured(self, planner: str, run: int) -> tuple[float, float]:
        """Percent saved and percent slower of a run, against the baseline."""
        at = self.runs.keys.index((planner, run))
        return (
            100 * (1 - self.runs.energy_j[at] / self.baseline_energy),
            100 * (self.runs.iteration_time_s[at] / self.baseline_time - 1),
        )

    def ours_as(self, planner: str, run: int) -> float:
        """Percent saved by our plan in the replayed time of a run's clocks, against the baseline.

        The measured saving, times what our plan uses less by the same profile.
        """
        clocks = self.runs.clocks(self.runs.keys.index((planner, run)))
        frontier = self.frontier
        given = plan_from_clocks(frontier.pipeline, frontier.profile, clocks, frontier=frontier)
        ours = frontier.plan(max(given.iteration_time, frontier.min_time))
        left = 1 - self.measured(planner, run)[0] / 100
        return 100 * (1 - left * ours.energy / given.energy)

    @property
    def ours_at_t_min(self) -> float:
        """Percent saved by our plan at T_min, predicted."""
        return 100 * (1 - self.frontier.plan().energy / self.highest.energy)

    def until(self, sync_s: float) -> float:
        """Percent saved until a straggler ends by our plan, predicted."""
        plan = self.frontier.plan(sync_time=sync_s)
        spent = plan.energy + plan.waiting_energy(sync_s)
        without = self.highest.energy + self.highest.waiting_energy(sync_s)
        return 100 * (1 - spent / without)

    def perseus_until(self, factor: float) -> float:
        """Percent saved until a straggler ends by the best of Perseus's runs in time, measured."""
        runs, power = self.runs, self.workload.waiting_w * self.workload.num_stages
        sync = factor * self.baseline_time
        usable = runs.planned & (runs.iteration_time_s <= sync)
        if not usable.any():
            return float("nan")
        spent = runs.energy_j + power * (sync - runs.iteration_time_s)
        without = self.baseline_energy + power * (sync - self.baseline_time)
        return float(100 * (1 - spent[usable].min() / without))


def zeus_rows(workload: Workload, kind: str) -> pd.DataFrame:
    """The rows of zeus/ of a workload: `global` limits, or `local` ones."""
    rows = pd.read_csv(DATA / "zeus" / f"{workload.gpu}_{kind}.csv")
    return rows[rows["model_name"] == workload.model]


def _no_straggler(jobs: Iterable[Job]) -> str:
    rows = []
    for job in jobs:
        perseus, envpipe = TABLE_3.get(job.workload.name, ("-", "-"))
        rows.append(
            [
                f"`{job.workload.name}`",
                perseus,
                _saved(*job.measured("perseus", job.fastest)),
                f"{job.ours_as('perseus', job.fastest):.1f}",
                envpipe,
                _saved(*job.measured("envpipe", 2)),
                f"{job.ours_as('envpipe', 2):.1f}",
                f"{job.ours_at_t_min:.1f}",
            ]
        )
    return table(
        [
            "workload",
            "Perseus, published",
            "Perseus, measured",
            "ours at its time",
            "EnvPipe, published",
            "EnvPipe, measured",
            "ours at its time",
            "ours at T_min",
        ],
        rows,
    )


def _zeus(jobs: Iterable[Job]) -> str:
    rows = []
    for job in jobs:
        cells = [f"`{job.workload.name}`"]
        for kind in ("global", "local"):
            limits = zeus_rows(job.workload, kind)
            best = limits.loc[limits["energy"].idxmin()]
            slower = best["time"] / job.baseline_time
            cells.append(
                _saved(100 * (1 - best["energy"] / job.baseline_energy), 100 * (slower - 1))
            )
            latest = max(job.frontier.min_time, job.highest.iteration_time * slower)
            ours = job.frontier.plan(min(latest, job.frontier.min_energy_time))
            cells.append(f"{100 * (1 - ours.energy / job.highest.energy):.1f}")
        comparison = compare(job.frontier)
        (envpipe,) = (one for one in comparison.entries if one.plan.planner == "envpipe")
        cells += _envpipe(envpipe, comparison.baseline.energy_j)
        rows.append(cells)
        _say(f"{job.workload.name}: compared")
    return table(
        [
            "workload",
            "Zeus, global",
            "ours by then",
            "Zeus, per stage",
            "ours by then",
            "EnvPipe, ours",
            "frontier as EnvPipe",
        ],
        rows,
    )


def _envpipe(entry: Entry, base: float) -> list[str]:
    """What our planner of EnvPipe saves, and our plan in the same time."""
    return [
        _saved(entry.savings_percent, entry.slowdown_percent),
        f"{100 * (1 - entry.ours.energy / base):.1f}",
    ]


def _straggled(jobs: Iterable[Job]) -> str:
    rows = []
    for job in jobs:
        ours = [job.until(factor * job.highest.iteration_time) for factor in STRAGGLERS]
        theirs = [job.perseus_until(factor) for factor in STRAGGLERS]
        rows.append(
            [
                f"`{job.workload.name}`",
                *(f"{a:.1f} / {b:.1f}" for a, b in zip(ours, theirs, strict=True)),
                f"{TABLE_4[job.workload.name]:.1f}",
                f"{max(ours):.1f}",
            ]
        )
    heads = [f"T' = {factor:g} T" for factor in STRAGGLERS]
    return table(["workload, ours / Perseus's runs", *heads, "published best", "our best"], rows)


def _large() -> list[str]:
    artifact = pd.read_csv(DATA / "frontier" / "envpipe_result.csv")
    rows, along = [], []
    for name, (gpu, model) in FRONTIERS.items():
        raw, calm = Profile.builtin(name, raw=True), Profile.builtin(name)
        published = raw.metadata.extra["published_savings"]["savings_percent"]
        chosen = artifact[(artifact["device"] == gpu) & (artifact["model"] == model)]
        envpipe = chosen.set_index("num_microbatches")
        for count, saved in zip(MICROBATCHES, published, strict=True):
            begin = time.perf_counter()
            frontier, smooth = (
                trace_frontier(Pipeline("1f1b", 8, count), one) for one in (raw, calm)
            )
            highest, ours = frontier.max_frequency_plan(), frontier.plan()
            other = smooth.max_frequency_plan()
            at = envpipe.loc[count]
            taken = at["iteration_time"] / TIME_SCALE
            same = frontier.plan(max(taken, frontier.min_time))
            sync = highest.iteration_time * (1 + STRAGGLER)
            slowed = frontier.plan(sync_time=sync)
            found = EnvPipe().plan(frontier)
            waiting = 8 * WAITING_W[gpu.removesuffix("_sxm")] * (sync - taken)
            stands = _until(highest, sync) / highest.job.num_gpus
            rows.append(
                [
                    f"`{name}`",
                    str(count),
                    f"{saved:.1f}",
                    f"{100 * (1 - ours.energy / highest.energy):.1f}",
                    f"{100 * (1 - smooth.plan().energy / other.energy):.1f}",
                    _saved(
                        100 * (1 - at["energy"] / ENERGY_SCALE / _per_gpu(highest)),
                        100 * (taken / highest.iteration_time - 1),
                    ),
                    _saved(found.predicted.savings_percent, found.predicted.slowdown_percent),
                    f"{100 * (1 - same.energy / highest.energy):.1f}",
                    f"{100 * (1 - (at['energy'] / ENERGY_SCALE + waiting) / stands):.1f}",
                    f"{100 * (1 - _until(slowed, sync) / _until(highest, sync)):.1f}",
                ]
            )
            file = DATA / "frontier" / f"{gpu}+{model}_bf16_mb{count}.csv.gz"
            if file.exists():
                along += [
                    [f"`{name}`", str(count), made_on, *cells]
                    for made_on, cells in _along(frontier, smooth, pd.read_csv(file))
                ]
            _say(f"{name}, {count} microbatches: {time.perf_counter() - begin:.1f} s")
    sizes = table(
        [
            "profile",
            "microbatches",
            "Perseus, published",
            "ours, raw rows",
            "ours",
            "EnvPipe, artifact",
            "EnvPipe, ours",
            "ours as EnvPipe",
            "EnvPipe, straggler",
            "ours, straggler",
        ],
        rows,
    )
    heads = [f"+{100 * one:g}%" for one in SLOWDOWNS]
    frontiers = table(["profile", "microbatches", "plans", *heads], along)
    return [sizes, frontiers]


def _along(
    raw: Frontier, smooth: Frontier, perseus: pd.DataFrame
) -> Iterator[tuple[str, list[str]]]:
    """Percent of energy that our plans use less than Perseus's on the raw rows, by slowdown."""
    perseus = perseus.sort_values("time")
    least = np.minimum.accumulate(perseus["energy"])
    slower = perseus["time"] / perseus["time"].min() - 1

    def less(slowdown: float, energy_j: float) -> str:
        return f"{100 * (1 - energy_j / float(np.interp(slowdown, slower, least))):.2f}"

    plans = [(one, raw.plan(slowdown=one)) for one in SLOWDOWNS]
    yield "raw", [less(slowdown, _per_gpu(plan)) for slowdown, plan in plans]
    cells = []
    for slowdown in SLOWDOWNS:
        plan = smooth.plan(slowdown=slowdown)
        late, dearer = beyond_raw_rows(plan, smooth.profile)
        taken = plan.iteration_time * (1 + late) / raw.min_time - 1
        cells.append(less(taken, _per_gpu(plan) * (1 + dearer)))
    yield "default", cells


def _per_gpu(plan: Plan) -> float:
    """J of a plan, one GPU a stage."""
    return plan.energy / plan.job.num_gpus


def _until(plan: Plan, sync_s: float) -> float:
    return plan.energy + plan.waiting_energy(sync_s)


def _noise() -> list[str]:
    rows = []
    for name in STAGE_PROFILES:
        raw, calm = Profile.builtin(name, raw=True), Profile.builtin(name)
        for count in (MICROBATCHES[0], MICROBATCHES[-1]):
            pipeline = Pipeline("1f1b", 8, count)
            frontiers = [trace_frontier(pipeline, one) for one in (raw, calm)]
            for slowdown in SLOWDOWNS:
                plans = [frontier.plan(slowdown=slowdown) for frontier in frontiers]
                late, dearer = beyond_raw_rows(plans[1], calm)
                rows.append(
                    [
                        f"`{name}`",
                        str(count),
                        f"{100 * slowdown:g}",
                        *(f"{100 * plan.gap:.2f}" for plan in plans),
                        f"{100 * late:+.2f}",
                        f"{100 * dearer:+.2f}",
                    ]
                )
        _say(f"{name}: noise")
    heads = ["profile", "microbatches", "slowdown", "gap, raw", "gap, smooth", "late", "dearer"]
    return [table(heads, rows), _jumps()]


def _jumps() -> str:
    """Every jump in the raw rows of the stage profiles, one stage of each kind."""
    rows = []
    for name in STAGE_PROFILES:
        profile = Profile.builtin(name, raw=True)
        for stage, instruction in product((0, 7), ("forward", "backward")):
            found = profile.table(stage, instruction)
            rising = np.argsort(found.frequency_mhz)
            clocks, times = found.frequency_mhz[rising], found.time_ns[rising] * 1e-9
            power = found.energy_10fj[rising] / ENERGY_UNITS_PER_J / times
            for at in jumps(times):
                below = slice(0, at + 1)
                fit = np.polyfit(1 / clocks[below], times[below], 1)
                slower = 100 * (times / np.polyval(fit, 1 / clocks) - 1)
                higher = int(np.searchsorted(clocks, clocks[at] + 200))
                rows.append(
                    [
                        f"`{name}`",
                        str(stage),
                        instruction,
                        f"{clocks[at]:,}",
                        f"{np.abs(slower[below]).max():.2f}",
                        *(f"{slower[k]:.1f}" for k in (at + 1, higher, -1)),
                        f"{100 * (power[at + 2] / power[at] - 1):+.1f}",
                    ]
                )
    heads = ["up to, MHz", "off", "next", "200 MHz higher", "top", "power"]
    return table(["profile", "stage", "instruction", *heads], rows)


def _gaps() -> list[str]:
    rows = []
    for profile in builtin_profiles():
        if profile.metadata.source != "measured":
            continue
        cells, above, polished = [], 0, 0.0
        for count in GAP_MICROBATCHES:
            frontier = trace_frontier(pipeline_of_job(profile, num_microbatches=count), profile)
            gaps = {one: 100 * frontier.plan(slowdown=one).gap for one in SLOWDOWNS}
            cells.append(max(gaps.values()))
            for slowdown, gap in gaps.items():
                if gap > POLISHED_AIM:
                    gap = 100 * frontier.plan(slowdown=slowdown, polish=POLISH_S).gap
                    above += 1
                polished = max(polished, gap)
        rows.append(
            [f"`{profile.name}`", *(f"{one:.3f}" for one in cells), str(above), f"{polished:.3f}"]
        )
        _say(f"{profile.name}: gaps")
    heads = [*map(str, GAP_MICROBATCHES), f"plans above {POLISHED_AIM}", "largest, polished"]
    return [table(["profile", *heads], rows)]


def _scaling() -> list[str]:
    rows = []
    for name in FRONTIERS:
        profile = Profile.builtin(name, raw=True)
        plan = trace_frontier(Pipeline("1f1b", 8, 96), profile, gpus_per_stage=8).plan()
        reports = strong_scaling(
            plan,
            profile,
            (16, 32, 64, 128),
            global_batch=GLOBAL_BATCH,
            slowdowns=[{}, *({0: factor} for factor in STRAGGLERS)],
        )
        for report in reports:
            saved = [100 * (1 - ran.energy_j / ran.baseline_energy_j) for ran in report.iterations]
            size = [f"{report.num_gpus:,}", str(report.num_microbatches)]
            rows.append([f"`{name}`", *size, *(f"{one:.1f}" for one in saved)])
        _say(f"{name}: scaling")
    heads = [f"T' = {factor:g} T" for factor in STRAGGLERS]
    return [table(["profile", "GPUs", "microbatches", "no straggler", *heads], rows)]


def _v100() -> list[str]:
    rows = []
    for profile in builtin_profiles():
        published = profile.metadata.extra.get("published")
        if published is None or profile.metadata.source != "modelled":
            continue
        comparison = compare(trace_frontier(profile.pipeline(), profile))
        envpipe = next(one for one in comparison.entries if one.plan.planner == "envpipe")
        ours = next(one for one in comparison.entries if one.point == "T_min")
        rows.append(
            [
                f"`{profile.name}`",
                *_envpipe(envpipe, comparison.baseline.energy_j),
                f"{ours.savings_percent:.1f}",
                f"up to {published['savings_percent']:g} (<{published['slowdown_percent']:g})",
            ]
        )
    heads = ["profile", "EnvPipe, ours", "frontier as EnvPipe", "ours", "published"]
    return [table(heads, rows)]


def _saved(percent: float, slowdown: float) -> str:
    return f"{percent:.1f} ({slowdown:+.1f})"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
