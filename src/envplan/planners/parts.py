"""Clocks by part beside one clock an operation, by how late clocks come."""

from __future__ import annotations

from contextlib import suppress
from typing import Final, NamedTuple

from envplan.errors import NoAnswerError
from envplan.plan.build import percent
from envplan.solve import Frontier

#: Switch latencies that are tried, s.
LATENCIES_S: Final = (0.0, 0.001, 0.005, 0.01, 0.02)
#: How much slower than maximum frequency both may be, so that clocks that come late find a plan.
_SLOWDOWN: Final = 0.02


class PartsRow(NamedTuple):
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
        one, parts = self.one_clock_j, self.by_parts_j
        return 0.0 if one is None or parts is None else percent(one - parts, self.baseline_j)


def beside_one_clock(frontier: Frontier) -> list[PartsRow]:
    """Plans with clocks by part and with one clock an operation, for each switch latency; none
    where the profile's operations have no parts."""
    profile, rows = frontier.profile, list[PartsRow]()
    if profile.adjustments.by_parts is None:
        return rows
    alone = frontier.retraced(frontier.pipeline, profile.with_parts(None))
    fastest = alone.max_frequency_plan()
    deadline = fastest.iteration_time * (1 + _SLOWDOWN)
    for latency in LATENCIES_S:
        found: list[float | None] = []
        for own in (alone, frontier):
            least = min((one for one in found if one is not None), default=None)
            with suppress(NoAnswerError):
                energy = own.plan(deadline, switch_latency=latency).energy
                least = energy if least is None else min(least, energy)
            found.append(least)
        rows.append(PartsRow(latency, deadline, fastest.energy, *found))
    return rows
