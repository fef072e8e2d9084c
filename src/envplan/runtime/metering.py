"""Rows of a profile from operations as they ran and an energy counter read meanwhile.

Operations may be shorter than the time between two updates of the counter. A thread therefore
reads it again and again, and every reading is explained as the sum, over the kinds of work, of
power times the time spent on that kind until then. Iterations mix the kinds differently as they go
(forwards first, both in turn, backwards last, waits in between), which tells their powers apart.
Where they do not, a weak prior gives them all the mean power, that is, energy is apportioned by
time. The powers are the mean of the posterior of this linear model (Bishop, Pattern Recognition
and Machine Learning, 3.3), their covariance its spread.

The counter runs some unknown time behind, or ahead of the middle between two polls. That does not
matter where the mix changes slowly. Where it changes within milliseconds, such as with a short wait
after every operation, it would give one kind the power of another. The model is therefore solved
for a range of delays, each counted by its likelihood; what they disagree about is not known.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from envplan.devices import Device, DeviceError
from envplan.errors import InputError
from envplan.profile import BLOCKING
from envplan.profiling.sweep_file import Row
from envplan.runtime.timestamps import Timestamp, seconds_between

__all__ = [
    "METHOD",
    "EnergyLog",
    "MeasuredWindow",
    "Observations",
    "PartRow",
    "Span",
    "estimate_powers",
    "measure_window",
    "spans_on_host",
]

METHOD: Final = (
    "energy counter read while training runs; power of each kind of work by linear regression of "
    "the readings on the time spent on each, towards their mean where the readings do not tell"
)

#: How often the counter is read, s.
POLL_S: Final = 0.01

#: Standard deviation of powers around their mean, relative to it, before anything was read.
_PRIOR_SPREAD: Final = 1.0
#: A power is at least this share of the mean.
_MIN_POWER_SHARE: Final = 0.01
#: Delays of the counter that are tried, in times between two readings.
_COUNTER_DELAYS: Final = tuple(sevenths / 7 for sevenths in range(-7, 8))
#: Clock and throttle reasons are read with every so many readings of the counter.
_READINGS_PER_STATE: Final = 5

FloatArray = NDArray[np.float64]
M = TypeVar("M")


class Span(NamedTuple, Generic[M]):
    """An operation as it ran, and the begins of its parts where it has some.

    Its moments are Timestamps, or s of perf_counter.
    """

    instruction: str
    chunk: int
    begin: M
    end: M
    parts: tuple[tuple[str, M], ...] = ()


@dataclass(frozen=True)
class PartRow(Row):
    """A row of an operation, or of a part of it."""

    part: str = ""


@dataclass(frozen=True)
class Observations:
    """The state of a GPU during some time, as its driver told it.

    Attributes:
        times_s: of the readings, of perf_counter, ascending, (R,).
        time_std_s: standard deviation of each of these times, (R,).
        energy_j: the counter then, (R,).
        clock_mhz: the median; 0 if it was not seen.
        throttle: why the clock was held back.
    """

    times_s: FloatArray
    time_std_s: FloatArray
    energy_j: FloatArray
    clock_mhz: int
    throttle: frozenset[str]


class _Reading(NamedTuple):
    """The energy counter at a moment that is known but for an error."""

    time_s: float
    time_std_s: float
    energy_j: float


class _State(NamedTuple):
    """Clock and throttle reasons at a moment."""

    time_s: float
    clock_mhz: int
    throttle_reasons: tuple[str, ...]


class EnergyLog:
    """Reads a GPU's energy counter, clock and throttle reasons from a thread.

    A reading counts when the counter has changed: some time since the poll before, which is long
    ago where other work keeps the processors busy.

    Args:
        device: the GPU.
        poll_s: time between readings.

    Attributes:
        problem: why the counter could not be read, the last time that it could not; or None.
    """

    def __init__(self, device: Device, poll_s: float = POLL_S) -> None:
        self._device = device
        self._poll_s = poll_s
        self._lock = threading.Lock()
        self._readings: list[_Reading] = []
        self._states: list[_State] = []
        self._stopped = threading.Event()
        self.problem: str | None = None
        self._thread = threading.Thread(target=self._run, name="envplan-energy", daemon=True)
        self._thread.start()

    def pop_window(self, begin_s: float, end_s: float) -> Observations:
        """The observations from one moment of perf_counter to another; all before is forgotten."""
        with self._lock:
            self._readings = [reading for reading in self._readings if reading.time_s >= begin_s]
            self._states = [state for state in self._states if state.time_s >= begin_s]
            readings = [reading for reading in self._readings if reading.time_s <= end_s]
            states = [state for state in self._states if state.time_s <= end_s]
        clocks_mhz = [state.clock_mhz for state in states]
        throttle: set[str] = set()
        for state in states:
            throttle.update(state.throttle_reasons)
        return Observations(
            times_s=np.array([reading.time_s for reading in readings]),
            time_std_s=np.array([reading.time_std_s for reading in readings]),
            energy_j=np.array([reading.energy_j for reading in readings]),
            clock_mhz=round(statistics.median(clocks_mhz)) if clocks_mhz else 0,
            throttle=frozenset(throttle),
        )

    def close(self) -> None:
        """Read no more."""
        self._stopped.set()
        self._thread.join(1.0)

    def _run(self) -> None:
        """Poll the counter. Runs in a thread of its own."""
        last_energy_mj: int | None = None
        num_polls = 0
        last_poll_s = time.perf_counter()
        while not self._stopped.wait(self._poll_s):
            poll_s = time.perf_counter()
            try:
                energy_mj = self._device.energy()
                answer_s = time.perf_counter()
            except DeviceError as error:
                self.problem = str(error)  # the next reading may succeed
                continue
            if num_polls % _READINGS_PER_STATE == 0:
                self._read_state(answer_s)
            num_polls += 1
            with self._lock:
                if last_energy_mj is not None and energy_mj < last_energy_mj:
                    self._readings = []  # the counter was set back
                elif energy_mj != last_energy_mj:
                    # It has changed at some moment, all equally likely, since the last poll.
                    middle_s = (last_poll_s + answer_s) / 2
                    std_s = (answer_s - last_poll_s) / math.sqrt(12)
                    self._readings.append(_Reading(middle_s, std_s, energy_mj / 1e3))
            last_poll_s, last_energy_mj = poll_s, energy_mj

    def _read_state(self, time_s: float) -> None:
        reasons: tuple[str, ...] = ()
        with suppress(DeviceError):  # some drivers tell nobody
            reasons = tuple(self._device.throttle_reasons())
        with suppress(DeviceError):  # it annotates only
            state = _State(time_s, self._device.clock(), reasons)
            with self._lock:
                self._states.append(state)


@dataclass(frozen=True)
class PowerEstimate:
    """The powers of K kinds of work.

    Attributes:
        powers_w: W, (K,).
        covariance: of these, W^2, (K, K).
    """

    powers_w: FloatArray
    covariance: FloatArray


class _Fit(NamedTuple):
    """The regression for one delay of the counter.

    Attributes:
        misfit: twice the negative logarithm of its likelihood, but for a constant.
        differences_w: of each kind's power from the mean, (K,).
        covariance: of these, (K, K).
    """

    misfit: float
    differences_w: FloatArray
    covariance: FloatArray


def estimate_powers(
    observations: Observations, edges_s: Sequence[float], kinds: Sequence[int], num_kinds: int
) -> PowerEstimate | None:
    """Estimate the powers of the kinds of work that filled some time.

    Args:
        observations: during that time.
        edges_s: when the work changed, ascending.
        kinds: of the work between one edge and the next, from 0; one fewer than edges.
        num_kinds: K.

    Returns:
        None where there are fewer than two readings, or no energy was used between them.
    """
    times_s, energy_j = observations.times_s, observations.energy_j
    if len(times_s) < 2 or energy_j[-1] <= energy_j[0]:
        return None
    mean_w = (energy_j[-1] - energy_j[0]) / (times_s[-1] - times_s[0])
    seconds_until_edge = _seconds_by_kind(edges_s, kinds, num_kinds)
    reading_interval_s = np.median(np.diff(times_s))
    fits = []
    for delay in _COUNTER_DELAYS:
        delayed_s = times_s - delay * reading_interval_s
        seconds_until_reading = np.stack(
            [np.interp(delayed_s, edges_s, seconds) for seconds in seconds_until_edge], axis=1
        )
        fits.append(_fit_powers(observations, seconds_until_reading, mean_w))
    degrees_of_freedom = max(1, len(times_s) - num_kinds - 1)
    return _average_over_delays(fits, mean_w, degrees_of_freedom)


def _seconds_by_kind(edges_s: Sequence[float], kinds: Sequence[int], num_kinds: int) -> FloatArray:
    """Seconds spent on each kind until each edge, (K, edges)."""
    is_of_kind = np.arange(num_kinds)[:, None] == np.array(kinds)
    seconds = np.diff(np.array(edges_s)) * is_of_kind
    return np.concatenate([np.zeros((num_kinds, 1)), np.cumsum(seconds, axis=1)], axis=1)


def _fit_powers(observations: Observations, seconds: FloatArray, mean_w: float) -> _Fit:
    """Bayesian linear regression of the readings on the seconds spent on each kind until then.

    All kinds at the mean power explain most of the energy. What is left is explained by an offset
    and by each kind's difference from the mean, around which the prior lies.

    Args:
        observations: with R readings.
        seconds: spent on each kind until each reading, (R, K).
        mean_w: the mean power.
    """
    num_readings, num_kinds = seconds.shape
    precision = 1 / (observations.time_std_s * mean_w) ** 2
    prior_precision = np.diag([0.0, *[1 / (_PRIOR_SPREAD * mean_w) ** 2] * num_kinds])
    design = np.concatenate([np.ones((num_readings, 1)), seconds], axis=1)
    energy_j = observations.energy_j
    unexplained_j = energy_j - energy_j[0] - mean_w * seconds.sum(axis=1)
    weighted_design = design.T * precision
    covariance = np.linalg.inv(weighted_design @ design + prior_precision)
    solution = covariance @ (weighted_design @ unexplained_j)
    residuals_j = unexplained_j - design @ solution
    misfit = precision @ residuals_j**2 + solution @ prior_precision @ solution
    return _Fit(float(misfit), solution[1:], covariance[1:, 1:])


def _average_over_delays(
    fits: Sequence[_Fit], mean_w: float, degrees_of_freedom: int
) -> PowerEstimate:
    """The mean of the fits by their likelihood; what they disagree about adds to the covariance."""
    misfits = np.array([fit.misfit for fit in fits])
    differences_w = np.array([fit.differences_w for fit in fits])
    covariances = np.array([fit.covariance for fit in fits])
    # Where even the best delay misfits, the readings are noisier than their times say.
    noise = max(1.0, misfits.min() / degrees_of_freedom)
    likelihood = np.exp((misfits.min() - misfits) / (2 * noise))
    weights = likelihood / likelihood.sum()
    mean_difference_w = weights @ differences_w
    deviations_w = differences_w - mean_difference_w
    disagreement = (deviations_w.T * weights) @ deviations_w
    covariance = noise * np.tensordot(weights, covariances, 1) + disagreement
    powers_w = np.maximum(mean_w + mean_difference_w, _MIN_POWER_SHARE * mean_w)
    return PowerEstimate(powers_w, covariance)


def spans_on_host(iterations: Sequence[Sequence[Span[Timestamp]]]) -> list[list[Span[float]]]:
    """Spans by the host's clock, s, of perf_counter; waits until the device has got there."""
    origin = iterations[0][0].begin
    if isinstance(origin, int):
        origin_s = origin / 1e9
    else:
        # The host learns of each moment a little late, so the earliest estimate is the nearest.
        origin_s = math.inf
        for spans in iterations:
            for span in spans:
                since_origin_s = seconds_between(origin, span.end)
                origin_s = min(origin_s, time.perf_counter() - since_origin_s)

    def on_host(timestamp: Timestamp) -> float:
        return origin_s + seconds_between(origin, timestamp)

    def span_on_host(span: Span[Timestamp]) -> Span[float]:
        parts = tuple((name, on_host(begin)) for name, begin in span.parts)
        begin, end = on_host(span.begin), on_host(span.end)
        return Span(span.instruction, span.chunk, begin, end, parts)

    return [[span_on_host(span) for span in spans] for spans in iterations]


