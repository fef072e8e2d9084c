"""Pipeline schedules: in which order each stage runs its forwards and backwards.

A generator takes (num_stages, num_microbatches, num_chunks), all at least 1, and returns for every
stage its operations in execution order. It refuses, with an InputError, the shapes it cannot
schedule. Data dependencies are not its business: they follow from the instructions (see graph.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

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


Generator = Callable[[int, int, int], list[list[Operation]]]

#: Every schedule by the name a user gives it. Add one with `@schedule("name")`.
SCHEDULES: dict[str, Generator] = {}


@dataclass(frozen=True, slots=True)
class Traits:
    """What has to be known of a schedule before it is generated.

    Attributes:
        chunks: model chunks per stage unless the user says otherwise.
        passes: operations of one microbatch on one model stage, at most.
    """

    chunks: int = 1
    passes: int = 2


_TRAITS: dict[str, Traits] = {}
_AnyGenerator = TypeVar("_AnyGenerator", bound=Generator)


def schedule(
    name: str, *, chunks: int = 1, passes: int = 2
) -> Callable[[_AnyGenerator], _AnyGenerator]:
    """Decorator that makes a generator known under `name`; the rest as in Traits."""

    def register(generator: _AnyGenerator) -> _AnyGenerator:
        SCHEDULES[name] = generator
        _TRAITS[name] = Traits(chunks, passes)
        return generator

    return register


def traits(name: str) -> Traits:
    """The traits of a schedule; the usual ones if there is no such schedule."""
    return _TRAITS.get(name, Traits())


@schedule("1f1b")
def one_forward_one_backward(
    num_stages: int, num_microbatches: int, num_chunks: int
) -> list[list[Operation]]:
    """1F1B, PipeDream-Flush (Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training",
    ICML 2021, section 2.2): stage s runs S - s - 1 forwards ahead, then alternates, then drains.

    Raises:
        InputError: more than one chunk.
    """
    _refuse_chunks("1f1b", num_chunks)
    blocks = [(microbatch, 0) for microbatch in range(num_microbatches)]
    return [
        _alternate(
            operations_of("forward", stage, num_stages, blocks),
            operations_of("backward", stage, num_stages, blocks),
            warmup=num_stages - stage - 1,
        )
        for stage in range(num_stages)
    ]


@schedule("gpipe")
def gpipe(num_stages: int, num_microbatches: int, num_chunks: int) -> list[list[Operation]]:
    """GPipe (Huang et al., NeurIPS 2019, section 2.3): all forwards, then all backwards.

    Backwards run from the first microbatch on, as in PyTorch's ScheduleGPipe; figure 2c of the
    paper draws them from the last.

    Raises:
        InputError: more than one chunk.
    """
    _refuse_chunks("gpipe", num_chunks)
    blocks = [(microbatch, 0) for microbatch in range(num_microbatches)]
    return [
        operations_of("forward", stage, num_stages, blocks)
        + operations_of("backward", stage, num_stages, blocks)
        for stage in range(num_stages)
    ]


@schedule("interleaved")
def interleaved(
    num_stages: int, num_microbatches: int, num_chunks: int, microbatch_group: int | None = None
) -> list[list[Operation]]:
    """Interleaved 1F1B in Megatron-LM's order (Narayanan et al., "Efficient Large-Scale Language
    Model Training on GPU Clusters", SC 2021, section 2.2.2), PyTorch's ScheduleInterleaved1F1B.

    Microbatches go in groups of G through chunk 0, then through chunk 1 and so on; backwards take
    the same groups through the chunks in reverse. Stage s runs 2 (S - s - 1) + (C - 1) G forwards
    ahead. G is S where that divides M, see group_length.

    Args:
        microbatch_group: G, Megatron's microbatch_group_size_per_vp_stage. The last group may have
            fewer, but at least S, or a stage would have to wait within it.

    Raises:
        InputError: the microbatches do not fill equal groups, or not those asked for.
    """
    if microbatch_group is None:
        length = group_length("interleaved", num_stages, num_microbatches, num_chunks)
    else:
        length = _checked_group(microbatch_group, num_stages, num_microbatches)
    down, up = through_chunks(num_microbatches, num_chunks, length)
    return [
        _alternate(
            operations_of("forward", stage, num_stages, down),
            operations_of("backward", stage, num_stages, up),
            warmup=2 * (num_stages - stage - 1) + (num_chunks - 1) * length,
        )
        for stage in range(num_stages)
    ]


@schedule("envpipe")
def envpipe(
    num_stages: int,
    num_microbatches: int,
    num_chunks: int,
    forwards_ahead: Sequence[int] = (),
) -> list[list[Operation]]:
    """EnvPipe's rescheduled 1F1B (Choi et al., "EnvPipe", USENIX ATC 2023): stage s
    runs forwards_ahead[s] forwards more before its first backward than 1F1B does.

    Args:
        forwards_ahead: for each stage, as most_forwards_ahead allows; none: 1F1B's own order.

    Raises:
        InputError: more than one chunk.
    """
    _refuse_chunks("envpipe", num_chunks)
    blocks = [(microbatch, 0) for microbatch in range(num_microbatches)]
    return [
        _alternate(
            operations_of("forward", stage, num_stages, blocks),
            operations_of("backward", stage, num_stages, blocks),
            warmup=num_stages - stage - 1 + ahead,
        )
        for stage, ahead in enumerate(forwards_ahead or [0] * num_stages)
    ]


@schedule("looped-bfs")
def looped_bfs(num_stages: int, num_microbatches: int, num_chunks: int) -> list[list[Operation]]:
    """Looped breadth-first (Lamy-Poirier, "Breadth-First Pipeline Parallelism", MLSys 2023,
    section 4), PyTorch's ScheduleLoopedBFS.

    Each stage runs all microbatches through one chunk before it turns to the next, and back through
    the chunks in reverse; backwards from the last microbatch on. Any shape will do; with one chunk
    this is GPipe with its backwards turned round.
    """
    microbatches, chunks = range(num_microbatches), range(num_chunks)
    down = [(m, chunk) for chunk in chunks for m in microbatches]
    up = [(m, chunk) for chunk in reversed(chunks) for m in reversed(microbatches)]
    return [
        operations_of("forward", stage, num_stages, down)
        + operations_of("backward", stage, num_stages, up)
        for stage in range(num_stages)
    ]


def most_forwards_ahead(num_stages: int, num_microbatches: int, stage: int) -> int:
    """How many forwards more than in 1F1B a stage can run before its first backward: M - (S - s).

    None on the last stage, whose first backward follows its first forward.
    """
    if stage == num_stages - 1:
        return 0
    return max(0, num_microbatches - (num_stages - stage))


def fitting_ahead(wanted: Sequence[int], num_microbatches: int) -> list[int]:
    """As many forwards ahead as wanted of each stage, or as many as it may run.

    At most M - (S - s), and never more than the stage before, unless that one is held back by this
    first limit: else the two would wait for each other.
    """
    ahead: list[int] = []
    limit = num_microbatches
    for stage, count in enumerate(wanted):
        most = most_forwards_ahead(len(wanted), num_microbatches, stage)
        ahead.append(min(count, most, limit))
        limit = ahead[-1] if ahead[-1] < most else num_microbatches
    return ahead


def operations_of(
    instruction: str, stage: int, num_stages: int, blocks: Iterable[tuple[int, int]]
) -> list[Operation]:
    """One stage's operations for each (microbatch, chunk), the chunks lying round and round."""
    return [
        Operation(stage, instruction, microbatch, chunk, chunk * num_stages + stage)
        for microbatch, chunk in blocks
    ]


