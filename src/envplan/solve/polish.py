"""Spending seconds on a plan: more annealing, and CP-SAT from the plan found.

A small pipeline goes to CP-SAT whole, which also proves a bound of its own. (Going through a long
one window by window gained nothing over annealing for as long.)

Of a long pipeline CP-SAT chooses the rounds in the middle. There every stage does the same for each
microbatch, a round later each time. Rounding loses there what no two neighbouring options make up
to exactly one round, and loses it in every round: with more microbatches the gap grows towards that
of a single round. A few rounds in sequence lose less, for one can use what another left over. They
are a small problem however long the pipeline is: CP-SAT chooses their options so that they can
follow themselves for ever. What it finds takes the place of the middle, joined to both ends by
rounds as fast as can be, which annealing slows down again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from ortools.sat.python import cp_model

from envplan.frontier import Relaxation
from envplan.pipeline import Pipeline
from envplan.profile import CostCurve
from envplan.replay import Replay
from envplan.solve.rounding import HEATS, Rounding

__all__ = ["ROUND_OPTIONS", "SteadyRounds", "polished"]

_ROUNDS_SHARE: Final = 0.6
_ANNEALING_SHARE: Final = 0.5  # where CP-SAT has the rest
_WHOLE_OPERATIONS: Final = 128  # up to here CP-SAT gets all operations at once
# Fewer workers leave out the searches that improve a plan; they share the cores there are.
_WORKERS: Final = 8
_UNIT_FJ: Final = 10**5  # CP-SAT counts energy in 0.1 nJ
#: Rounds that repeat are this much alike in the relaxed optimum, as a part of a round.
_ALIKE: Final = 1e-4
#: So many are chosen together, if they can be repeated so often.
_LENGTHS: Final = (8, 4)
_TIMES: Final = 3
#: Options of each operation that are nearest to its relaxed optimum: more take CP-SAT too long.
ROUND_OPTIONS: Final = 4
#: Rounds as fast as can be before and after those that repeat.
_JOINTS: Final = ((0, 0), (1, 0), (0, 1), (1, 1), (2, 2), (4, 4))
#: Of the annealing that slows them down again.
_JOINT_HEATS: Final = (0.05, 0.1, 0.05, 0.2, 0.1, 0.05)

Choice = NDArray[np.int32]


def polished(
    frontier: Relaxation, best: Replay, rounding: Rounding, waits: bool, seconds: float
) -> tuple[Replay, int | None]:
    """What about so many seconds make of a choice, and a lower bound on energy, fJ, where CP-SAT
    proved more than the relaxation does.

    Args:
        best: what was found so far.
        rounding: of the deadline's relaxed optimum.
        waits: everybody waits until the deadline, so what is used above waiting counts.
    """
    begin = time.monotonic()
    curves = [frontier.network.cost_curves[k] for k in rounding.table.tolist()]
    # What an option costs above the best when each ns is paid at the relaxed optimum's price, fJ:
    # its flow, which is what a ns more costs the operation.
    _, flows = frontier.state_at(rounding.deadline_ns)
    prices = flows[rounding.order].tolist()
    excess = [c.cost_fj + price * c.time_ns for c, price in zip(curves, prices, strict=True)]
    excess = [one - one.min() for one in excess]

    def value(replay: Replay) -> int:
        return replay.effective_fj if waits else replay.energy_fj

    if len(curves) > _WHOLE_OPERATIONS:
        steady = SteadyRounds.of(frontier.pipeline, rounding)
        if steady is not None:
            likely = [np.argsort(one, kind="stable")[:ROUND_OPTIONS].tolist() for one in excess]
            end = begin + seconds * _ROUNDS_SHARE
            pattern = steady.best_until(rounding.choice, curves, likely, end)
            _repeat(frontier, rounding, steady, pattern)
        _anneal_until(rounding, begin + seconds)
        return min(best, frontier.problem.replay(rounding.rows), key=value), None
    _anneal_until(rounding, begin + seconds * _ANNEALING_SHARE)
    found = frontier.problem.replay(rounding.rows)
    bound = frontier.effective_bound_fj if waits else frontier.lower_bound_fj
    bound_fj, power_uw = bound(rounding.deadline_ns), 0 if waits else frontier.total_power_uw
    # A plan costs at least the relaxed optimum plus each option's own excess, so no better plan has
    # an option whose excess alone is more than the whole of this plan's.
    worst = value(found) - bound_fj
    allowed = [np.flatnonzero(one <= worst).tolist() for one in excess]
    chosen, proved_fj = _chosen_whole(rounding, found, curves, allowed, power_uw, begin + seconds)
    if chosen is not None:
        found = min(found, frontier.problem.replay(rounding.rows_of(chosen)), key=value)
    return min(best, found, key=value), proved_fj if proved_fj > bound_fj and not waits else None


def _anneal_until(rounding: Rounding, end: float) -> None:
    seed = len(HEATS)
    while time.monotonic() < end:
        rounding.improve(HEATS[seed % len(HEATS)], seed)
        seed += 1


def _repeat(
    frontier: Relaxation, rounding: Rounding, steady: SteadyRounds, pattern: Choice | None
) -> None:
    """Put a pattern of rounds into a rounding's choice, if that is cheaper."""
    if pattern is None:
        return
    before, least = rounding.choice.copy(), math.inf

    def replayed(choice: Choice) -> Replay:
        return frontier.problem.replay(rounding.rows_of(choice))

    for choice in steady.put(before, pattern):
        replay = replayed(choice)
        if replay.effective_fj < least and replay.makespan_ns <= rounding.deadline_ns:
            least, rounding.choice[:] = replay.effective_fj, choice
    for seed, heat in enumerate(_JOINT_HEATS):
        rounding.improve(heat, seed)
    if replayed(rounding.choice).effective_fj >= replayed(before).effective_fj:
        rounding.choice[:] = before


