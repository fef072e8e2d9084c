"""When to ask for each operation's clock, so that it is there as the operation begins.

The order of operations is known, and so is about how long they take. So the clock of an operation
is asked for by a timer, which begins as the operation before it begins, or ends. What the timer
waits for comes from the plan first, and then from what the run has measured.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from enum import Enum, auto
from typing import Final, NamedTuple

from envplan.enforce.freqplan import StageTimes
from envplan.units import ns_from_s

__all__ = ["AheadTimer", "TimerTable", "Trigger", "WaitAndDuration", "operation_times", "timers"]

#: The latest iterations whose times count.
NUM_RECENT_ITERATIONS: Final = 8


class Trigger(Enum):
    """When a timer begins."""

    BEGIN = auto()
    END = auto()


class AheadTimer(NamedTuple):
    """When a clock is asked for.

    Attributes:
        trigger: at which end of the operation before the timer begins; for the first operation,
            the begin of the iteration.
        delay_ns: that it takes.
    """

    trigger: Trigger
    delay_ns: int


class WaitAndDuration(NamedTuple):
    """How long a GPU waits before an operation, and how long that takes, ns."""

    wait_ns: int
    duration_ns: int


def operation_times(times: StageTimes) -> list[WaitAndDuration]:
    """The planned times of a stage's operations."""
    return [
        WaitAndDuration(ns_from_s(wait_s), ns_from_s(duration_s))
        for wait_s, duration_s in zip(times.waits_s, times.durations_s, strict=True)
    ]


def timers(times: Sequence[WaitAndDuration], latencies_ns: Sequence[int]) -> list[AheadTimer]:
    """When the clock of each operation is asked for.

    With starts s, ends f and the latency L, that is the replay's max(s of the operation before,
    s - L): by a timer from the end of the operation before, where the GPU waits for L or longer
    after it, and else from its begin.

    Args:
        times: of the operations of one stage in execution order, (N,).
        latencies_ns: of the clock of each of them, (N,).

    Returns:
        A timer for each operation, (N,).
    """
    all_timers = []
    previous_ns = 0  # the duration of the operation before
    for position, (time, latency_ns) in enumerate(zip(times, latencies_ns, strict=True)):
        is_first = position == 0
        if time.wait_ns >= latency_ns and not is_first:
            timer = AheadTimer(Trigger.END, time.wait_ns - latency_ns)
        else:
            distance_ns = previous_ns + time.wait_ns
            timer = AheadTimer(Trigger.BEGIN, max(0, distance_ns - latency_ns))
        all_timers.append(timer)
        previous_ns = time.duration_ns
    return all_timers


class TimerTable:
    """The timers of one schedule, corrected by what a run has measured.

    Written by one thread and read by others.

    Args:
        planned: times of the operations, (N,).
        latencies_ns: of the clock of each, and of the clock for what comes after them, (N + 1,).

    Attributes:
        timers: of each operation, and of what comes after them, (N + 1,).
    """

    def __init__(self, planned: Sequence[WaitAndDuration], latencies_ns: Sequence[int]) -> None:
        self._latencies_ns = latencies_ns
        self._recent_waits_ns: deque[Sequence[int]] = deque(maxlen=NUM_RECENT_ITERATIONS)
        self._recent_durations_ns: deque[Sequence[int]] = deque(maxlen=NUM_RECENT_ITERATIONS)
        self._num_iterations = 0
        self.timers = self._timers_of(planned)

    def add_iteration(self, waits_ns: Sequence[int], durations_ns: Sequence[int]) -> None:
        """An iteration has been measured: from now on the timers follow the latest iterations.

        The lower quartile of each time counts, for what disturbs an operation makes it longer. It
        is taken after each of the first 8 iterations, and after every 8th one from then on.

        Args:
            waits_ns: before each operation, (N,).
            durations_ns: of each operation, (N,).
        """
        self._recent_waits_ns.append(waits_ns)
        self._recent_durations_ns.append(durations_ns)
        self._num_iterations += 1
        is_early = self._num_iterations <= NUM_RECENT_ITERATIONS
        if not is_early and self._num_iterations % NUM_RECENT_ITERATIONS:
            return
        quartiles = zip(
            _lower_quartiles(self._recent_waits_ns),
            _lower_quartiles(self._recent_durations_ns),
            strict=True,
        )
        self.timers = self._timers_of([WaitAndDuration(*times) for times in quartiles])

    def _timers_of(self, times: Sequence[WaitAndDuration]) -> list[AheadTimer]:
        after_the_last = WaitAndDuration(0, 0)
        return timers([*times, after_the_last], self._latencies_ns)


def _lower_quartiles(iterations: Iterable[Sequence[int]]) -> list[int]:
    """A value for each operation that a quarter of its values are below, at most."""
    all_values = [sorted(values) for values in zip(*iterations, strict=True)]
    return [values[len(values) // 4] for values in all_values]
