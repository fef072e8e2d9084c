"""What every import has in common: rows of what each rank runs, made into operations.

A reader finds the steps of model stages in what each rank runs, and says of each where it stands (a
Place). What else there is, it counts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Final, NamedTuple, TypeVar

from envplan._files import decoded, read_bounded
from envplan.errors import InputError
from envplan.pipeline.dependencies import Place, placement
from envplan.pipeline.formats import MAX_OPERATIONS, located
from envplan.pipeline.schedules import LETTERS, SCHEDULES, Generator, Operation, interleaved

MAX_FILE_BYTES: Final = 64 * 2**20
#: Microbatches and model stages beyond this are a slip, not a schedule.
MOST_DIGITS: Final = 7


class Step(NamedTuple):
    """One computation, before it is known which chunk of its rank it belongs to.

    Attributes:
        model_stage: in model order, from 0, over all ranks.
    """

    instruction: str
    microbatch: int
    model_stage: int


Read = TypeVar("Read")


@dataclass(frozen=True)
class ImportedSchedule:
    """A schedule from elsewhere: the operations of each rank in execution order.

    Attributes:
        orders: for each rank, its operations.
        skipped: what the source has beside operations, and how often, by the source's names.
    """

    orders: tuple[tuple[Operation, ...], ...]
    skipped: Mapping[str, int] = field(default_factory=dict)

    @property
    def computes_only(self) -> bool:
        """Whether it has nothing but forwards and backwards."""
        return all(op.instruction in LETTERS for order in self.orders for op in order)

    @cached_property
    def known_as(self) -> str | None:
        """The generated schedule with this very order of forwards and backwards, if any."""
        orders = [[op for op in order if op.instruction in LETTERS] for order in self.orders]
        shape = (len(orders), self.num_microbatches, self.num_chunks)
        grouped = partial(interleaved, microbatch_group=self.microbatch_group)
        generators: list[tuple[str, Generator]] = [*SCHEDULES.items(), ("interleaved", grouped)]
        for name, generate in generators:
            try:
                if generate(*shape) == orders:
                    return name
            except InputError:
                continue
        return None

    @property
    def microbatch_group(self) -> int | None:
        """How many microbatches rank 0 takes through its first chunk before the next one.

        None where ranks have one chunk, or that many microbatches as there are ranks.
        """
        forwards = [op.chunk for op in self.orders[0] if op.instruction == "forward"]
        group = forwards.index(1) if 1 in forwards else None
        return None if group == len(self.orders) else group

    @property
    def num_chunks(self) -> int:
        """The most model chunks that a rank has."""
        return max(op.chunk for order in self.orders for op in order) + 1

    @property
    def num_microbatches(self) -> int:
        """How many there are, from 0 on."""
        return max(op.microbatch for order in self.orders for op in order) + 1


def scheduled(
    ranks: Iterable[Iterable[tuple[Place, Step]]],
    skipped: Mapping[str, int] | None = None,
    *,
    again: str = "",
) -> ImportedSchedule:
    """The schedule of all ranks' steps. A rank's model stages are its chunks, in model order.

    Args:
        ranks: for each rank, its steps in execution order, and where they stand.
        skipped: as in ImportedSchedule.
        again: what to think of where an operation comes twice.

    Raises:
        InputError: names a rank without steps, a step that comes twice, or a model stage that is
            on two ranks or on none.
    """
    rows = [list(rank) for rank in ranks]
    if not rows:
        raise InputError("has no ranks: there is nothing to run")
    if sum(map(len, rows)) > MAX_OPERATIONS:
        raise InputError(f"has more than {MAX_OPERATIONS} operations")
    orders = []
    for rank, row in enumerate(rows):
        stages = sorted({step.model_stage for _, step in row})
        chunks = {stage: chunk for chunk, stage in enumerate(stages)}
        orders.append(
            tuple(
                Operation(rank, instruction, microbatch, chunks[stage], stage)
                for _, (instruction, microbatch, stage) in row
            )
        )
    placement(orders, lambda rank, at: rows[rank][at][0], again=again)
    return ImportedSchedule(tuple(orders), dict(skipped or {}))


def from_file(path: str | os.PathLike[str], parse: Callable[[str], Read]) -> Read:
    """What a UTF-8 file of at most 64 MiB says; errors say which file they are about.

    Raises:
        InputError: it cannot be read, is larger or is not UTF-8; or as `parse`.
    """
    try:
        return parse(decoded(read_bounded(path, MAX_FILE_BYTES), path))
    except InputError as error:
        raise located(error, path) from None
