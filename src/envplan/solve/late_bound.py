"""A lower bound that knows late and held clocks, for any prices.

A flow of prices on the precedences of a pipeline takes the pipeline apart: for every choice of
clocks that ends by T, effective energy + F T is at least the sum over stages of what each pays for
energy, time and waiting at these prices, F being the whole flow. Late and held clocks tie
operations of one stage only, so each stage's least is a shortest path (csrc/stage_paths.hpp). Any
flow gives a valid bound. The relaxation's is the default, and raised_prices.py looks for a better
one. docs/theory.md, "Late and held clocks", has the proof.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from envplan._kernel import Optimum
from envplan.errors import InputError
from envplan.frontier import Relaxation
from envplan.pipeline import Pipeline
from envplan.plan import Job
from envplan.plan.late_clock_prices import LateClockPrices, is_next_on_stage, precedences
from envplan.plan.model import Bound
from envplan.replay import Machine, Problem, Rows
from envplan.units import ns_from_s_ceil

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class ClockLimits:
    """How late clocks come, and how long they must be held.

    Attributes:
        machine: how clocks follow requests.
        min_dwell_ns: least time between two requests of a stage for another clock, ns.
    """

    machine: Machine
    min_dwell_ns: int = 0

    @classmethod
    def of_job(cls, job: Job) -> Self:
        """The limits that a plan's job states."""
        return cls(job.machine, ns_from_s_ceil(job.min_dwell_s or 0.0))

    @property
    def are_any(self) -> bool:
        """Whether there are any limits: else the relaxed bound knows all."""
        return self.machine.latency_ns > 0 or self.min_dwell_ns > 0


@dataclass(frozen=True, eq=False)
class FlowPrices:
    """Prices of time and of waiting, from a flow on the precedences of a pipeline.

    Attributes:
        arcs_10uw: what flows along each precedence, int64, in the order of `pipeline.succ`.
        time_10uw: of a ns that each operation takes, (N,): what flows through it.
        wait_10uw: of a ns of waiting before each, (N,): what flows to it from the operation before
            it on its stage, and where it is the first of all from the source.
        end_wait_10uw: of a ns from the end of each stage's last operation to that of the iteration,
            (S,): what flows from that operation straight to the end.
        total_10uw: of a ns of the iteration: what flows into its end.
        lag_cost_10fj: what the constant lags of precedences cost.
    """

    arcs_10uw: NDArray[np.int64]
    time_10uw: Floats
    wait_10uw: Floats
    end_wait_10uw: Floats
    total_10uw: int
    lag_cost_10fj: int

    @classmethod
    def of_arcs(cls, pipeline: Pipeline, arcs_10uw: NDArray[np.int64]) -> FlowPrices:
        """The prices of any flow along the precedences.

        It need not be conserved. What an operation gets and does not hand on goes straight to the
        end of the iteration; what it hands on and does not get comes from the beginning. Both are
        precedences, too: no operation ends after the end or starts before the beginning.

        Args:
            arcs_10uw: not negative, in the order of `pipeline.succ`.
        """
        num_operations = len(pipeline.operations)
        before, after = precedences(pipeline)
        into_10uw = np.zeros(num_operations, np.int64)
        out_of_10uw = np.zeros(num_operations, np.int64)
        np.add.at(into_10uw, after, arcs_10uw)
        np.add.at(out_of_10uw, before, arcs_10uw)
        through_10uw = np.maximum(into_10uw, out_of_10uw)
        wait_10uw = np.zeros(num_operations, np.int64)
        is_next = is_next_on_stage(pipeline)
        np.add.at(wait_10uw, after[is_next], arcs_10uw[is_next])
        begin = pipeline.stage_begin
        has_any = np.diff(begin) > 0
        firsts, lasts = begin[:-1][has_any], begin[1:][has_any] - 1
        wait_10uw[firsts] = through_10uw[firsts] - into_10uw[firsts]
        end_wait_10uw = np.zeros(pipeline.num_stages)
        end_wait_10uw[has_any] = through_10uw[lasts] - out_of_10uw[lasts]
        lag_costs = zip(arcs_10uw.tolist(), pipeline.succ_lag_ns.tolist(), strict=True)
        return cls(
            arcs_10uw=arcs_10uw,
            time_10uw=through_10uw.astype(np.float64),
            wait_10uw=wait_10uw.astype(np.float64),
            end_wait_10uw=end_wait_10uw,
            total_10uw=sum((through_10uw - out_of_10uw).tolist()),
            lag_cost_10fj=sum(price_10uw * lag_ns for price_10uw, lag_ns in lag_costs),
        )

    @classmethod
    def relaxed(cls, relaxation: Relaxation, deadline_ns: int) -> FlowPrices:
        """The flow of the relaxed optimum at a deadline, not below T_min, ns.

        From T_star on it is that of just before T_star.
        """
        # At T_star itself the flow depends on whether the frontier has been traced beyond it.
        before_t_star_ns = max(relaxation.min_time_ns, relaxation.min_energy_time_ns - 1)
        optimum = relaxation.optimum_anew(min(deadline_ns, before_t_star_ns))
        return cls._of_optimum(relaxation, optimum)

    @classmethod
    def relaxed_until(cls, relaxation: Relaxation, time_ns: int) -> FlowPrices:
        """The flow of the relaxed optimum if everybody waits until a time, not below T_min, ns."""
        time_ns = min(time_ns, relaxation.slowest_time_ns)
        return cls._of_optimum(relaxation, relaxation.state_at(time_ns))

    @classmethod
    def _of_optimum(cls, relaxation: Relaxation, optimum: Optimum) -> FlowPrices:
        arcs_10uw = optimum.flow_10uw[relaxation.network.precedence_arcs]
        return cls.of_arcs(relaxation.pipeline, arcs_10uw)

    def scaled_to(self, total_10uw: int, pipeline: Pipeline) -> FlowPrices:
        """About the same flow, of another total."""
        if total_10uw == self.total_10uw or not self.total_10uw:
            return self
        share = total_10uw / self.total_10uw
        return self.of_arcs(pipeline, (self.arcs_10uw * share).astype(np.int64))


