"""Moments by the host's clock, or in the order of the work that a device has queued."""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["DeviceEvent", "Timestamp", "ns_between", "seconds_between"]


class DeviceEvent(Protocol):
    """A moment in the order of a device's work; torch.cuda.Event(enable_timing=True) is one."""

    def record(self) -> None:
        """Put it behind the work queued so far."""

    def synchronize(self) -> None:
        """Wait until that work is done."""

    def elapsed_time(self, end: Any, /) -> float:
        """Milliseconds from here to a later event."""


#: ns of perf_counter_ns, or an event in the device's queue.
Timestamp = int | DeviceEvent


def ns_between(begin: Timestamp, end: Timestamp) -> int:
    """Time between two timestamps of the same kind, ns; waits until the device has passed both."""
    if isinstance(begin, int):
        assert isinstance(end, int)
        return end - begin
    assert not isinstance(end, int)
    end.synchronize()
    return round(1e6 * begin.elapsed_time(end))


def seconds_between(begin: Timestamp, end: Timestamp) -> float:
    """The same in seconds."""
    return ns_between(begin, end) / 1e9
