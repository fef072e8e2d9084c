"""The two planners: the fleet that meets every SLO with the least power.

**exact** solves an integer program: DynamoLLM's problem, min sum_i N_i x Energy_i,f(L_i) subject to
GPUs, loads and SLOs, over pools of all classes at once, with two liberties that only make it
better: instances of a pool may carry different loads and, unless `one_frequency`, run at different
clocks. Power is piecewise linear in an instance's load, so the program can be exact. On a straight
stretch of a configuration's curve, the power of several instances depends only on how many they are
and on what they carry together. So the program has two variables for each stretch, a number of
instances and their load, and alike instances share that load evenly. Stretches on which another
clock with the same TP never draws more are left out. SLOs are kept by cutting curves to the loads
that meet them. A class may go to the pool of a class that is longer in no respect; its requests
then count as that class's own. A pool promises one SLO to all it serves, so there is a pool for
each class and each SLO that makes a difference.

**hierarchical** has three managers that each decide one thing, as DynamoLLM does. The pool manager
sizes the pools at maximum frequency: it takes the TP with the least power, merges a pool that costs
less inside a higher one, and goes over to denser choices where GPUs run short. The instance manager
re-shards a pool's GPUs into instances of one or two TPs. The GPU manager picks the clock that draws
the least at the load within the SLO. Load is spread over a pool's instances in proportion to what
each can carry.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import combinations
from typing import Any, Final, NamedTuple

import numpy as np

from envplan.errors import NoAnswerError
from envplan.serving.classes import CLASSES, FloatArray, Slo, hosts
from envplan.serving.plan import Asked, Pool, ServingPlan, make_plan, make_pool, too_few
from envplan.serving.profile import Curve, Segment, ServingProfile

#: For the solver, s.
TIME_LIMIT_S: Final = 6.0

_RELATIVE_GAP: Final = 1e-6
_AT_LEAST: Final = 0.2  # of the time limit is left to count GPUs in, if no plan was found
_WHOLE: Final = 1e-6  # what a bound on GPUs may lie above a whole number for rounding
_KILO: Final = 1e3  # the program counts kW and thousands of tokens/s, or less for small loads
_FINEST: Final = 100.0  # but never more of the least load than this
_NEGLIGIBLE: Final = 1e-7  # of a load: what the solver's tolerance makes out of zero
_ROOM: Final = 1 + 1e-12  # for rounding, where loads are compared with capacities

Stretch = tuple[Curve, Segment]

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


def exact_plan(
    profile: ServingProfile,
    loads: Mapping[str, float],
    gpus: int,
    *,
    merge: bool = True,
    one_frequency: bool = False,
    time_limit: float = TIME_LIMIT_S,
) -> ServingPlan:
    """The plan with the least power, or the best one found and its gap.

    Args:
        profile: with the SLOs to be met.
        loads: tokens/s by class.
        gpus: at most.
        merge: whether classes may be served by higher ones' pools.
        one_frequency: all instances of a pool with the same TP run at one clock.
        time_limit: s, for the solver.

    Raises:
        InputError: no load, no GPU, or an unknown class.
        NoAnswerError: the loads cannot be served; says which class and by how much.
    """
    asked = Asked.about(profile, loads, gpus, merge, one_frequency)
    program, begin = _Program(profile, asked), time.monotonic()
    found, bound_kw = program.solve(time_limit, gpus)
    fleets = [found] if found else []
    with suppress(NoAnswerError):  # what the solver finds in time may be worse than the managers'
        fleets.append(hierarchical_pools(profile, asked))
    if not fleets:
        left = max(_AT_LEAST * time_limit, time_limit - (time.monotonic() - begin))
        smallest, fewest = program.solve(left)
        if (needed := math.ceil(fewest - _WHOLE)) > gpus:
            held = Counter[str]()
            for pool in smallest:
                held[pool.request_class] += pool.gpus
            raise too_few(gpus, needed, held, "the loads need")
        if not smallest or sum(pool.gpus for pool in smallest) > gpus:
            raise NoAnswerError(
                f"no plan was found within {time_limit:g} s; give it more with --time-limit"
            )
        fleets.append(smallest)
    pools = min(fleets, key=lambda each: sum(pool.power_w for pool in each))
    power = sum(pool.power_w for pool in pools)
    bound = bound_kw * _KILO
    proved = min(bound, power) if bound or not power else None
    return make_plan("exact", profile, asked, pools, proved)


class _Site(NamedTuple):
    """A pool that might be: a class's stretches of straight power under an SLO.

    Attributes:
        name: the class.
        stretches: of each its configuration and loads, and two variables of the program: its number
            of instances, and what they carry together.
        routed: variables, the load of each class that is sent here.
    """

    name: str
    stretches: list[tuple[Curve, Segment, Any, Any]]
    routed: dict[str, Any]


def _beaten(pair: Stretch, pairs: Iterable[Stretch]) -> bool:
    """Whether one segment of another clock, same TP, covers this one and never draws more."""
    curve, mine = pair
    drawn = mine.power_low, mine.power_high
    for other, segment in pairs:
        if other.tp == curve.tp and segment.low <= mine.low and mine.high <= segment.high:
            there = other.power_at(mine.low), other.power_at(mine.high)
            slower = other.frequency_mhz < curve.frequency_mhz
            if there[0] <= drawn[0] and there[1] <= drawn[1] and (there != drawn or slower):
                return True
    return False


class _Program:
    """The integer program; built once, solved for power or for GPUs."""

    def __init__(self, profile: ServingProfile, asked: Asked) -> None:
        from ortools.math_opt.python import mathopt

        self._mathopt, self._profile, self._asked = mathopt, profile, asked
        self._unit = min(_KILO, _FINEST * min(asked.loads_tokens_s.values()))
        self._model = mathopt.Model(name="fleet")
        self._power: Any = 0.0  # kW
        self._gpus: Any = 0
        self._sites: list[_Site] = []
        for name in CLASSES if asked.merge else asked.slos:
            may = {c: slo for c, slo in asked.slos.items() if name in hosts(c, merge=asked.merge)}
            promised = {Slo(a.ttft_s, b.tbt_s) for a in may.values() for b in may.values()}
            known: list[Any] = [[]]
            # The strictest first: another that leaves no more loads adds nothing.
            for slo in sorted(promised, key=lambda slo: (slo.ttft_s, slo.tbt_s)):
                served = [c for c, wanted in may.items() if slo.covers(wanted)]
                pairs = [
                    (curve, part) for curve in profile.of(name) for part in curve.segments(slo)
                ]
                if served and pairs not in known:
                    known.append(pairs)
                    self._add_site(name, served, pairs)
        if asked.one_frequency:
            self._tie_clocks()
        for name, load in asked.loads_tokens_s.items():
            shares = [site.routed[name] for site in self._sites if name in site.routed]
            self._model.add_linear_constraint(sum(shares) == load / self._unit)

    def _add_site(self, name: str, served: Iterable[str], pairs: Sequence[Stretch]) -> None:
        """A site that these classes may be sent to, with its variables and constraints."""
        model, site = self._model, _Site(name, [], {})
        self._sites.append(site)
        for curve, part in pairs:
            if not self._asked.one_frequency and _beaten((curve, part), pairs):
                continue
            low, high, at_low, at_high = part
            count, load = model.add_integer_variable(lb=0), model.add_variable(lb=0)
            site.stretches.append((curve, part, count, load))
            if low > 0:
                model.add_linear_constraint(load >= low / self._unit * count)
            model.add_linear_constraint(load <= high / self._unit * count)
            slope = (at_high - at_low) / (high - low)
            self._power += (at_low - slope * low) / _KILO * count
            self._power += slope * self._unit / _KILO * load
            self._gpus += curve.tp * count
        site.routed.update({other: model.add_variable(lb=0) for other in served})
        carried = sum(load for *_, load in site.stretches)
        model.add_linear_constraint(carried == self._brought(name, site.routed))

    def _brought(self, name: str, loads: Mapping[str, Any]) -> Any:
        """What loads of classes come to in a pool of another."""
        return sum(self._profile.needed_for(c, name) * load for c, load in loads.items())

    def _tie_clocks(self) -> None:
        """One clock for all instances of a class's pools with the same TP."""
        chosen: dict[tuple[str, int], dict[int, Any]] = {}
        for site in self._sites:
            # However much is routed here, no more instances of a stretch are needed than this.
            total = self._brought(
                site.name, {c: self._asked.loads_tokens_s[c] for c in site.routed}
            )
            for curve, segment, count, _ in site.stretches:
                clocks = chosen.setdefault((curve.name, curve.tp), {})
                if curve.frequency_mhz not in clocks:
                    clocks[curve.frequency_mhz] = self._model.add_binary_variable()
                most = math.ceil(total / (segment.low or segment.high))
                self._model.add_linear_constraint(count <= most * clocks[curve.frequency_mhz])
        for clocks in chosen.values():
            self._model.add_linear_constraint(sum(clocks.values()) <= 1)

    def solve(self, time_limit: float, gpus: int | None = None) -> tuple[list[Pool], float]:
        """The fleet that is found, if any, and a bound on what is least; 0: none proved.

        With at most so many GPUs, power is least (kW), otherwise the number of GPUs.
        """
        mathopt = self._mathopt
        parameters = mathopt.SolveParameters(
            time_limit=timedelta(seconds=time_limit),
            relative_gap_tolerance=_RELATIVE_GAP,
            random_seed=1,
        )
        self._model.minimize(self._power if gpus else self._gpus)
        limit = self._model.add_linear_constraint(self._gpus <= (gpus or math.inf))
        result = mathopt.solve(self._model, mathopt.SolverType.GSCIP, params=parameters)
        self._model.delete_linear_constraint(limit)
        bound = result.termination.objective_bounds.dual_bound
        found = result.has_primal_feasible_solution()
        pools = self._pools(result.variable_values()) if found else []
        return pools, bound if 0 < bound < math.inf else 0.0

    def _pools(self, values: Mapping[Any, float]) -> list[Pool]:
        """The fleet; what goes to each site adds up to the loads but for rounding."""
        shares: list[dict[str, float]] = [{} for _ in self._sites]
        for name, load in self._asked.loads_tokens_s.items():
            least = _NEGLIGIBLE * load / self._unit
            sites = [(site, share) for site, share in zip(self._sites, shares, strict=True)
                     if name in site.routed and values[site.routed[name]] > least]  # fmt: skip
            total = sum(values[site.routed[name]] for site, _ in sites)
            for site, share in sites:
                share[name] = values[site.routed[name]] * (load / total)
        pools: dict[tuple[str, Slo], tuple[Counter[str], list[tuple[Curve, int, float]]]] = {}
        for site, served in zip(self._sites, shares, strict=True):
            if served:
                # What it must promise may be less than what it could: then it is one with its like.
                slo = Slo.strictest(self._asked.slos[name] for name in served)
                all_served, instances = pools.setdefault((site.name, slo), (Counter(), []))
                all_served.update(served)
                instances += self._instances(site, values, self._brought(site.name, served))
        return [make_pool(*key, *known) for key, known in pools.items()]

    def _instances(
        self, site: _Site, values: Mapping[Any, float], brought: float
    ) -> list[tuple[Curve, int, float]]:
        """Configurations, numbers and loads (tokens/s) of a site's instances.

        The solver keeps stretches and sums to within a tolerance. Here loads lie within their
        stretches, and add up to what is brought but for rounding.
        """
        found = [
            (curve, segment, number, values[load] * self._unit / number)
            for curve, segment, count, load in site.stretches
            if (number := round(values[count]))
        ]
        rest, instances = brought - sum(number * load for *_, number, load in found), []
        for curve, segment, number, load in found:
            kept = min(max(load + rest / number, segment.low), segment.high)
            rest -= number * (kept - load)
            instances.append((curve, number, kept))
        return sorted(instances, key=lambda of: (-of[0].tp, -of[0].frequency_mhz, -of[2]))
