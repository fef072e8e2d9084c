"""Fleets that somebody else has decided on: written out as in 3xTP4@1200, or a serving plan's."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

from envplan.errors import InputError
from envplan.serving.classes import RequestClasses
from envplan.serving.fleet import Fleet, PoolSpec
from envplan.serving.instances import Instances
from envplan.serving.performance import Configuration, InstancePerformance
from envplan.serving.plan import ServingPlan
from envplan.serving.split_fleet import SplitFleet

_INSTANCES: Final = re.compile(r"(?P<count>\d+)\s*x\s*TP(?P<tp>\d+)@(?P<mhz>\d+)", re.IGNORECASE)
_POOL: Final = "pool"


def parse_fleet(text: str, classes: RequestClasses) -> Fleet:
    """The fleet of `3xTP4@1200,1xTP8@1980`: one pool of instances, whose clocks stay as they are.

    Args:
        text: as above.
        classes: of requests, which it serves all.

    Raises:
        InputError: it is not written so.
    """
    pools = {}
    for number, part in enumerate(text.split(",")):
        match = _INSTANCES.fullmatch(part.strip())
        if match is None or not int(match["count"]):
            raise InputError(f"a fleet is written as in 3xTP4@1200,1xTP8@1980, not {text!r}")
        configuration = Configuration(int(match["tp"]), int(match["mhz"]))
        instances = Instances(configuration, int(match["count"]))
        pools[f"{_POOL} {number}"] = instances.pool(classes, part_of=_POOL)
    return Fleet(pools)


def fleet_of_plan(plan: ServingPlan) -> Fleet | SplitFleet:
    """The fleet of a plan. A class that several pools serve goes to the last of them.

    Others help where a request would be late in its own pool.

    Raises:
        InputError: several pools have instances with roles, and each would serve its own classes.
    """
    if any(pool.has_roles for pool in plan.pools):
        return _split_fleet_of(plan)
    pools = {}
    for pool_number, pool in enumerate(plan.pools):
        for group_number, group in enumerate(pool.groups):
            pools[f"{pool_number}.{group_number}"] = PoolSpec(
                home_class=pool.request_class,
                serves=frozenset(pool.classes),
                tp=group.tp,
                frequency_mhz=group.frequency_mhz,
                num_instances=group.instances,
                part_of=f"{_POOL} {pool_number}",
            )
    return Fleet(pools)


def _split_fleet_of(plan: ServingPlan) -> SplitFleet:
    if len(plan.pools) > 1:
        raise InputError(
            "traces are replayed on one pool of instances for prefill and one for decode; this "
            f"plan has {len(plan.pools)} of each: plan without --no-merge"
        )
    instances = [Instances(group.configuration, group.instances) for group in plan.pools[0].groups]
    return SplitFleet(*instances)


def require_performance(
    fleet: Fleet | SplitFleet, performance: Mapping[Configuration, InstancePerformance]
) -> None:
    """Refuse instances that a profile has no figures for.

    Raises:
        InputError: naming the instances, and what there is.
    """
    for tp, clock_mhz in fleet.configurations:
        if Configuration(tp, clock_mhz) not in performance:
            raise InputError(
                f"the profile has no TP{tp} at {clock_mhz} MHz; it has "
                f"{_configurations_text(performance)}"
            )


def _configurations_text(configurations: Iterable[Configuration]) -> str:
    clocks_mhz: dict[int, list[str]] = {}
    for tp, clock_mhz in sorted(configurations):
        clocks_mhz.setdefault(tp, []).append(str(clock_mhz))
    return "; ".join(f"TP{tp} at {', '.join(clocks)}" for tp, clocks in clocks_mhz.items())
