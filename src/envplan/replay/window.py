"""A stretch of a long pipeline, searched while the rest of it stays as it is.

A change of one operation moves the start of all that waits for it. In a long pipeline that is much,
while what a choice gains lies near. So a window has the operations of a span of time, whose rows
may change, and on each stage the one before and the one after these, whose rows are fixed.

Times outside are given, and enter by two operations that there are not:

- the source is before all others. An operation that waits for one before the window starts no
  sooner than that one ends: an arc from the source to it has this as its lag.
- the sink is after all others. An operation that one after the window waits for is followed by all
  that comes then: an arc from it to the sink has the time until the iteration's end as its lag.

Where the window ends in time, so does the whole: a given time may be too late for other rows in the
window, and is never too early.

Clocks follow at once here: what runs outside does not depend on clocks within.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from envplan import _kernel
from envplan.pipeline import Pipeline
from envplan.replay.engine import NO_CAP, NO_CLOCK, Problem, Replay, Rows, Search, Times

__all__ = ["GivenTimes", "Window", "tails_ns"]

#: How long the source and the sink take each; the kernel wants a time above 0.
_LEAST_NS = 1

Flags = NDArray[np.bool_]
Indices = NDArray[np.int64]


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

    Attributes:
        operations: of the window, by their numbers in the whole pipeline, int64 (n,).
        rows: of these by the choice, and of source and sink, int32 (n + 2,). A fixed operation has
            a table of its own with a single row, so its row is 0.
        kernel: the problem for the kernel.
    """

    def __init__(self, problem: Problem, rows: Rows, inside: Flags, times: GivenTimes) -> None:
        self._problem = problem
        self.operations: Indices = np.flatnonzero(_with_neighbours(problem.pipeline, inside))
        self._is_inside: Flags = inside[self.operations]
        own_rows = np.where(self._is_inside, rows[self.operations], 0)
        self.rows: Rows = np.concatenate([own_rows, [0, 0]]).astype(np.int32)
        self.kernel = self._kernel_problem(rows, times)

    @property
    def changeable(self) -> Indices:
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

    def _kernel_problem(self, rows: Rows, times: GivenTimes) -> _kernel.Problem:
        """The window for the kernel: its operations by stage, then source and sink, a stage too."""
        problem = self._problem
        fixed_rows = problem.over_all(rows)[self.operations[~self._is_inside]]
        tables = self._tables(len(fixed_rows))
        arcs = self._arcs(times)
        clocks = problem._row_clocks

        def and_single_rows(values: NDArray[Any], of_source_and_sink: int) -> NDArray[Any]:
            """Values of the rows of all tables."""
            return np.concatenate([values, values[fixed_rows], [of_source_and_sink]])

        return _kernel.Problem(
            order=self._order(times.rank),
            stage_begin=self._stage_begin(),
            succ_begin=arcs.begin_by_tail(len(self.rows)),
            succ=arcs.head.astype(np.int32),
            succ_lag=arcs.lag_ns,
            table=tables.of_operation,
            table_begin=tables.begin,
            time=and_single_rows(problem.time_ns, _LEAST_NS),
            energy=and_single_rows(problem.energy_10fj, 0),
            clock=and_single_rows(clocks.requested, NO_CLOCK).astype(np.int32),
            leaves=and_single_rows(clocks.left, NO_CLOCK).astype(np.int32),
            nearest=np.concatenate([clocks.standing_in, tables.standing_in]).astype(np.int32),
            waiting=np.concatenate([problem.blocking_power_10uw, [0]]),
        )

    def _order(self, rank: Times) -> Rows:
        """A topological order, int32 (n + 2,)."""
        before_all, after_all = -1, len(rank)
        return np.argsort([*rank[self.operations], before_all, after_all]).astype(np.int32)

    def _stage_begin(self) -> Rows:
        """Where each stage's operations begin; the last stage has the source and the sink."""
        stage_sizes = np.bincount(
            self._problem.stage[self.operations], minlength=self._problem.pipeline.num_stages
        )
        return np.cumsum([0, *stage_sizes, 2]).astype(np.int32)

    def _tables(self, num_fixed: int) -> _Tables:
        """The whole pipeline's tables, then those of a single row.

        Args:
            num_fixed: operations whose rows are fixed.
        """
        problem = self._problem
        num_rows, num_tables = len(problem.time_ns), len(problem._table_begin) - 1
        num_single = num_fixed + 1  # source and sink share one
        single_rows = num_rows + np.arange(num_single)
        of_operation = np.concatenate([problem.table[self.operations], [0, 0]])
        of_operation[np.flatnonzero(~self._is_inside)] = num_tables + np.arange(num_fixed)
        of_operation[-2:] = num_tables + num_fixed
        return _Tables(
            of_operation=of_operation.astype(np.int32),
            begin=np.concatenate([problem._table_begin, single_rows + 1]).astype(np.int32),
            standing_in=np.tile(single_rows[:, None], len(problem.clocks_mhz)),
        )

    def _arcs(self, times: GivenTimes) -> _Arcs:
        """The precedences of the window, by ascending tail."""
        whole = _Arcs.of(self._problem.pipeline)
        num = len(self.operations)
        source, sink = num, num + 1
        number = np.full(len(times.rank), -1, np.int64)  # in the window; -1: outside
        number[self.operations] = np.arange(num)
        tail, head = number[whole.tail], number[whole.head]

        is_within = (tail >= 0) & (head >= 0)
        is_entering = (tail < 0) & (head >= 0)
        is_leaving = (tail >= 0) & (head < 0)
        earliest_ns = np.zeros(num, np.int64)
        arrivals_ns = times.finishes_ns[whole.tail] + whole.lag_ns
        np.maximum.at(earliest_ns, head[is_entering], arrivals_ns[is_entering])
        rest_ns = np.zeros(num, np.int64)
        remaining_ns = whole.lag_ns + times.tails_ns[whole.head]
        np.maximum.at(rest_ns, tail[is_leaving], remaining_ns[is_leaving])

        entered, left = np.flatnonzero(earliest_ns), np.flatnonzero(rest_ns)
        arcs = [
            _Arcs(tail[is_within], head[is_within], whole.lag_ns[is_within]),
            _Arcs(np.full(len(entered), source), entered, earliest_ns[entered] - _LEAST_NS),
            _Arcs(left, np.full(len(left), sink), rest_ns[left] - _LEAST_NS),
            _Arcs(np.array([source]), np.array([sink]), np.array([0])),
        ]
        return _Arcs(*map(np.concatenate, zip(*arcs, strict=True))).by_tail()


