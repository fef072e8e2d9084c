"""Plans for clocks that come late or must be held: `python -m benchmarks.switching`.

The first table says how far such plans are above the bound, what they save, how often they change
clocks and what finding them takes; the second, how much higher that bound is than one that does not
know late and held clocks. The third one compares plans with a switch latency to two simpler ways:
the usual plan, made for an earlier deadline found by bisection so that its replay is in time, and
one clock for each stage. Figures are modelled, like the built-in profiles.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from benchmarks.report import percent, seconds, table
from benchmarks.running import note
from envplan import Pipeline, Profile
from envplan.frontier.cache import TraceCache
from envplan.planners import ZeusPerStage
from envplan.request import Request
from envplan.simulation.iteration import Timeline, simulate
from envplan.solve import Frontier, trace_frontier
from envplan.solve.conditions import SearchConditions
from envplan.solve.late_bound import late_clock_bound_10fj
from envplan.solve.late_clock_bounds import LateClockBounds
from envplan.units import j_from_10fj, s_from_ns

LARGE_JOBS = (
    "sosp24-a100sxm-gpt3-175b-8stage",
    "sosp24-a100sxm-bloom-176b-8stage",
    "sosp24-a40-gpt3-175b-8stage",
    "h100-gpt3-175b-8stage",
)
LARGE_MICROBATCHES = 96
LARGE_SLOWDOWN = 0.01
#: Options of `Frontier.plan`, by what a row says of them.
CONDITIONS: dict[str, dict[str, Any]] = {
    "0 ms": {},
    "10 ms": {"switch_latency": 0.01},
    "20 ms": {"switch_latency": 0.02},
    "50 ms": {"switch_latency": 0.05},
    "20 ms, held 100 ms": {"switch_latency": 0.02, "min_dwell": 0.1},
    "20 ms, held 300 ms": {"switch_latency": 0.02, "min_dwell": 0.3},
    "20 ms, asked at the start": {"switch_latency": 0.02, "ask": "start"},
}

#: Microbatches and conditions whose bounds are compared with the relaxed one.
BOUNDS = (
    (24, "20 ms, asked at the start"),
    (96, "20 ms, asked at the start"),
    (96, "20 ms, held 100 ms"),
    (96, "20 ms, held 300 ms"),
)

JOBS = (
    ("a40-gpt3-1.3b-4stage", 32),
    ("a100-gpt3-1.3b-4stage", 32),
    ("h100-gpt3-175b-8stage", 96),
)
LATENCIES_MS = (5, 10, 20, 50)
SLOWDOWN = 0.02
STEPS = 8  # of the bisection


class Ways(NamedTuple):
    """Energies over the relaxed bound, as fractions of it; None where a way has no plan.

    Attributes:
        ours, earlier, constant: planned with the latency, for an earlier deadline, and with one
            clock a stage.
        late_s: by how much the usual plan misses the deadline, s.
        cpu_s: what ours took, s.
    """

    ours: float
    earlier: float | None
    constant: float | None
    late_s: float
    cpu_s: float


def compare(frontier: Frontier, deadline_ns: int, latency_s: float) -> Ways:
    """All ways for one deadline and latency."""
    begin = time.process_time()
    plan = frontier.plan(s_from_ns(deadline_ns), switch_latency=latency_s)
    cpu_s = time.process_time() - begin
    bound = plan.energy_lower_bound
    usual = _late(frontier, deadline_ns, latency_s)
    earlier = _bisected(frontier, deadline_ns, latency_s)
    constants = [
        candidate.energy_10fj
        for candidate in ZeusPerStage().undominated_replays(frontier)
        if candidate.makespan_ns <= deadline_ns
    ]
    constant = j_from_10fj(constants[-1]) if constants else None
    return Ways(
        plan.gap,
        None if earlier is None else earlier / bound - 1,
        None if constant is None else constant / bound - 1,
        s_from_ns(usual.iteration_time_ns - deadline_ns),
        cpu_s,
    )


def _late(frontier: Frontier, deadline_ns: int, latency_s: float) -> Timeline:
    """The usual plan for a deadline, replayed with the latency."""
    plan = frontier.plan(s_from_ns(deadline_ns))
    return simulate(plan, frontier.profile, switch_latency=latency_s)


def _bisected(frontier: Frontier, deadline_ns: int, latency_s: float) -> float | None:
    """Energy of the usual plan for the latest deadline whose replay is in time, J."""
    low, high = frontier.min_time_ns, deadline_ns
    energy = None
    for _ in range(STEPS):
        middle = (low + high) // 2
        timeline = _late(frontier, middle, latency_s)
        if timeline.iteration_time_ns <= deadline_ns:
            low, energy = middle, timeline.energy
        else:
            high = middle
    return energy


def large_jobs() -> list[list[str]]:
    """Rows of large jobs under each condition, their changes as few as can be."""
    rows = []
    for name in LARGE_JOBS:
        profile = Profile.builtin(name)
        pipeline = Pipeline("1f1b", profile.num_stages, LARGE_MICROBATCHES)
        for condition, options in CONDITIONS.items():
            note(f"{name}, {condition}")
            begin = time.process_time()
            # As in a process of its own: nothing is remembered from the row before.
            frontier = Frontier.trace(
                pipeline, profile, whole=False, cache=TraceCache(max_operations=0)
            )
            plan = frontier.plan(slowdown=LARGE_SLOWDOWN, **options)
            cpu_s = time.process_time() - begin
            rows.append(
                [
                    name,
                    condition,
                    percent(plan.gap, 2),
                    f"{plan.predicted.savings_percent:.2f}%",
                    f"{plan.clock_changes:,}",
                    seconds(cpu_s),
                ]
            )
            note(" | ".join(rows[-1]))
    return rows


def bounds() -> list[list[str]]:
    """How far bounds that know late and held clocks are above the relaxed one, by job.

    First that of the relaxed optimum's prices, then that of the prices looked for.
    """
    rows = []
    for microbatches, condition in BOUNDS:
        row = [f"{microbatches}", condition]
        for name in LARGE_JOBS:
            note(f"bounds of {name}, {microbatches} microbatches, {condition}")
            profile = Profile.builtin(name)
            pipeline = Pipeline("1f1b", profile.num_stages, microbatches)
            frontier = trace_frontier(pipeline, profile, whole=False)
            deadline_ns = int(frontier.min_time_ns * (1 + LARGE_SLOWDOWN))
            request = Request.from_options(slowdown=LARGE_SLOWDOWN, **CONDITIONS[condition])
            clocks = SearchConditions.of(request).clock_limits
            relaxed = frontier.lower_bound_10fj(deadline_ns)
            known = late_clock_bound_10fj(frontier, deadline_ns, clocks)
            raised = max(known, LateClockBounds(frontier, clocks).lower_bound_10fj(deadline_ns))
            over = [percent(max(0.0, bound / relaxed - 1), 2) for bound in (known, raised)]
            row.append(", ".join(over))
        rows.append(row)
    return rows


def main() -> None:
    """Print what late and held clocks cost."""
    header = ("job", "clocks come", "gap", "saved", "changes", "CPU")
    print(table(header, large_jobs()))
    print(table(("microbatches", "clocks come", *LARGE_JOBS), bounds()))
    rows = []
    for name, microbatches in JOBS:
        profile = Profile.builtin(name)
        frontier = trace_frontier(Pipeline("1f1b", profile.num_stages, microbatches), profile)
        deadline_ns = int(frontier.min_time_ns * (1 + SLOWDOWN))
        for latency_ms in LATENCIES_MS:
            note(f"{name}, {latency_ms} ms")
            ways = compare(frontier, deadline_ns, latency_ms / 1000)
            rows.append(
                [
                    f"{name}, {microbatches} microbatches, {latency_ms} ms",
                    *("-" if gap is None else percent(gap, 2) for gap in ways[:3]),
                    seconds(ways.late_s),
                    seconds(ways.cpu_s),
                ]
            )
    ways_header = (
        "job",
        "gap",
        "earlier deadline",
        "one clock a stage",
        "usual plan late by",
        "CPU",
    )
    print(table(ways_header, rows))


if __name__ == "__main__":
    main()
