"""Spending seconds on a plan: more annealing, then CP-SAT from the plan found.

A small pipeline goes to CP-SAT whole, which also proves a bound of its own. Of a long one, CP-SAT
chooses the rounds in the middle, which are then repeated (rounds.py). (Going through a pipeline
window by window gained nothing over annealing for as long.)
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from envplan.frontier import Network
from envplan.pipeline import Pipeline
from envplan.profile import CostCurve
from envplan.solve.choosing import Choosing
from envplan.solve.rounding import HEATS, Rounding
from envplan.solve.rounds import JOINT_HEATS, ROUND_OPTIONS, SteadyRounds

_ROUNDS_SHARE = 0.6
_ANNEALING_SHARE = 0.5  # where CP-SAT has the rest
_WHOLE_OPERATIONS = 128  # up to here CP-SAT gets all operations at once


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
    begin = time.monotonic()
    problem = _Problem(rounding, network, flows, power_uw)
    if len(rounding.order) > _WHOLE_OPERATIONS:
        steady = SteadyRounds.of(pipeline, rounding)
        if steady is not None:
            problem.repeat_rounds(steady, begin + seconds * _ROUNDS_SHARE)
        _anneal_until(rounding, begin + seconds)
        return bound_fj
    _anneal_until(rounding, begin + seconds * _ANNEALING_SHARE)
    # A plan costs at least the relaxed optimum plus each option's own excess, so no better plan has
    # an option whose excess alone is more than the whole of this plan's.
    worth_trying = problem.options_within(problem.energy() - bound_fj)
    return max(bound_fj, problem.solve_whole(begin + seconds, worth_trying))


def _anneal_until(rounding: Rounding, end: float) -> None:
    seed = len(HEATS)
    while time.monotonic() < end:
        rounding.improve(HEATS[seed % len(HEATS)], seed)
        seed += 1


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
        self._after: list[list[tuple[int, int]]] = [[] for _ in rounding.order]
        for i, j, lag in rounding.edges.tolist():
            self._after[i].append((j, lag))

    def energy(self) -> int:
        """Energy of the choice, whose iteration is over when its last operation is, fJ."""
        return self._cost(self._choice) + self._power * self._makespan(self._choice)

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
        best, least = self._choice.copy(), math.inf
        pattern = steady.best_until(best, times, costs, likely, end)
        if pattern is None:
            return
        for choice in steady.put(best, pattern):
            cost = self._cost(choice)
            if cost < least and self._makespan(choice) <= self._deadline:
                least, self._choice[:] = cost, choice
        for seed, heat in enumerate(JOINT_HEATS):
            self._rounding.improve(heat, seed)
        if self._cost(self._choice) >= self._cost(best):
            self._choice[:] = best

    def solve_whole(self, end: float, allowed: Sequence[Sequence[int]]) -> int:
        """Choose all operations anew.

        Returns:
            A lower bound on the energy of all plans made of allowed options, fJ.
        """
        choosing = Choosing()
        model, starts = choosing.model, self._starts(self._choice)
        begin = [model.new_int_var(0, self._deadline, "") for _ in self._options]
        early = model.new_int_var(0, self._deadline, "")
        for i, (own, present) in enumerate(zip(self._options, self._choice.tolist(), strict=True)):
            finish = begin[i] + choosing.add(own.time, own.cost, allowed[i], present)
            model.add_hint(begin[i], starts[i])
            model.add(finish + early <= self._deadline)
            for j, lag in self._after[i]:
                model.add(finish + lag <= begin[j])
        before = self.energy(), self._choice.copy()
        chosen, bound_fj = choosing.best_until(end, self._power, early)
        if chosen is not None:
            self._choice[:] = chosen
            if self.energy() > before[0]:
                self._choice[:] = before[1]
        return bound_fj + self._power * self._deadline

    def _cost(self, choice: NDArray[np.int32]) -> int:
        return sum(own.cost[k] for own, k in zip(self._options, choice.tolist(), strict=True))

    def _starts(self, choice: NDArray[np.int32]) -> list[int]:
        """Earliest start of each operation and, last, the end of the iteration, ns."""
        starts = [0] * (len(choice) + 1)
        for i, k in enumerate(choice.tolist()):
            finish = starts[i] + self._options[i].time[k]
            starts[-1] = max(starts[-1], finish)
            for j, lag in self._after[i]:
                starts[j] = max(starts[j], finish + lag)
        return starts

    def _makespan(self, choice: NDArray[np.int32]) -> int:
        return self._starts(choice)[-1]


def _priced(curve: CostCurve, price: int) -> _Options:
    times, costs = curve.time_ns.tolist(), curve.cost_fj.tolist()
    priced = [cost + price * t for t, cost in zip(times, costs, strict=True)]
    least = min(priced)
    return _Options(times, costs, [p - least for p in priced])
