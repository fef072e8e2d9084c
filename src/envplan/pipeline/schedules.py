"""Pipeline schedules: in which order each stage runs its forwards and backwards.

A generator takes (num_stages, num_microbatches, num_chunks), all at least 1 and as many chunks as
its traits allow, and returns for every stage its operations in execution order. It refuses, with an
InputError, the shapes it cannot schedule. Data dependencies are not its business: they follow from
the instructions (see dependencies.py).

Some schedules split backwards in two: the gradient of the input, which the stage before waits for,
and the gradients of the weights, for which there is time and which fill bubbles.

In comments S is the number of stages, M that of microbatches, C that of chunks and s a stage.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from envplan.errors import InputError
from envplan.pipeline.operations import (
    AT_THE_END,
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    LOAD,
    Operation,
    Orders,
)

Generator = Callable[..., list[list[Operation]]]

#: Every schedule by the name a user gives it. Add one with `@schedule("name", description="...")`.
SCHEDULES: dict[str, Generator] = {}


@dataclass(frozen=True)
class Traits:
    """Facts about a schedule that are needed before it is generated.

    Attributes:
        chunks: model chunks per stage unless the user says otherwise.
        passes: operations of one microbatch on one model stage, at most.
        any_chunks: whether it runs any number of chunks, and not only `chunks`.
        is_periodic: whether its microbatches follow each other alike, and it is determined by
            their number alone. Frontiers of long pipelines are then found from short ones.
        in_phases: whether it runs all operations of one kind, then all of the next.
    """

    chunks: int = 1
    passes: int = 2
    any_chunks: bool = True
    is_periodic: bool = False
    in_phases: bool = False


_TRAITS: dict[str, Traits] = {}
_DESCRIPTIONS: dict[str, str] = {}


def schedule(
    name: str,
    *,
    description: str = "-",
    chunks: int = 1,
    passes: int = 2,
    any_chunks: bool = False,
    is_periodic: bool = False,
    in_phases: bool = False,
) -> Callable[[Generator], Generator]:
    """Make the decorated generator known as a schedule.

    Args:
        name: that a user gives.
        description: its order in words, and the paper it is from.
        chunks, passes, any_chunks, is_periodic, in_phases: as for Traits.
    """

    def register(generator: Generator) -> Generator:
        SCHEDULES[name] = generator
        _TRAITS[name] = Traits(chunks, passes, any_chunks, is_periodic, in_phases)
        _DESCRIPTIONS[name] = description
        return generator

    return register


def describe_schedules() -> dict[str, str]:
    """The order of each schedule in words, by its name."""
    return {name: _DESCRIPTIONS.get(name, "-") for name in SCHEDULES}


def schedules_of_any_chunks() -> list[str]:
    """The names of the schedules that run any number of chunks."""
    return [name for name, facts in _TRAITS.items() if facts.any_chunks]


def traits(name: str) -> Traits:
    """The traits of a schedule; the usual ones if there is no such schedule."""
    return _TRAITS.get(name, Traits())


@schedule(
    "1f1b",
    description='1F1B, PipeDream-Flush (Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN '
    'Training", ICML 2021, section 2.2): stage s runs S - s - 1 forwards ahead, then alternates, '
    "then drains.",
    is_periodic=True,
)
def one_forward_one_backward(
    num_stages: int, num_microbatches: int, num_chunks: int
) -> list[list[Operation]]:
    """1F1B: stage s runs S - s - 1 forwards ahead, then alternates, then drains."""
    passes = _through_chunks(num_microbatches)
    return _alternate(num_stages, passes, lambda stage: num_stages - stage - 1)


@schedule(
    "gpipe",
    description="GPipe (Huang et al., NeurIPS 2019, section 2.3): all forwards, then all "
    "backwards.",
    is_periodic=True,
    in_phases=True,
)
def gpipe(num_stages: int, num_microbatches: int, num_chunks: int) -> list[list[Operation]]:
    """GPipe: all forwards, then all backwards.

    Backwards run from the first microbatch on, as in PyTorch's ScheduleGPipe; figure 2c of the
    paper draws them from the last.
    """
    passes = _through_chunks(num_microbatches)
    return _alternate(num_stages, passes, lambda _: num_microbatches)


@schedule(
    "interleaved",
    description="Interleaved 1F1B in Megatron-LM's order (Narayanan et al., \"Efficient "
    "Large-Scale Language Model Training on GPU Clusters\", SC 2021, section 2.2.2), PyTorch's "
    "ScheduleInterleaved1F1B.",
    any_chunks=True,
    is_periodic=True,
)
def interleaved(
    num_stages: int, num_microbatches: int, num_chunks: int, microbatch_group: int | None = None
) -> list[list[Operation]]:
    """Interleaved 1F1B, in Megatron-LM's order.

    Microbatches go in groups of G through chunk 0, then through chunk 1 and so on; backwards take
    the same groups through the chunks in reverse. Stage s runs 2 (S - s - 1) + (C - 1) G forwards
    ahead. G is S where that divides M, see _group_length.

    Args:
        num_stages: S.
        num_microbatches: M.
        num_chunks: C.
        microbatch_group: G, Megatron's microbatch_group_size_per_vp_stage. The last group may have
            fewer, but at least S, or a stage would have to wait within it.

    Raises:
        InputError: the microbatches do not fill equal groups, or not those asked for.
    """
    if microbatch_group is None:
        length = _group_length("interleaved", num_stages, num_microbatches, num_chunks)
    else:
        length = microbatch_group
        _check_group(length, num_stages, num_microbatches)
    passes = _through_chunks(num_microbatches, num_chunks, length)
    ahead = (num_chunks - 1) * length
    return _alternate(num_stages, passes, lambda stage: 2 * (num_stages - stage - 1) + ahead)


@schedule(
    "envpipe",
    description='EnvPipe\'s rescheduled 1F1B (Choi et al., "EnvPipe", USENIX ATC 2023): stage s '
    "runs forwards_ahead[s] forwards more before its first backward than 1F1B does.",
)
def envpipe(
    num_stages: int, num_microbatches: int, num_chunks: int, forwards_ahead: Sequence[int] = ()
) -> list[list[Operation]]:
    """EnvPipe: stage s runs forwards_ahead[s] forwards more before its first backward than 1F1B.

    Args:
        num_stages: S.
        num_microbatches: M.
        num_chunks: 1.
        forwards_ahead: for each stage, as fitting_ahead allows; none: 1F1B's own order.
    """
    passes = _through_chunks(num_microbatches)
    more = forwards_ahead or [0] * num_stages
    return _alternate(num_stages, passes, lambda stage: num_stages - stage - 1 + more[stage])


@schedule(
    "looped-bfs",
    description='Looped breadth-first (Lamy-Poirier, "Breadth-First Pipeline Parallelism", MLSys '
    "2023, section 4), PyTorch's ScheduleLoopedBFS.",
    any_chunks=True,
    is_periodic=True,
    in_phases=True,
)
def looped_bfs(num_stages: int, num_microbatches: int, num_chunks: int) -> list[list[Operation]]:
    """Looped breadth-first: all microbatches through one chunk before the next.

    Each stage goes back through the chunks in reverse; backwards from the last microbatch on. Any
    shape will do; with one chunk this is GPipe with its backwards turned round.
    """
    forwards = _through_chunks(num_microbatches, num_chunks).forwards
    passes = _Passes(forwards, forwards[::-1])
    return _alternate(num_stages, passes, lambda _: len(forwards))


@schedule(
    "interleaved-zb",
    description="Interleaved zero bubble, PyTorch's ScheduleInterleavedZeroBubble: `interleaved` "
    "with the backwards split as in `zb-h1`.",
    any_chunks=True,
    passes=3,
    is_periodic=True,
)
def interleaved_zero_bubble(
    num_stages: int, num_microbatches: int, num_chunks: int
) -> list[list[Operation]]:
    """Interleaved zero bubble: `interleaved` with the backwards split as in `zb-h1`.

    Microbatches go through the chunks in groups of G as in `interleaved`, but stage s runs only
    (S - s - 1) + (C - 1) G forwards ahead.

    Raises:
        InputError: the microbatches do not fill equal groups.
    """
    length = _group_length("interleaved-zb", num_stages, num_microbatches, num_chunks)
    passes = _through_chunks(num_microbatches, num_chunks, length)
    ahead = (num_chunks - 1) * length
    return _alternate(
        num_stages, passes, lambda stage: num_stages - stage - 1 + ahead, split_backward=True
    )


@schedule(
    "zb-h1",
    description='ZB-H1 (Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2.1): '
    "1F1B whose stage s puts its weight gradients off by s microbatches.",
    passes=3,
    is_periodic=True,
)
def zb_h1(num_stages: int, num_microbatches: int, num_chunks: int) -> list[list[Operation]]:
    """ZB-H1: 1F1B whose stage s puts its weight gradients off by s microbatches.

    So every stage holds the activations of S microbatches at most, as the first one does in 1F1B,
    and the bubble is a third of 1F1B's where all three parts take equally long. PyTorch has no
    class of this name: the order is that of ScheduleInterleavedZeroBubble with one stage per rank
    ("ZB1P"), which refuses some numbers of microbatches above S where this takes any. The paper
    also has the optimizer step without a global synchronization; that is outside a schedule.
    """
    return interleaved_zero_bubble(num_stages, num_microbatches, num_chunks)


@schedule(
    "zb-v",
    description='ZB-V (Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 6), '
    "PyTorch's ScheduleZBVZeroBubble.",
    chunks=2,
    passes=3,
    is_periodic=True,
)
def zb_v(num_stages: int, num_microbatches: int, num_chunks: int) -> list[list[Operation]]:
    """ZB-V: the model goes down the stages and up again.

    Stage s has model stages s and 2 S - 1 - s, so the last stage has two neighbours. No bubbles at
    all where forward, input and weight gradients take equally long and there are at least 2 S - 1
    microbatches; with fewer, the order is that of 2 S - 1 without the ones that are not there.
    """
    scheduled = max(2 * num_stages - 1, num_microbatches)

    def phases(stage: int) -> list[_Phase]:
        to_turn = num_stages - stage  # stages from here to the turn of the V, this one included
        return [
            _Phase(2 * to_turn - 1, (_F0,)),
            _Phase(stage, (_F1, _F0)),
            _Phase(to_turn, (_F1, _I1, _W1)),
            _Phase(scheduled - num_stages - to_turn + 1, (_F0, _I0, _W0, _F1, _I1, _W1)),
            _Phase(to_turn - 1, (_I0, _W0, _F1, _I1, _W1)),
            _Phase(stage, (_I0, _I1)),
            _Phase(to_turn, (_I0, _W0)),
            _Phase(stage, (_W1,)),
            _Phase(stage, (_W0,)),
        ]

    return _through_v(num_stages, num_microbatches, phases)


@schedule(
    "dualpipe-v",
    description="DualPipeV, PyTorch's ScheduleDualPipeV, after DeepSeek's DualPipe (DeepSeek-V3 "
    "Technical Report, 2024, section 3.2.1) folded into the V of `zb-v`.",
    chunks=2,
    passes=3,
    is_periodic=True,
)
def dualpipe_v(num_stages: int, num_microbatches: int, num_chunks: int) -> list[list[Operation]]:
    """DualPipeV: DualPipe folded into the V of `zb-v`.

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

    def phases(stage: int) -> list[_Phase]:
        below = num_stages - stage - 1
        # The chunks take turns; the first half of the backwards is whole, the rest is split.
        drain = [
            _Step(BACKWARD if k <= stage else BACKWARD_INPUT, 1 - k % 2)
            for k in range(2 * (stage + 1))
        ]
        return [
            _Phase(2 * below, (_F0,)),
            _Phase(stage + 1, (_F0, _F1)),
            _Phase(below, (_I1, _W1, _F1)),
            _Phase(num_microbatches - 2 * num_stages + stage + 1, (_F0, _B1, _F1, _B0)),
            _Phase(below, (_B1, _F1, _B0)),
            _Phase(1, tuple(drain)),
            _Phase(below, (_W, _I0)),
            _Phase(stage + 1, (_W,)),
        ]

    return _through_v(num_stages, num_microbatches, phases)


