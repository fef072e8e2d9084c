"""A limit on how steeply power changes, against sums of fractions on a dense grid of times."""

from __future__ import annotations

import json
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cli_helpers import done, refused, says
from envplan import Pipeline, Plan, Profile
from envplan.errors import NoAnswerError
from envplan.plan import replay_plan
from envplan.replay import Replay
from envplan.request.limits.power_ramp import PowerOverTime, _distinct
from envplan.solve import Frontier, trace_frontier
from envplan.units import ENERGY_UNITS_PER_J
from plan_checks import assert_answers

Steps = list[tuple[int, int]]  # how long, ns, and power, 10 uW


def power_over_time(steps: Steps) -> PowerOverTime:
    times_ns = np.cumsum([0, *(length for length, _ in steps)])
    return PowerOverTime(times_ns, np.array([power for _, power in steps], np.int64))


def energy(steps: Steps, begin: Fraction, length: Fraction) -> Fraction:
    """Energy of a window, in any iteration, one step after the other."""
    period = sum(step for step, _ in steps)
    begin -= begin // period * period
    used, end, at = Fraction(0), begin + length, Fraction(0)
    while at < end:
        for step, power in steps:
            overlap = min(end, at + step) - max(begin, at)
            used += max(overlap, Fraction(0)) * power
            at += step
    return used


def steepest(steps: Steps, window: int, parts: int = 2) -> Fraction:
    """The most by which neighbouring windows differ, at `parts` times in every ns."""
    period = sum(step for step, _ in steps)
    length = Fraction(window)
    return max(
        abs(energy(steps, at, length) - energy(steps, at - length, length))
        for at in (Fraction(part, parts) for part in range(period * parts))
    )


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 9)), min_size=1, max_size=5),
    st.integers(1, 40),
)
@example([(3, 0), (3, 9)], 6)
@example([(3, 0), (3, 9)], 3)
@example([(5, 4)], 7)
def test_the_steepest_change_is_that_of_a_dense_grid(steps: Steps, window: int) -> None:
    assert power_over_time(steps).steepest_change(window).change_10fj == steepest(steps, window)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 9)), min_size=1, max_size=4),
    st.integers(1, 20),
)
def test_numbers_beyond_64_bits_are_as_exact(steps: Steps, window: int) -> None:
    scale = 2**59
    large = power_over_time([(length, power * scale) for length, power in steps])
    assert large.steepest_change(window).change_10fj == steepest(steps, window) * scale


def test_a_window_of_one_iteration_or_several_has_no_ramp() -> None:
    power = power_over_time([(2, 1), (3, 7)])
    assert [power.steepest_change(window).change_10fj for window in (5, 10, 50)] == [0, 0, 0]


def test_windows_longer_than_an_iteration_differ_as_their_remainder_does() -> None:
    power = power_over_time([(2, 1), (3, 7), (1, 4)])
    assert power.steepest_change(4).change_10fj == power.steepest_change(4 + 3 * 6).change_10fj
    assert power.steepest_change(4).change_10fj == power.steepest_change(6 - 4).change_10fj


def test_powers_of_replicas_add_up_moment_by_moment() -> None:
    one, other = power_over_time([(2, 1), (3, 7)]), power_over_time([(4, 2), (1, 0)])
    total = PowerOverTime.sum([one.times(3), other.times(10)])
    assert total.times_ns.tolist() == [0, 2, 4, 5]
    assert total.power_10uw.tolist() == [23, 41, 21]


@pytest.mark.parametrize(("window", "steepest_10fj"), [(1, 9), (2, 18), (3, 27), (5, 9)])
def test_a_square_wave_is_steepest_at_its_edge(window: int, steepest_10fj: int) -> None:
    assert power_over_time([(3, 0), (3, 9)]).steepest_change(window).change_10fj == steepest_10fj


# Plans


@pytest.fixture(scope="module")
def frontier() -> Frontier:
    profile = Profile.builtin("sosp24-a100-gpt3-xl-4stage")
    return trace_frontier(Pipeline("1f1b", 4, 6), profile)


