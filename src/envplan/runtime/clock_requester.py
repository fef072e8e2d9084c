"""A rank's way to its guard: clocks are requested when the device gets to where they are wanted.

Requests are made in the training thread, which never waits: those that are made at one moment are
gathered, and passed on together. The guard, a process of its own, sets each clock when it is due.
Where the device queues its work, the thread `envplan-clocks` waits until the device has got to
there, and sends them then; else the training thread sends them at once.

A request that is due after a newer one is overtaken, and its clock is not set. One that is made
ahead of an operation is confirmed when the operation begins: that is when it becomes due, if it was
not before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from time import perf_counter_ns
from typing import Final, NamedTuple

from envplan.devices.guard import Guard
from envplan.devices.guard_protocol import Request
from envplan.runtime.timestamps import DeviceEvent, Timestamp

__all__ = ["AheadRequest", "ClockRequester"]

#: How long `close` waits for the thread, which may hang with the device, s.
THREAD_TIMEOUT_S: Final = 1.0


class AheadRequest(NamedTuple):
    """A request that was made ahead of the operation that it is for.

    Attributes:
        request_id: its number.
        mhz: the clock.
    """

    request_id: int
    mhz: int


class _GatheredRequest(NamedTuple):
    """A request that has yet to be passed on.

    Attributes:
        request_id: its number.
        mhz: the clock.
        delay_ns: from the moment that it is passed on with until it is due.
        is_confirmed: whether its operation begins then; if not, the request is made ahead of it.
    """

    request_id: int
    mhz: int
    delay_ns: int
    is_confirmed: bool


class _RequestsAt(NamedTuple):
    """Requests that are passed on together, once the device has passed an event."""

    event: DeviceEvent
    requests: list[_GatheredRequest]


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
        due_ns: when each request was due at the guard, perf_counter_ns, by its number.
        wanted_ns: from when on the clock of each was wanted, likewise.
    """

    def __init__(self, guard: Guard | None, marker: Callable[[], DeviceEvent] | None) -> None:
        self.guard = guard
        self.record_event: Callable[[], Timestamp] = (
            perf_counter_ns if marker is None else _event_recorder(marker)
        )
        self.last_requested_mhz = 0
        self.last_request_id = 0
        self.due_ns: dict[int, int] = {}
        self.wanted_ns: dict[int, int] = {}
        self._gathered: list[_GatheredRequest] = []
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

    def request(self, mhz: int, delay_ns: int = 0) -> int:
        """Want a clock from the moment on that is passed on next, or some time after that.

        Args:
            mhz: the clock.
            delay_ns: that time, ns.

        Returns:
            The request's number.
        """
        return self._gather(mhz, delay_ns, is_confirmed=True)

    def request_ahead(self, mhz: int, delay_ns: int) -> AheadRequest:
        """Have a clock set ahead of the operation that it is for.

        Args:
            mhz: the clock.
            delay_ns: from the moment that is passed on next until the clock is set, ns.
        """
        return AheadRequest(self._gather(mhz, delay_ns, is_confirmed=False), mhz)

    def confirm(self, ahead: AheadRequest) -> None:
        """The operation begins that a request was made for: it is due now, if it was not yet."""
        self._gathered.append(_GatheredRequest(ahead.request_id, ahead.mhz, 0, is_confirmed=True))

    def forget_last_clock(self) -> None:
        """The operation that a request was made ahead for does not come.

        Its clock may be set all the same, until the next request, which is made whatever it is.
        """
        self.last_requested_mhz = 0

    def pass_on(self, at: Timestamp) -> None:
        """Pass on the requests made since last time, once the device has passed a timestamp."""
        if not self._gathered:
            return
        requests, self._gathered = self._gathered, []
        if isinstance(at, int):
            self._send(requests, at)
        else:
            self._queue.put(_RequestsAt(at, requests))

    def forget_before(self, request_id: int) -> None:
        """Forget when earlier requests were due and wanted."""
        for times_ns in (self.due_ns, self.wanted_ns):
            for old_id in [number for number in list(times_ns) if number < request_id]:
                del times_ns[old_id]

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

    def _gather(self, mhz: int, delay_ns: int, *, is_confirmed: bool) -> int:
        self.last_requested_mhz = mhz
        self.last_request_id += 1
        request = _GatheredRequest(self.last_request_id, mhz, delay_ns, is_confirmed)
        self._gathered.append(request)
        return self.last_request_id

    def _send(self, requests: list[_GatheredRequest], at_ns: int) -> None:
        """Send requests whose timestamp has passed to the guard, which waits until they are due."""
        to_send = []
        for request_id, mhz, delay_ns, is_confirmed in requests:
            due_ns = at_ns + delay_ns
            if is_confirmed:
                self.wanted_ns[request_id] = due_ns
            if self.due_ns.get(request_id, due_ns + 1) > due_ns:  # else it was due ahead
                self.due_ns[request_id] = due_ns
                to_send.append(Request(request_id, due_ns, mhz))
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
            self._send(item.requests, perf_counter_ns())

    def _call(self, callback: Callable[[], None]) -> None:
        with self._callback_lock:
            callback()


def _event_recorder(marker: Callable[[], DeviceEvent]) -> Callable[[], DeviceEvent]:
    def record_event() -> DeviceEvent:
        event = marker()
        event.record()
        return event

    return record_event
