"""Conditions that a plan keeps besides its deadline; a new one is a class here and a line below."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from envplan.request.limits.base import (
    AveragePower,
    EnergyBudget,
    Limit,
    MinHold,
    PeakPower,
    Setting,
    StatedResults,
)
from envplan.request.limits.probability import HoldsWithProbability
from envplan.request.limits.robustness import Robustness

AnyLimit = Annotated[
    MinHold | PeakPower | AveragePower | EnergyBudget | HoldsWithProbability,
    Field(discriminator="kind"),
]

__all__ = [
    "AnyLimit",
    "AveragePower",
    "EnergyBudget",
    "HoldsWithProbability",
    "Limit",
    "MinHold",
    "PeakPower",
    "Robustness",
    "Setting",
    "StatedResults",
]
