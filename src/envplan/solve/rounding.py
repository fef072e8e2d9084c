"""From the relaxed optimum to one option for each operation, within the deadline exactly."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from envplan import _kernel
from envplan.frontier import Network
from envplan.pipeline import Pipeline

#: Annealing after diffusion and exchange: from hot, which finds other arrangements, to cool.
HEATS: tuple[float, ...] = (1.0, 0.5, 0.2, 0.1)
_MOVES = 400  # per operation and heat


class Rounding:
    """One deadline's rounding problem, its operations renumbered by relaxed start time.

    Args:
        event_times: int64 (nodes,), ns, the relaxed optimum at the deadline.

    Attributes:
        order: int32 (N,), the pipeline's operation at each new number.
        edges: int64 (E, 3), for each precedence before, after, in new numbers, and lag in ns.
        table: int32 (N,), each operation's option table, an index into network.cost_curves.
        choice: int32 (N,), the best options so far, indices into the table's Pareto options.
        deadline_ns: when everything must be finished.
        finish_ns, relaxed_ns: int64 (N,), relaxed finish and duration, in new numbers.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        network: Network,
        event_times: NDArray[np.int64],
        deadline_ns: int,
    ) -> None:
        count = len(pipeline.operations)
        start, finish = event_times[0 : 2 * count : 2], event_times[1 : 2 * count : 2]
        position = np.empty(count, np.int32)
        position[pipeline.order] = np.arange(count, dtype=np.int32)
        self.order = np.lexsort((position, start)).astype(np.int32)
        position[self.order] = np.arange(count, dtype=np.int32)

        edges = slice(count, count + len(pipeline.succ))
        before, after = position[network.tail[edges] // 2], position[network.head[edges] // 2]
        by_after = np.argsort(after, kind="stable")
        self.edges = np.stack([before, after, pipeline.succ_lag_ns], axis=1).astype(np.int64)
        curves = network.cost_curves
        option_begin = np.cumsum([0] + [len(c.option) for c in curves], dtype=np.int32)
        self.table: NDArray[np.int32] = network.curve[:count][self.order]
        self._first_option = option_begin[self.table]
        self._rows = np.concatenate([c.option for c in curves]).astype(np.int32)
        self._kernel = _kernel.Rounding(
            np.concatenate([[0], np.cumsum(np.bincount(after, minlength=count))]).astype(np.int32),
            before[by_after],
            pipeline.succ_lag_ns[by_after],
            self.table,
            option_begin,
            np.concatenate([c.time_ns for c in curves]),
            np.concatenate([c.cost_fj for c in curves]),
            finish[self.order],
            deadline_ns,
        )
        self.deadline_ns = deadline_ns
        self.finish_ns: NDArray[np.int64] = finish[self.order]
        self.relaxed_ns: NDArray[np.int64] = self.finish_ns - start[self.order]
        self.choice: NDArray[np.int32] = self._kernel.round()

    def improve(self, heat: float, seed: int, moves: int = _MOVES) -> bool:
        """Anneal from the best options so far, `moves` per operation; whether they got cheaper."""
        return bool(self._kernel.improve(self.choice, moves * len(self.order), heat, seed))

    def anneal(self, heats: Sequence[float] = HEATS, moves: float = 1.0) -> None:
        """One round of improvement at each heat, with a share of the usual moves."""
        for seed, heat in enumerate(heats):
            self.improve(heat, seed, max(1, round(_MOVES * moves)))

    @property
    def rows(self) -> NDArray[np.int32]:
        """The best options so far, (N,): for each operation the row of its option table."""
        return self.rows_of(self.choice)

    def rows_of(self, choice: NDArray[np.int32]) -> NDArray[np.int32]:
        """The same of other options, as `choice` has them."""
        rows = np.empty(len(self.order), np.int32)
        rows[self.order] = self._rows[self._first_option + choice]
        return rows
