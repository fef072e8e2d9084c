"""Pipeline schedules: in which order each stage runs its forwards and backwards.

A generator takes (num_stages, num_microbatches, num_chunks), all at least 1 and as many chunks as
its traits allow, and returns for every stage its operations in execution order. It refuses, with an
InputError, the shapes it cannot schedule. Data dependencies are not its business: they follow from
the instructions (see dependencies.py).

Some schedules split backwards in two: the gradient of the input, which the stage before waits for,
and the gradients of the weights, for which there is time and which fill bubbles.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from envplan.errors import InputError


@dataclass(frozen=True, slots=True)
class Operation:
    """One instruction of one microbatch, running on one stage's GPUs.

    Attributes:
        stage: the pipeline rank that runs it, from 0.
        instruction: what is computed, such as `forward` or `backward`.
        microbatch: which microbatch, from 0.
        chunk: which of the stage's model chunks, from 0; 0 if it has only one.
        profile_stage: the stage of the profile that times it, which is the model stage, counted
            along the model. Equal to `stage` without chunks; with chunks, chunk * num_stages +
            stage in generated schedules, but 2 num_stages - 1 - stage for the second chunk of
            `zb-v` and `dualpipe-v`.
    """

    stage: int
    instruction: str
    microbatch: int
    chunk: int
    profile_stage: int


FORWARD, BACKWARD = "forward", "backward"
BACKWARD_INPUT, BACKWARD_WEIGHT = "backward_input", "backward_weight"
#: The instructions of every microbatch, with PyTorch's letters (torch.distributed.pipelining).
LETTERS = {FORWARD: "F", BACKWARD: "B", BACKWARD_INPUT: "I", BACKWARD_WEIGHT: "W"}

LOAD: Final = "load"
#: Once per model stage after its last backward, in this order.
_AT_THE_END: Final = ("all_reduce", "reduce_scatter", "optimizer", "all_gather")
#: What a schedule can be given besides its forwards and backwards. These operations share their
#: rank's GPU with the rest and run when nothing else does. Most take about the same time at any
#: clock, but not the same energy: rows at several clocks let a plan run them at a low one. One row
#: at 0 MHz makes a constant of them.
EXTRAS: Final = (LOAD, *_AT_THE_END)

Orders = list[list[Operation]]
Generator = Callable[..., Orders]
_Blocks = Sequence[tuple[int, int]]  # (microbatch, chunk)
_Phases = Sequence[tuple[int, str]]  # how often, and what

#: Every schedule by the name a user gives it. Add one with `@schedule("name")`.
SCHEDULES: dict[str, Generator] = {}


class Traits(NamedTuple):
    """What has to be known of a schedule before it is generated.

    Attributes:
        chunks: model chunks per stage unless the user says otherwise.
        passes: operations of one microbatch on one model stage, at most.
        any_chunks: whether it runs any number of chunks, and not only `chunks`.
    """

    chunks: int = 1
    passes: int = 2
    any_chunks: bool = True


_TRAITS: dict[str, Traits] = {}


def schedule(name: str, **known: Any) -> Callable[[Generator], Generator]:
    """Decorator that makes a generator known under `name`, with traits that differ from one chunk
    and two passes."""

    def register(generator: Generator) -> Generator:
        SCHEDULES[name] = generator
        _TRAITS[name] = Traits(**{"any_chunks": False} | known)
        return generator

    return register


def describe_schedules() -> dict[str, str]:
    """For each schedule its order in words: the first paragraph of its generator's docstring."""
    paragraphs = {
        name: (generate.__doc__ or "-").partition("\n\n")[0] for name, generate in SCHEDULES.items()
    }
    return {name: " ".join(paragraph.split()) for name, paragraph in paragraphs.items()}


def traits(name: str) -> Traits:
    """The traits of a schedule; the usual ones if there is no such schedule."""
    return _TRAITS.get(name, Traits())


@schedule("1f1b")
def one_forward_one_backward(num_stages: int, num_microbatches: int, num_chunks: int) -> Orders:
    """1F1B, PipeDream-Flush (Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training",
    ICML 2021, section 2.2): stage s runs S - s - 1 forwards ahead, then alternates, then drains.
    """
    down, up = _through_chunks(num_microbatches)
    return _in_turns(num_stages, down, up, lambda stage: num_stages - stage - 1)


@schedule("gpipe")
def gpipe(num_stages: int, num_microbatches: int, num_chunks: int) -> Orders:
    """GPipe (Huang et al., NeurIPS 2019, section 2.3): all forwards, then all backwards.

    Backwards run from the first microbatch on, as in PyTorch's ScheduleGPipe; figure 2c of the
    paper draws them from the last.
    """
    down, up = _through_chunks(num_microbatches)
    return _in_turns(num_stages, down, up, lambda _: num_microbatches)