class StatedBound(NamedTuple):
    """The lower bound that a plan states.

    Attributes:
        kind: what it follows from.
        energy_10fj: of one GPU a stage; None: what the relaxation says.
        prices: of the bound of late clocks, where they are not the relaxed ones.
    """

    kind: Bound
    energy_10fj: int | None = None
    prices: LateClockPrices | None = None


RELAXED_BOUND: Final = StatedBound("relaxation")


class StagePaths(NamedTuple):
    """The cheapest way of every stage at some prices.

    It need not end in time, nor do stages wait for each other.

    Attributes:
        costs_10fj: a lower bound on what each stage costs.
        energies_10fj: effective energy of each stage.
        rows: int32 (N,), the clocks asked for.
        times_ns, waits_ns: float64 (N,), what each operation takes, and what its stage waits
            before it.
        end_waits_ns: float64 (S,), what each stage waits after its last operation.
    """

    costs_10fj: list[int]
    energies_10fj: list[float]
    rows: Rows
    times_ns: Floats
    waits_ns: Floats
    end_waits_ns: Floats


def cheapest_stage_paths(
    problem: Problem,
    prices: FlowPrices,
    machine: Machine,
    *,
    min_dwell_ns: int = 0,
    change_10fj: float = 0.0,
) -> StagePaths:
    """The cheapest way of every stage, in time linear in operations.

    Args:
        min_dwell_ns: least time between two requests of a stage for another clock.
        change_10fj: what each request costs. With it, and the machine without latency, the rows are
            those of a plan that changes clocks less.

    Raises:
        InputError: a row of the profile changes clocks within itself.
    """
    costs_10fj, energies_10fj = list[int](), list[float]()
    rows, times_ns, waits_ns = list[Rows](), list[Floats](), list[Floats]()
    end_waits_ns = list[float]()
    for stage, (first, last) in enumerate(pairwise(problem.pipeline.stage_begin.tolist())):
        try:
            path = problem._kernel.cheapest_stage_path(
                stage,
                machine.latency_ns,
                machine.asks_ahead,
                min_dwell_ns,
                change_10fj,
                prices.time_10uw[first:last],
                np.append(prices.wait_10uw[first:last], prices.end_wait_10uw[stage]),
            )
        except ValueError as error:
            raise InputError(f"{error}, which the bound of late clocks does not know") from error
        cost_10fj, energy_10fj, _, stage_rows, stage_times_ns, stage_waits_ns = path
        costs_10fj.append(math.floor(cost_10fj))
        energies_10fj.append(energy_10fj)
        rows.append(stage_rows)
        times_ns.append(stage_times_ns)
        waits_ns.append(stage_waits_ns[:-1])
        end_waits_ns.append(float(stage_waits_ns[-1]))
    chosen = (np.concatenate(rows) - problem.first_row).astype(np.int32)
    return StagePaths(
        costs_10fj,
        energies_10fj,
        chosen,
        np.concatenate(times_ns),
        np.concatenate(waits_ns),
        np.array(end_waits_ns),
    )


