"""What every planner is asked: loads, GPUs; and why there may be no answer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Final

from envplan.errors import InputError, NoAnswerError
from envplan.serving.classes import CLASSES, check_class, hosts
from envplan.serving.profile import ServingProfile

__all__ = ["LEAST_LOAD", "check_demand", "check_reachable", "too_few"]

#: tokens/s: what is less is none, and what is more than MOST_LOAD no planner could tell apart.
LEAST_LOAD: Final = 0.01
MOST_LOAD: Final = 1e9


def check_demand(loads: Mapping[str, float], gpus: int) -> dict[str, float]:
    """The loads above zero, in the order of the classes.

    Raises:
        InputError: there is no load, no GPU, or no such class.
    """
    if gpus < 1:
        raise InputError(f"a fleet needs at least one GPU, not {gpus}")
    for name, load in loads.items():
        check_class(name)
        if not (math.isfinite(load) and (load == 0 or LEAST_LOAD <= load <= MOST_LOAD)):
            raise InputError(
                f"the load of {name} must be 0, or from {LEAST_LOAD:g} to {MOST_LOAD:g} tokens/s, "
                f"not {load:g}"
            )
    wanted = {name: float(loads[name]) for name in CLASSES if loads.get(name)}
    if not wanted:
        raise InputError("there is no load; give at least one class tokens/s above 0")
    return wanted


def check_reachable(profile: ServingProfile, loads: Iterable[str], *, merge: bool = True) -> None:
    """Every class has a configuration that meets its SLO at some load.

    Raises:
        NoAnswerError: one has none; says which SLO it misses and the best there is.
    """
    for name in loads:
        slo = profile.classes[name].slo
        curves = [curve for host in hosts(name, merge=merge) for curve in profile.of(host)]
        if not curves:
            raise NoAnswerError(
                f"no configuration of profile {profile.name} serves {name}"
                + (" or a higher class" if merge else "")
            )
        if any(curve.segments(slo) for curve in curves):
            continue
        apart = f"its tokens {slo.tbt_s:g} s apart"
        if paced := [curve.ttft_s[0] for curve in curves if curve.tbt_s[0] <= slo.tbt_s]:
            missed = f"its first token within {slo.ttft_s:g} s"
            best = f"the best that keeps {apart} takes {min(paced):g} s"
        else:
            missed, best = apart, f"the best takes {min(curve.tbt_s[0] for curve in curves):g} s"
        raise NoAnswerError(f"no configuration gives {name} {missed}; {best}")


def too_few(
    gpus: int, needed: int, by_class: Mapping[str, int], what: str = "the loads need at least"
) -> NoAnswerError:
    """That the fleet is too small, by how much, and which class takes most of it, if known."""
    largest = max(by_class, key=lambda name: by_class[name], default=None)
    most = "" if largest is None else f"; class {largest} takes most, {by_class[largest]} GPUs"
    return NoAnswerError(
        f"{what} {needed} GPUs, {needed - gpus} more than the {gpus} there are{most}"
    )
