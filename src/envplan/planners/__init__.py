"""Planners: ways to choose a frequency for every operation, all behind one protocol."""

from __future__ import annotations

from envplan.planners.advice import Advice, advise
from envplan.planners.base import Planner
from envplan.planners.baselines import ZeusGlobal, ZeusPerStage
from envplan.planners.comparison import Comparison, Entry, compare
from envplan.planners.envpipe import EnvPipe, EnvPipeRun, forwards_ahead
from envplan.planners.parts import PartsRow, beside_one_clock
from envplan.planners.registry import PLANNERS, planner_named

__all__ = [
    "PLANNERS",
    "Advice",
    "Comparison",
    "Entry",
    "EnvPipe",
    "EnvPipeRun",
    "PartsRow",
    "Planner",
    "ZeusGlobal",
    "ZeusPerStage",
    "advise",
    "beside_one_clock",
    "compare",
    "forwards_ahead",
    "planner_named",
]
