"""EnvPipe's schedule: 1F1B with some forwards moved before the first backward."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envplan.errors import InputError
from envplan.pipeline import Pipeline
from envplan.pipeline.schedules import most_forwards_ahead


def orders(pipeline: Pipeline) -> list[str]:
    return [
        " ".join(f"{op.instruction[0]}{op.microbatch}" for op in pipeline.operations[first:last])
        for first, last in pairwise(pipeline.stage_begin.tolist())
    ]


def allowed_ahead(stages: int, microbatches: int) -> st.SearchStrategy[list[int]]:
    """Lists that the rules allow: falling, but for stages capped by the microbatches."""

    @st.composite
    def build(draw: st.DrawFn) -> list[int]:
        ahead: list[int] = []
        capped = True
        for stage in range(stages):
            most = most_forwards_ahead(stages, microbatches, stage)
            ahead.append(draw(st.integers(0, most if capped else min(most, ahead[-1]))))
            capped = ahead[-1] == most
        return ahead

    return build()


SHAPES = st.tuples(st.integers(1, 5), st.integers(1, 10))


def test_forwards_move_before_the_first_backward_and_nothing_else_changes() -> None:
    assert orders(Pipeline("envpipe", 3, 5, forwards_ahead=[2, 1, 0])) == [
        "f0 f1 f2 f3 f4 b0 b1 b2 b3 b4",
        "f0 f1 f2 b0 f3 b1 f4 b2 b3 b4",
        "f0 b0 f1 b1 f2 b2 f3 b3 f4 b4",
    ]


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (3, 2), (4, 4), (4, 9)])
def test_none_ahead_is_1f1b(stages: int, microbatches: int) -> None:
    pipeline = Pipeline("envpipe", stages, microbatches)
    assert pipeline.operations == Pipeline("1f1b", stages, microbatches).operations
    assert pipeline.forwards_ahead == (0,) * stages


@given(st.data(), SHAPES)
def test_every_allowed_list_runs_to_the_end(data: st.DataObject, shape: tuple[int, int]) -> None:
    stages, microbatches = shape
    ahead = data.draw(allowed_ahead(stages, microbatches))
    pipeline = Pipeline("envpipe", stages, microbatches, forwards_ahead=ahead)
    assert len(pipeline.order) == len(pipeline.operations) == 2 * stages * microbatches
    count = Counter((op.stage, op.instruction, op.microbatch) for op in pipeline.operations)
    assert set(count.values()) == {1}


@given(st.data(), SHAPES)
def test_a_stage_holds_as_many_more_activations_as_it_runs_forwards_ahead(
    data: st.DataObject, shape: tuple[int, int]
) -> None:
    stages, microbatches = shape
    ahead = data.draw(allowed_ahead(stages, microbatches))
    pipeline = Pipeline("envpipe", stages, microbatches, forwards_ahead=ahead)
    for stage, (first, last) in enumerate(pairwise(pipeline.stage_begin.tolist())):
        steps = [1 if op.instruction == "forward" else -1 for op in pipeline.operations[first:last]]
        held = int(np.cumsum(steps).max())
        assert held == min(stages - stage, microbatches) + ahead[stage]


@given(st.data(), SHAPES)
def test_job_round_trip(data: st.DataObject, shape: tuple[int, int]) -> None:
    ahead = data.draw(allowed_ahead(*shape))
    pipeline = Pipeline("envpipe", *shape, forwards_ahead=ahead, p2p_latency=0.001)
    job = pipeline.to_job()
    assert job["forwards_ahead"] == ahead
    again = Pipeline.from_job(job)
    assert again.operations == pipeline.operations
    assert again.to_job() == job


def test_other_schedules_have_no_such_field() -> None:
    assert "forwards_ahead" not in Pipeline("1f1b", 2, 2).to_job()
    assert Pipeline("1f1b", 2, 2).forwards_ahead == ()
    with pytest.raises(InputError, match="goes with schedule envpipe, not gpipe"):
        Pipeline("gpipe", 2, 2, forwards_ahead=[0, 0])


@pytest.mark.parametrize(
    ("ahead", "words"),
    [
        ([1, 0], "list of 3 numbers"),
        (7, "list of 3 numbers"),
        ([-1, 0, 0], r"forwards_ahead\[0\] must be at least 0"),
        ([1.5, 0, 0], r"forwards_ahead\[0\] must be a whole number"),
        ([6, 0, 0], r"forwards_ahead\[0\] must be at most 5, not 6"),
        ([1, 2, 0], r"forwards_ahead\[1\] must be at most 1, that of the stage before"),
        ([1, 1, 1], r"forwards_ahead\[2\] must be at most 0"),
    ],
)
def test_bad_list_is_refused(ahead: object, words: str) -> None:
    with pytest.raises(InputError, match=words):
        Pipeline("envpipe", 3, 8, forwards_ahead=ahead)  # type: ignore[arg-type]
    job = Pipeline("envpipe", 3, 8).to_job() | {"forwards_ahead": ahead}
    with pytest.raises(InputError, match=words):
        Pipeline.from_job(job)


def test_stage_capped_by_microbatches_may_be_followed_by_more() -> None:
    pipeline = Pipeline("envpipe", 4, 5, forwards_ahead=[1, 2, 3, 0])
    assert orders(pipeline)[2] == "f0 f1 f2 f3 f4 b0 b1 b2 b3 b4"
    assert len(pipeline.order) == len(pipeline.operations)


def test_chunks_are_refused() -> None:
    with pytest.raises(InputError, match="envpipe runs one model chunk"):
        Pipeline("envpipe", 2, 2, num_chunks=2)


@given(st.data(), SHAPES, st.integers(1, 12))
def test_with_microbatches_keeps_what_there_are_microbatches_for(
    data: st.DataObject, shape: tuple[int, int], microbatches: int
) -> None:
    ahead = data.draw(allowed_ahead(*shape))
    pipeline = Pipeline("envpipe", *shape, forwards_ahead=ahead, p2p_latency=0.002)
    other = pipeline.with_microbatches(microbatches)
    assert other.num_microbatches == microbatches
    assert other.p2p_latency_ns == pipeline.p2p_latency_ns
    assert all(new <= old for new, old in zip(other.forwards_ahead, ahead, strict=True))
    if microbatches == shape[1]:
        assert list(other.forwards_ahead) == ahead


def test_with_microbatches_keeps_schedule_and_chunks() -> None:
    pipeline = Pipeline("interleaved", 2, 4, num_chunks=3).with_microbatches(6)
    assert pipeline.to_job() == Pipeline("interleaved", 2, 6, num_chunks=3).to_job()


def test_custom_dag_keeps_its_microbatches() -> None:
    operations = [{"id": "a", "stage": 0, "instruction": "forward"}]
    pipeline = Pipeline.from_dag({"schema": "envplan/dag/v1", "operations": operations})
    with pytest.raises(InputError, match="custom DAG"):
        pipeline.with_microbatches(2)
