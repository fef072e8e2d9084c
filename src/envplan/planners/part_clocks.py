"""Clocks by part of an operation beside one clock an operation, at several switch latencies."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Final

from envplan.errors import NoAnswerError
from envplan.plan.build import percent
from envplan.solve import Frontier

#: Switch latencies that are tried, s.
LATENCIES_S: Final = (0.0, 0.001, 0.005, 0.01, 0.02)
#: How much slower than maximum frequency both may be, so that clocks that come late find a plan.
_SLOWDOWN: Final = 0.02


@dataclass(frozen=True)
class PartClockSavings:
    """Savings by clocks for parts of operations and by one clock an operation.

    Energies are J of an iteration over all GPUs, percentages of the energy at maximum frequency.

    Attributes:
        switch_latency_s: from a clock request until the clock changes, s.
        deadline_s: that both plans keep, s.
        one_clock_energy_j, one_clock_saved_percent: None where no plan was found in time.
        by_parts_energy_j, by_parts_saved_percent: the same of clocks by part; those of one clock
            where clocks by part use no less.
        gained_percent: what clocks by part save more.
    """

    switch_latency_s: float
    deadline_s: float
    one_clock_energy_j: float | None
    one_clock_saved_percent: float | None
    by_parts_energy_j: float | None
    by_parts_saved_percent: float | None
    gained_percent: float

    def to_dict(self) -> dict[str, float | None]:
        """The fields by name, as `envplan compare --json` prints them."""
        return asdict(self)


def compare_part_clocks(frontier: Frontier) -> list[PartClockSavings]:
    """Plan with clocks by part and with one clock an operation, for each of LATENCIES_S.

    Returns:
        An entry for each switch latency; none where the profile's operations have no parts.
    """
    profile = frontier.profile
    if profile.adjustments.by_parts is None:
        return []
    one_clock = profile.adjustments.model_copy(update={"by_parts": None})
    one_clock_frontier = frontier.retraced(frontier.pipeline, profile.with_adjustments(one_clock))
    fastest = one_clock_frontier.max_frequency_plan()
    deadline_s = fastest.iteration_time * (1 + _SLOWDOWN)
    savings = []
    for latency_s in LATENCIES_S:
        one_clock_j = _least_energy_j(one_clock_frontier, deadline_s, latency_s)
        by_parts_j = _least_energy_j(frontier, deadline_s, latency_s)
        # One clock for all parts of an operation is a choice of clocks by part, too.
        if by_parts_j is None or (one_clock_j is not None and one_clock_j < by_parts_j):
            by_parts_j = one_clock_j
        gained_j = 0.0
        if one_clock_j is not None and by_parts_j is not None:
            gained_j = one_clock_j - by_parts_j
        savings.append(
            PartClockSavings(
                switch_latency_s=latency_s,
                deadline_s=deadline_s,
                one_clock_energy_j=one_clock_j,
                one_clock_saved_percent=_saved_percent(one_clock_j, fastest.energy),
                by_parts_energy_j=by_parts_j,
                by_parts_saved_percent=_saved_percent(by_parts_j, fastest.energy),
                gained_percent=percent(gained_j, fastest.energy),
            )
        )
    return savings


def _least_energy_j(frontier: Frontier, deadline_s: float, latency_s: float) -> float | None:
    """Energy of the best plan by a deadline, J; None where none was found."""
    try:
        return frontier.plan(deadline_s, switch_latency=latency_s).energy
    except NoAnswerError:
        return None


def _saved_percent(energy_j: float | None, usual_j: float) -> float | None:
    return None if energy_j is None else percent(usual_j - energy_j, usual_j)
