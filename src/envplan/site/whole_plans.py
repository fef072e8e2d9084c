"""One plan for each job and interval, where plans cannot be mixed, as where their peaks count.

Each job follows one of its plans, all powers together are within the budget, and the value is the
highest: a multiple-choice knapsack, which HiGHS solves as an integer program. Deadlines tie
intervals together; then all of them are one program.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from envplan.errors import NoAnswerError
from envplan.site.operating_range import OperatingRange
from envplan.site.sharing import Allocation, Demand, Market, Slot

if TYPE_CHECKING:
    from ortools.math_opt.python.variables import Variable

__all__ = ["choose_whole_plans"]

#: The solver stops where the best choice could be worth no more than this fraction more.
_RELATIVE_GAP: Final = 1e-4
#: What the solver may be off by, as a fraction: budgets and deadlines are tightened by as much.
_SOLVER_ERROR: Final = 1e-6


def choose_whole_plans(ranges: Sequence[OperatingRange], slots: Sequence[Slot]) -> list[Allocation]:
    """The most valuable choice of one plan for each job in each interval, deadlines kept.

    Args:
        ranges: of all jobs; their stops are the plans to choose from.
        slots: by time, without gaps.

    Raises:
        NoAnswerError: a deadline cannot be kept, or a budget is below the jobs' least power.
    """
    market = Market(
        [Demand(job_range.curve, job_range.job.value_per_iteration) for job_range in ranges]
    )
    if any(job_range.job.iterations is not None for job_range in ranges):
        return _ChoiceProgram(ranges, slots).solve(market)
    allocation_of_power: dict[float, Allocation] = {}
    for slot in slots:
        if slot.power_w not in allocation_of_power:
            (allocation_of_power[slot.power_w],) = _ChoiceProgram(ranges, [slot]).solve(market)
    return [allocation_of_power[slot.power_w] for slot in slots]


class _ChoiceProgram:
    """The integer program: a variable for each plan of each job in each interval."""

    def __init__(self, ranges: Sequence[OperatingRange], slots: Sequence[Slot]) -> None:
        from ortools.math_opt.python import mathopt

        self._ranges, self._slots = ranges, slots
        self._model = mathopt.Model()
        self._model.objective.is_maximize = True
        #: For each interval and job the variables of its plans: 1 for the one that is followed.
        self._chosen = [[self._add_choice(job_range) for job_range in ranges] for _ in slots]
        for slot, chosen in zip(slots, self._chosen, strict=True):
            self._add_budget(slot, chosen)
            self._add_value(slot, chosen)
        for job, job_range in enumerate(ranges):
            if job_range.job.iterations is not None and job_range.job.by_s is not None:
                self._add_deadline(job, job_range.job.iterations, job_range.job.by_s)

    def _add_choice(self, job_range: OperatingRange) -> list[Variable]:
        """Add the variables of a job in an interval, of which one is 1."""
        one = self._model.add_linear_constraint(lb=1.0, ub=1.0)
        variables = []
        for _ in job_range.stops:
            variable = self._model.add_binary_variable()
            one.set_coefficient(variable, 1.0)
            variables.append(variable)
        return variables

    def _add_budget(self, slot: Slot, chosen: Sequence[Sequence[Variable]]) -> None:
        """Add the constraint that all jobs together draw no more than an interval's power."""
        budget = self._model.add_linear_constraint(ub=slot.power_w * (1 - _SOLVER_ERROR))
        for job_range, variables in zip(self._ranges, chosen, strict=True):
            for stop, variable in zip(job_range.stops, variables, strict=True):
                budget.set_coefficient(variable, stop.point.power_w)

    def _add_value(self, slot: Slot, chosen: Sequence[Sequence[Variable]]) -> None:
        """Add an interval's value to the objective."""
        for job_range, variables in zip(self._ranges, chosen, strict=True):
            weight = job_range.job.value_per_iteration * slot.duration_s
            for stop, variable in zip(job_range.stops, variables, strict=True):
                self._model.objective.set_linear_coefficient(variable, weight * stop.throughput)

    def _add_deadline(self, job: int, iterations: int, by_s: float) -> None:
        """Add the constraint that a job has made so many iterations by this time."""
        row = self._model.add_linear_constraint(lb=iterations * (1 + _SOLVER_ERROR))
        for slot, chosen in zip(self._slots, self._chosen, strict=True):
            duration_s = min(slot.end_s, by_s) - slot.start_s
            if duration_s <= 0:
                break
            for stop, variable in zip(self._ranges[job].stops, chosen[job], strict=True):
                row.set_coefficient(variable, stop.throughput * duration_s)

    def solve(self, market: Market) -> list[Allocation]:
        """The allocations of all intervals, with the prices of a market of mixtures.

        Raises:
            NoAnswerError: there are none.
        """
        from ortools.math_opt.python import mathopt

        result = mathopt.solve(
            self._model,
            mathopt.SolverType.HIGHS,
            params=mathopt.SolveParameters(relative_gap_tolerance=_RELATIVE_GAP),
        )
        if result.termination.reason != mathopt.TerminationReason.OPTIMAL:
            raise NoAnswerError(
                "no choice of one plan for each job keeps the budget and all deadlines; give more "
                "power or time"
            )
        values = result.variable_values()
        allocations = []
        for slot, chosen in zip(self._slots, self._chosen, strict=True):
            numbers = [
                max(range(len(variables)), key=lambda number: values[variables[number]])
                for variables in chosen
            ]
            allocations.append(self._allocation(numbers, market.allocate(slot.power_w).price))
        return allocations

    def _allocation(self, numbers: Sequence[int], price: float) -> Allocation:
        """The allocation in which each job is at one of its stops."""
        stops = [
            job_range.stops[number] for job_range, number in zip(self._ranges, numbers, strict=True)
        ]
        throughput = np.array([stop.throughput for stop in stops])
        value_per_iteration = np.array(
            [job_range.job.value_per_iteration for job_range in self._ranges]
        )
        return Allocation(
            throughput=throughput,
            power_w=sum(stop.point.power_w for stop in stops),
            value=float(throughput @ value_per_iteration),
            price=price,
        )
