"""What an operation of a schedule waits for, and whether an order of operations can run at all.

A forward needs the forward of the model stage before. A backward, or the part of it that computes
the gradient of the input, needs its own forward and the same of the model stage after. The part
that computes the gradients of the weights needs the other part. Anything else needs nothing. Model
stages are numbered along the model, wherever they lie: profile_stage says which one an operation
belongs to, stage which rank runs it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn, TypeAlias

from envplan.errors import InputError
from envplan.pipeline.schedules import Operation

if TYPE_CHECKING:
    from envplan.pipeline.graph import Pipeline

FORWARD, BACKWARD = "forward", "backward"
BACKWARD_INPUT, BACKWARD_WEIGHT = "backward_input", "backward_weight"

# PyTorch's letters (torch.distributed.pipelining) for the instructions of every microbatch.
_LETTERS = {FORWARD: "F", BACKWARD: "B", BACKWARD_INPUT: "I", BACKWARD_WEIGHT: "W"}
_BACKWARDS = frozenset({BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT})
_MOST_NAMED = 8

Orders: TypeAlias = Sequence[Sequence[Operation]]
_Key: TypeAlias = tuple[str, int, int]  # instruction, microbatch, model stage


def short_name(op: Operation) -> str:
    """`2F3`, the forward of microbatch 3 on model stage 2; B, I and W are the backwards."""
    return f"{op.profile_stage}{_LETTERS.get(op.instruction, op.instruction)}{op.microbatch}"


def described(op: Operation) -> str:
    """The operation in an error message's words."""
    return _described((op.instruction, op.microbatch, op.profile_stage), op.stage)


def check_orders(
    orders: Orders, *, num_chunks: int | None = None, num_microbatches: int | None = None
) -> None:
    """Refuse orders of operations that cannot run to the end, or that leave an operation out.

    Every model stage must run the forward of every microbatch once, and its backward once: whole,
    or as its two parts. Only where no rank has a backward of any kind may they all be missing, as
    in inference. Other instructions may come and go.

    Args:
        orders: for each rank, its operations in execution order.
        num_chunks: if given, how many model stages each rank must have.
        num_microbatches: if given, how many there must be; default: as many as are mentioned.

    Raises:
        InputError: an operation is missing, there twice, on the wrong rank, or the ranks would
            wait for each other for ever; says which operation.
    """
    for rank, order in enumerate(orders):
        for op in order:
            if min(op.microbatch, op.chunk, op.profile_stage) < 0:
                raise InputError(f"{described(op)} has a negative number")
            if op.stage != rank:
                raise InputError(f"{described(op)} stands in the order of rank {rank}")
    try:
        rank_of = placement(orders)
    except MisplacedError as error:
        raise InputError(f"{described(orders[error.rank][error.at])} {error.message}") from None
    for rank, found in sorted(Counter(rank_of).items()):
        if num_chunks is not None and found != num_chunks:
            raise InputError(f"rank {rank} runs {found} of the model stages, not {num_chunks}")
    present = {_key(op) for order in orders for op in order}
    _refuse_missing(present, rank_of, num_microbatches)
    _refuse_deadlock(orders, present, rank_of)


def transfers(
    operations: Sequence[Operation], latency: int | Sequence[int], in_turn: Sequence[int] = ()
) -> dict[tuple[int, int], int]:
    """The dependencies between ranks, as (from, to) by index into `operations` -> latency.

    Those within a rank are left to the order it runs in.

    Args:
        latency: of every transfer; or of those between rank r and r + 1, one for each pair. Between
            ranks that are no neighbours it then is the longest of these.
        in_turn: ranks that get a gradient only when the next rank has done its next backward, too.
    """
    index = {_key(op): i for i, op in enumerate(operations)}
    edges: dict[tuple[int, int], int] = {}
    for i, op in enumerate(operations):
        for key in _needs(op):
            source = index.get(key)
            if source is not None and operations[source].stage != op.stage:
                edges[source, i] = _latency(latency, operations[source].stage, op.stage)
        if op.stage in in_turn and op.instruction in (BACKWARD, BACKWARD_INPUT):
            source = index.get((op.instruction, op.microbatch + 1, op.profile_stage + 1))
            if source is not None:
                edges[source, i] = _latency(latency, op.stage + 1, op.stage)
    return edges


def _latency(latency: int | Sequence[int], rank: int, other: int) -> int:
    if isinstance(latency, int):
        return latency
    return latency[min(rank, other)] if abs(rank - other) == 1 else max(latency)


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


class MisplacedError(Exception):
    """An operation stands where it cannot: the `at`-th of a rank.

    Attributes:
        first: the rank and the place of the operation that it repeats, if it is that.
    """

    def __init__(
        self, rank: int, at: int, message: str, first: tuple[int, int] | None = None
    ) -> None:
        super().__init__(message)
        self.rank, self.at, self.message, self.first = rank, at, message, first


