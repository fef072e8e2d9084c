"""What of an iteration is followed, and what becomes of one that is not as planned."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envplan.pipeline import Pipeline
from envplan.runtime.plan_follower import IterationOutcome, PlanFollower, outcomes_in_words
from envplan.runtime.rank_schedule import rank_schedules
from envplan.runtime.run_log_reader import LoggedLine, iteration_counts_of_plan
from shim_helpers import frequency_plan

SCHEDULES = ("1f1b", "gpipe")


def keys(schedule: str, stages: int, microbatches: int, stage: int) -> list[tuple[str, int, int]]:
    operations = Pipeline(schedule, stages, microbatches).operations
    return [(op.instruction, op.microbatch, op.chunk) for op in operations if op.stage == stage]


def follower(schedule: str, stages: int, microbatches: int, stage: int) -> PlanFollower:
    plan = frequency_plan(Pipeline(schedule, stages, microbatches))
    return PlanFollower(rank_schedules(plan, plan.ranks[stage])[0])


@given(data=st.data(), schedule=st.sampled_from(SCHEDULES), stages=st.integers(1, 4))
def test_every_operation_of_a_known_microbatch_is_followed_whatever_their_number(
    data: Any, schedule: str, stages: int
) -> None:
    planned = data.draw(st.integers(1, 9))
    stage = data.draw(st.integers(0, stages - 1))
    follows = follower(schedule, stages, planned, stage)
    for actual in data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=4)):
        for key in keys(schedule, stages, actual, stage):
            operation = follows.begin(key)
            if key[1] < planned:
                assert operation is not None
                assert operation.key == key
                assert follows.end(key)
            else:
                assert follows.is_extra(key)
        is_planned = actual == planned
        assert follows.finish_iteration() is (
            IterationOutcome.FOLLOWED if is_planned else IterationOutcome.OTHER_MICROBATCHES
        )


@given(data=st.data(), stages=st.integers(1, 3))
def test_after_any_iteration_the_plan_is_followed_again(data: Any, stages: int) -> None:
    stage = data.draw(st.integers(0, stages - 1))
    planned = keys("1f1b", stages, 4, stage)
    follows = follower("1f1b", stages, 4, stage)
    for key in data.draw(st.lists(st.sampled_from([*planned, ("optimizer", 0, 0)]), max_size=9)):
        if follows.begin(key) is not None:
            follows.end(key)
        elif not follows.is_extra(key):
            follows.leave_plan()
    follows.finish_iteration()
    for key in planned:
        assert follows.begin(key) is not None
        assert follows.end(key)
    assert follows.finish_iteration() is IterationOutcome.FOLLOWED


@pytest.mark.parametrize("missing", [1, 3, 6])
def test_an_iteration_that_lacks_operations_was_cut_short(missing: int) -> None:
    follows = follower("1f1b", 1, 4, 0)
    for key in keys("1f1b", 1, 4, 0)[:-missing]:
        assert follows.begin(key)
        assert follows.end(key)
    outcome = follows.finish_iteration()
    whole_microbatches = missing % 2 == 0
    assert outcome is (
        IterationOutcome.OTHER_MICROBATCHES if whole_microbatches else IterationOutcome.CUT_SHORT
    )


def test_iterations_are_counted_in_a_line_unless_all_were_followed() -> None:
    assert outcomes_in_words({"followed": 9500, "no operation": 2}) is None
    counts = {"followed": 9412, "other number of microbatches": 60, "other order of operations": 28}
    assert outcomes_in_words(counts) == (
        "followed 9,412 of 9,500 iterations; 60 as far as their order is known: other number of "
        "microbatches; 28 at full speed: other order of operations"
    )


def test_refine_counts_as_the_run_log_does() -> None:
    lines = [
        LoggedLine(event="start", rank=0, plan_sha256="ab"),
        LoggedLine(event="start", rank=1, plan_sha256="ab"),
        LoggedLine(event="end", rank=1, iterations={"followed": 3}),
        LoggedLine(event="end", rank=0, iterations={"followed": 3, "cut short": 1}),
        LoggedLine(event="start", rank=0, plan_sha256="ab"),  # started again
        LoggedLine(event="end", rank=0, iterations={"followed": 5}),
        LoggedLine(event="start", rank=0, plan_sha256="cd"),
        LoggedLine(event="end", rank=0, iterations={"followed": 7}),
    ]
    assert iteration_counts_of_plan(lines, "ab") == {"followed": 8, "cut short": 1}
    assert iteration_counts_of_plan(lines, "ef") == {}
