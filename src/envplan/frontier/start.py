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

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from envplan.frontier.network import Network, build_network
from envplan.pipeline import Operation, Pipeline
from envplan.profile import Profile

if TYPE_CHECKING:
    from envplan._kernel import Trace

Flow = NDArray[np.int64]

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
# Of the pipeline that stands for a long one, in rounds. With four its middle is steady even near
# T_min, on all profiles that were tried, and the repair of the long one finds little to do. Near
# T_star fewer are enough, so for those four fewer stand.
_STEADY_ROUNDS: Final = (4.0, 2.5)
_FEWEST_ROUNDS: Final = 3  # the same where whole rounds repeat
_ROUNDS: Final = 4
# Every so many-th level is kept where curves are made coarse, as long as so many are left.
_COARSER: Final = 4
_FEWEST_LEVELS: Final = 5
# A start at a deadline begins a little later, by these parts of it, so that it is walked over. So
# does one at the time where something coarser is expected to be.
_MARGINS: Final = (1e-4, 1e-3, 2e-2)
_COARSE_MARGINS: Final = (4e-3, 2e-2)


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
        self._lock = Lock()
        self.coarser: Start | None = None
        coarse: Network | None = None
        if self._short is not None:
            coarse = build_network(self._short, profile, blocking_power_uw)
        elif len(pipeline.operations) > _FEW_OPERATIONS // 2:
            coarse = network.coarse(_COARSER, _FEWEST_LEVELS)
        if coarse is not None:
            self.coarser = Start(self._short or pipeline, profile, blocking_power_uw, coarse)

    def at_flow(self, flow_uw: int) -> Trace:
        """A trace that stands where a ns is worth so much, at most what all waiting GPUs draw."""
        if self.coarser is not None:
            return self._repaired(self.coarser.at_flow(flow_uw).state()[1], flow_uw)
        trace = self.network.trace()
        chains = _chain_flow(self._pipeline, self._powers, self.network)
        # In two factors: their product may be more than 64 bits hold.
        part = max(1, self.waiting_uw // max(1, flow_uw))
        trace.start(chains // part, flow_uw, rough=True)
        return trace

    @property
    def num_operations(self) -> int:
        """Of the pipeline."""
        return len(self._pipeline.operations)

    @property
    def can_begin_late(self) -> bool:
        """Whether walks may begin at a deadline: without a short pipeline that is half a walk."""
        few = self._short.num_microbatches if self._short is not None else math.inf
        return 2 * self._pipeline.num_microbatches >= 3 * few

    def at_time(self, deadline_ns: int) -> Trace | None:
        """A trace that stands a little later than a deadline between T_min and T_star; None where
        walking there from T_star is as good."""
        if not self.can_begin_late:
            return None
        assert self.coarser is not None
        with self._lock:  # what is coarser is walked to and fro
            for margin in _MARGINS:
                time_ns = deadline_ns + int(margin * deadline_ns)
                near = self.coarser._flow_near(time_ns, self._pipeline.num_microbatches)
                if near is None:
                    return None
                trace = self._repaired(*near)
                if trace.time >= deadline_ns:
                    return trace
        return None

    def _repaired(self, flow: Flow, flow_uw: int) -> Trace:
        """A trace at a flow value, from the coarser optimum there."""
        if self._short is not None:
            flow = _repeated_flow(self._pipeline, self._short, flow)
        trace = self.network.trace()
        trace.start(flow, flow_uw, rough=False)
        return trace

    def _flow_near(self, time_ns: int, microbatches: int) -> tuple[Flow, int] | None:
        """The optimal flow where this pipeline, with so many microbatches, would take about so
        long, and its value; None where that is beyond T_star."""
        more = microbatches - self._pipeline.num_microbatches
        walked = self._walked_over(time_ns, microbatches)
        times = walked.breakpoints()[0].tolist()  # the last comes first
        if self._taking(walked, times[0], more) < time_ns:
            return None
        low, high = 0, len(times)  # the first is late enough
        while high - low > 1:
            middle = (low + high) // 2
            late = self._taking(walked, times[middle], more) >= time_ns
            low, high = (middle, high) if late else (low, middle)
        _, flow = walked.state_at(times[low])
        # With a little less the optimum is at the upper end of a straight piece.
        return flow, int(flow[self.network.tail == self.network.num_nodes - 2].sum()) - 1

    def _walked_over(self, time_ns: int, microbatches: int) -> Trace:
        """A trace walked over where so many microbatches take about so long, or from T_star."""
        if self.coarser is None:
            return self._walked
        more = microbatches - self._pipeline.num_microbatches
        for margin in _COARSE_MARGINS:
            near = self.coarser._flow_near(time_ns + int(margin * time_ns), microbatches)
            if near is None:
                trace = self.at_flow(self.waiting_uw)
                trace.run(self.waiting_uw, until=trace.max_time)
                break
            trace = self._repaired(*near)
            trace.run(until=trace.max_time)
            if self._taking(trace, trace.time, more) >= time_ns:
                break
        at = int(trace.breakpoints()[0][0])
        while (late := self._taking(trace, at, more) - time_ns) > 0 and at > trace.min_time:
            # A step as long as the rounds that are here have in what is too much.
            step = max(1, late * self._pipeline.num_microbatches // microbatches)
            at = max(at - step, trace.min_time)
            trace.go_on(at)
        return trace

    @cached_property
    def _walked(self) -> Trace:
        trace = self.at_flow(self.waiting_uw)
        trace.run(self.waiting_uw)
        return trace

    def _taking(self, walked: Trace, time_ns: int, more: int) -> int:
        """How long so many microbatches more take than at a point of this frontier, each as long
        after the one before as those in the middle are here."""
        if more == 0:
            return time_ns
        events, _ = walked.state_at(time_ns)
        middle = self._pipeline.num_microbatches // 2
        first, second = (
            [2 * i for i, op in enumerate(self._pipeline.operations) if op.microbatch == m]
            for m in (middle, middle + _round_length(self._pipeline))
        )
        between = int(np.median(events[second] - events[first]))
        return time_ns + between * more // _round_length(self._pipeline)


def _round_length(pipeline: Pipeline) -> int:
    """After how many microbatches a pipeline's middle repeats."""
    return 1 if pipeline.num_chunks == 1 else pipeline.num_stages


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


def _chain_flow(pipeline: Pipeline, blocking_power_uw: Sequence[int], network: Network) -> Flow:
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


def _repeated_flow(pipeline: Pipeline, short: Pipeline, flow_of_short: Flow) -> Flow:
    """The flow of a short pipeline, its middle as often as a long one has it."""
    length, more = _round_length(pipeline), pipeline.num_microbatches - short.num_microbatches
    first = short.num_microbatches // length // 2 * length
    last = first + length + more  # between them one round of the short one repeats

    def image(op: Operation) -> Operation:
        m = op.microbatch
        if m >= first:
            m = m - more if m >= last else first + (m - first) % length
        return replace(op, microbatch=m)

    def arcs(own: Pipeline, stands_for: Sequence[Operation]) -> list[object]:
        before = np.repeat(np.arange(len(own.operations)), np.diff(own.succ_begin))
        after = (own.operations[j] for j in own.succ.tolist())
        return [
            *stands_for,
            *(
                (stands_for[i], op.stage, op.instruction, op.chunk)
                for i, op in zip(before.tolist(), after, strict=True)
            ),
        ]

    flows, known = flow_of_short.tolist(), arcs(short, short.operations)
    flow_of = dict(zip(known, flows[: len(known)], strict=True))
    # DualPipeV splits the backwards at its ends only, so an image may not be there.
    wanted = arcs(pipeline, [image(op) for op in pipeline.operations])
    return np.array([flow_of.get(arc, 0) for arc in wanted] + flows[len(known) :], np.int64)
