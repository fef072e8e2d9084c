"""A stretch of a long pipeline, searched while the rest of it stays as it is.

A change of one operation moves the start of all that waits for it. In a long pipeline that is much,
while what a choice gains lies near. So a window holds the operations of a span of time, with the
one before and the one after on each stage, which keep their rows. Times outside are given: what
runs before the window ends when it ends, which an operation that starts with the iteration stands
for; what runs after it takes as long as it takes, which one that ends with it stands for.

Clocks follow at once here: what runs outside does not depend on clocks within.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from envplan import _kernel
from envplan.replay.engine import NO_CAP, NO_CLOCK, Problem, Replay, Rows, Search, Times

#: What stands for all before a window, and for all after it, takes as long.
_LEAST_NS = 1


class GivenTimes(NamedTuple):
    """Times that a window takes as given.

    Attributes:
        finishes_ns: of all operations, int64 (N,); right of those before the window.
        tails_ns: int64 (N,), from an operation's start to the end of the iteration; right of those
            after the window.
        rank: int64 (N,), of operations in a topological order.
    """

    finishes_ns: Times
    tails_ns: Times
    rank: Times


class Window:
    """The problem of some operations that start one after the other.

    Args:
        problem: of the whole pipeline.
        rows: the choice, int32 (N,).
        inside: bool (N,), whether each operation may be changed; on each stage these are
            neighbours.
        times: what is given.
    """

    def __init__(
        self, problem: Problem, rows: Rows, inside: NDArray[np.bool_], times: GivenTimes
    ) -> None:
        pipeline = problem.pipeline
        is_kept = inside.copy()
        # One more on each stage, before and after.
        is_last = np.zeros(len(rows), bool)
        is_last[pipeline.stage_begin[1:][np.diff(pipeline.stage_begin) > 0] - 1] = True
        is_kept[1:] |= inside[:-1] & ~is_last[:-1]
        is_kept[:-1] |= inside[1:] & ~is_last[:-1]
        self.operations: NDArray[np.int64] = np.flatnonzero(is_kept)
        self._is_inside = inside[self.operations]
        self._problem = problem
        self.rows: Rows = np.where(self._is_inside, rows[self.operations], 0).astype(np.int32)
        self.rows = np.concatenate([self.rows, [0, 0]]).astype(np.int32)
        self._arrays = self._make_arrays(rows, is_kept, times)
        self.kernel = _kernel.Problem(**self._arrays)

    @property
    def changeable(self) -> NDArray[np.int64]:
        """The operations that may be changed, of the whole pipeline."""
        return self.operations[self._is_inside]

    def rows_of_changeable(self, rows: Rows) -> Rows:
        """Rows of the operations that may be changed, out of those of the window."""
        return rows[: len(self.operations)][self._is_inside]

    def search(
        self,
        deadline_ns: int,
        *,
        price_10uw: int,
        waits: bool,
        price_10fj: int,
        allowance_10fj: int,
    ) -> Search:
        """The search for rows of the window; arguments are those of Search."""
        return Search.on_kernel(
            _kernel.Search(
                self.kernel,
                0,
                False,
                deadline_ns,
                0,
                NO_CAP,
                waits,
                price_10uw,
                price_10fj,
                allowance_10fj,
            )
        )

    def finishes_ns(self, rows: Rows) -> Times:
        """When the operations that may be changed end by rows of the window, int64, ns."""
        finishes_ns = self.kernel.replay(rows, 0, False)[1]
        return finishes_ns[: len(self.operations)][self._is_inside]

    def _make_arrays(
        self, rows: Rows, is_kept: NDArray[np.bool_], times: GivenTimes
    ) -> dict[str, Any]:
        problem, operations = self._problem, self.operations
        pipeline = problem.pipeline
        num = len(operations)
        first, last = num, num + 1  # stand for all before and all after
        number = np.full(len(rows), -1, np.int64)
        number[operations] = np.arange(num)

        # Tables: those of the whole, one of a row for each operation that stays, and one of no
        # clock.
        clocks = problem._row_clocks
        staying = np.flatnonzero(~self._is_inside)
        kept_rows = problem.over_all(rows)[operations[staying]]
        num_rows = len(problem.time_ns)
        begin = problem._table_begin
        table_begin = np.concatenate([begin, num_rows + np.arange(1, len(staying) + 2)]).astype(
            np.int32
        )
        table = np.concatenate([problem.table[operations], [0, 0]]).astype(np.int32)
        table[staying] = len(begin) - 1 + np.arange(len(staying))
        table[first:] = len(begin) - 1 + len(staying)
        num_clocks = len(problem.clocks_mhz)
        standing_in = np.concatenate(
            [
                clocks.standing_in,
                np.repeat(num_rows + np.arange(len(staying) + 1), num_clocks).reshape(
                    len(staying) + 1, num_clocks
                ),
            ]
        ).astype(np.int32)

        # Precedences: within, from what stands for all before, to what stands for all after.
        degree = np.diff(pipeline.succ_begin)
        tail = np.repeat(np.arange(len(rows)), degree)
        head, lag_ns = pipeline.succ, pipeline.succ_lag_ns
        within = is_kept[tail] & is_kept[head]
        entering = ~is_kept[tail] & is_kept[head]
        leaving = is_kept[tail] & ~is_kept[head]
        earliest_ns = np.zeros(num, np.int64)
        np.maximum.at(
            earliest_ns,
            number[head[entering]],
            times.finishes_ns[tail[entering]] + lag_ns[entering],
        )
        rest_ns = np.zeros(num, np.int64)
        np.maximum.at(
            rest_ns, number[tail[leaving]], times.tails_ns[head[leaving]] + lag_ns[leaving]
        )
        late, early = np.flatnonzero(earliest_ns), np.flatnonzero(rest_ns)
        tails = np.concatenate([number[tail[within]], np.full(len(late), first), early, [first]])
        heads = np.concatenate([number[head[within]], late, np.full(len(early), last), [last]])
        lags = np.concatenate(
            [lag_ns[within], earliest_ns[late] - _LEAST_NS, rest_ns[early] - _LEAST_NS, [0]]
        )
        by_tail = np.argsort(tails, kind="stable")
        counts = np.bincount(tails, minlength=num + 2)

        rank = np.concatenate([times.rank[operations], [-1, len(rows)]])
        order = np.argsort(rank).astype(np.int32)
        stages = problem.stage[operations]
        per_stage = np.bincount(stages, minlength=pipeline.num_stages)
        stage_begin = np.concatenate([[0], np.cumsum(per_stage), [num + 2]]).astype(np.int32)

        def with_kept(values: NDArray[Any], none: int) -> NDArray[Any]:
            return np.concatenate([values, values[kept_rows], [none]])

        return {
            "order": order,
            "stage_begin": stage_begin,
            "succ_begin": np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
            "succ": heads[by_tail].astype(np.int32),
            "succ_lag": lags[by_tail].astype(np.int64),
            "table": table,
            "table_begin": table_begin,
            "time": with_kept(problem.time_ns, _LEAST_NS),
            "energy": with_kept(problem.energy_10fj, 0),
            "clock": with_kept(clocks.requested, NO_CLOCK).astype(np.int32),
            "leaves": with_kept(clocks.left, NO_CLOCK).astype(np.int32),
            "nearest": standing_in,
            "waiting": np.concatenate([problem.blocking_power_10uw, [0]]),
        }


def tails_ns(replay: Replay) -> Times:
    """How long after each operation's start the iteration lasts at least, int64 (N,), ns."""
    pipeline = replay.problem.pipeline
    begin, successors = pipeline.succ_begin.tolist(), pipeline.succ.tolist()
    lags_ns = pipeline.succ_lag_ns.tolist()
    durations_ns = (replay.finishes_ns - replay.starts_ns).tolist()
    tails = [0] * len(durations_ns)
    for operation in reversed(pipeline.order.tolist()):
        after_ns = 0
        for arc in range(begin[operation], begin[operation + 1]):
            after_ns = max(after_ns, lags_ns[arc] + tails[successors[arc]])
        tails[operation] = durations_ns[operation] + after_ns
    return np.array(tails, np.int64)
