"""Section b: the whole frontier against one point by ortools' SimpleMinCostFlow."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.flow_peer import FlowPoint
from benchmarks.report import Section, ratio, seconds, table
from benchmarks.running import note
from benchmarks.tables import BLOOM, GPT, H100, equal_stages, noisy_profile
from envplan import Pipeline, Profile
from envplan.frontier import Relaxation, build_network
from envplan.units import j_from_10fj

SHAPES = ((4, 8), (4, 32), (8, 32), (8, 128))
EQUAL = ((GPT, 8, 96), (BLOOM, 8, 96), (H100, 16, 64))
FEW_BREAKPOINTS = 1000  # with so few the whole frontier should take less than one solve
REPETITIONS = 7


def run(_quick: bool, _folder: Path) -> Section:
    """Time whole frontiers beside one solve of ortools' min-cost flow."""
    section = Section("Against one solve of ortools SimpleMinCostFlow")
    rows = []
    cases = [("noisy", noisy_profile(stages), stages, count) for stages, count in SHAPES]
    cases += [(name, equal_stages(name), stages, count) for name, stages, count in EQUAL]
    for name, profile, stages, microbatches in cases:
        label = f"{name}, {stages} x {microbatches}"
        note(f"{label} against SimpleMinCostFlow")
        result = compare(profile, microbatches)
        section.raw.append({"of": label, **result})
        traced, solved = median(result["trace_s"]), median(result["solve_s"])
        rows.append(
            [
                label,
                str(result["breakpoints"]),
                seconds(traced),
                seconds(solved),
                f"{traced / solved:.3f}",
                f"{result['relative_difference']:.1e}",
            ]
        )
        if result["breakpoints"] <= FEW_BREAKPOINTS:
            section.target(
                f"b: {label}, whole frontier against one solve",
                "under 1x its time",
                ratio(traced / solved),
                traced < solved,
            )
        section.target(
            f"b: {label}, E(T_star) agrees with SimpleMinCostFlow",
            "1e-9",
            f"{result['relative_difference']:.1e}",
            result["relative_difference"] <= 1e-9,
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


def compare(profile: Profile, microbatches: int, repetitions: int = REPETITIONS) -> dict[str, Any]:
    """Times of both, s, and the relative difference of their energies at T_star."""
    stages = profile.num_stages
    traced: list[float] = []
    solved: list[float] = []
    for _ in range(repetitions):
        begin = time.perf_counter()
        pipeline = Pipeline("1f1b", num_stages=stages, num_microbatches=microbatches)
        frontier = Relaxation(pipeline, profile).walk()
        traced.append(time.perf_counter() - begin)
        powers = frontier.blocking_power_10uw
        point = FlowPoint(build_network(pipeline, profile, powers), sum(powers))
        begin = time.perf_counter()
        point.solve()
        solved.append(time.perf_counter() - begin)
    least = frontier.energy_at(frontier.min_energy_time)
    return {
        "breakpoints": len(frontier.times),
        "trace_s": traced,
        "solve_s": solved,
        "energy_j": least,
        "relative_difference": abs(j_from_10fj(point.energy_10fj()) / least - 1),
    }
