"""The rounds in the middle of a long pipeline, chosen together and repeated.

In a long pipeline every stage does the same for each microbatch, a round later each time. Rounding
loses there what no two neighbouring options make up to exactly one round, and loses it in every
round: with more microbatches the gap grows towards that of a single round. A few rounds in sequence
lose less, for one can use what another left over. They are a small problem however long the
pipeline is: CP-SAT chooses their options so that they can follow themselves for ever. What it finds
takes the place of the middle, joined to both ends by rounds as fast as can be, which annealing
slows down again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from ortools.sat.python import cp_model

from envplan.pipeline import Pipeline
from envplan.solve.choosing import Choosing
from envplan.solve.rounding import Rounding

__all__ = ["JOINT_HEATS", "ROUND_OPTIONS", "SteadyRounds"]

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
JOINT_HEATS: Final = (0.05, 0.1, 0.05, 0.2, 0.1, 0.05)


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
        choice: NDArray[np.int32],
        times: Sequence[Sequence[int]],
        costs: Sequence[Sequence[int]],
        likely: Sequence[Sequence[int]],
        end: float,
    ) -> NDArray[np.int32] | None:
        """Options of the kinds in some rounds that can follow themselves, (K, length).

        Args:
            choice: to begin with, (N,).
            times, costs: of each operation's options, ns and fJ.
            likely: options to choose from, of each operation.
            end: when to stop, time.monotonic().
        """
        choosing = Choosing()
        length = next(one for one in _LENGTHS if _TIMES * one <= self.number.shape[1])
        reach, whole = len(self.number) * self.round_ns, length * self.round_ns
        start: list[list[cp_model.IntVar]] = []
        finish: list[list[cp_model.LinearExprT]] = []
        for kind, row in enumerate(self.number.tolist()):
            starts, finishes = [], []
            for j, i in enumerate(row[len(row) // 2 :][:length]):
                about = int(self.begin_ns[kind]) + j * self.round_ns
                begin = choosing.model.new_int_var(about - reach, about + reach, "")
                takes = choosing.add(times[i], costs[i], likely[i], int(choice[i]))
                starts.append(begin)
                finishes.append(begin + takes)
            start.append(starts)
            finish.append(finishes)
        for kind, other, later, lag in self.waits:
            for j in range(length):
                turns, at = divmod(j + later, length)
                choosing.model.add(start[other][at] + turns * whole >= finish[kind][j] + lag)
        chosen, _ = choosing.best_until(end)
        return None if chosen is None else np.array(chosen, np.int32).reshape(-1, length)

    def put(
        self, choice: NDArray[np.int32], pattern: NDArray[np.int32]
    ) -> Iterator[NDArray[np.int32]]:
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
