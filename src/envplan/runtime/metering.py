"""Rows of a profile from operations as they ran and an energy counter read meanwhile.

Operations may be shorter than the time between two updates of the counter. A thread therefore
reads it again and again, and every reading is explained as the sum, over the kinds of work, of
power times the time spent on that kind until then. Iterations mix the kinds differently as they go
(forwards first, both in turn, backwards last, waits in between), which tells their powers apart.
Where they do not, a weak prior gives them all the mean power, that is, energy is apportioned by
time. The powers are the mean of the posterior of this linear model (Bishop, Pattern Recognition
and Machine Learning, 3.3), the errors its spread.

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
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
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
    "Measured",
    "PartRow",
    "Seen",
    "Span",
    "measure",
    "on_host",
    "powers",
]

METHOD: Final = (
    "energy counter read while training runs; power of each kind of work by linear regression of "
    "the readings on the time spent on each, towards their mean where the readings do not tell"
)

#: How often the counter is read, s.
POLL_S: Final = 0.01

#: Spread of powers around their mean, relative to it, before anything was read.
_PRIOR: Final = 1.0

#: Delays of the counter that are tried, in times between two readings.
_DELAYS: Final = tuple(k / 7 for k in range(-7, 8))

_SLOW_READINGS: Final = 5

#: Work that is no operation's: between iterations, and backwards that may hold an all-reduce.
_OUTSIDE: Final = "outside"

Kind = tuple[int, str, str]  # model stage, instruction, part


M = TypeVar("M")


class Span(NamedTuple, Generic[M]):
    """An operation as it ran, and the begins of its parts where it has some.

    Its moments are Moments, or s of perf_counter.
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
class Seen:
    """What a GPU was seen to do during some time.

    Attributes:
        times: of the readings, s, of perf_counter, ascending.
        unsure: standard deviation of each of these times, s.
        joules: the counter then.
        clock: MHz, the median; 0 if it was not seen.
        throttle: why the clock was held back.
    """

    times: NDArray[np.float64]
    unsure: NDArray[np.float64]
    joules: NDArray[np.float64]
    clock: int
    throttle: frozenset[str]


class EnergyLog:
    """Reads a GPU's energy counter, clock and throttle reasons from a thread.

    A reading counts when the counter has changed: some time since the poll before, which is long
    ago where other work keeps the processors busy.

    Args:
        device: the GPU.
        poll: time between readings, s.
    """

    def __init__(self, device: Device, poll: float = POLL_S) -> None:
        self._device = device
        self._poll = poll
        self._lock = threading.Lock()
        self._readings: list[tuple[float, float, float]] = []  # time, its error, counter
        self._states: list[tuple[float, int, tuple[str, ...]]] = []
        self._stopped = threading.Event()
        self.problem: str | None = None
        self._thread = threading.Thread(target=self._run, name="envplan-energy", daemon=True)
        self._thread.start()

    def take(self, begin: float, end: float) -> Seen:
        """What was seen from `begin` to `end`, s; all before is forgotten."""
        with self._lock:
            self._readings = [r for r in self._readings if r[0] >= begin]
            self._states = [s for s in self._states if s[0] >= begin]
            readings = [r for r in self._readings if r[0] <= end]
            states = [s for s in self._states if s[0] <= end]
        times, unsure, joules = np.array(readings).reshape(-1, 3).T
        clock = round(statistics.median([clock for _, clock, _ in states] or [0]))
        throttle = frozenset(reason for *_, reasons in states for reason in reasons)
        return Seen(times, unsure, joules, clock, throttle)

    def close(self) -> None:
        """Read no more."""
        self._stopped.set()
        self._thread.join(1.0)

    def _run(self) -> None:
        last, count = None, 0
        before = time.perf_counter()
        while not self._stopped.wait(self._poll):
            asked = time.perf_counter()
            try:
                energy = self._device.energy()
                now = time.perf_counter()
            except DeviceError as error:
                self.problem = str(error)  # the next reading may succeed; fewer are fewer
                continue
            if count % _SLOW_READINGS == 0:
                reasons: tuple[str, ...] = ()
                with suppress(DeviceError):  # some drivers tell nobody
                    reasons = tuple(self._device.throttle_reasons())
                with suppress(DeviceError):  # it annotates only
                    state = now, self._device.clock(), reasons
                    with self._lock:
                        self._states.append(state)
            count += 1
            with self._lock:
                if last is not None and energy < last:  # it was set back: what it said is no more
                    self._readings = []
                elif energy != last:
                    unsure = (now - before) / math.sqrt(12)
                    self._readings.append(((before + now) / 2, unsure, energy / 1e3))
            before, last = asked, energy


