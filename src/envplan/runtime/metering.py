"""Power of each kind of work on a GPU, from an energy counter read while the work runs.

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
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from envplan.devices import Device, DeviceError

__all__ = ["METHOD", "EnergyLog", "Powers", "Seen", "powers"]

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

    times: list[float]
    unsure: list[float]
    joules: list[float]
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
        return Seen(
            times=[at for at, *_ in readings],
            unsure=[unsure for _, unsure, _ in readings],
            joules=[joules for *_, joules in readings],
            clock=round(statistics.median([clock for _, clock, _ in states] or [0])),
            throttle=frozenset(reason for *_, reasons in states for reason in reasons),
        )

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


@dataclass(frozen=True)
class Powers:
    """Powers of kinds of work.

    Attributes:
        watts: (k,).
        covariance: (k, k), W^2.
    """

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
    times, joules = np.array(seen.times), np.array(seen.joules)
    if len(times) < 2 or joules[-1] <= joules[0]:
        return None
    mean = (joules[-1] - joules[0]) / (times[-1] - times[0])
    precision = 1 / (np.array(seen.unsure) * mean) ** 2
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
