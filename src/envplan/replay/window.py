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
#: The number of an operation that is not in the window.
_OUTSIDE = -1

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
        is_in_window = _with_neighbours(problem.pipeline, inside)
        self.operations: Indices = np.flatnonzero(is_in_window)
        self._is_inside: Flags = inside[self.operations]
        own_rows = np.where(self._is_inside, rows[self.operations], 0)
        source_and_sink = [0, 0]
        self.rows: Rows = np.append(own_rows, source_and_sink).astype(np.int32)
        self.kernel = self._kernel_problem(rows, times)

    @property
    def changeable(self) -> Indices:
        """The operations that may be changed, of the whole pipeline."""
        return self.operations[self._is_inside]

    def rows_of_changeable(self, rows: Rows) -> Rows:
        """Rows of the operations that may be changed, out of those of the window."""
        of_operations = rows[: len(self.operations)]
        return of_operations[self._is_inside]

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
        of_operations = finishes_ns[: len(self.operations)]
        return of_operations[self._is_inside]

    def _kernel_problem(self, rows: Rows, times: GivenTimes) -> _kernel.Problem:
        """The window for the kernel: its operations by stage, then source and sink, a stage too."""
        problem = self._problem
        fixed_operations = self.operations[~self._is_inside]
        fixed_rows = problem.over_all(rows)[fixed_operations]
        tables = self._tables(len(fixed_rows))
        arcs = self._arcs(times)
        clocks = problem._row_clocks

        def and_single_rows(values: NDArray[Any], of_source_and_sink: int) -> NDArray[Any]:
            """Values of the rows of all tables."""
            of_fixed = values[fixed_rows]
            return np.concatenate([values, of_fixed, [of_source_and_sink]])

        requested = and_single_rows(clocks.requested, NO_CLOCK)
        left = and_single_rows(clocks.left, NO_CLOCK)
        nearest = np.concatenate([clocks.standing_in, tables.standing_in])
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
            clock=requested.astype(np.int32),
            leaves=left.astype(np.int32),
            nearest=nearest.astype(np.int32),
            waiting=np.append(problem.blocking_power_10uw, 0),
        )

    def _order(self, rank: Times) -> Rows:
        """A topological order, int32 (n + 2,)."""
        before_all, after_all = -1, len(rank)
        own_rank = rank[self.operations]
        order = np.argsort([*own_rank, before_all, after_all])
        return order.astype(np.int32)

    def _stage_begin(self) -> Rows:
        """Where each stage's operations begin; the last stage has the source and the sink."""
        stage_of_operation = self._problem.stage[self.operations]
        num_stages = self._problem.pipeline.num_stages
        stage_sizes = np.bincount(stage_of_operation, minlength=num_stages)
        source_and_sink = 2
        begins = np.cumsum([0, *stage_sizes, source_and_sink])
        return begins.astype(np.int32)

    def _tables(self, num_fixed: int) -> _Tables:
        """The whole pipeline's tables, then those of a single row.

        Args:
            num_fixed: operations whose rows are fixed.
        """
        problem = self._problem
        num_rows = len(problem.time_ns)
        num_tables = len(problem._table_begin) - 1
        num_single = num_fixed + 1  # source and sink share one
        single_rows = num_rows + np.arange(num_single)
        single_tables = num_tables + np.arange(num_single)

        of_operation = problem.table[self.operations]
        of_operation[~self._is_inside] = single_tables[:num_fixed]
        of_source_or_sink = single_tables[num_fixed]
        of_all = np.append(of_operation, [of_source_or_sink, of_source_or_sink])

        single_ends = single_rows + 1
        begin = np.concatenate([problem._table_begin, single_ends])
        num_clocks = len(problem.clocks_mhz)
        return _Tables(
            of_operation=of_all.astype(np.int32),
            begin=begin.astype(np.int32),
            standing_in=np.tile(single_rows[:, None], num_clocks),
        )

    def _arcs(self, times: GivenTimes) -> _Arcs:
        """The precedences of the window, by ascending tail."""
        whole = _Arcs.of(self._problem.pipeline)
        num = len(self.operations)
        source, sink = num, num + 1
        number = np.full(len(times.rank), _OUTSIDE)
        number[self.operations] = np.arange(num)
        arcs = _Arcs(number[whole.tail], number[whole.head], whole.lag_ns)
        begins_outside = arcs.tail == _OUTSIDE
        ends_outside = arcs.head == _OUTSIDE

        # When the last of what each waits for from before the window has arrived.
        is_entering = begins_outside & ~ends_outside
        arrivals_ns = times.finishes_ns[whole.tail] + whole.lag_ns
        earliest_ns = np.zeros(num, np.int64)
        np.maximum.at(earliest_ns, arcs.head[is_entering], arrivals_ns[is_entering])
        entered = np.flatnonzero(earliest_ns)

        # How long what waits for each after the window goes on at least.
        is_leaving = ends_outside & ~begins_outside
        remaining_ns = whole.lag_ns + times.tails_ns[whole.head]
        rest_ns = np.zeros(num, np.int64)
        np.maximum.at(rest_ns, arcs.tail[is_leaving], remaining_ns[is_leaving])
        left = np.flatnonzero(rest_ns)

        return _Arcs.joined(
            arcs.where(~begins_outside & ~ends_outside),
            _Arcs(
                tail=np.full(len(entered), source),
                head=entered,
                lag_ns=earliest_ns[entered] - _LEAST_NS,
            ),
            _Arcs(
                tail=left,
                head=np.full(len(left), sink),
                lag_ns=rest_ns[left] - _LEAST_NS,
            ),
            _Arcs(np.array([source]), np.array([sink]), np.array([0])),
        )


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

    @classmethod
    def joined(cls, *parts: _Arcs) -> _Arcs:
        """All arcs of some, by ascending tail."""
        together = cls(
            tail=np.concatenate([arcs.tail for arcs in parts]),
            head=np.concatenate([arcs.head for arcs in parts]),
            lag_ns=np.concatenate([arcs.lag_ns for arcs in parts]),
        )
        by_tail = np.argsort(together.tail, kind="stable")
        return together.where(by_tail)

    def where(self, which: Flags | Indices) -> _Arcs:
        """Some of these arcs."""
        return _Arcs(self.tail[which], self.head[which], self.lag_ns[which])

    def begin_by_tail(self, num_operations: int) -> Rows:
        """Where the arcs of each tail begin, and the number of all, int32 (num_operations + 1,)."""
        counts = np.bincount(self.tail, minlength=num_operations)
        begins = np.cumsum([0, *counts])
        return begins.astype(np.int32)