def refused_ramp(frontier: Frontier, **options: Any) -> float:
    """The least ramp that a refusal names."""
    with pytest.raises(NoAnswerError, match="the least found is") as error:
        frontier.plan(**options)
    return float(str(error.value).split()[-2])


@pytest.mark.parametrize("target", [{}, {"slowdown": 0.03}, {"min_energy": True}])
@pytest.mark.parametrize("window", [0.25, 1.0, 30.0])
def test_what_a_refusal_names_can_be_had(
    frontier: Frontier, target: dict[str, Any], window: float
) -> None:
    least = refused_ramp(frontier, ramp_limit=0.0, ramp_window=window, **target)
    plan = frontier.plan(ramp_limit=least, ramp_window=window, **target)
    assert_answers(frontier, plan.request, plan)


def test_a_steeper_limit_never_takes_longer(frontier: Frontier) -> None:
    least = refused_ramp(frontier, ramp_limit=1.0)
    times = [frontier.plan(ramp_limit=least * part).iteration_time for part in (1, 1.1, 1.2, 2)]
    assert times == sorted(times, reverse=True)
    assert times[0] > times[-1] == frontier.min_time


def test_it_goes_below_what_slower_plans_alone_reach(frontier: Frontier) -> None:
    def ramp(plan: Plan) -> float:
        replay = replay_plan(plan, frontier.profile)
        power = PowerOverTime.of_replay(replay, 0)
        return power.steepest_change(10**9).change_10fj / ENERGY_UNITS_PER_J

    slower = frontier.sample_plans(8) + frontier.sample_plans(4, beyond=True)
    assert refused_ramp(frontier, ramp_limit=1.0) < 0.95 * min(map(ramp, slower))


def test_other_limits_are_kept_as_well(frontier: Frontier) -> None:
    alone = frontier.plan(ramp_limit=1.05 * refused_ramp(frontier, ramp_limit=1.0))
    limit = {"ramp_limit": 1.1 * refused_ramp(frontier, ramp_limit=1.0)}
    for options in ({"power_cap": 0.99 * alone.average_power}, {"switch_latency": 0.01}):
        plan = frontier.plan(**limit, **options, moves=0.1)
        assert_answers(frontier, plan.request, plan)


def test_solve_check_and_apply_know_the_limit(folder: Path) -> None:
    job = "sosp24-a100-gpt3-xl-4stage -m 6"
    says(done(f"solve {job} --ramp-limit 280 --ramp-window 1s"), "W/s between two windows of 1 s")
    says(done("check plan.json"), "<= 280.0 W/s")
    plan = json.loads((folder / "plan.json").read_text())
    assert plan["target"]["kind"] == "fastest"
    (limit,) = plan["request"]["limits"]
    assert limit == {"kind": "power-ramp", "ramp_w_per_s": 280.0, "window_s": 1.0}
    plan["request"]["limits"][0]["ramp_w_per_s"] = 100.0
    (folder / "plan.json").write_text(json.dumps(plan))
    refused("check plan.json", "more than the 100 W/s allowed")
    refused("apply plan.json", "more than the 100 W/s allowed")
    refused(f"solve {job} --ramp-limit 10", "the least found is", code=1)
    refused(f"solve {job} --ramp-window 2s", "ramp_window goes with a ramp_limit (--ramp-limit W)")


@given(st.lists(st.integers(-5, 5), min_size=1, max_size=30))
def test_distinct_times_are_those_of_numpy(times_ns: list[int]) -> None:
    assert _distinct(np.array(times_ns)).tolist() == np.unique(times_ns).tolist()


def test_a_refusal_looks_once_at_each_replay(
    frontier: Frontier, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: Counter[bytes] = Counter()
    of_replay = PowerOverTime.of_replay

    def counted(replay: Replay, sync_ns: int) -> PowerOverTime:
        looked[replay.rows.tobytes()] += 1
        return of_replay(replay, sync_ns)

    monkeypatch.setattr(PowerOverTime, "of_replay", counted)
    with pytest.raises(NoAnswerError, match="no plan was found whose power changes"):
        frontier.plan(ramp_limit=1e-3)
    # Starts lead to some replays in several ways, but none was looked at for each question anew.
    assert sum(looked.values()) < 2 * len(looked)
