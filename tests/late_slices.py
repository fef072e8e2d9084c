"""Slices of work on a stand-in GPU, for --slices and for stages: how long they took by its clocks.

A slice is a number of cycles. Its duration follows from the clocks that the stand-in's log has,
however busy this machine is; only requests and the whole take real time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np

from envplan.profiling.switch_latency import SliceTimes
from fake_nvml import FakeNvml

_CYCLES = 2e5


class LateSlices:
    """Slices on the stand-in's first GPU."""

    def __init__(self, fake: FakeNvml) -> None:
        self._fake = fake

    def now(self) -> float:
        return time.monotonic()

    def run(
        self, seconds: float, request: Callable[[], None] | None = None, lead_s: float = 0.0
    ) -> SliceTimes:
        begin_s = self.now()
        if request is not None:
            time.sleep(lead_s)
            request()
        time.sleep(max(0.0, begin_s + seconds - self.now()))
        return self._times(begin_s, self.now())

    def _times(self, begin_s: float, end_s: float) -> SliceTimes:
        changes = [at_s for at_s in self._fake.change_times() if begin_s < at_s < end_s]
        moments = [begin_s, *changes, end_s]
        cycles = [0.0]
        for begin, end in pairwise(moments):
            hertz = 1e6 * self._fake.clock_at((begin + end) / 2)
            cycles.append(cycles[-1] + hertz * (end - begin))
        borders = np.interp(np.arange(0.0, cycles[-1], _CYCLES), cycles, moments)
        return SliceTimes(borders[:-1], np.diff(borders))


def make() -> LateSlices:
    """Slices for --slices late_slices:make."""
    return LateSlices(FakeNvml.attached(Path(os.environ["ENVPLAN_FAKE_NVML"])))