@schedule("interleaved", any_chunks=True)
def interleaved(
    num_stages: int, num_microbatches: int, num_chunks: int, microbatch_group: int | None = None
) -> Orders:
    """Interleaved 1F1B in Megatron-LM's order (Narayanan et al., "Efficient Large-Scale Language
    Model Training on GPU Clusters", SC 2021, section 2.2.2), PyTorch's ScheduleInterleaved1F1B.

    Microbatches go in groups of G through chunk 0, then through chunk 1 and so on; backwards take
    the same groups through the chunks in reverse. Stage s runs 2 (S - s - 1) + (C - 1) G forwards
    ahead. G is S where that divides M, see _group_length.

    Args:
        microbatch_group: G, Megatron's microbatch_group_size_per_vp_stage. The last group may have
            fewer, but at least S, or a stage would have to wait within it.

    Raises:
        InputError: the microbatches do not fill equal groups, or not those asked for.
    """
    length = microbatch_group
    if length is None:
        length = _group_length("interleaved", num_stages, num_microbatches, num_chunks)
    elif not num_stages <= length <= num_microbatches or (
        0 < num_microbatches % length < num_stages
    ):
        raise InputError(
            f"groups of {length} microbatches: a group, the last one of {num_microbatches} "
            f"microbatches included, must have at least as many as there are stages, {num_stages}"
        )
    down, up = _through_chunks(num_microbatches, num_chunks, length)
    ahead = (num_chunks - 1) * length
    return _in_turns(num_stages, down, up, lambda stage: 2 * (num_stages - stage - 1) + ahead)


@schedule("envpipe")
def envpipe(
    num_stages: int, num_microbatches: int, num_chunks: int, forwards_ahead: Sequence[int] = ()
) -> Orders:
    """EnvPipe's rescheduled 1F1B (Choi et al., "EnvPipe", USENIX ATC 2023): stage s
    runs forwards_ahead[s] forwards more before its first backward than 1F1B does.

    Args:
        forwards_ahead: for each stage, as fitting_ahead allows; none: 1F1B's own order.
    """
    down, up = _through_chunks(num_microbatches)
    ahead = forwards_ahead or [0] * num_stages
    return _in_turns(num_stages, down, up, lambda stage: num_stages - stage - 1 + ahead[stage])


@schedule("looped-bfs", any_chunks=True)
def looped_bfs(num_stages: int, num_microbatches: int, num_chunks: int) -> Orders:
    """Looped breadth-first (Lamy-Poirier, "Breadth-First Pipeline Parallelism", MLSys 2023,
    section 4), PyTorch's ScheduleLoopedBFS.

    Each stage runs all microbatches through one chunk before it turns to the next, and back through
    the chunks in reverse; backwards from the last microbatch on. Any shape will do; with one chunk
    this is GPipe with its backwards turned round.
    """
    down, _ = _through_chunks(num_microbatches, num_chunks)
    return _in_turns(num_stages, down, down[::-1], lambda _: len(down))


@schedule("interleaved-zb", any_chunks=True, passes=3)
def interleaved_zero_bubble(num_stages: int, num_microbatches: int, num_chunks: int) -> Orders:
    """Interleaved zero bubble, PyTorch's ScheduleInterleavedZeroBubble: `interleaved` with the
    backwards split as in `zb-h1`.

    Microbatches go through the chunks in groups of G as in `interleaved`, but stage s runs only
    (S - s - 1) + (C - 1) G forwards ahead.

    Raises:
        InputError: the microbatches do not fill equal groups.
    """
    length = _group_length("interleaved-zb", num_stages, num_microbatches, num_chunks)
    down, up = _through_chunks(num_microbatches, num_chunks, length)
    ahead = (num_chunks - 1) * length
    return _in_turns(num_stages, down, up, lambda stage: num_stages - stage - 1 + ahead, split=True)


@schedule("zb-h1", passes=3)
def zb_h1(num_stages: int, num_microbatches: int, num_chunks: int) -> Orders:
    """ZB-H1 (Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2.1): 1F1B whose
    stage s puts its weight gradients off by s microbatches.

    So every stage holds the activations of S microbatches at most, as the first one does in 1F1B,
    and the bubble is a third of 1F1B's where all three parts take equally long. PyTorch has no
    class of this name: the order is that of ScheduleInterleavedZeroBubble with one stage per rank
    ("ZB1P"), which refuses some numbers of microbatches above S where this takes any. The paper
    also has the optimizer step without a global synchronization; that is outside a schedule.
    """
    return interleaved_zero_bubble(num_stages, num_microbatches, num_chunks)


