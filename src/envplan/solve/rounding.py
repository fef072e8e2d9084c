"""From the relaxed optimum of a deadline to one option for each operation, in time to the ns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from envplan import _kernel
from envplan.frontier import Network, Relaxation
from envplan.pipeline import Pipeline

#: Annealing after diffusion and exchange: hot, which finds other arrangements, then cooler.
TEMPERATURES: Final[tuple[float, ...]] = (1.0, 0.5, 0.2, 0.1)
_MOVES_PER_OPERATION: Final = 400  # at each temperature

IntArray = NDArray[np.int64]
IndexArray = NDArray[np.int32]
#: An option for every operation, int32 (N,): an option index, or a Pareto index where it says so.
Choice = IndexArray


class Precedence(NamedTuple):
    """An operation that waits for another, both by rank; the lag is that of Precedences."""

    predecessor: int
    successor: int
    lag_ns: int


class Precedences(NamedTuple):
    """Which operations wait for which; all int64 (E,), operations by rank.

    Attributes:
        predecessor, successor: ranks.
        lag_ns: from the end of the predecessor to the earliest start of the successor.
    """

    predecessor: IntArray
    successor: IntArray
    lag_ns: IntArray

    def as_list(self) -> list[Precedence]:
        """The precedences one by one, in Python's numbers."""
        columns = (column.tolist() for column in self)
        return [Precedence(*row) for row in zip(*columns, strict=True)]


class Rounding:
    """The rounding problem of one deadline.

    Operations are renumbered: their ranks follow their relaxed start times. Options are renumbered,
    too: a Pareto index counts the options of an operation's cost curve, fastest first, and leaves
    out those options of its table that no curve has.

    Args:
        pipeline: what runs.
        network: the activity network that was relaxed.
        event_times: int64 (nodes,), ns, the relaxed optimum at the deadline.
        deadline_ns: when everything must be finished.

    Attributes:
        deadline_ns: when everything must be finished.
        order: int32 (N,), the pipeline's operation at each rank.
        precedences: of the operations, by rank.
        curve: int32 (N,), by rank, each operation's curve, an index into network.cost_curves.
        pareto_choice: int32 (N,), by rank, the Pareto index of the best option so far. Annealing
            changes it in place.
        relaxed_finish_ns, relaxed_duration_ns: int64 (N,), by rank.
    """

    def __init__(
        self, pipeline: Pipeline, network: Network, event_times: IntArray, deadline_ns: int
    ) -> None:
        num_operations = network.num_operations
        # Events of operations come first: the start and the end of each in turn.
        start_ns = event_times[0 : 2 * num_operations : 2]
        finish_ns = event_times[1 : 2 * num_operations : 2]
        # Of operations that start together, predecessors come first.
        topological_position = _inverse(pipeline.order)
        self.order: IndexArray = np.lexsort((topological_position, start_ns)).astype(np.int32)
        self.precedences = _precedences(pipeline, network, rank=_inverse(self.order))
        self.curve: IndexArray = network.curve[:num_operations][self.order]
        self.deadline_ns = deadline_ns
        self.relaxed_finish_ns: IntArray = finish_ns[self.order]
        self.relaxed_duration_ns: IntArray = self.relaxed_finish_ns - start_ns[self.order]

        # The options of all curves, one curve after the other.
        curves = network.cost_curves
        num_options = [len(curve.option) for curve in curves]
        curve_begin = np.cumsum([0, *num_options], dtype=np.int32)
        self._option_begin = curve_begin[self.curve]
        self._options = np.concatenate([curve.option for curve in curves]).astype(np.int32)

        # The kernel wants the predecessors of each operation side by side.
        precedences = self.precedences
        by_successor = np.argsort(precedences.successor, kind="stable")
        num_predecessors = np.bincount(precedences.successor, minlength=num_operations)
        self._kernel = _kernel.Rounding(
            np.concatenate([[0], np.cumsum(num_predecessors)]).astype(np.int32),
            precedences.predecessor[by_successor].astype(np.int32),
            precedences.lag_ns[by_successor],
            self.curve,
            curve_begin,
            np.concatenate([curve.time_ns for curve in curves]),
            np.concatenate([curve.cost_10fj for curve in curves]),
            self.relaxed_finish_ns,
            deadline_ns,
        )
        self.pareto_choice: Choice = self._kernel.round()

    def improve(self, temperature: float, seed: int, moves_share: float = 1.0) -> bool:
        """Anneal `pareto_choice` in place, with a share of the usual moves.

        Returns:
            Whether it got cheaper.
        """
        moves = max(1, round(_MOVES_PER_OPERATION * moves_share)) * len(self.order)
        return bool(self._kernel.improve(self.pareto_choice, moves, temperature, seed))

    def anneal(
        self, temperatures: Sequence[float] = TEMPERATURES, moves_share: float = 1.0
    ) -> None:
        """Anneal once at each temperature, with a share of the usual moves."""
        for seed, temperature in enumerate(temperatures):
            self.improve(temperature, seed, moves_share)

    @property
    def choice(self) -> Choice:
        """The best options so far, int32 (N,): by operation, an option index into its table."""
        return self.choice_of(self.pareto_choice)

    def choice_of(self, pareto_choice: Choice) -> Choice:
        """The options that Pareto indices by rank stand for: by operation, indices into tables."""
        choice = np.empty(len(self.order), np.int32)
        choice[self.order] = self._options[self._option_begin + pareto_choice]
        return choice


def relaxed_rounding(frontier: Relaxation, deadline_ns: int) -> Rounding:
    """The rounding of a frontier's relaxed optimum at a deadline from T_min to T_max, ns."""
    optimum = frontier.state_at(deadline_ns)
    return Rounding(frontier.pipeline, frontier.network, optimum.times_ns, deadline_ns)


def _inverse(permutation: IndexArray) -> IndexArray:
    """The position at which a permutation has each number, int32."""
    inverse = np.empty(len(permutation), np.int32)
    inverse[permutation] = np.arange(len(permutation), dtype=np.int32)
    return inverse


def _precedences(pipeline: Pipeline, network: Network, *, rank: IndexArray) -> Precedences:
    """The precedences of a pipeline between the ranks of its operations.

    Args:
        rank: int32 (N,), of each operation.
    """
    # Their arcs go from the end of one operation to the start of another: nodes 2 i + 1 and 2 i.
    arcs = network.precedence_arcs
    predecessor = network.tail[arcs] // 2
    successor = network.head[arcs] // 2
    return Precedences(
        predecessor=rank[predecessor].astype(np.int64),
        successor=rank[successor].astype(np.int64),
        lag_ns=pipeline.succ_lag_ns.astype(np.int64),
    )
