"""The hierarchical planner: three managers that each decide one thing, as DynamoLLM does.

The pool manager sizes the pools at maximum frequency: it takes the TP with the least power, merges
a pool that costs less inside a higher one, and goes over to denser choices where GPUs run short.
The instance manager re-shards a pool's GPUs into instances of one or two TPs. The GPU manager picks
the clock that draws the least at the load within the SLO.

Load is spread over a pool's instances in proportion to what each can carry.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

import numpy as np

from envplan.errors import NoAnswerError
from envplan.serving.classes import CLASSES, Slo, hosts
from envplan.serving.phases import FloatArray
from envplan.serving.plan import (
    Pool,
    ServingPlan,
    check_demand,
    make_plan,
    make_pool,
    needed_for,
    too_few,
)
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
        return min(able, key=lambda curve: curve.power_at(min(load, curve.max_load)))

    def least_power(self, tp: int, loads: FloatArray) -> FloatArray:
        """What `best` draws, W, for many loads; infinite above `most`. Shape as `loads`."""
        least = np.full(loads.shape, np.inf)
        for curve, most in self._able[tp]:
            power = np.interp(loads, curve.load, curve.power_w)
            least = np.where(loads <= most * _ROOM, np.minimum(least, power), least)
        return least


@dataclass(frozen=True)
class SizedPool:
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
    load = sum(x * needed_for(profile, k, name) for k, x in served.items())
    found = []
    for tp in model.most:
        curve, most = model.fastest(tp)
        count = max(1, -int(-load // most))
        power = count * curve.power_at(load / count)
        found.append(SizedPool(model, dict(served), load, tp, count, power))
    kept: list[SizedPool] = []
    for size in sorted(found, key=lambda pool: (pool.power_w, pool.gpus)):
        if not kept or size.gpus < kept[-1].gpus:
            kept.append(size)
    return kept


def size_pools(
    profile: ServingProfile, loads: Mapping[str, float], gpus: int, *, merge: bool = True
) -> list[SizedPool]:
    """The pool manager.

    Args:
        profile: with the SLOs to be met.
        loads: tokens/s by class, all above 0.
        gpus: at most.
        merge: whether pools may be merged into higher ones.

    Raises:
        NoAnswerError: no configuration meets an SLO, or GPUs run short.
    """
    options: dict[str, list[SizedPool]] = {}
    for name, load in loads.items():
        # The first is its own; without a configuration that meets its SLO, the lowest that has one.
        for host in hosts(name, merge=merge):
            own = {host: loads[host]} if host in loads else {}
            there = options[host][0].served if options.get(host) else own
            if found := _sizes(profile, host, {**there, name: load}):
                options[host] = found
                break
        else:
            raise NoAnswerError(
                f"the hierarchical planner finds no pool for {name}: none keeps its SLO from "
                "no load up, and that of what it serves already; the exact planner may"
            )
    if merge:
        _merge(profile, options)
    return _fit(profile, options, gpus)


def _merge(profile: ServingProfile, options: dict[str, list[SizedPool]]) -> None:
    """Merge pools upward where that draws less, lowest classes first."""
    for name in CLASSES:
        if name not in options:
            continue
        alone, gains = options[name][0], []
        for host in hosts(name)[1:]:
            if host in options:
                joint = Counter(options[host][0].served)
                joint.update(alone.served)
                if together := _sizes(profile, host, joint):
                    apart = alone.power_w + options[host][0].power_w
                    gains.append((apart - together[0].power_w, host, together))
        gain, host, together = max(gains, key=lambda entry: entry[0], default=(0.0, name, []))
        if gain > 0:
            options[host] = together
            del options[name]


def _fit(
    profile: ServingProfile, options: Mapping[str, list[SizedPool]], gpus: int
) -> list[SizedPool]:
    """The cheapest choices, the first ones, made denser one after another until they fit."""
    while (needed := sum(choices[0].gpus for choices in options.values())) > gpus:
        steps = {
            name: (denser[0].power_w - first.power_w) / (first.gpus - denser[0].gpus)
            for name, (first, *denser) in options.items()
            if denser
        }
        if not steps:
            pools = [choices[0] for choices in options.values()]
            held = [(pool.model.name, pool.served, pool.gpus) for pool in pools]
            what = "the hierarchical planner needs at least"
            raise too_few(profile, gpus, needed, held, what)
        options[min(steps, key=lambda name: steps[name])].pop(0)
    return [choices[0] for choices in options.values()]


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


def hierarchical_pools(
    profile: ServingProfile, loads: Mapping[str, float], gpus: int, *, merge: bool = True
) -> list[Pool]:
    """What all three managers decide for one load; raises as size_pools."""
    pools = []
    for sized in size_pools(profile, loads, gpus, merge=merge):
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
    wanted = check_demand(profile, loads, gpus, merge=merge)
    pools = hierarchical_pools(profile, wanted, gpus, merge=merge)
    return make_plan("hierarchical", pools, None, profile, wanted, gpus, merge=merge)
