"""The benchmarks' own helpers: they must measure the same problem on both sides."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from envplan import Pipeline, Profile
from envplan.frontier.network import build_network
from envplan.solve import Frontier, trace_frontier

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.against_flow import compare
from benchmarks.against_lowtime import duel
from benchmarks.flow_peer import FlowPoint
from benchmarks.report import ratio, seconds, table
from benchmarks.results import with_tables
from benchmarks.schedules import SCHEDULES, shape_of, split_profile
from benchmarks.tables import noisy_profile


@pytest.fixture(scope="module")
def profile() -> Profile:
    """Two stages with five options of every operation."""
    rows = [
        (stage, name, 1400 - 200 * k, scale * (1 + 0.15 * k), scale * (300 + 500 / (1 + k)))
        for stage in range(2)
        for name, scale in (("forward", 0.2), ("backward", 0.4))
        for k in range(5)
    ]
    return Profile.from_rows(rows)


@pytest.fixture(scope="module")
def frontier(profile: Profile) -> Frontier:
    return trace_frontier(Pipeline("1f1b", num_stages=2, num_microbatches=3), profile)


def test_min_cost_flow_at_the_waiting_power_costs_what_t_star_does(frontier: Frontier) -> None:
    powers = frontier.blocking_power_10uw
    point = FlowPoint(build_network(frontier.pipeline, frontier.profile, powers), sum(powers))
    point.solve()
    assert point.energy_10fj() == frontier.lower_bound_10fj(frontier.min_energy_time_ns)


def test_min_cost_flow_agrees_on_the_benchmarks_own_tables() -> None:
    assert compare(noisy_profile(4), 2, repetitions=1)["relative_difference"] == 0


def test_lowtime_plans_replayed_use_no_less_energy_than_ours(frontier: Frontier) -> None:
    pytest.importorskip("lowtime")
    from benchmarks import lowtime_peer

    walk = lowtime_peer.walk(frontier.pipeline, frontier.profile, 0.02, keep_every=1)
    assert walk.iterations == len(walk.stated_time_s) > 1
    for stated, frequencies in zip(walk.stated_time_s, walk.frequency_mhz, strict=True):
        d = duel(frontier, frequencies, float(stated))
        assert d.our_time_s <= d.real_time_s
        assert d.lower_bound_j <= d.our_energy_j <= d.their_energy_j


def test_everything_at_maximum_frequency_is_replayed_as_the_baseline_is(frontier: Frontier) -> None:
    import numpy as np

    count = len(frontier.pipeline.operations)
    d = duel(frontier, np.full(count, 1400, np.int32), 0.0)
    baseline = frontier.plan().predicted.baseline
    assert (d.real_time_s, d.their_energy_j) == (baseline.iteration_time_s, baseline.energy_j)


def test_noisy_tables_repeat_for_a_seed_and_differ_between_seeds() -> None:
    assert noisy_profile(4, seed=1).sha256 == noisy_profile(4, seed=1).sha256
    assert noisy_profile(4, seed=1).sha256 != noisy_profile(4, seed=2).sha256
    # Sixteen stages are made of the eight-stage profile.
    assert noisy_profile(16, noise=0.0).num_stages == 16


def test_figures_have_three_digits_and_tables_are_markdown() -> None:
    shown = [seconds(value) for value in (0.00221, 0.119, 415.2, 12.34)]
    assert shown == ["2.21 ms", "0.119 s", "415 s", "12.3 s"]
    assert ratio(9841.0) == "9,840x"
    assert table(["a", "b"], [["x", "1"]]) == "| a | b |\n| --- | ---: |\n| x | 1 |"


def test_tables_of_the_page_of_results_are_replaced_in_their_order() -> None:
    page = (Path(__file__).parents[1] / "docs" / "results.md").read_text(encoding="utf-8")
    tables = re.findall(r"(?:^\|.*\n)+", page, re.M)
    assert with_tables(page, [one.strip() for one in tables]) == page
    new = [f"| {k} |" for k in range(len(tables))]
    assert re.findall(r"^\|.*", with_tables(page, new), re.M) == new
    with pytest.raises(ValueError, match="shorter"):
        with_tables(page, new[1:])


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("model_stages", "operations"), [(8, 384), (16, 1536)])
def test_schedules_are_compared_at_about_equal_operations_of_the_same_model(
    name: str, model_stages: int, operations: int
) -> None:
    pipeline = shape_of(name, model_stages, operations).pipeline()
    assert pipeline.num_profile_stages == model_stages
    assert abs(len(pipeline.operations) - operations) <= 0.06 * operations


def test_a_split_profile_times_a_backward_whole_and_in_parts_which_differ_with_noise() -> None:
    for noise in (0.0, 0.002):
        profile = split_profile(2, noise=noise)
        one, other = (profile.table(1, f"backward_{part}").time_ns for part in ("input", "weight"))
        assert (one.tolist() != other.tolist()) == (noise > 0)
    profile = split_profile(2, noise=0.0)
    whole = profile.table(1, "backward").time_ns.sum()
    parts = (profile.table(1, f"backward_{part}").time_ns.sum() for part in ("input", "weight"))
    assert sum(parts) == pytest.approx(whole, rel=1e-6)