class Powers(NamedTuple):
    """Powers of k kinds of work: W, (k,), and their covariance, W^2, (k, k)."""

    watts: NDArray[np.float64]
    covariance: NDArray[np.float64]


def powers(seen: Seen, edges: Sequence[float], kinds: Sequence[int], count: int) -> Powers | None:
    """Powers of the kinds of work that filled some time.

    Args:
        seen: readings during that time.
        edges: when the work changed, s, ascending; from the first to the last of them.
        kinds: of the work between one edge and the next, from 0; one fewer than edges.
        count: k, of kinds.

    Returns:
        None where there are fewer than two readings, or no energy was used between them.
    """
    times, joules = seen.times, seen.joules
    if len(times) < 2 or joules[-1] <= joules[0]:
        return None
    mean = (joules[-1] - joules[0]) / (times[-1] - times[0])
    precision = 1 / (seen.unsure * mean) ** 2
    prior = np.diag([0.0, *[1 / (_PRIOR * mean) ** 2] * count])

    # Seconds spent on each kind until each edge.
    spent = np.diff(np.array(edges)) * (np.arange(count)[:, None] == np.array(kinds))
    until = np.concatenate([np.zeros((count, 1)), np.cumsum(spent, axis=1)], axis=1)

    misfits, solutions, covariances = [], [], []
    for delay in np.array(_DELAYS) * np.median(np.diff(times)):
        spent_then = [np.interp(times - delay, edges, seconds) for seconds in until]
        design = np.stack([np.ones(len(times)), *spent_then], axis=1)
        # All kinds at the mean power explain most; the rest is explained by differences from it.
        left = joules - joules[0] - mean * design[:, 1:].sum(axis=1)
        weighted = design.T * precision
        covariance = np.linalg.inv(weighted @ design + prior)
        solution = covariance @ (weighted @ left)
        misfits.append(precision @ (left - design @ solution) ** 2 + solution @ prior @ solution)
        solutions.append(solution[1:])
        covariances.append(covariance[1:, 1:])

    freedom = max(1, len(times) - count - 1)
    noise = max(1.0, min(misfits) / freedom)
    likelihood = np.exp((min(misfits) - np.array(misfits)) / (2 * noise))
    weights = likelihood / likelihood.sum()
    difference = weights @ np.array(solutions)
    apart = np.array(solutions) - difference
    disagreement = (apart.T * weights) @ apart
    covariance = noise * np.tensordot(weights, np.array(covariances), 1) + disagreement
    return Powers(np.maximum(mean + difference, 0.01 * mean), covariance)


@dataclass(frozen=True)
class Measured:
    """What a window says.

    Attributes:
        rows: of the profile.
        energy: of the rank's operations in an iteration, J; energy_error: its standard error, J.
        busy: time of the same, s.
        microbatches: of an iteration.
    """

    rows: list[PartRow]
    energy: float
    energy_error: float
    busy: float
    microbatches: int


def on_host(iterations: Sequence[Sequence[Span[Timestamp]]]) -> list[list[Span[float]]]:
    """Spans by the host's clock, s, of perf_counter; waits until the device has got there."""
    first = iterations[0][0].begin
    if isinstance(first, int):
        offset = first / 1e9
    else:
        # The host learns of a moment just after it has come, some time or other soonest of all.
        ends = [span.end for spans in iterations for span in spans]
        offset = min(-seconds_between(first, end) + time.perf_counter() for end in ends)

    def host(at: Timestamp) -> float:
        return offset + seconds_between(first, at)

    return [
        [
            Span(name, chunk, host(begin), host(end), tuple((part, host(at)) for part, at in parts))
            for name, chunk, begin, end, parts in spans
        ]
        for spans in iterations
    ]


