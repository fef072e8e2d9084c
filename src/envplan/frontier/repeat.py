"""Optima of long pipelines from those of short ones, whose middle rounds repeat.

Away from the ends of a pipeline an optimum repeats from one microbatch to the next, or from round
to round where stages have chunks. So a short pipeline is cut at a moment in its middle, and what
comes next, up to the same place one round later, is put in as many times as the long one has more
rounds. Where the short one's cuts before and after that round are the same but for the time in
between, every arc of the long one has the flow and the duration of an arc of the short one and
every event the same flows around it: complementary slackness holds in the long one as it does in
the short one.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from envplan.frontier.network import Network
from envplan.pipeline import Pipeline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from envplan._kernel import Trace

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
# While operations and rounds (of one microbatch per stage) are this few, no short one is made.
_FEW_OPERATIONS: Final = 512
_FEW_ROUNDS: Final = 12
# Of the pipeline that stands for a long one, in rounds. With four its middle is steady even near
# T_min, on all profiles that were tried. Near T_star fewer are enough, so for those four fewer
# stand.
_STEADY_ROUNDS: Final = (4.0, 2.5)
_FEWEST_ROUNDS: Final = 3  # the same where whole rounds repeat
_ROUNDS: Final = 4
# Where the walk of a short one is not proved to repeat, it goes on as far as this part of the way
# to T_min before it is cut anew, and twice as far each time.
_UNPROVED_PART: Final = 1 / 256
_NO_PAIRS: Final = np.empty((0, 5), np.int32)


class Optimum(NamedTuple):
    """A point of a frontier: event times, ns, (nodes,), and flows, uW, (arcs,)."""

    times: NDArray[np.int64]
    flow: NDArray[np.int64]


class Cut(NamedTuple):
    """Where a pipeline is cut.

    Attributes:
        first: (kinds, 2), of each kind's begins and ends the first microbatch after the cut.
        period_ns: from there to the same place a round later.
        differing: how many arcs over the cut are not as they are a round later.
    """

    first: NDArray[np.int64]
    period_ns: int
    differing: int


class Part(NamedTuple):
    """A part of a walk in which the arcs over a cut are as they are a round later, but for the time
    in between.

    Attributes:
        first: of its breakpoints.
        periods_ns: at each of its breakpoints, (n,).
    """

    cut: Cut
    first: int
    periods_ns: NDArray[np.int64]


def short_pipeline(pipeline: Pipeline) -> Pipeline | None:
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


class Repeated:
    """A pipeline whose optima stand for those of longer ones.

    Attributes:
        in_phases: whether kinds of operations do not take turns, so that a round has no one place
            in time.
    """

    def __init__(self, pipeline: Pipeline, network: Network) -> None:
        self._pipeline = pipeline
        self._network = network
        self._length = _round_length(pipeline)
        self.in_phases = pipeline.schedule in _IN_PHASES
        self._kind, self._microbatch = kind, microbatch = pipeline.kinds
        self._before, self._after = before, after = _edges(pipeline, network)
        later = self._operation(kind, microbatch + self._length)
        later_edge = self._edge(later[after], kind[before])
        # Of each arc but those of the source and the sink, which one it is a round later, or -1.
        self._later = np.concatenate([later, np.where(later_edge < 0, -1, later_edge + len(later))])
        rounds = microbatch // self._length
        self._middle = pipeline.num_microbatches // self._length // 2
        self._in_middle = np.flatnonzero((rounds == self._middle) & (later >= 0))
        self._around = np.flatnonzero(abs(rounds - self._middle) <= 1)

    def cut(self, optimum: Optimum) -> Cut:
        """The cut in the middle over which the least differs from a round later."""
        network, times = self._network, optimum.times
        moments = np.unique(times[2 * self._around])
        # Only these can be over a cut at one of these moments.
        tail, head = (ends[: len(self._later)] for ends in (network.tail, network.head))
        arcs = np.flatnonzero((times[tail] < moments[-1]) & (moments[0] <= times[head]))
        later = self._later[arcs]
        tail_ns, head_ns = times[tail[arcs]], times[head[arcs]]
        apart = times[network.tail[later]] - tail_ns
        flow = optimum.flow[arcs]
        same = (later >= 0) & (flow == optimum.flow[later])
        spare = head_ns - tail_ns - network.duration[network.curve_begin[network.curve[arcs]]]
        best: tuple[int, int, int] | None = None
        for at_ns in moments.tolist():
            over = np.flatnonzero((tail_ns < at_ns) & (at_ns <= head_ns))
            paced = over[same[over] & (flow[over] > 0)]
            if len(paced) == 0:
                continue
            period = int(np.partition(apart[paced], len(paced) // 2)[len(paced) // 2])
            late = apart[over] - period
            slack = (flow[over] == 0) & (late <= spare[over])
            alike = same[over] & ((late == 0) | slack)
            found = (len(over) - int(alike.sum()), at_ns, period)
            if best is None or found < best:
                best = found
        if best is None or self.in_phases or (self._length > 1 and best[0] > 0):
            # By microbatches, in no one place in time.
            first = np.full((self._kind.max() + 1, 2), self._middle * self._length)
            return Cut(first, self.period_ns(optimum), len(self._kind))
        first = np.zeros((self._kind.max() + 1, 2), np.int64)
        before = np.flatnonzero(times[: 2 * len(self._kind)] < best[1])
        event = self._kind[before // 2], before % 2
        np.maximum.at(first, event, self._microbatch[before // 2] + 1)
        return Cut(first, best[2], best[0])

    def pairs(self, cut: Cut) -> NDArray[np.int32]:
        """The arcs over a cut as the kernel watches them: (arcs, 5)."""
        begins, ends = (self._microbatch >= cut.first[self._kind, end] for end in (0, 1))
        after = np.append(np.stack([begins, ends], 1).ravel(), [False, True])
        tail, head = self._network.tail, self._network.head
        arcs = np.flatnonzero(~after[tail] & after[head])
        arcs = arcs[arcs < len(self._later)]
        later = self._later[arcs]
        if (later < 0).any():
            return _NO_PAIRS
        return np.stack([arcs, later, tail[arcs], tail[later], head[arcs]], 1).astype(np.int32)

    def proved(self, trace: Trace, until_ns: int) -> Iterator[Part]:
        """Walk a trace of this pipeline to a time; the parts that repeat, the latest first."""
        part = int((trace.time - trace.min_time) * _UNPROVED_PART) + 1
        while (now := int(trace.breakpoints()[0][-1])) > until_ns:
            cut, first = self.cut(Optimum(*trace.state_at(now))), len(trace.periods()) - 1
            trace.watch(self.pairs(cut) if cut.differing == 0 else _NO_PAIRS)
            if trace.periods()[-1] >= 0:
                trace.go_on(until_ns)
                periods = trace.periods()[first:]
                periods = periods[: len(periods) - (periods[-1] < 0)]
                if len(periods) > 1:
                    yield Part(cut, first, periods)
            else:
                trace.watch(_NO_PAIRS)
                trace.go_on(max(now - part, until_ns))
                part *= 2

    def rounds_more(self, microbatches: int) -> int:
        """How many rounds a pipeline of so many microbatches has more."""
        return (microbatches - self._pipeline.num_microbatches) // self._length

    def period_ns(self, optimum: Optimum) -> int:
        """How long after each other the rounds in the middle are, ns."""
        if len(self._in_middle) == 0:  # too short for two
            return int(optimum.times[-1])
        apart = optimum.times[2 * self._later[self._in_middle]] - optimum.times[2 * self._in_middle]
        return int(np.median(apart))

    def taking_ns(self, optimum: Optimum, microbatches: int) -> int:
        """How long so many microbatches take as this optimum has them, ns."""
        more = self.rounds_more(microbatches)
        return int(optimum.times[-1]) + (self.period_ns(optimum) * more if more else 0)

    def image(
        self, optimum: Optimum, long: Pipeline, network: Network, cut: Cut | None = None
    ) -> Optimum:
        """The guess that an optimum makes for a longer pipeline of the same schedule.

        Args:
            cut: where rounds are put in; default: where it repeats best.
        """
        cut = cut or self.cut(optimum)
        later, here, edge, _ = self._origins(cut, long, network)
        flows = np.split(optimum.flow, [len(self._kind), len(self._kind) + len(self._before)])
        flow = [np.append(flows[0], 0)[here[:, 1]], np.append(flows[1], 0)[edge], flows[2]]
        ends = optimum.times[2 * here + [0, 1]] + cut.period_ns * later
        last = int(optimum.times[-1]) + cut.period_ns * self.rounds_more(long.num_microbatches)
        return Optimum(np.append(ends.ravel(), [0, last]), np.concatenate(flow))

    def fits(self, cut: Cut, long: Pipeline, network: Network) -> bool:
        """Whether each arc of a longer pipeline is one of this, as many rounds later as its ends
        are, or is over a joint of two rounds."""
        later, here, edge, before = self._origins(cut, long, network)
        if (here < 0).any() or (edge < 0).any():
            return False
        first, second = _edges(long, network)
        joints = np.append(later[:, 1] - later[:, 0], later[second, 0] - later[first, 1])
        return (
            bool(((joints == 0) | (joints == 1)).all())
            and np.array_equal(self._before[edge], before)
            and np.array_equal(self._pipeline.succ_lag_ns[edge], long.succ_lag_ns)
            and len(network.tail) - len(here) - len(edge)
            == len(self._network.tail) - len(self._kind) - len(self._before)
        )

    def _origins(
        self, cut: Cut, long: Pipeline, network: Network
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Of a longer pipeline's operations, how many rounds later than here each begins and ends,
        and which one here that is, (N, 2) both; of its precedences, which one here each is, (E,),
        and the operation before it here, (E,). -1 is what a short one lacks: DualPipeV splits
        backwards at its ends only."""
        more = self.rounds_more(long.num_microbatches)
        kind, microbatch = long.kinds
        later = np.clip((microbatch[:, None] - cut.first[kind]) // self._length, 0, more)
        here = self._operation(kind[:, None], microbatch[:, None] - later * self._length)
        before, after = _edges(long, network)
        edge = self._edge(here[after, 0], kind[before])
        then = microbatch[before] - later[after, 0] * self._length
        return later, here, edge, self._operation(kind[before], then)

    def _operation(
        self, kind: NDArray[np.int64], microbatch: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Which operation is of a kind and a microbatch, -1 where none is."""
        return _place(kind * 2**31 + microbatch, self._kind * 2**31 + self._microbatch)

    def _edge(self, after: NDArray[np.int64], kind: NDArray[np.int64]) -> NDArray[np.int64]:
        """Which precedence leads to an operation from one of a kind, -1 where none does."""
        own = self._after * 2**31 + self._kind[self._before]
        return _place(np.where(after < 0, -1, after * 2**31 + kind), own)


class Lifted:
    """A part of a long pipeline's frontier, which a short one's walk proves: as a trace that has
    walked it.

    Each of its breakpoints is one of the short pipeline's, as much later as the rounds that are put
    in take there, with the same slope below it.

    Args:
        short: the trace of the short pipeline.
        part: what of it repeats.
        rounds_more: that the long pipeline has.
        started: a trace of the long pipeline from an optimum of the short one and the cut: at a
            flow value, uW, or at a time, ns.

    Attributes:
        time: the latest, ns.
    """

    def __init__(
        self, short: Trace, part: Part, rounds_more: int, started: Callable[..., Trace]
    ) -> None:
        times, slopes, _ = short.breakpoints()
        own = slice(part.first, part.first + len(part.periods_ns))
        self._short, self._started = short, started
        self._short_ns, self._slopes = times[own], slopes[own]
        self._times = self._short_ns + rounds_more * part.periods_ns
        self.time = int(self._times[0])
        # Slopes say all of the costs but one.
        one = self._begun(self._short_ns[0], part.cut, value=int(self._slopes[0]))
        assert self._times[1] <= one.time <= self.time
        one.run(until=one.max_time)
        drops = (-np.diff(self._times)).tolist()
        saved = [s * t for s, t in zip(self._slopes.tolist(), drops, strict=False)]
        cost = one.breakpoints()[2][0] - int(self._slopes[0]) * (self.time - one.time)
        self._costs = list(accumulate(saved, initial=cost))

    def breakpoints(self) -> tuple[NDArray[np.int64], NDArray[np.int64], list[int]]:
        """As of a trace."""
        return self._times, self._slopes, self._costs

    def state_at(self, time_ns: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """As of a trace."""
        k = max(1, int(np.searchsorted(-self._times, -time_ns)))  # the breakpoint not after it
        ends = [int(times[j]) for times in (self._times, self._short_ns) for j in (k - 1, k)]
        late, early, short_late, short_early = ends
        past = (time_ns - early) * (short_late - short_early) // max(1, late - early)
        return self._begun(short_early + past, at=time_ns).state()

    def next(self) -> Trace:
        """A trace of the long pipeline that stands a little before the end of this."""
        return self._begun(self._short_ns[-1], value=int(self._slopes[-2]))

    def _begun(self, short_ns: int, cut: Cut | None = None, **where: int) -> Trace:
        """A trace of the long pipeline from the optimum of the short one at a time."""
        return self._started(Optimum(*self._short.state_at(int(short_ns))), cut, **where)


def _place(keys: NDArray[np.int64], among: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where each key is among others, which are all different; -1 where it is not."""
    order = np.argsort(among)
    at = np.append(order, -1)[np.searchsorted(among, keys, sorter=order)]
    return np.where(np.append(among, -1)[at] == keys, at, -1)


def _edges(pipeline: Pipeline, network: Network) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The operations before and after each precedence, (E,)."""
    count = len(pipeline.operations)
    ends = np.stack([network.tail, network.head])[:, count : count + len(pipeline.succ)] // 2
    before, after = ends.astype(np.int64)
    return before, after


def _round_length(pipeline: Pipeline) -> int:
    """After how many microbatches a pipeline's middle repeats."""
    return 1 if pipeline.num_chunks == 1 else pipeline.num_stages
