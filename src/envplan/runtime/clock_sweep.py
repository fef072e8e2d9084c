"""Which clock to measure next, and which iterations count. No clocks, no threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, Generic, TypeVar

__all__ = ["ClockSweep", "IterationUse", "Window"]

T = TypeVar("T")

#: Iterations at one clock that clock errors may spoil before the clock is passed over.
MAX_SPOILED_ITERATIONS: Final = 3
#: Iterations after a change of clock that do not count, from when it is in force.
_SETTLING_ITERATIONS: Final = 1


class IterationUse(Enum):
    """The use of an iteration for the measurements."""

    SPOILED = auto()  # a clock error fell into it: what was measured at its clock starts again
    CHANGING = auto()  # its clock is on the way
    SETTLING = auto()  # it is the first after a change of clock, or a warm-up
    MEASURED = auto()


@dataclass(frozen=True)
class Window(Generic[T]):
    """All iterations that are measured at one clock.

    Attributes:
        frequency_mhz: the clock; None: whatever the driver chooses.
        iterations: in order.
    """

    frequency_mhz: int | None
    iterations: list[T]


class ClockSweep(Generic[T]):
    """Goes through the clocks, a few iterations at each.

    Args:
        frequencies: the clocks in the order in which they are measured, MHz; None: whatever the
            driver chooses.
        iterations_per_frequency: that count at each clock.
        warm_up: iterations at the beginning that do not count.

    Attributes:
        is_finished: whether all clocks were measured or passed over.
    """

    def __init__(
        self, frequencies: Sequence[int | None], iterations_per_frequency: int, warm_up: int
    ) -> None:
        self.is_finished = not frequencies
        self._frequencies = frequencies
        self._iterations_per_frequency = iterations_per_frequency
        self._num_to_skip = warm_up
        self._clock_index = 0
        self._num_spoiled = 0
        self._iterations: list[T] = []

    @property
    def frequency_mhz(self) -> int | None:
        """The clock to run at; None: whatever the driver chooses."""
        return None if self.is_finished else self._frequencies[self._clock_index]

    def classify(self, *, has_problem: bool, is_clock_pending: bool) -> IterationUse:
        """The use of the iteration that is over.

        Args:
            has_problem: whether the guard has told of a clock error since the window began.
            is_clock_pending: whether the guard has yet to set the clock.
        """
        if has_problem:
            return IterationUse.SPOILED
        if is_clock_pending:
            return IterationUse.CHANGING
        return IterationUse.SETTLING if self._num_to_skip else IterationUse.MEASURED

    def record(self, use: IterationUse, iteration: T) -> Window[T] | None:
        """Take an iteration into account.

        Returns:
            The window, if it was the last one at its clock.
        """
        match use:
            case IterationUse.SPOILED:
                self._num_spoiled += 1
                self._start_window()
                if self._num_spoiled == MAX_SPOILED_ITERATIONS:
                    self._next_clock()
            case IterationUse.CHANGING:
                # The clock may come within the next iteration, which does not count either.
                self._num_to_skip = max(self._num_to_skip, _SETTLING_ITERATIONS)
            case IterationUse.SETTLING:
                self._num_to_skip -= 1
            case IterationUse.MEASURED:
                self._iterations.append(iteration)
                if len(self._iterations) == self._iterations_per_frequency:
                    window = Window(self.frequency_mhz, self._iterations)
                    self._start_window()
                    self._next_clock()
                    return window
        return None

    def interrupt(self) -> None:
        """Something else has run, such as an evaluation: the window starts again."""
        self._iterations = []
        self._num_to_skip = max(self._num_to_skip, _SETTLING_ITERATIONS)

    def _start_window(self) -> None:
        self._iterations = []
        self._num_to_skip = _SETTLING_ITERATIONS

    def _next_clock(self) -> None:
        self._num_spoiled = 0
        self._clock_index += 1
        self.is_finished = self._clock_index == len(self._frequencies)
