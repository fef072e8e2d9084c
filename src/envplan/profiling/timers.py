"""Clocks that time a block of queued work: the host's, or events on the GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

__all__ = ["EventTimer", "HostTimer", "Timer"]


class Timer(Protocol):
    """Times what is queued between two calls.

    Attributes:
        name: what tells the time, for people.
    """

    name: str

    def start(self) -> None:
        """Call before the first piece of work is queued."""

    def stop(self) -> None:
        """Call after the last one is queued."""

    def seconds(self) -> float:
        """From start to stop, s; call once all of it is done."""


class HostTimer:
    """The host's clock, from `start` to where `seconds` is called: it learns of ends by waiting.

    Args:
        now: tells the time, s.
    """

    name = "host clock"

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._begin = 0.0

    def start(self) -> None:
        self._begin = self._now()

    def stop(self) -> None:
        pass

    def seconds(self) -> float:
        return self._now() - self._begin


class EventTimer:
    """Events in the GPU's own queue: free of what the host takes to queue and to wait.

    Args:
        make: makes an event with `record()` and `elapsed_time(later)` in ms, such as
            `torch.cuda.Event(enable_timing=True)`.
    """

    name = "CUDA events"

    def __init__(self, make: Callable[[], Any]) -> None:
        self._begin, self._end = make(), make()

    def start(self) -> None:
        self._begin.record()

    def stop(self) -> None:
        self._end.record()

    def seconds(self) -> float:
        return float(self._begin.elapsed_time(self._end)) / 1e3
