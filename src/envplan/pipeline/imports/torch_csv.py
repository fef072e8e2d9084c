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
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Final

from envplan.errors import InputError, shown
from envplan.pipeline.dependencies import starts_without_lags
from envplan.pipeline.imports.steps import (
    MOST_DIGITS,
    ImportedSchedule,
    Place,
    Step,
    from_file,
    walk,
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
    return from_file(path, lambda text: parse_rows(_rows(text), keep=keep))


def _rows(text: str) -> list[list[str]]:
    """The rows, without empty ones at the end."""
    reader = csv.reader(io.StringIO(text, newline=""))
    try:
        rows = [row if any(map(str.strip, row)) else [] for row in reader]
    except csv.Error as error:
        raise InputError(f"is not CSV: {error}", line=reader.line_num) from None
    while rows and not rows[-1]:
        rows.pop()
    return rows


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
    backward: dict[tuple[int, int], tuple[str, bool]] = {}

    def read(rank: int, place: Place, cell: str) -> Sequence[Step] | str:
        meaning = _meaning(cell, place, keep)
        for step in meaning if isinstance(meaning, list) else ():
            # A microbatch's backward on a stage is whole or split, never both.
            if step.instruction.startswith("backward"):
                whole = step.instruction == "backward"
                other, was = backward.setdefault(step[1:], (place.label, whole))
                if was != whole:
                    raise place.error(
                        f"and {other} contradict each other, for B is the whole backward "
                        f"({_OLDER_VERSION})"
                    )
        return meaning

    ranks = [
        [
            (Place(shown(cell.strip()), line, column), cell.strip())
            for column, cell in enumerate(row, 1)
            if cell.strip()
        ]
        for line, row in enumerate(rows, 1)
    ]
    return walk(ranks, read)


def _meaning(cell: str, place: Place, keep: Collection[str]) -> list[Step] | str:
    """The steps of a cell, or the name of what is left out."""
    if (overlap := _OVERLAP.fullmatch(cell)) or _COMPUTE.fullmatch(cell):
        parts = overlap[1].split(";") if overlap else [cell]
        found = [match for part in parts if (match := _COMPUTE.fullmatch(part.strip()))]
        if len(found) == len(parts):
            return [Step(_INSTRUCTIONS[m[2]], int(m[3]), int(m[1])) for m in found]
    elif (match := _BESIDE.fullmatch(cell)) and not _OLD.fullmatch(cell):
        if match[2] == _REDUCTION and _ALL_REDUCE in keep:
            return [Step(_ALL_REDUCE, 0, int(match[1]))]
        return match[2]
    raise place.error(
        "is no action that is known (such as 0F3, 0B3, 0I3, 0W3); "
        + (_OLDER_VERSION if _OLD.fullmatch(cell) else "is it of another version of PyTorch?")
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
