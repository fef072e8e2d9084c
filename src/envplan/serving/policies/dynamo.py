"""DynamoLLM's policies: what it compares itself with, and itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from envplan.serving.demand import hosts
from envplan.serving.policies.outlook import Outlook, fleet_of, longest_of, policy
from envplan.serving.simulation import FleetSpec

__all__ = ["dynamo_llm", "multi_pool", "scale_freq", "scale_inst", "scale_shard", "single_pool"]

_SMALL: Final = 1.0  # instances: a pool that needs less is merged into a higher one


def _highest(outlook: Outlook, classes: Sequence[str], pool: str) -> tuple[int, int]:
    """The largest instances, TP8 where there are, and how many."""
    tp = outlook.able(classes, pool)[-1]
    return tp, outlook.count(classes, pool, tp)


def _by_class(outlook: Outlook, *, managed: bool = False) -> FleetSpec:
    """A pool for each class, of the largest instances."""
    return fleet_of({
        name: (outlook.pool([name], name, *_highest(outlook, [name], name), managed=managed), [name])
        for name in outlook.classes
    })  # fmt: skip


@policy("SinglePool", "one pool on TP8 at the highest clock, sized for the peak", scales=False)
def single_pool(outlook: Outlook) -> FleetSpec:
    name = longest_of(outlook.classes)
    size = _highest(outlook, outlook.classes, name)
    return fleet_of({name: (outlook.pool(outlook.classes, name, *size), outlook.classes)})


@policy("MultiPool", "a pool for each class, otherwise the same", scales=False)
def multi_pool(outlook: Outlook) -> FleetSpec:
    return _by_class(outlook)


@policy("ScaleInst", "MultiPool, and the number of instances follows the load", scales=True)
def scale_inst(outlook: Outlook) -> FleetSpec:
    return _by_class(outlook)


@policy("ScaleShard", "MultiPool, and each pool's GPUs have the thriftiest TP", scales=False)
def scale_shard(outlook: Outlook) -> FleetSpec:
    pools = {}
    for name in outlook.classes:
        tp, count = _highest(outlook, [name], name)
        choices = [
            (degree, tp * count // degree)
            for degree in outlook.able([name], name)
            if tp * count // degree >= outlook.count([name], name, degree)
        ]
        least = min(choices, key=lambda size: outlook.power([name], name, *size, packs=False))
        pools[name] = (outlook.pool([name], name, *least), [name])
    return fleet_of(pools)


@policy("ScaleFreq", "MultiPool, and clocks follow the load", scales=False)
def scale_freq(outlook: Outlook) -> FleetSpec:
    return _by_class(outlook, managed=True)


@policy("DynamoLLM", "all three, and small pools are merged into higher ones", scales=True)
def dynamo_llm(outlook: Outlook) -> FleetSpec:
    served = {name: [name] for name in outlook.classes}
    for name in outlook.classes:
        tp = outlook.able(served[name], name)[-1]
        higher = [host for host in hosts(name, merge=True)[1:] if host in served]
        if higher and outlook.need(served[name], name, tp).instances < _SMALL:
            served[higher[0]] = [*served.pop(name), *served[higher[0]]]
    pools = {}
    for name, classes in served.items():
        tp = outlook.thriftiest(classes, name, packs=False)
        count = outlook.count(classes, name, tp)
        pools[name] = (outlook.pool(classes, name, tp, count, managed=True), classes)
    return fleet_of(pools)
