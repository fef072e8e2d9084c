"""envplan's own policies: the optimum over all ways to sort classes into pools, and one pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from envplan.serving.policies.outlook import Outlook, home, policy
from envplan.serving.simulation import Fleet

#: Classes of each pool, by its TP.
Split = Mapping[int, Sequence[str]]


def _power(outlook: Outlook, split: Split) -> float:
    """What the pools draw, W, by Outlook.power."""
    return sum(
        outlook.power(classes, tp, outlook.count(classes, tp), packs=True)
        for tp, classes in split.items()
    )


def least_power(outlook: Outlook) -> tuple[float, Split]:
    """The split of classes over pools that draws the least power, W, and this power.

    Branch and bound, class by class. Pools have what the bursts of their classes together need, so
    two pools of one TP are never better than one: a class chooses a TP. A pool that serves more
    classes draws no less, so a part of a split bounds the whole from below.
    """
    choices = {name: outlook.able([name]) for name in outlook.classes}
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
        grown = [{**split, tp: [*split.get(tp, ()), name]} for tp in choices[name]]
        for drawn, each in sorted(
            ((_power(outlook, each), each) for each in grown), key=lambda e: e[0]
        ):
            branch(each, others, drawn)

    branch({}, order, 0.0)
    return best


@policy("exact", "the best pools for what each epoch needs", scales=True)
@policy("static", "the best pools for the peak, never changed", scales=False)
def best_pools(outlook: Outlook) -> Fleet:
    """Pools as least_power has them, or those that run where others draw hardly less."""
    drawn, split = least_power(outlook)
    if (present := _present(outlook)) and outlook.worth * _power(outlook, present) <= drawn:
        split = present
    name = home(outlook.classes)
    return Fleet({
        f"{name} on TP{tp}": outlook.pool(classes, tp, name=name, managed=True, packs=True)
        for tp, classes in split.items()
    })  # fmt: skip


def _present(outlook: Outlook) -> Split:
    """The split that runs, with the classes that come; empty if it lacks one of them."""
    split: dict[int, list[str]] = {}
    tps = {name: pool.tp for pool in (outlook.present or {}).values() for name in pool.serves}
    for name in outlook.classes:
        if name not in tps:
            return {}
        split.setdefault(tps[name], []).append(name)
    return split


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
