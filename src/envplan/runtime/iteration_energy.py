"""The energy of a run's iterations, beside that of the plan and of the highest clocks.

The GPU's energy counter is read about once a second, by the guard. An iteration's energy is the
counter's value at its end less that at its begin, on straight lines between the readings, and on a
straight line beyond the last one until the next has come. What happens between iterations does not
count.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final, NamedTuple

from envplan.devices.guard_protocol import CounterReading
from envplan.enforce.freqplan import StageEnergy

__all__ = ["EnergyTotals", "IterationEnergyMeter"]

#: Readings that are kept: an iteration may take an hour.
_MAX_READINGS: Final = 4096
#: Iterations that differ from the plan's time by more than this share are not what was profiled.
_MAX_TIME_DEVIATION: Final = 0.2


@dataclass(frozen=True)
class EnergyTotals:
    """Energy of the iterations so far that followed the plan itself, J; None where it is not known.

    Attributes:
        used_j: by the GPU's own counter.
        planned_j: by the profile, with the plan's clocks.
        baseline_j: by the profile, at the highest clocks.
    """

    used_j: float | None
    planned_j: float | None
    baseline_j: float | None

    def to_dict(self) -> dict[str, float | None]:
        """The totals under the keys of the run log."""
        return {
            "joules": self.used_j,
            "planned_joules": self.planned_j,
            "baseline_joules": self.baseline_j,
        }


class _IterationSpan(NamedTuple):
    """When an iteration began and ended, ns of perf_counter_ns."""

    begin_ns: int
    end_ns: int


class IterationEnergyMeter:
    """The energy of one GPU over the iterations that followed its plan. Not thread-safe.

    Args:
        planned: what an iteration uses by the profile; None: the plan does not say.

    Attributes:
        num_iterations: that were added.
    """

    def __init__(self, planned: StageEnergy | None) -> None:
        self.num_iterations = 0
        self._planned = planned
        self._readings: deque[CounterReading] = deque(maxlen=_MAX_READINGS)
        # Iterations that ended after the last reading: the next one may change their energy.
        self._open_iterations: deque[_IterationSpan] = deque()
        self._settled_j = 0.0
        self._total_time_s = 0.0

    def add_reading(self, reading: CounterReading) -> None:
        """The counter was read; readings come in the order of time.

        A counter that was set back begins anew.
        """
        if self._readings and reading.energy_mj < self._readings[-1].energy_mj:
            self._settled_j += self._open_energy_j()
            self._open_iterations.clear()
            self._readings.clear()
        self._readings.append(reading)
        while self._open_iterations and self._open_iterations[0].end_ns <= reading.time_ns:
            self._settled_j += self._energy_j(self._open_iterations.popleft())

    def add_iteration(self, begin_ns: int, end_ns: int) -> None:
        """An iteration has followed the plan, from one moment of perf_counter_ns to another."""
        self.num_iterations += 1
        self._total_time_s += (end_ns - begin_ns) / 1e9
        self._open_iterations.append(_IterationSpan(begin_ns, end_ns))

    @property
    def totals(self) -> EnergyTotals:
        """The energy so far."""
        used_j = planned_j = baseline_j = None
        if len(self._readings) > 1:
            used_j = self._settled_j + self._open_energy_j()
        if self._planned is not None:
            planned_j = self.num_iterations * self._planned.planned_j
            baseline_j = self.num_iterations * self._planned.baseline_j
        return EnergyTotals(used_j, planned_j, baseline_j)

    def summary(self, planned_time_s: float) -> str | None:
        """A line for people on what was saved, and against what; None where that is not known.

        Args:
            planned_time_s: that the plan says for an iteration.
        """
        totals = self.totals
        if totals.used_j is None or not totals.planned_j or not totals.baseline_j:
            return None
        used = f"{self.num_iterations} steps used {totals.used_j:.0f} J by the GPU's own counter"
        iteration_time_s = self._total_time_s / self.num_iterations
        if abs(iteration_time_s / planned_time_s - 1) > _MAX_TIME_DEVIATION:
            return (
                f"{used}; they took {iteration_time_s:.3g} s each where the plan says "
                f"{planned_time_s:.3g} s, so the profile's energies are not this job's: see "
                "envplan refine"
            )
        saved = 1 - totals.used_j / totals.baseline_j
        planned_savings = 1 - totals.planned_j / totals.baseline_j
        return (
            f"{used}; at the highest clocks the profile says {totals.baseline_j:.0f} J, so "
            f"{saved:.1%} were saved; the plan says {planned_savings:.1%}"
        )

    def _open_energy_j(self) -> float:
        """Energy of the open iterations by the readings so far."""
        return sum(self._energy_j(iteration) for iteration in self._open_iterations)

    def _energy_j(self, iteration: _IterationSpan) -> float:
        return (self._counter_mj(iteration.end_ns) - self._counter_mj(iteration.begin_ns)) / 1e3

    def _counter_mj(self, time_ns: int) -> float:
        """The counter at a moment, mJ, on the line through the two readings around or before it."""
        readings = self._readings
        if len(readings) < 2:
            return 0.0
        later = len(readings) - 1
        while later > 1 and readings[later - 1].time_ns > time_ns:
            later -= 1
        begin, end = readings[later - 1], readings[later]
        share = (time_ns - begin.time_ns) / (end.time_ns - begin.time_ns)
        return begin.energy_mj + (end.energy_mj - begin.energy_mj) * share
