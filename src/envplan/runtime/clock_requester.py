"""A rank's way to its guard: clocks are requested when the device gets to where they are wanted.

Requests are made in the training thread, which never waits: those of one moment are passed on
together. The guard, a process of its own, sets each clock when it is due. Where the device queues
its work, the thread `envplan-clocks` waits until the device has got to there, and sends them then;
else the training thread sends them at once.

A request that is due after a newer one is overtaken, and its clock is not set. One that is made
ahead of an operation is passed on again when the operation begins: that is when it becomes due, if
it was not before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from time import perf_counter_ns
from typing import Final, NamedTuple

from envplan.devices.guard import Guard
from envplan.devices.guard_protocol import Request
from envplan.runtime.timestamps import DeviceEvent, Timestamp

__all__ = ["ClockRequester", "RequestedClock"]

#: How long `close` waits for the thread, which may hang with the device, s.
THREAD_TIMEOUT_S: Final = 1.0


@dataclass(slots=True, eq=False)
class RequestedClock(Request):
    """A clock that was requested, and when it was wanted.

    One object follows a request from the training thread to the run log: to make several at each
    operation would take the training thread longer than all else that it does here.

    Attributes:
        request_id: as in Request.
        due_ns: as in Request; 0: it has not been passed on.
        target: as in Request.
        delay_ns: from the moment that it is passed on with until it is due.
        wanted_ns: from when on the clock was wanted, perf_counter_ns; 0: it was made ahead of that.
    """

    delay_ns: int
    wanted_ns: int = 0


class _RequestsAt(NamedTuple):
    """Requests that are passed on together, once the device has passed an event."""

    event: DeviceEvent
    wanted: RequestedClock | None
    ahead: RequestedClock | None


class ClockRequester:
    """Passes clock requests on to a guard, in the order of the work on the device.

    Args:
        guard: None: clocks are left alone.
        marker: makes device events; see Shim. None: the host's clock is the device's.

    Attributes:
        guard: the same.
        record_event: makes a timestamp behind the work queued so far.
        last_requested_mhz: the clock requested last, which need not be in force yet; 0: none.
        last_request_id: the number of that request, from 1, by which the guard reports it; 0: none.
    """

    def __init__(self, guard: Guard | None, marker: Callable[[], DeviceEvent] | None) -> None:
        self.guard = guard
        self.record_event: Callable[[], Timestamp] = (
            perf_counter_ns if marker is None else _event_recorder(marker)
        )
        self.last_requested_mhz = 0
        self.last_request_id = 0
        self._is_closed = False

        # What waits for the device. Callbacks run one at a time, in close() or in the thread.
        self._queue: SimpleQueue[_RequestsAt | Callable[[], None] | None] = SimpleQueue()
        self._callback_lock = threading.Lock()
        self._device_waiter: threading.Thread | None = None
        if marker is not None:
            self._device_waiter = threading.Thread(
                target=self._wait_for_device, name="envplan-clocks", daemon=True
            )
            self._device_waiter.start()

    def request(self, mhz: int, delay_ns: int = 0) -> RequestedClock:
        """Make a request, which has yet to be passed on.

        Args:
            mhz: the clock.
            delay_ns: from the moment that it is passed on with until it is due, ns.
        """
        self.last_requested_mhz = mhz
        self.last_request_id += 1
        return RequestedClock(self.last_request_id, 0, mhz, delay_ns)

    def forget_last_clock(self) -> None:
        """The operation that a request was made ahead for does not come.

        Its clock may be set all the same, until the next request, which is made whatever it is.
        """
        self.last_requested_mhz = 0

    def pass_on(
        self,
        at: Timestamp,
        wanted: RequestedClock | None,
        ahead: RequestedClock | None = None,
    ) -> None:
        """Pass requests on, once the device has passed a timestamp.

        Args:
            at: the timestamp.
            wanted: a clock that is wanted then, or its delay after that. One that was passed on
                ahead of an operation is due now, if it was not yet: the operation begins.
            ahead: one that shall be set ahead of the operation that it is for.
        """
        if wanted is None and ahead is None:
            return
        if isinstance(at, int):
            self._send(at, wanted, ahead)
        else:
            self._queue.put(_RequestsAt(at, wanted, ahead))

    def call_after_requests(self, callback: Callable[[], None]) -> None:
        """Call something once the device has got to all requests made so far."""
        if self._device_waiter is not None:
            self._queue.put(callback)
        else:
            callback()

    def has_unset_requests(self) -> bool:
        """Whether the guard has yet to report that the last request is carried out."""
        return self.guard is not None and self.guard.done < self.last_request_id

    def read_problems(self) -> list[str]:
        """Read the guard's reports: what went wrong since last time, a line each."""
        return [] if self.guard is None else self.guard.problems()

    def close(self) -> None:
        """Pass nothing more on and have the clock given back, though the device may hang.

        Callbacks that wait for a hanging device are then called here.
        """
        self._is_closed = True
        self._queue.put(None)
        if self._device_waiter is not None:
            self._device_waiter.join(THREAD_TIMEOUT_S)
        if self.guard is not None:
            self.guard.close()
        with suppress(Empty):
            while True:
                item = self._queue.get_nowait()
                if callable(item):
                    self._call(item)
        self._queue.put(None)  # for a thread that answers later

    def _send(
        self, at_ns: int, wanted: RequestedClock | None, ahead: RequestedClock | None
    ) -> None:
        """Send requests whose timestamp has passed to the guard, which waits until they are due."""
        to_send = []
        if wanted is not None:
            is_new = wanted.due_ns == 0
            if is_new:
                wanted.due_ns = wanted.wanted_ns = at_ns + wanted.delay_ns
                to_send.append(wanted)
            else:
                wanted.wanted_ns = at_ns
                if at_ns < wanted.due_ns:
                    wanted.due_ns = at_ns
                    to_send.append(wanted)
        if ahead is not None:
            ahead.due_ns = at_ns + ahead.delay_ns
            to_send.append(ahead)
        if to_send and self.guard is not None:
            self.guard.send(to_send)

    def _wait_for_device(self) -> None:
        """Pass on what waits for the device. Runs in a thread of its own."""
        while (item := self._queue.get()) is not None:
            if not isinstance(item, _RequestsAt):
                self._call(item)
                continue
            with suppress(Exception):  # a device that fails says so to the training itself
                item.event.synchronize()
            if self._is_closed:
                return  # close() sees to the others
            self._send(perf_counter_ns(), item.wanted, item.ahead)

    def _call(self, callback: Callable[[], None]) -> None:
        with self._callback_lock:
            callback()


def _event_recorder(marker: Callable[[], DeviceEvent]) -> Callable[[], DeviceEvent]:
    def record_event() -> DeviceEvent:
        event = marker()
        event.record()
        return event

    return record_event
