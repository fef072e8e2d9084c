"""The hierarchical planner: three managers that each decide one thing, as DynamoLLM does.

The pool manager sizes the pools at maximum frequency: it takes the TP with the least power, merges
a pool that costs less inside a higher one, and goes over to denser choices where GPUs run short.
The instance manager re-shards a pool's GPUs into instances of one or two TPs. The GPU manager picks
the clock that draws the least at the load within the SLO.

Load is spread over a pool's instances in proportion to what each can carry.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Final, NamedTuple

import numpy as np

from envplan.errors import NoAnswerError
from envplan.serving.classes import CLASSES, Slo, hosts
from envplan.serving.phases import FloatArray
from envplan.serving.plan import Asked, Pool, ServingPlan, make_plan, make_pool, too_few
from envplan.serving.profile import Curve, ServingProfile

_ROOM: Final = 1 + 1e-12  # for rounding, where loads are compared with capacities


class PoolModel:
    """What instances of a pool can do: a class's configurations under one SLO.

    Args:
        profile: where they are from.
        name: the class.
        slo: what the pool promises.

    Attributes:
        most: that an instance can carry at any clock, tokens/s, by TP.
    """

    def __init__(self, profile: ServingProfile, name: str, slo: Slo) -> None:
        self.name, self.slo = name, slo
        self._able: dict[int, list[tuple[Curve, float]]] = {}
        for curve in profile.of(name):
            if most := curve.capacity(slo):
                self._able.setdefault(curve.tp, []).append((curve, most))
        self.most = {tp: max(most for _, most in known) for tp, known in self._able.items()}

    def fastest(self, tp: int) -> tuple[Curve, float]:
        """The configuration at maximum frequency and what it can carry, tokens/s."""
        return self._able[tp][-1]

    def best(self, tp: int, load: float) -> Curve:
        """The GPU manager: the clock that draws the least at a load up to `most`."""
        able = [curve for curve, most in self._able[tp] if load <= most * _ROOM]
        return min(able, key=lambda curve: curve.power_at(load))

    def least_power(self, tp: int, loads: FloatArray) -> FloatArray:
        """What `best` draws, W, for many loads; infinite above `most`. Shape as `loads`."""
        drawn = [
            np.where(loads <= most * _ROOM, np.interp(loads, curve.load, curve.power_w), np.inf)
            for curve, most in self._able[tp]
        ]
        return np.asarray(np.min(drawn, axis=0))


class SizedPool(NamedTuple):
    """What the pool manager has decided of a pool.

    Attributes:
        model: what its instances can do.
        served: tokens/s of each class it serves, in that class's own tokens.
        load: tokens/s of the pool's own class that this comes to.
        tp: GPUs of an instance.
        instances: how many.
        power_w: of all of them at maximum frequency.
    """

    model: PoolModel
    served: Mapping[str, float]
    load: float
    tp: int
    instances: int
    power_w: float

    @property
    def gpus(self) -> int:
        """GPUs of all its instances."""
        return self.tp * self.instances


def _sizes(profile: ServingProfile, name: str, served: Mapping[str, float]) -> list[SizedPool]:
    """What a pool might be made of, least power first, each with fewer GPUs than the last."""
    model = PoolModel(profile, name, Slo.strictest(profile.classes[k].slo for k in served))
    load = sum(x * profile.needed_for(k, name) for k, x in served.items())
    found = []
    for tp in model.most:
        curve, most = model.fastest(tp)
        count = max(1, math.ceil(load / most))
        power = count * curve.power_at(load / count)
        found.append(SizedPool(model, dict(served), load, tp, count, power))
    kept: list[SizedPool] = []
    for size in sorted(found, key=lambda pool: (pool.power_w, pool.gpus)):
        if not kept or size.gpus < kept[-1].gpus:
            kept.append(size)
    return kept


def size_pools(profile: ServingProfile, asked: Asked) -> list[SizedPool]:
    """The pool manager.

    Raises:
        NoAnswerError: a class's own pool cannot keep its SLO, or GPUs run short.
    """
    loads = asked.loads_tokens_s
    options = {name: _sizes(profile, name, {name: load}) for name, load in loads.items()}
    for name in [name for name, found in options.items() if not found]:
        raise NoAnswerError(
            f"the hierarchical planner finds no pool for {name}: its own cannot keep its SLO, only "
            "a higher class's; the exact planner can use that"
        )
    for name in [name for name in CLASSES if name in options and asked.merge]:
        _merge(profile, options, name)
    # The cheapest choices, the first ones, are made denser one after another until they fit.
    while (needed := sum(choices[0].gpus for choices in options.values())) > asked.gpus:
        steps = {
            name: (denser[0].power_w - first.power_w) / (first.gpus - denser[0].gpus)
            for name, (first, *denser) in options.items()
            if denser
        }
        if not steps:
            held = {name: choices[0].gpus for name, choices in options.items()}
            raise too_few(asked.gpus, needed, held, "the hierarchical planner needs")
        options[min(steps, key=lambda name: steps[name])].pop(0)
    return [choices[0] for choices in options.values()]


def _merge(profile: ServingProfile, options: dict[str, list[SizedPool]], name: str) -> None:
    """Merge a class's pool into a higher one where that draws less."""
    alone, gain = options[name][0], 0.0
    for host in [host for host in hosts(name)[1:] if host in options]:
        there = options[host][0]
        joint = _sizes(profile, host, Counter(there.served) + Counter(alone.served))
        if joint and alone.power_w + there.power_w - joint[0].power_w > gain:
            gain, into, together = alone.power_w + there.power_w - joint[0].power_w, host, joint
    if gain > 0:
        options[into] = together
        del options[name]