def measure(
    iterations: Sequence[Sequence[Span[float]]],
    seen: Seen,
    stages: Sequence[int],
    clock: int | None,
) -> Measured | None:
    """Rows of one clock; None if the counter has not told anything.

    Args:
        iterations: the operations of each, in order.
        seen: what the GPU did meanwhile.
        stages: the model stage of each chunk.
        clock: MHz, as asked for; None: as seen.

    Raises:
        InputError: an operation is of a chunk that has no stage.
    """
    kinds, edges, labels = _labelled(iterations, stages)
    places = {label: k for k, label in enumerate([*kinds, BLOCKING, _OUTSIDE])}
    found = powers(seen, edges, [places[label] for label in labels], len(places))
    frequency = clock or seen.clock
    if found is None or not frequency:
        return None
    count = len(kinds)
    *watts, waiting_w = found.watts[: count + 1].tolist()
    *errors, waiting_error = np.sqrt(np.diag(found.covariance))[: count + 1].tolist()
    shares = np.array([math.fsum(times) / len(iterations) for times in kinds.values()])
    throttle = "+".join(sorted(seen.throttle))
    row = partial(PartRow, frequency=frequency, clock=seen.clock, throttle=throttle)
    rows: list[PartRow] = []
    time_variance = 0.0
    for ((stage, name, part), times), power, error in zip(
        kinds.items(), watts, errors, strict=True
    ):
        mean, spread, samples = statistics.fmean(times), statistics.pstdev(times), len(times)
        time_variance += (power * spread) ** 2 * samples / len(iterations) ** 2
        uncertain = math.hypot(power * spread, error * mean * math.sqrt(samples))
        rows.append(
            row(
                stage=stage,
                instruction=name,
                part=part,
                samples=samples,
                time=mean,
                energy=power * mean,
                time_std=spread,
                energy_std=uncertain,
            )
        )
    # Of waiting, energy over time is all that counts.
    waiting = {"time": 1.0, "time_std": 0.0, "energy": waiting_w, "energy_std": waiting_error}
    rows.append(row(stage=rows[0].stage, instruction=BLOCKING, samples=1, **waiting))
    return Measured(
        rows=rows,
        energy=float(np.array(watts) @ shares),
        energy_error=math.sqrt(shares @ found.covariance[:count, :count] @ shares + time_variance),
        busy=float(shares.sum()),
        microbatches=sum(name == "forward" and chunk == 0 for name, chunk, *_ in iterations[0]),
    )


def _labelled(
    iterations: Sequence[Sequence[Span[float]]], stages: Sequence[int]
) -> tuple[dict[Kind, list[float]], list[float], list[Kind | str]]:
    """How long each operation of a kind took, s; when the work changed, s; and the work between."""
    kinds: dict[Kind, list[float]] = defaultdict(list)
    edges: list[float] = []
    labels: list[Kind | str] = []
    for spans in iterations:
        if edges:
            labels.append(_OUTSIDE)
        reducing = _reducing(spans)
        for position, (name, chunk, begin, end, parts) in enumerate(spans):
            if position:
                labels.append(BLOCKING)
            edges.append(begin)
            if position in reducing:
                edges.append(end)
                labels.append(_OUTSIDE)
                continue
            if chunk >= len(stages):
                raise InputError(
                    f"{name} came for chunk {chunk}, but Profiler knows the stages of "
                    f"{len(stages)} chunks; give it stages="
                )
            # What comes before the first part's own begin belongs to it.
            starts = [begin, *(at for _, at in parts[1:]), end]
            taken: dict[Kind, float] = defaultdict(float)
            for part, (at, until) in zip(parts or (("", begin),), pairwise(starts), strict=True):
                kind = stages[chunk], name, part[0]
                edges.append(until)
                labels.append(kind)
                taken[kind] += until - at
            for kind, time_s in taken.items():
                kinds[kind].append(time_s)
    return kinds, edges, labels


def _reducing(spans: Sequence[Span[float]]) -> set[int]:
    """Positions of backwards that may hold an all-reduce: the last of each chunk.

    Only where there are others of the same kind to go by.
    """
    last: dict[int, int] = {}
    count: dict[tuple[str, int], int] = defaultdict(int)
    for position, (name, chunk, *_) in enumerate(spans):
        count[name, chunk] += 1
        if name.startswith("backward"):
            last[chunk] = position
    return {position for position in last.values() if count[spans[position][:2]] > 1}