def _with_neighbours(pipeline: Pipeline, inside: Flags) -> Flags:
    """Operations, and on each stage the one before and the one after each of them."""
    num_of_stages = np.diff(pipeline.stage_begin)
    ends = pipeline.stage_begin[1:]
    last_operations = ends[num_of_stages > 0] - 1
    is_last = np.zeros(len(inside), bool)
    is_last[last_operations] = True
    has_next = ~is_last[:-1]
    neighbours = inside.copy()
    neighbours[1:] |= inside[:-1] & has_next
    neighbours[:-1] |= inside[1:] & has_next
    return neighbours


def tails_ns(replay: Replay) -> Times:
    """How long after each operation's start the iteration lasts at least, int64 (N,), ns."""
    pipeline = replay.problem.pipeline
    begin = pipeline.succ_begin.tolist()
    successors = pipeline.succ.tolist()
    lags_ns = pipeline.succ_lag_ns.tolist()
    durations_ns = (replay.finishes_ns - replay.starts_ns).tolist()
    tails = [0] * len(durations_ns)
    for operation in reversed(pipeline.order.tolist()):
        longest_ns = 0
        for arc in range(begin[operation], begin[operation + 1]):
            after_ns = lags_ns[arc] + tails[successors[arc]]
            longest_ns = max(longest_ns, after_ns)
        tails[operation] = durations_ns[operation] + longest_ns
    return np.array(tails, np.int64)
