"""What every import has in common: ranks that run steps of model stages, turned into operations."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from envplan._files import decoded, read_bounded
from envplan.errors import InputError
from envplan.pipeline.formats import MAX_OPERATIONS
from envplan.pipeline.schedules import SCHEDULES, Operation

MAX_FILE_BYTES: Final = 64 * 2**20
#: The instructions that make up a microbatch's way through a model stage.
COMPUTATION: Final = frozenset({"forward", "backward", "backward_input", "backward_weight"})
#: Microbatches and model stages beyond this are a slip, not a schedule.
MOST_DIGITS: Final = 7


@dataclass(frozen=True)
class Step:
    """One computation in a source, before it is known which chunk of its rank it belongs to.

    Attributes:
        model_stage: in model order, from 0, over all ranks.
        label: what error messages call it, in the source's own words.
        line: 1-based, where the source has lines.
        column: 1-based, likewise.
    """

    instruction: str
    microbatch: int
    model_stage: int
    label: str
    line: int | None = None
    column: int | None = None

    def error(self, message: str) -> InputError:
        return InputError(f"{self.label} {message}", line=self.line, column=self.column)


@dataclass(frozen=True)
class ImportedSchedule:
    """A schedule from elsewhere: the operations of each rank in execution order.

    Attributes:
        orders: for each rank, its operations.
        num_chunks: the most model chunks that a rank has.
        skipped: what the source has beside operations, and how often, by the source's names.
    """

    orders: tuple[tuple[Operation, ...], ...]
    num_chunks: int
    skipped: Mapping[str, int] = field(default_factory=dict)

    @property
    def known_as(self) -> str | None:
        """The generated schedule with this very order of forwards and backwards, if any."""
        orders = [[op for op in order if op.instruction in COMPUTATION] for order in self.orders]
        for name, generate in SCHEDULES.items():
            try:
                stages = generate(len(orders), self.num_microbatches, self.num_chunks)
            except InputError:
                continue
            if stages == orders:
                return name
        return None

    @property
    def num_microbatches(self) -> int:
        """How many there are, from 0 on."""
        return max(op.microbatch for order in self.orders for op in order) + 1


def place(ranks: Sequence[Sequence[Step]], skipped: Mapping[str, int]) -> ImportedSchedule:
    """Number the model stages of each rank as its chunks, in model order.

    Args:
        ranks: for each rank, its steps in execution order.

    Raises:
        InputError: names a rank without steps, a step that comes twice, or a model stage that is on
            two ranks or on none.
    """
    if not ranks:
        raise InputError("has no ranks: there is nothing to run")
    for rank, steps in enumerate(ranks):
        if not steps:
            raise InputError(f"rank {rank} runs no forward and no backward")
    if sum(map(len, ranks)) > MAX_OPERATIONS:
        raise InputError(f"has more than {MAX_OPERATIONS} operations")
    _refuse_twice(step for steps in ranks for step in steps)
    chunks = _chunks(ranks)
    orders = tuple(
        tuple(
            Operation(
                rank, step.instruction, step.microbatch, chunks[step.model_stage], step.model_stage
            )
            for step in steps
        )
        for rank, steps in enumerate(ranks)
    )
    return ImportedSchedule(orders, max(chunks.values()) + 1, dict(skipped))


def _refuse_twice(steps: Iterable[Step]) -> None:
    first: dict[tuple[str, int, int], Step] = {}
    for step in steps:
        key = (step.instruction, step.microbatch, step.model_stage)
        if key in first:
            other = first[key]
            where = "" if other.line is None else f" at {_place(other)}"
            raise step.error(
                f"repeats {other.label}{where}: {step.instruction} of microbatch "
                f"{step.microbatch} on model stage {step.model_stage} would run twice"
            )
        first[key] = step


def _place(step: Step) -> str:
    column = "" if step.column is None else f", column {step.column}"
    return f"line {step.line}{column}"


def _chunks(ranks: Sequence[Sequence[Step]]) -> dict[int, int]:
    """Model stage -> which chunk of its rank it is."""
    home: dict[int, tuple[int, Step]] = {}
    for rank, steps in enumerate(ranks):
        for step in steps:
            other, earlier = home.setdefault(step.model_stage, (rank, step))
            if other != rank:
                raise step.error(
                    f"runs model stage {step.model_stage} on rank {rank}, but "
                    f"{earlier.label} runs it on rank {other}"
                )
    count = max(home) + 1
    if len(home) < count:
        gap = next(stage for stage in range(count) if stage not in home)
        raise InputError(f"model stage {gap} is on no rank, but model stage {count - 1} is")
    met: Counter[int] = Counter()
    chunks = {}
    for stage in range(count):
        rank = home[stage][0]
        chunks[stage] = met[rank]
        met[rank] += 1
    return chunks


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of a UTF-8 file of at most 64 MiB.

    Raises:
        InputError: it cannot be read, is larger or is not UTF-8.
    """
    return decoded(read_bounded(path, MAX_FILE_BYTES), path)


def parsed_json(text: str, parse_float: Callable[[str], Any] | None = None) -> Any:
    """What a JSON text says.

    Args:
        parse_float: as for json.loads.

    Raises:
        InputError: it is not JSON; says the line and the column.
    """
    try:
        return json.loads(text, parse_float=parse_float)
    except json.JSONDecodeError as error:
        raise InputError(
            f"not valid JSON: {error.msg}", line=error.lineno, column=error.colno
        ) from None
    except (RecursionError, ValueError):
        raise InputError("not valid JSON: nested too deeply, or a number too long") from None


def located(error: InputError, path: str | os.PathLike[str]) -> InputError:
    """The same error, saying which file it is about."""
    return InputError(error.message, path=path, line=error.line, column=error.column)
