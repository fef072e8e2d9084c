"""From a request to a plan: relaxation, rounding, and one search under all limits.

Enters: a frontier and a request. Leaves: a plan with its certified gap.
Planners, simulation, sweeps, checks and the command line import it.
"""

from envplan.solve.from_clocks import plan_from_clocks
from envplan.solve.frontier import Frontier, trace_frontier, trace_job

__all__ = ["Frontier", "plan_from_clocks", "trace_frontier", "trace_job"]
