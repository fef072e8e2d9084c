"""Choosing an option for each of a number of operations by CP-SAT."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence

from ortools.sat.python import cp_model

__all__ = ["Choosing"]

# Fewer workers leave out the searches that improve a plan; they share the cores there are.
_WORKERS = 8
_UNIT_FJ = 10**5  # CP-SAT counts energy in 0.1 nJ


class Choosing:
    """A model in which each operation takes one of its options.

    Attributes:
        model: what CP-SAT solves; whoever makes it adds when operations start.
        base_fj: what all operations cost at least.
    """

    def __init__(self) -> None:
        self.model = cp_model.CpModel()
        self.base_fj = 0
        self._costs: list[cp_model.LinearExprT] = []
        self._picked: list[dict[int, cp_model.IntVar]] = []

    def add(
        self,
        times: Sequence[int],
        costs: Sequence[int],
        allowed: Iterable[int],
        present: int,
    ) -> cp_model.LinearExprT:
        """One more operation.

        Args:
            times, costs: of its options, ns and fJ.
            allowed: options to choose from.
            present: the one to try first, which is always allowed.

        Returns:
            How long it takes, ns.
        """
        picked = {k: self.model.new_bool_var("") for k in sorted({*allowed, present})}
        self.model.add_exactly_one(picked.values())
        least = min(costs[k] for k in picked)
        self.base_fj += least
        self._picked.append(picked)
        for k, var in picked.items():
            # Rounded down, so that the sum is never more than what the operations cost.
            self._costs.append((costs[k] - least) // _UNIT_FJ * var)
            self.model.add_hint(var, k == present)
        return sum(times[k] * var for k, var in picked.items())

    def best_until(
        self, end: float, saved_uw: int = 0, early_ns: cp_model.LinearExprT = 0
    ) -> tuple[list[int] | None, int]:
        """The options of least cost found, in the order of `add`, and a lower bound on it, fJ.

        Args:
            end: when to stop, time.monotonic().
            saved_uw, early_ns: this power is saved for so long.
        """
        # Savings are rounded up: the objective never says more than the energy.
        self.model.minimize(sum(self._costs) - -(-saved_uw // _UNIT_FJ) * early_ns)
        solver = cp_model.CpSolver()
        solver.parameters.max_time_in_seconds = max(0.01, end - time.monotonic())
        solver.parameters.num_workers = _WORKERS
        found = solver.solve(self.model) in (cp_model.OPTIMAL, cp_model.FEASIBLE)
        bound_fj = self.base_fj + math.floor(solver.best_objective_bound) * _UNIT_FJ
        if not found:
            return None, bound_fj
        return [
            next(k for k, var in picked.items() if solver.boolean_value(var))
            for picked in self._picked
        ], bound_fj
