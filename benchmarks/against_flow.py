"""Section b: the whole frontier against one point by ortools' SimpleMinCostFlow."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.flow_peer import FlowPoint
from benchmarks.report import Section, Target, ratio, seconds, table
from benchmarks.running import note
from benchmarks.tables import noisy_profile
from envplan import Pipeline
from envplan.frontier import build_network
from envplan.solve import trace_frontier
from envplan.units import j_from_fj

SHAPES = ((4, 8), (4, 32), (8, 32), (8, 128))
REPETITIONS = 7


def run(_quick: bool, _folder: Path) -> Section:
    section = Section("Against one solve of ortools SimpleMinCostFlow")
    rows = []
    for stages, microbatches in SHAPES:
        note(f"{stages} x {microbatches} against SimpleMinCostFlow")
        result = compare(stages, microbatches)
        section.raw.append(result)
        traced, solved = median(result["trace_s"]), median(result["solve_s"])
        rows.append(
            [
                f"{stages} x {microbatches}",
                str(result["breakpoints"]),
                seconds(traced),
                seconds(solved),
                f"{traced / solved:.3f}",
                f"{result['relative_difference']:.1e}",
            ]
        )
        section.targets.append(
            Target(
                f"b: {stages} x {microbatches}, E(T_star) agrees with SimpleMinCostFlow",
                "1e-9",
                f"{result['relative_difference']:.1e}",
                result["relative_difference"] <= 1e-9,
            )
        )
    section.targets.append(
        Target(
            f"b: {stages} x {microbatches}, whole frontier against one solve",
            "under 1x its time",
            ratio(traced / solved),
            traced < solved,
        )
    )
    section.paragraphs = [
        "The whole frontier from T_star to T_min, pipeline and network built, against one "
        "`solve()` of the same network at the flow of T_star, its arcs added before. Medians of "
        f"{REPETITIONS}, alternating in one process.",
        table(
            [
                "stages x microbatches",
                "breakpoints",
                "whole frontier",
                "one solve",
                "frontier / solve",
                "energy differs by",
            ],
            rows,
        ),
    ]
    return section


def compare(stages: int, microbatches: int, repetitions: int = REPETITIONS) -> dict[str, Any]:
    """Times of both, s, and the relative difference of their energies at T_star."""
    profile = noisy_profile(stages)
    traced: list[float] = []
    solved: list[float] = []
    for _ in range(repetitions):
        begin = time.perf_counter()
        pipeline = Pipeline("1f1b", num_stages=stages, num_microbatches=microbatches)
        frontier = trace_frontier(pipeline, profile)
        traced.append(time.perf_counter() - begin)
        powers = frontier.blocking_power_uw
        point = FlowPoint(build_network(pipeline, profile, powers), sum(powers))
        begin = time.perf_counter()
        point.solve()
        solved.append(time.perf_counter() - begin)
    least = frontier.energy_at(frontier.min_energy_time)
    return {
        "stages": stages,
        "microbatches": microbatches,
        "breakpoints": len(frontier.times),
        "trace_s": traced,
        "solve_s": solved,
        "energy_j": least,
        "relative_difference": abs(j_from_fj(point.energy_fj()) / least - 1),
    }
