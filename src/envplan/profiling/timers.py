"""Clocks that time a block of queued work: the host's, or events on the GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, Self, TypeVar

__all__ = ["Event", "EventTimer", "HostTimer", "Timer"]


class Timer(Protocol):
    """Times what is queued between two calls."""

    @property
    def name(self) -> str:
        """What tells the time, for people."""

    def start(self) -> None:
        """Call before the first piece of work is queued."""

    def stop(self) -> None:
        """Call after the last one is queued."""

    def seconds(self) -> float:
        """From start to stop, s; call once all of it is done."""


class HostTimer:
    """The host's clock, from `start` to where `seconds` is called.

    Args:
        now: tells the time, s.
    """

    name = "host clock"

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._begin = 0.0

    def start(self) -> None:
        """Call before the first piece of work is queued."""
        self._begin = self._now()

    def stop(self) -> None:
        """Nothing: the host learns that work is done by waiting for it."""

    def seconds(self) -> float:
        """From start to now, s."""
        return self._now() - self._begin


class Event(Protocol):
    """A mark in a GPU's queue, such as `torch.cuda.Event(enable_timing=True)`."""

    def record(self) -> None:
        """Queue it."""

    def elapsed_time(self, later: Self) -> float:
        """From this one to a later one, both reached, ms."""


E = TypeVar("E", bound=Event)


class EventTimer(Generic[E]):
    """Events in the GPU's own queue: free of what the host takes to queue and to wait.

    Args:
        make: makes an event.
    """

    name = "CUDA events"

    def __init__(self, make: Callable[[], E]) -> None:
        self._begin, self._end = make(), make()

    def start(self) -> None:
        """Queue the first event."""
        self._begin.record()

    def stop(self) -> None:
        """Queue the second one."""
        self._end.record()

    def seconds(self) -> float:
        """Between the two, s; both must have been reached."""
        return self._begin.elapsed_time(self._end) / 1e3