def with_extras(orders: Orders, extras: Mapping[str, Sequence[int]]) -> list[list[Operation]]:
    """A schedule's orders with extra operations in them.

    `load` comes before every forward of its model stages, once a microbatch; `all_reduce` or
    `reduce_scatter`, `optimizer` and then `all_gather` come once for each of their model stages,
    when its rank has done everything else.

    Args:
        orders: for each rank, its operations in execution order.
        extras: for each instruction the model stages that have it.
    """
    return [_with_loads(order, extras) + _at_the_end(order, extras) for order in orders]


def _with_loads(order: Sequence[Operation], extras: Mapping[str, Sequence[int]]) -> list[Operation]:
    loading = extras.get(LOAD, ())
    extended = []
    for op in order:
        if op.instruction == FORWARD and op.profile_stage in loading:
            extended.append(replace(op, instruction=LOAD))
        extended.append(op)
    return extended


def _at_the_end(order: Sequence[Operation], extras: Mapping[str, Sequence[int]]) -> list[Operation]:
    last_of_stage = {op.profile_stage: op for op in order}
    operations = []
    for instruction in AT_THE_END:
        for stage in sorted(last_of_stage.keys() & set(extras.get(instruction, ()))):
            last = last_of_stage[stage]
            operations.append(replace(last, instruction=instruction, microbatch=0))
    return operations