def _alternate(
    forwards: list[Operation], backwards: list[Operation], warmup: int
) -> list[Operation]:
    steady = forwards[warmup:]
    order = forwards[:warmup]
    for forward, backward in zip(steady, backwards, strict=False):
        order += (forward, backward)
    return order + backwards[len(steady) :]


def _refuse_chunks(name: str, num_chunks: int) -> None:
    if num_chunks > 1:
        raise InputError(
            f"schedule {name} runs one model chunk per stage, not {num_chunks}; "
            "schedules interleaved, looped-bfs and interleaved-zb run several"
        )


def group_length(name: str, num_stages: int, num_microbatches: int, num_chunks: int) -> int:
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
    groups = max(1, num_microbatches // num_stages)
    if num_microbatches % groups:
        below, above = num_microbatches - 1, num_microbatches + 1
        while below % (below // num_stages):
            below -= 1
        while above % (above // num_stages):
            above += 1
        raise InputError(
            f"schedule {name} runs microbatches in equal groups, each at least as long as there "
            f"are stages: {num_microbatches} do not divide into {groups} such groups for "
            f"{num_stages} stages; nearest valid: {below} and {above}"
        )
    return num_microbatches // groups


def _checked_group(length: int, num_stages: int, num_microbatches: int) -> int:
    """Raises: InputError: Megatron refuses groups of that length."""
    last = num_microbatches % length
    if not num_stages <= length <= num_microbatches or 0 < last < num_stages:
        raise InputError(
            f"groups of {length} microbatches: a group, the last one of {num_microbatches} "
            f"microbatches included, must have at least as many as there are stages, {num_stages}"
        )
    return length


def through_chunks(
    num_microbatches: int, num_chunks: int, length: int
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(microbatch, chunk) in the order of the forwards and in that of the backwards.

    Groups of `length` microbatches go through all chunks before the next group starts; the last
    group has what is left.
    """
    ends = [*range(length, num_microbatches, length), num_microbatches]
    groups = [range(first, end) for first, end in zip([0, *ends], ends, strict=False)]
    chunks = range(num_chunks)
    down = [(m, chunk) for group in groups for chunk in chunks for m in group]
    up = [(m, chunk) for group in groups for chunk in reversed(chunks) for m in group]
    return down, up
