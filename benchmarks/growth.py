"""Section c: time and memory of a trace as pipelines grow."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report import Section, Target, megabytes, seconds, table
from benchmarks.running import in_fresh_process, note, profile_file

STAGES = (4, 8, 16)
MICROBATCHES = (8, 16, 32, 64, 128, 256, 512)
LARGEST = (STAGES[-1], MICROBATCHES[-1])
SMOOTH_STAGES = (4, 8)
MOST_SMOOTH = 256
MOST_FACTOR = 2.5
MOST_SECONDS = 30.0
MOST_BYTES = 2e9


def run(quick: bool, folder: Path) -> Section:
    section = Section("Growth with microbatches and stages")
    most = MICROBATCHES[-3] if quick else MICROBATCHES[-1]
    section.paragraphs = [
        "Whole frontier from T_star to T_min, pipeline and network built; median of up to five in "
        "a process of its own (fewer once they took 10 s), and the most memory that process held, "
        "Python and all its libraries with it. Tables with 0.2% noise:",
        _measured(section, folder, STAGES, most, 0.002),
        "Tables as modelled, without noise, where most options lie on the hull:",
        _measured(section, folder, SMOOTH_STAGES, min(most, MOST_SMOOTH), 0.0),
    ]
    return section


def _measured(
    section: Section, folder: Path, all_stages: tuple[int, ...], most: int, noise: float
) -> str:
    rows = []
    factors: list[float] = []
    steady_factors: list[float] = []  # where no breakpoints were added
    for stages in all_stages:
        before: float | None = None
        breakpoints = 0
        for microbatches in (count for count in MICROBATCHES if count <= most):
            result = _trace(folder, stages, microbatches, noise)
            section.raw.append(result)
            spent = median(result["wall_s"])
            if before is not None:
                factors.append(spent / before)
                if result["breakpoints"] < 1.1 * breakpoints:
                    steady_factors.append(factors[-1])
            rows.append(
                [
                    f"{stages} x {microbatches}",
                    f"{2 * stages * microbatches:,}",
                    f"{result['breakpoints']:,}",
                    seconds(spent),
                    "" if before is None else f"{factors[-1]:.2f}",
                    megabytes(result["memory_peak"]),
                ]
            )
            before, breakpoints = spent, result["breakpoints"]
            if (stages, microbatches) == LARGEST:
                section.targets += _largest_targets(result, spent)
    section.targets.append(
        Target(
            f"c: largest factor for doubling microbatches, noise {noise:.1%}",
            f"{MOST_FACTOR}x",
            f"{max(factors):.2f}x",
            max(factors) <= MOST_FACTOR,
        )
    )
    return table(
        ["stages x microbatches", "operations", "breakpoints", "time", "for doubling", "memory"],
        rows,
    ) + (
        f"\n\nDoubling microbatches costs at most {max(factors):.2f}x; at most "
        f"{max(steady_factors):.2f}x where it adds less than a tenth to the breakpoints."
    )


def _trace(folder: Path, stages: int, microbatches: int, noise: float) -> dict[str, Any]:
    note(f"tracing {stages} x {microbatches}, noise {noise}")
    result = in_fresh_process(
        "trace",
        profile=profile_file(folder, stages, noise),
        stages=stages,
        microbatches=microbatches,
    )
    return {"stages": stages, "microbatches": microbatches, "noise": noise, **result}


def _largest_targets(result: dict[str, Any], spent: float) -> list[Target]:
    what = "c: " + " x ".join(map(str, LARGEST))
    memory = result["memory_peak"]
    return [
        Target(f"{what}, time", f"{MOST_SECONDS:.0f} s", seconds(spent), spent < MOST_SECONDS),
        Target(f"{what}, memory", "2 GB", megabytes(memory), memory < MOST_BYTES),
    ]