class WorkKind(NamedTuple):
    """Operations, or parts of them, that are taken to draw the same power."""

    stage: int
    instruction: str
    part: str


class OtherWork(Enum):
    """Time that is no operation's.

    OUTSIDE: between iterations, and backwards that may hold an all-reduce.
    """

    WAITING = "waiting"
    OUTSIDE = "outside"


@dataclass
class Timeline:
    """The work of some iterations, one after the other.

    Attributes:
        edges_s: when the work changed, ascending.
        work: between one edge and the next, one fewer.
        durations_s: of each operation, or part of one, by its kind, in order of appearance.
    """

    edges_s: list[float] = field(default_factory=list)
    work: list[WorkKind | OtherWork] = field(default_factory=list)
    durations_s: dict[WorkKind, list[float]] = field(default_factory=lambda: defaultdict(list))

    def begin(self, time_s: float, work_before: OtherWork) -> None:
        """Something begins, after other work."""
        if self.edges_s:
            self.work.append(work_before)
        self.edges_s.append(time_s)

    def go_on(self, until_s: float, work: WorkKind | OtherWork) -> None:
        """Work of a kind lasts until a moment."""
        self.work.append(work)
        self.edges_s.append(until_s)


@dataclass(frozen=True)
class MeasuredWindow:
    """The measurements of some iterations at one clock.

    Attributes:
        rows: of the profile.
        energy_j: of the rank's operations in an iteration.
        energy_error_j: its standard error.
        busy_s: time of the same.
        num_microbatches: of an iteration.
    """

    rows: list[PartRow]
    energy_j: float
    energy_error_j: float
    busy_s: float
    num_microbatches: int


