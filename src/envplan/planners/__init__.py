"""Planners: ways to choose a frequency for every operation, all behind one protocol.

Enters: a frontier and a request. Leaves: a plan; comparisons of planners; advice on schedules.
Simulation, sweeps and the command line may import it.
"""

from __future__ import annotations

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
from envplan.planners.registry import PLANNERS, planner_named
from envplan.planners.zeus import ZeusGlobal, ZeusPerStage

__all__ = [
    "PLANNERS", "Advice", "Comparison", "Entry", "EnvPipe", "EnvPipeRun", "FrontierPlanner",
    "MaxFrequency", "PartClockSavings", "Planner", "Published", "StragglerOutcome", "TimeEnergy",
    "ZeusGlobal", "ZeusPerStage", "advise", "compare", "compare_part_clocks", "forwards_ahead",
    "planner_named",
]  # fmt: skip
