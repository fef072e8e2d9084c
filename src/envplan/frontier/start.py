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
        self._network = network
        self._short = _short_pipeline(pipeline)
        self._lock = Lock()
        self.coarser: Start | None = None
        if self._short is not None:
            short_network = build_network(self._short, profile, blocking_power_uw)
            self.coarser = Start(self._short, profile, blocking_power_uw, short_network)
        elif len(pipeline.operations) > _FEW_OPERATIONS // 2:
            coarse = network.coarse(_COARSER, _FEWEST_LEVELS)
            if coarse is not None:
                self.coarser = Start(pipeline, profile, blocking_power_uw, coarse)

    def at_flow(self, flow_uw: int) -> Trace:
        """A trace that stands where a ns is worth so much, at most what all waiting GPUs draw."""
        if self.coarser is not None:
            return self._repaired(self.coarser.at_flow(flow_uw).state()[1], flow_uw)
        trace, total = self._network.trace(), max(1, sum(self._powers))
        chains = _chain_flow(self._pipeline, self._powers, self._network)
        # In two factors: their product may be more than 64 bits hold.
        part = max(1, total // max(1, flow_uw))
        trace.start(chains // part, flow_uw, rough=True)
        return trace

    @property
    def can_begin_late(self) -> bool:
        """Whether walks may begin at a deadline: without a short pipeline that is half a walk."""
        short = self._short
        return (
            short is not None and 2 * self._pipeline.num_microbatches >= 3 * short.num_microbatches
        )

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
            assert self.coarser is not None
            flow = _repeated_flow(self._pipeline, self._short, self.coarser._network, flow)
        trace = self._network.trace()
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
        return flow, int(flow[self._network.tail == self._network.num_nodes - 2].sum()) - 1

    def _walked_over(self, time_ns: int, microbatches: int) -> Trace:
        """A trace walked over where so many microbatches take about so long, or from T_star."""
        if self.coarser is None:
            return self._walked
        more = microbatches - self._pipeline.num_microbatches
        for margin in _COARSE_MARGINS:
            near = self.coarser._flow_near(time_ns + int(margin * time_ns), microbatches)
            if near is None:
                trace = self.at_flow(sum(self._powers))
                trace.run(sum(self._powers), until=trace.max_time)
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
        trace = self.at_flow(sum(self._powers))
        trace.run(sum(self._powers))
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
            for m in (middle, middle + self._round_length)
        )
        between = int(np.median(events[second] - events[first]))
        return time_ns + between * more // self._round_length

    @property
    def _round_length(self) -> int:
        return _round_length(self._pipeline)


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


def _chain_flow(
    pipeline: Pipeline, blocking_power_uw: Sequence[int], network: Network
) -> NDArray[np.int64]:
    stage = np.array([op.stage for op in pipeline.operations], np.int32)
    power = np.array(blocking_power_uw, np.int64)[stage]
    count = len(stage)
    flow = np.zeros(len(network.tail), np.int64)
    flow[:count] = power
    edges = slice(count, count + len(pipeline.succ))
    before, after = network.tail[edges] // 2, network.head[edges] // 2
    flow[edges] = np.where(
        (stage[before] == stage[after]) & (after == before + 1), power[before], 0
    )
    return flow


def _repeated_flow(
    pipeline: Pipeline, short: Pipeline, short_network: Network, flow_of_short: NDArray[np.int64]
) -> NDArray[np.int64]:
    """The flow of a short pipeline, its middle as often as a long one has it."""
    short_flow = flow_of_short.tolist()
    first_edge = len(short.operations)
    flow_of = dict(zip(short.operations, short_flow[:first_edge], strict=True))
    edge_flow_of = {
        (short.operations[i], _kind(short.operations[j])): flow
        for (i, j), flow in zip(
            _edges(short), short_flow[first_edge : first_edge + len(short.succ)], strict=True
        )
    }
    standing_for = _Repetition(
        _round_length(pipeline), pipeline.num_microbatches, short.num_microbatches
    )
    images = [standing_for(op) for op in pipeline.operations]
    # DualPipeV splits the backwards at its ends only, so an image may not be there.
    flow = [flow_of.get(image, 0) for image in images]
    flow += [
        edge_flow_of.get((images[i], _kind(pipeline.operations[j])), 0) for i, j in _edges(pipeline)
    ]
    ends = len(short_network.tail) - first_edge - len(short.succ)
    flow += short_flow[len(short_flow) - ends :]
    return np.array(flow, np.int64)


class _Repetition:
    """Maps operations of a long pipeline to those of the short one that stand for them."""

    def __init__(self, round_length: int, long: int, short: int) -> None:
        self._round = round_length
        self._head = (short // round_length // 2) * round_length
        self._tail = long - (short - self._head - round_length)
        self._cut = long - short

    def __call__(self, op: Operation) -> Operation:
        m = op.microbatch
        if m >= self._tail:
            m -= self._cut
        elif m >= self._head:
            m = self._head + (m - self._head) % self._round
        return Operation(op.stage, op.instruction, m, op.chunk, op.profile_stage)


def _edges(pipeline: Pipeline) -> zip[tuple[int, int]]:
    before = np.repeat(np.arange(len(pipeline.operations)), np.diff(pipeline.succ_begin))
    return zip(before.tolist(), pipeline.succ.tolist(), strict=True)


def _kind(op: Operation) -> tuple[int, str, int]:
    return op.stage, op.instruction, op.chunk
