"""Where the walk starts: a flow close to the optimum, for the kernel to repair.

At T_star the flow value is the power of all waiting GPUs. Any guess gives the exact same start;
only the repair takes longer. Two guesses are good ones:

- each stage's blocking power along its own chain of operations, which would be optimal if no stage
  ever waited for another;
- in a long pipeline, the optimum of the same pipeline with few microbatches: away from its ends the
  optimal flow repeats from round to round, so its middle round can stand for all further ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from envplan.frontier.network import Network, build_network
from envplan.pipeline import Operation, Pipeline
from envplan.profile import Profile

if TYPE_CHECKING:
    from envplan._kernel import Trace

# The repair of the chain guess grows with the square of the microbatches. While operations and
# rounds (of one microbatch per stage) are this few, it is quicker than solving a short pipeline
# first.
_FEW_OPERATIONS, _FEW_ROUNDS = 512, 12
# Schedules whose rounds follow each other alike, and that microbatches alone determine.
_REPEATING = (
    "1f1b",
    "gpipe",
    "interleaved",
    "looped-bfs",
    "interleaved-zb",
    "zb-h1",
    "zb-v",
    "dualpipe-v",
)
# Of the pipeline that stands for a long one. With fewer its middle is not steady enough to repeat.
_FEWEST_ROUNDS, _ROUNDS = 3, 4


def start_at_t_star(
    trace: Trace,
    pipeline: Pipeline,
    profile: Profile,
    blocking_power_uw: Sequence[int],
    network: Network,
    part: int = 1,
) -> None:
    """Move a trace that stands at T_max to T_star.

    Args:
        part: stop earlier, where going slower saves this part of the power of all waiting GPUs.
    """
    short = _short_pipeline(pipeline)
    if short is None:
        guess = _chain_flow(pipeline, blocking_power_uw, network)
    else:
        short_network = build_network(short, profile, blocking_power_uw)
        short_trace = short_network.trace()
        start_at_t_star(short_trace, short, profile, blocking_power_uw, short_network)
        guess = _repeated_flow(pipeline, short, short_network, short_trace.state()[1])
    trace.start(guess // part, sum(blocking_power_uw) // part, rough=short is None)


def state_at_deadline(
    pipeline: Pipeline,
    profile: Profile,
    blocking_power_uw: Sequence[int],
    network: Network,
    deadline_ns: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The optimum of one deadline between T_min and T_star, without the frontier in between.

    A short pipeline is walked from T_star to its deadline. A long one starts at the deadline, from
    the short one's flow repeated.

    Returns:
        Event times, (nodes,), ns, and flows, (arcs,), uW, as from a trace's state_at. A later
        deadline than T_star may give the optimum of T_star.
    """
    trace = network.trace()
    short = _short_pipeline(pipeline)
    if short is None:
        start_at_t_star(trace, pipeline, profile, blocking_power_uw, network)
        trace.run(sum(blocking_power_uw), until=deadline_ns)
        star_ns = int(trace.breakpoints()[0][0])
        return trace.state_at(min(deadline_ns, star_ns))
    short_network = build_network(short, profile, blocking_power_uw)
    short_deadline_ns = short_network.trace().min_time * deadline_ns // trace.min_time
    _, short_flow = state_at_deadline(
        short, profile, blocking_power_uw, short_network, short_deadline_ns
    )
    guess = _repeated_flow(pipeline, short, short_network, short_flow)
    limited = network.with_deadline(deadline_ns)
    total = int(limited.steepest_uw)
    spare = max(0, total - int(guess[network.tail == network.num_nodes - 2].sum()))
    trace = limited.trace()
    trace.start(np.append(guess, spare), total, rough=False)
    events, flows = trace.state()
    return events, flows[:-1]


def _short_pipeline(pipeline: Pipeline) -> Pipeline | None:
    """The pipeline whose optimum repeats in that of a long one, or None."""
    stages, microbatches = pipeline.num_stages, pipeline.num_microbatches
    rounds = min(_ROUNDS, microbatches // stages - 1)
    few = len(pipeline.operations) <= _FEW_OPERATIONS and microbatches <= _FEW_ROUNDS * stages
    if few or rounds < _FEWEST_ROUNDS or pipeline.schedule not in _REPEATING:
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
    """The flow of a short pipeline, its middle round as often as a long one has it."""
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
        pipeline.num_stages, pipeline.num_microbatches, short.num_microbatches
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
