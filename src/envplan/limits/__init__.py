"""Conditions that a plan keeps besides its deadline; a new one is a file here and a line below."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from envplan.limits.average_power import AveragePower
from envplan.limits.base import Limit, Setting
from envplan.limits.energy_budget import EnergyBudget
from envplan.limits.min_hold import MinHold
from envplan.limits.peak_power import PeakPower
from envplan.limits.probability import HoldsWithProbability, Robustness

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
]
