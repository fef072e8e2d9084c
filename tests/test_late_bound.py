"""Plans whose clocks come late or are held state a bound that knows it, and `check` proves it."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import envplan
from cli_helpers import done, refused, says
from envplan import Frontier, Plan, verify_plan
from envplan.replay import Machine
from envplan.solve.late_bound import (
    ClockLimits,
    FlowPrices,
    cheapest_stage_paths,
    late_clock_bound_10fj,
    late_waiting_bound_10fj,
)
from envplan.solve.raised_prices import raised_prices
from envplan.solve.stage_path_starts import stage_path_starts
from envplan.units import ENERGY_UNITS_PER_J

_MS = 10**6
_HELD = ClockLimits(Machine(), 300 * _MS)
_LATE = ClockLimits(Machine(20 * _MS, "start"))


@pytest.fixture(scope="module")
def frontier() -> Frontier:
    profile = envplan.Profile.builtin("sosp24-a100sxm-gpt3-175b-8stage")
    return envplan.trace_frontier(envplan.Pipeline("1f1b", 8, 12), profile)


@pytest.mark.parametrize(
    "options",
    [
        {"switch_latency": 0.02, "ask": "start"},
        {"min_dwell": 0.1},
        {"min_dwell": 0.1, "switch_latency": 0.02},
    ],
)
def test_plan_states_a_bound_above_the_relaxed_one_that_check_proves(
    frontier: Frontier, options: dict[str, Any]
) -> None:
    plan = frontier.plan(slowdown=0.01, changes="free", moves=0.05, **options)
    relaxed_j = frontier.energy_at(plan.target.deadline_s)
    assert plan.predicted.bound == "late-clocks"
    assert relaxed_j * 1.001 < plan.energy_lower_bound <= plan.energy
    again = Plan.from_document(json.loads(plan.to_json()))
    proof = verify_plan(again, frontier.profile)
    assert any("clocks as late and held as stated" in sentence for sentence in proof)


@pytest.mark.parametrize("clocks", [_HELD, _LATE], ids=["held", "late"])
def test_raised_prices_give_a_higher_bound(frontier: Frontier, clocks: ClockLimits) -> None:
    deadline_ns = round(frontier.min_time_ns * 1.01)
    prices = raised_prices(frontier, deadline_ns, clocks)
    assert prices is not None
    relaxed_10fj = late_clock_bound_10fj(frontier, deadline_ns, clocks)
    flow = FlowPrices.of_arcs(frontier.pipeline, prices.arcs_10uw(frontier.pipeline))
    raised_10fj = late_clock_bound_10fj(frontier, deadline_ns, clocks, flow)
    assert raised_10fj > relaxed_10fj * 1.0005


def test_prices_of_a_short_pipeline_hold_for_a_long_one() -> None:
    """They are alike in the middle, so their number does not grow with the pipeline."""
    profile = envplan.Profile.builtin("a40-gpt3-1.3b-4stage")
    clocks, sizes = ClockLimits(Machine(), 300 * _MS), []
    for num_microbatches in (96, 200):
        pipeline = envplan.Pipeline("1f1b", 4, num_microbatches)
        frontier = envplan.trace_frontier(pipeline, profile, whole=False)
        deadline_ns = round(frontier.min_time_ns * 1.01)
        prices = raised_prices(frontier, deadline_ns, clocks)
        assert prices is not None
        relaxed_10fj = late_clock_bound_10fj(frontier, deadline_ns, clocks)
        flow = FlowPrices.of_arcs(pipeline, prices.arcs_10uw(pipeline))
        assert late_clock_bound_10fj(frontier, deadline_ns, clocks, flow) > relaxed_10fj
        sizes.append(len(prices.prices_uw) * len(prices.prices_uw[0]))
    assert sizes[0] == sizes[1]


@given(data=st.data())
@settings(deadline=None, max_examples=30)
def test_any_prices_give_a_bound_below_every_plan(data: st.DataObject) -> None:
    """Even prices that are no flow: what is missing comes from the beginning or goes to the end."""
    profile = envplan.Profile.builtin("a40-gpt3-1.3b-4stage")
    pipeline = envplan.Pipeline("1f1b", 4, 4)
    frontier = envplan.trace_frontier(pipeline, profile)
    clocks = ClockLimits(Machine.of(data.draw(st.sampled_from([0, 10, 40])) * _MS, "start"))
    top_10uw = data.draw(st.sampled_from([10**6, 10**8, 10**9]))
    seed = data.draw(st.integers(0, 10**6))
    rng = np.random.default_rng(seed)
    arcs_10uw = rng.integers(0, top_10uw, len(pipeline.succ))
    prices = FlowPrices.of_arcs(pipeline, arcs_10uw)
    num_rows = np.array([len(table) for table in frontier.problem.tables])[frontier.problem.table]
    rows = rng.integers(0, num_rows).astype(np.int32)
    replay = frontier.problem.replay(rows, clocks.machine)
    bound_10fj = late_clock_bound_10fj(frontier, replay.makespan_ns, clocks, prices)
    assert bound_10fj <= replay.energy_10fj


def test_with_clocks_at_once_the_bound_is_the_relaxed_one(frontier: Frontier) -> None:
    plan = frontier.plan(slowdown=0.01, changes="free", moves=0.05)
    assert plan.predicted.bound == "relaxation"
    assert plan.energy_lower_bound == frontier.energy_at(plan.target.deadline_s)


def test_until_a_straggler_has_finished_the_bound_knows_late_clocks_too(
    frontier: Frontier,
) -> None:
    straggler_s = 1.02 * frontier.min_time
    plan = frontier.plan(straggler_time=straggler_s, min_dwell=0.3, changes="free", moves=0.05)
    until = plan.predicted.until_straggler
    assert until is not None
    straggler_ns = round(straggler_s * 1e9)
    assert (
        until.energy_lower_bound_j
        > frontier.waiting_bound_10fj(straggler_ns) / ENERGY_UNITS_PER_J * 1.0005
    )
    verify_plan(Plan.from_document(json.loads(plan.to_json())), frontier.profile)


def test_check_refuses_a_bound_that_late_clocks_do_not_have(folder: Path) -> None:
    done("solve a40-gpt3-1.3b-4stage -m 8 --slowdown 3 --min-dwell 300 --quiet")
    says(done("check plan.json"), "clocks as late and held as stated")
    document = json.loads(Path("plan.json").read_text())
    predicted = document["predicted"]
    assert predicted["bound"] == "late-clocks"
    bound_j = (predicted["energy_lower_bound_j"] + predicted["energy_j"]) / 2
    predicted |= {"energy_lower_bound_j": bound_j, "gap": predicted["energy_j"] / bound_j - 1}
    Path("plan.json").write_text(json.dumps(document))
    refused("check plan.json", "energy_lower_bound_j is", "can be proved")
    predicted["late_clock_prices"]["prices_uw"].pop()
    Path("plan.json").write_text(json.dumps(document))
    refused("check plan.json", "does not have one row for each kind of precedence")


def _grow(bounds_10fj: list[int]) -> bool:
    """Whether bounds do not fall, but by what they allow for rounding."""
    return all(before <= after * (1 + 1e-9) for before, after in pairwise(bounds_10fj))


@pytest.mark.parametrize("percent", [0, 1, 10])
def test_bound_grows_with_the_dwell(frontier: Frontier, percent: int) -> None:
    deadline_ns = round(frontier.min_time_ns * (1 + percent / 100))
    bounds_10fj = []
    for dwell_ms in (0, 20, 50, 100, 200, 300, 1000):
        clocks = ClockLimits(Machine(), dwell_ms * _MS)
        bounds_10fj.append(late_clock_bound_10fj(frontier, deadline_ns, clocks))
    assert _grow(bounds_10fj)


@pytest.mark.parametrize("ask", ["ahead", "start"])
def test_bound_grows_with_the_latency(frontier: Frontier, ask: Literal["ahead", "start"]) -> None:
    deadline_ns = round(frontier.min_time_ns * 1.01)
    bounds_10fj = []
    for latency_ms in (0, 1, 2, 5, 10, 15, 20, 25):
        clocks = ClockLimits(Machine.of(latency_ms * _MS, ask))
        bounds_10fj.append(late_clock_bound_10fj(frontier, deadline_ns, clocks))
    assert _grow(bounds_10fj)


def test_at_the_same_prices_the_bound_grows_with_the_dwell(frontier: Frontier) -> None:
    deadline_ns = round(frontier.min_time_ns * 1.01)
    prices = raised_prices(frontier, deadline_ns, _HELD)
    assert prices is not None
    flow = FlowPrices.of_arcs(frontier.pipeline, prices.arcs_10uw(frontier.pipeline))
    clocks = [ClockLimits(Machine(), ms * _MS) for ms in (0, 50, 100, 200, 300, 400)]
    assert _grow([late_clock_bound_10fj(frontier, deadline_ns, c, flow) for c in clocks])


def test_bound_knows_deadlines_beyond_t_star(frontier: Frontier) -> None:
    """Nothing forces a plan to use more time than it needs, so the bound stays."""
    clocks = ClockLimits(Machine(), 300 * _MS)
    star_ns = frontier.min_energy_time_ns
    at_star_10fj = late_clock_bound_10fj(frontier, star_ns, clocks)
    assert at_star_10fj > frontier.lower_bound_10fj(star_ns) * 1.0001
    later_10fj = late_clock_bound_10fj(frontier, 2 * star_ns, clocks)
    assert later_10fj == pytest.approx(at_star_10fj, rel=1e-6)
    waiting_10fj = late_waiting_bound_10fj(frontier, round(1.05 * star_ns), clocks)
    assert waiting_10fj > frontier.waiting_bound_10fj(round(1.05 * star_ns))


@pytest.mark.parametrize("clocks", [_HELD, _LATE], ids=["held", "late"])
def test_starts_end_near_the_deadline(frontier: Frontier, clocks: ClockLimits) -> None:
    deadline_ns = round(frontier.min_time_ns * 1.03)
    starts = stage_path_starts(frontier, deadline_ns, clocks)
    assert len(starts) > 1
    for rows in starts:
        replay = frontier.problem.replay(rows, clocks.machine)
        assert 0.9 * deadline_ns < replay.makespan_ns < 1.1 * deadline_ns


def test_starts_hold_their_clocks(frontier: Frontier) -> None:
    deadline_ns = round(frontier.min_time_ns * 1.03)
    start, *_ = stage_path_starts(frontier, deadline_ns, ClockLimits(Machine(), 300 * _MS))
    prices = FlowPrices.relaxed(frontier, deadline_ns)
    free = cheapest_stage_paths(frontier.problem, prices, Machine()).rows
    num_short = [
        len(list(frontier.problem.replay(rows).short_dwells(300 * _MS))) for rows in (start, free)
    ]
    assert num_short[0] < num_short[1] / 4


def test_no_starts_before_t_min(frontier: Frontier) -> None:
    clocks = ClockLimits(Machine(), 300 * _MS)
    assert stage_path_starts(frontier, frontier.min_time_ns - 1, clocks) == []
