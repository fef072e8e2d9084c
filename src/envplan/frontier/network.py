"""The activity network of a pipeline: what the kernel walks on.

Events are nodes, operations are arcs between their begin and their end, precedences are arcs of
constant duration from an end to a begin, and a source and a sink hold it together (activity on
arc; Kelley 1961, Fulkerson 1961).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from envplan import _kernel
from envplan.pipeline import Pipeline
from envplan.profile import CostCurve, Profile, cost_curve

IntArray = NDArray[np.int32]
TimeArray = NDArray[np.int64]
FlowArray = NDArray[np.int64]
Integer = TypeVar("Integer", bound=np.integer)


class LevelledCurve(NamedTuple):
    """One convex, decreasing, piecewise-linear cost of an activity.

    Attributes:
        duration_ns: of each level, descending, (levels,).
        slope_10uw: what a ns less costs between each level and the next, ascending, (levels - 1,).
    """

    duration_ns: list[int]
    slope_10uw: list[int]


@dataclass(frozen=True, eq=False)
class PiecewiseCosts:
    """The cost curves of all activities, one after the other.

    Within a curve durations descend and slopes ascend, and the last slope is INFINITE, for nothing
    is faster than the last level. The kernel refuses others.

    Attributes:
        begin: int32 (curves + 1,), first level of each curve.
        duration_ns: int64 (levels,).
        slope_10uw: int64 (levels,), what a ns less costs from each level on.
    """

    begin: IntArray
    duration_ns: TimeArray
    slope_10uw: FlowArray

    @classmethod
    def from_curves(cls, curves: Sequence[LevelledCurve]) -> PiecewiseCosts:
        """Curves given one by one as arrays."""
        begin = np.cumsum([0, *(len(curve.duration_ns) for curve in curves)], dtype=np.int32)
        durations, slopes = list[int](), list[int]()
        for curve in curves:
            durations += curve.duration_ns
            slopes += [*curve.slope_10uw, _kernel.INFINITE]
        return cls(begin, np.array(durations, np.int64), np.array(slopes, np.int64))

    def curves(self) -> list[LevelledCurve]:
        """Each curve by itself."""
        return [
            LevelledCurve(
                self.duration_ns[begin:end].tolist(), self.slope_10uw[begin : end - 1].tolist()
            )
            for begin, end in pairwise(self.begin.tolist())
        ]

    def with_fewer_levels(self, stride: int, min_levels: int) -> PiecewiseCosts | None:
        """Every stride-th level of each curve, with chords between them, which are still convex.

        Args:
            stride: at most; it is smaller where the longest curve would keep fewer levels than
                min_levels.

        Returns:
            None where fewer than half of the levels could be left out.
        """
        most_levels = int(np.diff(self.begin).max())
        stride = min(stride, most_levels // min_levels)
        if stride < 2:
            return None
        return self.from_curves([_chords(curve, stride) for curve in self.curves()])


def _chords(curve: LevelledCurve, stride: int) -> LevelledCurve:
    """The chords of a curve between every stride-th of its levels, and its last."""
    costs_10fj = [0]  # at each level, above the slowest
    for slope_10uw, (slower_ns, faster_ns) in zip(
        curve.slope_10uw, pairwise(curve.duration_ns), strict=True
    ):
        costs_10fj.append(costs_10fj[-1] + slope_10uw * (slower_ns - faster_ns))
    num_levels = len(curve.duration_ns)
    levels = sorted({*range(0, num_levels, stride), num_levels - 1})
    durations, slopes = curve.duration_ns[:1], list[int]()
    for slower, faster in pairwise(levels):
        saved_ns = curve.duration_ns[slower] - curve.duration_ns[faster]
        slope_10uw = (costs_10fj[faster] - costs_10fj[slower]) // saved_ns
        if slopes and slope_10uw <= slopes[-1]:
            # Rounded down to the slope of the chord before: both become one chord.
            durations.pop()
        else:
            slopes.append(slope_10uw)
        durations.append(curve.duration_ns[faster])
    return LevelledCurve(durations, slopes)


@dataclass(frozen=True, eq=False)
class Network:
    """Arrays of the activity network of N operations and E precedences.

    Nodes: operation i begins at node 2 i and ends at node 2 i + 1; the source is 2 N, the sink
    2 N + 1. Arcs: the N operations, the E precedences in the order of `pipeline.succ`, the arcs of
    the source, the arcs of the sink.

    Attributes:
        num_operations, num_precedences: N and E.
        tail, head: int32 (arcs,), nodes that each arc joins.
        curve: int32 (arcs,), the cost curve of each arc, an index into costs.
        costs: the cost curves of all arcs.
        cost_curves: the curves of the operations; curve c of costs is that of cost_curves[c].
        base_cost_10fj: sum of all operations' effective costs at their slowest, 10 fJ.
    """

    num_operations: int
    num_precedences: int
    tail: IntArray
    head: IntArray
    curve: IntArray
    costs: PiecewiseCosts
    cost_curves: tuple[CostCurve, ...]
    base_cost_10fj: int

    @property
    def num_nodes(self) -> int:
        """Begins and ends of all operations, the source and the sink."""
        return 2 * self.num_operations + 2

    @property
    def source(self) -> int:
        """The node where everything starts."""
        return 2 * self.num_operations

    @property
    def sink(self) -> int:
        """The node where everything has ended."""
        return 2 * self.num_operations + 1

    @property
    def precedence_arcs(self) -> slice:
        """Where the arcs of precedences are."""
        return slice(self.num_operations, self.num_operations + self.num_precedences)

    @property
    def num_boundary_arcs(self) -> int:
        """Arcs of the source and the sink."""
        return len(self.tail) - self.num_operations - self.num_precedences

    def solver(self) -> _kernel.ParametricFlow:
        """A solver of this network, which stands at T_max.

        Raises:
            ValueError: numbers outgrow the kernel's integer range.
        """
        return _kernel.ParametricFlow(
            self.num_nodes,
            self.tail,
            self.head,
            self.curve,
            self.costs.begin,
            self.costs.duration_ns,
            self.costs.slope_10uw,
            self.source,
            self.sink,
        )

    def with_fewer_levels(self, stride: int, min_levels: int) -> Network | None:
        """The same network with coarser cost curves; see PiecewiseCosts."""
        costs = self.costs.with_fewer_levels(stride, min_levels)
        return None if costs is None else replace(self, costs=costs)


class _Arcs(NamedTuple):
    """Arcs of one kind, each array (arcs,)."""

    tail: NDArray[np.integer]
    head: NDArray[np.integer]
    curve: NDArray[np.integer]


def build_network(
    pipeline: Pipeline,
    profile: Profile,
    blocking_power_10uw: Sequence[int],
    power_limit_10uw: Sequence[int] | None = None,
) -> Network:
    """The activity network of a pipeline timed by a profile.

    Args:
        blocking_power_10uw: power of a waiting GPU on each pipeline stage, (num_stages,), 10 uW.
        power_limit_10uw: for each operation, (N), 10 uW: leave out its options of more power than
            this, of which it must have others. None: leave out none.

    Raises:
        InputError: the profile lacks an operation of the pipeline, or numbers outgrow 64 bits.
    """
    num_operations = len(pipeline.operations)
    cost_curves, operation_curve = _operation_curves(
        pipeline, profile, blocking_power_10uw, power_limit_10uw
    )
    # A constant lag is a curve of one level. The arcs of the source and the sink have lag 0.
    lag_ns, lag_index = np.unique([*pipeline.succ_lag_ns.tolist(), 0], return_inverse=True)
    lag_curve = len(cost_curves) + lag_index
    precedence_curve, no_lag_curve = lag_curve[:-1], lag_curve[-1]

    operation = np.arange(num_operations)
    num_successors = np.diff(pipeline.succ_begin)
    predecessor = np.repeat(operation, num_successors)
    without_predecessors = np.setdiff1d(operation, pipeline.succ)
    without_successors = operation[num_successors == 0]
    groups = (
        _Arcs(begin_node(operation), end_node(operation), operation_curve),
        _Arcs(end_node(predecessor), begin_node(pipeline.succ), precedence_curve),
        _Arcs(
            np.full_like(without_predecessors, 2 * num_operations),
            begin_node(without_predecessors),
            np.full_like(without_predecessors, no_lag_curve),
        ),
        _Arcs(
            end_node(without_successors),
            np.full_like(without_successors, 2 * num_operations + 1),
            np.full_like(without_successors, no_lag_curve),
        ),
    )
    tail, head, curve = (
        np.concatenate(columns).astype(np.int32) for columns in zip(*groups, strict=True)
    )
    operation_costs = [
        LevelledCurve(hull.hull_time_ns.tolist(), hull.hull_slope_10uw.tolist())
        for hull in cost_curves
    ]
    lag_costs = [LevelledCurve([duration_ns], []) for duration_ns in lag_ns.tolist()]
    return Network(
        num_operations=num_operations,
        num_precedences=len(pipeline.succ),
        tail=tail,
        head=head,
        curve=curve,
        costs=PiecewiseCosts.from_curves([*operation_costs, *lag_costs]),
        cost_curves=cost_curves,
        base_cost_10fj=sum(cost_curves[k].base_cost_10fj for k in operation_curve.tolist()),
    )


class _CurveKey(NamedTuple):
    """The key that operations with the same cost curve share."""

    profile_stage: int
    instruction: str
    blocking_power_10uw: int
    power_limit_10uw: int | None


def _operation_curves(
    pipeline: Pipeline,
    profile: Profile,
    blocking_power_10uw: Sequence[int],
    power_limit_10uw: Sequence[int] | None,
) -> tuple[tuple[CostCurve, ...], NDArray[np.int64]]:
    """The distinct cost curves of a pipeline's operations, and which one each has, (N,)."""
    limits: Sequence[int | None] = power_limit_10uw or [None] * len(pipeline.operations)
    keys = [
        _CurveKey(op.profile_stage, op.instruction, blocking_power_10uw[op.stage], limit_10uw)
        for op, limit_10uw in zip(pipeline.operations, limits, strict=True)
    ]
    number = {key: k for k, key in enumerate(dict.fromkeys(keys))}
    curves = tuple(
        cost_curve(
            profile.table(key.profile_stage, key.instruction),
            key.blocking_power_10uw,
            key.power_limit_10uw,
        )
        for key in number
    )
    return curves, np.array([number[key] for key in keys], np.int64)


def begin_node(operation: NDArray[Integer]) -> NDArray[Integer]:
    """The nodes where operations begin."""
    return 2 * operation


def end_node(operation: NDArray[Integer]) -> NDArray[Integer]:
    """The nodes where operations end."""
    return 2 * operation + 1


def operation_of_node(node: NDArray[Integer]) -> NDArray[Integer]:
    """The operations that begin or end at nodes, none of which is the source or the sink."""
    return node // 2


def network_events(starts_ns: TimeArray, ends_ns: TimeArray) -> TimeArray:
    """The time of each event of the network, int64 (nodes,), ns.

    Args:
        starts_ns, ends_ns: of the operations, (N,), ns.
    """
    operation_events = np.stack([starts_ns, ends_ns], axis=1).ravel()
    source_and_sink = [0, ends_ns.max()]
    return np.concatenate([operation_events, source_and_sink]).astype(np.int64)