def reshard(model: PoolModel, gpus: int, load: float) -> dict[int, int] | None:
    """The instance manager: how many instances of each TP draw the least.

    Args:
        model: of the pool.
        gpus: that it has.
        load: tokens/s.

    Returns:
        Instances by TP; None if the GPUs cannot carry the load.
    """
    best: tuple[float, dict[int, int]] = (np.inf, {})
    degrees = sorted(model.most)
    pairs: list[Sequence[int]] = [*combinations(degrees, 2)]
    for pair in pairs or [degrees]:
        # More than enough to carry twice the load cannot draw less: idle instances draw, too.
        ranges = [
            np.arange(min(gpus // tp, 1 + int(2 * load // model.most[tp])) + 1) for tp in pair
        ]
        counts = dict(zip(pair, (grid.ravel() for grid in np.meshgrid(*ranges)), strict=True))
        carried = np.asarray(sum(n * model.most[tp] for tp, n in counts.items()))
        used = np.asarray(sum(n * tp for tp, n in counts.items()))
        fits = np.flatnonzero((used <= gpus) & (carried * _ROOM >= load) & (used > 0))
        share, power = load / carried[fits], np.zeros(len(fits))
        for tp, n in counts.items():
            each = model.least_power(tp, share * model.most[tp])
            power += np.where(n[fits] > 0, n[fits] * each, 0.0)
        if len(fits) and power.min() < best[0]:
            at = fits[power.argmin()]
            best = (power.min(), {tp: int(n[at]) for tp, n in counts.items() if n[at]})
    return best[1] or None


def hierarchical_pools(profile: ServingProfile, asked: Asked) -> list[Pool]:
    """What all three managers decide; raises as size_pools."""
    pools = []
    for sized in size_pools(profile, asked):
        model = sized.model
        counts = reshard(model, sized.gpus, sized.load) or {sized.tp: sized.instances}
        carried = sum(n * model.most[tp] for tp, n in counts.items())
        instances = []
        for tp, count in sorted(counts.items(), reverse=True):
            load = min(model.most[tp], sized.load / carried * model.most[tp])
            instances.append((model.best(tp, load), count, load))
        pools.append(make_pool(model.name, model.slo, sized.served, instances))
    return pools


def hierarchical_plan(
    profile: ServingProfile, loads: Mapping[str, float], gpus: int, *, merge: bool = True
) -> ServingPlan:
    """The plan of the three managers; arguments and errors as exact_plan."""
    asked = Asked.about(profile, loads, gpus, merge)
    return make_plan("hierarchical", profile, asked, hierarchical_pools(profile, asked))
