"""Planners: ways to choose a frequency for every operation, all behind one protocol.

Enters: a frontier and a request. Leaves: a plan; comparisons of planners; advice on schedules.
Simulation, sweeps and the command line may import it.
"""

from __future__ import annotations

from typing import Final

from envplan.errors import InputError, unknown
from envplan.planners.advice import Advice, advise
from envplan.planners.base import FrontierPlanner, MaxFrequency, Planner
from envplan.planners.comparison import (
    Comparison,
    Entry,
    Published,
    StragglerOutcome,
    TimeEnergy,
    compare,
)
from envplan.planners.envpipe import EnvPipe, EnvPipeRun, forwards_ahead
from envplan.planners.part_clocks import PartClockSavings, compare_part_clocks
from envplan.planners.zeus import ZeusGlobal, ZeusPerStage

__all__ = [
    "PLANNERS", "Advice", "Comparison", "Entry", "EnvPipe", "EnvPipeRun", "FrontierPlanner",
    "MaxFrequency", "PartClockSavings", "Planner", "Published", "StragglerOutcome", "TimeEnergy",
    "ZeusGlobal", "ZeusPerStage", "advise", "compare", "compare_part_clocks", "forwards_ahead",
    "planner_named",
]  # fmt: skip

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
