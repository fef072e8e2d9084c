"""When a slow pipeline is believed to be a straggler, and when it is not any more."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envplan.enforce.freqplan import OperationKey
from envplan.pipeline import Pipeline
from envplan.runtime.stragglers import BAND, StragglerDetector, num_before_reduction


def beliefs(*lateness: float) -> list[float]:
    detector = StragglerDetector()
    return [detector.observe(2.0, 2.0 * late) for late in lateness]


def test_straggler_is_believed_after_three_steps() -> None:
    assert beliefs(1.0, 1.3, 1.3, 1.3) == [1.0, 1.0, 1.0, 1.3]


def test_one_slow_step_is_not_a_straggler() -> None:
    assert set(beliefs(1.0, 3.0, 1.0, 1.0, 3.0, 3.0, 1.0)) == {1.0}


def test_straggler_that_is_back_is_forgotten_at_once() -> None:
    assert beliefs(1.3, 1.3, 1.3, 1.0)[-1] == 1.0


def test_straggler_that_gets_faster_is_followed_at_once_and_slower_after_three_steps() -> None:
    assert beliefs(1.3, 1.3, 1.3, 1.2)[-1] == 1.2
    assert beliefs(1.3, 1.3, 1.3, 1.5, 1.5)[-1] == 1.3
    assert beliefs(1.3, 1.3, 1.3, 1.5, 1.5, 1.5)[-1] == 1.5


def test_small_changes_do_not_change_the_plan() -> None:
    assert set(beliefs(1.3, 1.3, 1.3, 1.31, 1.29, 1.30, 1.31, 1.32)[2:]) == {1.3}


@given(st.lists(st.floats(0.5, 3.0), min_size=1, max_size=50))
def test_belief_is_never_later_than_the_last_step_by_more_than_the_band(late: list[float]) -> None:
    detector = StragglerDetector()
    for value in late:
        believed = detector.observe(1.0, value)
        assert believed == 1.0 or value >= believed * (1 - BAND)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "interleaved-zb", "zb-v"])
def test_time_is_taken_until_gradients_may_meet_other_replicas(name: str) -> None:
    chunks = {} if name in ("gpipe", "1f1b") else {"num_chunks": 2}
    pipeline = Pipeline(name, num_stages=4, num_microbatches=8, **chunks)
    for stage in range(4):
        mine = [
            OperationKey(op.instruction, op.microbatch, op.chunk)
            for op in pipeline.operations
            if op.stage == stage
        ]
        cut = num_before_reduction(mine)
        assert 0 < cut < len(mine)
        # No chunk is done with its backwards before the cut, and one is right after it.
        left = {
            chunk: sum(name.startswith("backward") and c == chunk for name, _, c in mine[cut:])
            for chunk in range(len(chunks) + 1)
        }
        assert min(left.values()) == 1
        assert mine[cut][0].startswith("backward")


@pytest.mark.parametrize(
    "operations", [[OperationKey("backward", 0, 0)], [OperationKey("forward", 0, 0)] * 3]
)
def test_all_operations_count_where_none_comes_before_a_reduction(
    operations: list[OperationKey],
) -> None:
    assert num_before_reduction(operations) == len(operations)
