"""envplan's own policy: one pool, the thriftiest TP, instances filled up one after another."""

from __future__ import annotations

from envplan.serving.policies.outlook import Outlook, home, policy
from envplan.serving.simulation import Fleet

__all__ = ["packing"]


@policy("envplan", "one pool, filled up instance by instance; number, TP, clocks follow the load",
        scales=True)  # fmt: skip
def packing(outlook: Outlook) -> Fleet:
    """One pool for everything, because bursts of different classes even each other out.

    Prompts with near deadlines go first in every instance, so short requests do not wait for long
    ones. Requests go to the first instance that answers in time: what is kept for bursts idles.
    """
    name = home(outlook.classes)
    tp = outlook.thriftiest(outlook.classes, name, packs=True)
    return Fleet({name: outlook.pool(outlook.classes, tp, managed=True, packs=True)})
