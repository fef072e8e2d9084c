"""Memory that schedules take, and what is said of jobs that do not fit."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli_helpers import envplan
from envplan import Frontier, Pipeline, Profile, advise, trace_frontier
from envplan.profile.memory import memory_by_rank
from envplan.profiling.modelled import modelled_profile
from envplan.profiling.models import PRESETS
from envplan.profiling.small_parameters import SmallParameters
from envplan.profiling.training_job import BYTES_PER_PARAMETER, TrainingJob


@pytest.fixture(scope="module")
def profile() -> Profile:
    job = TrainingJob(model=PRESETS["llama3-8b"], num_stages=4, microbatch_size=1)
    return modelled_profile(job, "h200", name="llama", step=300)


@pytest.fixture(scope="module")
def frontier(profile: Profile) -> Frontier:
    return trace_frontier(Pipeline("1f1b", 4, 8), profile)


def test_1f1b_holds_as_many_microbatches_as_stages_follow(profile: Profile) -> None:
    ranks = memory_by_rank(Pipeline("1f1b", 4, 8), profile)
    assert ranks is not None
    assert [rank.microbatches_in_flight for rank in ranks] == [4, 3, 2, 1]
    footprint = profile.metadata.footprint
    assert footprint is not None
    for rank, saved, model in zip(
        ranks, footprint.activation_bytes, footprint.model_bytes, strict=True
    ):
        assert rank.activation_bytes == rank.microbatches_in_flight * saved
        assert rank.model_bytes == model


def test_gpipe_holds_all_microbatches(profile: Profile) -> None:
    ranks = memory_by_rank(Pipeline("gpipe", 4, 8), profile)
    assert ranks is not None
    assert [rank.microbatches_in_flight for rank in ranks] == [8] * 4


@given(
    schedule=st.sampled_from(["1f1b", "gpipe", "zb-h1", "zb-v", "interleaved"]),
    num_microbatches=st.sampled_from([4, 8, 12]),
)
def test_activations_are_those_of_forwards_without_their_last_backward(
    schedule: str, num_microbatches: int
) -> None:
    chunks = 2 if schedule in ("interleaved", "zb-v") else 1
    job = TrainingJob(model=PRESETS["llama3-8b"], num_stages=4, chunks=chunks, microbatch_size=1)
    profile = modelled_profile(job, "h200", name="llama", step=1200)
    pipeline = Pipeline(schedule, 4, num_microbatches, num_chunks=chunks)
    ranks = memory_by_rank(pipeline, profile)
    footprint = profile.metadata.footprint
    assert ranks is not None
    assert footprint is not None
    for stage, rank in enumerate(ranks):
        # An independent count: what each operation adds, summed up.
        added = [0.0]
        for op in pipeline.operations:
            sign = {"forward": 1, "backward": -1, "backward_weight": -1}.get(op.instruction, 0)
            if op.stage == stage:
                added.append(sign * footprint.activation_bytes[op.profile_stage])
        held = list(accumulate(added))
        assert rank.activation_bytes == pytest.approx(max(held))
        assert held[-1] == pytest.approx(0, abs=1.0)


def test_model_bytes_are_those_of_all_parameters(profile: Profile) -> None:
    footprint = profile.metadata.footprint
    assert footprint is not None
    # Norms are so small that they are left out.
    parameters = replace(PRESETS["llama3-8b"], small=SmallParameters()).parameters
    assert sum(footprint.model_bytes) == pytest.approx(BYTES_PER_PARAMETER * parameters, rel=1e-6)


def test_recomputation_saves_activations(profile: Profile) -> None:
    job = TrainingJob(model=PRESETS["llama3-8b"], num_stages=4, microbatch_size=1, recompute=True)
    recomputed = modelled_profile(job, "h200", name="llama", step=300).metadata.footprint
    kept = profile.metadata.footprint
    assert recomputed is not None
    assert kept is not None
    assert max(recomputed.activation_bytes) < 0.2 * max(kept.activation_bytes)


def test_a_profile_that_does_not_say_has_no_memory() -> None:
    pipeline = Pipeline("1f1b", 4, 8)
    assert memory_by_rank(pipeline, Profile.builtin("a40-gpt3-1.3b-4stage")) is None


def test_advice_leaves_out_what_does_not_fit(frontier: Frontier) -> None:
    everything = advise(frontier, best=2)
    needs = sorted(row.memory_gb for row in everything if row.memory_gb is not None)
    assert len(needs) == len(everything)
    limit_gb = next(row.memory_gb for row in everything if row.is_job)
    assert limit_gb is not None
    assert needs[-1] > limit_gb  # some schedule holds more
    fitting = advise(frontier, best=2, memory_gb=limit_gb)
    assert all(row.memory_gb is not None and row.memory_gb <= limit_gb for row in fitting)
    assert any(row.is_job for row in fitting)


def test_profile_warns_first_and_names_what_fits(tmp_path: Path) -> None:
    shape = ["--gpu", "h200", "--pp", 16, "--step", 600]
    ran = envplan("profile", "--model", "deepseek-v3", *shape, cwd=tmp_path)
    assert ran.code == 0
    first = ran.out.splitlines()[0]
    assert first.startswith("warning: this does not fit: it needs 9")
    assert "--pp 16 --tp 8 would" in first
    shape = ["--gpu", "h200", "--pp", 16, "--tp", 8, "--step", 600]
    ran = envplan("profile", "--model", "deepseek-v3", *shape, "-o", "fits.csv", cwd=tmp_path)
    assert "warning" not in ran.out
