"""The hierarchical planner: three managers that each decide one thing (DynamoLLM, section IV-B).

The pool manager sizes the pools at maximum frequency: it takes the TP with the least power, merges
a pool that costs less inside a higher one, and goes over to denser choices where GPUs run short.
The instance manager re-shards a pool's GPUs into instances of one or two TPs. The GPU manager picks
the clock that draws the least at the load within the SLO. Load is spread over a pool's instances in
proportion to what each can carry.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from envplan.errors import NoAnswerError
from envplan.serving.build_plan import InstanceGroup, build_plan, build_pool
from envplan.serving.classes import FloatArray, Slo
from envplan.serving.plan import Pool, ServingPlan
from envplan.serving.plan_request import PlanRequest, too_few_gpus
from envplan.serving.profile import ServingProfile
from envplan.serving.steady_state import LoadCurve

_CAPACITY_ROUNDING: Final = 1 + 1e-12  # where loads are compared with capacities
_MAX_TPS_OF_POOL: Final = 2


class RatedCurve(NamedTuple):
    """A configuration that can meet an SLO.

    Attributes:
        curve: the configuration under load.
        capacity_tokens_s: the highest load at which it meets the SLO, above 0.
    """

    curve: LoadCurve
    capacity_tokens_s: float


#: The configurations that can meet an SLO, by TP; of each TP by clock, so the fastest is the last.
RatedCurves = Mapping[int, Sequence[RatedCurve]]

#: How many instances of each TP.
InstanceCounts = Mapping[int, int]


@dataclass(frozen=True)
class SizedPool:
    """A pool as the pool manager sizes it.

    Attributes:
        request_class: the class whose configurations it runs.
        slo: the strictest SLO of what it serves.
        rated_curves: the configurations that its instances may have.
        served_tokens_s: load of each class it serves, in that class's own tokens.
        load_tokens_s: what these loads come to in tokens of the pool's class.
        tp: GPUs of an instance.
        num_instances: at least one.
        power_w: of all of them at the fastest clock that meets the SLO.
    """

    request_class: str
    slo: Slo
    rated_curves: RatedCurves
    served_tokens_s: Mapping[str, float]
    load_tokens_s: float
    tp: int
    num_instances: int
    power_w: float

    @property
    def gpus(self) -> int:
        """GPUs of all its instances."""
        return self.tp * self.num_instances


#: The ways to make each class's pool, at least one: least power first, each with fewer GPUs than
#: the one before. The first one is chosen; where GPUs run short, it is removed.
PoolCandidates = dict[str, list[SizedPool]]


def hierarchical_plan(
    profile: ServingProfile, loads: Mapping[str, float], gpus: int, *, merge: bool = True
) -> ServingPlan:
    """The plan of the three managers.

    Args:
        profile: with the SLOs to be met.
        loads: tokens/s by class.
        gpus: at most.
        merge: whether classes may be served by higher ones' pools.

    Raises:
        InputError: no load, no GPU, or an unknown class.
        NoAnswerError: the loads cannot be served so; says which class and by how much.
    """
    request = PlanRequest.create(profile, loads, gpus, merge=merge)
    return build_plan("hierarchical", profile, request, hierarchical_pools(profile, request))


def hierarchical_pools(profile: ServingProfile, request: PlanRequest) -> list[Pool]:
    """The pools that the three managers decide on, one after another.

    Raises:
        NoAnswerError: as size_pools.
    """
    pools = []
    for sized in size_pools(profile, request):
        counts = choose_instances(sized.rated_curves, sized.gpus, sized.load_tokens_s)
        if counts is None:  # but for rounding, the instances of its own size carry the load
            counts = {sized.tp: sized.num_instances}
        groups = choose_clocks(sized, counts)
        pools.append(
            build_pool(
                sized.request_class, sized.slo, sized.served_tokens_s, groups, profile.classes
            )
        )
    return pools


# --- the pool manager ----------------------------------------------------------------------------


def size_pools(profile: ServingProfile, request: PlanRequest) -> list[SizedPool]:
    """Size one pool for each request class, cheapest in power, within the GPUs there are.

    This is DynamoLLM's pool manager (HPCA '25, section IV-B).

    Raises:
        NoAnswerError: a class's own pool cannot keep its SLO, or GPUs run short.
    """
    candidates = _own_pools(profile, request)
    if request.merge:
        _merge_where_it_saves(profile, candidates)
    _shrink_until_it_fits(candidates, request.gpus)
    return [pools[0] for pools in candidates.values()]


def _own_pools(profile: ServingProfile, request: PlanRequest) -> PoolCandidates:
    """The candidates for a pool of each class alone."""
    candidates = {}
    for name, load in request.loads_tokens_s.items():
        candidates[name] = _pool_candidates(profile, name, {name: load})
        if not candidates[name]:
            raise NoAnswerError(
                f"the hierarchical planner finds no pool for {name}: its own cannot keep its SLO, "
                "only a higher class's; the exact planner can use that"
            )
    return candidates


def _pool_candidates(
    profile: ServingProfile, request_class: str, served_tokens_s: Mapping[str, float]
) -> list[SizedPool]:
    """The ways to make a pool, one for each TP, without those that are worse in all respects.

    They are in the order of PoolCandidates; there is none if no configuration keeps the SLO.
    """
    slo = Slo.strictest(profile.classes[name].slo for name in served_tokens_s)
    load_tokens_s = 0.0
    for name, load in served_tokens_s.items():
        load_tokens_s += load * profile.load_conversion_factor(name, request_class)
    curves_by_tp = rated_curves(profile, request_class, slo)
    pools = []
    for tp, curves in curves_by_tp.items():
        fastest = curves[-1]
        num_instances = max(1, math.ceil(load_tokens_s / fastest.capacity_tokens_s))
        instance_w = fastest.curve.power_at(load_tokens_s / num_instances)
        pools.append(
            SizedPool(
                request_class=request_class,
                slo=slo,
                rated_curves=curves_by_tp,
                served_tokens_s=served_tokens_s,
                load_tokens_s=load_tokens_s,
                tp=tp,
                num_instances=num_instances,
                power_w=num_instances * instance_w,
            )
        )
    pools.sort(key=lambda pool: (pool.power_w, pool.gpus))
    candidates: list[SizedPool] = []
    for pool in pools:
        if not candidates or pool.gpus < candidates[-1].gpus:
            candidates.append(pool)
    return candidates


def rated_curves(profile: ServingProfile, request_class: str, slo: Slo) -> RatedCurves:
    """The configurations of a class that can meet an SLO, by TP and clock."""
    by_tp: dict[int, list[RatedCurve]] = {}
    for curve in profile.curves_of(request_class):
        capacity = curve.capacity(slo)
        if capacity > 0:
            by_tp.setdefault(curve.tp, []).append(RatedCurve(curve, capacity))
    return by_tp


def _merge_where_it_saves(profile: ServingProfile, candidates: PoolCandidates) -> None:
    """Put each class's pool into the higher one where that saves most power, if any does.

    Shorter classes go first; a class that took others in may still go into a higher one.
    """
    for name in profile.classes:
        if name not in candidates:
            continue
        mergers = []
        for host in profile.classes.hosts(name):
            if host != name and host in candidates:
                mergers += _mergers(profile, candidates, name, host)
        best = max(mergers, key=lambda merger: merger.saved_w, default=None)
        if best is not None and best.saved_w > 0:
            candidates[best.host] = best.candidates
            del candidates[name]


class _Merger(NamedTuple):
    """A pool of two that are merged.

    Attributes:
        host: the class whose pool takes the other one in.
        candidates: the ways to make it.
        saved_w: power that it saves against the two.
    """

    host: str
    candidates: list[SizedPool]
    saved_w: float


def _mergers(
    profile: ServingProfile, candidates: PoolCandidates, name: str, host: str
) -> list[_Merger]:
    """A class's pool merged into that of another one; none if no pool keeps both SLOs."""
    pool, host_pool = candidates[name][0], candidates[host][0]
    served = {**host_pool.served_tokens_s, **pool.served_tokens_s}
    merged = _pool_candidates(profile, host, served)
    if not merged:
        return []
    saved_w = pool.power_w + host_pool.power_w - merged[0].power_w
    return [_Merger(host, merged, saved_w)]


