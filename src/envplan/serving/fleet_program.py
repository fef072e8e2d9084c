"""The integer program for the fleet of least power, of pools that it might have (pool_sites.py).

Power is piecewise linear in an instance's load, so the program can be exact. On a straight segment
of a configuration's curve, the power of several instances depends only on how many they are and on
what they carry together. So the program has two variables for each segment, a number of instances
and their load, and alike instances share that load evenly. Segments on which another clock with the
same TP never draws more are left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Final, NamedTuple

from envplan.errors import NoAnswerError
from envplan.serving.build_plan import InstanceGroup, build_pool
from envplan.serving.classes import Slo
from envplan.serving.plan import Pool
from envplan.serving.plan_request import PlanRequest
from envplan.serving.pool_sites import CurveSegment, PoolSite, is_dominated, pool_sites
from envplan.serving.profile import ServingProfile
from envplan.serving.replayed_curves import Promise
from envplan.serving.steady_state import LoadCurve, Segment

#: What ends the search must not depend on the machine. So it is the number of nodes of its tree, by
#: about how long these take on a usual core: the first, where cuts are made, and each further one,
#: by the number of variables.
_FIRST_NODE_S: Final = 1e-3
_NODE_S: Final = 3e-4
#: Should a machine take so many times as long, or so many seconds, it is stopped by the clock.
_GUARD_TIMES: Final = 20.0
_GUARD_S: Final = 120.0

_RELATIVE_GAP: Final = 1e-6
_KILO: Final = 1e3  # the program counts kW and thousands of tokens/s, or less for small loads
_MAX_UNIT_IN_LOADS: Final = 100.0  # the program's unit of load, in units of the least load
_NEGLIGIBLE_SHARE: Final = 1e-7  # of a load: what the solver's tolerance makes out of zero
_SEED: Final = 1


@dataclass(frozen=True, eq=False)
class _SegmentVariables:
    """Variables of a segment.

    Attributes:
        curve: its configuration.
        segment: its loads and powers.
        count: variable, a number of instances.
        load: variable, what they carry together, in the program's unit.
    """

    curve: LoadCurve
    segment: Segment
    count: Any  # untyped, like all of the solver
    load: Any


class _SolvedSegment(NamedTuple):
    """Instances on a segment as the solver has them, within its tolerance.

    Attributes:
        curve: their configuration.
        segment: its loads.
        num_instances: at least one.
        load_tokens_s: of each.
    """

    curve: LoadCurve
    segment: Segment
    num_instances: int
    load_tokens_s: float


@dataclass(frozen=True, eq=False)
class _SolvedPool:
    """What a solution's pools of one promise serve together, and by which instances.

    Attributes:
        served: load of each class, tokens/s.
        groups: the instances.
    """

    served: dict[str, float] = field(default_factory=dict)
    groups: list[InstanceGroup] = field(default_factory=list)

    def add(self, routed: Mapping[str, float], groups: Sequence[InstanceGroup]) -> None:
        """Add what is sent to one of them, and its instances."""
        for name, load_tokens_s in routed.items():
            self.served[name] = self.served.get(name, 0) + load_tokens_s
        self.groups.extend(groups)


@dataclass(frozen=True, eq=False)
class _PoolVariables:
    """Variables of a pool that might be.

    Attributes:
        request_class: the class whose configurations it runs.
        segments: its instances.
        routed: variables, the load of each class that is sent there, in the program's unit.
    """

    request_class: str
    segments: list[_SegmentVariables] = field(default_factory=list)
    routed: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class MilpSolution:
    """The solver's answer.

    Attributes:
        pools: the best fleet; empty if none was found.
        lower_bound: no fleet has less power, W, or fewer GPUs, whichever was minimized; None if
            nothing was proved.
    """

    pools: list[Pool]
    lower_bound: float | None


class FleetProgram:
    """The integer program: instance counts and loads per linear segment; built once.

    Raises:
        NoAnswerError: the load curves leave no load of a class within its SLO.
    """

    def __init__(self, profile: ServingProfile, request: PlanRequest) -> None:
        from ortools.math_opt.python import mathopt

        self._mathopt = mathopt
        self._profile, self._request = profile, request
        least_load = min(request.loads_tokens_s.values())
        self._unit_tokens_s = min(_KILO, _MAX_UNIT_IN_LOADS * least_load)
        self._model = mathopt.Model(name="fleet")
        self._power_kw: Any = 0.0
        self._gpus: Any = 0
        self._pools = [self._add_pool(site) for site in pool_sites(profile, request)]
        if request.one_frequency:
            self._require_one_clock_per_tp()
        self._require_loads_served()

    def _add_pool(self, site: PoolSite) -> _PoolVariables:
        pool = _PoolVariables(site.request_class)
        for candidate in site.segments:
            if self._request.one_frequency or not is_dominated(candidate, site.segments):
                pool.segments.append(self._add_segment(candidate))
        for name in site.served_classes:
            pool.routed[name] = self._model.add_variable(lb=0)
        carried = sum(variables.load for variables in pool.segments)
        self._model.add_linear_constraint(
            carried == self._in_pool_tokens(site.request_class, pool.routed)
        )
        return pool

    def _add_segment(self, candidate: CurveSegment) -> _SegmentVariables:
        """Variables of a segment; its power and GPUs join those of the fleet."""
        curve, segment = candidate
        count = self._model.add_integer_variable(lb=0)
        load = self._model.add_variable(lb=0)
        unit_tokens_s = self._unit_tokens_s
        if segment.low_tokens_s > 0:
            least_load = segment.low_tokens_s / unit_tokens_s
            self._model.add_linear_constraint(load >= least_load * count)
        most_load = segment.high_tokens_s / unit_tokens_s
        self._model.add_linear_constraint(load <= most_load * count)

        # An instance draws power_at_zero_w, where the straight line begins, and more for its load.
        joules_per_token = segment.slope_j
        power_at_zero_w = segment.power_low_w - joules_per_token * segment.low_tokens_s
        power_of_unit_w = joules_per_token * unit_tokens_s
        self._power_kw += power_at_zero_w / _KILO * count
        self._power_kw += power_of_unit_w / _KILO * load
        self._gpus += curve.tp * count
        return _SegmentVariables(curve, segment, count, load)

    def _in_pool_tokens(self, pool_class: str, loads: Mapping[str, Any]) -> Any:
        """Loads of classes as tokens of a pool; numbers or variables."""
        tokens: Any = 0
        for name, load in loads.items():
            tokens += self._profile.load_conversion_factor(name, pool_class) * load
        return tokens

    def _require_loads_served(self) -> None:
        for name, load_tokens_s in self._request.loads_tokens_s.items():
            shares = [pool.routed[name] for pool in self._pools if name in pool.routed]
            if not shares:
                raise NoAnswerError(f"no configuration carries any load of {name} within its SLO")
            self._model.add_linear_constraint(sum(shares) == load_tokens_s / self._unit_tokens_s)

    def _require_one_clock_per_tp(self) -> None:
        """One clock for all instances of a class's pools with the same TP."""
        is_used: dict[tuple[str, int], dict[int, Any]] = {}
        for pool in self._pools:
            # However much is routed here, no more instances of a segment are needed than this.
            all_loads = {name: self._request.loads_tokens_s[name] for name in pool.routed}
            max_load_tokens_s = self._in_pool_tokens(pool.request_class, all_loads)
            for variables in pool.segments:
                curve, segment = variables.curve, variables.segment
                is_clock_used = is_used.setdefault((curve.request_class, curve.tp), {})
                if curve.frequency_mhz not in is_clock_used:
                    is_clock_used[curve.frequency_mhz] = self._model.add_binary_variable()
                instance_tokens_s = segment.low_tokens_s or segment.high_tokens_s
                max_count = math.ceil(max_load_tokens_s / instance_tokens_s)
                self._model.add_linear_constraint(
                    variables.count <= max_count * is_clock_used[curve.frequency_mhz]
                )
        for is_clock_used in is_used.values():
            self._model.add_linear_constraint(sum(is_clock_used.values()) <= 1)

    def minimize_power(self, max_gpus: int, time_limit_s: float) -> MilpSolution:
        """The fleet of least power within so many GPUs."""
        solution = self._solve(self._power_kw, max_gpus, time_limit_s)
        if solution.lower_bound is None:
            return solution
        return replace(solution, lower_bound=solution.lower_bound * _KILO)

    def relaxed_power_w(self, max_gpus: int) -> float:
        """The least power of fractions of instances within so many GPUs, W; infinite if none is."""
        counts = [variables.count for pool in self._pools for variables in pool.segments]
        for count in counts:
            count.integer = False
        self._model.minimize(self._power_kw)
        limit = self._model.add_linear_constraint(self._gpus <= max_gpus)
        result = self._mathopt.solve(self._model, self._mathopt.SolverType.GLOP)
        self._model.delete_linear_constraint(limit)
        for count in counts:
            count.integer = True
        if result.termination.reason == self._mathopt.TerminationReason.INFEASIBLE:
            return math.inf
        dual_bound = result.termination.objective_bounds.dual_bound
        return max(0.0, float(dual_bound) * _KILO)

    def minimize_gpus(self, time_limit_s: float) -> MilpSolution:
        """The fleet of the fewest GPUs."""
        return self._solve(self._gpus, math.inf, time_limit_s)

    def _solve(self, objective: Any, max_gpus: float, time_limit_s: float) -> MilpSolution:
        """The fleet that minimizes an objective; the bound is in the objective's unit."""
        mathopt = self._mathopt
        num_variables = sum(1 for _ in self._model.variables())
        parameters = mathopt.SolveParameters(
            node_limit=_node_limit(num_variables, time_limit_s),
            time_limit=timedelta(seconds=max(_GUARD_S, _GUARD_TIMES * time_limit_s)),
            relative_gap_tolerance=_RELATIVE_GAP,
            random_seed=_SEED,
        )
        self._model.minimize(objective)
        limit = self._model.add_linear_constraint(self._gpus <= max_gpus)
        result = mathopt.solve(self._model, mathopt.SolverType.GSCIP, params=parameters)
        self._model.delete_linear_constraint(limit)
        pools: list[Pool] = []
        if result.has_primal_feasible_solution():
            pools = self._extract_pools(result.variable_values())
        dual_bound = result.termination.objective_bounds.dual_bound
        is_proved = 0 < dual_bound < math.inf
        return MilpSolution(pools, dual_bound if is_proved else None)

    def _extract_pools(self, values: Mapping[Any, float]) -> list[Pool]:
        """The fleet of a solution; pools with the same class and SLO are one."""
        solved_pools: dict[Promise, _SolvedPool] = {}
        for pool, routed in zip(self._pools, self._routed_loads(values), strict=True):
            if not routed:
                continue
            # A pool promises what it does serve, which may be less than what it might serve. So two
            # pools of the program can come to the same promise.
            slo = Slo.strictest(self._request.slos[name] for name in routed)
            promise = Promise(pool.request_class, slo)
            load_tokens_s = self._in_pool_tokens(pool.request_class, routed)
            groups = self._extract_groups(pool, values, load_tokens_s)
            solved_pools.setdefault(promise, _SolvedPool()).add(routed, groups)
        pools = []
        for (request_class, slo), solved in solved_pools.items():
            classes = self._profile.classes
            pools.append(build_pool(request_class, slo, solved.served, solved.groups, classes))
        return pools

    def _routed_loads(self, values: Mapping[Any, float]) -> list[dict[str, float]]:
        """Load of each class that is sent to each pool, tokens/s.

        The loads of a class add up to its requested load.
        """
        routed: list[dict[str, float]] = [{} for _ in self._pools]
        for name, load_tokens_s in self._request.loads_tokens_s.items():
            solved_loads = self._solved_loads(name, values)
            tokens_s_per_unit = load_tokens_s / sum(solved_loads.values())
            for number, load in solved_loads.items():
                routed[number][name] = load * tokens_s_per_unit
        return routed

    def _solved_loads(self, name: str, values: Mapping[Any, float]) -> dict[int, float]:
        """What the solver sends of a class to each pool, by its number, in the program's unit.

        What its tolerance makes out of zero is left out.
        """
        load = self._request.loads_tokens_s[name] / self._unit_tokens_s
        solved_loads: dict[int, float] = {}
        for number, pool in enumerate(self._pools):
            if name in pool.routed:
                routed = values[pool.routed[name]]
                if routed > _NEGLIGIBLE_SHARE * load:
                    solved_loads[number] = routed
        return solved_loads

    def _extract_groups(
        self, pool: _PoolVariables, values: Mapping[Any, float], load_tokens_s: float
    ) -> list[InstanceGroup]:
        """A pool's instances, the largest first.

        The solver keeps segments and sums to within a tolerance. So groups in turn take over as
        much as their segments allow of the load that is not carried yet. After that loads lie
        within their segments, and add up to the pool's load but for rounding.
        """
        solved: list[_SolvedSegment] = []
        for variables in pool.segments:
            count = round(values[variables.count])
            if count:
                load = values[variables.load] * self._unit_tokens_s
                solved.append(
                    _SolvedSegment(variables.curve, variables.segment, count, load / count)
                )
        carried_tokens_s = sum(group.num_instances * group.load_tokens_s for group in solved)
        missing_tokens_s = load_tokens_s - carried_tokens_s
        groups = []
        for curve, segment, count, load in solved:
            wanted = load + missing_tokens_s / count
            adjusted = min(max(wanted, segment.low_tokens_s), segment.high_tokens_s)
            missing_tokens_s -= count * (adjusted - load)
            groups.append(InstanceGroup(curve, count, adjusted))
        return sorted(groups, key=_largest_first)


def _node_limit(num_variables: int, time_limit_s: float) -> int:
    """Nodes of the search that a usual core gets through in some time, at least one."""
    further_s = time_limit_s - _FIRST_NODE_S * num_variables
    return 1 + max(0, int(further_s / (_NODE_S * num_variables)))


def _largest_first(group: InstanceGroup) -> tuple[int, int, float]:
    return (-group.curve.tp, -group.curve.frequency_mhz, -group.load_tokens_s)
