"""The hierarchical planner: three managers that each decide one thing, as DynamoLLM does.

- The pool manager sizes the pools. For the predicted peak and at maximum frequency, it looks at one
  TP degree at a time, leaves out those that miss the SLO or take both more GPUs and more power than
  another, and takes the one with the least power. A pool that costs less inside a higher one is
  merged into it. Where GPUs run short, pools go over to denser choices.
- The instance manager re-shards a pool's GPUs: into instances of one or two TP degrees such that
  they draw the least at the load it expects and still carry the peak.
- The GPU manager picks the clock of each instance: the one that draws the least at its present load
  within the SLO.

Load is spread over a pool's instances in proportion to what each can carry.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from envplan.errors import NoAnswerError
from envplan.serving.classes import CLASSES, Slo
from envplan.serving.demand import check_demand, check_reachable, hosts, too_few
from envplan.serving.plan import (
    Fleet,
    Pool,
    ServingPlan,
    main_class,
    make_plan,
    make_pool,
    needed_for,
)
from envplan.serving.profile import Curve, ServingProfile

__all__ = [
    "PoolModel",
    "SizedPool",
    "hierarchical_fleet",
    "hierarchical_plan",
    "reshard",
    "size_pools",
]

FloatArray = npt.NDArray[np.float64]
_ROOM: Final = 1 + 1e-12  # for rounding, where loads are compared with capacities


class Running(NamedTuple):
    """An instance at work: its configuration and what it draws, W."""

    curve: Curve
    power: float


class PoolModel:
    """What instances of a pool can do: a class's configurations under one SLO.

    Args:
        profile: where they are from.
        name: the class.
        slo: what the pool promises.
    """

    def __init__(self, profile: ServingProfile, name: str, slo: Slo) -> None:
        self.name = name
        self.slo = slo
        able = [(curve, curve.capacity(slo)) for curve in profile.of(name)]
        self.capacity: dict[tuple[int, int], float] = {
            (curve.tp, curve.frequency_mhz): most for curve, most in able if most > 0
        }
        self._able: dict[int, list[tuple[Curve, float]]] = {}
        for curve, most in able:
            if most > 0:
                self._able.setdefault(curve.tp, []).append((curve, most))
        #: Most that an instance can carry at any clock, tokens/s, by TP.
        self.most: dict[int, float] = {
            tp: max(most for _, most in known) for tp, known in self._able.items()
        }

    def fastest(self, tp: int) -> tuple[Curve, float]:
        """The configuration at maximum frequency and what it can carry, tokens/s."""
        return self._able[tp][-1]

    def best(self, tp: int, load: float) -> Running:
        """The GPU manager: the clock that draws the least at a load up to `most`."""
        return min(
            (
                Running(curve, curve.power_at(min(load, most)))
                for curve, most in self._able[tp]
                if load <= most * _ROOM
            ),
            key=lambda running: running.power,
        )

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


@dataclass
class _Sizing:
    """One run of the pool manager."""

    profile: ServingProfile
    models: dict[tuple[str, Slo], PoolModel] = field(default_factory=dict)

    def options(self, name: str, served: Mapping[str, float]) -> list[SizedPool]:
        """What a pool might be made of, least power first, each with fewer GPUs than the last."""
        slo = Slo.strictest(self.profile.classes[k].slo for k in served)
        model = self.models.get((name, slo))
        if model is None:
            model = self.models[name, slo] = PoolModel(self.profile, name, slo)
        load = sum(x * needed_for(self.profile, k, name) for k, x in served.items())
        found = []
        for tp in model.most:
            curve, most = model.fastest(tp)
            count = max(1, -int(-load // most))
            power = count * curve.power_at(load / count)
            found.append(SizedPool(model, dict(served), load, tp, count, power))
        found.sort(key=lambda pool: (pool.power_w, pool.gpus))
        kept: list[SizedPool] = []
        for option in found:
            if not kept or option.gpus < kept[-1].gpus:
                kept.append(option)
        return kept


def size_pools(
    profile: ServingProfile, peaks: Mapping[str, float], gpus: int, *, merge: bool = True
) -> list[SizedPool]:
    """The pool manager.

    Args:
        profile: with the SLOs to be met.
        peaks: tokens/s by class, all above 0.
        gpus: at most.
        merge: whether pools may be merged into higher ones.

    Raises:
        NoAnswerError: no configuration meets an SLO, or GPUs run short.
    """
    check_reachable(profile, peaks, merge=merge)
    sizing = _Sizing(profile)
    served = {name: {name: load} for name, load in peaks.items()}
    options: dict[str, list[SizedPool]] = {}
    for name in peaks:
        if found := sizing.options(name, served[name]):
            options[name] = found
        else:  # no configuration of its own meets its SLO: into the lowest pool that has one
            for host in hosts(name, merge=merge)[1:]:
                joint = served.get(host, {}) | served[name]
                if found := sizing.options(host, joint):
                    served[host] = joint
                    options[host] = found
                    break
            else:
                raise NoAnswerError(
                    f"the hierarchical planner finds no pool for {name}: none keeps its SLO from "
                    "no load up, and that of what it serves already; the exact planner may"
                )
    if merge:
        _merge(sizing, options)
    return _fit(profile, options, gpus)


def _merge(sizing: _Sizing, options: dict[str, list[SizedPool]]) -> None:
    """Merge pools upward where that draws less, lowest classes first."""
    for name in CLASSES:
        if name not in options:
            continue
        alone = options[name][0]
        gains = []
        for host in hosts(name, merge=True)[1:]:
            if host in options:
                joint = {**options[host][0].served}
                for known, load in alone.served.items():
                    joint[known] = joint.get(known, 0.0) + load
                together = sizing.options(host, joint)
                if together:
                    apart = alone.power_w + options[host][0].power_w
                    gains.append((apart - together[0].power_w, host, together))
        if gains:
            gain, host, together = max(gains, key=lambda entry: entry[0])
            if gain > 0:
                options[host] = together
                del options[name]


def _fit(
    profile: ServingProfile, options: Mapping[str, list[SizedPool]], gpus: int
) -> list[SizedPool]:
    """The cheapest choices, made denser one after another until they fit."""
    chosen = dict.fromkeys(options, 0)

    def now() -> list[SizedPool]:
        return [options[name][at] for name, at in chosen.items()]

    while sum(pool.gpus for pool in now()) > gpus:
        steps = []
        for name, at in chosen.items():
            if at + 1 < len(options[name]):
                old, new = options[name][at], options[name][at + 1]
                steps.append(((new.power_w - old.power_w) / (old.gpus - new.gpus), name))
        if not steps:
            held = {main_class(profile, p.model.name, p.served): p.gpus for p in now()}
            needed = sum(pool.gpus for pool in now())
            raise too_few(gpus, needed, held, "the hierarchical planner needs at least")
        chosen[min(steps)[1]] += 1
    return now()


def reshard(model: PoolModel, gpus: int, load: float, peak: float) -> dict[int, int] | None:
    """The instance manager: how many instances of each TP draw the least.

    Args:
        model: of the pool.
        gpus: that it has.
        load: tokens/s to expect.
        peak: tokens/s that must be carried, too.

    Returns:
        Instances by TP; None if the GPUs cannot carry the peak.
    """
    best: tuple[float, dict[int, int]] | None = None
    degrees = sorted(model.most)
    pairs: list[Sequence[int]] = [*combinations(degrees, 2)] if len(degrees) > 1 else [degrees]
    for pair in pairs:
        found = _best_of(model, pair, gpus, load, max(load, peak))
        if found is not None and (best is None or found[0] < best[0]):
            best = found
    return None if best is None else best[1]


def _best_of(
    model: PoolModel, degrees: Sequence[int], gpus: int, load: float, peak: float
) -> tuple[float, dict[int, int]] | None:
    # More than enough to carry twice the peak cannot draw less: idle instances draw, too.
    ranges = [np.arange(min(gpus // tp, 1 + int(2 * peak // model.most[tp])) + 1) for tp in degrees]
    counts = [grid.ravel() for grid in np.meshgrid(*ranges, indexing="ij")]
    carried = sum(n * model.most[tp] for n, tp in zip(counts, degrees, strict=True))
    used = sum(n * tp for n, tp in zip(counts, degrees, strict=True))
    fits = np.flatnonzero((used <= gpus) & (carried * _ROOM >= peak) & (used > 0))
    if not len(fits):
        return None
    share = load / np.asarray(carried)[fits]
    power = np.zeros(len(fits))
    for n, tp in zip(counts, degrees, strict=True):
        each = model.least_power(tp, share * model.most[tp])
        power += np.where(n[fits] > 0, n[fits] * each, 0.0)
    at = int(np.argmin(power))
    chosen = {tp: int(n[fits[at]]) for n, tp in zip(counts, degrees, strict=True)}
    return float(power[at]), {tp: n for tp, n in chosen.items() if n}


def hierarchical_fleet(
    profile: ServingProfile, loads: Mapping[str, float], gpus: int, *, merge: bool = True
) -> Fleet:
    """All three managers for one load, which is also its peak; raises as size_pools."""
    pools = []
    for sized in size_pools(profile, loads, gpus, merge=merge):
        counts = reshard(sized.model, sized.gpus, sized.load, sized.load)
        pools.append(_clocked(sized, counts or {sized.tp: sized.instances}))
    return Fleet("hierarchical", tuple(pools))


def _clocked(sized: SizedPool, counts: Mapping[int, int]) -> Pool:
    model = sized.model
    carried = sum(n * model.most[tp] for tp, n in counts.items())
    instances = []
    for tp, count in sorted(counts.items(), reverse=True):
        load = min(model.most[tp], sized.load / carried * model.most[tp])
        instances.append((model.best(tp, load).curve, count, load))
    return make_pool(model.name, model.slo, sized.served, instances)


def hierarchical_plan(
    profile: ServingProfile, loads: Mapping[str, float], gpus: int, *, merge: bool = True
) -> ServingPlan:
    """The plan of the three managers; arguments and errors as exact_plan."""
    wanted = check_demand(loads, gpus)
    fleet = hierarchical_fleet(profile, wanted, gpus, merge=merge)
    return make_plan(fleet, profile, wanted, gpus, merge=merge)
