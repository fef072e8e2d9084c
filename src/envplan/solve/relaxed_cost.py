"""The cost of a run on the relaxed frontier, and the iteration times at which it is least.

Between breakpoints of the frontier and changes of the rate, the relaxed cost of an iteration time T
is exactly (a + b T)(c + d T) / T + k T: a + b T is the energy of an iteration, c + d T the integral
of the rate over the run, and k what time costs besides energy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from envplan.costs import Run
from envplan.costs.pricing import check_span
from envplan.errors import NoAnswerError
from envplan.units import J_PER_KWH, duration_text, ns_from_s, ns_from_s_floor, s_from_ns

#: Local minima of the relaxed cost that are made to plans, at most.
_MAX_MINIMA: Final = 8


class EnergyCurve(Protocol):
    """A relaxed frontier, as far as costs need it."""

    @property
    def min_time_ns(self) -> int:
        """T_min."""

    @property
    def min_energy_time_ns(self) -> int:
        """T_star."""

    @property
    def times_ns(self) -> NDArray[np.int64]:
        """Breakpoints, ascending, (n,)."""

    def energy_at(self, time: float) -> float:
        """Relaxed energy of an iteration that ends by a time, s, in J."""


class CostMinimum(NamedTuple):
    """A local minimum of the relaxed cost.

    Attributes:
        cost: in the run's minimized amount, but for a constant where only one minimum matters.
        time_ns: of an iteration.
    """

    cost: float
    time_ns: int


def relaxed_cost_minima(frontier: EnergyCurve, run: Run, num_gpus: int) -> list[CostMinimum]:
    """Local minima of a run's relaxed cost over iteration time, least first.

    Iterations between T_min and T_star are looked at: not slower ones, and no pauses until an hour
    is cheaper.

    Args:
        frontier: the relaxed frontier.
        run: with iterations and a deadline.
        num_gpus: of all replicas.

    Raises:
        NoAnswerError: even at T_min the run takes longer; says how long.
        InputError: a rate ends before the longest run that is looked at.
    """
    latest_ns = _latest_time_ns(frontier, run)
    if _is_energy_all_that_costs(run, num_gpus):
        return [CostMinimum(0.0, latest_ns)]  # energy only falls until T_star
    relaxed_cost = _RelaxedCost(frontier, run, num_gpus)
    times_ns = relaxed_cost.candidate_times_ns(latest_ns)
    costs = [relaxed_cost.at(time_ns) for time_ns in times_ns]
    return sorted(_local_minima(times_ns, costs))[:_MAX_MINIMA]


def _latest_time_ns(frontier: EnergyCurve, run: Run) -> int:
    """The slowest iteration worth looking at that meets the run's deadline."""
    assert run.iterations is not None
    assert run.deadline_s is not None
    shortest_run_ns = frontier.min_time_ns * run.iterations
    deadline_ns = ns_from_s_floor(run.deadline_s)
    if deadline_ns < shortest_run_ns:
        shortest_run_s = s_from_ns(shortest_run_ns)
        raise NoAnswerError(
            f"{run.iterations} iterations take at least {duration_text(shortest_run_s)} "
            f"({shortest_run_s:.9g} s, at T_min), longer than the deadline of "
            f"{duration_text(run.deadline_s)}"
        )
    latest_ns = min(frontier.min_energy_time_ns, deadline_ns // run.iterations)
    for rate in (run.price, run.carbon):
        if rate is not None:
            check_span(rate, s_from_ns(latest_ns * run.iterations))
    return latest_ns


def _is_energy_all_that_costs(run: Run, num_gpus: int) -> bool:
    """Whether the rate is the same at all times and time costs nothing besides energy."""
    rate = run.minimized_rate
    has_price = rate.is_fixed and rate.per_kwh[0] > 0
    time_costs = run.overheads.host_power or run.minimized_overhead(1.0, num_gpus)
    return has_price and not time_costs


class _RelaxedCost:
    """A run's relaxed cost as a function of iteration time."""

    def __init__(self, frontier: EnergyCurve, run: Run, num_gpus: int) -> None:
        assert run.iterations is not None
        self._frontier = frontier
        self._rate = run.minimized_rate
        self._overheads = run.overheads
        self._iterations = run.iterations
        self._num_gpus = num_gpus
        self._overhead_per_s = run.minimized_overhead(1.0, num_gpus) * run.iterations

    def at(self, time_ns: int) -> float:
        """The cost of the run."""
        time_s = s_from_ns(time_ns)
        mean_power_w = self._energy_j(time_ns) / time_s
        energy_cost = mean_power_w * self._rate_integral(time_ns) / J_PER_KWH
        return energy_cost + self._overhead_per_s * time_s

    def candidate_times_ns(self, latest_ns: int) -> list[int]:
        """Times among which all local minima are, ascending from T_min to a latest one.

        They are breakpoints, changes of the rate, and stationary points in between.
        """
        bends_ns = self._bends_ns(latest_ns)
        times_ns: list[int] = []
        for begin_ns, end_ns in pairwise(bends_ns):
            times_ns.append(begin_ns)
            stationary_ns = self._stationary_ns(begin_ns, end_ns)
            if stationary_ns is not None:
                times_ns.append(stationary_ns)
        return [*times_ns, latest_ns]

    def _bends_ns(self, latest_ns: int) -> list[int]:
        """T_min, the latest time, and all breakpoints and changes of the rate in between."""
        earliest_ns = self._frontier.min_time_ns
        shortest_run_s = s_from_ns(earliest_ns * self._iterations)
        changes_s = self._rate.changes(shortest_run_s, s_from_ns(latest_ns) * self._iterations)
        bends_ns = set(self._frontier.times_ns.tolist())
        bends_ns.update(ns_from_s(change_s / self._iterations) for change_s in changes_s)
        inner_ns = {bend_ns for bend_ns in bends_ns if earliest_ns < bend_ns < latest_ns}
        return sorted({earliest_ns, latest_ns, *inner_ns})

    def _stationary_ns(self, begin_ns: int, end_ns: int) -> int | None:
        """Where the cost is least between two bends; None if it is at one of them.

        (a + b T)(c + d T) / T + k T is least at sqrt(a c / (b d + k)), where that lies inside.
        """
        begin_s, end_s = s_from_ns(begin_ns), s_from_ns(end_ns)
        span_s = end_s - begin_s
        energy_j, integral = self._energy_j(begin_ns), self._rate_integral(begin_ns)
        b = (self._energy_j(end_ns) - energy_j) / span_s
        d = (self._rate_integral(end_ns) - integral) / span_s
        a = energy_j - b * begin_s
        c = integral - d * begin_s
        # All costs times J / kWh: energies are in J, and rates per kWh.
        curvature = b * d + self._overhead_per_s * J_PER_KWH
        if a * c <= 0 or curvature <= 0:
            return None
        stationary_ns = ns_from_s(math.sqrt(a * c / curvature))
        return stationary_ns if begin_ns < stationary_ns < end_ns else None

    def _energy_j(self, time_ns: int) -> float:
        """Energy of an iteration that the site draws, J."""
        time_s = s_from_ns(time_ns)
        gpu_energy_j = self._frontier.energy_at(time_s)
        return self._overheads.site_energy_j(time_s, gpu_energy_j, self._num_gpus)

    def _rate_integral(self, time_ns: int) -> float:
        """The rate over the whole run, in amounts per kWh x s."""
        return self._rate.integral(s_from_ns(time_ns) * self._iterations)


def _local_minima(times_ns: Sequence[int], costs: Sequence[float]) -> list[CostMinimum]:
    """Times that cost less than the one before and no more than the one after."""
    minima = []
    for k, (time_ns, cost) in enumerate(zip(times_ns, costs, strict=True)):
        cost_before = costs[k - 1] if k > 0 else math.inf
        cost_after = costs[k + 1] if k + 1 < len(costs) else math.inf
        if cost_before > cost <= cost_after:
            minima.append(CostMinimum(cost, time_ns))
    return minima