def measure_window(
    iterations: Sequence[Sequence[Span[float]]],
    observations: Observations,
    stages: Sequence[int],
    clock_mhz: int | None,
) -> MeasuredWindow | None:
    """Make rows of iterations at one clock; None if the counter has not told anything.

    Args:
        iterations: the operations of each, in order.
        observations: of the GPU meanwhile.
        stages: the model stage of each chunk.
        clock_mhz: as asked for; None: as observed.

    Raises:
        InputError: an operation is of a chunk that has no stage.
    """
    timeline = _timeline(iterations, stages)
    kinds = list(timeline.durations_s)
    # Operations come first, in order of appearance: so do their powers in the estimate.
    all_work = [*kinds, *OtherWork]
    number_of = {work: number for number, work in enumerate(all_work)}
    numbers = [number_of[work] for work in timeline.work]
    estimate = estimate_powers(observations, timeline.edges_s, numbers, len(all_work))
    frequency_mhz = clock_mhz or observations.clock_mhz
    if estimate is None or not frequency_mhz:
        return None
    powers_w = estimate.powers_w.tolist()
    errors_w = np.sqrt(np.diag(estimate.covariance)).tolist()
    measurements = []
    for number, kind in enumerate(kinds):
        durations_s = timeline.durations_s[kind]
        measurements.append(_operation_row(kind, durations_s, powers_w[number], errors_w[number]))
    energy = _energy_of_iteration(measurements, estimate, len(iterations))
    waiting = number_of[OtherWork.WAITING]
    measurements.append(_waiting_row(kinds[0].stage, powers_w[waiting], errors_w[waiting]))
    num_microbatches = sum(
        span.instruction == "forward" and span.chunk == 0 for span in iterations[0]
    )
    return MeasuredWindow(
        rows=[_in_window(row, frequency_mhz, observations) for row in measurements],
        energy_j=energy.mean_j,
        energy_error_j=energy.error_j,
        busy_s=energy.busy_s,
        num_microbatches=num_microbatches,
    )


