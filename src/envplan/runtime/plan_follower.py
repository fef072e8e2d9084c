"""Where an iteration is in its schedule. No clocks, no threads.

An iteration with fewer or more microbatches than planned is followed as far as its order is known:
operations of microbatches that do not come are passed over, and those of further microbatches are
not planned. An iteration whose order is another is off the plan until its end. The next one is
compared with the plan again, whatever came before.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto

from envplan.enforce.freqplan import OperationKey
from envplan.runtime.rank_schedule import RankSchedule, ScheduledOperation

__all__ = ["FollowState", "IterationOutcome", "PlanFollower", "outcomes_in_words"]


class FollowState(Enum):
    """Whether the order of operations is the plan's."""

    ON_PLAN = auto()
    OFF_PLAN = auto()


class IterationOutcome(Enum):
    """The outcome of an iteration, in the words of the run log."""

    FOLLOWED = "followed"
    OTHER_MICROBATCHES = "other number of microbatches"
    OTHER_ORDER = "other order of operations"
    CUT_SHORT = "cut short"
    EMPTY = "no operation"


class PlanFollower:
    """Compares operations as they run with a schedule.

    Args:
        schedule: of the first iteration.

    Attributes:
        schedule: of this iteration.
        next_schedule: of the next one; may be set at any time.
        state: whether this iteration is on the plan.
        position: of the operation that runs, or else of the next one; operations that were passed
            over count.
        is_running: whether an operation of the plan has begun and not ended.
        is_regular: whether all operations so far were those of the plan, each in its turn.
        current: the operation that runs, or else the next one; None where there is no further one,
            or the iteration is off the plan.
        expected: its key; None where there is none.
        num_empty: the iterations in a row, until now, without an operation.
    """

    def __init__(self, schedule: RankSchedule) -> None:
        self.next_schedule = schedule
        self.num_empty = 0
        self.current: ScheduledOperation | None = None
        self.expected: OperationKey | None = None
        #: Microbatches of this iteration that have come.
        self._num_seen_microbatches = 0
        #: Those that it has, where they are known to be fewer than planned.
        self._num_microbatches: int | None = None
        self._start_iteration()

    def begin(self, key: tuple[str, int, int]) -> ScheduledOperation | None:
        """An operation begins: it, if the plan has it here, or else None.

        None of a microbatch beyond those planned is no departure from the plan: see `is_extra`.
        """
        if key != self.expected:
            if self.state is not FollowState.ON_PLAN:
                return None
            self.is_regular = False
            if not self._pass_over_to(key):
                return None
        self.is_running = True
        microbatch = key[1]
        if microbatch >= self._num_seen_microbatches:
            self._num_seen_microbatches = microbatch + 1
        return self.current

    def is_extra(self, key: tuple[str, int, int]) -> bool:
        """Whether an operation is of a microbatch beyond those planned, but else as planned."""
        instruction, microbatch, chunk = key
        num_planned = self.schedule.num_microbatches
        return (
            self.state is FollowState.ON_PLAN
            and microbatch >= num_planned
            and (instruction, chunk) in self.schedule.kinds
        )

    def end(self, key: tuple[str, int, int]) -> bool:
        """An operation ends: whether it is the one that runs."""
        if not self.is_running or key != self.expected:
            return False
        self.is_running = False
        self._move_to(self.position + 1)
        return True

    def leave_plan(self) -> None:
        """The order is not the plan's: nothing is followed until the iteration is over."""
        self.state = FollowState.OFF_PLAN
        self.is_running = False
        self.current = self.expected = None

    def has_begun(self) -> bool:
        """Whether an operation of this iteration has come."""
        is_off_plan = self.state is not FollowState.ON_PLAN
        return self.is_running or self.position > 0 or is_off_plan or not self.is_regular

    def is_first(self, key: tuple[str, int, int]) -> bool:
        """Whether an operation is the one that iterations begin with."""
        operations = self.schedule.operations
        return bool(operations) and operations[0].key == key

    def finish_iteration(self) -> IterationOutcome:
        """The iteration is over: start the next one, by the next schedule."""
        outcome = self._outcome()
        self.num_empty = self.num_empty + 1 if outcome is IterationOutcome.EMPTY else 0
        self._start_iteration()
        return outcome

    def _outcome(self) -> IterationOutcome:
        if self.state is not FollowState.ON_PLAN:
            return IterationOutcome.OTHER_ORDER
        if not self.has_begun():
            return IterationOutcome.EMPTY
        if self.is_running:
            return IterationOutcome.CUT_SHORT
        left_over = self.schedule.operations[self.position :]
        if any(operation.key.microbatch < self._num_seen_microbatches for operation in left_over):
            return IterationOutcome.CUT_SHORT
        is_whole = self.is_regular and not left_over
        return IterationOutcome.FOLLOWED if is_whole else IterationOutcome.OTHER_MICROBATCHES

    def _start_iteration(self) -> None:
        self.schedule = self.next_schedule
        self.is_running = False
        self.is_regular = True
        self.state = FollowState.ON_PLAN
        self._num_seen_microbatches = 0
        self._num_microbatches = None
        self._move_to(0)

    def _move_to(self, position: int) -> None:
        operations = self.schedule.operations
        if self._num_microbatches is not None:
            position = self._next_position(position, self._num_microbatches)
        self.position = position
        if position < len(operations):
            self.current = operations[position]
            self.expected = self.current.key
        else:
            self.current = self.expected = None

    def _pass_over_to(self, key: tuple[str, int, int]) -> bool:
        """Pass over operations of microbatches that have not come, to one of those that have.

        So it is where an iteration has fewer microbatches than planned. With 4 planned and 3 that
        come, a backward comes where the plan has the forward of microbatch 3.
        """
        if self.is_running or self.current is None or self._num_microbatches is not None:
            return False
        num_microbatches = self.current.key.microbatch
        if self._num_seen_microbatches > num_microbatches:
            return False
        position = self._next_position(self.position, num_microbatches)
        operations = self.schedule.operations
        if position == len(operations) or operations[position].key != key:
            return False
        self._num_microbatches = num_microbatches
        self._move_to(position)
        return True

    def _next_position(self, position: int, num_microbatches: int) -> int:
        """The first position from one on that is of the first so many microbatches."""
        operations = self.schedule.operations
        while (
            position < len(operations) and operations[position].key.microbatch >= num_microbatches
        ):
            position += 1
        return position


def outcomes_in_words(iterations: Mapping[str, int]) -> str | None:
    """How many iterations followed the plan, and why others did not; None: all did.

    Args:
        iterations: how many there were, by the value of their IterationOutcome.
    """
    num_not_followed = {
        outcome: count
        for outcome, count in iterations.items()
        if outcome not in (IterationOutcome.FOLLOWED.value, IterationOutcome.EMPTY.value)
    }
    if not num_not_followed:
        return None
    num_followed = iterations.get(IterationOutcome.FOLLOWED.value, 0)
    num_iterations = num_followed + sum(num_not_followed.values())
    words = [f"followed {num_followed:,} of {num_iterations:,} iterations"]
    for outcome, count in num_not_followed.items():
        is_partial = outcome == IterationOutcome.OTHER_MICROBATCHES.value
        how = "as far as their order is known" if is_partial else "at full speed"
        words.append(f"{count:,} {how}: {outcome}")
    return "; ".join(words)
