"""The exact planner: the fleet that meets every SLO with the least power, as an integer program.

DynamoLLM's problem, min sum_i N_i x Energy_i,f(L_i) subject to GPUs, loads and SLOs, over pools of
all classes at once, with two liberties that only make it better: instances of a pool may carry
different loads and, unless `one_frequency`, run at different clocks.

Power is piecewise linear in an instance's load, so the program can be exact. On a straight stretch
of a configuration's curve, the power of several instances depends only on how many they are and on
what they carry together. So the program has two variables for each stretch, a number of instances
and their load, and alike instances share that load evenly. Stretches on which another clock with
the same TP never draws more are left out.

SLOs are kept by cutting curves to the loads that meet them. A class may go to the pool of a class
that is longer in no respect; its requests then count as that class's own. A pool promises one SLO
to all it serves, so there is a pool for each class and each SLO that makes a difference.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final, NamedTuple

from envplan.errors import NoAnswerError
from envplan.serving.classes import CLASSES, Slo, hosts
from envplan.serving.hierarchy import hierarchical_pools
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

Stretch = tuple[Curve, Segment]


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