@schedule("zb-v", chunks=2, passes=3)
def zb_v(num_stages: int, num_microbatches: int, num_chunks: int) -> Orders:
    """ZB-V (Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 6), PyTorch's
    ScheduleZBVZeroBubble.

    The model goes down the stages and up again: stage s has model stages s and 2 S - 1 - s, so the
    last stage has two neighbours. No bubbles at all where forward, input and weight gradients take
    equally long and there are at least 2 S - 1 microbatches; with fewer, the order is that of
    2 S - 1 without the ones that are not there.
    """
    whole = max(2 * num_stages - 1, num_microbatches)

    def phases(stage: int) -> _Phases:
        to_turn = num_stages - stage  # stages from here to the turn of the V, this one included
        return [
            (2 * to_turn - 1, "F0"),
            (stage, "F1 F0"),
            (to_turn, "F1 I1 W1"),
            (whole - num_stages - to_turn + 1, "F0 I0 W0 F1 I1 W1"),
            (to_turn - 1, "I0 W0 F1 I1 W1"),
            (stage, "I0 I1"),
            (to_turn, "I0 W0"),
            (stage, "W1"),
            (stage, "W0"),
        ]

    return _through_v(num_stages, num_microbatches, phases)


@schedule("dualpipe-v", chunks=2, passes=3)
def dualpipe_v(num_stages: int, num_microbatches: int, num_chunks: int) -> Orders:
    """DualPipeV, PyTorch's ScheduleDualPipeV, after DeepSeek's DualPipe (DeepSeek-V3 Technical
    Report, 2024, section 3.2.1) folded into the V of `zb-v`.

    Some backwards are whole, some are split. DualPipeV runs a forward and a backward at the same
    time where it can; here one GPU runs one operation after another, so the two of such a pair
    follow each other in PyTorch's order, forward first.

    Raises:
        InputError: fewer microbatches than model stages, 2 S.
    """
    if num_microbatches < 2 * num_stages:
        raise InputError(
            f"schedule dualpipe-v needs at least as many microbatches as model stages: "
            f"{2 * num_stages} for {num_stages} pipeline stages, not {num_microbatches}"
        )

    def phases(stage: int) -> _Phases:
        below = num_stages - stage - 1
        last = [f"{'B' if k <= stage else 'I'}{1 - k % 2}" for k in range(2 * (stage + 1))]
        return [
            (2 * below, "F0"),
            (stage + 1, "F0 F1"),
            (below, "I1 W1 F1"),
            (num_microbatches - 2 * num_stages + stage + 1, "F0 B1 F1 B0"),
            (below, "B1 F1 B0"),
            (1, " ".join(last)),
            (below, "W I0"),
            (stage + 1, "W"),
        ]

    return _through_v(num_stages, num_microbatches, phases)


def with_extras(orders: Orders, extras: Mapping[str, Sequence[int]]) -> Orders:
    """A schedule's orders with extra operations in them.

    `load` comes before every forward of its model stages, once a microbatch; `all_reduce` or
    `reduce_scatter`, `optimizer` and then `all_gather` come once for each of their model stages,
    when its rank has done everything else.

    Args:
        orders: for each rank, its operations in execution order.
    """
    extended = []
    for order in orders:
        listed: list[Operation] = []
        for op in order:
            if op.instruction == FORWARD and op.profile_stage in extras.get(LOAD, ()):
                listed.append(replace(op, instruction=LOAD))
            listed.append(op)
        last = {op.profile_stage: op for op in order}
        for name in _AT_THE_END:
            for stage in sorted(last.keys() & set(extras.get(name, ()))):
                listed.append(replace(last[stage], instruction=name, microbatch=0))
        extended.append(listed)
    return extended


def fitting_ahead(wanted: Sequence[int], num_microbatches: int) -> list[int]:
    """As many forwards more than in 1F1B as wanted of each stage, or as many as it may run.

    At most M - (S - s), and none on the last stage, whose first backward follows its first forward.
    Never more than the stage before, unless that one is held back by this first limit: else the two
    would wait for each other.
    """
    ahead: list[int] = []
    limit = num_microbatches
    for stage, count in enumerate(wanted):
        after = len(wanted) - stage - 1
        most = max(0, num_microbatches - after - 1) if after else 0
        ahead.append(min(count, most, limit))
        limit = ahead[-1] if ahead[-1] < most else num_microbatches
    return ahead


