"""Where an iteration is in its schedule. No clocks, no threads.

An iteration that leaves the order of the plan is off the plan until its end. After
MAX_MISMATCHED_STEPS such iterations in a row the plan is not tried again.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final

from envplan.enforce.freqplan import OperationKey
from envplan.runtime.rank_schedule import RankSchedule, ScheduledOperation

__all__ = ["MAX_MISMATCHED_STEPS", "FollowState", "PlanFollower", "StepOutcome"]

MAX_MISMATCHED_STEPS: Final = 3


class FollowState(Enum):
    """Whether the order of operations is the plan's."""

    ON_PLAN = auto()
    OFF_PLAN_UNTIL_STEP = auto()
    OFF_PLAN_FOR_GOOD = auto()


class StepOutcome(Enum):
    """The outcome of an iteration."""

    FOLLOWED = auto()
    MISMATCHED = auto()
    EMPTY = auto()


class PlanFollower:
    """Compares operations as they run with a schedule.

    Args:
        schedule: of the first iteration.

    Attributes:
        schedule: of this iteration.
        next_schedule: of the next one; may be set at any time, from any thread.
        state: whether this iteration is on the plan.
        position: how many operations of it have ended.
        is_running: whether an operation has begun and not ended.
        current: the operation that runs, or else the next one; None where there is no further one,
            or the iteration is off the plan.
        num_mismatched: the iterations in a row, until now, that left the plan.
        num_empty: the iterations in a row, until now, without an operation.
    """

    def __init__(self, schedule: RankSchedule) -> None:
        self.next_schedule = schedule
        self.num_mismatched = 0
        self.num_empty = 0
        self.current: ScheduledOperation | None = None
        self._start_step()

    def begin(self, key: tuple[str, int, int]) -> ScheduledOperation | None:
        """An operation begins: it if it is the planned one, or else None."""
        current = self.current
        if current is None or current.key != key:
            return None
        self.is_running = True
        return current

    def end(self, key: tuple[str, int, int]) -> bool:
        """An operation ends: whether it is the one that runs."""
        current = self.current
        if not self.is_running or current is None or current.key != key:
            return False
        self.is_running = False
        self.position += 1
        operations = self.schedule.operations
        self.current = operations[self.position] if self.position < len(operations) else None
        return True

    def leave_plan(self) -> None:
        """The order is not the plan's: nothing is followed until the iteration is over."""
        self.state = FollowState.OFF_PLAN_UNTIL_STEP
        self.is_running = False
        self.current = None

    def is_incomplete(self) -> bool:
        """Whether operations of the plan are missing, in an iteration that has begun."""
        return self.is_running or (self.position > 0 and self.current is not None)

    def finish_step(self) -> StepOutcome:
        """The iteration is over: start the next one, by the next schedule."""
        if self.state is not FollowState.ON_PLAN:
            outcome = StepOutcome.MISMATCHED
            self.num_mismatched += 1
            self.num_empty = 0
        elif self.position > 0:
            outcome = StepOutcome.FOLLOWED
            self.num_mismatched = 0
            self.num_empty = 0
        else:
            outcome = StepOutcome.EMPTY
            self.num_empty += 1
        self._start_step()
        return outcome

    def _start_step(self) -> None:
        self.schedule = self.next_schedule
        self.position = 0
        self.is_running = False
        gives_up = self.num_mismatched >= MAX_MISMATCHED_STEPS
        self.state = FollowState.OFF_PLAN_FOR_GOOD if gives_up else FollowState.ON_PLAN
        operations = self.schedule.operations
        self.current = operations[0] if operations and not gives_up else None

    @property
    def expected(self) -> OperationKey | None:
        """The operation that is planned to run now; None: none."""
        return self.current.key if self.current is not None else None
