"""The optimum over all ways to sort classes into pools: once for the peak, or for every epoch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from envplan.serving.demand import hosts
from envplan.serving.policies.outlook import Outlook, fleet_of, policy
from envplan.serving.simulation import FleetSpec

__all__ = ["best_pools", "least_power"]

#: Classes of each pool, by the pool's class and TP.
Split = Mapping[tuple[str, int], Sequence[str]]


def _power(outlook: Outlook, split: Split) -> float:
    """What the pools draw, W, by Outlook.power."""
    return sum(
        outlook.power(classes, pool, tp, outlook.count(classes, pool, tp), packs=True)
        for (pool, tp), classes in split.items()
    )


def least_power(outlook: Outlook) -> tuple[float, Split]:
    """The split of classes over pools that draws the least power, W, and this power.

    Branch and bound, class by class. Pools have what the bursts of their classes together need, so
    two pools of one class and TP are never better than one: a class chooses a pool's class and TP.
    A pool that serves more classes draws no less, so a part of a split bounds the whole from below.
    """
    one = outlook.one_home(outlook.classes) if outlook.profile.phases else None
    choices = {
        name: [(pool, tp) for pool in ([one] if one else hosts(name, merge=True))
               for tp in outlook.able([name], pool)]
        for name in outlook.classes
    }  # fmt: skip
    order = sorted(choices, key=lambda name: -_power(outlook, {choices[name][0]: [name]}))
    best: tuple[float, Split] = (float("inf"), {})

    def branch(split: Split, rest: Sequence[str], power: float) -> None:
        nonlocal best
        if power >= best[0]:
            return
        if not rest:
            best = (power, split)
            return
        name, *others = rest
        grown = [{**split, key: [*split.get(key, ()), name]} for key in choices[name]]
        for drawn, each in sorted(
            ((_power(outlook, each), each) for each in grown), key=lambda e: e[0]
        ):
            branch(each, others, drawn)

    branch({}, order, 0.0)
    return best


@policy("exact", "the best pools for what each epoch needs", scales=True)
@policy("static", "the best pools for the peak, never changed", scales=False)
def best_pools(outlook: Outlook) -> FleetSpec:
    """Pools as least_power has them, or those that run where others draw hardly less."""
    drawn, split = least_power(outlook)
    if (present := _present(outlook)) and outlook.worth * _power(outlook, present) <= drawn:
        split = present
    pools = {}
    for (name, tp), classes in split.items():
        count = outlook.count(classes, name, tp)
        pools[f"{name} on TP{tp}"] = (
            outlook.pool(classes, name, tp, count, managed=True, packs=True), classes
        )  # fmt: skip
    return fleet_of(pools)


def _present(outlook: Outlook) -> Split:
    """The split that runs, with the classes that come; empty if it lacks one of them."""
    split: dict[tuple[str, int], list[str]] = {}
    for name in outlook.classes:
        if not outlook.present or name not in outlook.present.routes:
            return {}
        pool = outlook.present.pools[outlook.present.routes[name]]
        split.setdefault((pool.name, pool.tp), []).append(name)
    return split
