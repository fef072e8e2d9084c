"""The energy that the steps of a run have used, beside that of the plan and of the highest clocks.

The GPU's energy counter is read about once a second, by the guard. A step's energy is the counter's
value at its end less that at its begin, on straight lines between the readings, and on a straight
line beyond the last one until the next has come. What happens between steps does not count.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final, NamedTuple

from envplan.devices.guard_protocol import CounterReading
from envplan.enforce.freqplan import StageEnergy

__all__ = ["EnergyTotals", "StepEnergyMeter"]

#: Readings that are kept: an iteration may take an hour.
_MAX_READINGS: Final = 4096
#: Steps that differ from the plan's time by more than this share are not what was profiled.
_MAX_TIME_DEVIATION: Final = 0.2


@dataclass(frozen=True)
class EnergyTotals:
    """Energy of the steps so far that followed the plan itself, J; None where it is not known.

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


class _StepTime(NamedTuple):
    """When a step began and ended, ns of perf_counter_ns."""

    begin_ns: int
    end_ns: int


class StepEnergyMeter:
    """The energy of one GPU over the steps that followed its plan. Not thread-safe.

    Args:
        planned: what an iteration uses by the profile; None: the plan does not say.

    Attributes:
        num_steps: that were added.
    """

    def __init__(self, planned: StageEnergy | None) -> None:
        self.num_steps = 0
        self._planned = planned
        self._readings: deque[CounterReading] = deque(maxlen=_MAX_READINGS)
        # Steps that ended after the last reading: the next one may change their energy.
        self._open_steps: deque[_StepTime] = deque()
        self._settled_j = 0.0
        self._total_time_s = 0.0

    def add_reading(self, reading: CounterReading) -> None:
        """The counter was read; readings come in the order of time.

        A counter that was set back begins anew.
        """
        if self._readings and reading.energy_mj < self._readings[-1].energy_mj:
            self._settled_j += self._open_energy_j()
            self._open_steps.clear()
            self._readings.clear()
        self._readings.append(reading)
        while self._open_steps and self._open_steps[0].end_ns <= reading.time_ns:
            self._settled_j += self._energy_j(self._open_steps.popleft())

    def add_step(self, begin_ns: int, end_ns: int) -> None:
        """A step has followed the plan, from one moment of perf_counter_ns to another."""
        self.num_steps += 1
        self._total_time_s += (end_ns - begin_ns) / 1e9
        self._open_steps.append(_StepTime(begin_ns, end_ns))

    @property
    def totals(self) -> EnergyTotals:
        """The energy so far."""
        used_j = planned_j = baseline_j = None
        if len(self._readings) > 1:
            used_j = self._settled_j + self._open_energy_j()
        if self._planned is not None:
            planned_j = self.num_steps * self._planned.planned_j
            baseline_j = self.num_steps * self._planned.baseline_j
        return EnergyTotals(used_j, planned_j, baseline_j)

    def summary(self, planned_time_s: float) -> str | None:
        """A line for people on what was saved, and against what; None where that is not known.

        Args:
            planned_time_s: that the plan says for a step.
        """
        totals = self.totals
        if totals.used_j is None or not totals.planned_j or not totals.baseline_j:
            return None
        used = f"{self.num_steps} steps used {totals.used_j:.0f} J by the GPU's own counter"
        step_time_s = self._total_time_s / self.num_steps
        if abs(step_time_s / planned_time_s - 1) > _MAX_TIME_DEVIATION:
            return (
                f"{used}; they took {step_time_s:.3g} s each where the plan says "
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
        """Energy of the open steps by the readings so far."""
        return sum(self._energy_j(step) for step in self._open_steps)

    def _energy_j(self, step: _StepTime) -> float:
        return (self._counter_mj(step.end_ns) - self._counter_mj(step.begin_ns)) / 1e3

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
