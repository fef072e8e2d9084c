"""Clocks by part beside one clock an operation, by how late clocks come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from envplan.errors import NoAnswerError
from envplan.plan import Plan
from envplan.plan.build import percent
from envplan.solve import Frontier

__all__ = ["LATENCIES_S", "PartsRow", "beside_one_clock"]

#: Switch latencies that are tried, s.
LATENCIES_S: Final = (0.0, 0.001, 0.005, 0.01, 0.02)
#: How much slower than maximum frequency both may be, so that clocks that come late find a plan.
SLOWDOWN: Final = 0.02


@dataclass(frozen=True)
class PartsRow:
    """Both ways of planning at one switch latency, by the same time.

    Attributes:
        switch_latency_s: from a request until the clock changes.
        deadline_s: that both keep: so much later than maximum frequency ends.
        one_clock: the plan with one clock an operation; None where no plan was found in time.
        by_parts: the plan with clocks by part, or the former where that uses no more.
    """

    switch_latency_s: float
    deadline_s: float
    one_clock: Plan | None
    by_parts: Plan | None

    @property
    def gained_percent(self) -> float:
        """What clocks by part save on top, of the energy at maximum frequency."""
        if self.one_clock is None or self.by_parts is None:
            return 0.0
        before = self.one_clock.predicted.baseline.energy_j
        return percent(self.one_clock.energy - self.by_parts.energy, before)


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
    alone = frontier.retraced(frontier.pipeline, profile.with_parts(None))
    deadline = alone.max_frequency_plan().iteration_time * (1 + slowdown)
    rows = []
    for latency in latencies_s:
        one, parts = (_plan(each, deadline, latency) for each in (alone, frontier))
        if one is not None and (parts is None or one.energy < parts.energy):
            parts = one
        rows.append(PartsRow(latency, deadline, one, parts))
    return rows


def _plan(frontier: Frontier, deadline_s: float, latency_s: float) -> Plan | None:
    try:
        return frontier.plan(deadline_s, switch_latency=latency_s)
    except NoAnswerError:
        return None
