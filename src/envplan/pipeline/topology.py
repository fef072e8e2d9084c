"""Orders in which the operations of a graph can run, and their earliest starts."""

from __future__ import annotations

from collections.abc import Sequence
from operator import add
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from envplan.errors import InputError, shown
from envplan.units import MAX_INTEGER

_MOST_NAMED: Final = 8


#: An operation at the other end of an edge, and the lag of the edge: least ns from the end of the
#: earlier of the two to the start of the later one. A plain tuple, for there are very many.
Neighbour: TypeAlias = tuple[int, int]
#: Edges of a graph: for each operation, its successors or its predecessors.
Neighbours: TypeAlias = Sequence[Sequence[Neighbour]]


def topological_order(successors: Neighbours, ids: Sequence[str]) -> list[int]:
    """An order in which every operation comes after its predecessors: first come, first served.

    This is Kahn's algorithm, linear in operations and edges.

    Args:
        successors: of each operation.
        ids: names of the operations, for errors.

    Raises:
        InputError: there is a cycle; names it.
    """
    num_waiting = [0] * len(successors)
    for edges in successors:
        for operation, _ in edges:
            num_waiting[operation] += 1
    order = [i for i, count in enumerate(num_waiting) if count == 0]
    for i in order:  # grows meanwhile
        for operation, _ in successors[i]:
            num_waiting[operation] -= 1
            if num_waiting[operation] == 0:
                order.append(operation)
    if len(order) < len(successors):
        raise _deadlock(successors, num_waiting, ids)
    return order


def _deadlock(successors: Neighbours, num_waiting: Sequence[int], ids: Sequence[str]) -> InputError:
    """The complaint about a cycle: each operation that still waits does so for another of them."""
    waits_for = {
        operation: i
        for i, edges in enumerate(successors)
        if num_waiting[i]
        for operation, _ in edges
        if num_waiting[operation]
    }
    path: dict[int, None] = {}
    current = next(iter(waits_for))
    while current not in path:
        path[current] = None
        current = waits_for[current]
    visited = list(path)
    cycle = [*visited[visited.index(current) :], current]
    names = [shown(ids[i]) for i in reversed(cycle)]
    num_unnamed = len(names) - 1 - _MOST_NAMED
    if num_unnamed > 0:
        names[_MOST_NAMED:-1] = [f"({num_unnamed} more)"]
    return InputError(
        f"operations deadlock, waiting for each other: {' -> '.join(names)} "
        "(those of one stage run in the order listed)"
    )


def earliest_starts(
    order: Sequence[int], neighbours: Neighbours, times_ns: Sequence[int], *, lags: bool = True
) -> NDArray[np.int64]:
    """The earliest start of each operation in ns, from 0.

    Args:
        order: a topological order of the operations.
        neighbours: of each operation, those that wait for it.
        times_ns: how long each operation takes.
        lags: whether edges have their lags; else none.

    Raises:
        InputError: the iteration would outlast 2**62 ns, 146 years.
    """
    start = [0] * len(times_ns)
    for i in order:
        finish = start[i] + times_ns[i]
        for operation, lag_ns in neighbours[i]:
            ready = finish + lag_ns if lags else finish
            if ready > start[operation]:
                start[operation] = ready
    if max(map(add, start, times_ns)) > MAX_INTEGER:
        raise InputError("operation times and latencies add up to more than 146 years")
    return np.array(start, np.int64)
