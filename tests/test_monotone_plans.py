"""Less time, sooner clocks and larger budgets: who asks for less is never answered worse."""

from __future__ import annotations

import inspect

import pytest

import envplan
from envplan import Frontier
from envplan.request import Request
from envplan.request.limits import LIMIT_OPTIONS


def frontier_of(name: str, microbatches: int) -> Frontier:
    profile = envplan.Profile.builtin(name)
    pipeline = envplan.Pipeline("1f1b", profile.num_stages, microbatches)
    return envplan.trace_frontier(pipeline, profile)


@pytest.mark.parametrize("name", ["sosp24-a100sxm-gpt3-175b-8stage", "h100-gpt3-175b-8stage"])
def test_late_clocks_that_cost_nothing_leave_the_plan_as_it_is(name: str) -> None:
    frontier = frontier_of(name, 8)
    at_once = frontier.plan(slowdown=0.01, moves=0.2)
    for latency in (0.01, 0.02):
        late = frontier.plan(slowdown=0.01, moves=0.2, switch_latency=latency)
        assert late.frequencies == at_once.frequencies
        assert late.energy == at_once.energy


@pytest.mark.parametrize("name", ["sosp24-a100sxm-gpt3-175b-8stage", "h100-gpt3-175b-8stage"])
def test_later_and_longer_held_clocks_save_no_more(name: str) -> None:
    frontier = frontier_of(name, 8)

    def energies(*dwells: float) -> list[float]:
        asked = ({"switch_latency": 0.02, "min_dwell": dwell} for dwell in dwells)
        return [frontier.plan(slowdown=0.01, moves=0.2, **options).energy for options in asked]

    late = [
        frontier.plan(slowdown=0.01, moves=0.2, switch_latency=latency).energy
        for latency in (0.0, 0.02, 0.1)
    ]
    assert late == sorted(late)
    assert energies(0.0, 0.1, 0.3) == sorted(energies(0.0, 0.1, 0.3))


def test_larger_budgets_are_kept_by_faster_plans() -> None:
    frontier = frontier_of("a40-gpt3-1.3b-4stage", 8)
    least_j = frontier.energies.min()
    span_j = frontier.energies.max() - least_j
    budgets_j = [float(least_j + span_j * share) for share in (0.05, 0.1, 0.15, 0.2, 0.3, 0.6)]
    times = [frontier.plan(energy_budget=budget_j).iteration_time for budget_j in budgets_j]
    assert times == sorted(times, reverse=True)


def test_the_signature_of_plan_has_every_option() -> None:
    keywords = set(inspect.signature(Frontier.plan).parameters) - {"self", "progress"}
    of_request = set(inspect.signature(Request.from_options).parameters) - {"limit_options"}
    of_limits = {option.keyword for option in LIMIT_OPTIONS}
    of_limits |= {option.older_keyword for option in LIMIT_OPTIONS} - {""}
    assert keywords == of_request | of_limits
