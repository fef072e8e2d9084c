"""Spending seconds on a plan: more annealing, then CP-SAT from the plan found.

A small pipeline goes to CP-SAT whole, which also proves a bound of its own. A larger one goes there
window by window: the operations of a stretch of time are free, all others stay. Before, if it is
long, the rounds in its middle are chosen once and repeated (rounds.py).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from ortools.sat.python import cp_model

from envplan.frontier import Network
from envplan.pipeline import Pipeline
from envplan.profile import CostCurve
from envplan.solve.rounding import HEATS, Rounding
from envplan.solve.rounds import JOINT_HEATS, ROUND_OPTIONS, SteadyRounds

_ROUNDS_SHARE = 0.6
_ANNEALING_SHARE = 0.5  # of what is left
_WHOLE_OPERATIONS = 128  # up to here CP-SAT gets all operations at once
_WINDOW_OPERATIONS = 48
_WINDOW_SECONDS = 2.0
_WINDOW_OPTIONS = 8  # options of each operation nearest to its relaxed optimum
# Fewer workers leave out the searches that improve a plan; they share the cores there are.
_WORKERS = 8
_UNIT_FJ = 10**5  # CP-SAT counts energy in 0.1 nJ


def polish_plan(
    pipeline: Pipeline,
    rounding: Rounding,
    network: Network,
    flows: NDArray[np.int64],
    power_uw: int,
    bound_fj: int,
    seconds: float,
) -> int:
    """Improve `rounding.choice` for about `seconds`.

    Args:
        flows: int64 (arcs,), uW, the relaxed optimum's flow: what a ns more costs each operation.
        power_uw: what all waiting GPUs draw together.
        bound_fj: the relaxed optimum's energy at the deadline, fJ.

    Returns:
        The best lower bound known on energy, fJ: bound_fj, or more where CP-SAT proved it.
    """
    end = time.monotonic() + seconds
    problem = _Problem(rounding, network, flows, power_uw)
    steady = SteadyRounds.of(pipeline, rounding)
    if steady is not None and len(rounding.order) > _WHOLE_OPERATIONS:
        problem.repeat_rounds(steady, end - seconds * (1 - _ROUNDS_SHARE))
    _anneal_until(rounding, end - (end - time.monotonic()) * (1 - _ANNEALING_SHARE))
    if len(rounding.order) <= _WHOLE_OPERATIONS:
        # A plan costs at least the relaxed optimum plus each option's own excess, so no better
        # plan has an option whose excess alone is more than the whole of this plan's.
        worth_trying = problem.options_within(problem.energy() - bound_fj)
        return max(bound_fj, problem.solve_whole(end, worth_trying))
    _slide_until(problem, end)
    return bound_fj


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
            problem.solve_window(window, min(end, time.monotonic() + _WINDOW_SECONDS), likely)
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
    """The rounding problem as CP-SAT sees it; what it finds goes to `rounding.choice`."""

    def __init__(
        self, rounding: Rounding, network: Network, flows: NDArray[np.int64], power_uw: int
    ) -> None:
        self.count = len(rounding.order)
        self._rounding = rounding
        self._choice = rounding.choice
        self._deadline = rounding.deadline_ns
        self._power = power_uw
        self._options = [
            _priced(network.cost_curves[table], price)
            for table, price in zip(
                rounding.table.tolist(), flows[rounding.order].tolist(), strict=True
            )
        ]
        self._before: list[list[tuple[int, int]]] = [[] for _ in range(self.count)]
        self._after: list[list[tuple[int, int]]] = [[] for _ in range(self.count)]
        for i, j, lag in rounding.edges.tolist():
            self._after[i].append((j, lag))
            self._before[j].append((i, lag))

    def energy(self) -> int:
        """Energy of the choice, whose iteration is over when its last operation is, fJ."""
        makespan = max(self._finishes(self._choice))
        return self._cost(range(self.count), self._choice.tolist()) + self._power * makespan

    def options_within(self, excess: int) -> list[list[int]]:
        """Of each operation the options whose excess is at most this, fJ."""
        return [[k for k, e in enumerate(o.excess) if e <= excess] for o in self._options]

    def likeliest_options(self, count: int) -> list[list[int]]:
        """Of each operation the `count` options of least excess."""
        return [
            sorted(sorted(range(len(o.excess)), key=o.excess.__getitem__)[:count])
            for o in self._options
        ]

    def repeat_rounds(self, steady: SteadyRounds, end: float) -> None:
        """Repeat rounds in the middle, if a plan with them is cheaper.

        Args:
            end: when to stop, time.monotonic().
        """
        likely = self.likeliest_options(ROUND_OPTIONS)
        times, costs = [o.time for o in self._options], [o.cost for o in self._options]
        everything = range(self.count)
        best = self._choice.copy()
        for pattern in steady.repeat(times, costs, likely, _UNIT_FJ, end):
            least = math.inf
            start = best.copy()
            for choice in steady.put(start, pattern):
                cost = self._cost(everything, choice.tolist())
                if cost < least and max(self._finishes(choice)) <= self._deadline:
                    least, self._choice[:] = cost, choice
            for seed, heat in enumerate(JOINT_HEATS):
                self._rounding.improve(heat, seed)
            if self._cost(everything, self._choice.tolist()) < self._cost(
                everything, best.tolist()
            ):
                best = self._choice.copy()
        self._choice[:] = best

    def solve_window(self, window: range, end: float, allowed: Sequence[Sequence[int]]) -> None:
        """Choose anew within a window of operations, all others staying as they are.

        Args:
            end: when to stop, time.monotonic().
            allowed: options to choose from; the present choice is always among them.
        """
        model = _Model(self._options, self._choice, window, allowed, self._deadline)
        cp = model.model
        starts, latest = self._earliest_starts(), self._latest_finishes()
        for i in window:
            cp.add_hint(model.start[i], starts[i])
            for q, lag in self._before[i]:
                if q not in model.start:
                    cp.add(model.start[i] >= starts[q] + self._time(q) + lag)
            by = self._deadline
            for j, lag in self._after[i]:
                if j in model.start:
                    cp.add(model.finish[i] + lag <= model.start[j])
                else:
                    by = min(by, latest[j] - self._time(j) - lag)
            cp.add(model.finish[i] <= by)
        chosen, _ = model.solve(sum(model.costs), end)
        if chosen is None:
            return
        present = self._choice[window.start : window.stop]
        if self._cost(window, chosen) < self._cost(window, present.tolist()):
            present[:] = chosen

    def solve_whole(self, end: float, allowed: Sequence[Sequence[int]]) -> int:
        """Choose all operations anew.

        Returns:
            A lower bound on the energy of all plans made of allowed options, fJ.
        """
        everything = range(self.count)
        model = _Model(self._options, self._choice, everything, allowed, self._deadline)
        cp = model.model
        early = cp.new_int_var(0, self._deadline, "")
        for i, start in enumerate(self._earliest_starts()):
            cp.add_hint(model.start[i], start)
            cp.add(model.finish[i] + early <= self._deadline)
            for j, lag in self._after[i]:
                cp.add(model.finish[i] + lag <= model.start[j])
        # Rounded so that the objective never says more than the energy: costs down, savings up.
        saved_power = -(-self._power // _UNIT_FJ)
        before = self.energy(), self._choice.copy()
        chosen, bound = model.solve(sum(model.costs) - saved_power * early, end)
        if chosen is not None:
            self._choice[:] = chosen
            if self.energy() > before[0]:
                self._choice[:] = before[1]
        return model.base + bound * _UNIT_FJ + self._power * self._deadline

    def _time(self, i: int) -> int:
        return self._options[i].time[int(self._choice[i])]

    def _cost(self, operations: Iterable[int], choice: Iterable[int]) -> int:
        return sum(self._options[i].cost[k] for i, k in zip(operations, choice, strict=True))

    def _finishes(self, choice: NDArray[np.int32]) -> list[int]:
        times = [o.time[k] for o, k in zip(self._options, choice.tolist(), strict=True)]
        return [a + b for a, b in zip(self._earliest_starts(times), times, strict=True)]

    def _earliest_starts(self, times: Sequence[int] | None = None) -> list[int]:
        starts = [0] * self.count
        for i in range(self.count):
            finish = starts[i] + (times[i] if times else self._time(i))
            for j, lag in self._after[i]:
                starts[j] = max(starts[j], finish + lag)
        return starts

    def _latest_finishes(self) -> list[int]:
        latest = [self._deadline] * self.count
        for j in reversed(range(self.count)):
            start = latest[j] - self._time(j)
            for i, lag in self._before[j]:
                latest[i] = min(latest[i], start - lag)
        return latest


class _Model:
    """Variables of a set of operations: which option each takes, when it starts and finishes.

    Attributes:
        model: what CP-SAT solves.
        start, finish: by operation, ns.
        costs: terms whose sum is never more than the operations' cost above `base`, _UNIT_FJ.
        base: fJ.
    """

    def __init__(
        self,
        options: Sequence[_Options],
        choice: NDArray[np.int32],
        operations: range,
        allowed: Sequence[Sequence[int]],
        deadline: int,
    ) -> None:
        self.model = cp_model.CpModel()
        self._picked: list[dict[int, cp_model.IntVar]] = []
        self.start = {i: self.model.new_int_var(0, deadline, "") for i in operations}
        self.finish: dict[int, cp_model.LinearExprT] = {}
        self.costs: list[cp_model.LinearExprT] = []
        self.base = 0
        for i in operations:
            present = int(choice[i])
            picked = {k: self.model.new_bool_var("") for k in sorted({*allowed[i], present})}
            self.model.add_exactly_one(picked.values())
            least = min(options[i].cost[k] for k in picked)
            self.base += least
            for k, var in picked.items():
                self.model.add_hint(var, k == present)
                self.costs.append((options[i].cost[k] - least) // _UNIT_FJ * var)
            length = sum(options[i].time[k] * var for k, var in picked.items())
            self.finish[i] = self.start[i] + length
            self._picked.append(picked)

    def solve(self, objective: cp_model.LinearExprT, end: float) -> tuple[list[int] | None, int]:
        """The best options found until `end`, and a lower bound on the objective."""
        self.model.minimize(objective)
        solver = cp_model.CpSolver()
        solver.parameters.max_time_in_seconds = max(0.01, end - time.monotonic())
        solver.parameters.num_workers = _WORKERS
        found = solver.solve(self.model) in (cp_model.OPTIMAL, cp_model.FEASIBLE)
        chosen = (
            [
                next(k for k, var in picked.items() if solver.boolean_value(var))
                for picked in self._picked
            ]
            if found
            else None
        )
        return chosen, math.floor(solver.best_objective_bound)


def _priced(curve: CostCurve, price: int) -> _Options:
    times, costs = curve.time_ns.tolist(), curve.cost_fj.tolist()
    priced = [cost + price * t for t, cost in zip(times, costs, strict=True)]
    least = min(priced)
    return _Options(times, costs, [p - least for p in priced])
