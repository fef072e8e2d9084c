"""What an operation of a schedule waits for, and whether orders of operations are whole.

A forward needs the forward of the model stage before. A backward, or the part of it that computes
the gradient of the input, needs its own forward and the same of the model stage after. The part
that computes the gradients of the weights needs the other part. Anything else needs nothing. Model
stages are numbered along the model, wherever they lie: profile_stage says which one an operation
belongs to, stage which rank runs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from envplan.errors import InputError
from envplan.pipeline.schedules import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    LETTERS,
    Operation,
)

Edges: TypeAlias = dict[tuple[int, int], int]  # (from, to) by operation index -> lag in ns
_Orders: TypeAlias = Sequence[Sequence[Operation]]
_Key: TypeAlias = tuple[str, int, int]  # instruction, microbatch, model stage


class Dag(NamedTuple):
    """Operations and what they wait for.

    Attributes:
        ids: the name of each operation, (N).
        operations: grouped by stage, in execution order within a stage, (N).
        after: beside that order.
    """

    ids: tuple[str, ...]
    operations: tuple[Operation, ...]
    after: Edges


def short_name(op: Operation) -> str:
    """`2F3`, the forward of microbatch 3 on model stage 2; B, I and W are the backwards."""
    return f"{op.profile_stage}{LETTERS.get(op.instruction, op.instruction)}{op.microbatch}"


def describe_operation(op: Operation) -> str:
    """The operation in an error message's words."""
    return _described(_key(op), op.stage)


def check_orders(orders: _Orders, num_microbatches: int | None = None) -> None:
    """Refuse orders of operations that leave one out, have one twice or on the wrong rank.

    Every model stage must run the forward of every microbatch once, and its backward once: whole,
    or as its two parts. Only where no rank has a backward of any kind may they all be missing, as
    in inference. Other instructions may come and go.

    Args:
        orders: for each rank, its operations in execution order.
        num_microbatches: if given, how many there must be; default: as many as are mentioned.

    Raises:
        InputError: says which operation.
    """
    for rank, order in enumerate(orders):
        for op in order:
            if min(op.microbatch, op.chunk, op.profile_stage) < 0:
                raise InputError(f"{describe_operation(op)} has a negative number")
            if op.stage != rank:
                raise InputError(f"{describe_operation(op)} stands in the order of rank {rank}")
    rank_of = placement(orders)
    present = {_key(op) for order in orders for op in order if op.instruction in LETTERS}
    count = max((microbatch + 1 for _, microbatch, _ in present), default=0)
    if num_microbatches is not None and count > num_microbatches:
        raise InputError(
            f"microbatch {count - 1} is mentioned, but there are only {num_microbatches}, from 0 on"
        )
    training = any(instruction != FORWARD for instruction, *_ in present)
    for m in range(num_microbatches or count):
        for stage, rank in enumerate(rank_of):
            needed: tuple[str, ...] = (FORWARD, BACKWARD) if training else (FORWARD,)
            if (BACKWARD_INPUT, m, stage) in present or (BACKWARD_WEIGHT, m, stage) in present:
                needed = (FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
                if (BACKWARD, m, stage) in present:
                    whole = _described((BACKWARD, m, stage), rank)
                    raise InputError(f"{whole} is there whole and in parts")
            for name in needed:
                if (name, m, stage) not in present:
                    missing = _described((name, m, stage), rank)
                    raise InputError(f"the order misses an operation: {missing}")


def placement(orders: _Orders) -> list[int]:
    """The rank of each model stage.

    Raises:
        InputError: a rank has no operations, a model stage is on two ranks or on none, or an
            operation is there twice.
    """
    rank_of: dict[int, int] = {}
    seen: set[_Key] = set()
    for rank, order in enumerate(orders):
        if not order:
            raise InputError(f"rank {rank} has no operations")
        for op in order:
            stage = op.profile_stage
            if rank_of.setdefault(stage, rank) != rank:
                raise InputError(
                    f"{describe_operation(op)} runs model stage {stage} on rank {rank}, but rank "
                    f"{rank_of[stage]} runs it, too"
                )
            if _key(op) in seen:
                raise InputError(f"{describe_operation(op)} is there twice")
            seen.add(_key(op))
    if not rank_of:
        raise InputError("there are no operations")
    last = max(rank_of)
    for stage in range(last):
        if stage not in rank_of:
            raise InputError(f"model stage {stage} is on no rank, but model stage {last} is")
    return [rank_of[stage] for stage in range(last + 1)]


def connect(orders: _Orders, latency: int | Sequence[int], in_turn: Sequence[int] = ()) -> Dag:
    """The operations of all ranks, and what they wait for beside the order of their rank: that is
    operations of other ranks, and those that come too late in the order of their own.

    Args:
        latency: of every transfer, ns; or of those between rank r and r + 1, one for each pair.
            Between ranks that are no neighbours it then is the longest of these.
        in_turn: ranks that get a gradient only when the next rank has done its next backward, too.
    """

    def between(rank: int, other: int) -> int:
        if isinstance(latency, int):
            return latency
        return latency[min(rank, other)] if abs(rank - other) == 1 else max(latency)

    operations = tuple(op for order in orders for op in order)
    index = {_key(op): i for i, op in enumerate(operations)}
    edges: Edges = {}
    for i, op in enumerate(operations):
        needs = _needs(op)
        if op.stage in in_turn and op.instruction in (BACKWARD, BACKWARD_INPUT):
            needs += ((op.instruction, op.microbatch + 1, op.profile_stage + 1),)
        for source in (index[key] for key in needs if key in index):
            rank = operations[source].stage
            if rank != op.stage:
                edges[source, i] = between(rank, op.stage)
            elif source > i:
                edges[source, i] = 0
    return Dag(tuple(map(short_name, operations)), operations, dict(sorted(edges.items())))


def _key(op: Operation) -> _Key:
    return op.instruction, op.microbatch, op.profile_stage


def _needs(op: Operation) -> tuple[_Key, ...]:
    """All that an operation may have to wait for; of a whole and a split backward, one is there."""
    instruction, m, at = op.instruction, op.microbatch, op.profile_stage
    if instruction == FORWARD:
        return ((FORWARD, m, at - 1),)
    if instruction in (BACKWARD, BACKWARD_INPUT):
        return (FORWARD, m, at), (BACKWARD, m, at + 1), (BACKWARD_INPUT, m, at + 1)
    if instruction == BACKWARD_WEIGHT:
        return ((BACKWARD_INPUT, m, at),)
    return ()


def _described(key: _Key, rank: int) -> str:
    instruction, microbatch, model_stage = key
    return f"{instruction} of microbatch {microbatch} on model stage {model_stage} (rank {rank})"