def late_clock_bound_10fj(
    relaxation: Relaxation, deadline_ns: int, clocks: ClockLimits, prices: FlowPrices | None = None
) -> int:
    """Least energy of an iteration that ends by a deadline with late or held clocks, 10 fJ.

    It is of one GPU a stage, and may be lower than the relaxed bound, which holds as well.

    Args:
        deadline_ns: not below T_min, ns.
        prices: any will do; default: the relaxed ones.

    Raises:
        InputError: a row of the profile changes clocks within itself.
    """
    if prices is None:
        prices = FlowPrices.relaxed(relaxation, deadline_ns)
        if deadline_ns >= relaxation.min_energy_time_ns:
            # Time that nobody needs is worth nothing: only waiting is saved by ending earlier.
            prices = prices.scaled_to(relaxation.total_power_10uw, relaxation.pipeline)
    return PricedBound.of_prices(relaxation, prices, clocks).energy_10fj(deadline_ns)


class PricedBound(NamedTuple):
    """The bound that some prices give, for every deadline.

    Attributes:
        energy_at_zero_10fj: the bound if the iteration could end at 0.
        slope_10uw: by how much it falls with the end of the iteration.
        min_time_ns: T_min, before which no iteration ends.
    """

    energy_at_zero_10fj: int
    slope_10uw: int
    min_time_ns: int

    @classmethod
    def of_paths(cls, relaxation: Relaxation, prices: FlowPrices, paths: StagePaths) -> PricedBound:
        """The bound by the cheapest ways of all stages at some prices."""
        return cls(
            sum(paths.costs_10fj) + prices.lag_cost_10fj,
            prices.total_10uw - relaxation.total_power_10uw,
            relaxation.min_time_ns,
        )

    @classmethod
    def of_prices(
        cls, relaxation: Relaxation, prices: FlowPrices, clocks: ClockLimits
    ) -> PricedBound:
        """The bound of late and held clocks at some prices.

        Raises:
            InputError: a row of the profile changes clocks within itself.
        """
        paths = cheapest_stage_paths(
            relaxation.problem, prices, clocks.machine, min_dwell_ns=clocks.min_dwell_ns
        )
        return cls.of_paths(relaxation, prices, paths)

    def energy_10fj(self, deadline_ns: int) -> int:
        """Least energy of an iteration that ends by a deadline, one GPU a stage, 10 fJ."""
        end_ns = deadline_ns if self.slope_10uw >= 0 else self.min_time_ns
        return self.energy_at_zero_10fj - self.slope_10uw * end_ns

    def energy_until_10fj(self, time_ns: int) -> int:
        """Least energy if everybody waits until a time, one GPU a stage, 10 fJ."""
        return self.energy_at_zero_10fj - self.slope_10uw * time_ns


def late_waiting_bound_10fj(relaxation: Relaxation, time_ns: int, clocks: ClockLimits) -> int:
    """Least energy with late or held clocks if everybody waits until a time, 10 fJ.

    It is of one GPU a stage, and may be lower than the relaxed bound, which holds as well.

    Args:
        time_ns: not below T_min, ns.

    Raises:
        InputError: a row of the profile changes clocks within itself.
    """
    prices = FlowPrices.relaxed_until(relaxation, time_ns)
    return PricedBound.of_prices(relaxation, prices, clocks).energy_until_10fj(time_ns)
