"""Rates, runs, money and carbon.

Enters: prices and carbon intensities, how long a run is, time and energy. Leaves: what they cost.
Knows no profile and no plan; anything above may import it.
"""

from envplan.costs.model import (
    Cost,
    CostComparison,
    Overheads,
    Run,
    RunComparison,
    RunCosts,
    TimeAndEnergy,
)
from envplan.costs.rates import Rate

__all__ = [
    "Cost",
    "CostComparison",
    "Overheads",
    "Rate",
    "Run",
    "RunComparison",
    "RunCosts",
    "TimeAndEnergy",
]
