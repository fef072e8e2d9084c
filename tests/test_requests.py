"""Any request on any pipeline: what comes out keeps it, to the nanosecond."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cli_helpers import small_profile
from envplan import Pipeline, Plan, Profile, trace_frontier, verify_plan
from envplan.errors import InputError, NoAnswerError
from envplan.planners import ZeusGlobal, ZeusPerStage
from envplan.replay import Machine, Replay
from envplan.request import Request
from envplan.request.limits import AveragePower, probability
from envplan.solve import Frontier
from envplan.units import POWER_UNITS_PER_W, j_from_10fj, s_from_ns
from plan_checks import assert_answers, keeps
from strategies import CONDITIONS, Case, frontiers, requests

#: What a later deadline, or another planner's plan, may be compared under.
LIMITS = ["latency", "min hold", "peak cap", "probability", "energy budget", "power cap"]


@pytest.fixture(autouse=True, scope="module")
def few_noisy_replays() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probability, "RUNS", 2000)
        patch.setattr(probability, "SEARCH_RUNS", 500)
        yield


def drawn_limits(frontier: Frontier, data: st.DataObject) -> dict[str, Any]:
    asked: dict[str, Any] = {"moves": 0.05}
    for name in sorted(data.draw(st.sets(st.sampled_from(LIMITS), max_size=2))):
        asked |= CONDITIONS[name](frontier, data.draw)
    return asked


def drawn_times(frontier: Frontier, data: st.DataObject, count: int) -> list[float]:
    span = frontier.slowest_time - frontier.min_time
    parts = st.lists(st.floats(0.0, 1.2), min_size=count, max_size=count)
    return [frontier.min_time + part * span for part in data.draw(parts)]


def planned(frontier: Frontier, time: float, asked: dict[str, Any]) -> Plan | None:
    try:
        return frontier.plan(time, **asked)
    except NoAnswerError:
        return None


@settings(max_examples=100)
@given(requests())
def test_a_plan_answers_its_request(case: Case) -> None:
    frontier, request = case
    try:
        plan = frontier.solve(request)
    except NoAnswerError:
        assert request.limits or request.latency_ns or request.run
        return
    assert_answers(frontier, request, plan)


@settings(max_examples=30)
@given(frontiers(), st.booleans(), st.data())
def test_a_later_deadline_never_costs_more_in_whatever_order_they_are_asked_for(
    frontier: Frontier, limited: bool, data: st.DataObject
) -> None:
    asked = drawn_limits(frontier, data) if limited else {}
    plans = []
    for time in sorted(drawn_times(frontier, data, 4), reverse=True):
        # As in a process of its own: nothing is remembered.
        anew = frontier.retraced(frontier.pipeline, frontier.profile)
        plans.append(planned(anew, time, asked))
    found = [plan.energy for plan in plans if plan is not None]
    assert found == sorted(found)
    assert None not in plans[: len(found)]


@pytest.mark.parametrize(
    ("name", "microbatches", "asked"),
    [
        ("a40-gpt3-1.3b-4stage", 6, {"switch_latency": 0.02, "min_dwell": 0.3}),
        ("h100-gpt3-175b-8stage", 4, {"min_dwell": 0.1}),
        ("a40-gpt3-1.3b-4stage", 6, {"probability": 0.9, "noise": 0.02}),
    ],
)
def test_a_later_deadline_never_costs_more_in_another_process(
    name: str, microbatches: int, asked: dict[str, Any]
) -> None:
    profile, energies = Profile.builtin(name), list[float]()
    for k in range(12):
        frontier = trace_frontier(Pipeline("1f1b", profile.num_stages, microbatches), profile)
        span = frontier.min_energy_time - frontier.min_time
        plan = planned(frontier, frontier.min_time + (k + 0.5) / 12 * span, {"moves": 0.05} | asked)
        energies += [] if plan is None else [plan.energy]
    assert len(energies) >= 11
    assert energies == sorted(energies, reverse=True)


def test_a_kept_plan_that_ends_just_after_its_own_deadline_is_one_for_later_deadlines() -> None:
    profile, energies = Profile.builtin("a40-gpt3-1.3b-4stage"), list[float]()
    for time in (4.27154, 4.27366):
        frontier = trace_frontier(Pipeline("1f1b", 4, 8), profile)
        energies.append(frontier.plan(target_time=time, switch_latency=0.02).energy)
    assert energies == sorted(energies, reverse=True)


@settings(max_examples=40)
@given(frontiers(), st.data())
def test_a_later_deadline_never_costs_more_under_the_same_limits(
    frontier: Frontier, data: st.DataObject
) -> None:
    asked = drawn_limits(frontier, data)
    early, late = (planned(frontier, t, asked) for t in sorted(drawn_times(frontier, data, 2)))
    if early is not None:
        assert late is not None
        assert late.energy <= early.energy


@settings(max_examples=30)
@given(frontiers(), st.data())
def test_no_plan_is_worse_than_one_clock_a_stage_in_the_same_time(
    frontier: Frontier, data: st.DataObject
) -> None:
    asked = drawn_limits(frontier, data)
    machine = Request.from_options(**asked).machine
    choices: list[Replay] = data.draw(
        st.sampled_from([ZeusGlobal(), ZeusPerStage()]).map(
            lambda planner: planner.undominated_replays(frontier)
        )
    )
    for rows in [frontier.problem.max_frequency_rows, *(one.rows for one in choices)]:
        replay = frontier.problem.replay(rows, machine)
        request = Request.from_options(s_from_ns(replay.makespan_ns), **asked)
        if replay.makespan_ns >= frontier.min_time_ns and keeps(frontier, request, rows.tolist()):
            ours = frontier.solve(request)
            assert ours.energy <= j_from_10fj(replay.energy_10fj * frontier.num_gpus)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"target_time": float("nan")}, "time_s should be"),
        ({"target_time": -1.0}, "time_s should be"),
        ({"slowdown": float("inf")}, "slowdown should be"),
        ({"slowdown": -1.0}, "slowdown should be"),
        *(
            ({name: value}, r"(switch_latency|time)_s should be")
            for name in ("switch_latency", "min_dwell")
            for value in (-0.1, float("nan"), 4000.0)
        ),
        *(
            ({name: value}, "power_w should be")
            for name in ("power_cap", "peak_power_cap")
            for value in (-1.0, float("nan"), 1e13)
        ),
        ({"probability": 0.0}, "probability should be"),
        ({"probability": 0.9999}, "probability should be"),
        ({"probability": float("nan")}, "probability should be"),
        ({"probability": 0.9, "noise": 0.0}, "noise should be"),
        ({"probability": 0.9, "noise": 1.5}, "noise should be"),
        ({"probability": 0.9, "noise": 0.1, "seed": -1}, "seed should be"),
        ({"noise": 0.1}, "noise goes with a probability"),
    ],
)
def test_numbers_out_of_range_are_refused(asked: dict[str, float], words: str) -> None:
    with pytest.raises(InputError, match=words):
        Request.from_options(**asked)


@given(frontiers(), st.data())
def test_no_choice_of_rows_undercuts_the_relaxed_bound_however_late_clocks_come(
    frontier: Frontier, data: st.DataObject
) -> None:
    problem = frontier.problem
    sizes = [len(problem.tables[number]) for number in problem.table.tolist()]
    rows = np.array([data.draw(st.integers(0, size - 1)) for size in sizes], np.int32)
    latency_ns = data.draw(st.sampled_from([0, 1, 3_000_000, 300_000_000]))
    replay = problem.replay(rows, Machine(latency_ns))
    # A ns of blocking power for each change of clock: what rounding up to whole ns may take off.
    changes = len(replay.parts.operation) - len(rows)
    allowance_10fj = changes * (max(frontier.blocking_power_10uw) + 9)
    if replay.makespan_ns >= frontier.min_time_ns:
        assert replay.energy_10fj >= frontier.lower_bound_10fj(replay.makespan_ns) - allowance_10fj
        sync_ns = replay.makespan_ns + data.draw(st.sampled_from([0, 10**8, 10**10]))
        until = replay.energy_until(sync_ns)
        assert until >= frontier.waiting_bound_10fj(sync_ns) - allowance_10fj


def test_the_highest_seed_is_as_good_as_any() -> None:
    frontier = trace_frontier(Pipeline("1f1b", 2, 2), small_profile(2))
    plan = frontier.plan(slowdown=0.2, probability=0.9, noise=0.01, seed=2**31 - 1)
    assert plan.predicted.robustness is not None
    assert verify_plan(plan, frontier.profile)


def test_a_cap_on_many_gpus_leaves_the_time_that_keeps_it() -> None:
    frontier = trace_frontier(Pipeline("1f1b", 2, 4), small_profile(2), replicas=3999)
    time_ns = (frontier.min_time_ns + 2 * frontier.min_energy_time_ns) // 3
    energy_10fj = frontier.lower_bound_10fj(time_ns) * frontier.num_gpus
    cap_10uw = -(-energy_10fj // time_ns)
    assert AveragePower(power_w=cap_10uw / POWER_UNITS_PER_W).earliest_ns(frontier) <= time_ns


def test_keywords_of_limits_are_those_that_limits_declare() -> None:
    assert Request.from_options(min_hold=0.1) == Request.from_options(min_dwell=0.1)
    with pytest.raises(TypeError, match="no keyword argument 'power_limit'"):
        Request.from_options(power_limit=100.0)
    with pytest.raises(InputError, match="noise goes with a probability"):
        Request.from_options(noise=0.1)
