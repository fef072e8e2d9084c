"""A lower bound that knows late and held clocks.

A flow of prices on the precedences of a pipeline, conserved at every operation, takes the pipeline
apart: for every choice that ends by T, effective energy + F T is at least the sum over stages of
what each pays for energy, time and waiting at these prices, F being the whole flow. Late and held
clocks tie operations of one stage only, so each stage's least is a shortest path
(csrc/stage_paths.hpp). Any conserved flow gives a valid bound; here it is the relaxation's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from envplan.errors import InputError
from envplan.frontier import Relaxation
from envplan.replay import Machine, Problem, Rows

Prices = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class FlowPrices:
    """Prices of time and of waiting, from a flow on the precedences of a pipeline.

    Attributes:
        time_uw: of a ns that each operation takes, (N,): what flows through it.
        wait_uw: of a ns of waiting before each, (N,): what flows to it from the operation before it
            on its stage, and where it is the first of all from the source.
        total_uw: of a ns of the iteration.
        lag_cost_fj: what the constant lags of precedences cost.
    """

    time_uw: Prices
    wait_uw: Prices
    total_uw: int
    lag_cost_fj: int

    @classmethod
    def relaxed(cls, relaxation: Relaxation, deadline_ns: int) -> FlowPrices:
        """The flow of the relaxed optimum at a deadline, not below T_min, ns."""
        relaxation.walk(deadline_ns)
        traced_ns = min(deadline_ns, relaxation.max_time_ns)
        optimum = relaxation.tracer.interval_at(traced_ns).optimum_at(traced_ns)
        network, pipeline = relaxation.network, relaxation.pipeline
        flow_uw = optimum.flow_uw
        precedence_uw = flow_uw[network.precedence_arcs]
        num_operations = network.num_operations
        before = np.repeat(np.arange(num_operations), np.diff(pipeline.succ_begin))
        stage = relaxation.problem.stage
        is_next = (pipeline.succ == before + 1) & (stage[pipeline.succ] == stage[before])
        wait_uw = np.zeros(num_operations)
        np.add.at(wait_uw, pipeline.succ[is_next], precedence_uw[is_next])
        of_source = np.flatnonzero(network.tail == network.source)
        is_first = np.isin(network.head[of_source] // 2, pipeline.stage_begin[:-1])
        begins = of_source[is_first]
        wait_uw[network.head[begins] // 2] += flow_uw[begins]
        lag_costs = zip(precedence_uw.tolist(), pipeline.succ_lag_ns.tolist(), strict=True)
        return cls(
            time_uw=flow_uw[:num_operations].astype(np.float64),
            wait_uw=wait_uw,
            total_uw=int(flow_uw[of_source].sum()),
            lag_cost_fj=sum(price * lag for price, lag in lag_costs),
        )


class StagePaths(NamedTuple):
    """The cheapest way of every stage at some prices.

    Attributes:
        cost_fj: a lower bound on what all stages cost together.
        rows: int32 (N,), the choice that it was found at; it need not end in time.
    """

    cost_fj: int
    rows: Rows


def cheapest_stage_paths(
    problem: Problem,
    prices: FlowPrices,
    machine: Machine,
    *,
    min_dwell_ns: int = 0,
    change_fj: float = 0.0,
) -> StagePaths:
    """The cheapest way of every stage, in time linear in operations.

    Args:
        min_dwell_ns: least time between two requests of a stage for another clock.
        change_fj: what each request costs. With it, and the machine without latency, the rows are
            those of a plan that changes clocks less.

    Raises:
        InputError: a row of the profile changes clocks within itself.
    """
    costs_fj, rows = list[int](), list[Rows]()
    for stage, (first, last) in enumerate(pairwise(problem.pipeline.stage_begin.tolist())):
        try:
            cost_fj, of_stage = problem._kernel.cheapest_stage_path(
                stage,
                machine.latency_ns,
                machine.asks_ahead,
                min_dwell_ns,
                change_fj,
                prices.time_uw[first:last],
                prices.wait_uw[first:last],
            )
        except ValueError as error:
            raise InputError(f"{error}, which the bound of late clocks does not know") from error
        costs_fj.append(math.floor(cost_fj))
        rows.append(of_stage)
    chosen = np.concatenate(rows) - problem.first_row
    return StagePaths(sum(costs_fj), chosen.astype(np.int32))


def late_clock_bound_fj(
    relaxation: Relaxation, deadline_ns: int, machine: Machine, min_dwell_ns: int = 0
) -> int:
    """Least energy of an iteration that ends by a deadline with late or held clocks, fJ.

    It is of one GPU a stage, and at least the relaxed bound; beyond T_star it is that one.

    Args:
        deadline_ns: not below T_min, ns.

    Raises:
        InputError: a row of the profile changes clocks within itself.
    """
    relaxed_fj = relaxation.lower_bound_fj(deadline_ns)
    if deadline_ns > relaxation.min_energy_time_ns:
        return relaxed_fj  # the prices of T_star say nothing of iterations that end later
    prices = FlowPrices.relaxed(relaxation, deadline_ns)
    # An iteration that ends earlier waits less. Only where that is worth less than ending early
    # costs does the bound of the deadline hold for it, too.
    if prices.total_uw < relaxation.total_power_uw:
        return relaxed_fj
    paths = cheapest_stage_paths(relaxation.problem, prices, machine, min_dwell_ns=min_dwell_ns)
    time_cost_fj = (relaxation.total_power_uw - prices.total_uw) * deadline_ns
    return max(relaxed_fj, paths.cost_fj + prices.lag_cost_fj + time_cost_fj)
