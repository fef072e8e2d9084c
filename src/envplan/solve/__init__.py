"""From a request to a plan: relaxation, rounding, and one search under all limits."""

from envplan.solve.frontier import Frontier, plan_from_clocks, trace_frontier, trace_job
from envplan.solve.search import solve

__all__ = ["Frontier", "plan_from_clocks", "solve", "trace_frontier", "trace_job"]
