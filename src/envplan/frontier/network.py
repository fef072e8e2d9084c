"""The activity network of a pipeline: what the kernel walks on.

Events are nodes, operations are arcs between their begin (2 i) and end (2 i + 1), precedences are
arcs of constant duration from an end to a begin, and a source and a sink hold it together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from operator import mul, sub
from typing import Any

import numpy as np
from numpy.typing import NDArray

from envplan import _kernel
from envplan.pipeline import Pipeline
from envplan.profile import CostCurve, Profile, cost_curve


@dataclass(frozen=True, eq=False)
class Network:
    """Arrays of the activity network of N operations and E precedences.

    Attributes:
        num_nodes: 2 N + 2; the source is 2 N, the sink 2 N + 1.
        tail, head: int32 (arcs,); the first N arcs are the operations, the next E the precedences.
        curve: int32 (arcs,), the curve of each arc, an index into curve_begin.
        curve_begin: int32 (curves + 1,), first level of each curve.
        duration: int64 (levels,), ns, descending within a curve.
        limit: int64 (levels,), uW, ascending within a curve.
        cost_curves: the curves of the operations; curve c of the arrays is cost_curves[c].
        base_cost_fj: sum of all operations' costs at their slowest, fJ.
    """

    num_nodes: int
    tail: NDArray[np.int32]
    head: NDArray[np.int32]
    curve: NDArray[np.int32]
    curve_begin: NDArray[np.int32]
    duration: NDArray[np.int64]
    limit: NDArray[np.int64]
    cost_curves: tuple[CostCurve, ...]
    base_cost_fj: int

    def trace(self) -> _kernel.Trace:
        """A kernel trace over this network, not yet started.

        Raises:
            ValueError: numbers outgrow the kernel's integer range.
        """
        return _kernel.Trace(
            self.num_nodes,
            self.tail,
            self.head,
            self.curve,
            self.curve_begin,
            self.duration,
            self.limit,
            self.num_nodes - 2,
            self.num_nodes - 1,
        )

    def coarse(self, every: int, fewest: int) -> Network | None:
        """The same network with every so many-th level of each curve, or more of them so that the
        longest keeps so many; None where it has not twice as many.

        Its costs are chords of this one's, so they are still convex.
        """
        every = min(every, int(np.diff(self.curve_begin).max()) // fewest)
        if every < 2:
            return None
        curves = []
        for begin, end in pairwise(self.curve_begin.tolist()):
            kept = sorted({*range(0, end - begin, every), end - begin - 1})
            level, slopes = self.duration[begin:end].tolist(), self.limit[begin : end - 1].tolist()
            costs = [0, *accumulate(map(mul, slopes, map(sub, level, level[1:])))]
            duration, limit = level[:1], list[int]()
            for first, last in pairwise(kept):
                slope = (costs[last] - costs[first]) // (level[first] - level[last])
                if limit and slope <= limit[-1]:  # rounded down to that of the chord before
                    duration.pop()
                else:
                    limit.append(slope)
                duration.append(level[last])
            curves.append((duration, limit))
        return replace(self, **_levels(curves))


def build_network(
    pipeline: Pipeline,
    profile: Profile,
    blocking_power_uw: Sequence[int],
    power_limit_uw: Sequence[int] | None = None,
) -> Network:
    """The activity network of a pipeline timed by a profile.

    Args:
        blocking_power_uw: power of a waiting GPU on each pipeline stage, (num_stages,), uW.
        power_limit_uw: for each operation, (N), uW: leave out its options of more power than
            this, of which it must have others. None: leave out none.

    Raises:
        InputError: the profile lacks an operation of the pipeline, or numbers outgrow 64 bits.
    """
    limits: Sequence[int | None] = power_limit_uw or [None] * len(pipeline.operations)
    timed = [
        (op.profile_stage, op.instruction, blocking_power_uw[op.stage], limit)
        for op, limit in zip(pipeline.operations, limits, strict=True)
    ]
    number = {key: k for k, key in enumerate(dict.fromkeys(timed))}
    curve = [number[key] for key in timed]
    curves = [cost_curve(profile.table(*key[:2]), *key[2:]) for key in number]
    lags, lag = np.unique([*pipeline.succ_lag_ns.tolist(), 0], return_inverse=True)
    lag_curve = len(curves) + lag
    followers = np.diff(pipeline.succ_begin)
    operations = np.arange(len(timed))
    first, last = np.setdiff1d(operations, pipeline.succ), operations[followers == 0]
    source, sink = 2 * len(timed), 2 * len(timed) + 1
    around = np.full(len(first), source), np.full(len(last), sink)

    def int32(*parts: Any) -> NDArray[np.int32]:
        return np.concatenate(parts).astype(np.int32)

    return Network(
        num_nodes=2 * len(timed) + 2,
        tail=int32(
            2 * operations, 2 * np.repeat(operations, followers) + 1, around[0], 2 * last + 1
        ),
        head=int32(2 * operations + 1, 2 * pipeline.succ, 2 * first, around[1]),
        curve=int32(curve, lag_curve[:-1], np.full(len(first) + len(last), lag_curve[-1])),
        **_levels(
            [
                *((c.hull_time_ns.tolist(), c.hull_slope_uw.tolist()) for c in curves),
                *(([ns], []) for ns in lags.tolist()),
            ]
        ),
        cost_curves=tuple(curves),
        base_cost_fj=sum(curves[k].base_cost_fj for k in curve),
    )


def _levels(curves: Sequence[tuple[Sequence[int], Sequence[int]]]) -> dict[str, Any]:
    """The arrays of curves that are given by durations and slopes."""
    return {
        "curve_begin": np.cumsum([0] + [len(d) for d, _ in curves], dtype=np.int32),
        "duration": np.array([t for d, _ in curves for t in d], np.int64),
        "limit": np.array([w for _, s in curves for w in (*s, _kernel.INFINITE)], np.int64),
    }


def network_events(starts_ns: NDArray[np.int64], ends_ns: NDArray[np.int64]) -> NDArray[np.int64]:
    """When each event of the network is, ns, where operations start and end then, (N,)."""
    around = [0, ends_ns.max()]
    return np.concatenate([np.stack([starts_ns, ends_ns], axis=1).ravel(), around]).astype(np.int64)
