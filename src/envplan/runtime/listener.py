"""What the shim and the profiler share: who is told what a training process does, by which moments
it goes, and how clocks are asked for when the device gets there.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from time import perf_counter_ns
from typing import Any, Final, Protocol

from envplan.devices.guard import Guard
from envplan.errors import InputError

__all__ = ["Clocks", "Listener", "Marker", "Moment", "environment_number", "seconds"]

_CLOSE_S: Final = 1.0
_logger = logging.getLogger("envplan.runtime")


class Listener:
    """What is told of operations as they come: a Shim, a Profiler or a Recorder.

    Attributes:
        rank: global rank.
        part_names: names of the modules that it wants to be told of; "*" stands for text without a
            dot.
    """

    rank = 0
    part_names: frozenset[str] = frozenset()
    _undone = "nothing is done"
    _missed = ""

    def begin(self, instruction: str, microbatch: int, chunk: int = 0) -> None:
        """An operation begins."""

    def end(self, instruction: str, microbatch: int, chunk: int = 0) -> None:
        """The operation that began last has ended."""

    def part(self, name: str, *, backward: bool) -> None:
        """A part of the operation that runs begins.

        Args:
            name: such as a module's.
            backward: whether its backward begins; what a backward recomputes does not count.
        """

    def step(self) -> None:
        """An iteration is over."""

    def full_speed(self) -> None:
        """Something else runs until the next operation begins, such as an evaluation."""

    def missed(self, why: str) -> None:
        """Operations run that it cannot be told of.

        Args:
            why: and what to do, for the log; said once, on rank 0.
        """
        if not self._missed:
            self._missed = why
            self._say(f"{self._undone}: {why}")

    def _say(self, line: str) -> None:
        """Log what is the same on all ranks."""
        if self.rank == 0:
            _logger.warning("rank 0: %s", line)


class Marker(Protocol):
    """A moment in the order of a device's work; torch.cuda.Event(enable_timing=True) is one."""

    def record(self) -> None:
        """Put it behind the work queued so far."""

    def synchronize(self) -> None:
        """Wait until that work is done."""

    def elapsed_time(self, end: Any, /) -> float:
        """Milliseconds from here to a later moment."""


#: A moment: perf_counter_ns, or a marker in the device's queue.
Moment = int | Marker


def seconds(begin: Moment, end: Moment) -> float:
    """Time between two moments of the same kind, s; waits for them to have come."""
    if isinstance(begin, int):
        assert isinstance(end, int)
        return (end - begin) / 1e9
    assert not isinstance(end, int)
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def environment_number(variable: str, given: int | None) -> int:
    """A number given, or else that of an environment variable.

    Raises:
        InputError: neither is there.
    """
    if given is not None:
        return given
    text = os.environ.get(variable, "")
    if not text.isdecimal():
        raise InputError(
            f"${variable} is not set; start training with torchrun, which sets it, or give "
            f"{variable.lower()}="
        )
    return int(text)


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
