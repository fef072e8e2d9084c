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
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Final

import numpy as np

from envplan.errors import NoAnswerError
from envplan.serving.classes import CLASSES, FloatArray, Slo, hosts
from envplan.serving.plan import Asked, Pool, ServingPlan, make_plan, make_pool, too_few
from envplan.serving.profile import Curve, ServingProfile

_ROOM: Final = 1 + 1e-12  # for rounding, where loads are compared with capacities

#: Of each TP the configurations that can keep an SLO, by clock, and what each can carry, tokens/s.
Able = Mapping[int, Sequence[tuple[Curve, float]]]


@dataclass(frozen=True)
class SizedPool:
    """What the pool manager has decided of a pool.

    Attributes:
        name: the class whose configurations it runs.
        slo: what it promises.
        able: what its instances can do.
        served: tokens/s of each class it serves, in that class's own tokens.
        load: tokens/s of the pool's own class that this comes to.
        tp: GPUs of an instance.
        instances: how many.
        power_w: of all of them at maximum frequency.
    """

    name: str
    slo: Slo
    able: Able
    served: Mapping[str, float]
    load: float
    tp: int
    instances: int
    power_w: float

    @property
    def gpus(self) -> int:
        """GPUs of all its instances."""
        return self.tp * self.instances


def able_within(profile: ServingProfile, name: str, slo: Slo) -> Able:
    """What instances of a class's pool can do within an SLO."""
    able: dict[int, list[tuple[Curve, float]]] = {}
    for curve in profile.of(name):
        if most := curve.capacity(slo):
            able.setdefault(curve.tp, []).append((curve, most))
    return able


def powers(known: Sequence[tuple[Curve, float]], loads: Any) -> FloatArray:
    """What each of n configurations draws, W, at m loads (tokens/s); infinite above what it can.

    Returns:
        (n, m), or (n,) for one load. The GPU manager takes the least.
    """
    drawn = [(np.interp(loads, curve.load, curve.power_w), most * _ROOM) for curve, most in known]
    return np.array([np.where(loads <= most, power, np.inf) for power, most in drawn])


def _sizes(profile: ServingProfile, name: str, served: Mapping[str, float]) -> list[SizedPool]:
    """What a pool might be made of, least power first, each with fewer GPUs than the last."""
    slo = Slo.strictest(profile.classes[k].slo for k in served)
    load = sum(x * profile.needed_for(k, name) for k, x in served.items())
    able, found, kept = able_within(profile, name, slo), [], list[SizedPool]()
    for tp, known in able.items():
        curve, most = known[-1]
        count = max(1, math.ceil(load / most))
        power = count * curve.power_at(load / count)
        found.append(SizedPool(name, slo, able, dict(served), load, tp, count, power))
    for size in sorted(found, key=lambda pool: (pool.power_w, pool.gpus)):
        if not kept or size.gpus < kept[-1].gpus:
            kept.append(size)
    return kept


def size_pools(profile: ServingProfile, asked: Asked) -> list[SizedPool]:
    """The pool manager.

    Raises:
        NoAnswerError: a class's own pool cannot keep its SLO, or GPUs run short.
    """
    options = {name: _sizes(profile, name, {name: x}) for name, x in asked.loads_tokens_s.items()}
    for name in [name for name, found in options.items() if not found]:
        raise NoAnswerError(
            f"the hierarchical planner finds no pool for {name}: its own cannot keep its SLO, only "
            "a higher class's; the exact planner can use that"
        )
    # A class's pool goes into the higher one where that saves most, if it saves anything.
    for name in [name for name in CLASSES if name in options and asked.merge]:
        alone, gain, into = options[name][0], 0.0, None
        for host in [host for host in hosts(name)[1:] if host in options]:
            there = options[host][0]
            joint = _sizes(profile, host, Counter(there.served) + Counter(alone.served))
            saved = alone.power_w + there.power_w - joint[0].power_w if joint else 0.0
            if saved > gain:
                gain, into = saved, (host, joint)
        if into is not None:
            options[into[0]] = into[1]
            del options[name]
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


def _most(able: Able) -> dict[int, float]:
    """What an instance can carry at any clock, tokens/s, by TP."""
    return {tp: max(most for _, most in known) for tp, known in able.items()}


def reshard(able: Able, gpus: int, load: float) -> dict[int, int] | None:
    """The instance manager: how many instances of each TP draw the least.

    Args:
        able: what the pool's instances can do.
        gpus: that it has.
        load: tokens/s.

    Returns:
        Instances by TP; None if the GPUs cannot carry the load.
    """
    best: tuple[float, dict[int, int]] = (np.inf, {})
    most = _most(able)
    for pair in combinations(sorted(most), min(2, len(most))):
        # More than enough to carry twice the load cannot draw less: idle instances draw, too.
        ranges = [np.arange(min(gpus // tp, 1 + int(2 * load // most[tp])) + 1) for tp in pair]
        counts = dict(zip(pair, (grid.ravel() for grid in np.meshgrid(*ranges)), strict=True))
        carried = np.asarray(sum(n * most[tp] for tp, n in counts.items()))
        used = np.asarray(sum(n * tp for tp, n in counts.items()))
        fits = np.flatnonzero((used <= gpus) & (carried * _ROOM >= load) & (used > 0))
        share, power = load / carried[fits], np.zeros(len(fits))
        for tp, n in counts.items():
            each = powers(able[tp], share * most[tp]).min(axis=0)
            power += np.where(n[fits] > 0, n[fits] * each, 0.0)
        if len(fits) and power.min() < best[0]:
            at = fits[power.argmin()]
            best = (power.min(), {tp: int(n[at]) for tp, n in counts.items() if n[at]})
    return best[1] or None


def hierarchical_pools(profile: ServingProfile, asked: Asked) -> list[Pool]:
    """What all three managers decide; raises as size_pools."""
    pools = []
    for pool in size_pools(profile, asked):
        most = _most(pool.able)
        counts = reshard(pool.able, pool.gpus, pool.load) or {pool.tp: pool.instances}
        carried, instances = sum(n * most[tp] for tp, n in counts.items()), []
        for tp, count in sorted(counts.items(), reverse=True):
            load = min(most[tp], pool.load / carried * most[tp])
            clock = int(powers(pool.able[tp], load).argmin())
            instances.append((pool.able[tp][clock][0], count, load))
        pools.append(make_pool(pool.name, pool.slo, pool.served, instances))
    return pools


def hierarchical_plan(
    profile: ServingProfile, loads: Mapping[str, float], gpus: int, *, merge: bool = True
) -> ServingPlan:
    """The plan of the three managers; arguments and errors as exact_plan."""
    asked = Asked.about(profile, loads, gpus, merge)
    return make_plan("hierarchical", profile, asked, hierarchical_pools(profile, asked))
