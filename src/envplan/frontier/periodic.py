"""Long pipelines from short ones, whose optima repeat in the middle.

Away from the ends of a pipeline an optimum repeats from one round to the next. A round is what all
stages do for one microbatch, or, where stages have chunks, for one microbatch per stage. So a short
pipeline is split at a moment in its middle, and the round that comes next is put in there as many
times as the long pipeline has more rounds.

Theorem. Take an optimum of the short pipeline and a split of it, and suppose

1. every arc of the long pipeline is one of the short pipeline, its begin and its end in the same
   round or in two that follow each other (`PeriodicPipeline.extends_to`);
2. every arc over the split carries the flow that it carries one round later, and
3. where that is positive, the arc begins one and the same period later; where it is zero, its
   slack allows for that (both by the kernel, at each breakpoint: `FrontierTrace.watch`).

Then the extended flow is conserved at every event, and every arc of the long pipeline keeps the
complementary slackness of its arc in the short one. By the duality of linear programs the extended
optimum is optimal in the long pipeline: with the same slope, and later by a period for each round
that was put in.

Where the premises do not hold, the extended optimum is still a good guess to repair.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from envplan._kernel import Optimum
from envplan.frontier.network import Network, begin_node, end_node, operation_of_node
from envplan.pipeline import Pipeline
from envplan.pipeline.schedules import traits

if TYPE_CHECKING:
    from envplan._kernel import FrontierTrace

Indices = NDArray[np.int64]

# Columns of arrays (..., 2) that tell the begin of an operation from its end.
_BEGIN: Final = 0
_END: Final = 1
#: An operation, arc or precedence that a pipeline lacks, in arrays of indices.
MISSING: Final = -1
#: What the kernel says where the arcs over a split have no common period.
NO_PERIOD: Final = -1

#: Pipelines of no more operations, and of no more microbatches per stage, have no short pipeline.
FEW_OPERATIONS: Final = 512
FEW_ROUNDS: Final = 12
# Microbatches per stage of the short pipeline. With four its middle is steady even near T_min, on
# all profiles that were tried. Near T_star fewer are enough, so they stand for pipelines that are
# not much longer.
_STEADY_ROUNDS: Final = (4.0, 2.5)
# The same where a round is one microbatch per stage.
_MAX_WHOLE_ROUNDS: Final = 4
MIN_WHOLE_ROUNDS: Final = 3
# Where a split is not periodic, the short pipeline is traced on for this part of the way to T_min
# before it is split anew, and twice as far each time.
_APERIODIC_STEP: Final = 1 / 256

_KEY_BASE: Final = 2**31  # above every microbatch and every kind


class _Precedences(NamedTuple):
    """The operations that each precedence joins, (E,) each."""

    predecessor: Indices
    successor: Indices

    @classmethod
    def of(cls, network: Network) -> Self:
        """The precedences of a pipeline, by its network."""
        arcs = network.precedence_arcs
        tail = network.tail[arcs].astype(np.int64)
        head = network.head[arcs].astype(np.int64)
        return cls(operation_of_node(tail), operation_of_node(head))


class PipelineSplit(NamedTuple):
    """A split of a pipeline into an early and a late part.

    Attributes:
        first_microbatch: int64 (kinds, 2), of each kind of operation the first microbatch that
            begins, and that ends, in the late part.
        period_ns: time from the split to the same place one round later.
        num_differing: arcs over the split that are not as they are one round later.
    """

    first_microbatch: Indices
    period_ns: int
    num_differing: int


class PeriodicInterval(NamedTuple):
    """An interval of a trace in which the optimum repeats at one split.

    Attributes:
        split: where.
        first_breakpoint: index of the latest of its breakpoints in the trace.
        periods_ns: the period at each of its breakpoints, int64 (n,).
    """

    split: PipelineSplit
    first_breakpoint: int
    periods_ns: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class LongToShort:
    """Which parts of a short pipeline stand for those of a long one; MISSING where none do.

    Attributes:
        rounds_later: int64 (N, 2), by how many rounds the long pipeline's operations begin, and
            end, later than the short one's that stand for them.
        operation: int64 (N, 2), the operation that stands for its begin, and for its end. DualPipeV
            splits backwards at its ends only, so some have none.
        precedence: int64 (E,), the precedence that stands for each.
        precedence_tail: int64 (E,), the operation that stands for the earlier one of each.
    """

    rounds_later: Indices
    operation: Indices
    precedence: Indices
    precedence_tail: Indices


@dataclass(frozen=True, eq=False)
class _ShiftedArcs:
    """Arcs that may cross a split, beside the same arcs one round later; all arrays (arcs,).

    Attributes:
        tail_ns, head_ns: times of the events that each joins.
        shift_ns: how much later its tail is one round later.
        has_flow: whether it carries flow.
        same_flow: whether it exists one round later and carries the same flow there. Where not,
            shift_ns means nothing.
        slack_ns: time between its events beyond its longest duration.
    """

    tail_ns: NDArray[np.int64]
    head_ns: NDArray[np.int64]
    shift_ns: NDArray[np.int64]
    has_flow: NDArray[np.bool_]
    same_flow: NDArray[np.bool_]
    slack_ns: NDArray[np.int64]


class _SplitInTime(NamedTuple):
    """A split at a moment.

    Attributes:
        moment_ns: events before it are in the early part.
        period_ns, num_differing: as of a PipelineSplit.
    """

    moment_ns: int
    period_ns: int
    num_differing: int


def short_pipeline(pipeline: Pipeline) -> Pipeline | None:
    """The pipeline of fewer microbatches whose optimum repeats in that of a long one, or None."""
    stages, microbatches = pipeline.num_stages, pipeline.num_microbatches
    has_few_operations = len(pipeline.operations) <= FEW_OPERATIONS
    has_few_rounds = microbatches <= FEW_ROUNDS * stages
    is_short = has_few_operations and has_few_rounds
    if is_short or not traits(pipeline.schedule).is_periodic:
        return None
    if _microbatches_per_round(pipeline) == 1:
        for rounds in _STEADY_ROUNDS:
            short = max(4, int(rounds * stages))
            if short + stages <= microbatches:
                return pipeline.with_microbatches(short)
        return None
    whole_rounds, rest = divmod(microbatches, stages)
    rounds = min(_MAX_WHOLE_ROUNDS, whole_rounds - 1)
    if rounds < MIN_WHOLE_ROUNDS:
        return None
    return pipeline.with_microbatches(rounds * stages + rest)


class PeriodicPipeline:
    """A pipeline whose optima, split in the middle, stand for those of longer ones.

    Attributes:
        in_phases: whether kinds of operations do not take turns, so that a round has no one place
            in time.
    """

    def __init__(self, pipeline: Pipeline, network: Network) -> None:
        self._pipeline = pipeline
        self._network = network
        self.in_phases = traits(pipeline.schedule).in_phases
        # Of each operation, (N,), and of each precedence, (E,).
        self._kind, self._microbatch = pipeline.kinds
        self._predecessor, self._successor = _Precedences.of(network)
        self._num_kinds = int(self._kind.max()) + 1
        self._round_length = _microbatches_per_round(pipeline)
        one_round_later = self._microbatch + self._round_length
        self._operation_one_round_later = self._operation_of(self._kind, one_round_later)
        self._arc_one_round_later = self._shifted_arcs()
        num_rounds = pipeline.num_microbatches // self._round_length
        self._middle_round = num_rounds // 2
        round_of_operation = self._microbatch // self._round_length
        distance_from_middle = np.abs(round_of_operation - self._middle_round)
        has_next_round = self._operation_one_round_later != MISSING
        is_in_middle = distance_from_middle == 0
        self._middle_operations = np.flatnonzero(is_in_middle & has_next_round)
        self._operations_near_middle = np.flatnonzero(distance_from_middle <= 1)

    def best_split(self, optimum: Optimum) -> PipelineSplit:
        """The split in the middle whose arcs differ least from those one round later."""
        if self.in_phases:
            return self._split_by_microbatch(optimum)
        best = self._best_split_in_time(optimum)
        if best is None:
            return self._split_by_microbatch(optimum)
        if best.num_differing > 0 and self._round_length > 1:
            return self._split_by_microbatch(optimum)
        first_microbatch = self._first_microbatch_from(best.moment_ns, optimum)
        return PipelineSplit(first_microbatch, best.period_ns, best.num_differing)

    def watch(self, trace: FrontierTrace, split: PipelineSplit) -> None:
        """Let a trace of this pipeline end where the arcs over a split lose their period."""
        first_microbatch = split.first_microbatch[self._kind]
        is_late_operation_event = self._microbatch[:, None] >= first_microbatch  # (N, 2)
        source_and_sink = [False, True]
        is_late = np.append(is_late_operation_event.ravel(), source_and_sink)  # (nodes,)
        begins_early = ~is_late[self._network.tail]
        ends_late = is_late[self._network.head]
        num_shifted = len(self._arc_one_round_later)
        is_crossing = (begins_early & ends_late)[:num_shifted]
        crossing = np.flatnonzero(is_crossing)
        shifted = self._arc_one_round_later[crossing]
        if (shifted == MISSING).any():
            trace.watch_nothing()
        else:
            trace.watch(crossing.astype(np.int32), shifted.astype(np.int32))

    def periodic_intervals(self, trace: FrontierTrace, until_ns: int) -> Iterator[PeriodicInterval]:
        """Extend a trace of this pipeline to a time; yield its periodic intervals, latest first."""
        step_ns = int((trace.start_time - trace.min_time) * _APERIODIC_STEP) + 1
        while trace.end_time > until_ns:
            split = self.best_split(trace.optimum_at(trace.end_time))
            if self._watch_if_periodic(trace, split):
                first_breakpoint = len(trace.periods()) - 1
                trace.extend(until_ns)
                periods_ns = trace.periods()[first_breakpoint:]
                if periods_ns[-1] == NO_PERIOD:  # there the period is lost
                    periods_ns = periods_ns[:-1]
                if len(periods_ns) > 1:
                    yield PeriodicInterval(split, first_breakpoint, periods_ns)
            else:
                trace.extend(max(trace.end_time - step_ns, until_ns))
                step_ns *= 2

    def num_inserted_rounds(self, num_microbatches: int) -> int:
        """Rounds that a pipeline of so many microbatches has more than this one."""
        return (num_microbatches - self._pipeline.num_microbatches) // self._round_length

    def period_ns(self, optimum: Optimum) -> int:
        """Time between the two rounds in the middle, ns."""
        if len(self._middle_operations) == 0:  # too short for two
            return int(optimum.times_ns[-1])
        later = self._operation_one_round_later[self._middle_operations]
        begin_ns = optimum.times_ns[begin_node(self._middle_operations)]
        later_begin_ns = optimum.times_ns[begin_node(later)]
        return int(np.median(later_begin_ns - begin_ns))

    def extended_time_ns(self, optimum: Optimum, num_microbatches: int) -> int:
        """Iteration time that an optimum means for a pipeline of so many microbatches, ns."""
        num_inserted = self.num_inserted_rounds(num_microbatches)
        end_ns = int(optimum.times_ns[-1])
        if num_inserted == 0:
            return end_ns
        return end_ns + num_inserted * self.period_ns(optimum)

    def extended_optimum(
        self,
        optimum: Optimum,
        long: Pipeline,
        long_network: Network,
        split: PipelineSplit | None = None,
    ) -> Optimum:
        """The optimum that one of this pipeline means for a longer one of the same schedule.

        Args:
            split: where rounds are put in; default: where it repeats best.
        """
        split = split or self.best_split(optimum)
        origin = self._map_from(long, long_network, split)
        return Optimum(
            times_ns=self._extended_times_ns(optimum, origin, split, long.num_microbatches),
            flow_10uw=self._extended_flow_10uw(optimum, origin),
        )

    def _extended_times_ns(
        self, optimum: Optimum, origin: LongToShort, split: PipelineSplit, num_microbatches: int
    ) -> NDArray[np.int64]:
        """Event times of the long pipeline, int64 (nodes,)."""
        begins = begin_node(origin.operation[:, _BEGIN])
        ends = end_node(origin.operation[:, _END])
        events = np.stack([begins, ends], axis=1)
        short_times_ns = optimum.times_ns[events]
        later_by_ns = split.period_ns * origin.rounds_later
        event_times_ns = short_times_ns + later_by_ns

        num_inserted = self.num_inserted_rounds(num_microbatches)
        inserted_ns = split.period_ns * num_inserted
        end_ns = int(optimum.times_ns[-1]) + inserted_ns
        source_and_sink = [0, end_ns]
        return np.append(event_times_ns.ravel(), source_and_sink)

    def _extended_flow_10uw(self, optimum: Optimum, origin: LongToShort) -> NDArray[np.int64]:
        """Flows on the arcs of the long pipeline, int64 (arcs,); 0 where none stands for one."""
        operations_end = len(self._kind)
        precedences_end = operations_end + len(self._predecessor)
        operation_flow, precedence_flow, boundary_flow = np.split(
            optimum.flow_10uw, [operations_end, precedences_end]
        )
        # The last entry is that of MISSING.
        operation_flow = np.append(operation_flow, 0)
        precedence_flow = np.append(precedence_flow, 0)
        long_operation_flow = operation_flow[origin.operation[:, _END]]
        long_precedence_flow = precedence_flow[origin.precedence]
        return np.concatenate([long_operation_flow, long_precedence_flow, boundary_flow])

    def extends_to(self, long: Pipeline, long_network: Network, split: PipelineSplit) -> bool:
        """Whether a longer pipeline consists of this one's arcs, as premise 1 wants it."""
        origin = self._map_from(long, long_network, split)
        if (origin.operation == MISSING).any() or (origin.precedence == MISSING).any():
            return False
        predecessor, successor = _Precedences.of(long_network)
        begin_later, end_later = origin.rounds_later[:, _BEGIN], origin.rounds_later[:, _END]
        rounds_within_operation = end_later - begin_later
        rounds_within_precedence = begin_later[successor] - end_later[predecessor]
        rounds_within_arc = np.append(rounds_within_operation, rounds_within_precedence)
        if rounds_within_arc.min() < 0 or rounds_within_arc.max() > 1:
            return False

        short_predecessor = self._predecessor[origin.precedence]
        short_lag_ns = self._pipeline.succ_lag_ns[origin.precedence]
        return (
            np.array_equal(short_predecessor, origin.precedence_tail)
            and np.array_equal(short_lag_ns, long.succ_lag_ns)
            and long_network.num_boundary_arcs == self._network.num_boundary_arcs
        )

    def _watch_if_periodic(self, trace: FrontierTrace, split: PipelineSplit) -> bool:
        """Watch a split if the optimum where the trace ends repeats at it; whether it does."""
        if split.num_differing == 0:
            self.watch(trace, split)
            if trace.periods()[-1] != NO_PERIOD:
                return True
        trace.watch_nothing()
        return False

    def _best_split_in_time(self, optimum: Optimum) -> _SplitInTime | None:
        """The earliest of the splits of fewest differing arcs; None where no arc has a period."""
        begins = begin_node(self._operations_near_middle)
        moments_ns = np.unique(optimum.times_ns[begins])
        arcs = self._arcs_between(int(moments_ns[0]), int(moments_ns[-1]), optimum)
        best: _SplitInTime | None = None
        for moment_ns in moments_ns.tolist():
            split = self._split_in_time(moment_ns, arcs)
            if split is None:
                continue
            if best is None or split.num_differing < best.num_differing:
                best = split
        return best

    def _shifted_arcs(self) -> Indices:
        """The arc that each operation and precedence is one round later, or MISSING."""
        operation = self._operation_one_round_later
        later_successor = operation[self._successor]
        predecessor_kind = self._kind[self._predecessor]
        precedence = self._precedence_of(later_successor, predecessor_kind)
        # Arcs of precedences come after those of operations.
        arc_of_precedence = precedence + len(operation)
        precedence_arc = np.where(precedence == MISSING, MISSING, arc_of_precedence)
        return np.concatenate([operation, precedence_arc])

    def _arcs_between(self, earliest_ns: int, latest_ns: int, optimum: Optimum) -> _ShiftedArcs:
        """Arcs that cross some moment from earliest_ns to latest_ns."""
        network, times_ns, flow_10uw = self._network, optimum.times_ns, optimum.flow_10uw
        num_shifted = len(self._arc_one_round_later)  # all but those of the source and the sink
        tail, head = network.tail[:num_shifted], network.head[:num_shifted]
        begins_by_then = times_ns[tail] < latest_ns
        ends_from_then = earliest_ns <= times_ns[head]
        arc = np.flatnonzero(begins_by_then & ends_from_then)
        shifted = self._arc_one_round_later[arc]
        exists = shifted != MISSING
        shifted = np.where(exists, shifted, 0)

        tail_ns, head_ns = times_ns[tail[arc]], times_ns[head[arc]]
        shifted_tail_ns = times_ns[tail[shifted]]
        first_option = network.costs.begin[network.curve[arc]]
        longest_ns = network.costs.duration_ns[first_option]
        flow, shifted_flow = flow_10uw[arc], flow_10uw[shifted]
        return _ShiftedArcs(
            tail_ns=tail_ns,
            head_ns=head_ns,
            shift_ns=shifted_tail_ns - tail_ns,
            has_flow=flow > 0,
            same_flow=exists & (flow == shifted_flow),
            slack_ns=head_ns - tail_ns - longest_ns,
        )

    def _split_in_time(self, moment_ns: int, arcs: _ShiftedArcs) -> _SplitInTime | None:
        """The split at a moment, with the median period of the arcs over it that carry flow."""
        begins_before = arcs.tail_ns < moment_ns
        ends_after = moment_ns <= arcs.head_ns
        crossing = np.flatnonzero(begins_before & ends_after)
        same_flow = arcs.same_flow[crossing]
        has_flow = arcs.has_flow[crossing]
        shift_ns = arcs.shift_ns[crossing]
        critical_shift_ns = shift_ns[same_flow & has_flow]
        if len(critical_shift_ns) == 0:
            return None
        middle = len(critical_shift_ns) // 2
        period_ns = int(np.partition(critical_shift_ns, middle)[middle])

        excess_ns = shift_ns - period_ns
        is_in_time = excess_ns == 0
        is_within_slack = ~has_flow & (excess_ns <= arcs.slack_ns[crossing])
        repeats = same_flow & (is_in_time | is_within_slack)
        num_differing = len(crossing) - int(repeats.sum())
        return _SplitInTime(moment_ns, period_ns, num_differing)

    def _first_microbatch_from(self, moment_ns: int, optimum: Optimum) -> Indices:
        """The first microbatch of each kind that begins, and ends, from a moment on, (kinds, 2)."""
        source_and_sink = 2
        early = np.flatnonzero(optimum.times_ns[:-source_and_sink] < moment_ns)
        operation = operation_of_node(early)
        begin_or_end = early - begin_node(operation)  # _BEGIN or _END
        next_microbatch = self._microbatch[operation] + 1
        first_microbatch = np.zeros((self._num_kinds, 2), np.int64)
        np.maximum.at(first_microbatch, (self._kind[operation], begin_or_end), next_microbatch)
        return first_microbatch

    def _split_by_microbatch(self, optimum: Optimum) -> PipelineSplit:
        """The split between two microbatches, at no one moment."""
        middle_microbatch = self._middle_round * self._round_length
        first_microbatch = np.full((self._num_kinds, 2), middle_microbatch)
        # As many as there are operations: nothing is proved of such a split.
        num_differing = len(self._kind)
        return PipelineSplit(first_microbatch, self.period_ns(optimum), num_differing)

    def _map_from(self, long: Pipeline, long_network: Network, split: PipelineSplit) -> LongToShort:
        """Which of this pipeline stands for what of a longer one that is split here."""
        num_inserted = self.num_inserted_rounds(long.num_microbatches)
        kind, microbatch = long.kinds
        microbatches_after_split = microbatch[:, None] - split.first_microbatch[kind]  # (N, 2)
        rounds_after_split = microbatches_after_split // self._round_length
        rounds_later = np.clip(rounds_after_split, 0, num_inserted)
        short_microbatch = microbatch[:, None] - rounds_later * self._round_length
        operation = self._operation_of(kind[:, None], short_microbatch)
        predecessor, successor = _Precedences.of(long_network)
        # A precedence is as many rounds later as its head.
        head = operation[successor, _BEGIN]
        head_rounds_later = rounds_later[successor, _BEGIN]
        tail_kind = kind[predecessor]
        tail_microbatch = microbatch[predecessor] - head_rounds_later * self._round_length
        return LongToShort(
            rounds_later=rounds_later,
            operation=operation,
            precedence=self._precedence_of(head, tail_kind),
            precedence_tail=self._operation_of(tail_kind, tail_microbatch),
        )

    def _operation_of(self, kind: Indices, microbatch: Indices) -> Indices:
        """The operation of a kind and a microbatch, or MISSING."""
        keys = kind * _KEY_BASE + microbatch
        keys_of_operations = self._kind * _KEY_BASE + self._microbatch
        return _index_in(keys_of_operations, keys)

    def _precedence_of(self, successor: Indices, predecessor_kind: Indices) -> Indices:
        """The precedence to an operation from one of a kind, or MISSING."""
        key_where_there_is_one = successor * _KEY_BASE + predecessor_kind
        keys = np.where(successor == MISSING, MISSING, key_where_there_is_one)
        kind_of_predecessor = self._kind[self._predecessor]
        keys_of_precedences = self._successor * _KEY_BASE + kind_of_predecessor
        return _index_in(keys_of_precedences, keys)


def _index_in(values: Indices, keys: Indices) -> Indices:
    """The index of each key in values, which are all different and not negative, or MISSING."""
    order = np.argsort(values)
    position = np.searchsorted(values, keys, sorter=order)
    # A key beyond all values finds MISSING, which is the last entry of both arrays.
    index = np.append(order, MISSING)[position]
    value = np.append(values, MISSING)[index]
    return np.where(value == keys, index, MISSING)


def _microbatches_per_round(pipeline: Pipeline) -> int:
    """Microbatches after which a pipeline's middle repeats."""
    return 1 if pipeline.num_chunks == 1 else pipeline.num_stages
