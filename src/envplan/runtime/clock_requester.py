"""A rank's way to its guard: clocks are requested when the device gets to where they are wanted.

Requests are made in the training thread, which never waits. Two threads help where they are needed:

- `envplan-clocks`, where the device queues its work: it waits until the device has got to a
  request, and then passes it on.
- `envplan-clock-timer`, from the first request with a delay on: it sends each when it is due.

Without device events and delays, requests go to the guard at once, from the training thread. A
request that is due after a newer one was sent is overtaken, and is not sent. One that is made ahead
of an operation waits for a timer, and is confirmed when the operation begins: whichever comes first
sends it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from heapq import heappop, heappush
from queue import Empty, SimpleQueue
from time import perf_counter_ns
from typing import Final, NamedTuple

from envplan.devices.guard import Guard
from envplan.runtime.timestamps import DeviceEvent, Timestamp

__all__ = ["AheadRequest", "ClockRequester"]

#: How long `close` waits for each thread, one of which may hang with the device, s.
THREAD_TIMEOUT_S: Final = 1.0


class _Request(NamedTuple):
    """A request that has yet to be passed on.

    Attributes:
        request_id: its number.
        mhz: the clock.
        after: the device must have passed this.
        delay_ns: to wait from there on.
        is_wanted: whether the clock is wanted from then on.
    """

    request_id: int
    mhz: int
    after: Timestamp
    delay_ns: int
    is_wanted: bool


class AheadRequest(NamedTuple):
    """A request that was made ahead of the operation that it is for.

    Attributes:
        request_id: its number.
        mhz: the clock.
    """

    request_id: int
    mhz: int


class _DueRequest(NamedTuple):
    """A request that waits for its time, perf_counter_ns; ordered by that."""

    due_ns: int
    request_id: int
    mhz: int


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
        sent_ns: when each request was sent to the guard, perf_counter_ns, by its number.
        wanted_ns: from when on the clock of each was wanted, likewise.
    """

    def __init__(self, guard: Guard | None, marker: Callable[[], DeviceEvent] | None) -> None:
        self.guard = guard
        self.record_event: Callable[[], Timestamp] = (
            perf_counter_ns if marker is None else _event_recorder(marker)
        )
        self.last_requested_mhz = 0
        self.last_request_id = 0
        self.sent_ns: dict[int, int] = {}
        self.wanted_ns: dict[int, int] = {}
        self._is_closed = False

        # The guard is used by one thread at a time; so are the due requests. It is held for as long
        # as it takes to write a few bytes, or to read the guard's reports.
        self._guard_lock = threading.Condition()
        self._last_sent_id = 0
        self._due_requests: list[_DueRequest] = []  # a heap
        self._cancelled_ids: set[int] = set()
        self._timer: threading.Thread | None = None

        # What waits for the device. Callbacks run one at a time, in close() or in the thread.
        self._queue: SimpleQueue[_Request | Callable[[], None] | None] = SimpleQueue()
        self._callback_lock = threading.Lock()
        self._device_waiter: threading.Thread | None = None
        if marker is not None:
            self._device_waiter = threading.Thread(
                target=self._wait_for_device, name="envplan-clocks", daemon=True
            )
            self._device_waiter.start()

    def request(self, mhz: int, after: Timestamp, delay_ns: int = 0) -> int:
        """Have the clock set once the device has passed a timestamp, from when on it is wanted.

        Args:
            mhz: the clock.
            after: the timestamp.
            delay_ns: to wait from there on, ns.

        Returns:
            The request's number.
        """
        request_id = self._next_id(mhz)
        self._pass_on(_Request(request_id, mhz, after, delay_ns, is_wanted=True))
        return request_id

    def request_ahead(self, mhz: int, after: Timestamp, delay_ns: int) -> AheadRequest:
        """Have the clock set some time after a timestamp, ahead of the operation that it is for.

        Args:
            mhz: the clock.
            after: the timestamp.
            delay_ns: to wait from there on, ns.
        """
        request_id = self._next_id(mhz)
        self._pass_on(_Request(request_id, mhz, after, delay_ns, is_wanted=False))
        return AheadRequest(request_id, mhz)

    def confirm(self, ahead: AheadRequest, at: Timestamp) -> None:
        """The operation begins that a request was made for: it is sent now, if it was not yet."""
        self._pass_on(_Request(ahead.request_id, ahead.mhz, at, 0, is_wanted=True))

    def cancel(self, ahead: AheadRequest) -> None:
        """The operation that a request was made for does not come.

        The clock may have been set already, so the next request is made whatever it is.
        """
        self.last_requested_mhz = 0
        with self._guard_lock:
            self._cancelled_ids.add(ahead.request_id)

    def forget_before(self, request_id: int) -> None:
        """Forget when earlier requests were sent and wanted."""
        for times_ns in (self.sent_ns, self.wanted_ns):
            for old_id in [number for number in list(times_ns) if number < request_id]:
                del times_ns[old_id]

    def _next_id(self, mhz: int) -> int:
        self.last_requested_mhz = mhz
        self.last_request_id += 1
        return self.last_request_id

    def _pass_on(self, request: _Request) -> None:
        if self._device_waiter is not None:
            self._queue.put(request)
        else:
            assert isinstance(request.after, int)
            self._send_or_wait(request, request.after)

    def _send_or_wait(self, request: _Request, after_ns: int) -> None:
        """Send a request whose timestamp has passed, now or after its delay."""
        due_ns = after_ns + request.delay_ns
        if request.is_wanted:
            self.wanted_ns[request.request_id] = due_ns
        if request.delay_ns:
            self._send_at(_DueRequest(due_ns, request.request_id, request.mhz))
        else:
            self._send(request.request_id, request.mhz)

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
        if self.guard is None:
            return []
        with self._guard_lock:
            return self.guard.problems()

    def close(self) -> None:
        """Pass nothing more on and have the clock given back, though the device may hang.

        Callbacks that wait for a hanging device are then called here.
        """
        with self._guard_lock:
            self._is_closed = True
            self._guard_lock.notify_all()
        self._queue.put(None)
        for thread in (self._device_waiter, self._timer):
            if thread is not None:
                thread.join(THREAD_TIMEOUT_S)
        if self.guard is not None:
            self.guard.close()
        with suppress(Empty):
            while True:
                item = self._queue.get_nowait()
                if callable(item):
                    self._call(item)
        self._queue.put(None)  # for a thread that answers later

    def _wait_for_device(self) -> None:
        """Pass on what waits for the device. Runs in a thread of its own."""
        while (item := self._queue.get()) is not None:
            if not isinstance(item, _Request):
                self._call(item)
                continue
            assert not isinstance(item.after, int)
            with suppress(Exception):  # a device that fails says so to the training itself
                item.after.synchronize()
            if self._is_closed:
                return  # close() sees to the others
            self._send_or_wait(item, perf_counter_ns())

    def _call(self, callback: Callable[[], None]) -> None:
        with self._callback_lock:
            callback()

    def _send(self, request_id: int, mhz: int) -> None:
        """Send a request to the guard, if neither it nor a newer one was sent."""
        with self._guard_lock:
            is_sent = request_id <= self._last_sent_id
            if self._is_closed or is_sent or request_id in self._cancelled_ids:
                return
            self._last_sent_id = request_id
            if self._cancelled_ids:
                self._cancelled_ids = {
                    number for number in self._cancelled_ids if number > request_id
                }
            self.sent_ns[request_id] = perf_counter_ns()
            if self.guard is not None:
                self.guard.request(mhz, request_id)

    def _send_at(self, request: _DueRequest) -> None:
        """Have the timer send a request when it is due."""
        with self._guard_lock:
            heappush(self._due_requests, request)
            if self._due_requests[0] is request:  # else the timer wakes up before it in any case
                self._guard_lock.notify_all()
            if self._timer is None and not self._is_closed:
                self._timer = threading.Thread(
                    target=self._send_due_requests, name="envplan-clock-timer", daemon=True
                )
                self._timer.start()

    def _send_due_requests(self) -> None:
        """Send requests when they are due. Runs in a thread of its own."""
        while True:
            with self._guard_lock:
                while not self._is_closed and not self._is_request_due():
                    self._guard_lock.wait(self._time_to_next_request_s())
                if self._is_closed:
                    return
                request = heappop(self._due_requests)
            self._send(request.request_id, request.mhz)

    def _is_request_due(self) -> bool:
        return bool(self._due_requests) and self._due_requests[0].due_ns <= perf_counter_ns()

    def _time_to_next_request_s(self) -> float | None:
        """Until the next request is due, s; None: there is none."""
        if not self._due_requests:
            return None
        return max(0, self._due_requests[0].due_ns - perf_counter_ns()) / 1e9


def _event_recorder(marker: Callable[[], DeviceEvent]) -> Callable[[], DeviceEvent]:
    def record_event() -> DeviceEvent:
        event = marker()
        event.record()
        return event

    return record_event
