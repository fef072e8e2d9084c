"""The rounds in the middle of a long pipeline, which repeat, chosen together by CP-SAT.

There every stage does the same for each microbatch, a round later each time. Rounding loses there
what no two neighbouring options make up to exactly one round, and loses it in every round: with
more microbatches the gap grows towards that of a single round. A few rounds in sequence lose less,
for one can use what another left over. They are a small problem however long the pipeline is:
CP-SAT chooses their options so that they can follow themselves for ever, as in cyclic scheduling.
What it finds takes the place of the middle, joined to both ends by rounds as fast as can be.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from ortools.sat.python import cp_model

from envplan.pipeline import Pipeline
from envplan.profile import CostCurve
from envplan.solve.cp_sat import OptionModel
from envplan.solve.rounding import Choice, Precedences, Rounding

#: Rounds that repeat are this much alike in the relaxed optimum, as a part of a round.
_TOLERANCE: Final = 1e-4
#: So many rounds are chosen together, if they can be repeated often enough.
_PATTERN_LENGTHS: Final = (8, 4)
_MIN_REPETITIONS: Final = 3
#: Options of each operation that are nearest to its relaxed optimum: more take CP-SAT too long.
ROUND_OPTIONS: Final = 4


class _Joint(NamedTuple):
    """So many rounds as fast as can be, at either end of those that repeat."""

    rounds_before: int
    rounds_after: int


_JOINTS: Final = tuple(
    _Joint(*rounds) for rounds in ((0, 0), (1, 0), (0, 1), (1, 1), (2, 2), (4, 4))
)


class CyclicPrecedence(NamedTuple):
    """A kind of operation that waits for another, some rounds later.

    Attributes:
        predecessor, successor: kinds.
        rounds_later: the successor's round, counted from the predecessor's.
        lag_ns: from the end of the predecessor to the earliest start of the successor.
    """

    predecessor: int
    successor: int
    rounds_later: int
    lag_ns: int


@dataclass(frozen=True, eq=False)
class CyclicSchedule:
    """Rounds of a relaxed optimum that repeat: K kinds of operation, each once a round.

    Attributes:
        rank: of the operation of each kind and round, int64 (K, rounds).
        round_ns: how long a round is.
        start_ns: relaxed start of each kind in the first round, after the earliest of them, (K).
        precedences: between kinds, each once.
    """

    rank: NDArray[np.int64]
    round_ns: int
    start_ns: NDArray[np.int64]
    precedences: tuple[CyclicPrecedence, ...]

    @classmethod
    def detect(cls, pipeline: Pipeline, rounding: Rounding) -> Self | None:
        """The repeating rounds of a deadline's relaxed optimum; None if there are too few.

        There are enough for the shortest pattern.
        """
        ranks_by_kind = _ranks_by_kind(pipeline, rounding)
        if not ranks_by_kind:
            return None
        rank = _ranks_of_alike_rounds(ranks_by_kind, rounding)
        if rank is None:
            return None
        finish_ns = rounding.relaxed_finish_ns[rank]
        start_ns = finish_ns[:, 0] - rounding.relaxed_duration_ns[rank[:, 0]]
        num_rounds = rank.shape[1]
        # Rounded down, so that what fits the rounds fits the pipeline.
        mean_round_ns = (finish_ns[:, -1] - finish_ns[:, 0]) // (num_rounds - 1)
        return cls(
            rank,
            int(mean_round_ns.min()),
            start_ns - start_ns.min(),
            _cyclic_precedences(rank, rounding.precedences),
        )

    @property
    def num_rounds(self) -> int:
        """How many rounds repeat."""
        return int(self.rank.shape[1])

    def best_pattern(
        self,
        pareto_choice: Choice,
        curves: Sequence[CostCurve],
        likely: Sequence[Sequence[int]],
        end_s: float,
    ) -> Choice | None:
        """The cheapest options found for a few rounds that can follow themselves.

        Args:
            pareto_choice: to begin with, (N,), by rank.
            curves: cost curves of the operations, (N,), by rank.
            likely: Pareto indices of the options to choose from, (N,), by rank.
            end_s: when to stop, of time.monotonic().

        Returns:
            Pareto indices, (K, length of the pattern); None where none was found in time.
        """
        length = self._pattern_length
        option_model = OptionModel(curves)
        model = option_model.model
        # A kind may shift against the others, but not by more than all of them take in turn.
        reach_ns = len(self.rank) * self.round_ns
        interval: dict[tuple[int, int], _Interval] = {}  # by kind and round of the pattern
        for kind, ranks in enumerate(self.rank.tolist()):
            middle = len(ranks) // 2
            for round_, i in enumerate(ranks[middle : middle + length]):
                about_ns = int(self.start_ns[kind]) + round_ * self.round_ns
                start = model.new_int_var(about_ns - reach_ns, about_ns + reach_ns, "")
                duration_ns = option_model.add_operation(i, likely[i], int(pareto_choice[i]))
                interval[kind, round_] = _Interval(start, start + duration_ns)
        pattern_ns = length * self.round_ns
        for precedence in self.precedences:
            for round_ in range(length):
                # The successor may be in a later repetition of the pattern.
                repetitions, later_round = divmod(round_ + precedence.rounds_later, length)
                successor = interval[precedence.successor, later_round]
                predecessor = interval[precedence.predecessor, round_]
                successor_start = successor.start + repetitions * pattern_ns
                model.add(successor_start >= predecessor.finish + precedence.lag_ns)
        result = option_model.solve_until(end_s)
        if result.pareto_choice is None:
            return None
        return result.pareto_choice.reshape(-1, length)

    @property
    def _pattern_length(self) -> int:
        """The longest pattern that can be repeated often enough, in rounds."""
        for length in _PATTERN_LENGTHS:
            if self.num_rounds >= _MIN_REPETITIONS * length:
                return length
        raise AssertionError("fewer rounds than detect accepts")

    def insertions(self, pareto_choice: Choice, pattern: Choice) -> Iterator[Choice]:
        """Put a pattern into the rounds that repeat, from each of its rounds on, with each joint.

        Args:
            pareto_choice: elsewhere, (N,), by rank.
            pattern: Pareto indices, (K, length).

        Yields:
            Pareto indices, (N,), by rank.
        """
        length = pattern.shape[1]
        for joint in _JOINTS:
            for phase in range(length):
                rounds = pattern[:, (np.arange(self.num_rounds) + phase) % length]
                # Pareto option 0 is the fastest.
                rounds[:, : joint.rounds_before] = 0
                rounds[:, self.num_rounds - joint.rounds_after :] = 0
                repeated = pareto_choice.copy()
                repeated[self.rank] = rounds
                yield repeated


class _KindAndRound(NamedTuple):
    """Where an operation is among the rounds that repeat."""

    kind: int
    round: int


class _Interval(NamedTuple):
    """When an operation of a pattern starts and finishes, ns, as variables of CP-SAT."""

    start: cp_model.IntVar
    finish: cp_model.LinearExprT


class _Window(NamedTuple):
    """Rounds of one kind that take equally long, around the middle of the iteration.

    Attributes:
        middle: the first round that ends after the middle.
        rounds_before, rounds_after: how many are alike before it, and from it on.
    """

    middle: int
    rounds_before: int
    rounds_after: int


def _ranks_of_alike_rounds(
    ranks_by_kind: Sequence[NDArray[np.int64]], rounding: Rounding
) -> NDArray[np.int64] | None:
    """Ranks of the operations of rounds that take equally long, (K, rounds).

    Args:
        ranks_by_kind: of each kind's operations, round by round.
        rounding: of the relaxed optimum.

    Returns:
        None where they are too few for the shortest pattern.
    """
    finishes_ns = [rounding.relaxed_finish_ns[ranks] for ranks in ranks_by_kind]
    between_rounds_ns = np.concatenate([np.diff(finish_ns) for finish_ns in finishes_ns])
    round_ns = int(np.median(between_rounds_ns))
    if round_ns <= 0:
        return None
    middle_ns = rounding.deadline_ns // 2
    windows = [_alike_window(finish_ns, round_ns, middle_ns) for finish_ns in finishes_ns]
    rounds_before = min(window.rounds_before for window in windows)
    rounds_after = min(window.rounds_after for window in windows)
    if rounds_before + rounds_after < _MIN_REPETITIONS * min(_PATTERN_LENGTHS):
        return None
    ranks_of_rounds = []
    for ranks, window in zip(ranks_by_kind, windows, strict=True):
        begin, end = window.middle - rounds_before, window.middle + rounds_after
        ranks_of_rounds.append(ranks[begin:end])
    return np.array(ranks_of_rounds)


def _alike_window(finish_ns: NDArray[np.int64], round_ns: int, middle_ns: int) -> _Window:
    """The rounds around the middle whose ends lie one round apart.

    Args:
        finish_ns: of one kind's operations, round by round.
        round_ns: how long a round is.
        middle_ns: of the iteration.
    """
    middle = int(np.searchsorted(finish_ns, middle_ns))
    deviation_ns = np.abs(np.diff(finish_ns) - round_ns)
    unlike = np.flatnonzero(deviation_ns > _TOLERANCE * round_ns)
    unlike_before, unlike_after = unlike[unlike < middle], unlike[unlike >= middle]
    begin = int(unlike_before[-1]) + 1 if len(unlike_before) else 0
    end = int(unlike_after[0]) if len(unlike_after) else len(finish_ns) - 1
    return _Window(middle, rounds_before=middle - begin, rounds_after=end - middle)


def _ranks_by_kind(pipeline: Pipeline, rounding: Rounding) -> list[NDArray[np.int64]]:
    """Ranks of each kind's operations, by microbatch, of kinds that have enough to repeat.

    A kind is an instruction of one chunk on one stage.
    """
    rank = np.empty(len(rounding.order), np.int64)
    rank[rounding.order] = np.arange(len(rounding.order))
    by_kind: dict[tuple[int, str, int], dict[int, int]] = {}
    for i, op in zip(rank.tolist(), pipeline.operations, strict=True):
        by_microbatch = by_kind.setdefault((op.stage, op.instruction, op.chunk), {})
        by_microbatch[op.microbatch] = i
    ranks_by_kind = []
    for by_microbatch in by_kind.values():
        if len(by_microbatch) > pipeline.num_stages:
            ranks = [by_microbatch[microbatch] for microbatch in sorted(by_microbatch)]
            ranks_by_kind.append(np.array(ranks, np.int64))
    return ranks_by_kind


def _cyclic_precedences(
    rank: NDArray[np.int64], precedences: Precedences
) -> tuple[CyclicPrecedence, ...]:
    """Precedences between operations of the rounds, as those between their kinds.

    Args:
        rank: of the operation of each kind and round, (K, rounds).
        precedences: of all operations.
    """
    position: dict[int, _KindAndRound] = {}  # by rank
    for kind, ranks in enumerate(rank.tolist()):
        for round_, i in enumerate(ranks):
            position[i] = _KindAndRound(kind, round_)
    cyclic = set()
    for precedence in precedences.as_list():
        predecessor = position.get(precedence.predecessor)
        successor = position.get(precedence.successor)
        if predecessor is not None and successor is not None:
            rounds_later = successor.round - predecessor.round
            cyclic.add(
                CyclicPrecedence(predecessor.kind, successor.kind, rounds_later, precedence.lag_ns)
            )
    return tuple(sorted(cyclic))
