"""When a slow pipeline is believed to be a straggler, and when it is not any more."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from envplan.runtime.stragglers import StragglerDetector


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
        assert believed == 1.0 or value >= believed * (1 - detector.band)
