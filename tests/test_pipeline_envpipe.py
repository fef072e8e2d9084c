"""EnvPipe's schedule: 1F1B with some forwards moved before the first backward."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envplan.errors import InputError
from envplan.pipeline import Pipeline
from schedule_oracles import orders_of


def orders(pipeline: Pipeline) -> list[str]:
    return [
        " ".join(f"{op.instruction[0]}{op.microbatch}" for op in order)
        for order in orders_of(pipeline)
    ]


@st.composite
def allowed(draw: st.DrawFn) -> tuple[int, int, list[int]]:
    """Stages, microbatches, and forwards ahead that the rules allow.

    At most M - (S - s), falling, but for stages capped by that.
    """
    stages, microbatches = draw(st.integers(1, 5)), draw(st.integers(1, 10))
    ahead: list[int] = []
    capped = True
    for stage in range(stages):
        most = max(0, microbatches - (stages - stage)) if stage < stages - 1 else 0
        ahead.append(draw(st.integers(0, most if capped else min(most, ahead[-1]))))
        capped = ahead[-1] == most
    return stages, microbatches, ahead


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


@given(allowed(), st.integers(1, 12))
def test_a_stage_holds_as_many_more_activations_as_it_runs_forwards_ahead(
    case: tuple[int, int, list[int]], other: int
) -> None:
    stages, microbatches, ahead = case
    pipeline = Pipeline("envpipe", stages, microbatches, forwards_ahead=ahead, p2p_latency=0.001)
    for stage, order in enumerate(orders_of(pipeline)):
        steps = [1 if op.instruction == "forward" else -1 for op in order]
        assert np.cumsum(steps).max() == min(stages - stage, microbatches) + ahead[stage]
    job = pipeline.to_job()
    assert job["forwards_ahead"] == ahead
    assert Pipeline.from_job(job).operations == pipeline.operations
    changed = pipeline.with_microbatches(other)
    assert (changed.num_microbatches, changed.p2p_latency_ns) == (other, 1_000_000)
    assert all(new <= old for new, old in zip(changed.forwards_ahead, ahead, strict=True))
    assert list(pipeline.with_microbatches(microbatches).forwards_ahead) == ahead


@pytest.mark.parametrize(
    ("ahead", "words"),
    [
        ([1, 0], "list of 3 numbers"),
        (7, "list of 3 numbers"),
        ([-1, 0, 0], r"forwards_ahead\[0\] must be at least 0"),
        ([1.5, 0, 0], r"forwards_ahead\[0\] must be a whole number"),
        ([6, 0, 0], r"forwards_ahead\[0\] must be at most 5, not 6"),
        ([1, 2, 0], r"forwards_ahead\[1\] must be at most 1, not 2"),
        ([1, 1, 1], r"forwards_ahead\[2\] must be at most 0"),
    ],
)
def test_bad_list_is_refused(ahead: object, words: str) -> None:
    with pytest.raises(InputError, match=words):
        Pipeline("envpipe", 3, 8, forwards_ahead=ahead)  # type: ignore[arg-type]


def test_other_schedules_have_no_such_argument() -> None:
    assert "forwards_ahead" not in Pipeline("1f1b", 2, 2).to_job()
    with pytest.raises(InputError, match="goes with schedule envpipe, not gpipe"):
        Pipeline("gpipe", 2, 2, forwards_ahead=[0, 0])


def test_stage_capped_by_microbatches_may_be_followed_by_more() -> None:
    pipeline = Pipeline("envpipe", 4, 5, forwards_ahead=[1, 2, 3, 0])
    assert orders(pipeline)[2] == "f0 f1 f2 f3 f4 b0 b1 b2 b3 b4"
