"""Schedules of torch.distributed.pipelining as CSV: what its `_dump_csv` and `_load_csv` exchange.

A row for each rank, in order of ranks; in it a cell for each action in the order they run, or an
empty cell for a time step without one. A cell is the model stage, a letter and the microbatch:

    0F3   forward                          0B3   the whole backward
    0I3   backward for the input           0W3   backward for the weights
    (0F5;7B3)OVERLAP_F_B                   both in one action: run here one after the other

A schedule with communication also has actions such as 0SEND_F3, 1RECV_F3 and, since PyTorch 2.15,
0WAIT_SEND_F3, and, with sharded parameters, 0UNSHARD, 0RESHARD, 0REDUCE_GRAD and 0WAIT_REDUCE_GRAD.
What sends and receives say is in the data dependencies already, and parameters are gathered beside
the computation, so all these are left out and counted, as is any other action whose name is not
one letter: those are the computations. REDUCE_GRAD may be kept as an operation (see `keep`).
"""

from __future__ import annotations

import csv
import io
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Final

from envplan.errors import InputError, shown
from envplan.pipeline.dependencies import starts_without_lags
from envplan.pipeline.imports.steps import (
    MOST_DIGITS,
    ImportedSchedule,
    Step,
    located,
    place,
    read_text,
)

if TYPE_CHECKING:
    from envplan.pipeline.graph import Pipeline

__all__ = ["KEEPABLE", "as_torch_csv", "parse_rows", "read_torch_csv"]

_ALL_REDUCE: Final = "all_reduce"
_REDUCTION: Final = "REDUCE_GRAD"
#: What may be kept as operations beside the computation.
KEEPABLE: Final = (_ALL_REDUCE,)

_INSTRUCTIONS: Final = {
    "F": "forward",
    "B": "backward",
    "I": "backward_input",
    "W": "backward_weight",
}
_LETTERS: Final = {instruction: letter for letter, instruction in _INSTRUCTIONS.items()}
_NUMBER: Final = rf"([0-9]{{1,{MOST_DIGITS}}})"
_COMPUTE: Final = re.compile(rf"{_NUMBER}([FBIW]){_NUMBER}")
_OVERLAP: Final = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_OLD: Final = re.compile(rf"{_NUMBER}BW{_NUMBER}")
# Whatever is no computation: its names have several letters.
_BESIDE: Final = re.compile(rf"{_NUMBER}([A-Z][A-Z_]*[A-Z])(?:{_NUMBER})?")
_OLDER_VERSION: Final = (
    "in files of older versions of PyTorch B meant only the backward for the input, and BW the "
    "whole one: write I for B and B for BW"
)


def read_torch_csv(path: str | os.PathLike[str], *, keep: Collection[str] = ()) -> ImportedSchedule:
    """Read a schedule, with or without communication.

    Args:
        keep: `all_reduce` makes each REDUCE_GRAD an operation of that name, timed by the profile.

    Raises:
        InputError: the file cannot be read; or names the row, the column and the cell that is no
            action, comes twice or contradicts another one.
    """
    try:
        rows = list(_rows(read_text(path)))
        return parse_rows(rows, keep=keep)
    except InputError as error:
        raise located(error, path) from None


def _rows(text: str) -> Iterable[list[str]]:
    """The rows, without empty ones at the end."""
    reader = csv.reader(io.StringIO(text, newline=""))
    empty = 0
    try:
        for row in reader:
            if any(cell.strip() for cell in row):
                yield from ([] for _ in range(empty))
                empty = 0
                yield row
            else:
                empty += 1
    except csv.Error as error:
        raise InputError(f"is not CSV: {error}", line=reader.line_num) from None


