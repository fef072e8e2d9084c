"""A saving in parts: by parallelism, by one clock, and by what is left to decide."""

from __future__ import annotations

from typing import NamedTuple


class SavingsSplit(NamedTuple):
    """Parts of what a fleet saves, in percent of what the largest TP takes.

    Attributes:
        parallelism_percent: by the best TP at the highest clock.
        clocks_percent: by one lower clock for the whole fleet, and the best TP for it.
        scaling_percent: by all else: what changes over time, and instances that differ.
    """

    parallelism_percent: float
    clocks_percent: float
    scaling_percent: float

    @classmethod
    def of(
        cls, *, fleet: float, largest_tp: float, highest_clock: float, lower_clock: float | None
    ) -> SavingsSplit:
        """The parts by what fleets take, all in the same unit.

        Args:
            fleet: the one whose saving it is.
            largest_tp: the largest TP at the highest clock; above 0.
            highest_clock: the best fleet at the highest clock.
            lower_clock: the best one at one lower clock; None: there is none.
        """
        best = highest_clock if lower_clock is None else min(highest_clock, lower_clock)
        return cls(
            parallelism_percent=100 * (largest_tp - highest_clock) / largest_tp,
            clocks_percent=100 * (highest_clock - best) / largest_tp,
            scaling_percent=100 * (best - fleet) / largest_tp,
        )