def fitting_ahead(wanted: Sequence[int], num_microbatches: int) -> list[int]:
    """Forwards ahead of 1F1B for each stage: as many as wanted, or as it may run.

    At most M - (S - s), and none on the last stage, whose first backward follows its first forward.
    Never more than the stage before, unless that one is held back by this first limit: else the two
    would wait for each other.
    """
    ahead: list[int] = []
    limit = num_microbatches
    for stage, count in enumerate(wanted):
        stages_behind = len(wanted) - stage - 1
        highest = max(0, num_microbatches - stages_behind - 1) if stages_behind else 0
        ahead.append(min(count, highest, limit))
        is_held_back = ahead[-1] == highest
        limit = num_microbatches if is_held_back else ahead[-1]
    return ahead


class _Block(NamedTuple):
    """A microbatch in a chunk."""

    microbatch: int
    chunk: int


class _Passes(NamedTuple):
    """All blocks in the order of their forwards, and in that of their backwards."""

    forwards: Sequence[_Block]
    backwards: Sequence[_Block]


def _through_chunks(
    num_microbatches: int, num_chunks: int = 1, group_length: int | None = None
) -> _Passes:
    """Passes in which groups of microbatches go through all chunks one after the other.

    Args:
        num_microbatches: of an iteration.
        num_chunks: of each stage.
        group_length: microbatches of a group; the last group has what is left. None: all.
    """
    length = group_length or num_microbatches
    forwards: list[_Block] = []
    backwards: list[_Block] = []
    for begin in range(0, num_microbatches, length):
        group = range(begin, min(begin + length, num_microbatches))
        for chunk in range(num_chunks):
            forwards += [_Block(microbatch, chunk) for microbatch in group]
        for chunk in reversed(range(num_chunks)):
            backwards += [_Block(microbatch, chunk) for microbatch in group]
    return _Passes(forwards, backwards)


