"""Where walks start: optima at a flow value, from guesses for the kernel to repair.

At a point of the frontier the flow value is its slope; at T_star it is the power of all waiting
GPUs. Any guess gives the exact same optimum; only the repair takes longer. So an optimum is found
from that of something coarser, down to what can be walked:

- a long pipeline from one of few microbatches. Away from the ends of a pipeline the optimal flow
  repeats from one microbatch to the next, or from round to round where stages have chunks, so the
  short one's middle can stand for all that the long one has more. The repair is the proof: it
  leaves a flow as it is only where that keeps complementary slackness on the long pipeline.
- curves of many levels from curves of few (Ahuja, Magnanti and Orlin 1993, section 14.5, on convex
  costs by scaling);
- T_star from each stage's blocking power along its own chain of operations, which would be optimal
  if no stage ever waited for another.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from envplan.frontier.network import Network, build_network
from envplan.pipeline import Pipeline
from envplan.profile import Profile

if TYPE_CHECKING:
    from envplan._kernel import Trace

# The repair of the chain guess grows with the square of the microbatches. While operations and
# rounds (of one microbatch per stage) are this few, it is quicker than solving a short pipeline
# first.
_FEW_OPERATIONS: Final = 512
_FEW_ROUNDS: Final = 12
# Schedules whose microbatches follow each other alike, and that microbatches alone determine.
_REPEATING: Final = (
    "1f1b",
    "gpipe",
    "interleaved",
    "looped-bfs",
    "interleaved-zb",
    "zb-h1",
    "zb-v",
    "dualpipe-v",
)
_IN_PHASES: Final = ("gpipe", "looped-bfs")  # all of one kind, then all of the next
# Of the pipeline that stands for a long one, in rounds. With four its middle is steady even near
# T_min, on all profiles that were tried, and the repair of the long one finds little to do. Near
# T_star fewer are enough, so for those four fewer stand.
_STEADY_ROUNDS: Final = (4.0, 2.5)
_FEWEST_ROUNDS: Final = 3  # the same where whole rounds repeat
_ROUNDS: Final = 4
# Every so many-th level is kept where curves are made coarse, as long as so many are left.
_COARSER: Final = 4
_FEWEST_LEVELS: Final = 5
# A coarser optimum is near enough to a deadline at so large a part of it.
_CLOSE: Final = 5e-4
_FARTHER: Final = 1.1  # than what is too early says, so that one jump is enough


class _Optimum(NamedTuple):
    """Where a trace stands: flows, uW, (arcs,), and event times, ns, (nodes,)."""

    flow: NDArray[np.int64]
    times: NDArray[np.int64]

    @classmethod
    def of(cls, trace: Trace, time_ns: int | None = None) -> _Optimum:
        """Where a trace stands, or stood at a time."""
        times, flow = trace.state() if time_ns is None else trace.state_at(time_ns)
        return cls(flow, times)


class Start:
    """Exact optima of one pipeline's network, wherever a walk is to start.

    Attributes:
        network: of the pipeline.
        waiting_uw: what all waiting GPUs draw together.
        coarser: where guesses come from; None where a guess is made from nothing.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        profile: Profile,
        blocking_power_uw: Sequence[int],
        network: Network,
    ) -> None:
        self._pipeline = pipeline
        self._powers = blocking_power_uw
        self.network = network
        self.waiting_uw = sum(blocking_power_uw)
        self._short = _short_pipeline(pipeline)
        self.coarser: Start | None = None
        coarse: Network | None = None
        if self._short is not None:
            coarse = build_network(self._short, profile, blocking_power_uw)
        elif len(pipeline.operations) > _FEW_OPERATIONS // 2:
            coarse = network.coarse(_COARSER, _FEWEST_LEVELS)
        if coarse is not None:
            self.coarser = Start(self._short or pipeline, profile, blocking_power_uw, coarse)

    def at_flow(self, flow_uw: int) -> Trace:
        """A trace that stands where a ns is worth so much."""
        if self.coarser is not None:
            return self._from(_Optimum.of(self.coarser.at_flow(flow_uw)), flow_uw)
        trace = self.network.trace()
        chains = _chain_flow(self._pipeline, self._powers, self.network)
        trace.start(chains, None, value=self.waiting_uw, rough=True)
        if flow_uw != self.waiting_uw:
            trace.start(*_Optimum.of(trace), value=flow_uw)
        return trace

    @property
    def num_operations(self) -> int:
        """Of the pipeline."""
        return len(self._pipeline.operations)

    def at_time(self, time_ns: int) -> Trace | None:
        """A trace that stands at a time from T_min to T_star or a little later; None where nothing
        is coarser, as in small pipelines."""
        if self.coarser is None:
            return None
        near = self.coarser._optimum_near(time_ns, self._pipeline.num_microbatches)
        trace = self._from(near, self.coarser._value(near))
        if not 0 <= trace.time - time_ns <= _CLOSE * time_ns:
            trace.start(*_Optimum.of(trace), at=time_ns)
        return trace

    def _from(self, coarse: _Optimum, flow_uw: int) -> Trace:
        """A trace that jumps to a flow value from an optimum of what is coarser."""
        assert self.coarser is not None
        flow, times = coarse
        if self._short is not None:
            flow, times = self._image.of(coarse, self.coarser._period(coarse))
        trace = self.network.trace()
        # Where kinds of operations do not take turns, a round has no one place in time.
        in_phases = self._pipeline.schedule in _IN_PHASES and self._short is not None
        trace.start(flow, None if in_phases else times, value=flow_uw)
        return trace

    def _optimum_near(self, asked_ns: int, microbatches: int) -> _Optimum:
        """The optimum where this pipeline, with so many microbatches, would take about so long."""
        if self.coarser is None:
            trace = self.at_flow(self.waiting_uw)
        else:
            near = self.coarser._optimum_near(asked_ns, microbatches)
            trace = self._from(near, self.coarser._value(near))

        def at(time_ns: int | None = None) -> tuple[_Optimum, int]:
            """Where the trace stands, or stood at a time, and how much too late that is, ns."""
            there = _Optimum.of(trace, time_ns)
            return there, self._taking(there, microbatches) - asked_ns

        optimum, late = at()
        close = int(_CLOSE * asked_ns)
        growth = microbatches / self._pipeline.num_microbatches  # of what is late, with the time
        while late < -close and trace.time < trace.max_time:
            trace.start(*optimum, at=trace.time + 1 - int(_FARTHER * late / growth))
            optimum, late = at()
        low, high = trace.min_time - 1, trace.time
        trace.run(until=high)
        while abs(late) > close and high > low + 1:
            middle = min(max(high - int(late / growth), low + 1), high - 1)
            trace.go_on(middle)
            lower, left = at(middle)
            growth = max(1.0, (late - left) / (high - middle))
            if left >= -close:
                high, late, optimum = middle, left, lower
            else:
                low = middle
        return optimum

    def _value(self, optimum: _Optimum) -> int:
        """The value of a flow, or a little less: at the upper end of a straight piece."""
        out_of_source = self.network.tail == self.network.num_nodes - 2
        return max(0, int(optimum.flow[out_of_source].sum()) - 1)

    @cached_property
    def _image(self) -> _Image:
        assert self._short is not None
        return _Image(self._pipeline, self._short)

    @cached_property
    def _rounds(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """The begins of the operations in the middle, and of the same ones a round later."""
        kind, microbatch = _kinds(self._pipeline, {})
        first = _middle(self._pipeline)
        here, later = (
            np.flatnonzero(microbatch == m) for m in (first, first + _round_length(self._pipeline))
        )
        both = _found(kind[here], kind[later])
        return 2 * here[both >= 0], 2 * later[both[both >= 0]]

    def _period(self, optimum: _Optimum) -> int:
        """How long after each other the rounds in the middle are, ns."""
        here, later = self._rounds
        if len(later) == 0:  # too short for two
            return int(optimum.times[-1])
        return int(np.median(optimum.times[later] - optimum.times[here]))

    def _taking(self, optimum: _Optimum, microbatches: int) -> int:
        """How long so many microbatches take where those at hand have this optimum, and all more
        follow as those in the middle do."""
        more = (microbatches - self._pipeline.num_microbatches) // _round_length(self._pipeline)
        return int(optimum.times[-1]) + (self._period(optimum) * more if more else 0)


class _Image:
    """What of a short pipeline's network stands for each event and arc of a long one's: its middle
    round again and again, for as many rounds as the long one has more."""

    def __init__(self, long: Pipeline, short: Pipeline) -> None:
        length, more = _round_length(long), long.num_microbatches - short.num_microbatches
        known: dict[object, int] = {}
        kind, microbatch = _kinds(long, known)
        short_kind, short_microbatch = _kinds(short, known)
        self._later = np.clip((microbatch - _middle(short)) // length, 0, more // length)
        self._more = more // length
        of_short = short_kind * short.num_microbatches + short_microbatch
        own = kind * short.num_microbatches + microbatch - self._later * length
        # -1 is what a short one lacks: DualPipeV splits backwards at its ends only.
        self._operation = _found(own, of_short)
        # An edge is known by the operation before it and the kind of the one after.
        before = np.repeat(self._operation, np.diff(long.succ_begin)) * len(known)
        short_before = np.repeat(np.arange(len(of_short)), np.diff(short.succ_begin)) * len(known)
        self._edge = _found(before + kind[long.succ], short_before + short_kind[short.succ])
        self._short = len(of_short), len(short.succ)

    def of(self, optimum: _Optimum, period_ns: int) -> _Optimum:
        """The guess that an optimum of the short pipeline makes, whose rounds are so far apart."""
        ends = optimum.times[:-2].reshape(-1, 2)[self._operation] + period_ns * self._later[:, None]
        last = int(optimum.times[-1]) + period_ns * self._more
        operations, edges, others = np.split(optimum.flow, np.cumsum(self._short))
        flows = [np.append(operations, 0)[self._operation], np.append(edges, 0)[self._edge], others]
        return _Optimum(np.concatenate(flows), np.append(ends.ravel(), [0, last]))


def _kinds(
    pipeline: Pipeline, known: dict[object, int]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of each operation a number for all but its microbatch, and its microbatch, (N,)."""
    both = [
        (known.setdefault((op.stage, op.instruction, op.chunk), len(known)), op.microbatch)
        for op in pipeline.operations
    ]
    kind, microbatch = np.array(both, np.int64).T
    return kind, microbatch


def _found(keys: NDArray[np.int64], among: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where each key is among others, -1 where it is not."""
    order = np.argsort(among)
    at = np.searchsorted(among, keys, sorter=order)
    at = np.append(order, -1)[at]
    return np.where(np.append(among, -1)[at] == keys, at, -1)


def _round_length(pipeline: Pipeline) -> int:
    """After how many microbatches a pipeline's middle repeats."""
    return 1 if pipeline.num_chunks == 1 else pipeline.num_stages


def _middle(pipeline: Pipeline) -> int:
    """The first microbatch of the round in the middle of a pipeline."""
    length = _round_length(pipeline)
    return pipeline.num_microbatches // length // 2 * length


def _short_pipeline(pipeline: Pipeline) -> Pipeline | None:
    """The pipeline whose optimum repeats in that of a long one, or None."""
    stages, microbatches = pipeline.num_stages, pipeline.num_microbatches
    few = len(pipeline.operations) <= _FEW_OPERATIONS and microbatches <= _FEW_ROUNDS * stages
    if few or pipeline.schedule not in _REPEATING:
        return None
    if _round_length(pipeline) == 1:
        for rounds in _STEADY_ROUNDS:
            short = max(4, int(rounds * stages))
            if short + stages <= microbatches:
                return pipeline.with_microbatches(short)
        return None
    rounds = min(_ROUNDS, microbatches // stages - 1)
    if rounds < _FEWEST_ROUNDS:
        return None
    return pipeline.with_microbatches(rounds * stages + microbatches % stages)


def _chain_flow(
    pipeline: Pipeline, blocking_power_uw: Sequence[int], network: Network
) -> NDArray[np.int64]:
    """The flow if no stage ever waited for another: its blocking power along its own chain."""
    stage = np.repeat(np.arange(pipeline.num_stages), np.diff(pipeline.stage_begin))
    power = np.array(blocking_power_uw, np.int64)[stage]
    count = len(stage)
    flow = np.zeros(len(network.tail), np.int64)
    flow[:count] = power
    edges = slice(count, count + len(pipeline.succ))
    before, after = network.tail[edges] // 2, network.head[edges] // 2
    next_of_stage = (stage[before] == stage[after]) & (after == before + 1)
    flow[edges] = np.where(next_of_stage, power[before], 0)
    return flow
