"""Section c: time and memory of a trace as pipelines grow."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.report import Section, Target, megabytes, seconds, table
from benchmarks.running import in_fresh_process, note, profile_file
from benchmarks.tables import BLOOM, GPT, H100, equal_stages, noisy_profile
from envplan import Profile

NOISY = "noisy"

STAGES = (4, 8, 16)
MICROBATCHES = (8, 16, 32, 64, 128, 256, 512)
SMOOTH_STAGES = (4, 8)
MOST_SMOOTH = 256
# Stages and microbatches of those with equal stages.
EQUAL = {
    GPT: (8, (48, 96, 192, 384)),
    BLOOM: (8, (48, 96, 192, 384)),
    H100: (16, (32, 64, 128, 256, 512)),
}
MOST_FACTOR = 2.3  # once breakpoints have settled
MOST_SECONDS = {NOISY: 30.0, H100: 15.0}  # of the longest with 16 stages
MOST_BYTES = {NOISY: 2e9, H100: 1e9}


def run(quick: bool, folder: Path) -> Section:
    """Time frontiers and plans as pipelines grow."""
    section = Section("Growth with microbatches and stages")
    most = MICROBATCHES[-3] if quick else MICROBATCHES[-1]

    def noisy(all_stages: tuple[int, ...], most: int, noise: float) -> list[_Series]:
        counts = [count for count in MICROBATCHES if count <= most]
        return [_Series(NOISY, noisy_profile(s, noise=noise), s, counts) for s in all_stages]

    equal = [
        _Series(name, equal_stages(name), stages, [count for count in counts if count <= most])
        for name, (stages, counts) in EQUAL.items()
    ]
    section.paragraphs = [
        "Whole frontier from T_star to T_min, pipeline and network built; CPU time, median of up "
        "to five in a process of its own (fewer once they took 10 s), and the most memory that "
        "process held, Python and all its libraries with it. Tables with 0.2% noise:",
        _measured(section, folder, noisy(STAGES, most, 0.002), "noise 0.2%"),
        "Tables as modelled, without noise, where most options lie on the hull:",
        _measured(section, folder, noisy(SMOOTH_STAGES, min(most, MOST_SMOOTH), 0.0), "no noise"),
        "Equal stages, where many paths get critical at once:",
        _measured(section, folder, equal, "equal stages"),
    ]
    return section


class _Series(NamedTuple):
    """Traces of one profile with more and more microbatches."""

    name: str
    profile: Profile
    stages: int
    microbatches: Sequence[int]


def _measured(section: Section, folder: Path, all_series: Sequence[_Series], what: str) -> str:
    rows = []
    factors: list[float] = []
    steady_factors: list[float] = []  # where no breakpoints were added
    for series in all_series:
        file = profile_file(folder, series.profile)
        before: float | None = None
        breakpoints = 0
        for microbatches in series.microbatches:
            shape = f"{series.stages} x {microbatches}"
            label = shape if series.name == NOISY else f"{series.name}, {shape}"
            note(f"tracing {label}, {what}")
            result = in_fresh_process(
                "trace", profile=file, stages=series.stages, microbatches=microbatches
            )
            section.raw.append({"of": label, "tables": what, **result})
            spent = median(result["cpu_s"])
            if before is not None:
                factors.append(spent / before)
                if result["breakpoints"] < 1.1 * breakpoints:
                    steady_factors.append(factors[-1])
            rows.append(
                [
                    label,
                    f"{2 * series.stages * microbatches:,}",
                    f"{result['breakpoints']:,}",
                    seconds(spent),
                    "" if before is None else f"{factors[-1]:.2f}",
                    megabytes(result["memory_peak"]),
                ]
            )
            before, breakpoints = spent, result["breakpoints"]
            if series.stages == STAGES[-1] and microbatches == MICROBATCHES[-1]:
                section.targets += _largest_targets(series.name, label, result, spent)
    section.target(
        f"c: largest factor for doubling microbatches, breakpoints settled, {what}",
        f"{MOST_FACTOR}x",
        f"{max(steady_factors):.2f}x",
        max(steady_factors) <= MOST_FACTOR,
    )
    return table(
        ["stages x microbatches", "operations", "breakpoints", "time", "for doubling", "memory"],
        rows,
    ) + (
        f"\n\nDoubling microbatches costs at most {max(factors):.2f}x; at most "
        f"{max(steady_factors):.2f}x where it adds less than a tenth to the breakpoints."
    )


def _largest_targets(name: str, label: str, result: dict[str, Any], spent: float) -> list[Target]:
    most_s, most_bytes, memory = MOST_SECONDS[name], MOST_BYTES[name], result["memory_peak"]
    return [
        Target(f"c: {label}, time", f"{most_s:.0f} s", seconds(spent), spent < most_s),
        Target(
            f"c: {label}, memory", megabytes(most_bytes), megabytes(memory), memory < most_bytes
        ),
    ]
