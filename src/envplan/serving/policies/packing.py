"""envplan's own policy: one pool, the thriftiest TP, instances filled up one after another."""

from __future__ import annotations

from envplan.serving.policies.outlook import Outlook, fleet_of, policy
from envplan.serving.simulation import FleetSpec

__all__ = ["packing"]


@policy("envplan", "one pool, filled up instance by instance; number, TP, clocks follow the load",
        scales=True)  # fmt: skip
def packing(outlook: Outlook) -> FleetSpec:
    """One pool for everything, because bursts of different classes even each other out.

    Prompts with near deadlines go first in every instance, so short requests do not wait for long
    ones. Requests go to the first instance that answers in time: what is kept for bursts idles.
    """
    classes = outlook.classes
    name = outlook.the_home(classes)
    tp = outlook.thriftiest(classes, name, packs=True)
    count = outlook.count(classes, name, tp)
    pool = outlook.pool(classes, name, tp, count, managed=True, packs=True)
    return fleet_of({name: (pool, classes)})
