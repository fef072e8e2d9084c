"""Conditions that a plan keeps besides its deadline, a file for each.

A new limit is a file here, and its name in `AnyLimit` below: everything else asks `LIMITS`.
"""

from __future__ import annotations

from typing import Annotated, Final, get_args

from pydantic import Field

from envplan.request.limits.average_power import AveragePower
from envplan.request.limits.base import (
    NO_PENALTIES,
    KindReplay,
    Limit,
    LimitContext,
    LimitOption,
    Penalties,
    StatedResults,
    WholeJob,
)
from envplan.request.limits.energy_budget import EnergyBudget
from envplan.request.limits.min_dwell import MinDwell
from envplan.request.limits.peak_power import PeakPower
from envplan.request.limits.power_ramp import PowerRamp
from envplan.request.limits.probability import HoldsWithProbability
from envplan.request.limits.robustness import Robustness

#: Every limit, in the order in which a request lists them.
AnyLimit = Annotated[
    MinDwell | PowerRamp | PeakPower | AveragePower | EnergyBudget | HoldsWithProbability,
    Field(discriminator="kind"),
]

LIMITS: Final[tuple[type[Limit], ...]] = get_args(get_args(AnyLimit)[0])

#: Every number that is asked for by an option, in the same order.
LIMIT_OPTIONS: Final[tuple[LimitOption, ...]] = tuple(
    option for limit in LIMITS for option in limit.options
)

__all__ = [
    "LIMITS",
    "LIMIT_OPTIONS",
    "NO_PENALTIES",
    "AnyLimit",
    "AveragePower",
    "EnergyBudget",
    "HoldsWithProbability",
    "KindReplay",
    "Limit",
    "LimitContext",
    "LimitOption",
    "MinDwell",
    "PeakPower",
    "Penalties",
    "PowerRamp",
    "Robustness",
    "StatedResults",
    "WholeJob",
]
