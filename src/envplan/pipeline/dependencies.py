"""Data dependencies of a schedule's operations, and whether orders of operations are whole.

A forward needs the forward of the model stage before. A backward, or the part of it that computes
the gradient of the input, needs its own forward and the same of the model stage after. The part
that computes the gradients of the weights needs the other part. Anything else needs nothing. Model
stages are numbered along the model, wherever they lie: profile_stage says which one an operation
belongs to, stage which rank runs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from envplan.errors import InputError
from envplan.pipeline.operations import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    LETTERS,
    Operation,
    Orders,
    short_name,
)

#: Lags, ns, by the indices of two operations, the second of which waits for the first.
Edges: TypeAlias = dict[tuple[int, int], int]


#: Instruction, microbatch and model stage of an operation, wherever it runs.
_Key: TypeAlias = tuple[str, int, int]


@dataclass(frozen=True)
class Dag:
    """Operations and their dependencies.

    Attributes:
        ids: the name of each operation, (N).
        operations: grouped by stage, in execution order within a stage, (N).
        edges: dependencies beside that order.
    """

    ids: tuple[str, ...]
    operations: tuple[Operation, ...]
    edges: Edges


def describe_operation(op: Operation) -> str:
    """The operation in an error message's words."""
    return _in_words(_key(op), op.stage)


def _key(op: Operation) -> _Key:
    return op.instruction, op.microbatch, op.profile_stage


def _in_words(key: _Key, rank: int) -> str:
    instruction, microbatch, model_stage = key
    return f"{instruction} of microbatch {microbatch} on model stage {model_stage} (rank {rank})"


def check_orders(orders: Orders, num_microbatches: int | None = None) -> None:
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
            _check_numbers(op, rank)
    ranks = ranks_of_stages(orders)
    passes = [op for order in orders for op in order if op.instruction in LETTERS]
    present = set(map(_key, passes))
    count = max((op.microbatch + 1 for op in passes), default=0)
    if num_microbatches is not None and count > num_microbatches:
        raise InputError(
            f"microbatch {count - 1} is mentioned, but there are only {num_microbatches}, from 0 on"
        )
    is_training = any(op.instruction != FORWARD for op in passes)
    for microbatch in range(num_microbatches or count):
        for stage, rank in enumerate(ranks):
            _check_passes(present, microbatch, stage, rank, is_training=is_training)


def _check_numbers(op: Operation, rank: int) -> None:
    if min(op.microbatch, op.chunk, op.profile_stage) < 0:
        raise InputError(f"{describe_operation(op)} has a negative number")
    if op.stage != rank:
        raise InputError(f"{describe_operation(op)} stands in the order of rank {rank}")


def _check_passes(
    present: set[_Key], microbatch: int, stage: int, rank: int, *, is_training: bool
) -> None:
    """Refuse a microbatch that lacks a pass on a model stage, or has a backward twice."""
    whole = (BACKWARD, microbatch, stage)
    halves = [(BACKWARD_INPUT, microbatch, stage), (BACKWARD_WEIGHT, microbatch, stage)]
    needed = [(FORWARD, microbatch, stage)]
    if halves[0] in present or halves[1] in present:
        if whole in present:
            raise InputError(f"{_in_words(whole, rank)} is there whole and in parts")
        needed += halves
    elif is_training:
        needed.append(whole)
    for key in needed:
        if key not in present:
            raise InputError(f"the order misses an operation: {_in_words(key, rank)}")


def ranks_of_stages(orders: Orders) -> list[int]:
    """The rank that runs each model stage.

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
            stage, key = op.profile_stage, _key(op)
            if rank_of.setdefault(stage, rank) != rank:
                raise InputError(
                    f"{describe_operation(op)} runs model stage {stage} on rank {rank}, but rank "
                    f"{rank_of[stage]} runs it, too"
                )
            if key in seen:
                raise InputError(f"{describe_operation(op)} is there twice")
            seen.add(key)
    if not rank_of:
        raise InputError("there are no operations")
    highest = max(rank_of)
    for stage in range(highest):
        if stage not in rank_of:
            raise InputError(f"model stage {stage} is on no rank, but model stage {highest} is")
    return [rank_of[stage] for stage in range(highest + 1)]


def connect(orders: Orders, latency_ns: int | Sequence[int], in_turn: Sequence[int] = ()) -> Dag:
    """Connect the operations of all ranks by their data dependencies.

    Edges are dependencies beside the order of a rank: on operations of other ranks, and on those
    that come too late in the order of their own.

    Args:
        orders: for each rank, its operations in execution order.
        latency_ns: of every transfer; or of those between rank r and r + 1, one for each pair.
            Between ranks that are no neighbours it then is the longest of these.
        in_turn: ranks that get a gradient only when the next rank has done its next backward, too.
    """
    operations = tuple(op for order in orders for op in order)
    keys = list(map(_key, operations))
    index = {key: i for i, key in enumerate(keys)}
    edges: Edges = {}
    for i, (op, key) in enumerate(zip(operations, keys, strict=True)):
        for needed in _possible_needs(key, takes_turns=op.stage in in_turn):
            source = index.get(needed)
            if source is None:
                continue
            rank = operations[source].stage
            if rank != op.stage:
                edges[source, i] = _latency_between(rank, op.stage, latency_ns)
            elif source > i:
                edges[source, i] = 0
    return Dag(tuple(map(short_name, operations)), operations, dict(sorted(edges.items())))


def _possible_needs(key: _Key, *, takes_turns: bool) -> list[_Key]:
    """All that an operation may have to wait for; of a whole and a split backward, one is there."""
    instruction, microbatch, stage = key
    if instruction == FORWARD:
        return [(FORWARD, microbatch, stage - 1)]
    if instruction == BACKWARD_WEIGHT:
        return [(BACKWARD_INPUT, microbatch, stage)]
    if instruction not in (BACKWARD, BACKWARD_INPUT):
        return []
    needs = [
        (FORWARD, microbatch, stage),
        (BACKWARD, microbatch, stage + 1),
        (BACKWARD_INPUT, microbatch, stage + 1),
    ]
    if takes_turns:
        needs.append((instruction, microbatch + 1, stage + 1))
    return needs


def _latency_between(rank: int, other: int, latency_ns: int | Sequence[int]) -> int:
    """The latency of a transfer between two ranks, ns; see connect."""
    if isinstance(latency_ns, int):
        return latency_ns
    return latency_ns[min(rank, other)] if abs(rank - other) == 1 else max(latency_ns)
