"""What a training run costs in money and carbon."""

from envplan.costs.model import Costs, Overheads, Pair, Run, Spent
from envplan.costs.rates import Rate, read_rate
from envplan.costs.spending import (
    check_costs,
    pairs,
    priced,
    spent,
    tokens_per_iteration,
)

__all__ = [
    "Costs",
    "Overheads",
    "Pair",
    "Rate",
    "Run",
    "Spent",
    "check_costs",
    "pairs",
    "priced",
    "read_rate",
    "spent",
    "tokens_per_iteration",
]
