"""The exact planner: the fleet that meets every SLO with the least power, as an integer program.

DynamoLLM's problem, min sum_i N_i x Energy_i,f(L_i) subject to GPUs, loads and SLOs, over pools of
all classes at once, with two liberties that only make it better: instances of a pool may carry
different loads and, unless `one_frequency`, run at different clocks.

Power is piecewise linear in an instance's load, so the program can be exact. Take two instances of
one pool that both lie inside a straight stretch of their curves, and shift load from one to the
other: the power changes linearly, so in one direction it does not rise, and one of them reaches the
end of its stretch. Hence some optimum has at most one instance per pool inside a stretch, and all
others at ends of stretches. The program counts instances at ends, and places the one elsewhere.
Stretches on which another clock with the same TP never draws more are left out.

SLOs are kept by cutting curves to the loads that meet them. A class may go to the pool of a class
that is longer in no respect; its requests then count as that class's own. A pool promises one SLO
to all it serves, so there is a pool for each class and each SLO that makes a difference.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

from envplan.errors import NoAnswerError
from envplan.serving.classes import CLASSES, Slo, serves
from envplan.serving.demand import check_demand, check_reachable, too_few
from envplan.serving.hierarchy import hierarchical_fleet
from envplan.serving.plan import (
    Fleet,
    Pool,
    ServingPlan,
    main_class,
    make_plan,
    make_pool,
    needed_for,
)
from envplan.serving.profile import Curve, Segment, ServingProfile

__all__ = ["TIME_LIMIT_S", "exact_plan"]

#: For the solver, s.
TIME_LIMIT_S: Final = 6.0

_RELATIVE_GAP: Final = 1e-6
_NO_GAP: Final = 1e-6  # of the objective: HiGHS stops at an absolute gap of this, too
_AT_LEAST: Final = 0.2  # of the time limit is left to count GPUs in, if no plan was found
_WHOLE: Final = 1e-6  # what a bound on GPUs may lie above a whole number for rounding
_KILO: Final = 1e3  # the program counts kW and thousands of tokens/s, or less for small loads
_FINEST: Final = 100.0  # but never more of the least load than this
_NEGLIGIBLE: Final = 1e-7  # of a load: what the solver's tolerance makes out of zero


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
    wanted = check_demand(loads, gpus)
    check_reachable(profile, wanted, merge=merge)
    program = _Program(profile, wanted, merge=merge, one_frequency=one_frequency)
    begin = time.monotonic()
    fleet, bound = program.least_power(gpus, time_limit)
    with suppress(NoAnswerError):  # what the solver finds in time may be worse than the managers'
        near = hierarchical_fleet(profile, wanted, gpus, merge=merge)
        fleet = near if fleet is None or near.power_w < fleet.power_w else fleet
    if fleet is None:
        left = max(_AT_LEAST * time_limit, time_limit - (time.monotonic() - begin))
        fleet = _any_fleet(program, gpus, left)
    if fleet is None:
        raise NoAnswerError(
            f"no plan was found within {time_limit:g} s; give it more with --time-limit"
        )
    proved = bound > 0 or fleet.power_w == 0
    fleet = replace(fleet, planner="exact", bound_w=min(bound, fleet.power_w) if proved else None)
    return make_plan(fleet, profile, wanted, gpus, merge=merge, one_frequency=one_frequency)


def _any_fleet(program: _Program, gpus: int, time_limit: float) -> Fleet | None:
    """The smallest fleet that was found, if it fits.

    Raises:
        NoAnswerError: none can.
    """
    smallest, needed = program.fewest_gpus(time_limit)
    if needed > gpus:
        by_class: dict[str, int] = {}
        for pool in () if smallest is None else smallest.pools:
            served = {part.request_class: part.load_tokens_s for part in pool.serves}
            name = main_class(program.profile, pool.request_class, served)
            by_class[name] = by_class.get(name, 0) + pool.gpus
        raise too_few(gpus, needed, by_class)
    return smallest if smallest and smallest.gpus <= gpus else None


def _pool_slos(profile: ServingProfile, name: str, demanded: Sequence[str]) -> list[Slo]:
    """The SLOs that a pool might promise: those of all sets of classes it may serve."""
    found: set[Slo] = set()
    for other in demanded:
        if serves(name, other):
            slo = profile.classes[other].slo
            found |= {slo} | {Slo.strictest((slo, known)) for known in found}
    return sorted(found, key=lambda slo: (slo.ttft_s, slo.tbt_s))


class _End(NamedTuple):
    """An instance at an end of a stretch."""

    curve: Curve
    load: float
    power: float


@dataclass(frozen=True)
class _Site:
    """A pool that might be, with the variables that the program has for it.

    Attributes:
        name: the class whose configurations it runs.
        slo: what it promises.
        stretches: on which power is straight, each with its configuration.
        ends: of these: where any number of instances may run.
        counts: how many instances run at each end.
        placed: of each stretch, whether one more is there, and how far into it.
        routed: load of each class that is sent here.
    """

    name: str
    slo: Slo
    stretches: Sequence[tuple[Curve, Segment]]
    ends: Sequence[_End]
    counts: list[Any] = field(default_factory=list)
    placed: list[tuple[Any, Any]] = field(default_factory=list)
    routed: dict[str, Any] = field(default_factory=dict)


def _sites(
    profile: ServingProfile, loads: Mapping[str, float], *, merge: bool, one_frequency: bool
) -> list[_Site]:
    sites = []
    demanded = list(loads)
    for name in CLASSES if merge else demanded:
        slos = _pool_slos(profile, name, demanded) if merge else [profile.classes[name].slo]
        known: list[Any] = []
        for slo in slos:  # the strictest first: another that leaves no more loads adds nothing
            pairs = [
                (curve, segment) for curve in profile.of(name) for segment in curve.segments(slo)
            ]
            if pairs and pairs not in known:
                known.append(pairs)
                if not one_frequency:
                    pairs = [pair for pair in pairs if not _beaten(pair, pairs)]
                ends = {
                    (curve, load): _End(curve, load, power)
                    for curve, (low, high, at_low, at_high) in pairs
                    for load, power in ((low, at_low), (high, at_high))
                    if load > 0
                }
                sites.append(_Site(name, slo, pairs, list(ends.values())))
    return sites


def _beaten(pair: tuple[Curve, Segment], pairs: Sequence[tuple[Curve, Segment]]) -> bool:
    """Whether one segment of another clock, same TP, covers this one and never draws more."""
    curve, mine = pair
    for other, segment in pairs:
        if other is curve or other.tp != curve.tp:
            continue
        if segment.low <= mine.low and mine.high <= segment.high:
            low, high = other.power_at(mine.low), other.power_at(mine.high)
            if low > mine.power_low or high > mine.power_high:
                continue
            equal = (low, high) == (mine.power_low, mine.power_high)
            if not equal or other.frequency_mhz < curve.frequency_mhz:
                return True
    return False


class _Program:
    """The integer program; built once, solved for power or for GPUs.

    Raises:
        NoAnswerError: a class has no pool, though its SLO is met at some load.
    """

    def __init__(
        self,
        profile: ServingProfile,
        loads: Mapping[str, float],
        *,
        merge: bool,
        one_frequency: bool,
    ) -> None:
        from ortools.math_opt.python import mathopt

        self._mathopt = mathopt
        self.profile, self._loads, self._merge = profile, loads, merge
        self._sites = _sites(profile, loads, merge=merge, one_frequency=one_frequency)
        self._unit = min(_KILO, _FINEST * min(loads.values()))
        self._model = mathopt.Model(name="fleet")
        power: list[Any] = []
        gpus: list[Any] = []
        for site in self._sites:
            self._add_site(site, power, gpus)
        for site, following in pairwise(self._sites):
            self._limit_company(site, following)
        if one_frequency:
            self._tie_clocks()
        for name, load in loads.items():
            shares = [site.routed[name] for site in self._sites if name in site.routed]
            if not shares:
                raise NoAnswerError(
                    f"no configuration keeps the SLO of {name} at all loads from none up to what "
                    "it carries"
                )
            self._model.add_linear_constraint(sum(shares) == load / self._unit)
        self._power, self._gpus = sum(power), sum(gpus)

    def least_power(self, gpus: int, time_limit: float) -> tuple[Fleet | None, float]:
        """The fleet of at most so many GPUs with the least power, if any was found.

        Returns:
            The fleet, and what none draws less than, W; 0 where nothing was proved.
        """
        limit = self._model.add_linear_constraint(self._gpus <= gpus)
        self._model.minimize(self._power)
        result = self._solve(time_limit)
        self._model.delete_linear_constraint(limit)
        bound = result.termination.objective_bounds.dual_bound * _KILO
        bound = bound if 0 < bound < math.inf else 0.0
        found = result.has_primal_feasible_solution()
        return Fleet("exact", tuple(self._pools(result))) if found else None, bound

    def fewest_gpus(self, time_limit: float) -> tuple[Fleet | None, int]:
        """The fleet with the fewest GPUs found, if any, and how many any fleet needs at least."""
        self._model.minimize(self._gpus)
        result = self._solve(time_limit)
        bound = result.termination.objective_bounds.dual_bound
        needed = math.ceil(bound - _WHOLE) if 0 < bound < math.inf else 0
        if not result.has_primal_feasible_solution():
            return None, needed
        return Fleet("exact", tuple(self._pools(result))), needed

    def _add_site(self, site: _Site, power: list[Any], gpus: list[Any]) -> None:
        """Its variables and constraints; terms of its power (kW) and GPUs go to the lists."""
        model, carried = self._model, []
        for end in site.ends:
            count = model.add_integer_variable(lb=0)
            site.counts.append(count)
            carried.append(end.load / self._unit * count)
            power.append(end.power / _KILO * count)
            gpus.append(end.curve.tp * count)
        for curve, (low, high, at_low, at_high) in site.stretches:
            there, extra = model.add_binary_variable(), model.add_variable(lb=0)
            model.add_linear_constraint(extra <= (high - low) / self._unit * there)
            carried.append(low / self._unit * there + extra)
            slope = (at_high - at_low) / (high - low)
            power.append(at_low / _KILO * there + slope * self._unit / _KILO * extra)
            gpus.append(curve.tp * there)
            site.placed.append((there, extra))
        model.add_linear_constraint(sum(there for there, _ in site.placed) <= 1)
        for name in self._loads:
            able = serves(site.name, name) if self._merge else name == site.name
            if able and site.slo.covers(self.profile.classes[name].slo):
                site.routed[name] = model.add_variable(lb=0)
        brought = sum(self._needed(site, name) * share for name, share in site.routed.items())
        model.add_linear_constraint(sum(carried) == brought)

    def _needed(self, site: _Site, name: str) -> float:
        return needed_for(self.profile, name, site.name)

    def _limit_company(self, site: _Site, following: _Site) -> None:
        """No more that the next looser pool of this class could serve than one instance carries.

        Put load that only this pool can serve into as few of its instances as it takes: at most one
        of them has other load beside it, and instances without any could be in the looser pool, at
        the same load and power. So this excludes no power, only copies of the same fleet. It holds
        where SLOs can be put in a row from strict to loose.
        """
        slos = {name: self.profile.classes[name].slo for name in self._loads}
        ordered = all(a.covers(b) or b.covers(a) for a, b in combinations(slos.values(), 2))
        company = [
            self._needed(site, name) * share
            for name, share in site.routed.items()
            if following.name == site.name and following.slo.covers(slos[name])
        ]
        if ordered and company:
            most = max(end.load for end in site.ends)
            self._model.add_linear_constraint(sum(company) <= most / self._unit)

    def _tie_clocks(self) -> None:
        """One clock for all instances of a class's pools with the same TP."""
        model = self._model
        chosen: dict[tuple[str, int], dict[int, Any]] = {}

        def used(curve: Curve) -> Any:
            clocks = chosen.setdefault((curve.name, curve.tp), {})
            if curve.frequency_mhz not in clocks:
                clocks[curve.frequency_mhz] = model.add_binary_variable()
            return clocks[curve.frequency_mhz]

        for site in self._sites:
            # However much is routed here, no more instances of an end are needed than carry it all.
            total = sum(self._loads[name] * self._needed(site, name) for name in site.routed)
            for end, count in zip(site.ends, site.counts, strict=True):
                model.add_linear_constraint(count <= math.ceil(total / end.load) * used(end.curve))
            for (curve, _), (there, _) in zip(site.stretches, site.placed, strict=True):
                model.add_linear_constraint(there <= used(curve))
        for clocks in chosen.values():
            model.add_linear_constraint(sum(clocks.values()) <= 1)

    def _solve(self, time_limit: float) -> Any:
        """What the solver finds; without presolve if its best was lost on the way back from it.

        HiGHS then claims an optimum whose bounds lie further apart than was asked for.
        """
        begin = time.monotonic()
        result = self._solve_once(time_limit)
        if not self._claims_too_much(result):
            return result
        left = max(_AT_LEAST * time_limit, time_limit - (time.monotonic() - begin))
        again = self._solve_once(left, presolve=self._mathopt.Emphasis.OFF)
        return again if again.has_primal_feasible_solution() else result

    def _solve_once(self, time_limit: float, presolve: Any = None) -> Any:
        mathopt = self._mathopt
        parameters = mathopt.SolveParameters(
            time_limit=timedelta(seconds=time_limit),
            relative_gap_tolerance=_RELATIVE_GAP,
            random_seed=1,
            presolve=presolve,
        )
        with _silenced():
            return mathopt.solve(self._model, mathopt.SolverType.HIGHS, params=parameters)

    def _claims_too_much(self, result: Any) -> bool:
        if result.termination.reason != self._mathopt.TerminationReason.OPTIMAL:
            return False
        bounds = result.termination.objective_bounds
        allowed: float = max(2 * _RELATIVE_GAP * abs(bounds.primal_bound), _NO_GAP)
        return bool(bounds.primal_bound - bounds.dual_bound > allowed)

    def _pools(self, result: Any) -> list[Pool]:
        values = result.variable_values()
        pools: dict[tuple[str, Slo], tuple[dict[str, float], list[tuple[Curve, int, float]]]] = {}
        for site, served in zip(self._sites, self._shares(values), strict=True):
            if not served:
                continue
            brought = sum(load * self._needed(site, name) for name, load in served.items())
            # What it must promise may be less than what it could: then it is one with its like.
            slo = Slo.strictest(self.profile.classes[name].slo for name in served)
            all_served, all_instances = pools.setdefault((site.name, slo), ({}, []))
            all_instances += _instances(site, values, brought)
            for name, load in served.items():
                all_served[name] = all_served.get(name, 0.0) + load
        return [
            make_pool(name, slo, served, _merged(instances))
            for (name, slo), (served, instances) in pools.items()
        ]

    def _shares(self, values: Mapping[Any, float]) -> list[dict[str, float]]:
        """What goes to each site, tokens/s, adding up to the loads but for rounding."""
        shares: list[dict[str, float]] = [{} for _ in self._sites]
        for name, load in self._loads.items():
            mine = {
                k: values[site.routed[name]]
                for k, site in enumerate(self._sites)
                if name in site.routed
                and values[site.routed[name]] * self._unit > _NEGLIGIBLE * load
            }
            for k, value in mine.items():
                shares[k][name] = value * (load / sum(mine.values()))
        return shares


