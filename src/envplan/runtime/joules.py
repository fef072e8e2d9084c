"""What the steps of a run have used, against what its plan and the highest clocks would have.

The GPU's energy counter is read about once a second, by the guard. A step's energy is the counter's
at its end less that at its begin, on straight lines between the readings, and on a straight line
beyond the last one until the next has come. What happens between steps does not count.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from envplan.enforce.freqplan import StageEnergy

__all__ = ["Joules"]

#: Readings that are kept: an iteration may take an hour.
_KEPT: Final = 4096
#: Steps that differ from the plan's time by more than this part are not what was profiled.
_UNLIKE: Final = 0.2


class Joules:
    """The energy of one GPU over the steps that followed its plan.

    Args:
        stage: what an iteration uses by the profile; None: the plan does not say.
    """

    def __init__(self, stage: StageEnergy | None) -> None:
        self._stage = stage
        self._readings: deque[tuple[int, int]] = deque(maxlen=_KEPT)
        self._open: deque[tuple[int, int]] = deque()
        self._settled = self._seconds = 0.0
        self.steps = 0

    def read(self, at_ns: int, millijoules: int) -> None:
        """The counter at a moment of perf_counter_ns. One that was set back begins anew."""
        if self._readings and millijoules < self._readings[-1][1]:
            self._settled += sum(map(self._between, self._open))
            self._open.clear()
            self._readings.clear()
        self._readings.append((at_ns, millijoules))
        while self._open and self._open[0][1] <= at_ns:
            self._settled += self._between(self._open.popleft())

    def step(self, begin_ns: int, end_ns: int) -> None:
        """A step has followed the plan."""
        self.steps += 1
        self._seconds += (end_ns - begin_ns) / 1e9
        self._open.append((begin_ns, end_ns))

    @property
    def facts(self) -> dict[str, float | None]:
        """J so far: measured, by the plan, and at the highest clocks; None where not known."""
        known = len(self._readings) > 1
        used = self._settled + sum(map(self._between, self._open)) if known else None
        stage = self._stage
        planned, baseline = (stage.planned_j, stage.baseline_j) if stage else (None, None)
        return {
            "joules": used,
            "planned_joules": None if planned is None else self.steps * planned,
            "baseline_joules": None if baseline is None else self.steps * baseline,
        }

    def summary(self, planned_s: float) -> str | None:
        """What was saved, and against what, in a line; None where that is not known.

        Args:
            planned_s: how long the plan says that a step takes.
        """
        used, planned, baseline = self.facts.values()
        if used is None or not planned or not baseline:
            return None
        line = f"{self.steps} steps used {used:.0f} J by the GPU's own counter"
        took = self._seconds / self.steps
        if abs(took / planned_s - 1) > _UNLIKE:
            return (
                f"{line}; they took {took:.3g} s each where the plan says {planned_s:.3g} s, so "
                "the profile's energies are not this job's: see envplan refine"
            )
        return (
            f"{line}; at the highest clocks the profile says {baseline:.0f} J, so "
            f"{1 - used / baseline:.1%} were saved; the plan says {1 - planned / baseline:.1%}"
        )

    def _between(self, step: tuple[int, int]) -> float:
        begin, end = map(self._at, step)
        return (end - begin) / 1e3

    def _at(self, at_ns: int) -> float:
        """The counter at a moment, mJ."""
        readings = self._readings
        if len(readings) < 2:
            return 0.0
        k = len(readings) - 1
        while k > 1 and readings[k - 1][0] > at_ns:
            k -= 1
        (before, low), (after, high) = readings[k - 1], readings[k]
        return low + (high - low) * (at_ns - before) / (after - before)