class _KindRow(NamedTuple):
    """The measurements of one kind of work, whatever the clock."""

    kind: WorkKind
    samples: int
    time_s: float
    time_std_s: float
    energy_j: float
    energy_std_j: float


class _IterationEnergy(NamedTuple):
    """The energy of the rank's operations in an iteration.

    Attributes:
        mean_j: over the iterations.
        error_j: standard error of that.
        busy_s: time of the same.
    """

    mean_j: float
    error_j: float
    busy_s: float


def _energy_of_iteration(
    measurements: Sequence[_KindRow], estimate: PowerEstimate, num_iterations: int
) -> _IterationEnergy:
    """The energy of an iteration's operations, and how sure it is.

    Its variance is that of the powers, by their covariance, and that of the mean of operations that
    take longer or shorter.

    Args:
        measurements: of the K kinds of operations.
        estimate: of their powers, which come before those of other work.
        num_iterations: that were measured.
    """
    num_kinds = len(measurements)
    seconds = np.array([row.time_s * row.samples / num_iterations for row in measurements])
    powers_w = estimate.powers_w[:num_kinds]
    covariance = estimate.covariance[:num_kinds, :num_kinds]
    time_variance = 0.0
    for row, power_w in zip(measurements, powers_w, strict=True):
        time_variance += (power_w * row.time_std_s) ** 2 * row.samples / num_iterations**2
    variance = seconds @ covariance @ seconds + time_variance
    return _IterationEnergy(
        mean_j=float(powers_w @ seconds),
        error_j=math.sqrt(variance),
        busy_s=float(seconds.sum()),
    )