def parse_rows(rows: Sequence[Sequence[str]], *, keep: Collection[str] = ()) -> ImportedSchedule:
    """Read a schedule from its cells.

    Args:
        rows: for each rank, its cells.
        keep: see read_torch_csv.

    Raises:
        InputError: as for read_torch_csv; line and column count from 1.
    """
    if not rows:
        raise InputError("has no rows: a schedule has one for each rank")
    skipped: Counter[str] = Counter()
    ranks = []
    for line, row in enumerate(rows, 1):
        steps: list[Step] = []
        for column, cell in enumerate(row, 1):
            steps += _steps(cell.strip(), line, column, keep, skipped)
        if not steps:
            raise InputError(f"rank {line - 1} has no actions", line=line)
        ranks.append(steps)
    _refuse_both_backwards(step for steps in ranks for step in steps)
    return place(ranks, skipped)


def _steps(
    cell: str, line: int, column: int, keep: Collection[str], skipped: Counter[str]
) -> list[Step]:
    """The steps of one cell; none for an empty one or one that is skipped."""
    if not cell:
        return []
    if match := _COMPUTE.fullmatch(cell):
        stage, letter, microbatch = match.groups()
        return [Step(_INSTRUCTIONS[letter], int(microbatch), int(stage), shown(cell), line, column)]
    if match := _OVERLAP.fullmatch(cell):
        parts = [_COMPUTE.fullmatch(part.strip()) for part in match[1].split(";")]
        found = [part for part in parts if part is not None]
        if len(found) == len(parts):
            return [
                Step(_INSTRUCTIONS[letter], int(microbatch), int(stage), shown(cell), line, column)
                for stage, letter, microbatch in (part.groups() for part in found)
            ]
    elif (match := _BESIDE.fullmatch(cell)) and not _OLD.fullmatch(cell):
        if match[2] == _REDUCTION and _ALL_REDUCE in keep:
            return [Step(_ALL_REDUCE, 0, int(match[1]), shown(cell), line, column)]
        skipped[match[2]] += 1
        return []
    raise InputError(
        f"{shown(cell)} is no action that is known (such as 0F3, 0B3, 0I3, 0W3); "
        + (_OLDER_VERSION if _OLD.fullmatch(cell) else "is it of another version of PyTorch?"),
        line=line,
        column=column,
    )


def _refuse_both_backwards(steps: Iterable[Step]) -> None:
    """A microbatch's backward on a stage is whole or split, never both."""
    whole: dict[tuple[int, int], Step] = {}
    split: dict[tuple[int, int], Step] = {}
    for step in steps:
        if step.instruction == "backward":
            whole.setdefault((step.microbatch, step.model_stage), step)
        elif step.instruction in ("backward_input", "backward_weight"):
            split.setdefault((step.microbatch, step.model_stage), step)
    for key in split.keys() & whole.keys():
        raise split[key].error(
            f"and {whole[key].label} contradict each other, for B is the whole backward "
            f"({_OLDER_VERSION})"
        )


def as_torch_csv(pipeline: Pipeline) -> str:
    """A pipeline as the compute-only CSV that PyTorch loads.

    Every action has a time step of its own, and follows those it waits for: idle steps are empty
    cells, as in the files that PyTorch writes.

    Raises:
        InputError: the pipeline has an instruction that PyTorch's schedules have no action for.
    """
    # The step of each operation if each took one and transfers none.
    steps = starts_without_lags(pipeline, [1] * len(pipeline.operations))
    buffer = io.StringIO(newline="")
    writer = csv.writer(buffer, lineterminator="\n")
    for begin, end in zip(pipeline.stage_begin, pipeline.stage_begin[1:], strict=False):
        row = [""] * (steps[end - 1] + 1)
        for i in range(begin, end):
            op = pipeline.operations[i]
            if op.instruction not in _LETTERS:
                raise InputError(
                    f"PyTorch's schedules have no action for {shown(op.instruction)}; known: "
                    f"{', '.join(_LETTERS)}"
                )
            row[steps[i]] = f"{op.profile_stage}{_LETTERS[op.instruction]}{op.microbatch}"
        writer.writerow(row)
    return buffer.getvalue()
