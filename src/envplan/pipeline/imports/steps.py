"""What every import has in common: one walk over ranks and what they run, made into operations.

A reader says where each rank's entries stand (a Place) and what they mean: steps of model stages,
or the name of something beside them, which is counted. The walk does the rest.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Final, NamedTuple, TypeVar

from envplan._files import decoded, read_bounded
from envplan.errors import InputError
from envplan.pipeline.dependencies import MisplacedError, described, placement
from envplan.pipeline.formats import MAX_OPERATIONS
from envplan.pipeline.schedules import SCHEDULES, Generator, Operation, interleaved

MAX_FILE_BYTES: Final = 64 * 2**20
#: The instructions that make up a microbatch's way through a model stage.
COMPUTATION: Final = frozenset({"forward", "backward", "backward_input", "backward_weight"})
#: Microbatches and model stages beyond this are a slip, not a schedule.
MOST_DIGITS: Final = 7


class Place(NamedTuple):
    """Where an entry stands: what messages call it, and its line and column, from 1, if any."""

    label: str
    line: int | None = None
    column: int | None = None

    def error(self, message: str) -> InputError:
        return InputError(f"{self.label} {message}", line=self.line, column=self.column)

    def __str__(self) -> str:
        column = "" if self.column is None else f", column {self.column}"
        return self.label + ("" if self.line is None else f" at line {self.line}{column}")


class Step(NamedTuple):
    """One computation, before it is known which chunk of its rank it belongs to.

    Attributes:
        model_stage: in model order, from 0, over all ranks.
    """

    instruction: str
    microbatch: int
    model_stage: int


Entry = TypeVar("Entry")
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

    @cached_property
    def known_as(self) -> str | None:
        """The generated schedule with this very order of forwards and backwards, if any."""
        orders = [[op for op in order if op.instruction in COMPUTATION] for order in self.orders]
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


def walk(
    ranks: Iterable[Iterable[tuple[Place, Entry]]],
    read: Callable[[int, Place, Entry], Iterable[Step] | str],
    *,
    again: str = "",
) -> ImportedSchedule:
    """The schedule of all ranks' entries.

    Args:
        ranks: for each rank, its entries in execution order, and where they stand.
        read: what an entry of a rank means: its steps, or the name of something beside them.
        again: what to think of where an operation comes twice.

    Raises:
        InputError: as `read`; or names a rank without steps, a step that comes twice, or a model
            stage that is on two ranks or on none.
    """
    skipped: Counter[str] = Counter()
    steps: list[list[Step]] = []
    places: list[list[Place]] = []
    for rank, entries in enumerate(ranks):
        steps.append([])
        places.append([])
        for place, entry in entries:
            meaning = read(rank, place, entry)
            if isinstance(meaning, str):
                skipped[meaning] += 1
            else:
                steps[-1] += meaning
                places[-1] += [place] * (len(steps[-1]) - len(places[-1]))
    if not steps:
        raise InputError("has no ranks: there is nothing to run")
    if sum(map(len, steps)) > MAX_OPERATIONS:
        raise InputError(f"has more than {MAX_OPERATIONS} operations")
    orders = tuple(_operations(rank, mine) for rank, mine in enumerate(steps))
    try:
        placement(orders)
    except MisplacedError as error:
        place, message = places[error.rank][error.at], error.message
        if error.first is not None:
            earlier = places[error.first[0]][error.first[1]]
            twice = described(orders[error.rank][error.at])
            message = f"repeats {earlier}: {twice} would run twice{again}"
        raise place.error(message) from None
    return ImportedSchedule(orders, dict(skipped))


def _operations(rank: int, steps: Sequence[Step]) -> tuple[Operation, ...]:
    """A rank's model stages are its chunks, in model order."""
    chunks = {stage: k for k, stage in enumerate(sorted({step.model_stage for step in steps}))}
    return tuple(
        Operation(rank, instruction, microbatch, chunks[stage], stage)
        for instruction, microbatch, stage in steps
    )


def from_file(path: str | os.PathLike[str], parse: Callable[[str], Read]) -> Read:
    """What a UTF-8 file of at most 64 MiB says; errors say which file they are about.

    Raises:
        InputError: it cannot be read, is larger or is not UTF-8; or as `parse`.
    """
    try:
        return parse(decoded(read_bounded(path, MAX_FILE_BYTES), path))
    except InputError as error:
        raise located(error, path) from None


def located(error: InputError, path: str | os.PathLike[str]) -> InputError:
    """The same error, saying which file it is about."""
    return InputError(error.message, path=path, line=error.line, column=error.column)
