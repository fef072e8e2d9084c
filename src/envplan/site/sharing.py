"""Sharing power among jobs, exactly.

Every job has a convex curve of power over throughput, and a value for its throughput. The most
valuable use of a budget gives each job its least power and then buys throughput piece by piece, the
piece of most value per watt first. Curves are convex, so a job's pieces come in their own order,
and the result is the optimum: no use of the budget is worth more (a continuous knapsack; the proof
stands in docs/theory.md). The value per watt of the piece that the budget ends in is the price of
power.

Deadlines couple the intervals of a day. Then the same pieces are the variables of a linear program,
which HiGHS solves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray

from envplan.errors import NoAnswerError
from envplan.site.curve import PowerCurve

if TYPE_CHECKING:
    from ortools.math_opt.python.linear_constraints import LinearConstraint
    from ortools.math_opt.python.variables import Variable

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class Demand:
    """A job as sharing sees it.

    Attributes:
        curve: its power over its throughput.
        value: of an iteration.
        iterations, by_s: it must have made so many by this time, s; None: no deadline.
    """

    curve: PowerCurve
    value: float
    iterations: float | None = None
    by_s: float | None = None


@dataclass(frozen=True, eq=False)
class Pieces:
    """The pieces of all jobs' curves, the piece of most value per watt first.

    Attributes:
        job: which job each is of, (n).
        throughput: that it adds, iterations a second, (n).
        power_w: that it adds, W, (n); positive.
        price: its value per second for a watt, (n), nowhere rising.
        least_throughput, least_power_w: of each job without any piece, (J).
        job_value: of an iteration of each job, (J).
    """

    job: IntArray
    throughput: FloatArray
    power_w: FloatArray
    price: FloatArray
    least_throughput: FloatArray
    least_power_w: FloatArray
    job_value: FloatArray

    @classmethod
    def of(cls, demands: Sequence[Demand]) -> Self:
        """Cut the curves at their corners and sort the pieces."""
        curves = [demand.curve for demand in demands]
        job_value = np.array([demand.value for demand in demands])
        job = np.repeat(np.arange(len(demands)), [curve.num_pieces for curve in curves])
        throughput = np.concatenate([np.diff(curve.throughput) for curve in curves])
        power_w = np.concatenate([np.diff(curve.power_w) for curve in curves])
        slope = np.concatenate([curve.slopes for curve in curves])
        price = job_value[job] / slope
        # Stable: pieces of one price stay in their job's order.
        order = np.argsort(-price, kind="stable")
        return cls(
            job=job[order],
            throughput=throughput[order],
            power_w=power_w[order],
            price=price[order],
            least_throughput=np.array([curve.slowest.throughput for curve in curves]),
            least_power_w=np.array([curve.slowest.power_w for curve in curves]),
            job_value=job_value,
        )

    def throughput_with(self, bought: FloatArray) -> FloatArray:
        """The throughput of each job that has these parts of its pieces, (J).

        Args:
            bought: of each piece, 0 to 1, (n).
        """
        added = np.bincount(
            self.job, weights=bought * self.throughput, minlength=len(self.job_value)
        )
        throughput: FloatArray = self.least_throughput + added
        return throughput


@dataclass(frozen=True, eq=False)
class Allocation:
    """The throughput of each job in one interval, within a budget.

    Attributes:
        throughput: of each job, iterations a second, (J).
        power_w: of all jobs together, W.
        value: of all jobs together, per second.
        price: of the next watt, value per second; 0 where every job runs at its fastest.
    """

    throughput: FloatArray
    power_w: float
    value: float
    price: float


class Market:
    """Shares any budget among the same jobs, each in a binary search and a sum."""

    def __init__(self, demands: Sequence[Demand]) -> None:
        self._pieces = Pieces.of(demands)
        pieces = self._pieces
        self.least_power_w = float(pieces.least_power_w.sum())
        least_value = float(pieces.least_throughput @ pieces.job_value)
        piece_value = pieces.throughput * pieces.job_value[pieces.job]
        # Power and value before the first piece and after each, (n + 1).
        self._power_w = self.least_power_w + np.cumsum([0.0, *pieces.power_w])
        self._value = least_value + np.cumsum([0.0, *piece_value])

    def best_value(self, power_w: float) -> float:
        """The value of the most valuable use of a budget, per second."""
        return float(np.interp(power_w, self._power_w, self._value))

    def allocate(self, power_w: float) -> Allocation:
        """The most valuable use of a budget.

        Raises:
            NoAnswerError: the jobs' least power is more than the budget.
        """
        pieces = self._pieces
        if power_w < self.least_power_w:
            raise NoAnswerError(f"{self.least_power_w!r} W are needed, {power_w!r} W are there")
        num_whole = int(np.searchsorted(self._power_w[1:], power_w, side="right"))
        bought = np.zeros(len(pieces.job))
        bought[:num_whole] = 1.0
        price = 0.0
        if num_whole < len(pieces.job):
            # The budget ends in the next piece.
            remaining_w = power_w - self._power_w[num_whole]
            bought[num_whole] = remaining_w / pieces.power_w[num_whole]
            price = float(pieces.price[num_whole])
        throughput = pieces.throughput_with(bought)
        return Allocation(
            throughput=throughput,
            power_w=self.least_power_w + float(bought @ pieces.power_w),
            value=float(throughput @ pieces.job_value),
            price=price,
        )


@dataclass(frozen=True)
class Slot:
    """An interval as sharing sees it.

    Attributes:
        start_s, end_s: since the plan's start.
        power_w: that all jobs together may draw, W.
    """

    start_s: float
    end_s: float
    power_w: float

    @property
    def duration_s(self) -> float:
        """Its length."""
        return self.end_s - self.start_s


def allocate_over_time(demands: Sequence[Demand], slots: Sequence[Slot]) -> list[Allocation]:
    """The most valuable use of budgets that follow each other, deadlines kept.

    Without deadlines intervals do not depend on each other, and each is shared alone.

    Args:
        demands: of all jobs.
        slots: by time, without gaps.

    Raises:
        NoAnswerError: a deadline cannot be kept, or a budget is below the jobs' least power.
    """
    if all(demand.iterations is None for demand in demands):
        market = Market(demands)
        return [market.allocate(slot.power_w) for slot in slots]
    return _DeadlineProgram(demands, slots).solve()


#: What the solver may be off by, as a fraction: budgets and deadlines are tightened by as much.
_SOLVER_ERROR = 1e-8


class _DeadlineProgram:
    """The linear program of a day with deadlines: one variable for each piece in each interval."""

    def __init__(self, demands: Sequence[Demand], slots: Sequence[Slot]) -> None:
        from ortools.math_opt.python import mathopt

        self._demands, self._slots = demands, slots
        self._pieces = Pieces.of(demands)
        self._model = mathopt.Model()
        #: For each interval the part of each piece that is bought, 0 to 1.
        self._bought = [self._add_parts_of_pieces() for _ in slots]
        #: For each interval the constraint on its power.
        self._budgets = [
            self._add_budget(slot, bought) for slot, bought in zip(slots, self._bought, strict=True)
        ]
        for job, demand in enumerate(demands):
            if demand.iterations is not None and demand.by_s is not None:
                self._add_deadline(job, demand.iterations, demand.by_s)
        self._maximize_value()

    def _add_parts_of_pieces(self) -> list[Variable]:
        """Add the variables of an interval: the part of each piece that is bought."""
        return [self._model.add_variable(lb=0.0, ub=1.0) for _ in self._pieces.job]

    def _add_budget(self, slot: Slot, bought: Sequence[Variable]) -> LinearConstraint:
        """Add the constraint that all jobs together draw no more than an interval's power."""
        least_power_w = float(self._pieces.least_power_w.sum())
        budget = self._model.add_linear_constraint(
            ub=slot.power_w * (1 - _SOLVER_ERROR) - least_power_w
        )
        for variable, power_w in zip(bought, self._pieces.power_w.tolist(), strict=True):
            budget.set_coefficient(variable, power_w)
        return budget

    def _add_deadline(self, job: int, iterations: float, by_s: float) -> None:
        """Add the constraint that a job has made so many iterations by this time."""
        pieces = self._pieces
        pieces_of_job = np.flatnonzero(pieces.job == job).tolist()
        least_iterations = 0.0  # without any piece
        row = self._model.add_linear_constraint()
        for slot, bought in zip(self._slots, self._bought, strict=True):
            duration_s = min(slot.end_s, by_s) - slot.start_s
            if duration_s <= 0:
                break
            least_iterations += float(pieces.least_throughput[job]) * duration_s
            for piece in pieces_of_job:
                row.set_coefficient(bought[piece], float(pieces.throughput[piece]) * duration_s)
        row.lower_bound = iterations * (1 + _SOLVER_ERROR) - least_iterations

    def _maximize_value(self) -> None:
        """Set the objective: the value of all pieces over all intervals."""
        pieces, objective = self._pieces, self._model.objective
        values_per_s = (pieces.job_value[pieces.job] * pieces.throughput).tolist()
        for slot, bought in zip(self._slots, self._bought, strict=True):
            for variable, value_per_s in zip(bought, values_per_s, strict=True):
                objective.set_linear_coefficient(variable, value_per_s * slot.duration_s)
        objective.is_maximize = True

    def solve(self) -> list[Allocation]:
        """The allocations of all intervals.

        Raises:
            NoAnswerError: there are none.
        """
        from ortools.math_opt.python import mathopt

        result = mathopt.solve(self._model, mathopt.SolverType.HIGHS)
        if result.termination.reason != mathopt.TerminationReason.OPTIMAL:
            raise NoAnswerError(self._missing_power())
        values = result.variable_values()
        # Where no job can do more than it must, the program has no variables, and so no prices.
        has_variables = len(self._pieces.job) > 0
        prices = result.dual_values() if has_variables else dict.fromkeys(self._budgets, 0.0)
        allocations = []
        for slot, bought, budget in zip(self._slots, self._bought, self._budgets, strict=True):
            bought_parts = np.clip([values[variable] for variable in bought], 0.0, 1.0)
            # A dual value is of the whole interval; a price is per second.
            price = max(0.0, prices[budget]) / slot.duration_s
            allocations.append(self._allocation(bought_parts, price))
        return allocations

    def _missing_power(self) -> str:
        """The least power that every interval would need more for the deadlines, in words."""
        from ortools.math_opt.python import mathopt

        missing_w = self._model.add_variable(lb=0.0)
        for budget in self._budgets:
            budget.set_coefficient(missing_w, -1.0)
        self._model.minimize(missing_w)
        result = mathopt.solve(self._model, mathopt.SolverType.HIGHS)
        if result.termination.reason != mathopt.TerminationReason.OPTIMAL:
            return "a deadline cannot be kept with all the power there is"
        more_kw = result.variable_values()[missing_w] / 1e3
        return f"the deadlines need {more_kw:,.4g} kW of the jobs' GPUs more than the budget leaves"

    def _allocation(self, bought: FloatArray, price: float) -> Allocation:
        """The allocation in which these parts of the pieces are bought, (n)."""
        throughput = self._pieces.throughput_with(bought)
        powers_w = [
            demand.curve.power_at(job_throughput)
            for demand, job_throughput in zip(self._demands, throughput.tolist(), strict=True)
        ]
        value = float(throughput @ self._pieces.job_value)
        return Allocation(throughput, sum(powers_w), value, price)
