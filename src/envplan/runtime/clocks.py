"""What the shim and the profiler share: asking the guard for clocks when the device gets there."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from time import perf_counter_ns
from typing import Final

from envplan.runtime.guard import Guard
from envplan.runtime.listener import Marker, Moment

__all__ = ["Clocks"]

_CLOSE_S: Final = 1.0


class Clocks:
    """A rank's way to its guard, in the order of the work on its device.

    Args:
        guard: None: clocks are left alone.
        marker: see Shim. With one, a thread waits for the device before it passes anything on.

    Attributes:
        mark: makes a moment, behind the work queued so far.
        asked: the clock asked for last, MHz; 0: none.
        requests: how many there were; the last one's number in `Guard.lags`.
    """

    def __init__(self, guard: Guard | None, marker: Callable[[], Marker] | None) -> None:
        self.guard = guard
        self.mark: Callable[[], Moment] = perf_counter_ns if marker is None else _recorder(marker)
        self.asked = 0
        self.requests = 0
        self._closed = threading.Event()
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        if marker is not None:
            self._start()

    def ask(self, mhz: int, moment: Moment, delay_ns: int = 0) -> None:
        """Have the clock set when the device has got to a moment, or so long after that, ns."""
        self.asked = mhz
        self.requests += 1
        if delay_ns and self._thread is None:
            self._start()
        if self._thread is not None:
            self._queue.put(partial(self._request, mhz, moment, delay_ns))
        elif self.guard is not None:
            self.guard.request(mhz)

    def then(self, call: Callable[[], None]) -> None:
        """Call something after all that was asked for before."""
        if self._thread is not None:
            self._queue.put(call)
        else:
            call()

    def close(self) -> None:
        """Ask for nothing more and have the clock given back, though the device may hang."""
        self._closed.set()
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(_CLOSE_S)
        if self.guard is not None:
            self.guard.close()
        with suppress(Empty):  # what a thread that still waits for the device has not got to
            while True:
                if (call := self._queue.get_nowait()) is not None:
                    call()
        self._queue.put(None)

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="envplan-clocks", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (call := self._queue.get()) is not None:
            call()

    def _request(self, mhz: int, moment: Moment, delay_ns: int) -> None:
        if not isinstance(moment, int) and not self._closed.is_set():
            with suppress(Exception):  # a device that fails says so to the training itself
                moment.synchronize()
        if delay_ns:
            begun = moment if isinstance(moment, int) else perf_counter_ns()
            self._closed.wait(max(0, begun + delay_ns - perf_counter_ns()) / 1e9)
        if self.guard is not None and not self._closed.is_set():
            self.guard.request(mhz)


def _recorder(marker: Callable[[], Marker]) -> Callable[[], Marker]:
    def record() -> Marker:
        moment = marker()
        moment.record()
        return moment

    return record
