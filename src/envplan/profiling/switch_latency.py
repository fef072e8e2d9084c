"""How long a GPU takes to change its clock, from the durations of equal slices of work.

A kernel does equal work in slices of less than 1 ms while the clock is changed. A slice's duration
tells the clock that it ran at. The slices, and the durations at locked clocks that they are held
against, are those of Velička, Vysocký and Říha, "Methodology for GPU Frequency Switching Latency
Measurement" (arXiv 2502.20075); the statistics are envplan's own.

Clocks are changed between the lowest, a middle and the highest of those given, up and down.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from envplan.devices import Device, DeviceError
from envplan.profile import ClockLatency, SwitchLatency

__all__ = [
    "LatencySettings",
    "SliceTimes",
    "Slices",
    "clocks_between",
    "measure_switch_latency",
    "settled_after",
]

_LEAST_SHARE_AT_TARGET: Final = 0.8  # of the slices after the change
#: The part of a run at a locked clock, counted from its end, that its durations are taken from.
_LAST_PART: Final = 0.25
#: Slices at the target after the change that a change needs to be believed.
_LEAST_SLICES_AT_TARGET: Final = 10
#: Standard deviations of a slice's duration within which it counts as at its clock.
_DEVIATIONS: Final = 5.0
#: The standard deviation that is assumed at least, as a share of the duration.
_LEAST_DEVIATION: Final = 1e-3
#: The tolerance as a share of the difference that a change makes: at least, and at most.
_LEAST_TOLERANCE: Final = 0.1
_MOST_TOLERANCE: Final = 0.4
#: From a median absolute deviation to a standard deviation, of a normal distribution.
_DEVIATION_OF_MEDIAN: Final = 1.4826

FloatArray = npt.NDArray[np.float64]


class SliceTimes(NamedTuple):
    """When slices ran.

    Attributes:
        begins_s: when each slice began, s, ascending, on the clock of `Slices.now`.
        durations_s: of each slice, s.
    """

    begins_s: FloatArray
    durations_s: FloatArray


class Slices(Protocol):
    """Equal slices of work, each of less than 1 ms, that run back to back on a GPU."""

    def now(self) -> float:
        """The host's time, s."""

    def run(
        self, seconds: float, request: Callable[[], None] | None = None, lead_s: float = 0.0
    ) -> SliceTimes:
        """Run slices for so long, and return once they are done.

        Args:
            seconds: to run for, at least.
            request: called once, after `lead_s`, while the GPU goes on with slices.
            lead_s: time before the request, s.
        """


@dataclass(frozen=True, kw_only=True)
class LatencySettings:
    """How often clocks are changed, and how long they may take.

    Attributes:
        rounds: changes between each two clocks, up and down.
        steady_s: how long slices run at a locked clock to learn their duration, s; the first
            part, in which the clock may still be on its way, does not count.
        lead_s: how long they run before a clock is asked for, s.
        window_s: how long they first run after it, s; longer where that proves too short.
        longest_s: for how long a clock that has not come is waited for, s.
        time_limit_s: after which no further change is begun, s.
    """

    rounds: int = 10
    steady_s: float = 1.5
    lead_s: float = 0.02
    window_s: float = 0.1
    longest_s: float = 1.0
    time_limit_s: float = 80.0


def settled_after(
    begins_s: FloatArray,
    durations_s: FloatArray,
    *,
    requested_s: float,
    target_duration_s: float,
    tolerance_s: float,
) -> float | None:
    """Time from a request until slices last as long as at the target clock, in s.

    The change is put where it contradicts the fewest slices: one before it contradicts it with a
    duration within the tolerance of the target's, one after it with a duration outside. So ramps
    count as not settled. A single outlier moves the change by a slice at most, and only where it is
    the first slice at the target. The first of equal places is taken.

    Args:
        begins_s: when each slice began, ascending, on the clock of `requested_s`.
        durations_s: of each slice.
        requested_s: when the change was asked for.
        target_duration_s: of a slice at the target clock, measured while that is locked.
        tolerance_s: how far from it a slice at the target clock may be.

    Returns:
        The time, to within a slice; None where the slices do not settle.
    """
    after_request = begins_s >= requested_s
    begins_s = begins_s[after_request]
    at_target = np.abs(durations_s[after_request] - target_duration_s) <= tolerance_s
    num_slices = len(at_target)
    if num_slices == 0:
        return None
    at_target_before = np.concatenate([[0], np.cumsum(at_target)])
    away_after = np.concatenate([np.cumsum(~at_target[::-1])[::-1], [0]])
    first_settled = int(np.argmin(at_target_before + away_after))
    if num_slices - first_settled < _LEAST_SLICES_AT_TARGET:
        return None
    if at_target[first_settled:].mean() < _LEAST_SHARE_AT_TARGET:
        return None
    return float(begins_s[first_settled] - requested_s)


