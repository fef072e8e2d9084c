"""Ways to sort request classes into pools.

A new way is a function from a DemandForecast to a PoolAssignment.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Final, NamedTuple

from envplan.serving.fleet import Fleet
from envplan.serving.forecast import DemandForecast
from envplan.serving.power_model import pool_power_w

#: A pool that needs fewer instances is merged into a higher one.
_MIN_POOL_INSTANCES: Final = 1.0

#: The classes of each pool, by the pool's home class.
PoolAssignment = Mapping[str, Sequence[str]]

#: The classes of each pool, by its TP; pools of one TP are one.
ClassesByTp = Mapping[int, Sequence[str]]


def one_pool(forecast: DemandForecast) -> PoolAssignment:
    """One pool for everything."""
    return {forecast.lowest_host(forecast.classes): forecast.classes}


def by_class(forecast: DemandForecast) -> PoolAssignment:
    """One pool for each class."""
    return {name: [name] for name in forecast.classes}


def merged(forecast: DemandForecast) -> PoolAssignment:
    """One pool for each class, but small ones in higher ones, and no more than there may be."""
    pools: dict[str, Sequence[str]] = {name: [name] for name in forecast.classes}
    was_merged = True
    while was_merged:
        was_merged = _merge_smallest(pools, forecast)
    return pools


def _merge_smallest(pools: dict[str, Sequence[str]], forecast: DemandForecast) -> bool:
    """Merge the smallest pool that should and can be merged; False if there is none.

    A pool goes into the lowest higher one. Where there are too many pools and no higher one, it
    goes together with any other into the pool of a class that is higher than both.
    """

    def instances_needed(name: str) -> float:
        largest_tp = forecast.feasible_tps(pools[name])[-1]
        return forecast.demand(pools[name], largest_tp).instances

    too_many = len(pools) > forecast.settings.max_pools
    for name in sorted(pools, key=instances_needed):
        if not too_many and instances_needed(name) >= _MIN_POOL_INSTANCES:
            continue
        companions = [companion for companion in pools if companion != name]
        hosts = [host for host in forecast.all_classes.hosts(name) if host in companions]
        if hosts:
            lowest_host = hosts[0]
            pools[lowest_host] = [*pools.pop(name), *pools[lowest_host]]
            return True
        if too_many:
            companion = companions[0]
            classes = [*pools.pop(name), *pools.pop(companion)]
            pools[forecast.lowest_host([name, companion])] = classes
            return True
    return False


def least_power_unless_close(
    forecast: DemandForecast, present: Fleet, power_ratio: float
) -> ClassesByTp:
    """The assignment of least power, or the present one where others draw hardly less.

    Args:
        forecast: what is expected.
        present: the fleet that runs.
        power_ratio: share of the present assignment's power that another must stay below.
    """
    best = least_power(forecast)
    present_classes: dict[int, Sequence[str]] = {}
    for pool in present.pools.values():
        classes = [name for name in forecast.classes if name in pool.serves]
        if classes:
            present_classes[pool.tp] = classes
    served = set(chain.from_iterable(present_classes.values()))
    if served != set(forecast.classes):
        return best.classes_by_tp
    if power_ratio * _power_w(forecast, present_classes) <= best.power_w:
        return present_classes
    return best.classes_by_tp


class RatedAssignment(NamedTuple):
    """Classes by TP, and about what their pools draw."""

    power_w: float
    classes_by_tp: ClassesByTp


class _Node(NamedTuple):
    """A node of the search: the first `num_assigned` of the classes, largest first, are assigned.

    `power_w` bounds the power of all assignments that go on from here.
    """

    power_w: float
    classes_by_tp: ClassesByTp
    num_assigned: int


def least_power(forecast: DemandForecast) -> RatedAssignment:
    """The assignment of classes to pools that draws the least.

    Branch and bound, class by class. Pools have what the bursts of their classes together need, so
    two pools of one TP are never better than one: a class chooses a TP. A pool that serves more
    classes draws no less, so a part of an assignment bounds the whole from below.
    """
    tps: dict[str, list[int]] = {}
    power_alone_w: dict[str, float] = {}
    for name in forecast.classes:
        tps[name] = forecast.responsive_tps([name], forecast.feasible_tps([name]))
        smallest_tp = tps[name][0]
        power_alone_w[name] = _power_w(forecast, {smallest_tp: [name]})
    largest_first = sorted(tps, key=lambda name: -power_alone_w[name])
    best = RatedAssignment(math.inf, {})
    open_nodes = [_Node(0.0, {}, num_assigned=0)]
    while open_nodes:
        node = open_nodes.pop()
        if node.power_w >= best.power_w:
            continue
        if node.num_assigned == len(largest_first):
            best = RatedAssignment(node.power_w, node.classes_by_tp)
            continue
        name = largest_first[node.num_assigned]
        children = [_assign(forecast, node, name, tp) for tp in tps[name]]
        children.sort(key=lambda child: child.power_w, reverse=True)  # the best is popped first
        open_nodes += children
    return best


def _assign(forecast: DemandForecast, node: _Node, name: str, tp: int) -> _Node:
    """The node with one class more, in the pool of a TP."""
    classes_by_tp = {**node.classes_by_tp, tp: [*node.classes_by_tp.get(tp, ()), name]}
    return _Node(_power_w(forecast, classes_by_tp), classes_by_tp, node.num_assigned + 1)


def _power_w(forecast: DemandForecast, classes_by_tp: ClassesByTp) -> float:
    """About what the pools of an assignment draw."""
    power_w = 0.0
    for tp, classes in classes_by_tp.items():
        num_instances = forecast.instances_needed(classes, tp)
        power_w += pool_power_w(forecast, classes, tp, num_instances, consolidates=True)
    return power_w