def _shrink_until_it_fits(candidates: PoolCandidates, num_gpus: int) -> None:
    """Go over to pools with fewer GPUs, where a GPU less costs least power, until all fit.

    Raises:
        NoAnswerError: the densest pools do not fit.
    """
    gpus_by_class = {name: pools[0].gpus for name, pools in candidates.items()}
    while (needed := sum(gpus_by_class.values())) > num_gpus:
        watts_per_gpu: dict[str, float] = {}  # power that each GPU less costs
        for name, (pool, *denser) in candidates.items():
            if denser:
                saved_gpus = pool.gpus - denser[0].gpus
                watts_per_gpu[name] = (denser[0].power_w - pool.power_w) / saved_gpus
        if not watts_per_gpu:
            raise too_few_gpus("the hierarchical planner needs", needed, num_gpus, gpus_by_class)
        cheapest = min(watts_per_gpu, key=watts_per_gpu.__getitem__)
        candidates[cheapest].pop(0)
        gpus_by_class[cheapest] = candidates[cheapest][0].gpus


# --- the instance manager ------------------------------------------------------------------------


def choose_instances(
    curves: RatedCurves, num_gpus: int, load_tokens_s: float
) -> InstanceCounts | None:
    """How many instances of one or two TPs carry a load with the least power.

    This is DynamoLLM's instance manager, which re-shards a pool's GPUs.

    Args:
        curves: the configurations that the pool's instances may have.
        num_gpus: that the pool has.
        load_tokens_s: of the pool.

    Returns:
        Instances by TP; None if the GPUs cannot carry the load.
    """
    capacities = _capacity_by_tp(curves)
    num_tps = min(_MAX_TPS_OF_POOL, len(capacities))
    least_power_w = math.inf
    best_counts: InstanceCounts | None = None
    for tps in combinations(sorted(capacities), num_tps):
        counts = _feasible_counts(tps, capacities, num_gpus, load_tokens_s)
        power_w = _power_of_counts(curves, capacities, counts, load_tokens_s)
        if len(power_w) and power_w.min() < least_power_w:
            best = int(power_w.argmin())
            least_power_w = power_w[best]
            best_counts = _combination(counts, best)
    return best_counts


