"""What a training run costs in money and carbon."""

from envplan.costs.model import Overheads, Run
from envplan.costs.rates import Rate
from envplan.costs.spending import priced

__all__ = ["Overheads", "Rate", "Run", "priced"]
