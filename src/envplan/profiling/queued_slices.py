"""Slices of work that a GPU's queue runs back to back, timed by events in that queue."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Protocol

import numpy as np

from envplan.errors import InputError
from envplan.profiling.switch_latency import Slices, SliceTimes
from envplan.profiling.timers import DeviceEvent

__all__ = ["QueueEvent", "QueuedSlices", "torch_slices"]

#: How much work is queued ahead of the GPU, s. While a driver takes up to so long to set a clock,
#: slices go on without a gap.
_QUEUED_AHEAD_S: Final = 0.03
#: Events after a run that put its times on the host's clock.
_ANCHORS: Final = 8
#: Widths of square matrices; the widest whose product is short enough makes the slices.
_WIDTHS: Final = (4096, 3072, 2048, 1536, 1024, 768, 512, 384, 256, 128)
#: The longest product while no clock is set, s. At a tenth of that clock it takes 1 ms.
_LONGEST_SLICE_S: Final = 1e-4
_TRIAL_S: Final = 0.02


class QueueEvent(DeviceEvent, Protocol):
    """An event in a GPU's queue that the host can wait for."""

    def synchronize(self) -> None:
        """Wait until the work queued before it is done."""


class QueuedSlices(Slices):
    """Slices that are queued with an event after each.

    Args:
        queue: queues one slice of work.
        make_event: makes an event, such as `torch.cuda.Event(enable_timing=True)`.
        slice_s: about how long a slice takes, s.
        now: the host's time, s.
    """

    def __init__(
        self,
        queue: Callable[[], object],
        make_event: Callable[[], QueueEvent],
        *,
        slice_s: float = _LONGEST_SLICE_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._queue = queue
        self._make_event = make_event
        self._num_ahead = max(1, math.ceil(_QUEUED_AHEAD_S / slice_s))
        self._now = now

    def now(self) -> float:
        """The host's time, s."""
        return self._now()

    def run(
        self, seconds: float, request: Callable[[], None] | None = None, lead_s: float = 0.0
    ) -> SliceTimes:
        """Run slices for so long, and make a request after `lead_s`; see Slices."""
        events = [self._record()]
        begin_s = self.now()
        while len(events) == 1 or self.now() - begin_s < seconds:
            if request is not None and self.now() - begin_s >= lead_s:
                request()
                request = None
            self._queue()
            events.append(self._record())
            if len(events) > self._num_ahead:
                events[-self._num_ahead].synchronize()
        if request is not None:  # the host was held up for longer than the run
            request()
        first_s = self._host_time_of(events[0])
        elapsed_s_of = [events[0].elapsed_time(event) / 1e3 for event in events]
        times_s = first_s + np.array(elapsed_s_of)
        return SliceTimes(times_s[:-1], np.diff(times_s))

    def _record(self) -> QueueEvent:
        event = self._make_event()
        event.record()
        return event

    def _host_time_of(self, event: QueueEvent) -> float:
        """When an event passed by the host's clock, s.

        The host learns of an event some microseconds late, or more where it is held up: of several
        it is the least.
        """
        estimates_s = []
        for _ in range(_ANCHORS):
            anchor = self._record()
            anchor.synchronize()
            estimates_s.append(self.now() - event.elapsed_time(anchor) / 1e3)
        return min(estimates_s)


def torch_slices(device: str) -> QueuedSlices:
    """Slices of matrix products in torch.

    The matrices are zeros: their products draw little power, so that the power limit does not move
    the clock beside us.

    Args:
        device: a CUDA device, such as "cuda:0".

    Raises:
        InputError: torch is not installed, or cannot use the GPU.
    """
    try:
        import torch
    except ImportError:
        raise InputError(
            "torch is not installed, and the slices of work that show the clock run in it; run: "
            "pip install 'envplan[torch]', or give slices of your own: --slices MODULE:FUNCTION"
        ) from None
    if not torch.cuda.is_available():
        raise InputError(
            "this torch cannot use the GPU: it is a build for the CPU, or the driver is too old "
            "for it; install a build of torch for your driver's CUDA, or give slices of your own: "
            "--slices MODULE:FUNCTION"
        )
    make_event = partial(torch.cuda.Event, enable_timing=True)
    return _widest_short_enough(
        lambda width: torch.zeros(width, width, dtype=torch.float16, device=device),
        lambda matrix, product: torch.mm(matrix, matrix, out=product),
        make_event,
    )


def _widest_short_enough(
    make: Callable[[int], Any],
    multiply: Callable[[Any, Any], object],
    make_event: Callable[[], QueueEvent],
    now: Callable[[], float] = time.monotonic,
) -> QueuedSlices:
    """Slices of the widest product that takes no longer than a slice may.

    Args:
        make: a matrix of a width.
        multiply: a matrix by itself, into another.
        make_event, now: as for QueuedSlices.
    """
    for width in _WIDTHS:
        queue = partial(multiply, make(width), make(width))
        slices = QueuedSlices(queue, make_event, now=now)
        slices.run(_TRIAL_S)  # the first products load the library and wake the GPU
        slice_s = statistics.median(slices.run(_TRIAL_S).durations_s.tolist())
        if slice_s <= _LONGEST_SLICE_S:
            break
    return QueuedSlices(queue, make_event, slice_s=slice_s, now=now)
