"""Our own planner: the frontier's plan."""

from __future__ import annotations

from envplan.plan import Plan
from envplan.planners.base import Planner
from envplan.solve import Frontier
from envplan.units import s_from_ns


class FrontierPlanner(Planner):
    """The exact relaxation, rounded: Frontier.plan as a planner."""

    name = "frontier"
    takes_target = True

    def plan(self, frontier: Frontier, target_time_ns: int | None = None) -> Plan:
        """Raises: NoAnswerError: the target is below T_min."""
        return frontier.plan(None if target_time_ns is None else s_from_ns(target_time_ns))
