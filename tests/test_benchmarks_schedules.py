"""What the benchmark of schedules compares must be comparable."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.schedules import SCHEDULES, shape_of, split_profile


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("model_stages", "operations"), [(8, 384), (16, 1536)])
def test_schedules_are_compared_at_about_equal_operations_of_the_same_model(
    name: str, model_stages: int, operations: int
) -> None:
    pipeline = shape_of(name, model_stages, operations).pipeline()
    assert pipeline.num_profile_stages == model_stages
    assert abs(len(pipeline.operations) - operations) <= 0.06 * operations


def test_a_split_profile_times_a_backward_whole_and_in_parts() -> None:
    profile = split_profile(2, noise=0.0)
    whole = profile.table(1, "backward").time_ns.sum()
    parts = (profile.table(1, f"backward_{part}").time_ns.sum() for part in ("input", "weight"))
    assert sum(parts) == pytest.approx(whole, rel=1e-6)
    assert profile.num_stages == 2


def test_noise_makes_the_parts_of_a_backward_differ() -> None:
    profile = split_profile(2)
    inputs, weights = (profile.table(0, f"backward_{part}") for part in ("input", "weight"))
    assert inputs.time_ns.tolist() != weights.time_ns.tolist()