def clocks_between(clocks_mhz: Sequence[int]) -> list[int]:
    """The lowest, the middle and the highest of some clocks, MHz, ascending."""
    ascending = sorted(set(clocks_mhz))
    return sorted({ascending[0], ascending[len(ascending) // 2], ascending[-1]})


def measure_switch_latency(
    device: Device,
    slices: Slices,
    clocks_mhz: Sequence[int],
    *,
    settings: LatencySettings | None = None,
    progress: Callable[[float, str], None] = lambda *_: None,
) -> SwitchLatency:
    """Change the clock up and down, and see from slices of work when it is there.

    Whoever calls this gives the clock back.

    Args:
        device: the GPU, whose clock nobody else sets meanwhile.
        slices: of work on it.
        clocks_mhz: to change between: see `clocks_between`.
        settings: how often, and for how long.
        progress: called before each change with the share that is done and what is being done.

    Raises:
        DeviceError: the driver refuses, the clock does not follow, or it never settles.
    """
    clocks_mhz = clocks_between(clocks_mhz)
    if len(clocks_mhz) < 2:
        raise DeviceError(
            f"{_gpu(device)} has no two clocks to change between, so that nothing can be measured"
        )
    return _Measurement(device, slices, settings or LatencySettings(), progress).run(clocks_mhz)


def _gpu(device: Device) -> str:
    return f"GPU {device.info.index}"


class _Steady(NamedTuple):
    """A slice's duration at a locked clock: the median and its standard deviation, s."""

    duration_s: float
    deviation_s: float


@dataclass
class _Samples:
    """Changes to one clock.

    Attributes:
        latencies_s: of those that settled.
        unsettled: how many did not.
    """

    latencies_s: list[float] = field(default_factory=list)
    unsettled: int = 0


class _Measurement:
    """A measurement that is under way; its methods run in the order in which they stand."""

    def __init__(
        self,
        device: Device,
        slices: Slices,
        settings: LatencySettings,
        progress: Callable[[float, str], None],
    ) -> None:
        self._device = device
        self._slices = slices
        self._settings = settings
        self._progress = progress
        self._window_s = settings.window_s
        self._steady: dict[int, _Steady] = {}
        self._samples: dict[int, _Samples] = {}

    def run(self, clocks_mhz: Sequence[int]) -> SwitchLatency:
        """Learn how long slices take at each clock, then change clocks."""
        begin_s = self._slices.now()
        for clock_mhz in clocks_mhz:
            self._progress(0.0, f"slices at {clock_mhz} MHz")
            self._steady[clock_mhz] = self._run_steadily(clock_mhz)
        self._require_that_it_follows(clocks_mhz)
        tour = self._tour(clocks_mhz)
        self._lock(tour[0])
        self._slices.run(self._settings.steady_s)
        for number in range(self._settings.rounds):
            for before_mhz, after_mhz in pairwise(tour):
                elapsed_s = self._slices.now() - begin_s
                if number and elapsed_s > self._settings.time_limit_s:
                    return self._result()
                self._progress(
                    max(number / self._settings.rounds, elapsed_s / self._settings.time_limit_s),
                    f"{before_mhz} to {after_mhz} MHz",
                )
                self._change(before_mhz, after_mhz)
            self._require_that_it_settles()
        return self._result()

    def _lock(self, clock_mhz: int) -> None:
        self._device.lock_clock(clock_mhz)

    def _run_steadily(self, clock_mhz: int) -> _Steady:
        """The duration of a slice while the clock is locked, from the last part of a run."""
        self._lock(clock_mhz)
        times = self._slices.run(self._settings.steady_s)
        last_part_s = _LAST_PART * (times.begins_s[-1] - times.begins_s[0])
        settled_s = times.durations_s[times.begins_s >= times.begins_s[-1] - last_part_s]
        median_s = float(np.median(settled_s))
        spread_s = float(np.median(np.abs(settled_s - median_s)))
        least_s = _LEAST_DEVIATION * median_s
        return _Steady(median_s, max(least_s, _DEVIATION_OF_MEDIAN * spread_s))

    def _tolerance_s(self, before_mhz: int, after_mhz: int) -> float | None:
        """How far from the duration at the target clock a slice may be; None: nothing can be told.

        Slices at the two clocks must differ clearly by more than they vary.
        """
        before, after = self._steady[before_mhz], self._steady[after_mhz]
        difference_s = abs(after.duration_s - before.duration_s)
        noise_s = _DEVIATIONS * max(before.deviation_s, after.deviation_s)
        tolerance_s = max(noise_s, _LEAST_TOLERANCE * difference_s)
        return tolerance_s if tolerance_s < _MOST_TOLERANCE * difference_s else None

    def _require_that_it_follows(self, clocks_mhz: Sequence[int]) -> None:
        lowest, highest = clocks_mhz[0], clocks_mhz[-1]
        if self._tolerance_s(lowest, highest) is None:
            raise DeviceError(
                f"the clock of {_gpu(self._device)} does not follow: work takes "
                f"{1e6 * self._steady[lowest].duration_s:.0f} us at {lowest} MHz and "
                f"{1e6 * self._steady[highest].duration_s:.0f} us at {highest} MHz; see nvidia-smi "
                "-q -d CLOCK,PERFORMANCE for who holds it"
            )

    def _tour(self, clocks_mhz: Sequence[int]) -> list[int]:
        """Clocks in turn, so that each change between clocks that can be told apart comes once."""
        lowest, *middle, highest = clocks_mhz
        for between in middle:
            told_apart = [self._tolerance_s(between, end) for end in (lowest, highest)]
            if None not in told_apart:
                return [lowest, between, highest, lowest, highest, between, lowest]
        return [lowest, highest, lowest]

    def _change(self, before_mhz: int, after_mhz: int) -> None:
        """Change the clock once and note how long that took."""
        tolerance_s = self._tolerance_s(before_mhz, after_mhz)
        assert tolerance_s is not None
        requested_s = math.nan

        def request() -> None:
            nonlocal requested_s
            requested_s = self._slices.now()
            self._lock(after_mhz)

        lead_s = self._settings.lead_s
        times = self._slices.run(lead_s + self._window_s, request, lead_s)
        samples = self._samples.setdefault(after_mhz, _Samples())
        while True:
            latency_s = settled_after(
                times.begins_s,
                times.durations_s,
                requested_s=requested_s,
                target_duration_s=self._steady[after_mhz].duration_s,
                tolerance_s=tolerance_s,
            )
            if latency_s is not None:
                samples.latencies_s.append(latency_s)
                # Some changes take longer than this one: the next run shall not be cut short.
                self._window_s = min(max(self._window_s, 2 * latency_s), self._settings.longest_s)
                return
            if times.begins_s[-1] - requested_s >= self._settings.longest_s:
                samples.unsettled += 1
                return
            further = self._slices.run(self._window_s)
            times = SliceTimes(
                np.concatenate([times.begins_s, further.begins_s]),
                np.concatenate([times.durations_s, further.durations_s]),
            )

    def _require_that_it_settles(self) -> None:
        for clock_mhz, samples in self._samples.items():
            if samples.unsettled > len(samples.latencies_s):
                changes = samples.unsettled + len(samples.latencies_s)
                raise DeviceError(
                    f"the clock of {_gpu(self._device)} does not settle at {clock_mhz} MHz within "
                    f"{self._settings.longest_s:g} s in {samples.unsettled} of {changes} changes; "
                    "see nvidia-smi -q -d PERFORMANCE for what holds it back"
                )

    def _result(self) -> SwitchLatency:
        by_mhz = {}
        for clock_mhz in sorted(self._samples):
            latencies_s = np.array(self._samples[clock_mhz].latencies_s)
            by_mhz[clock_mhz] = ClockLatency(
                median_s=round(float(np.median(latencies_s)), 6),
                # Of few samples this is the largest, not a value below it.
                p95_s=round(float(np.percentile(latencies_s, 95, method="higher")), 6),
            )
        return SwitchLatency(source="measured", by_mhz=by_mhz)