def _operation_row(
    kind: WorkKind, durations_s: Sequence[float], power_w: float, error_w: float
) -> _KindRow:
    mean_s = statistics.fmean(durations_s)
    spread_s = statistics.pstdev(durations_s)
    samples = len(durations_s)
    # The error of the power is the same for all samples: it does not become less by averaging.
    energy_std_j = math.hypot(power_w * spread_s, error_w * mean_s * math.sqrt(samples))
    return _KindRow(kind, samples, mean_s, spread_s, power_w * mean_s, energy_std_j)


def _waiting_row(stage: int, power_w: float, error_w: float) -> _KindRow:
    """The row of waiting, of which only energy over time counts."""
    return _KindRow(WorkKind(stage, BLOCKING, ""), 1, 1.0, 0.0, power_w, error_w)


def _in_window(row: _KindRow, frequency_mhz: int, observations: Observations) -> PartRow:
    return PartRow(
        stage=row.kind.stage,
        instruction=row.kind.instruction,
        part=row.kind.part,
        frequency=frequency_mhz,
        samples=row.samples,
        time=row.time_s,
        energy=row.energy_j,
        time_std=row.time_std_s,
        energy_std=row.energy_std_j,
        clock=observations.clock_mhz,
        throttle="+".join(sorted(observations.throttle)),
    )


def _timeline(iterations: Sequence[Sequence[Span[float]]], stages: Sequence[int]) -> Timeline:
    """The work of iterations.

    Raises:
        InputError: an operation is of a chunk that has no stage.
    """
    timeline = Timeline()
    for spans in iterations:
        may_reduce = _backwards_that_may_reduce(spans)
        for position, span in enumerate(spans):
            work_before = OtherWork.WAITING if position else OtherWork.OUTSIDE
            timeline.begin(span.begin, work_before)
            if position in may_reduce:
                timeline.go_on(span.end, OtherWork.OUTSIDE)
                continue
            if span.chunk >= len(stages):
                raise InputError(
                    f"{span.instruction} came for chunk {span.chunk}, but Profiler knows the "
                    f"stages of {len(stages)} chunks; give it stages="
                )
            seconds_of_kind: dict[WorkKind, float] = defaultdict(float)
            for part in _parts_of(span):
                kind = WorkKind(stages[span.chunk], span.instruction, part.name)
                timeline.go_on(part.end_s, kind)
                seconds_of_kind[kind] += part.end_s - part.begin_s
            for kind, seconds in seconds_of_kind.items():
                timeline.durations_s[kind].append(seconds)
    return timeline


class _PartSpan(NamedTuple):
    """A part of an operation as it ran, s of perf_counter; "" is the name of a whole operation."""

    name: str
    begin_s: float
    end_s: float


def _parts_of(span: Span[float]) -> Iterator[_PartSpan]:
    """The parts of an operation in order; the whole where it has none.

    Each ends where the next one begins. What comes before the first one's own begin belongs to it.
    """
    names = [name for name, _ in span.parts] or [""]
    begins_s = [span.begin, *(begin_s for _, begin_s in span.parts[1:])]
    ends_s = [*begins_s[1:], span.end]
    return map(_PartSpan, names, begins_s, ends_s)


def _backwards_that_may_reduce(spans: Sequence[Span[float]]) -> set[int]:
    """Positions of backwards that may hold an all-reduce: the last of each chunk.

    Only where there are others of the same kind to go by.
    """
    num_alike = Counter((span.instruction, span.chunk) for span in spans)
    last_backward: dict[int, int] = {}
    for position, span in enumerate(spans):
        if span.instruction.startswith("backward"):
            last_backward[span.chunk] = position
    return {
        position
        for position in last_backward.values()
        if num_alike[spans[position].instruction, spans[position].chunk] > 1
    }