def _alternate(
    num_stages: int,
    passes: _Passes,
    ahead: Callable[[int], int],
    *,
    split_backward: bool = False,
) -> list[list[Operation]]:
    """Stages that run some forwards ahead, then alternate, then run what is left.

    Args:
        num_stages: of the pipeline; the chunks lie round and round on them.
        passes: all forwards and all backwards in their order.
        ahead: how many forwards a stage runs ahead.
        split_backward: run backwards in two parts; stage s puts weights off by s backwards.
    """

    def operations(stage: int, instruction: str, blocks: Sequence[_Block]) -> list[Operation]:
        return [
            Operation(stage, instruction, microbatch, chunk, chunk * num_stages + stage)
            for microbatch, chunk in blocks
        ]

    orders = []
    for stage in range(num_stages):
        forwards = operations(stage, FORWARD, passes.forwards)
        backward = BACKWARD_INPUT if split_backward else BACKWARD
        backwards = operations(stage, backward, passes.backwards)
        weights = operations(stage, BACKWARD_WEIGHT, passes.backwards) if split_backward else []
        first_steady = ahead(stage)
        order = forwards[:first_steady]
        steady = forwards[first_steady:]
        for k, backward_op in enumerate(backwards):
            order += steady[k : k + 1]
            order.append(backward_op)
            if k >= stage:
                order += weights[k - stage : k - stage + 1]
        num_owed = min(stage, len(weights))
        orders.append(order + weights[len(weights) - num_owed :])
    return orders


