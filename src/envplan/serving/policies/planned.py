"""The exact planner as a policy: once for the peak, or for every epoch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Final

from envplan.errors import NoAnswerError
from envplan.serving.exact import exact_fleet
from envplan.serving.plan import Fleet
from envplan.serving.policies.outlook import Outlook, policy
from envplan.serving.profile import ServingProfile
from envplan.serving.simulation import FleetSpec, spec_of

__all__ = ["exact", "static"]

_GRID: Final = 1.02  # loads are rounded up to powers of this, so that plans can be kept
_GAP: Final = 1e-2
_PATIENCE_S: Final = 60.0  # the plan must not depend on how fast a machine is


@lru_cache(maxsize=4096)
def _alone(profile: ServingProfile, name: str, power: int, gpus: int) -> Fleet:
    return exact_fleet(profile, {name: _GRID**power}, gpus, merge=False, gap=_GAP, at_any_load=True)


def _apart(profile: ServingProfile, loads: Mapping[str, float], gpus: int) -> Fleet | None:
    """Every class in pools of its own; None if that is not possible."""
    try:
        pools = [
            pool
            for name, load in loads.items()
            for pool in _alone(profile, name, math.ceil(math.log(load, _GRID)), gpus).pools
        ]
    except NoAnswerError:
        return None
    fleet = Fleet("exact", tuple(pools))
    return fleet if fleet.gpus <= gpus else None


def _together(profile: ServingProfile, loads: Mapping[str, float], gpus: int) -> Fleet:
    return exact_fleet(profile, loads, gpus, gap=_GAP, at_any_load=True, time_limit=_PATIENCE_S)


@policy("static", "the exact plan for the peak, never changed", scales=False)
def static(outlook: Outlook) -> FleetSpec:
    return spec_of(_together(outlook.profile, outlook.loads(), outlook.settings.gpus), managed=True)


@policy("exact", "the exact plan of each class for what each epoch needs", scales=True)
def exact(outlook: Outlook) -> FleetSpec:
    """Least power within SLOs, class by class for speed; together where a class needs that."""
    loads, gpus = outlook.loads(), outlook.settings.gpus
    fleet = _apart(outlook.profile, loads, gpus)
    return spec_of(fleet or _together(outlook.profile, loads, gpus), managed=True)