def _instances(
    site: _Site, values: Mapping[Any, float], brought: float
) -> list[tuple[Curve, int, float]]:
    """The instances of a site, with loads that add up to what is brought but for rounding."""
    instances = [
        (end.curve, count, end.load)
        for end, variable in zip(site.ends, site.counts, strict=True)
        if (count := round(values[variable]))
    ]
    rest = brought - sum(count * load for _, count, load in instances)
    for (curve, segment), (there, _) in zip(site.stretches, site.placed, strict=True):
        if round(values[there]):
            instances.append((curve, 1, min(max(rest, segment.low), segment.high)))
    return instances


@contextmanager
def _silenced() -> Iterator[None]:
    """Keep what HiGHS now and then prints, whatever it is told, out of our own output."""
    libc = ctypes.CDLL(None)
    sys.stdout.flush()
    libc.fflush(None)
    try:
        kept = os.dup(1)
    except OSError:  # there is no standard output
        yield
        return
    try:
        with Path(os.devnull).open("wb") as nothing:
            os.dup2(nothing.fileno(), 1)
        yield
    finally:
        libc.fflush(None)
        os.dup2(kept, 1)
        os.close(kept)


def _merged(instances: Sequence[tuple[Curve, int, float]]) -> list[tuple[Curve, int, float]]:
    """Alike instances together, by falling TP, clock and load."""
    counts: dict[tuple[int, int, float], tuple[Curve, int]] = {}
    for curve, count, load in instances:
        key = (-curve.tp, -curve.frequency_mhz, -load)
        counts[key] = (curve, counts.get(key, (curve, 0))[1] + count)
    return [(curve, count, -key[2]) for key, (curve, count) in sorted(counts.items())]