def _in_turns(
    num_stages: int,
    down: _Blocks,
    up: _Blocks,
    ahead: Callable[[int], int],
    *,
    split: bool = False,
) -> Orders:
    """Stages that run some forwards ahead, then a forward and a backward in turn, then the rest.

    Args:
        down, up: (microbatch, chunk) of all forwards and of all backwards, in their order. The
            chunks lie round and round on the stages.
        ahead: how many forwards a stage runs ahead.
        split: run backwards in two parts; stage s puts weights off by s backwards.
    """

    def operations(stage: int, instruction: str, blocks: _Blocks) -> list[Operation]:
        return [Operation(stage, instruction, m, c, c * num_stages + stage) for m, c in blocks]

    orders = []
    for stage in range(num_stages):
        forwards = operations(stage, FORWARD, down)
        backwards = operations(stage, BACKWARD_INPUT if split else BACKWARD, up)
        weights = operations(stage, BACKWARD_WEIGHT, up if split else ())
        order, steady = forwards[: ahead(stage)], forwards[ahead(stage) :]
        for k, backward in enumerate(backwards):
            order += (*steady[k : k + 1], backward)
            if k >= stage:
                order += weights[k - stage : k - stage + 1]
        orders.append(order + weights[max(0, len(weights) - stage) :])
    return orders


def _through_v(num_stages: int, num_microbatches: int, phases: Callable[[int], _Phases]) -> Orders:
    """What the stages of a V run, without microbatches from num_microbatches on.

    Each chunk takes its microbatches in turn, forwards and backwards alike, so a step says only
    which chunk.

    Args:
        phases: for each stage how often, and PyTorch's letters of the steps with their chunks: "F1
            I0 W0". W is the weight gradient owed longest, of its chunk or, without one, of any.
    """
    names = {letter: name for name, letter in LETTERS.items()}
    orders: Orders = []
    for stage in range(num_stages):
        orders.append([])
        done: Counter[str] = Counter()
        owed: list[tuple[int, int]] = []  # (chunk, microbatch)
        for step in (one for times, steps in phases(stage) for one in steps.split() * times):
            if step[0] == "W":
                chunk, microbatch = next(one for one in owed if step in ("W", f"W{one[0]}"))
                owed.remove((chunk, microbatch))
            else:
                way = step.replace("I", "B")
                chunk, microbatch = int(step[1]), done[way]
                done[way] += 1
                owed += [(chunk, microbatch)] * (step[0] == "I")
            model_stage = 2 * num_stages - 1 - stage if chunk else stage
            if microbatch < num_microbatches:
                op = Operation(stage, names[step[0]], microbatch, chunk, model_stage)
                orders[-1].append(op)
    return orders


def _group_length(name: str, num_stages: int, num_microbatches: int, num_chunks: int) -> int:
    """How many microbatches go through a chunk before the next chunk has its turn.

    As in PyTorch's interleaved schedules: there are as many groups as S fits into M whole times,
    at least one, and they must be equally long. So every M up to 2 S - 1 will do, and of the larger
    ones the multiples of S and a few more. With one chunk groups make no difference: there is one
    of any length, where PyTorch refuses some.

    Raises:
        InputError: M cannot be divided so; says the nearest that can.
    """
    if num_chunks == 1:
        return num_microbatches

    def divide(microbatches: int) -> bool:
        return microbatches % max(1, microbatches // num_stages) == 0

    groups = max(1, num_microbatches // num_stages)
    if divide(num_microbatches):
        return num_microbatches // groups
    below = next(filter(divide, range(num_microbatches, 0, -1)))
    above = next(filter(divide, itertools.count(num_microbatches)))
    raise InputError(
        f"schedule {name} runs microbatches in equal groups, each at least as long as there "
        f"are stages: {num_microbatches} do not divide into {groups} such groups for "
        f"{num_stages} stages; nearest valid: {below} and {above}"
    )


def _through_chunks(
    num_microbatches: int, num_chunks: int = 1, length: int | None = None
) -> tuple[_Blocks, _Blocks]:
    """(microbatch, chunk) in the order of the forwards and in that of the backwards.

    Groups of `length` microbatches go through all chunks before the next group starts; the last
    group has what is left. Default: one group.
    """
    length = length or num_microbatches
    starts = range(0, num_microbatches, length)
    groups = [range(first, min(first + length, num_microbatches)) for first in starts]
    chunks = range(num_chunks)
    down = [(m, chunk) for group in groups for chunk in chunks for m in group]
    up = [(m, chunk) for group in groups for chunk in reversed(chunks) for m in group]
    return down, up
