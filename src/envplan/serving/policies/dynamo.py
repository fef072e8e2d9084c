"""DynamoLLM's policies: what it compares itself with, and itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from envplan.serving.classes import hosts
from envplan.serving.policies.outlook import Outlook, home, policy
from envplan.serving.simulation import Fleet

_SMALL: Final = 1.0  # instances: a pool that needs less is merged into a higher one


@policy("SinglePool", "one pool on TP8 at the highest clock, sized for the peak", scales=False)
def single_pool(outlook: Outlook) -> Fleet:
    classes = outlook.classes
    return Fleet({home(classes): outlook.pool(classes, outlook.able(classes)[-1])})


@policy("ScaleInst", "MultiPool, and the number of instances follows the load", scales=True)
@policy("MultiPool", "a pool for each class, otherwise the same", scales=False)
def pool_by_class(outlook: Outlook, *, managed: bool = False) -> Fleet:
    """A pool for each class, of the largest instances."""
    return Fleet({
        name: outlook.pool([name], outlook.able([name])[-1], managed=managed)
        for name in outlook.classes
    })  # fmt: skip


@policy("ScaleShard", "MultiPool, and each pool's GPUs have the thriftiest TP", scales=False)
def scale_shard(outlook: Outlook) -> Fleet:
    fleet = Fleet()
    for name in outlook.classes:
        able = outlook.able([name])
        gpus = able[-1] * outlook.count([name], able[-1])
        counts = {tp: gpus // tp for tp in able if gpus // tp >= outlook.count([name], tp)}
        tp = min(counts, key=lambda tp: outlook.power([name], tp, counts[tp], packs=False))
        fleet[name] = outlook.pool([name], tp, counts[tp])
    return fleet


@policy("ScaleFreq", "MultiPool, and clocks follow the load", scales=False)
def scale_freq(outlook: Outlook) -> Fleet:
    return pool_by_class(outlook, managed=True)


@policy("DynamoLLM", "all three, and small pools are merged into higher ones", scales=True)
def dynamo_llm(outlook: Outlook) -> Fleet:
    served = {name: [name] for name in outlook.classes}
    while merged := _merged(outlook, served):
        served = merged
    fleet = Fleet()
    for name, classes in served.items():
        tp = outlook.thriftiest(classes, name, packs=False)
        fleet[name] = outlook.pool(classes, tp, name=name, managed=True)
    return fleet


def _merged(outlook: Outlook, served: Mapping[str, list[str]]) -> dict[str, list[str]] | None:
    """The pools with the smallest one put into a higher one; None if nothing is to be merged."""

    def need(name: str) -> float:
        return outlook.need(served[name], outlook.able(served[name])[-1]).instances

    for name in sorted(served, key=need):
        if need(name) >= _SMALL and len(served) <= outlook.settings.pools:
            return None
        rest = {other: classes for other, classes in served.items() if other != name}
        if higher := [host for host in hosts(name) if host in rest]:
            return {**rest, higher[0]: [*served[name], *rest[higher[0]]]}
        if len(served) > outlook.settings.pools:
            other = next(iter(rest))
            into = home([name, other])
            moved = [*served[name], *rest.pop(other)]
            return {**rest, into: [*moved, *rest.get(into, ())]}
    return None
