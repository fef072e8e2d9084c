"""Minimum cut and maximum flow with lower bounds on any graph, through the compiled core."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from envplan import _kernel
from envplan.errors import InputError, NoAnswerError

#: As an upper bound: no limit.
UNLIMITED: int = _kernel.UNLIMITED


@dataclass(frozen=True, eq=False)
class MinimumCut:
    """A maximum flow and the cut that proves it.

    Attributes:
        value: the net flow out of the source, which is the sum of upper bounds of arcs that leave
            the source side minus the lower bounds of arcs that enter it.
        flow: int64 (arcs,).
        source_side: bool (nodes,), the smallest minimum cut's source side.
    """

    value: int
    flow: NDArray[np.int64]
    source_side: NDArray[np.bool_]


def minimum_cut(
    tail: ArrayLike,
    head: ArrayLike,
    upper: ArrayLike,
    *,
    source: int,
    sink: int,
    lower: ArrayLike | None = None,
    num_nodes: int | None = None,
) -> MinimumCut:
    """The minimum cut between two nodes of a directed graph whose arcs may have lower bounds.

    Lower bounds become supplies and demands of a first flow problem (Ford and Fulkerson 1962,
    section II.3); both are solved by blocking flows (Dinic 1970). Exact in 64-bit integers.

    Args:
        tail, head: (arcs,), nodes that each arc leaves and enters, from 0.
        upper: (arcs,), most flow on each arc; UNLIMITED for no limit.
        lower: (arcs,), least flow on each arc, not negative; default 0.
        num_nodes: default one more than the greatest node named.

    Raises:
        InputError: arrays do not fit together, or a number is out of range.
        NoAnswerError: no flow keeps the lower bounds, or the flow is unbounded.
    """
    tails, heads = np.ascontiguousarray(tail, np.int32), np.ascontiguousarray(head, np.int32)
    uppers = np.ascontiguousarray(upper, np.int64)
    lowers = np.ascontiguousarray(np.zeros(len(uppers)) if lower is None else lower, np.int64)
    if num_nodes is None:
        num_nodes = 1 + max([source, sink, *tails.tolist(), *heads.tolist()])
    try:
        status, value, flow, side = _kernel.max_flow(
            num_nodes, tails, heads, lowers, uppers, source, sink
        )
    except (ValueError, OverflowError) as error:
        raise InputError(str(error)) from error
    if status == "infeasible":
        inside = np.flatnonzero(side).tolist()
        raise NoAnswerError(
            f"no flow keeps the lower bounds: arcs into the nodes {inside} must bring {value} more "
            "than arcs out of them may take away"
        )
    if status == "unbounded":
        raise NoAnswerError("the flow is unbounded: a path without limits leads to the sink")
    return MinimumCut(value, flow, side.astype(bool))
