"""A thread that reads a GPU's energy counter, clock and throttle reasons while training runs."""

from __future__ import annotations

import math
import statistics
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from envplan.devices import Device, DeviceError

__all__ = ["EnergyLog", "FloatArray", "Observations"]

#: How often the counter is read, s.
POLL_S: Final = 0.01
#: Clock and throttle reasons are read with every so many readings of the counter.
_READINGS_PER_STATE: Final = 5

FloatArray = NDArray[np.float64]


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
