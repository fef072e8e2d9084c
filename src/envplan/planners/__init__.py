"""Planners: ways to choose a frequency for every operation, all behind one protocol."""

from __future__ import annotations

from typing import Final

from envplan.errors import InputError, unknown
from envplan.planners.base import FrontierPlanner, MaxFrequency, Planner, ZeusGlobal, ZeusPerStage
from envplan.planners.comparison import (
    Advice,
    Comparison,
    Entry,
    advise,
    beside_one_clock,
    compare,
)
from envplan.planners.envpipe import EnvPipe, EnvPipeRun, forwards_ahead

__all__ = [
    "PLANNERS",
    "Advice",
    "Comparison",
    "Entry",
    "EnvPipe",
    "EnvPipeRun",
    "Planner",
    "ZeusGlobal",
    "ZeusPerStage",
    "advise",
    "beside_one_clock",
    "compare",
    "forwards_ahead",
    "planner_named",
]

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
