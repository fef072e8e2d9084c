"""When a sweep from the highest clock down has passed the clock of the least energy.

Below that clock, going slower costs time and energy alike. A sweep therefore stops after some
clocks in a row whose energy has risen above the least so far, and by more than noise: where the
power limit holds the clock, energy is flat over many clocks, and noise alone would rise a few times
in a row there before long.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

__all__ = ["EnergyMinimum"]

# Energies that differ by no more than so many standard errors may be the same.
_NOISE_ERRORS: Final = 2.0


@dataclass
class EnergyMinimum:
    """The least energy of a sweep so far, and how long ago it was.

    Attributes:
        max_rises: clocks in a row above the least energy, after which the sweep is below it.
        rises: of those, so far.
        energy_j: the least energy so far; infinite before the first.
        error_j: its standard error.
    """

    max_rises: int
    rises: int = 0
    energy_j: float = math.inf
    error_j: float = 0.0

    def is_passed_at(self, energy_j: float, error_j: float) -> bool:
        """Take in the energy at the next lower clock; whether that was one rise too many.

        Call it once for each clock, from the highest down.

        Args:
            energy_j: of all operations of a stage.
            error_j: its standard error.
        """
        rise_j = energy_j - self.energy_j
        is_rise = rise_j > _NOISE_ERRORS * math.hypot(error_j, self.error_j)
        self.rises = self.rises + 1 if is_rise else 0
        if energy_j < self.energy_j:
            self.energy_j, self.error_j = energy_j, error_j
        return self.rises >= self.max_rises
