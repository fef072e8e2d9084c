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
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from envplan.frontier.network import Network, build_network
from envplan.frontier.repeat import Cut, Lifted, Optimum, Repeated, short_pipeline
from envplan.pipeline import Pipeline
from envplan.profile import Profile

if TYPE_CHECKING:
    from envplan._kernel import Trace

_FEWEST_OPERATIONS: Final = 256  # for which curves are made coarse
# Every so many-th level is kept where curves are made coarse, as long as so many are left.
_EVERY: Final = 4
_FEWEST_LEVELS: Final = 5
# A trace is near enough to a deadline at so large a part of it, and what is coarser at so many
# times as much.
_CLOSE: Final = 5e-4
_COARSER: Final = 2
# A pipeline so many times as long takes its frontier from the short one's, in parts of at least
# this of its breakpoints.
_MUCH_LONGER: Final = 4
_LEAST_PART: Final = 0.05
HALVES: Final = 2
_HALF_THE_WORK: Final = 0.15  # from T_min: work lies denser there
_FARTHER: Final = 1.1  # than what is too early says, so that one jump is enough


class Start:
    """Exact optima of one pipeline's network, wherever a walk is to start.

    Attributes:
        pipeline, network: what is walked.
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
        self.pipeline = pipeline
        self._powers = blocking_power_uw
        self.network = network
        self.waiting_uw = sum(blocking_power_uw)
        self._short = short_pipeline(pipeline)
        self.coarser: Start | None = None
        coarse: Network | None = None
        if self._short is not None:
            coarse = build_network(self._short, profile, blocking_power_uw)
        elif len(pipeline.operations) > _FEWEST_OPERATIONS:
            coarse = network.coarse(_EVERY, _FEWEST_LEVELS)
        if coarse is not None:
            self.coarser = Start(self._short or pipeline, profile, blocking_power_uw, coarse)

    def at_flow(self, flow_uw: int) -> Trace:
        """A trace that stands where a ns is worth so much."""
        if self.coarser is None:
            trace = self.network.trace()
            trace.start(self._at_star.flow, self._at_star.times, value=flow_uw)
            return trace
        star = flow_uw == self.waiting_uw
        coarse = self.coarser._at_star if star else self.coarser.at_flow(flow_uw).state()
        return self._from(Optimum(*coarse), value=flow_uw)

    def at_time(self, time_ns: int) -> Trace | None:
        """A trace that stands at a time from T_min to T_star or a little later; None where walking
        there is quicker: nothing is coarser, or the short pipeline does not say when events are."""
        if self.coarser is None or (self._short is not None and self.coarser._repeated.in_phases):
            return None
        close_ns = int(_CLOSE * time_ns)
        trace = self._like(time_ns, self.pipeline.num_microbatches, close_ns)
        if not 0 <= trace.time - time_ns <= close_ns:
            times, flow = trace.state()
            trace.start(flow, times, at=time_ns)
        return trace

    def _like(self, asked_ns: int, microbatches: int, close_ns: int) -> Trace:
        """A trace that jumps to a time from what is coarser, where so many microbatches would take
        about as long as asked."""
        assert self.coarser is not None
        near = self.coarser._optimum_near(asked_ns, microbatches, close_ns)
        at = self.coarser._repeated.taking_ns(near, self.pipeline.num_microbatches)
        return self._from(near, at=at)

    def _from(
        self, coarse: Optimum, cut: Cut | None = None, *, value: int = -1, at: int = -1
    ) -> Trace:
        """A trace that jumps from an optimum of what is coarser to a flow value, or to a time."""
        assert self.coarser is not None
        trace, repeated, times = self.network.trace(), self.coarser._repeated, None
        if self._short is not None:
            coarse = repeated.image(coarse, self.pipeline, self.network, cut)
        if self._short is None or not repeated.in_phases:
            times = coarse.times
        trace.start(coarse.flow, times, value=value, at=at)
        return trace

    def proved(self, half: int) -> list[Lifted]:
        """The parts of one of HALVES of the frontier below T_star, the latest first, that the walk
        of a much shorter pipeline proves."""
        coarser, short = self.coarser, self._short
        if short is None or coarser is None or coarser._repeated.in_phases:
            return []
        if len(self.pipeline.operations) < _MUCH_LONGER * len(short.operations):
            return []
        trace = coarser.at_flow(self.waiting_uw)
        trace.run(self.waiting_uw, until=trace.max_time)
        least, star = trace.min_time, int(trace.breakpoints()[0][-1])
        # The halves are always the same, so that nothing depends on the number of cores.
        middle = until_ns = least + int((star - least) * _HALF_THE_WORK)
        if half > 0:
            begun, until_ns = coarser.at_time(middle), least
            if begun is None:
                return []
            trace = begun
            trace.run(until=trace.max_time)
        repeated = coarser._repeated
        parts = list(repeated.proved(trace, until_ns))
        fewest = _LEAST_PART * len(trace.periods())
        more = repeated.rounds_more(self.pipeline.num_microbatches)
        return [
            Lifted(trace, part, more, self._from)
            for part in parts
            if len(part.periods_ns) > fewest
            and repeated.fits(part.cut, self.pipeline, self.network)
        ]

    def _optimum_near(self, asked_ns: int, microbatches: int, close_ns: int) -> Optimum:
        """The optimum where this pipeline, with so many microbatches, would take so long, or about:
        within close_ns."""
        if self.coarser is None:
            trace = self.at_flow(self.waiting_uw)
        else:
            trace = self._like(asked_ns, microbatches, _COARSER * close_ns)

        def at(time_ns: int) -> tuple[Optimum, int]:
            """Where the trace was at a time, or is now (-1), and how much too late that is, ns."""
            there = Optimum(*(trace.state() if time_ns < 0 else trace.state_at(time_ns)))
            return there, self._repeated.taking_ns(there, microbatches) - asked_ns

        optimum, late = at(-1)
        growth = microbatches / self.pipeline.num_microbatches  # of what is late, with the time
        while late < -close_ns and trace.time < trace.max_time:
            later_ns = trace.time + 1 - int(_FARTHER * late / growth)
            trace.start(optimum.flow, optimum.times, at=later_ns)
            optimum, late = at(-1)
        low, high = trace.min_time - 1, trace.time
        trace.run(until=high)
        while abs(late) > close_ns and high > low + 1:
            middle = min(max(high - int(late / growth), low + 1), high - 1)
            trace.go_on(middle)
            lower, left = at(middle)
            growth = max(1.0, (late - left) / (high - middle))
            if left >= -close_ns:
                high, late, optimum = middle, left, lower
            else:
                low = middle
        return optimum

    @cached_property
    def _at_star(self) -> Optimum:
        if self.coarser is not None:
            return Optimum(*self.at_flow(self.waiting_uw).state())
        trace = self.network.trace()
        chains = _chain_flow(self.pipeline, self._powers, self.network)
        trace.start(chains, None, value=self.waiting_uw, rough=True)
        return Optimum(*trace.state())

    @cached_property
    def _repeated(self) -> Repeated:
        return Repeated(self.pipeline, self.network)


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
