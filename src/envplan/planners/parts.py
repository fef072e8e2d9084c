"""Clocks by part beside one clock an operation, by how late clocks come."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from envplan.errors import NoAnswerError
from envplan.plan.build import percent
from envplan.solve import Frontier

__all__ = ["LATENCIES_S", "PartsRow", "beside_one_clock"]

#: Switch latencies that are tried, s.
LATENCIES_S: Final = (0.0, 0.001, 0.005, 0.01, 0.02)
#: How much slower than maximum frequency both may be, so that clocks that come late find a plan.
SLOWDOWN: Final = 0.02


@dataclass(frozen=True)
class PartsRow:
    """Both ways of planning at one switch latency, by the same time; all GPUs.

    Attributes:
        switch_latency_s: from a request until the clock changes.
        deadline_s: that both keep: so much later than maximum frequency ends.
        baseline_j: energy at maximum frequency.
        one_clock_j: of the plan with one clock an operation; None where none was found in time.
        by_parts_j: of the plan with clocks by part, or of the former where that uses no more.
    """

    switch_latency_s: float
    deadline_s: float
    baseline_j: float
    one_clock_j: float | None
    by_parts_j: float | None

    def saved_percent(self, energy_j: float | None) -> float | None:
        """What one of both saves, of the energy at maximum frequency."""
        return None if energy_j is None else percent(self.baseline_j - energy_j, self.baseline_j)

    @property
    def gained_percent(self) -> float:
        """What clocks by part save on top, of the energy at maximum frequency."""
        if self.one_clock_j is None or self.by_parts_j is None:
            return 0.0
        return percent(self.one_clock_j - self.by_parts_j, self.baseline_j)


def beside_one_clock(
    frontier: Frontier, latencies_s: Sequence[float] = LATENCIES_S, slowdown: float = SLOWDOWN
) -> list[PartsRow]:
    """Plans with clocks by part and with one clock an operation, for each switch latency.

    Args:
        frontier: of a profile whose operations have parts; none otherwise.
        slowdown: how much later than maximum frequency both may end, as a fraction.
    """
    profile = frontier.profile
    if profile.adjustments.by_parts is None:
        return []
    alone = frontier.retraced(frontier.pipeline, profile.derived(by_parts=None))
    fastest = alone.max_frequency_plan()
    deadline = fastest.iteration_time * (1 + slowdown)

    def least_j(own: Frontier, latency: float) -> float | None:
        with suppress(NoAnswerError):
            return own.plan(deadline, switch_latency=latency).energy
        return None

    rows = []
    for latency in latencies_s:
        one, parts = least_j(alone, latency), least_j(frontier, latency)
        found = [energy for energy in (one, parts) if energy is not None]
        rows.append(PartsRow(latency, deadline, fastest.energy, one, min(found, default=None)))
    return rows
