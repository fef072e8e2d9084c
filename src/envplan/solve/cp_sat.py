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
#: Units of energy in 0.1 nJ.
_SCALE: Final = 10**4


class CpSatResult(NamedTuple):
    """The answer of CP-SAT.

    Attributes:
        pareto_choice: a Pareto index for each operation, in the order in which they were added;
            None where none was found in time.
        bound_10fj: a lower bound on the cost of every choice of allowed options, 10 fJ.
    """

    pareto_choice: Choice | None
    bound_10fj: int


class OptionModel:
    """A CP-SAT model in which each operation takes one of its options.

    Attributes:
        model: to which whoever makes it adds when operations start.
    """

    def __init__(self, curves: Sequence[CostCurve]) -> None:
        self.model = cp_model.CpModel()
        self._curves = curves
        # The cost of all operations is _base_10fj and the sum of _extra_units, rounded down.
        self._base_10fj = 0
        self._extra_units: list[cp_model.LinearExprT] = []
        #: For each operation, whether each of its options is chosen, by Pareto index.
        self._is_chosen: list[dict[int, cp_model.IntVar]] = []

    def add_operation(
        self, curve_index: int, allowed: Iterable[int], present: int
    ) -> cp_model.LinearExprT:
        """Add an operation.

        Args:
            curve_index: of its cost curve, among those that the model was made with.
            allowed: Pareto indices of its options.
            present: the option to try first, which is always allowed.

        Returns:
            How long the operation takes, ns.
        """
        curve = self._curves[curve_index]
        durations_ns, costs_10fj = curve.time_ns.tolist(), curve.cost_10fj.tolist()
        options = sorted({*allowed, present})
        is_chosen = {option: self.model.new_bool_var("") for option in options}
        self.model.add_exactly_one(is_chosen.values())
        self._is_chosen.append(is_chosen)
        cheapest_10fj = min(costs_10fj[option] for option in options)
        self._base_10fj += cheapest_10fj
        for option, variable in is_chosen.items():
            # Rounded down, so that the sum is never more than what the operations cost.
            extra_units = (costs_10fj[option] - cheapest_10fj) // _SCALE
            self._extra_units.append(extra_units * variable)
            self.model.add_hint(variable, option == present)
        return sum(durations_ns[option] * variable for option, variable in is_chosen.items())

    def solve_until(
        self, end_s: float, saved_10uw: int = 0, early_ns: cp_model.LinearExprT = 0
    ) -> CpSatResult:
        """Minimize the cost of all operations, less what ending early saves.

        Args:
            end_s: when to stop, of time.monotonic().
            saved_10uw: power that is saved while the iteration is over early.
            early_ns: how long that is.
        """
        # Rounded up, so that the objective is never more than the energy.
        saved_units = -(-saved_10uw // _SCALE)
        self.model.minimize(sum(self._extra_units) - saved_units * early_ns)
        solver = cp_model.CpSolver()
        solver.parameters.max_time_in_seconds = max(0.01, end_s - time.monotonic())
        solver.parameters.num_workers = _WORKERS
        status = solver.solve(self.model)
        bound_units = math.floor(solver.best_objective_bound)
        bound_10fj = self._base_10fj + bound_units * _SCALE
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return CpSatResult(None, bound_10fj)
        return CpSatResult(self._chosen_options(solver), bound_10fj)

    def _chosen_options(self, solver: cp_model.CpSolver) -> Choice:
        """The Pareto index of each operation's option in a solver's solution."""
        pareto_choice = []
        for is_chosen in self._is_chosen:
            for option, variable in is_chosen.items():
                if solver.boolean_value(variable):
                    pareto_choice.append(option)
        return np.array(pareto_choice, np.int32)


def solve_whole_pipeline(
    rounding: Rounding,
    starts_ns: Sequence[int],
    curves: Sequence[CostCurve],
    allowed: Sequence[Sequence[int]],
    saved_10uw: int,
    end_s: float,
) -> CpSatResult:
    """Choose the options of all operations of a small pipeline by a deadline.

    Args:
        rounding: of the deadline, whose choice is tried first.
        starts_ns: when operations start by that choice, (N,), by rank.
        curves: cost curves of the operations, (N,), by rank.
        allowed: Pareto indices of each operation's options, (N,), by rank.
        saved_10uw: what ending earlier saves, 10 uW.
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
        duration_ns = option_model.add_operation(i, allowed[i], present)
        finish.append(start[i] + duration_ns)
        model.add_hint(start[i], starts_ns[i])
        model.add(finish[i] + early_ns <= deadline_ns)
    for precedence in rounding.precedences.as_list():
        earliest_start = finish[precedence.predecessor] + precedence.lag_ns
        model.add(earliest_start <= start[precedence.successor])
    result = option_model.solve_until(end_s, saved_10uw, early_ns)
    return CpSatResult(result.pareto_choice, result.bound_10fj + saved_10uw * deadline_ns)
