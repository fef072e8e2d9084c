"""What the shim and the profiler share: moments on a device, and whose rank this is."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Final

from envplan.errors import InputError
from envplan.runtime.runlog import Marker, Moment

__all__ = ["Follower", "environment_number", "recorder"]

_CLOSE_S: Final = 1.0


class Follower:
    """A thread that waits for moments on the device, and passes clocks on when they have come."""

    def __init__(self, send: Callable[[int], None], hear: Callable[[], None]) -> None:
        self._send = send
        self._hear = hear
        self._closed = False
        self._queue: SimpleQueue[tuple[int, Moment] | bool] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="envplan-clocks", daemon=True)
        self._thread.start()

    def send(self, clock: int, moment: Moment) -> None:
        """Send a clock when the device is there."""
        self._queue.put((clock, moment))

    def hear(self) -> None:
        """Listen to the guard, after what was sent before."""
        self._queue.put(True)

    def close(self) -> None:
        """Send nothing more. The device may hang: it is not waited for."""
        self._closed = True
        self._queue.put(False)
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while item := self._queue.get():
            if isinstance(item, bool):
                self._hear()
                continue
            clock, moment = item
            if not isinstance(moment, int):
                with suppress(Exception):  # a device that fails says so to the training itself
                    moment.synchronize()
            if self._closed:
                return
            self._send(clock)


def recorder(marker: Callable[[], Marker]) -> Callable[[], Marker]:
    """What makes a moment and puts it behind the work queued so far."""

    def record() -> Marker:
        moment = marker()
        moment.record()
        return moment

    return record


def environment_number(who: str, name: str, variable: str, given: int | None) -> int:
    """A number given, or else that of an environment variable.

    Args:
        who: has the argument.
        name: of the argument.
        variable: in the environment.
        given: None: not given.

    Raises:
        InputError: neither is there.
    """
    if given is not None:
        return given
    text = os.environ.get(variable, "")
    if not text.isdecimal():
        raise InputError(
            f"give {who} {name}=, or start training with torchrun, which sets ${variable}"
        )
    return int(text)