def _combination(counts: _Counts, index: int) -> InstanceCounts:
    """One of some combinations, without TPs that it has no instance of."""
    numbers = {tp: int(numbers_of_tp[index]) for tp, numbers_of_tp in counts.items()}
    return {tp: number for tp, number in numbers.items() if number}


def _capacity_by_tp(curves: RatedCurves) -> dict[int, float]:
    """The most that an instance of each TP can carry at any clock, tokens/s."""
    return {tp: max(rated.capacity_tokens_s for rated in curves[tp]) for tp in curves}


#: Combinations of instances: for each TP its numbers of instances, (k,) each.
_Counts = dict[int, npt.NDArray[np.int_]]


def _feasible_counts(
    tps: Sequence[int], capacities: Mapping[int, float], num_gpus: int, load_tokens_s: float
) -> _Counts:
    """All combinations of instances of some TPs that fit on the GPUs and carry the load."""
    ranges = []
    for tp in tps:
        # More than enough to carry twice the load cannot draw less: idle instances draw, too.
        useful = 1 + int(2 * load_tokens_s // capacities[tp])
        ranges.append(np.arange(min(num_gpus // tp, useful) + 1))
    grids = np.meshgrid(*ranges)
    counts = {tp: grid.ravel() for tp, grid in zip(tps, grids, strict=True)}
    gpus = np.zeros(grids[0].size, dtype=np.int64)
    for tp, count in counts.items():
        gpus += count * tp
    capacity = _total_capacity(counts, capacities)
    fits = (gpus > 0) & (gpus <= num_gpus)
    feasible = fits & (capacity * _CAPACITY_ROUNDING >= load_tokens_s)
    return {tp: count[feasible] for tp, count in counts.items()}


def _total_capacity(counts: _Counts, capacities: Mapping[int, float]) -> FloatArray:
    """Load that each combination can carry, tokens/s, (k,)."""
    total = np.zeros(len(next(iter(counts.values()))))
    for tp, count in counts.items():
        total += count * capacities[tp]
    return total


def _power_of_counts(
    curves: RatedCurves, capacities: Mapping[int, float], counts: _Counts, load_tokens_s: float
) -> FloatArray:
    """Power of each combination, W: load in proportion to capacity, each TP at its best clock."""
    utilization = load_tokens_s / _total_capacity(counts, capacities)
    power_w = np.zeros(len(utilization))
    for tp, count in counts.items():
        instance_w = power_by_clock(curves[tp], utilization * capacities[tp]).min(axis=0)
        power_w += np.where(count > 0, count * instance_w, 0.0)  # none of inf W draw nothing
    return power_w


# --- the GPU manager -----------------------------------------------------------------------------


def power_by_clock(curves: Sequence[RatedCurve], loads_tokens_s: float | FloatArray) -> FloatArray:
    """Power of each of n configurations at m loads, W; infinite above their capacity.

    Returns:
        (n, m), or (n,) for one load. DynamoLLM's GPU manager takes the least.
    """
    rows = []
    for rated in curves:
        power_w = np.interp(loads_tokens_s, rated.curve.load_tokens_s, rated.curve.power_w)
        within = np.asarray(loads_tokens_s) <= rated.capacity_tokens_s * _CAPACITY_ROUNDING
        rows.append(np.where(within, power_w, np.inf))
    return np.array(rows)


def choose_clocks(pool: SizedPool, counts: InstanceCounts) -> Iterator[InstanceGroup]:
    """The pool's instances at the clock that draws least; the largest TP first."""
    capacities = _capacity_by_tp(pool.rated_curves)
    total_capacity = sum(count * capacities[tp] for tp, count in counts.items())
    utilization = pool.load_tokens_s / total_capacity
    for tp, count in sorted(counts.items(), reverse=True):
        load_tokens_s = min(capacities[tp], utilization * capacities[tp])
        curves = pool.rated_curves[tp]
        best = int(power_by_clock(curves, load_tokens_s).argmin())
        yield InstanceGroup(curves[best].curve, count, load_tokens_s)
