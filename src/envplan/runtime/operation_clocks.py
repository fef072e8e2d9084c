"""The requests for the clocks of a rank's operations, ahead of them where the plan says how long.

At most one request is made ahead at a time: as an operation begins, or ends, that of the next one
gets a timer (see ask_ahead). If the next operation begins before the timer has fired, its clock is
asked for at once. If another one begins, or the iteration ends early, its own request overtakes the
one made ahead.

What follows an iteration's last operation, such as the optimizer, runs at the highest clock, and
the first operation's clock is asked for again before the next iteration: as long ahead of it as the
latest iterations have shown, or else when the framework says that it begins. Where iterations
follow each other so closely that a clock could not change in between, it is left alone.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from functools import partial
from typing import Final

from envplan.clocks import MIN_PAUSE_NS, ClockRequest
from envplan.runtime.ask_ahead import Trigger
from envplan.runtime.clock_requester import ClockRequester, RequestedClock
from envplan.runtime.rank_schedule import RankSchedule
from envplan.runtime.timestamps import Timestamp, ns_between

__all__ = ["OperationClocks"]

#: Timers fire so much sooner, ns: processes of a busy host run late, and a clock that comes a
#: millisecond early costs nothing.
TIMER_LEAD_NS: Final = 1_000_000
#: The latest pauses between iterations that count; their shortest is taken.
NUM_RECENT_PAUSES: Final = 5


class OperationClocks:
    """Requests the clock of each operation, and the highest one for what follows an iteration.

    Used by the training thread; `_add_pause` runs where the requester calls back.

    Args:
        requester: passes requests on.
        max_clock_mhz: the GPU's highest clock; 0: not known, so nothing is asked for in its place.
        latency_ns: from a request until the clock has changed; 0: not known.
    """

    def __init__(self, requester: ClockRequester, *, max_clock_mhz: int, latency_ns: int) -> None:
        self._requester = requester
        self._max_clock_mhz = max_clock_mhz
        self._latency_ns = latency_ns
        self._last_end: Timestamp | None = None  # of the iteration before
        self._pauses_ns: deque[int] = deque(maxlen=NUM_RECENT_PAUSES)
        self._pause_ns: int | None = None  # that is expected; None: none was seen yet
        #: Made ahead of an operation that has not begun.
        self._ahead: RequestedClock | None = None
        #: For the clock that is wanted now.
        self._wanted: RequestedClock | None = None

    def begin(
        self, schedule: RankSchedule, position: int, begin: Timestamp, *, is_regular: bool = True
    ) -> None:
        """The operation at a position begins.

        Args:
            schedule: of the iteration.
            position: of the operation.
            begin: when.
            is_regular: whether the order is the plan's, so that the next operation is known.
        """
        operation = schedule.operations[position]
        if position == 0 and self._last_end is not None:
            end, self._last_end = self._last_end, None
            self._requester.call_after_requests(partial(self._add_pause, end, begin))
        wanted = self._want(operation.frequency_mhz)
        ahead = None
        if is_regular and not operation.part_requests:
            ahead = self._request_ahead_if_due(schedule, position + 1, Trigger.BEGIN)
        self._requester.pass_on(begin, wanted, ahead)

    def request_for_part(self, request: ClockRequest) -> None:
        """A part of an operation begins that has a clock of its own."""
        requester = self._requester
        if request.frequency_mhz != requester.last_requested_mhz:
            self._wanted = requester.request(request.frequency_mhz, request.delay_ns)
            requester.pass_on(requester.record_event(), self._wanted)

    def end(
        self, schedule: RankSchedule, position: int, end: Timestamp, *, is_regular: bool = True
    ) -> RequestedClock | None:
        """The operation at a position has ended.

        Args:
            schedule: of the iteration.
            position: of the operation.
            end: when.
            is_regular: as for begin.

        Returns:
            The request that set the clock it ran at; None: there is none.
        """
        request = self._wanted
        if not is_regular:
            return request
        if position + 1 == len(schedule.operations):
            self._end_iteration(schedule, end)
        elif not schedule.operations[position].part_requests:
            ahead = self._request_ahead_if_due(schedule, position + 1, Trigger.END)
            self._requester.pass_on(end, None, ahead)
        return request

    def iteration_begins(self, schedule: RankSchedule, now: Timestamp) -> None:
        """The framework begins an iteration, whose first operation comes soon."""
        if schedule.operations and self._ahead is None:
            ahead = self._request_ahead(schedule.operations[0].frequency_mhz, 0)
            self._requester.pass_on(now, None, ahead)

    def full_speed(self, now: Timestamp) -> None:
        """Something else than the planned operations runs from now on."""
        self._last_end = None
        self._requester.pass_on(now, self._want(self._max_clock_mhz))

    def _end_iteration(self, schedule: RankSchedule, end: Timestamp) -> None:
        """The last operation of an iteration has ended."""
        self._last_end = end
        wanted = self._want(self._clock_after(schedule))
        ahead = None
        if self._pause_ns is not None:
            delay_ns = max(0, self._pause_ns - self._latency_ns)
            ahead = self._request_ahead(schedule.operations[0].frequency_mhz, delay_ns)
        self._requester.pass_on(end, wanted, ahead)

    def _add_pause(self, last_end: Timestamp, begin: Timestamp) -> None:
        """An iteration has begun, after the last one had ended."""
        with suppress(Exception):  # a device that fails says so to the training itself
            self._pauses_ns.append(ns_between(last_end, begin))
            self._pause_ns = min(self._pauses_ns)

    def _want(self, mhz: int) -> RequestedClock | None:
        """Something begins that wants a clock; 0: whichever there is.

        Returns:
            What is to be passed on for that; None: nothing.
        """
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            if ahead.target == mhz:
                self._wanted = ahead
                return ahead
            self._requester.forget_last_clock()
        if mhz in (0, self._requester.last_requested_mhz):
            return None
        self._wanted = self._requester.request(mhz)
        return self._wanted

    def _request_ahead_if_due(
        self, schedule: RankSchedule, position: int, trigger: Trigger
    ) -> RequestedClock | None:
        """Request the clock of the operation at a position, if its timer begins now."""
        if schedule.timer_table is None:
            return None
        timer = schedule.timer_table.timers[position]
        if timer.trigger is not trigger:
            return None
        if position < len(schedule.operations):
            mhz = schedule.operations[position].frequency_mhz
        else:
            mhz = self._clock_after(schedule)
        return self._request_ahead(mhz, timer.delay_ns)

    def _request_ahead(self, mhz: int, delay_ns: int) -> RequestedClock | None:
        """Request a clock ahead of what it is for, if that is another clock than now.

        Args:
            mhz: the clock; 0: whichever there is.
            delay_ns: from now until what it is for begins, less the latency, ns.
        """
        if mhz in (0, self._requester.last_requested_mhz):
            return None
        self._ahead = self._requester.request(mhz, max(0, delay_ns - TIMER_LEAD_NS))
        return self._ahead

    def _clock_after(self, schedule: RankSchedule) -> int:
        """The clock of what follows an iteration, MHz.

        Where that is too short for a clock of its own, the next iteration's first one.
        """
        is_long = self._pause_ns is None or self._pause_ns >= max(MIN_PAUSE_NS, self._latency_ns)
        return self._max_clock_mhz if is_long else schedule.operations[0].frequency_mhz
