"""From a request to a plan: relaxation, rounding, and one search under all limits."""

from envplan.solve.frontier import (
    LADDER,
    Frontier,
    plan_from_clocks,
    trace_frontier,
    trace_job,
)
from envplan.solve.local_search import NoPlanInTimeError
from envplan.solve.search import ladder, solve

__all__ = [
    "LADDER",
    "Frontier",
    "NoPlanInTimeError",
    "ladder",
    "plan_from_clocks",
    "solve",
    "trace_frontier",
    "trace_job",
]
