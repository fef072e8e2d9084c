"""Our own planner: the frontier's plan, never worse than a plan it is shown."""

from __future__ import annotations

from collections.abc import Iterable

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


def best_plan_beside(
    frontier: Frontier, time_ns: int, others: Iterable[Plan], *, waits: bool = False
) -> Plan:
    """Our plan for a time, or what another planner makes of the same pipeline where that is better.

    Rounding is a heuristic: once in a while another planner's choice happens to lie closer to the
    bound than what it finds.

    Args:
        time_ns: when the iteration must be over, not below T_min, ns.
        others: plans of the same pipeline; those that are slower are passed over.
        waits: everybody waits until then however early they are.
    """
    time_s = s_from_ns(time_ns)
    best = frontier.plan(sync_time=time_s) if waits else frontier.plan(time_s)
    for other in others:
        better = other.uses_less_until_any_time_after(best) if waits else other.energy < best.energy
        if better and other.iteration_time <= time_s:
            best = other.model_copy(update={"planner": FrontierPlanner.name})
    return best