def placement(orders: Orders) -> list[int]:
    """The rank of each model stage.

    Raises:
        InputError: a rank has no operations, or a model stage is on no rank.
        MisplacedError: a model stage is on two ranks, or an operation is there twice.
    """
    rank_of: dict[int, int] = {}
    first: dict[_Key, tuple[int, int]] = {}
    for rank, order in enumerate(orders):
        if not order:
            raise InputError(f"rank {rank} has no operations")
        for at, op in enumerate(order):
            home = rank_of.setdefault(op.profile_stage, rank)
            if home != rank:
                twice = f"runs model stage {op.profile_stage} on rank {rank}, but rank {home} "
                raise MisplacedError(rank, at, twice + "runs it, too")
            earlier = first.setdefault(_key(op), (rank, at))
            if earlier != (rank, at):
                raise MisplacedError(rank, at, "is there twice", earlier)
    if not rank_of:
        raise InputError("there are no operations")
    last = max(rank_of)
    for stage in range(last):
        if stage not in rank_of:
            raise InputError(f"model stage {stage} is on no rank, but model stage {last} is")
    return [rank_of[stage] for stage in range(last + 1)]


def _refuse_missing(
    present: set[_Key], rank_of: Sequence[int], num_microbatches: int | None
) -> None:
    mentioned = {m for instruction, m, _ in present if instruction in _LETTERS}
    count = max(mentioned, default=-1) + 1 if num_microbatches is None else num_microbatches
    if max(mentioned, default=-1) >= count:
        raise InputError(
            f"microbatch {max(mentioned)} is mentioned, but there are only {count}, from 0 on"
        )
    if len(mentioned) < count:  # which may be a number far beyond all operations there are
        absent = next(m for m in range(count) if m not in mentioned)
        raise InputError(
            f"the order misses an operation: {_described((FORWARD, absent, 0), rank_of[0])}, and "
            "all others of that microbatch"
        )
    inference = all(instruction not in _BACKWARDS for instruction, _, _ in present)
    missing: list[str] = []
    for model_stage, rank in enumerate(rank_of):
        for m in range(count):
            wanted = [(FORWARD, m, model_stage)]
            if not inference:
                wanted += _wanted_backwards(m, model_stage, rank, present)
            missing += [_described(key, rank) for key in wanted if key not in present]
    if missing:
        more = f", and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise InputError(f"the order misses an operation: {', '.join(missing[:3])}{more}")


def _wanted_backwards(m: int, model_stage: int, rank: int, present: set[_Key]) -> list[_Key]:
    whole = (BACKWARD, m, model_stage)
    parts = [(BACKWARD_INPUT, m, model_stage), (BACKWARD_WEIGHT, m, model_stage)]
    if present.isdisjoint(parts):
        return [whole]
    if whole in present:
        raise InputError(f"{_described(whole, rank)} is there whole and in parts")
    return parts


def _refuse_deadlock(orders: Orders, present: set[_Key], rank_of: Sequence[int]) -> None:
    """Let each rank run as far as it can, again and again, until all are through or all wait."""
    done: set[_Key] = set()
    place = [0] * len(orders)
    waiting: dict[_Key, int] = {}  # what a rank waits for -> that rank
    ready = list(range(len(orders)))
    while ready:
        rank = ready.pop()
        order = orders[rank]
        while place[rank] < len(order):
            op = order[place[rank]]
            lacking = [key for key in _needs(op) if key in present and key not in done]
            if lacking:
                waiting[lacking[0]] = rank
                break
            done.add(_key(op))
            place[rank] += 1
            if _key(op) in waiting:
                ready.append(waiting.pop(_key(op)))
    if waiting:
        heads = {
            rank: order[at]
            for rank, (order, at) in enumerate(zip(orders, place, strict=True))
            if at < len(order)
        }
        _raise_deadlock(heads, present - done, rank_of)


def _raise_deadlock(
    heads: dict[int, Operation], ahead: set[_Key], rank_of: Sequence[int]
) -> NoReturn:
    """Each rank that is stuck waits for another such, or itself: following them closes a circle.

    Args:
        heads: for each such rank, the operation it cannot start.
        ahead: what has not run yet.
    """
    needed = {rank: next(key for key in _needs(op) if key in ahead) for rank, op in heads.items()}
    rank = min(heads)
    visited: list[int] = []
    while rank not in visited:
        visited.append(rank)
        rank = rank_of[needed[rank][2]]
    circle = visited[visited.index(rank) :]
    waits = [
        f"{described(heads[r])} waits for {_described(needed[r], rank_of[needed[r][2]])}"
        for r in circle[:_MOST_NAMED]
    ]
    if len(circle) == 1:
        raise InputError(f"the order deadlocks: {waits[0]}, which comes later on the same rank")
    if len(circle) > _MOST_NAMED:
        waits.append(f"and so on, {len(circle)} ranks in all")
    raise InputError(f"the order deadlocks: {'; '.join(waits)}")


def starts_without_lags(pipeline: Pipeline, time: Sequence[int]) -> list[int]:
    """The earliest start of each operation if transfers take no time, (N).

    Args:
        time: how long each operation takes, in any unit, (N).
    """
    start = [0] * len(time)
    for i in pipeline.order.tolist():
        for j in pipeline.succ[pipeline.succ_begin[i] : pipeline.succ_begin[i + 1]].tolist():
            start[j] = max(start[j], start[i] + time[i])
    return start
