"""Caps on the power of all GPUs together at every moment of an iteration."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli_helpers import assert_refused, envplan, small_profile
from envplan import Frontier, Pipeline, Profile, simulate, trace_frontier
from envplan.check.plans import verify_plan
from envplan.enforce.apply import apply_plan
from envplan.enforce.supported_clocks import parse_clocks
from envplan.enforce.topology import Topology
from envplan.errors import InputError, NoAnswerError
from envplan.replay import Machine
from envplan.solve.peak_power import PeakPowerHeuristic
from envplan.units import ENERGY_UNITS_PER_J, POWER_UNITS_PER_W, in_10uw, ns_from_s_floor
from strategies import falling_profiles


def peaks_of_everything(frontier: Frontier) -> list[tuple[int, int, int]]:
    """(peak in 10 uW, makespan in ns, energy in 10 fJ) of every choice of rows there is."""
    problem = frontier.problem
    sizes = [len(problem.tables[number]) for number in problem.table.tolist()]
    replays = (
        problem.replay(np.array(rows, np.int32)) for rows in itertools.product(*map(range, sizes))
    )
    return [(replay.peak_10uw, replay.makespan_ns, replay.energy_10fj) for replay in replays]


@given(falling_profiles(2, max_options=3), st.floats(0.3, 1.0))
def test_against_every_choice_there_is(profile: Profile, share: float) -> None:
    frontier = trace_frontier(Pipeline("1f1b", 2, 1), profile)
    everything = peaks_of_everything(frontier)
    heuristic = PeakPowerHeuristic(frontier, Machine(), 0)
    assert heuristic.least_peak_10uw <= min(peak for peak, _, _ in everything)
    thriftiest = frontier.problem.replay(heuristic.least_power_choice).peak_10uw
    cap_w = round(share * max(peak for peak, _, _ in everything) / POWER_UNITS_PER_W, 3)
    fitting = [(time, energy) for peak, time, energy in everything if peak <= in_10uw(cap_w)]
    try:
        plan = frontier.plan(peak_power_cap=cap_w)
    except NoAnswerError:
        # The thriftiest choice is always tried, so a cap that it stays under is never refused.
        assert thriftiest > in_10uw(cap_w)
        return
    assert fitting
    assert plan.iteration_time >= min(fitting)[0] / 1e9


def test_a_deadline_that_the_cap_does_not_allow_names_the_fastest_found() -> None:
    frontier = trace_frontier(Pipeline("1f1b", 2, 4), small_profile(2, blocking=70.0))
    asked = {"peak_power_cap": 330, "moves": 0.1}
    fastest = frontier.plan(**asked)
    assert fastest.iteration_time > frontier.min_time
    with pytest.raises(NoAnswerError, match="the least time found is") as error:
        frontier.plan(frontier.min_time, **asked)
    assert fastest.iteration_time <= float(str(error.value).split()[-2])
    again = frontier.plan(fastest.iteration_time, **asked)
    assert again.iteration_time <= fastest.iteration_time


def test_check_rejects_a_plan_over_its_cap_and_apply_clocks_that_break_it() -> None:
    profile = small_profile(2, blocking=70.0)
    plan = trace_frontier(Pipeline("1f1b", 2, 4), profile).plan(peak_power_cap=400, moves=0.1)
    verify_plan(plan, profile)
    lower = plan.target.model_copy(update={"peak_power_w": 300.0})
    over = plan.model_copy(update={"target": lower, "stated_request": None})
    with pytest.raises(InputError, match=r"at the peak, more than the 300\.0 W allowed"):
        verify_plan(over, profile)
    with pytest.raises(InputError, match=r"target\.peak_power_w is 300\.0; the request means 400"):
        verify_plan(over.model_copy(update={"stated_request": plan.request}), profile)
    topology = Topology.for_job(plan.job)
    assert apply_plan(plan, profile, topology=topology).iteration_time_s == plan.iteration_time
    only_the_highest = parse_clocks("1740")
    with pytest.raises(InputError, match=r"W at the peak, more than the 400.0 W allowed"):
        apply_plan(plan, profile, topology=topology, clocks=only_the_highest)


def test_it_comes_close_to_the_best_of_all_choices() -> None:
    late = []
    for clocks in ((1740, 1200, 780), (1500, 1260, 900), (1620, 1560, 660)):
        profile = small_profile(2, clocks, blocking=70.0)
        frontier = trace_frontier(Pipeline("1f1b", 2, 2), profile)
        everything = peaks_of_everything(frontier)
        low, high = min(everything)[0], max(everything)[0]
        for share in (0.3, 0.7):
            cap_10uw = int(low + share * (high - low))
            best = min(time for peak, time, _ in everything if peak <= cap_10uw)
            found = frontier.plan(peak_power_cap=cap_10uw / POWER_UNITS_PER_W, moves=0.2)
            late.append(found.iteration_time / (best / 1e9) - 1)
    assert min(late) >= 0
    assert sorted(late)[len(late) // 2] < 0.01
    assert max(late) < 0.12


@pytest.fixture(scope="module")
def a40() -> Frontier:
    return trace_frontier(Pipeline("1f1b", 4, 4), Profile.builtin("a40-gpt3-1.3b-4stage"))


def test_rungs_under_a_cap_are_close_to_the_bound_without_it(a40: Frontier) -> None:
    rungs = a40.ladder(6, peak_power_cap=800.0, moves=0.2)
    free = a40.ladder(6)
    assert max(simulate(rung, a40.profile).peak_power for rung in rungs) > 760
    assert max(simulate(rung, a40.profile).peak_power for rung in free) > 800
    for rung in rungs:
        straggler = rung.target.deadline_s
        bound = a40.waiting_bound_10fj(ns_from_s_floor(straggler)) / ENERGY_UNITS_PER_J
        assert rung.energy + rung.waiting_energy(straggler) <= 1.01 * bound


def test_check_and_apply_reject_rungs_over_the_cap(a40: Frontier) -> None:
    plan = a40.plan(peak_power_cap=800.0, moves=0.1)
    slower = [p for p in a40.ladder(12) if p.iteration_time > plan.iteration_time]
    over = [p.as_rung() for p in slower]
    wild = plan.model_copy(update={"ladder": over})
    assert any(simulate(p, a40.profile).peak_power > 800 for p in slower)
    with pytest.raises(InputError, match=r"ladder\[\d+\]: the GPUs draw"):
        verify_plan(wild, a40.profile)
    applied = apply_plan(wild, a40.profile, topology=Topology.for_job(plan.job))
    assert applied.ladder is not None
    assert len(applied.ladder) < len(over)


def test_no_ladder_where_waiting_alone_draws_more_than_the_cap() -> None:
    frontier = trace_frontier(
        Pipeline("1f1b", 2, 2), small_profile(2), blocking_power=250.0, replicas=3
    )
    with pytest.raises(NoAnswerError, match="wait for a straggler draw 1500 W, more than the cap"):
        frontier.ladder(3, peak_power_cap=1400.0)


def test_solve_says_the_least_where_no_plan_stays_under_the_cap(tmp_path: Path) -> None:
    small_profile(2, blocking=70.0).save_csv(tmp_path / "profile.csv")
    refused = envplan("solve", "--peak-power-cap", "120", cwd=tmp_path)
    assert_refused(refused, 1, "stays under 120 W", "the least peak found is", "none can be below")
    shared = ("--replicas", 3, "--peak-power-cap", 200)
    refused = envplan("solve", *shared, cwd=tmp_path)
    assert_refused(refused, 1, "stays under 200 W")
    assert not (tmp_path / "plan.json").exists()
