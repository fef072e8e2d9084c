"""DynamoLLM's policies: what it compares itself with, and itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from envplan.serving.demand import hosts
from envplan.serving.policies.outlook import Outlook, fleet_of, policy
from envplan.serving.simulation import FleetSpec

__all__ = ["dynamo_llm", "pool_by_class", "scale_freq", "scale_shard", "single_pool"]

_SMALL: Final = 1.0  # instances: a pool that needs less is merged into a higher one


def _highest(outlook: Outlook, classes: Sequence[str], pool: str) -> tuple[int, int]:
    """The largest instances, TP8 where there are, and how many."""
    tp = outlook.able(classes, pool)[-1]
    return tp, outlook.count(classes, pool, tp)


@policy("SinglePool", "one pool on TP8 at the highest clock, sized for the peak", scales=False)
def single_pool(outlook: Outlook) -> FleetSpec:
    name = outlook.the_home(outlook.classes)
    size = _highest(outlook, outlook.classes, name)
    return fleet_of({name: (outlook.pool(outlook.classes, name, *size), outlook.classes)})


@policy("ScaleInst", "MultiPool, and the number of instances follows the load", scales=True)
@policy("MultiPool", "a pool for each class, otherwise the same", scales=False)
def pool_by_class(outlook: Outlook, *, managed: bool = False) -> FleetSpec:
    """A pool for each class, of the largest instances."""
    return fleet_of({
        name: (outlook.pool(mine, name, *_highest(outlook, mine, name), managed=managed), mine)
        for name, mine in outlook.homes().items()
    })  # fmt: skip


@policy("ScaleShard", "MultiPool, and each pool's GPUs have the thriftiest TP", scales=False)
def scale_shard(outlook: Outlook) -> FleetSpec:
    pools = {}
    for name, mine in outlook.homes().items():
        tp, count = _highest(outlook, mine, name)
        choices = [
            (degree, tp * count // degree)
            for degree in outlook.able(mine, name)
            if tp * count // degree >= outlook.count(mine, name, degree)
        ]
        least = min(
            choices, key=lambda size: outlook.power(mine, name, size[0], size[1], packs=False)
        )
        pools[name] = (outlook.pool(mine, name, *least), mine)
    return fleet_of(pools)


@policy("ScaleFreq", "MultiPool, and clocks follow the load", scales=False)
def scale_freq(outlook: Outlook) -> FleetSpec:
    return pool_by_class(outlook, managed=True)


@policy("DynamoLLM", "all three, and small pools are merged into higher ones", scales=True)
def dynamo_llm(outlook: Outlook) -> FleetSpec:
    served = outlook.homes()
    while merged := _merged(outlook, served):
        served = merged
    pools = {}
    for name, classes in served.items():
        tp = outlook.thriftiest(classes, name, packs=False)
        count = outlook.count(classes, name, tp)
        pools[name] = (outlook.pool(classes, name, tp, count, managed=True), classes)
    return fleet_of(pools)


def _merged(outlook: Outlook, served: Mapping[str, list[str]]) -> dict[str, list[str]] | None:
    """The pools with the smallest one put into a higher one; None if nothing is to be merged."""

    def need(name: str) -> float:
        return outlook.need(served[name], name, outlook.able(served[name], name)[-1]).instances

    for name in sorted(served, key=need):
        if need(name) >= _SMALL and len(served) <= outlook.settings.pools:
            return None
        rest = {other: classes for other, classes in served.items() if other != name}
        if higher := [host for host in hosts(name, merge=True) if host in rest]:
            return {**rest, higher[0]: [*served[name], *rest[higher[0]]]}
        if len(served) > outlook.settings.pools:
            for other in rest:
                if home := outlook.one_home([name, other]):
                    kept = {key: classes for key, classes in rest.items() if key != other}
                    return {**kept, home: [*served[name], *rest[other], *kept.get(home, ())]}
    return None
