"""The latency of a modelled clock that comes late is found, in virtual time."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import numpy as np
import pytest

from envplan.devices import DeviceError
from envplan.devices.modelled import ModelledDevice, gpu
from envplan.profiling.queued_slices import QueuedSlices, _widest_short_enough
from envplan.profiling.switch_latency import (
    LatencySettings,
    SliceTimes,
    clocks_between,
    measure_switch_latency,
)

CLOCKS = (210, 960, 1740)


class LateGpu(ModelledDevice):
    """A modelled A40 in virtual time whose clock comes late, and slices of work on it."""

    def __init__(
        self,
        latency_s: Callable[[int], float],
        *,
        call_s: float = 0.0005,
        noise: float = 0.0,
        outliers: float = 0.0,
    ) -> None:
        self.time_s = 0.0
        super().__init__(gpu("a40"), 0, lambda: round(self.time_s * 1e9))
        self.latencies: dict[int, list[float]] = {}
        self._latency_s, self._call_s = latency_s, call_s
        self._noise, self._outliers = noise, outliers
        self._random = random.Random(1)
        self._running_mhz = self._target_mhz = 1740
        self._due_s = 0.0

    def now(self) -> float:
        return self.time_s

    def lock_clock(self, mhz: int) -> None:
        latency_s = self._latency_s(mhz)
        self._running_mhz, self._target_mhz = self._clock_at(self.time_s), mhz
        self._due_s = self.time_s + latency_s
        self.latencies.setdefault(mhz, []).append(latency_s)
        self._work_queued_s = self._call_s  # the host waits for the driver, the GPU works on

    def _clock_at(self, time_s: float) -> int:
        return self._target_mhz if time_s >= self._due_s else self._running_mhz

    def run(
        self, seconds: float, request: Callable[[], None] | None = None, lead_s: float = 0.0
    ) -> SliceTimes:
        begin_s = self.time_s
        begins, durations = [], []
        while self.time_s < begin_s + seconds:
            if request is not None and self.time_s >= begin_s + lead_s:
                request()
                request = None
            begins.append(self.time_s)
            self._run_slice()
            durations.append(self.time_s - begins[-1])
        self.time_s += 0.001  # the host learns of the end, and begins anew
        return SliceTimes(np.array(begins), np.array(durations))

    def _run_slice(self) -> None:
        cycles = 100.0 * (1 + self._random.gauss(0, self._noise))  # thousands
        if self._random.random() < self._outliers:
            cycles *= 4
        while cycles > 0:
            mhz = self._clock_at(self.time_s)
            until_due_s = self._due_s - self.time_s
            worked_s = cycles / mhz / 1e3
            if 0 < until_due_s < worked_s:
                self.time_s = self._due_s
                cycles -= until_due_s * mhz * 1e3
            else:
                self.time_s += worked_s
                cycles = 0


def measured(device: LateGpu, **settings: Any) -> Any:
    return measure_switch_latency(
        device, device, range(210, 1741, 15), settings=LatencySettings(**settings)
    )


@pytest.mark.parametrize("latency_ms", [5, 20, 50])
@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_a_late_clock_is_found_within_a_millisecond(latency_ms: int, noise: float) -> None:
    chance = random.Random(latency_ms)
    device = LateGpu(
        lambda _: latency_ms / 1e3 * chance.uniform(0.8, 1.2), noise=noise, outliers=noise / 10
    )
    found = measured(device)
    assert found.source == "measured"
    assert tuple(found.by_mhz) == (210, 975, 1740)
    for mhz, latency in found.by_mhz.items():
        # The first one was locked to learn how long slices take.
        true_s = device.latencies[mhz][-20:]
        assert abs(latency.median_s - np.median(true_s)) < 0.001
        assert abs(latency.p95_s - np.percentile(true_s, 95, method="higher")) < 0.001
    assert device.now() < 120


def test_clocks_have_latencies_of_their_own() -> None:
    device = LateGpu(lambda mhz: 0.477 if mhz == 210 else 0.02)
    found = measured(device)
    assert found.by_mhz[210].median_s == pytest.approx(0.477, abs=0.001)
    assert found.by_mhz[1740].median_s == pytest.approx(0.02, abs=0.001)
    assert found.largest_median_s() == found.by_mhz[210].median_s
    assert found.largest_median_s([900, 1000, 1740]) == found.by_mhz[1740].median_s
    assert device.now() < 120


def test_a_slow_gpu_is_left_in_time() -> None:
    device = LateGpu(lambda _: 0.9)
    found = measured(device, rounds=1000, time_limit_s=60.0, window_s=1.0)
    assert found.by_mhz[1740].median_s == pytest.approx(0.9, abs=0.001)
    assert device.now() < 120


def test_a_clock_that_does_not_follow_is_said_in_a_line() -> None:
    device = LateGpu(lambda _: 1e9)
    with pytest.raises(DeviceError, match=r"the clock of GPU 0 does not follow: work takes"):
        measured(device)


def test_a_clock_that_never_settles_is_said_in_a_line() -> None:
    locks = count()
    device = LateGpu(lambda _: 0.01 if next(locks) < 4 else 3.0)
    with pytest.raises(DeviceError, match="does not settle at 975 MHz within 1 s in 2 of 2"):
        measured(device)


def test_noise_larger_than_the_change_is_said() -> None:
    device = LateGpu(lambda _: 0.01, noise=0.5)
    with pytest.raises(DeviceError, match="does not follow"):
        measured(device)


def test_a_gpu_with_one_clock_is_refused() -> None:
    device = LateGpu(lambda _: 0.0)
    with pytest.raises(DeviceError, match="has no two clocks"):
        measure_switch_latency(device, device, [1740])


def test_clocks_between() -> None:
    assert clocks_between([1740, 210, 960, 975]) == [210, 975, 1740]
    assert clocks_between([1740, 210, 210]) == [210, 1740]


class Queue:
    """A device that does queued work in turn, and its events; the host's time is its own."""

    def __init__(self, slice_s: Iterator[float]) -> None:
        self.host_s = 100.0
        self.free_s = 100.0  # when the queued work is done
        self.most_ahead_s = 0.0
        self.slice_s = slice_s

    def now(self) -> float:
        self.host_s += 2e-6
        return self.host_s

    def queue(self) -> None:
        self.host_s += 5e-6
        self.free_s = max(self.free_s, self.host_s) + next(self.slice_s)
        self.most_ahead_s = max(self.most_ahead_s, self.free_s - self.host_s)

    def event(self) -> Event:
        return Event(self)


