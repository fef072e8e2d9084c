"""Timing a block of queued work, by the host's clock or by events in the GPU's queue."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

__all__ = ["DeviceEvent", "EventTimer", "Timer"]


class Timer:
    """Times a block of queued work by the host's clock, which learns of its end by waiting for it.

    Args:
        now: tells the time, s.

    Attributes:
        name: of the clock, for people.
    """

    name = "host clock"

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._begin_s = 0.0

    def start(self) -> None:
        """Call before the first piece of work is queued."""
        self._begin_s = self._now()

    def stop(self) -> None:
        """Call after the last piece of work is queued."""

    def seconds(self) -> float:
        """From start to stop, s; call once all of it is done."""
        return self._now() - self._begin_s


class DeviceEvent(Protocol):
    """An event in a GPU's queue, such as `torch.cuda.Event(enable_timing=True)`."""

    def record(self) -> None:
        """Queue it."""

    def elapsed_time(self, end_event: DeviceEvent, /) -> float:
        """From this event to a later one, ms."""


class EventTimer(Timer):
    """Events in the GPU's own queue: free of what the host takes to queue and to wait.

    Args:
        make_event: makes an event.
    """

    name = "CUDA events"

    def __init__(self, make_event: Callable[[], DeviceEvent]) -> None:
        self._begin, self._end = make_event(), make_event()

    def start(self) -> None:
        """Queue the event before the work."""
        self._begin.record()

    def stop(self) -> None:
        """Queue the event behind the work."""
        self._end.record()

    def seconds(self) -> float:
        """From start to stop, s."""
        return float(self._begin.elapsed_time(self._end)) / 1e3
