"""Plans with few changes of clock: how they are counted, what they cost, that they hold."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import envplan
from envplan import Frontier
from envplan.check.plans import verify_plan
from envplan.replay import Replay, Search
from envplan.units import ENERGY_UNITS_PER_J, POWER_UNITS_PER_W
from strategies import frontiers


def changes_one_by_one(replay: Replay) -> int:
    """Requests of a replay, counted with a clock in hand that goes around each stage twice."""
    pipeline, changes = replay.problem.pipeline, 0
    for stage in range(pipeline.num_stages):
        begin, end = pipeline.stage_begin[stage : stage + 2].tolist()
        asked = [mhz for mhz in replay.frequency_mhz[begin:end].tolist() if mhz > 0]
        in_hand = asked[-1] if asked else 0
        for mhz in asked:
            changes += mhz != in_hand
            in_hand = mhz
    return changes


@settings(max_examples=40)
@given(frontiers(), st.integers(0, 2**32 - 1))
def test_the_search_counts_changes_as_the_replay_does(frontier: Frontier, seed: int) -> None:
    problem = frontier.problem
    sizes = np.array([len(table) for table in problem.tables])[problem.table]
    rows = np.random.default_rng(seed).integers(0, sizes).astype(np.int32)
    replay = problem.replay(rows)
    assert replay.num_changes == changes_one_by_one(replay)
    search = Search(
        problem,
        replay.starts_ns,
        replay.makespan_ns,
        price_10uw=POWER_UNITS_PER_W,
        change_price_10fj=ENERGY_UNITS_PER_J,
    )
    assert search.score(rows).changes == replay.num_changes
    found = search.improve(rows, 500, 1.0, seed % 7)
    assert search.score(found).changes == problem.replay(found).num_changes


@settings(max_examples=25)
@given(frontiers(), st.floats(0, 0.3))
def test_fewest_changes_are_no_more_and_cost_next_to_nothing(
    frontier: Frontier, slowdown: float
) -> None:
    free = frontier.plan(slowdown=slowdown, changes="free")
    fewest = frontier.plan(slowdown=slowdown)
    assert fewest.energy <= 1.001 * free.energy
    assert fewest.target.deadline_s >= fewest.iteration_time


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("sosp24-a100-gpt3-xl-4stage", 12),
        ("sosp24-a40-bert-huge-uncased-8stage", 20),
        ("sosp24-a100sxm-gpt3-175b-8stage", 170),
        ("h100-gpt3-175b-8stage", 220),
    ],
)
def test_measured_jobs_change_clocks_seldom(name: str, most: int) -> None:
    profile = envplan.Profile.builtin(name)
    stages = int(name.split("-")[-1].removesuffix("stage"))
    pipeline = envplan.Pipeline("1f1b", num_stages=stages, num_microbatches=24)
    frontier = envplan.trace_frontier(pipeline, profile)
    plan = frontier.plan(slowdown=0.01)
    assert plan.clock_changes <= most
    assert plan.energy <= 1.001 * frontier.plan(slowdown=0.01, changes="free").energy


@pytest.mark.parametrize(
    "options",
    [
        {"switch_latency": 0.02},
        {"switch_latency": 0.02, "ask": "start"},
        {"min_dwell": 0.1},
        {"peak_power_cap": 900.0},
        {"switch_latency": 0.02, "min_dwell": 0.1, "peak_power_cap": 900.0},
    ],
)
def test_changes_are_fewer_under_late_and_held_clocks_and_caps(options: dict[str, Any]) -> None:
    profile = envplan.Profile.builtin("a40-gpt3-1.3b-4stage")
    frontier = envplan.trace_frontier(envplan.Pipeline("1f1b", 4, 8), profile)
    free = frontier.plan(slowdown=0.05, changes="free", moves=0.2, **options)
    fewest = frontier.plan(slowdown=0.05, moves=0.2, **options)
    assert fewest.clock_changes < free.clock_changes
    assert fewest.energy <= 1.001 * free.energy
    verify_plan(fewest, profile)


@pytest.mark.parametrize(
    "options", [{}, {"switch_latency": 0.02}, {"switch_latency": 0.02, "min_dwell": 0.1}]
)
def test_later_deadlines_never_use_more_with_few_changes(options: dict[str, float]) -> None:
    profile = envplan.Profile.builtin("a40-gpt3-1.3b-4stage")
    frontier = envplan.trace_frontier(envplan.Pipeline("1f1b", 4, 6), profile)
    slowdowns = np.linspace(0.02, 0.06, 9)
    plans = [frontier.plan(slowdown=slowdown, moves=0.1, **options) for slowdown in slowdowns]
    energies = [plan.energy for plan in plans]
    assert energies == sorted(energies, reverse=True)


def test_a_long_pipeline_changes_less_window_by_window() -> None:
    profile = envplan.Profile.builtin("sosp24-a100-gpt3-xl-4stage")
    frontier = envplan.trace_frontier(envplan.Pipeline("1f1b", 4, 200), profile)
    free, fewest = (frontier.plan(slowdown=0.01, changes=how) for how in ("free", "fewest"))
    assert fewest.clock_changes < free.clock_changes / 4
    assert fewest.iteration_time <= fewest.target.deadline_s
    assert fewest.energy <= 1.001 * free.energy


def test_dearer_changes_are_fewer() -> None:
    profile = envplan.Profile.builtin("a40-gpt3-1.3b-4stage")
    frontier = envplan.trace_frontier(envplan.Pipeline("1f1b", 4, 8), profile)
    cheap, dear = (frontier.plan(slowdown=0.02, change_cost=j) for j in (0.01, 5.0))
    assert dear.clock_changes < cheap.clock_changes
    # A stall costs its time at blocking power.
    watts = profile_power(frontier)
    stalled = frontier.plan(slowdown=0.02, change_stall=5.0 / watts)
    assert stalled.clock_changes == dear.clock_changes


def profile_power(frontier: Frontier) -> float:
    powers = frontier.blocking_power_w
    return sum(powers) / len(powers)
