"""CP-SAT, a solver of integer programs (ortools), for choosing one option for each operation.

Objectives are counted in units of 0.1 nJ, rounded so that what CP-SAT proves is never more than
what holds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np
from ortools.sat.python import cp_model

from envplan.profile import CostCurve
from envplan.solve.rounding import Choice, Rounding

# Fewer workers leave out the searches that improve a plan; they share the cores there are.
_WORKERS: Final = 8
_FJ_PER_UNIT: Final = 10**5


class CpSatResult(NamedTuple):
    """The answer of CP-SAT.

    Attributes:
        pareto_choice: a Pareto index for each operation, in the order in which they were added;
            None where none was found in time.
        bound_fj: a lower bound on the cost of every choice of allowed options, fJ.
    """

    pareto_choice: Choice | None
    bound_fj: int


class OptionModel:
    """A CP-SAT model in which each operation takes one of its options.

    Attributes:
        model: to which whoever makes it adds when operations start.
    """

    def __init__(self, curves: Sequence[CostCurve]) -> None:
        self.model = cp_model.CpModel()
        self._curves = curves
        self._base_fj = 0
        self._costs: list[cp_model.LinearExprT] = []
        self._is_chosen: list[dict[int, cp_model.IntVar]] = []

    def add_operation(self, i: int, allowed: Iterable[int], present: int) -> cp_model.LinearExprT:
        """Add the operation of a curve.

        Args:
            i: of the curve.
            allowed: Pareto indices of its options.
            present: the option to try first, which is always allowed.

        Returns:
            How long the operation takes, ns.
        """
        durations_ns = self._curves[i].time_ns.tolist()
        costs_fj = self._curves[i].cost_fj.tolist()
        options = sorted({*allowed, present})
        is_chosen = {option: self.model.new_bool_var("") for option in options}
        self.model.add_exactly_one(is_chosen.values())
        self._is_chosen.append(is_chosen)
        least_fj = min(costs_fj[option] for option in options)
        self._base_fj += least_fj
        for option, variable in is_chosen.items():
            # Rounded down, so that the sum is never more than what the operations cost.
            self._costs.append((costs_fj[option] - least_fj) // _FJ_PER_UNIT * variable)
            self.model.add_hint(variable, option == present)
        return sum(durations_ns[option] * variable for option, variable in is_chosen.items())

    def solve_until(
        self, end_s: float, saved_uw: int = 0, early_ns: cp_model.LinearExprT = 0
    ) -> CpSatResult:
        """Minimize the cost of all operations, less what ending early saves.

        Args:
            end_s: when to stop, of time.monotonic().
            saved_uw: power that is saved while the iteration is over early.
            early_ns: how long that is.
        """
        # Savings are rounded up: the objective never says more than the energy.
        saved_units = -(-saved_uw // _FJ_PER_UNIT)
        self.model.minimize(sum(self._costs) - saved_units * early_ns)
        solver = cp_model.CpSolver()
        solver.parameters.max_time_in_seconds = max(0.01, end_s - time.monotonic())
        solver.parameters.num_workers = _WORKERS
        has_choice = solver.solve(self.model) in (cp_model.OPTIMAL, cp_model.FEASIBLE)
        bound_fj = self._base_fj + math.floor(solver.best_objective_bound) * _FJ_PER_UNIT
        if not has_choice:
            return CpSatResult(None, bound_fj)
        pareto_choice = []
        for is_chosen in self._is_chosen:
            chosen = [k for k, variable in is_chosen.items() if solver.boolean_value(variable)]
            pareto_choice.append(chosen[0])
        return CpSatResult(np.array(pareto_choice, np.int32), bound_fj)


def solve_whole_pipeline(
    rounding: Rounding,
    starts_ns: Sequence[int],
    curves: Sequence[CostCurve],
    allowed: Sequence[Sequence[int]],
    saved_uw: int,
    end_s: float,
) -> CpSatResult:
    """Choose the options of all operations of a small pipeline by a deadline.

    Args:
        rounding: of the deadline, whose choice is tried first.
        starts_ns: when operations start by that choice, (N,), by rank.
        curves: cost curves of the operations, (N,), by rank.
        allowed: Pareto indices of each operation's options, (N,), by rank.
        saved_uw: what ending earlier saves, uW.
        end_s: when to stop, of time.monotonic().

    Returns:
        The best choice found, by rank, and a lower bound on the energy of all plans made of allowed
        options.
    """
    deadline_ns = rounding.deadline_ns
    option_model = OptionModel(curves)
    model = option_model.model
    start = [model.new_int_var(0, deadline_ns, "") for _ in curves]
    early_ns = model.new_int_var(0, deadline_ns, "")
    finish = []
    for i, present in enumerate(rounding.pareto_choice.tolist()):
        finish.append(start[i] + option_model.add_operation(i, allowed[i], present))
        model.add_hint(start[i], starts_ns[i])
        model.add(finish[i] + early_ns <= deadline_ns)
    columns = (column.tolist() for column in rounding.precedences)
    for predecessor, successor, lag_ns in zip(*columns, strict=True):
        model.add(finish[predecessor] + lag_ns <= start[successor])
    pareto_choice, bound_fj = option_model.solve_until(end_s, saved_uw, early_ns)
    return CpSatResult(pareto_choice, bound_fj + saved_uw * deadline_ns)
