"""Prefill and decode apart, beside together: fleets that hold, and what they take."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envplan.errors import InputError, NoAnswerError
from envplan.serving.given_fleet import require_performance
from envplan.serving.instances import Instances
from envplan.serving.observed_trace import observe_trace
from envplan.serving.performance import Configuration
from envplan.serving.profile import ServingProfile
from envplan.serving.replay import compare_policies, replay_fixed
from envplan.serving.settings import Settings
from envplan.serving.split_fleet import SplitFleet, SplitFleetController
from envplan.serving.split_planner import fewest_instances
from envplan.serving.trace import Trace
from serving_helpers import write_profile

NAMES = ("together", "disaggregated")
CLOCKS = {1000: 2.0, 2000: 1.0}  # MHz: how much longer prompts take
SETTINGS = Settings(max_gpus=40, slo_quantile_percent=99.0)


def split_profile(folder: Path, **sidecar: float) -> ServingProfile:
    """Clocks make prompts quicker and hardly touch decoding, and cost power in both."""
    lines = []
    for mhz, slower in CLOCKS.items():
        watts = mhz / 10
        lines += [
            f"1,{mhz},idle,0,0,50",
            f"1,{mhz},prefill,10,{0.001 * slower},{200 + 2 * watts}",
            f"1,{mhz},prefill,1000,{0.1 * slower},{200 + 2 * watts}",
            f"1,{mhz},prefill,8000,{0.8 * slower},{200 + 2 * watts}",
            f"1,{mhz},decode,1,{0.018 + 0.002 * slower},{100 + watts}",
            f"1,{mhz},decode,64,{0.028 + 0.002 * slower},{150 + watts}",
        ]
    return ServingProfile.read_csv(write_profile(folder / "split.csv", lines, **sidecar))


def busy_trace(seconds: float = 120.0, rate: float = 12.0) -> Trace:
    random = np.random.default_rng(5)
    arrival_s = np.cumsum(random.exponential(1 / rate, round(seconds * rate)))
    count = len(arrival_s)
    inputs = random.integers(300, 900, count).astype(np.int32)
    outputs = random.integers(100, 300, count).astype(np.int32)
    classes = np.full(count, 4, np.uint8)  # MM
    return Trace("busy", arrival_s - arrival_s[0], inputs, outputs, classes)


def test_both_fleets_hold_and_are_named(tmp_path: Path) -> None:
    profile = split_profile(tmp_path, kv_bytes_per_token=1e5)
    together, apart = compare_policies(profile, busy_trace(), SETTINGS, policies=NAMES)
    for result in (together, apart):
        assert result.slo_attainment >= 0.99
        assert result.requests == len(busy_trace())
        assert result.energy_j == pytest.approx(result.series.power_w.sum() * 60)
    assert together.fleet is not None
    assert apart.fleet is not None
    assert "for prompts" in apart.fleet
    assert "@1000 to decode" in apart.fleet  # a high clock is no use for decoding


def test_a_fleet_for_one_phase_less_does_not_hold(tmp_path: Path) -> None:
    """The fewest of each phase are found: with one GPU less there is no fleet."""
    profile = split_profile(tmp_path, kv_bytes_per_token=1e5)
    best = compare_policies(profile, busy_trace(), SETTINGS, policies=("disaggregated",))[0]
    for gpus in (2, int(best.gpus_most)):
        settings = Settings(max_gpus=gpus, slo_quantile_percent=99.0)
        if gpus == 2:
            with pytest.raises(NoAnswerError, match="within 2 GPUs"):
                compare_policies(profile, busy_trace(), settings, policies=("disaggregated",))
        else:
            again = compare_policies(profile, busy_trace(), settings, policies=("disaggregated",))
            assert again[0].gpus_most <= gpus


def test_a_slow_network_makes_tokens_late(tmp_path: Path) -> None:
    profile = split_profile(tmp_path, kv_bytes_per_token=1e5)
    settings = Settings(max_gpus=40, slo_quantile_percent=99.0, link_bytes_s=1e5)
    with pytest.raises(NoAnswerError):
        compare_policies(profile, busy_trace(), settings, policies=("disaggregated",))


def test_without_the_size_of_contexts_nothing_is_sent(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="kv_bytes_per_token"):
        compare_policies(split_profile(tmp_path), busy_trace(), SETTINGS, policies=NAMES[1:])


@given(needed=st.integers(1, 70), most=st.integers(0, 64))
def test_the_fewest_instances_are_found(needed: int, most: int) -> None:
    found = fewest_instances(lambda count: count >= needed, most)
    assert found == (needed if needed <= most else None)


@given(seed=st.integers(0, 100), prompts=st.integers(1, 3), decoding=st.integers(1, 3))
@settings(max_examples=15, deadline=None)
def test_the_energy_of_both_pools_is_that_of_the_replay(
    seed: int, prompts: int, decoding: int
) -> None:
    with TemporaryDirectory() as folder:
        profile = split_profile(Path(folder), kv_bytes_per_token=1e5)
    random = np.random.default_rng(seed)
    arrival_s = np.cumsum(random.exponential(0.1, 300))
    inputs = random.integers(10, 3000, 300).astype(np.int32)
    outputs = random.integers(1, 300, 300).astype(np.int32)
    trace = Trace("drawn", arrival_s, inputs, outputs, np.full(300, 4, np.uint8))
    fleet = SplitFleet(
        Instances(Configuration(1, 2000), prompts), Instances(Configuration(1, 1000), decoding)
    )
    controller = SplitFleetController(observe_trace(profile, trace, SETTINGS), SETTINGS, fleet)
    results = controller.finish()
    energy_j = controller.pool_energy_j()
    assert len(energy_j) == 2
    assert sum(energy_j) == pytest.approx(float(results.slot_energy_j.sum()), rel=1e-9)
    idle_j = 50 * trace.duration_s
    assert energy_j[0] >= prompts * idle_j * (1 - 1e-9)
    assert energy_j[1] >= decoding * idle_j * (1 - 1e-9)


def test_a_trace_is_replayed_on_a_given_fleet_with_roles(tmp_path: Path) -> None:
    profile = split_profile(tmp_path, kv_bytes_per_token=1e5)
    fleet = SplitFleet(Instances(Configuration(1, 2000), 3), Instances(Configuration(1, 1000), 3))
    result = replay_fixed("given", fleet, observe_trace(profile, busy_trace(), SETTINGS), SETTINGS)
    assert result.gpus_mean == 6
    assert result.slo_attainment > 0.9
    require_performance(fleet, profile.performance)
    lacking = SplitFleet(fleet.first, Instances(Configuration(2, 1000), 1))
    with pytest.raises(InputError, match="no TP2 at 1000 MHz"):
        require_performance(lacking, profile.performance)