class Event:
    """An event of such a device."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue

    def record(self) -> None:
        self.time_s = max(self._queue.free_s, self._queue.host_s)

    def synchronize(self) -> None:
        self._queue.host_s = max(self._queue.host_s, self.time_s + 2e-5)

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end.time_s - self.time_s)


def test_queued_slices_are_timed_by_the_device_on_the_hosts_clock() -> None:
    queue = Queue(iter([0.0002] * 500 + [0.0004] * 2000))
    slices = QueuedSlices(queue.queue, queue.event, slice_s=0.0002, now=queue.now)
    asked_at = []
    times = slices.run(0.3, lambda: asked_at.append(queue.now()), 0.05)
    assert len(asked_at) == 1
    assert asked_at[0] == pytest.approx(100.05, abs=0.001)
    assert times.durations_s[1:500] == pytest.approx(0.0002, abs=1e-9)
    assert times.durations_s[500:] == pytest.approx(0.0004, abs=1e-9)
    assert times.begins_s[0] == pytest.approx(100.0, abs=1e-4)
    assert times.begins_s[500] == pytest.approx(100.1, abs=1e-3)
    assert queue.most_ahead_s < 0.07
    assert queue.free_s >= 100.3


def test_slices_are_the_widest_product_that_is_short_enough() -> None:
    queue = Queue(iter(()))
    widths = []

    def multiply(width: int, _: int) -> None:
        widths.append(width)
        queue.slice_s = iter([2 * width**3 / 1e14])
        queue.queue()

    slices = _widest_short_enough(lambda width: width, multiply, queue.event, queue.now)
    assert list(dict.fromkeys(widths)) == [4096, 3072, 2048, 1536]
    assert slices.run(0.01).durations_s[1:].max() == pytest.approx(7.2e-5, rel=0.01)


def test_torch_products_run_in_slices_on_the_cpu() -> None:
    torch = pytest.importorskip("torch")

    class HostEvent:
        def record(self) -> None:
            self.time_s = time.monotonic()

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, end: HostEvent) -> float:
            return 1e3 * (end.time_s - self.time_s)

    matrix = torch.zeros(64, 64)
    slices = QueuedSlices(lambda: torch.mm(matrix, matrix), HostEvent)
    asked = []
    begin_s = time.monotonic()
    times = slices.run(0.05, lambda: asked.append(slices.now()), 0.02)
    assert len(asked) == 1
    assert times.begins_s[0] >= begin_s - 0.001
    assert (times.durations_s > 0).all()
    assert times.begins_s[-1] <= time.monotonic()
