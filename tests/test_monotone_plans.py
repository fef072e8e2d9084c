"""Less time, sooner clocks and larger budgets: who asks for less is never answered worse."""

from __future__ import annotations

import inspect
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import envplan
from envplan import Frontier
from envplan.frontier.cache import TraceCache
from envplan.request import Request
from envplan.request.limits import LIMIT_OPTIONS
from envplan.solve.late_bound import FlowPrices


def frontier_of(name: str, microbatches: int) -> Frontier:
    profile = envplan.Profile.builtin(name)
    pipeline = envplan.Pipeline("1f1b", profile.num_stages, microbatches)
    return envplan.trace_frontier(pipeline, profile)


def test_late_clocks_that_cost_nothing_leave_the_plan_as_it_is() -> None:
    frontier = frontier_of("sosp24-a100sxm-gpt3-175b-8stage", 6)
    at_once = frontier.plan(slowdown=0.01)
    for latency in (0.01, 0.02):
        late = frontier.plan(slowdown=0.01, switch_latency=latency)
        assert late.frequencies == at_once.frequencies
        assert late.energy == at_once.energy


#: What fewer changes may cost, and half as much again where a plan for clocks at once is kept that
#: late clocks make end somewhat later.
MOST_FOR_FEWER_CHANGES = 1.0015

#: Two searches of the same quality differ by so much.
LUCK = 1 + 1e-4


@pytest.mark.parametrize("name", ["sosp24-a100sxm-gpt3-175b-8stage", "sosp24-a40-gpt3-175b-8stage"])
def test_later_and_longer_held_clocks_save_no_more(name: str) -> None:
    frontier = frontier_of(name, 6)
    late = [{"switch_latency": latency} for latency in (0.0, 0.02, 0.1)]
    held = [{"switch_latency": 0.02, "min_dwell": dwell} for dwell in (0.0, 0.1, 0.3)]
    for conditions in (late, held):
        plans = [frontier.plan(slowdown=0.01, **options) for options in conditions]
        for easier, harder in pairwise(plans):
            assert easier.energy <= harder.energy * LUCK


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"switch_latency": 0.1},
        {"switch_latency": 0.02, "ask": "start", "changes": "free"},
        {"switch_latency": 0.02, "min_dwell": 0.3, "changes": "free"},
    ],
)
def test_later_deadlines_never_use_more_in_a_large_pipeline(options: dict[str, Any]) -> None:
    # Searches of few moves differ by much more from one deadline to the next than usual ones do.
    profile = envplan.Profile.builtin("a40-gpt3-1.3b-4stage")
    pipeline = envplan.Pipeline("1f1b", profile.num_stages, 66)
    energies_j = []
    for slowdown in np.linspace(0.01, 0.012, 5):
        # As in a process of its own: nothing is remembered.
        frontier = Frontier.trace(
            pipeline, profile, whole=False, cache=TraceCache(max_operations=0)
        )
        energies_j.append(frontier.plan(slowdown=slowdown, moves=0.01, **options).energy)
    assert energies_j == sorted(energies_j, reverse=True)


#: Shares of the way from the least budget to the most, where larger ones once were answered by
#: slower plans.
BUDGET_SHARES = np.arange(54, 83) / 99

#: Shares of the way from T_min to T_star around which later deadlines once cost more.
ONCE_DEARER_LATER = (0.14, 0.17, 0.2, 0.58, 0.93)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"switch_latency": 0.02},
        {"min_dwell": 0.1},
        {"switch_latency": 0.02, "min_dwell": 0.1},
        {"switch_latency": 0.02, "min_dwell": 0.3},
        {"switch_latency": 0.05, "ask": "start"},
        {"switch_latency": 0.02, "peak_power_cap": 1100.0},
    ],
)
def test_later_deadlines_never_use_more_however_clocks_come(options: dict[str, Any]) -> None:
    frontier = frontier_of("a40-gpt3-1.3b-4stage", 8)
    span = frontier.min_energy_time - frontier.min_time
    shares = np.concatenate([share + np.arange(0, 0.02, 1 / 300) for share in ONCE_DEARER_LATER])
    times = [float(frontier.min_time + share * span) for share in shares]
    plans = [frontier.plan(target_time=time, **options) for time in times]
    energies = [plan.energy for plan in plans]
    assert energies == sorted(energies, reverse=True)
    for time, plan in zip(times, plans, strict=True):
        free = frontier.plan(target_time=time, changes="free", **options)
        assert plan.energy <= free.energy * MOST_FOR_FEWER_CHANGES


@pytest.mark.parametrize(
    ("name", "microbatches"), [("sosp24-a40-gpt3-175b-8stage", 24), ("a40-gpt3-1.3b-4stage", 6)]
)
def test_prices_of_a_deadline_are_the_same_whatever_was_asked_before(
    name: str, microbatches: int
) -> None:
    profile = envplan.Profile.builtin(name)
    pipeline = envplan.Pipeline("1f1b", profile.num_stages, microbatches)
    flows = []
    for earlier_parts in ((), (0.5,), (0.1, 0.9), (0.2003,)):
        frontier = Frontier.trace(
            pipeline, profile, whole=False, cache=TraceCache(max_operations=0)
        )
        span_ns = frontier.min_energy_time_ns - frontier.min_time_ns
        for part in earlier_parts:
            frontier.lower_bound_10fj(frontier.min_time_ns + int(part * span_ns))
        deadline_ns = frontier.min_time_ns + span_ns // 5
        flows.append(FlowPrices.relaxed(frontier, deadline_ns).arcs_10uw)
    for flow in flows[1:]:
        np.testing.assert_array_equal(flow, flows[0])


@pytest.mark.parametrize("budget", ["energy_budget", "power_cap"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"switch_latency": 0.02, "min_dwell": 0.1},
        {"switch_latency": 0.05, "ask": "start"},
    ],
)
def test_larger_budgets_are_kept_by_faster_plans(budget: str, options: dict[str, Any]) -> None:
    frontier = frontier_of("a40-gpt3-1.3b-4stage", 6)
    energies_j, times_s = frontier.energies, frontier.times
    least, most = energies_j.min(), energies_j.max()
    if budget == "power_cap":
        least, most = (energies_j / times_s).min(), (energies_j / times_s).max()
    budgets = [float(least + (most - least) * share) for share in BUDGET_SHARES]
    times = [frontier.plan(**{budget: one}, **options).iteration_time for one in budgets]
    assert times == sorted(times, reverse=True)


def test_the_signature_of_plan_has_every_option() -> None:
    keywords = set(inspect.signature(Frontier.plan).parameters) - {"self", "progress"}
    of_request = set(inspect.signature(Request.from_options).parameters) - {"limit_options"}
    of_limits = {option.keyword for option in LIMIT_OPTIONS}
    of_limits |= {option.older_keyword for option in LIMIT_OPTIONS} - {""}
    assert keywords == of_request | of_limits
