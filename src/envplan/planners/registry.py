"""The registry of planners: a new planner is a class in a file of its own, and its name here."""

from __future__ import annotations

from typing import Final

from envplan.errors import InputError, unknown
from envplan.planners.base import FrontierPlanner, MaxFrequency, Planner
from envplan.planners.envpipe import EnvPipe
from envplan.planners.zeus import ZeusGlobal, ZeusPerStage

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