class _Tables(NamedTuple):
    """Tables of options for the kernel.

    Attributes:
        of_operation: the table of each operation, int32.
        begin: the first row of each table and, at the end, the number of all rows, int32.
        standing_in: rows of the added tables that stand for their rows at each clock: they stay.
    """

    of_operation: Rows
    begin: Rows
    standing_in: Indices


class _Arcs(NamedTuple):
    """Precedences: the head starts no sooner than a lag after the tail has ended.

    Attributes:
        tail, head: operations, int64 (A,).
        lag_ns: int64 (A,).
    """

    tail: Indices
    head: Indices
    lag_ns: Times

    @classmethod
    def of(cls, pipeline: Pipeline) -> _Arcs:
        """The precedences of a pipeline, by ascending tail."""
        num_successors = np.diff(pipeline.succ_begin)
        tail = np.repeat(np.arange(len(num_successors)), num_successors)
        return cls(tail, pipeline.succ, pipeline.succ_lag_ns)

    def by_tail(self) -> _Arcs:
        """The same by ascending tail."""
        order = np.argsort(self.tail, kind="stable")
        return _Arcs(self.tail[order], self.head[order], self.lag_ns[order])

    def begin_by_tail(self, num_operations: int) -> Rows:
        """Where the arcs of each tail begin, and the number of all, int32 (num_operations + 1,)."""
        counts = np.bincount(self.tail, minlength=num_operations)
        return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)


def _with_neighbours(pipeline: Pipeline, inside: Flags) -> Flags:
    """Operations, and on each stage the one before and the one after each of them."""
    num_of_stages = np.diff(pipeline.stage_begin)
    is_last = np.zeros(len(inside), bool)
    is_last[pipeline.stage_begin[1:][num_of_stages > 0] - 1] = True
    has_next = ~is_last[:-1]
    neighbours = inside.copy()
    neighbours[1:] |= inside[:-1] & has_next
    neighbours[:-1] |= inside[1:] & has_next
    return neighbours


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
