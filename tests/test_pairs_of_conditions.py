"""Every two conditions on a plan go together: each pair is solved, checked and simulated."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

from cli_helpers import small_profile
from envplan import (
    InputError,
    Pipeline,
    plan_replicas,
    replay_replicas,
    simulate,
    trace_frontier,
    verify_plan,
)
from envplan.costs import Rate, Run
from envplan.request import Request
from envplan.request.limits import probability
from envplan.solve import trace_job
from plan_checks import assert_answers
from strategies import slower

PIPELINE = Pipeline("1f1b", 2, 3, p2p_latency=0.002)
PROFILE = small_profile(2, blocking=70.0)
FRONTIER = trace_frontier(PIPELINE, PROFILE, gpus_per_stage=2, replicas=2)
LEAST = FRONTIER.min_time  # 1.1 s; most energy there, 1820 J, 1600 W, 1970 W at the peak
RUN = Run(
    iterations=5000,
    price=Rate(begins_s=[0.0, 6000.0], per_kwh=[0.1, 0.6], end_s=1e5),
    deadline_s=5000 * 1.5 * LEAST,
)

CONDITIONS: dict[str, dict[str, Any]] = {
    "slowdown": {"slowdown": 0.2},
    "min energy": {"min_energy": True},
    "straggler": {"straggler_time": 1.4 * LEAST},
    "energy budget": {"energy_budget": 0.97 * FRONTIER.plan().energy},
    "power cap": {"power_cap": 0.9 * FRONTIER.plan().average_power},
    "peak cap": {"peak_power_cap": 0.85 * simulate(FRONTIER.plan(), PROFILE).peak_power},
    "ramp": {"ramp_limit": 1800.0, "ramp_window": 0.4},
    "latency": {"switch_latency": 0.02},
    "min hold": {"min_dwell": 0.1},
    "probability": {"probability": 0.9, "noise": 0.02},
    "ladder": {"ladder": 3},
    "polish": {"polish": 0.05},
    "run": {"run": RUN},
}
#: What fixes the time; T_min itself cannot be held with a probability.
TIMED = {"slowdown", "min energy", "straggler", "energy budget", "run"}
TIMED |= {"power cap", "peak cap", "ramp"}
#: There is one deadline.
EXCLUDED = [{"slowdown", "min energy"}, {"slowdown", "run"}, {"min energy", "run"}]


@pytest.fixture(autouse=True)
def few_noisy_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probability, "RUNS", 1000)
    monkeypatch.setattr(probability, "SEARCH_RUNS", 200)


@pytest.mark.parametrize("pair", list(combinations(CONDITIONS, 2)), ids=" and ".join)
def test_two_conditions_go_together(pair: tuple[str, str]) -> None:
    asked = {"moves": 0.05} | CONDITIONS[pair[0]] | CONDITIONS[pair[1]]
    if set(pair) in EXCLUDED:
        with pytest.raises(InputError, match="exclude each other"):
            Request.from_options(**asked)
        return
    if "probability" in pair and not TIMED & set(pair):
        asked["slowdown"] = 0.1
    request = Request.from_options(**asked)
    frontier = trace_job(FRONTIER.plan().job, PROFILE)  # that remembers nothing
    plan = frontier.solve(request)
    assert_answers(frontier, request, plan)
    assert (plan.ladder is not None) == ("ladder" in pair)
    assert (plan.costs is not None) == ("run" in pair)
    assert (plan.predicted.robustness is not None) == ("probability" in pair)


@pytest.mark.parametrize("slowdown", [1.4, 2.0, 3.0])
def test_a_straggler_leaves_time_that_a_budget_does_not(slowdown: float) -> None:
    budget = 1.001 * FRONTIER.plan(min_energy=True).energy
    request = Request.from_options(straggler_time=slowdown * LEAST, energy_budget=budget)
    frontier = trace_job(FRONTIER.plan().job, PROFILE)  # that remembers nothing
    plan = frontier.solve(request)
    assert_answers(frontier, request, plan)
    assert plan.iteration_time < slowdown * LEAST
    assert plan.energy <= budget
    assert plan.predicted.until_straggler is not None


@pytest.mark.parametrize("share", [0.95, 0.8, 0.6])
def test_a_cap_moves_the_cheapest_run_to_where_it_is_kept(share: float) -> None:
    rate = Rate(begins_s=[0.0, 5000 * LEAST * 1.02], per_kwh=[0.1, 2.0], end_s=1e5)
    run = Run(iterations=5000, price=rate, deadline_s=5000 * 1.6 * LEAST)
    free = FRONTIER.solve(Request.from_options(run=run))
    request = Request.from_options(run=run, power_cap=share * free.average_power)
    frontier = trace_job(FRONTIER.plan().job, PROFILE)
    plan = frontier.solve(request)
    assert_answers(frontier, request, plan)
    soonest = FRONTIER.plan(power_cap=share * free.average_power)
    assert plan.iteration_time == soonest.iteration_time


SLOW = slower(PROFILE, 1.3)
KINDS = [trace_frontier(PIPELINE, PROFILE), trace_frontier(PIPELINE, SLOW, replicas=2)]
TOGETHER: dict[str, dict[str, Any]] = {
    "slowdown": {"slowdown": 0.1},
    "straggler": {"straggler_time": 1.7 * KINDS[1].min_time},
    "energy budget": {"energy_budget": 0.97 * plan_replicas(KINDS).energy},
    "power cap": {"power_cap": 0.9 * plan_replicas(KINDS).energy / plan_replicas(KINDS).sync_time},
    "peak cap": {"peak_power_cap": 1300.0},
    "ramp": {"ramp_limit": 8000.0, "ramp_window": 0.4},
    "latency": {"switch_latency": 0.01},
    "min hold": {"min_dwell": 0.1},
    "probability": {"probability": 0.9, "noise": 0.02},
    "ladder": {"ladder": 3},
    "run": {"run": RUN.model_copy(update={"deadline_s": 5000 * 2.0 * LEAST})},
}


@pytest.mark.parametrize("pair", list(combinations(TOGETHER, 2)), ids=" and ".join)
def test_unlike_replicas_go_with_every_two_conditions(pair: tuple[str, str]) -> None:
    asked = {"moves": 0.05} | TOGETHER[pair[0]] | TOGETHER[pair[1]]
    if set(pair) in EXCLUDED:
        return
    if "probability" in pair and not TIMED & set(pair):
        asked |= TOGETHER["slowdown"]
    planned = plan_replicas(KINDS, Request.from_options(**asked))
    for plan, profile in zip(planned.plans, (PROFILE, SLOW), strict=True):
        assert verify_plan(plan, profile)
    again = replay_replicas(list(zip(planned.plans, (PROFILE, SLOW), strict=True)))
    assert (again.sync_time, again.energy) == (planned.sync_time, planned.energy)
    assert planned.energy_lower_bound is not None
    assert planned.energy_lower_bound <= planned.energy * (1 + 1e-12)
    peaks = [
        simulate(plan, p).peak_power for plan, p in zip(planned.plans, (PROFILE, SLOW), strict=True)
    ]
    assert sum(peaks) <= asked.get("peak_power_cap", 1e9)
    assert planned.energy <= asked.get("energy_budget", 1e9)
    assert planned.energy <= asked.get("power_cap", 1e9) * planned.sync_time
    if "run" in asked:
        assert planned.costs is not None
        assert planned.costs.plan.time_s <= asked["run"].deadline_s
