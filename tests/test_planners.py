"""The registry, the baselines, and what each planner answers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envplan.errors import InputError, NoAnswerError
from envplan.pipeline import Pipeline
from envplan.plan import Plan
from envplan.planners import PLANNERS, ZeusGlobal, ZeusPerStage, answer, planner_named
from envplan.profile import Profile
from envplan.request import Request
from envplan.solve import Frontier, trace_frontier
from envplan.solve.single_clocks import ClockRows
from envplan.units import ns_from_s
from envplan.verify import verify_plan
from strategies import frontiers

# Two stages, the second twice as slow: 100 ms against 50 ms forward at the top.
LOPSIDED = [
    (stage, name, mhz, 0.05 * (stage + 1) * work * 1500 / mhz, energy * work * (stage + 1))
    for stage in (0, 1)
    for name, work in (("forward", 1), ("backward", 2))
    for mhz, energy in ((500, 6.0), (750, 7.0), (1000, 9.0), (1500, 14.0))
]


def lopsided() -> Frontier:
    return trace_frontier(Pipeline("1f1b", 2, 3), Profile.from_rows(LOPSIDED), blocking_power=60)


def used(plan: Plan) -> list[set[int]]:
    return [set(stage) for stage in plan.frequencies]


def test_unknown_planner_lists_the_known_ones() -> None:
    with pytest.raises(InputError, match=r'unknown planner "zeus"; known: max_frequency, zeus_gl'):
        planner_named("zeus")
    assert all(planner_named(name).name == name for name in PLANNERS)


@pytest.mark.parametrize("name", sorted(PLANNERS))
@given(frontier=frontiers(3, 4), data=st.data())
@settings(max_examples=15)
def test_every_plan_of_every_planner_is_proved_by_check(
    name: str, frontier: Frontier, data: st.DataObject
) -> None:
    planner = PLANNERS[name]
    plan = planner.plan(frontier)
    assert plan.planner == name
    assert verify_plan(plan, frontier.profile)
    if planner.takes_target:
        later = int(ns_from_s(plan.iteration_time) * data.draw(st.sampled_from([1.0, 1.1, 3.0])))
        slower = planner.plan(frontier, later)
        assert ns_from_s(slower.iteration_time) <= later
        assert slower.energy <= plan.energy
        assert verify_plan(slower, frontier.profile)


@pytest.mark.parametrize("name", sorted(PLANNERS))
def test_target_that_is_too_early_has_no_answer_and_some_planners_take_none(name: str) -> None:
    error, words = NoAnswerError, r"0\.100000000 s"
    if name in ("envpipe", "max_frequency"):
        error, words = InputError, f"planner {name} takes no target"
    with pytest.raises(error, match=words):
        PLANNERS[name].plan(lopsided(), 10**8)


def test_zeus_global_takes_the_cheapest_clock_in_time() -> None:
    frontier = lopsided()
    base = ns_from_s(ZeusGlobal().plan(frontier).iteration_time)
    assert used(ZeusGlobal().plan(frontier, base * 3 // 2 - 1)) == [{1500}, {1500}]
    assert used(ZeusGlobal().plan(frontier, base * 3 // 2)) == [{1000}, {1000}]
    # At 500 MHz operations save less than the longer wait costs.
    assert used(ZeusGlobal().plan(frontier, base * 100)) == [{750}, {750}]


def test_zeus_per_stage_balances_forwards_with_the_slowest_stage() -> None:
    frontier = lopsided()
    fastest = ZeusPerStage().plan(frontier)
    assert used(fastest) == [{750}, {1500}]
    # At 1000 MHz stage 1's forward takes 150 ms, as long as stage 0's at 500 MHz.
    slower = ZeusPerStage().plan(frontier, ns_from_s(fastest.iteration_time) * 3 // 2)
    assert used(slower) == [{500}, {1000}]


def test_clocks_that_cost_time_and_energy_are_not_on_zeus_frontier() -> None:
    rows = [(0, name, mhz, t, e) for name in ("forward", "backward")
            for mhz, t, e in ((600, 0.3, 9.0), (900, 0.2, 10.0), (1200, 0.2, 12.0))]  # fmt: skip
    frontier = trace_frontier(Pipeline("1f1b", 1, 2), Profile.from_rows(rows))
    assert used(ZeusGlobal().plan(frontier)) == [{900}]
    assert used(PLANNERS["max_frequency"].plan(frontier)) == [{1200}]


def test_missing_clock_is_replaced_by_the_next_higher_one() -> None:
    rows = [
        (0, "forward", 900, 0.2, 3.0),
        (0, "forward", 1200, 0.1, 5.0),
        (0, "backward", 1000, 0.3, 6.0),
        (0, "backward", 1100, 0.2, 9.0),
    ]
    frontier = trace_frontier(Pipeline("1f1b", 1, 1), Profile.from_rows(rows), blocking_power=0)
    found = [
        PLANNERS["zeus_global"].plan(frontier, c.makespan_ns).frequencies
        for c in ZeusGlobal().candidates(frontier)
    ]
    assert found == [[[1200, 1100]], [[1200, 1000]], [[900, 1000]]]


def test_clock_of_several_configs_is_the_fastest_one() -> None:
    rows = [
        (0, "forward", 900, 0.3, 1.0, "slow"),
        (0, "forward", 900, 0.2, 3.0, "fast"),
        (0, "forward", 900, 0.2, 4.0, "dear"),
    ]
    table = Profile.from_rows([*rows, (0, "backward", 900, 0.1, 1.0, "")]).table(0, "forward")
    clocks = ClockRows.of(table)
    assert clocks.mhz == (900,)
    assert table.config[clocks.row[0]] == "fast"


def test_operation_without_clock_control_runs_as_it_is() -> None:
    rows = [row for row in LOPSIDED if row[:2] != (0, "forward")]
    rows.append((0, "forward", 0, 0.05, 3.0))
    frontier = trace_frontier(Pipeline("1f1b", 2, 2), Profile.from_rows(rows))
    for planner in PLANNERS.values():
        assert 0 in planner.plan(frontier).frequencies[0]


@pytest.mark.parametrize(
    "asked",
    [
        {"power_cap": 500.0},
        {"energy_budget": 500.0},
        {"switch_latency": 0.01, "target_time": 9.0},
        {"polish": 1.0},
        {"ladder": 2},
    ],
)
def test_other_planners_refuse_what_they_do_not_know(asked: dict[str, Any]) -> None:
    frontier, request = lopsided(), Request.asking(**asked)
    with pytest.raises(InputError, match="planner zeus_global knows times only"):
        answer(ZeusGlobal(), frontier, request)


def test_our_planner_answers_whole_requests_and_others_their_times() -> None:
    frontier = lopsided()
    for asked in ({"slowdown": 0.2, "min_hold": 0.5}, {"min_energy": True}, {"straggler_time": 9}):
        request = Request.asking(**asked)
        assert answer(PLANNERS["frontier"], frontier, request) == frontier.solve(request)
    star = answer(ZeusGlobal(), frontier, Request.asking(min_energy=True))
    assert star == ZeusGlobal().plan(frontier, frontier.min_energy_time_ns)
    waiting = answer(ZeusGlobal(), frontier, Request.asking(straggler_time=9))
    assert waiting.iteration_time > ZeusGlobal().plan(frontier).iteration_time
    assert waiting.predicted.until_straggler is not None