def _check_group(length: int, num_stages: int, num_microbatches: int) -> None:
    """Refuse groups of microbatches in which a stage would have to wait."""
    fits = num_stages <= length <= num_microbatches
    if not fits or 0 < num_microbatches % length < num_stages:
        raise InputError(
            f"groups of {length} microbatches: a group, the last one of {num_microbatches} "
            f"microbatches included, must have at least as many as there are stages, {num_stages}"
        )


def _group_length(name: str, num_stages: int, num_microbatches: int, num_chunks: int) -> int:
    """The number of microbatches that go through a chunk before the next chunk has its turn.

    As in PyTorch's interleaved schedules: there are as many groups as S fits into M whole times,
    at least one, and they must be equally long. So every M up to 2 S - 1 will do, and of the larger
    ones the multiples of S and a few more. With one chunk groups make no difference: there is one
    of any length, where PyTorch refuses some.

    Raises:
        InputError: M cannot be divided so; says the nearest that can.
    """
    if num_chunks == 1:
        return num_microbatches

    def divides(microbatches: int) -> bool:
        return microbatches % max(1, microbatches // num_stages) == 0

    num_groups = max(1, num_microbatches // num_stages)
    if divides(num_microbatches):
        return num_microbatches // num_groups
    below = next(filter(divides, range(num_microbatches, 0, -1)))
    above = next(filter(divides, itertools.count(num_microbatches)))
    raise InputError(
        f"schedule {name} runs microbatches in equal groups, each at least as long as there "
        f"are stages: {num_microbatches} do not divide into {num_groups} such groups for "
        f"{num_stages} stages; nearest valid: {below} and {above}"
    )


class _Step(NamedTuple):
    """A computation of a stage of a V, on the next microbatch of a chunk.

    Attributes:
        instruction: what is computed.
        chunk: of the stage; None: the chunk whose weight gradients are owed longest.
    """

    instruction: str
    chunk: int | None


_F0: Final = _Step(FORWARD, 0)
_F1: Final = _Step(FORWARD, 1)
_B0: Final = _Step(BACKWARD, 0)
_B1: Final = _Step(BACKWARD, 1)
_I0: Final = _Step(BACKWARD_INPUT, 0)
_I1: Final = _Step(BACKWARD_INPUT, 1)
_W0: Final = _Step(BACKWARD_WEIGHT, 0)
_W1: Final = _Step(BACKWARD_WEIGHT, 1)
_W: Final = _Step(BACKWARD_WEIGHT, None)


class _Phase(NamedTuple):
    """Steps that a stage of a V repeats."""

    repetitions: int
    steps: tuple[_Step, ...]


def _through_v(
    num_stages: int, num_microbatches: int, phases: Callable[[int], Sequence[_Phase]]
) -> list[list[Operation]]:
    """The orders of the stages of a V, without microbatches from num_microbatches on.

    Args:
        num_stages: of the pipeline.
        num_microbatches: of an iteration; phases may run more.
        phases: of each stage.
    """
    orders = []
    for stage in range(num_stages):
        model_stages = (stage, 2 * num_stages - 1 - stage)
        orders.append(
            [
                Operation(stage, instruction, microbatch, chunk, model_stages[chunk])
                for instruction, (microbatch, chunk) in _run_phases(phases(stage))
                if microbatch < num_microbatches
            ]
        )
    return orders


def _run_phases(phases: Sequence[_Phase]) -> list[tuple[str, _Block]]:
    """Instructions and blocks of a stage in execution order.

    Each chunk takes its microbatches in turn, forwards and backwards alike, so a step says only
    which chunk. A weight gradient is that owed longest.
    """
    computed = []
    next_forward: Counter[int] = Counter()
    next_backward: Counter[int] = Counter()
    owed: list[_Block] = []
    for phase in phases:
        for instruction, chunk in phase.steps * phase.repetitions:
            if instruction == BACKWARD_WEIGHT:
                block = next(block for block in owed if chunk in (None, block.chunk))
                owed.remove(block)
            else:
                assert chunk is not None, "only weight gradients are of any chunk"
                turn = next_forward if instruction == FORWARD else next_backward
                block = _Block(turn[chunk], chunk)
                turn[chunk] += 1
                if instruction == BACKWARD_INPUT:
                    owed.append(block)
            computed.append((instruction, block))
    return computed