def _chosen_whole(
    rounding: Rounding,
    found: Replay,
    curves: Sequence[CostCurve],
    allowed: Sequence[Sequence[int]],
    power_uw: int,
    end: float,
) -> tuple[Choice | None, int]:
    """The best choice of all operations that CP-SAT finds, and a lower bound on the energy of all
    plans made of allowed options, fJ.

    Args:
        found: the replay of the rounding's choice.
        power_uw: what ending earlier saves.
        end: when to stop, time.monotonic().
    """
    choosing, deadline_ns = _Choosing(curves), rounding.deadline_ns
    model, starts = choosing.model, found.starts_ns[rounding.order].tolist()
    begin = [model.new_int_var(0, deadline_ns, "") for _ in curves]
    early = model.new_int_var(0, deadline_ns, "")
    finish = []
    for i, present in enumerate(rounding.choice.tolist()):
        finish.append(begin[i] + choosing.add(i, allowed[i], present))
        model.add_hint(begin[i], starts[i])
        model.add(finish[i] + early <= deadline_ns)
    for before, after, lag in rounding.edges.tolist():
        model.add(finish[before] + lag <= begin[after])
    chosen, bound_fj = choosing.best_until(end, power_uw, early)
    return chosen, bound_fj + power_uw * deadline_ns


