"""All planners by the name a user gives them, and our own among them."""

from __future__ import annotations

from typing import Final

from envplan.errors import InputError, unknown
from envplan.plan import Plan
from envplan.planners.base import Planner
from envplan.planners.baselines import MaxFrequency, ZeusGlobal, ZeusPerStage
from envplan.planners.envpipe import EnvPipe
from envplan.solve import Frontier
from envplan.units import s_from_ns


class FrontierPlanner(Planner):
    """The exact relaxation, rounded: Frontier.plan as a planner."""

    name = "frontier"
    takes_target = True

    def plan(self, frontier: Frontier, target_time_ns: int | None = None) -> Plan:
        """Raises: NoAnswerError: the target is below T_min."""
        return frontier.plan(None if target_time_ns is None else s_from_ns(target_time_ns))


#: Every planner by name, in the order in which they are compared.
PLANNERS: Final[dict[str, Planner]] = {
    planner.name: planner
    for planner in (MaxFrequency(), ZeusGlobal(), ZeusPerStage(), EnvPipe(), FrontierPlanner())
}


def planner_named(name: str) -> Planner:
    """The planner of that name.

    Raises:
        InputError: there is none; lists those there are.
    """
    if name not in PLANNERS:
        raise InputError(unknown("planner", name, PLANNERS))
    return PLANNERS[name]
