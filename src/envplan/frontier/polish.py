"""Spending seconds on a plan: more annealing, then CP-SAT from the plan found.

A small pipeline goes to CP-SAT whole, which also proves a bound of its own. A larger one goes there
window by window: the operations of a stretch of time are free, all others stay.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from ortools.sat.python import cp_model

from envplan.frontier.network import Network
from envplan.frontier.rounding import HEATS, Rounding
from envplan.profile import CostCurve

_ANNEALING_SHARE = 0.5
_WHOLE_OPERATIONS = 128  # up to here CP-SAT gets all operations at once
_WINDOW_OPERATIONS = 48
_WINDOW_SECONDS = 2.0
_WINDOW_OPTIONS = 8  # options of each operation nearest to its relaxed optimum
_WORKERS = 8  # fewer leave out the searches that improve a plan; they share the cores there are
_COST_UNIT_FJ = 10**9  # CP-SAT counts in uJ; costs are rounded down so that its bound stays one


def polish_plan(
    rounding: Rounding,
    network: Network,
    flows: NDArray[np.int64],
    relaxed_fj: int,
    seconds: float,
) -> int | None:
    """Improve `rounding.choice` for about `seconds`.

    Args:
        flows: int64 (arcs,), uW, the relaxed optimum's flow: what a ns more costs each operation.
        relaxed_fj: the relaxed optimum's sum of effective costs, fJ.

    Returns:
        A lower bound on the sum of effective costs, fJ, where CP-SAT proved one; else None.
    """
    begin = time.monotonic()
    _anneal_until(rounding, begin + seconds * _ANNEALING_SHARE)
    problem = _Problem(rounding, network, flows)
    if len(rounding.order) <= _WHOLE_OPERATIONS:
        # A plan costs at least the relaxed optimum plus each option's own excess, so no better
        # plan has an option whose excess alone is more than the whole of this plan's.
        worth_trying = problem.options_within(problem.total() - relaxed_fj)
        return problem.solve(range(len(rounding.order)), begin + seconds, worth_trying)
    _slide_until(problem, begin + seconds)
    return None


def _anneal_until(rounding: Rounding, end: float) -> None:
    seed = len(HEATS)
    while time.monotonic() < end:
        rounding.improve(HEATS[seed % len(HEATS)], seed)
        seed += 1


def _slide_until(problem: _Problem, end: float) -> None:
    likely = problem.likeliest_options(_WINDOW_OPTIONS)
    offset = 0
    while True:
        for begin in range(offset, problem.count, _WINDOW_OPERATIONS):
            if time.monotonic() >= end:
                return
            window = range(begin, min(problem.count, begin + _WINDOW_OPERATIONS))
            problem.solve(window, min(end, time.monotonic() + _WINDOW_SECONDS), likely)
        offset = _WINDOW_OPERATIONS // 2 - offset


@dataclass(frozen=True)
class _Options:
    """Pareto options of one operation.

    time is in ns, ascending; cost in fJ, descending; excess is what an option costs above the best
    when each ns is paid at the relaxed optimum's price, fJ.
    """

    time: list[int]
    cost: list[int]
    excess: list[int]


class _Problem:
    """The rounding problem as CP-SAT sees it; solutions go to `rounding.choice`."""

    def __init__(self, rounding: Rounding, network: Network, flows: NDArray[np.int64]) -> None:
        self.count = len(rounding.order)
        self._choice = rounding.choice
        self._deadline = rounding.deadline_ns
        self._options = [
            _priced(network.cost_curves[table], price)
            for table, price in zip(
                rounding.table.tolist(), flows[rounding.order].tolist(), strict=True
            )
        ]
        self._before: list[list[tuple[int, int]]] = [[] for _ in range(self.count)]
        self._after: list[list[tuple[int, int]]] = [[] for _ in range(self.count)]
        for i, j, lag in rounding.edges:
            self._after[i].append((j, lag))
            self._before[j].append((i, lag))

    def total(self) -> int:
        """Sum of effective costs of the choice, fJ."""
        return sum(o.cost[k] for o, k in zip(self._options, self._choice.tolist(), strict=True))

    def options_within(self, excess: int) -> list[list[int]]:
        """Of each operation the options whose excess is at most this, fJ."""
        return [[k for k, e in enumerate(o.excess) if e <= excess] for o in self._options]

    def likeliest_options(self, count: int) -> list[list[int]]:
        """Of each operation the `count` options of least excess."""
        return [
            sorted(sorted(range(len(o.excess)), key=o.excess.__getitem__)[:count])
            for o in self._options
        ]

    def solve(self, window: range, end: float, allowed: Sequence[Sequence[int]]) -> int | None:
        """Choose anew within a window of operations, all others staying as they are.

        Args:
            end: when to stop, time.monotonic().
            allowed: options to choose from; the present choice is always among them.

        Returns:
            A lower bound on the sum of effective costs of the window's operations, fJ.
        """
        starts, latest = self._earliest_starts(), self._latest_finishes()
        model = cp_model.CpModel()
        start = {i: model.new_int_var(0, self._deadline, "") for i in window}
        length: dict[int, cp_model.LinearExprT] = {}
        picked: dict[int, dict[int, cp_model.IntVar]] = {}
        objective: list[cp_model.LinearExprT] = []
        base = 0
        for i in window:
            option, present = self._options[i], int(self._choice[i])
            picked[i] = {k: model.new_bool_var("") for k in sorted({*allowed[i], present})}
            model.add_exactly_one(picked[i].values())
            least = min(option.cost[k] for k in picked[i])
            base += least
            for k, var in picked[i].items():
                model.add_hint(var, k == present)
                objective.append((option.cost[k] - least) // _COST_UNIT_FJ * var)
            length[i] = sum(option.time[k] * var for k, var in picked[i].items())
            model.add_hint(start[i], starts[i])
        for i in window:
            for q, lag in self._before[i]:
                if q not in start:
                    ready = starts[q] + self._options[q].time[self._choice[q]] + lag
                    model.add(start[i] >= ready)
            by = self._deadline
            for j, lag in self._after[i]:
                if j in start:
                    model.add(start[i] + length[i] + lag <= start[j])
                else:
                    by = min(by, latest[j] - self._options[j].time[self._choice[j]] - lag)
            model.add(start[i] + length[i] <= by)
        model.minimize(sum(objective))
        solver = cp_model.CpSolver()
        solver.parameters.max_time_in_seconds = max(0.01, end - time.monotonic())
        solver.parameters.num_workers = _WORKERS
        if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None
        chosen = {i: next(k for k, v in picked[i].items() if solver.boolean_value(v)) for i in window}
        if sum(self._options[i].cost[k] for i, k in chosen.items()) < sum(
            self._options[i].cost[self._choice[i]] for i in window
        ):
            for i, k in chosen.items():
                self._choice[i] = k
        return base + math.floor(solver.best_objective_bound) * _COST_UNIT_FJ

    def _earliest_starts(self) -> list[int]:
        starts = [0] * self.count
        for i in range(self.count):
            finish = starts[i] + self._options[i].time[self._choice[i]]
            for j, lag in self._after[i]:
                starts[j] = max(starts[j], finish + lag)
        return starts

    def _latest_finishes(self) -> list[int]:
        latest = [self._deadline] * self.count
        for j in reversed(range(self.count)):
            start = latest[j] - self._options[j].time[self._choice[j]]
            for i, lag in self._before[j]:
                latest[i] = min(latest[i], start - lag)
        return latest


def _priced(curve: CostCurve, price: int) -> _Options:
    times, costs = curve.time_ns.tolist(), curve.cost_fj.tolist()
    priced = [cost + price * t for t, cost in zip(times, costs, strict=True)]
    least = min(priced)
    return _Options(times, costs, [p - least for p in priced])
