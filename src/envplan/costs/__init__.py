"""What a training run costs in money and carbon."""

from envplan.costs.model import MAX_ITERATIONS, Costs, Minimized, Overheads, Pair, Run, Spent
from envplan.costs.rates import Rate, read_rate
from envplan.costs.spending import (
    before_and_after,
    check_costs,
    pairs,
    priced,
    spent,
    tokens_per_iteration,
)

__all__ = [
    "MAX_ITERATIONS",
    "Costs",
    "Minimized",
    "Overheads",
    "Pair",
    "Rate",
    "Run",
    "Spent",
    "before_and_after",
    "check_costs",
    "pairs",
    "priced",
    "read_rate",
    "spent",
    "tokens_per_iteration",
]
