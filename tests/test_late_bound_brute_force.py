"""The bound of late and held clocks against every choice there is, replayed by the oracle."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import envplan
import replay_oracle as oracle
from envplan import Frontier
from envplan.replay import Ask, Machine
from envplan.solve.late_bound import (
    ClockLimits,
    FlowPrices,
    late_clock_bound_10fj,
    late_waiting_bound_10fj,
)
from envplan.solve.raised_prices import raised_prices

_MS = 10**6
#: Stages, microbatches and clocks: at most some hundred choices.
_SHAPES = [(2, 2, 2), (1, 3, 2), (3, 1, 3), (1, 2, 4), (2, 1, 4)]


@dataclass(frozen=True)
class Choice:
    """What the replay of one choice takes, and whether it holds its clocks."""

    makespan_ns: int
    energy_10fj: int
    holds: bool


def _frontier(rng: np.random.Generator, shape: tuple[int, int, int]) -> Frontier:
    """A pipeline of operations of 4 to 30 ms, which ask for few clocks."""
    num_stages, num_microbatches, num_clocks = shape
    clocks_mhz = [800, 1100, 1300, 1500][-num_clocks:]
    rows = []
    for stage, instruction in product(range(num_stages), ("forward", "backward")):
        work_ms = rng.uniform(4, 15)
        powers_w = np.sort(rng.uniform(100, 400, num_clocks))
        for mhz, power_w in zip(clocks_mhz, powers_w.tolist(), strict=True):
            time_s = work_ms * rng.uniform(0.9, 1.1) * 1500 / mhz / 1000
            rows.append((stage, instruction, mhz, time_s, time_s * power_w))
    profile = envplan.Profile.from_rows(rows)
    pipeline = envplan.Pipeline("1f1b", num_stages, num_microbatches)
    blocking_w = float(rng.choice([0, 40, 90]))
    return envplan.trace_frontier(pipeline, profile, blocking_power=blocking_w)


def _all_choices(frontier: Frontier, clocks: ClockLimits) -> list[Choice]:
    pipeline, problem = frontier.pipeline, frontier.problem
    stage = [operation.stage for operation in pipeline.operations]
    powers_10uw = list(frontier.blocking_power_10uw)
    counts = [len(problem.tables[table]) for table in problem.table.tolist()]
    choices = []
    for rows in product(*map(range, counts)):
        replayed = oracle.replayed_with_requests(
            pipeline, frontier.profile, rows, clocks.machine.latency_ns, ask=clocks.machine.ask
        )
        makespan_ns = max(part.end_ns for part in replayed.parts)
        missing = oracle.hold_shortages(
            pipeline, replayed.requests, makespan_ns, clocks.min_dwell_ns
        )
        energy_10fj = oracle.energy_10fj(replayed.parts, stage, powers_10uw, makespan_ns)
        choices.append(Choice(makespan_ns, energy_10fj, not any(missing)))
    return choices


@given(
    seed=st.integers(0, 10**6),
    shape=st.sampled_from(_SHAPES),
    latency_ms=st.sampled_from([0, 3, 9, 25]),
    ask=st.sampled_from(["ahead", "start"]),
    dwell_ms=st.sampled_from([0, 12, 25, 45, 80]),
    share=st.floats(0, 1.5),
)
@settings(deadline=None, max_examples=60)
def test_no_choice_there_is_uses_less_than_the_bound(
    seed: int, shape: tuple[int, int, int], latency_ms: int, ask: Ask, dwell_ms: int, share: float
) -> None:
    frontier = _frontier(np.random.default_rng(seed), shape)
    clocks = ClockLimits(Machine.of(latency_ms * _MS, ask), dwell_ms * _MS)
    span_ns = frontier.min_energy_time_ns - frontier.min_time_ns
    deadline_ns = frontier.min_time_ns + round(share * span_ns)
    in_time = [
        choice
        for choice in _all_choices(frontier, clocks)
        if choice.holds and choice.makespan_ns <= deadline_ns
    ]
    least_10fj = min((choice.energy_10fj for choice in in_time), default=math.inf)
    assert late_clock_bound_10fj(frontier, deadline_ns, clocks) <= least_10fj
    raised = raised_prices(frontier, deadline_ns, clocks)
    if raised is not None:
        prices = FlowPrices.of_arcs(frontier.pipeline, raised.arcs_10uw(frontier.pipeline))
        assert late_clock_bound_10fj(frontier, deadline_ns, clocks, prices) <= least_10fj
    waiting_10uw = sum(frontier.blocking_power_10uw)
    least_until_10fj = min(
        (c.energy_10fj + waiting_10uw * (deadline_ns - c.makespan_ns) for c in in_time),
        default=math.inf,
    )
    assert late_waiting_bound_10fj(frontier, deadline_ns, clocks) <= least_until_10fj
