"""A rank's way to its guard: clocks are requested when the device gets to where they are wanted.

Requests are made in the training thread, which never waits. Where the device queues its work, the
thread `envplan-clocks` waits until the device has got to a request and then passes it on. Without
device events requests go to the guard at once, from the training thread; the thread is then started
by the first request with a delay.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from time import perf_counter_ns
from typing import Final

from envplan.devices.guard import Guard
from envplan.runtime.timestamps import DeviceEvent, Timestamp

__all__ = ["ClockRequester"]

#: How long `close` waits for the thread, which may hang with the device, s.
_THREAD_TIMEOUT_S: Final = 1.0


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
        self._closed = threading.Event()
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        if marker is not None:
            self._start_thread()

    def request(self, mhz: int, after: Timestamp, delay_ns: int = 0) -> int:
        """Have the clock set once the device has passed a timestamp.

        Args:
            mhz: the clock.
            after: the timestamp.
            delay_ns: to wait from there on, ns.

        Returns:
            The request's number.
        """
        self.last_requested_mhz = mhz
        self.last_request_id += 1
        if delay_ns and self._thread is None:
            self._start_thread()
        if self._thread is not None:
            self._queue.put(partial(self._send, mhz, self.last_request_id, after, delay_ns))
        elif self.guard is not None:
            self.guard.request(mhz, self.last_request_id)
        return self.last_request_id

    def call_after_requests(self, callback: Callable[[], None]) -> None:
        """Call something once all requests made so far have been passed on."""
        if self._thread is not None:
            self._queue.put(callback)
        else:
            callback()

    def has_unset_requests(self) -> bool:
        """Whether the guard has yet to report that the last request is carried out."""
        return self.guard is not None and self.guard.done < self.last_request_id

    def close(self) -> None:
        """Pass nothing more on and have the clock given back, though the device may hang."""
        self._closed.set()
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(_THREAD_TIMEOUT_S)
        if self.guard is not None:
            self.guard.close()
        with suppress(Empty):  # what a thread that still waits for the device has not got to
            while True:
                if (callback := self._queue.get_nowait()) is not None:
                    callback()
        self._queue.put(None)

    def _start_thread(self) -> None:
        self._thread = threading.Thread(target=self._run, name="envplan-clocks", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (callback := self._queue.get()) is not None:
            callback()

    def _send(self, mhz: int, request_id: int, after: Timestamp, delay_ns: int) -> None:
        if not isinstance(after, int) and not self._closed.is_set():
            with suppress(Exception):  # a device that fails says so to the training itself
                after.synchronize()
        if delay_ns:
            begin_ns = after if isinstance(after, int) else perf_counter_ns()
            self._closed.wait(max(0, begin_ns + delay_ns - perf_counter_ns()) / 1e9)
        if self.guard is not None and not self._closed.is_set():
            self.guard.request(mhz, request_id)


def _event_recorder(marker: Callable[[], DeviceEvent]) -> Callable[[], DeviceEvent]:
    def record_event() -> DeviceEvent:
        event = marker()
        event.record()
        return event

    return record_event