class _Choosing:
    """A CP-SAT model in which each operation takes one of its options.

    Attributes:
        model: what CP-SAT solves; whoever makes it adds when operations start.
    """

    def __init__(self, curves: Sequence[CostCurve]) -> None:
        self.model = cp_model.CpModel()
        self._curves = curves
        self._base_fj = 0
        self._costs: list[cp_model.LinearExprT] = []
        self._picked: list[dict[int, cp_model.IntVar]] = []

    def add(self, i: int, allowed: Iterable[int], present: int) -> cp_model.LinearExprT:
        """How long a curve's operation takes, ns, in one of the allowed options; the present one,
        which is always allowed, is tried first."""
        times, costs = self._curves[i].time_ns.tolist(), self._curves[i].cost_fj.tolist()
        picked = {k: self.model.new_bool_var("") for k in sorted({*allowed, present})}
        self.model.add_exactly_one(picked.values())
        least = min(costs[k] for k in picked)
        self._base_fj += least
        self._picked.append(picked)
        for k, var in picked.items():
            # Rounded down, so that the sum is never more than what the operations cost.
            self._costs.append((costs[k] - least) // _UNIT_FJ * var)
            self.model.add_hint(var, k == present)
        return sum(times[k] * var for k, var in picked.items())

    def best_until(
        self, end: float, saved_uw: int = 0, early_ns: cp_model.LinearExprT = 0
    ) -> tuple[Choice | None, int]:
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
        bound_fj = self._base_fj + math.floor(solver.best_objective_bound) * _UNIT_FJ
        if not found:
            return None, bound_fj
        chosen = [
            next(k for k, var in picked.items() if solver.boolean_value(var))
            for picked in self._picked
        ]
        return np.array(chosen, np.int32), bound_fj


@dataclass(frozen=True)
class SteadyRounds:
    """Rounds of a relaxed optimum that repeat: K kinds of operation, each once a round.

    Attributes:
        number: of the operation of each kind and round, in the rounding's order, (K, rounds).
        round_ns: how long a round is.
        begin_ns: relaxed start of each kind in the first round, after the earliest of them, (K).
        waits: (kind, kind that waits for it, rounds later, lag in ns), each once.
    """

    number: NDArray[np.int64]
    round_ns: int
    begin_ns: NDArray[np.int64]
    waits: tuple[tuple[int, int, int, int], ...]

    @classmethod
    def of(cls, pipeline: Pipeline, rounding: Rounding) -> SteadyRounds | None:
        """Those of a rounding's deadline, if there are enough of them."""
        position = np.empty(len(rounding.order), np.int64)
        position[rounding.order] = np.arange(len(rounding.order))
        kinds: dict[tuple[int, str, int], dict[int, int]] = {}
        for at, op in zip(position.tolist(), pipeline.operations, strict=True):
            kinds.setdefault((op.stage, op.instruction, op.chunk), {})[op.microbatch] = at
        tables = [
            [of[k] for k in sorted(of)] for of in kinds.values() if len(of) > pipeline.num_stages
        ]
        if not tables:
            return None
        finish = [rounding.finish_ns[table] for table in tables]
        round_ns = int(np.median(np.concatenate([np.diff(one) for one in finish])))
        middle = rounding.deadline_ns // 2
        before, after = rounding.deadline_ns, rounding.deadline_ns
        first = []
        for one in finish:
            base = int(np.searchsorted(one, middle))
            unlike = np.flatnonzero(np.abs(np.diff(one) - round_ns) > _ALIKE * round_ns)
            earlier, later = unlike[unlike < base], unlike[unlike >= base]
            before = min(before, base - (int(earlier[-1]) + 1 if len(earlier) else 0))
            after = min(after, (int(later[0]) if len(later) else len(one) - 1) - base)
            first.append(base)
        if before + after < _TIMES * _LENGTHS[-1] or round_ns <= 0:
            return None
        number = np.array(
            [t[base - before : base + after] for t, base in zip(tables, first, strict=True)]
        )
        ends = rounding.finish_ns[number]
        begin = ends[:, 0] - rounding.relaxed_ns[number[:, 0]]
        # Rounded down, so that what fits the rounds fits the pipeline.
        round_ns = int(((ends[:, -1] - ends[:, 0]) // (number.shape[1] - 1)).min())
        return cls(number, round_ns, begin - begin.min(), _waits(number, rounding.edges))

    def best_until(
        self,
        choice: Choice,
        curves: Sequence[CostCurve],
        likely: Sequence[Sequence[int]],
        end: float,
    ) -> Choice | None:
        """Options of the kinds in some rounds that can follow themselves, (K, length).

        Args:
            choice: to begin with, (N,).
            curves, likely: of each operation its options, and those to choose from, (N,).
            end: when to stop, time.monotonic().
        """
        choosing = _Choosing(curves)
        length = next(one for one in _LENGTHS if _TIMES * one <= self.number.shape[1])
        reach, whole = len(self.number) * self.round_ns, length * self.round_ns
        start: dict[tuple[int, int], cp_model.IntVar] = {}
        finish: dict[tuple[int, int], cp_model.LinearExprT] = {}
        for kind, row in enumerate(self.number.tolist()):
            for j, i in enumerate(row[len(row) // 2 :][:length]):
                about = int(self.begin_ns[kind]) + j * self.round_ns
                begin = choosing.model.new_int_var(about - reach, about + reach, "")
                start[kind, j] = begin
                finish[kind, j] = begin + choosing.add(i, likely[i], int(choice[i]))
        for kind, other, later, lag in self.waits:
            for j in range(length):
                turns, at = divmod(j + later, length)
                choosing.model.add(start[other, at] + turns * whole >= finish[kind, j] + lag)
        chosen, _ = choosing.best_until(end)
        return None if chosen is None else chosen.reshape(-1, length)

    def put(self, choice: Choice, pattern: Choice) -> Iterator[Choice]:
        """Choices with a pattern in these rounds, from each of its rounds on.

        Args:
            choice: elsewhere, (N,).
        """
        rounds, length = self.number.shape[1], pattern.shape[1]
        for before, after in _JOINTS:
            for phase in range(length):
                chosen = pattern[:, (np.arange(rounds) + phase) % length]
                chosen[:, :before] = 0
                chosen[:, rounds - after :] = 0
                repeated = choice.copy()
                repeated[self.number] = chosen
                yield repeated


def _waits(
    number: NDArray[np.int64], edges: NDArray[np.int64]
) -> tuple[tuple[int, int, int, int], ...]:
    kind_of = {
        at: (kind, k) for kind, row in enumerate(number.tolist()) for k, at in enumerate(row)
    }
    found = set()
    for before, after, lag in edges.tolist():
        if before in kind_of and after in kind_of:
            (kind, k), (other, later) = kind_of[before], kind_of[after]
            found.add((kind, other, later - k, lag))
    return tuple(sorted(found))
