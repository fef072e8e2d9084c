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
one letter: those are the computations.

Schedule objects in memory are read as the same cells; torch is not needed.
"""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from envplan._io.files import decoded, read_bounded
from envplan.errors import InputError, naming, shown
from envplan.pipeline.graph import Pipeline
from envplan.pipeline.imported import ImportedSchedule
from envplan.pipeline.imports import MAX_FILE_BYTES, MOST_DIGITS, Computation, scheduled
from envplan.pipeline.operations import LETTERS, short_name
from envplan.pipeline.schedules import SCHEDULES

__all__ = [
    "as_torch_csv",
    "parse_rows",
    "pipeline_from_torch",
    "read_torch_csv",
    "read_torch_schedule",
]

_INSTRUCTIONS: Final = {letter: instruction for instruction, letter in LETTERS.items()}
_NUMBER: Final = rf"[0-9]{{1,{MOST_DIGITS}}}"
_COMPUTE: Final = re.compile(rf"(?P<stage>{_NUMBER})(?P<letter>[FBIW])(?P<microbatch>{_NUMBER})")
_OVERLAP: Final = re.compile(r"\((?P<actions>[^()]*)\)OVERLAP_F_B")
# Whatever is no computation: its names are words. (BW was a backward in older versions.)
_OTHER_ACTION: Final = re.compile(rf"{_NUMBER}(?P<name>[A-Z][A-Z_]+[A-Z])(?:{_NUMBER})?")

# The schedules of one stage per rank run a loop of their own, which keeps no list of actions that
# could be relied on; their order is known.
_SINGLE: Final = {"ScheduleGPipe": "gpipe", "Schedule1F1B": "1f1b"}
_LOOP: Final = "_step_microbatches"


def read_torch_csv(path: str | os.PathLike[str]) -> ImportedSchedule:
    """Read a schedule, with or without communication.

    Raises:
        InputError: the file cannot be read; a cell is no action (names row and column), or an
            action comes twice or contradicts another one.
    """
    with naming(path):
        text = decoded(read_bounded(path, MAX_FILE_BYTES), path)
        reader = csv.reader(io.StringIO(text, newline=""))
        try:
            rows = [row if any(map(str.strip, row)) else [] for row in reader]
        except csv.Error as error:
            raise InputError(f"is not CSV: {error}", line=reader.line_num) from None
        while rows and not rows[-1]:
            rows.pop()
        return parse_rows(rows)


def parse_rows(rows: Sequence[Sequence[str]]) -> ImportedSchedule:
    """Read a schedule from its cells.

    Args:
        rows: for each rank, its cells.

    Raises:
        InputError: as for read_torch_csv; line and column count from 1.
    """
    return scheduled(_computations_of_row(line, row) for line, row in enumerate(rows, 1))


def _computations_of_row(line: int, row: Sequence[str]) -> Iterator[Computation | str]:
    """The computations of a rank, and the names of actions that are no computation."""
    for column, cell in enumerate(map(str.strip, row), 1):
        computations = _computations_of_cell(cell)
        other_action = _OTHER_ACTION.fullmatch(cell)
        if computations:
            yield from computations
        elif other_action:
            yield other_action["name"]
        elif cell:
            raise InputError(
                f"{shown(cell)} is no action that is known (such as 0F3, 0B3, 0I3, 0W3); is it of "
                "another version of PyTorch?",
                line=line,
                column=column,
            )


def _computations_of_cell(cell: str) -> list[Computation]:
    """The computations of an action; none where it is something else."""
    overlap = _OVERLAP.fullmatch(cell)
    computations = []
    for text in overlap["actions"].split(";") if overlap else [cell]:
        match = _COMPUTE.fullmatch(text.strip())
        if match is None:
            return []
        instruction = _INSTRUCTIONS[match["letter"]]
        computations.append(Computation(instruction, int(match["microbatch"]), int(match["stage"])))
    return computations


def read_torch_schedule(schedule: Any) -> ImportedSchedule:
    """The order in which a schedule object of torch.distributed.pipelining runs all its ranks.

    Every rank's object knows all ranks, so the one of any rank will do.

    Args:
        schedule: a ScheduleGPipe, Schedule1F1B or any schedule of several stages per rank.

    Raises:
        InputError: the object is no such schedule, or has an action that is not known.
    """
    loop = next((cls.__name__ for cls in type(schedule).__mro__ if _LOOP in vars(cls)), None)
    if loop in _SINGLE:
        orders = SCHEDULES[_SINGLE[loop]](schedule._num_stages, schedule._n_microbatches, 1)
        return ImportedSchedule(tuple(map(tuple, orders)))
    order = getattr(schedule, "pipeline_order", None)
    if loop is None or not isinstance(order, Mapping) or not order:
        raise InputError(
            f"a {type(schedule).__name__} is no schedule of torch.distributed.pipelining with an "
            "order of actions for each rank"
        )
    return parse_rows([[str(action or "") for action in order[rank]] for rank in sorted(order)])


def as_torch_csv(pipeline: Pipeline) -> str:
    """A pipeline as the compute-only CSV that PyTorch loads.

    Every action has a time step of its own, and follows those it waits for: idle steps are empty
    cells, as in the files that PyTorch writes.

    Raises:
        InputError: the pipeline has an instruction that PyTorch's schedules have no action for.
    """
    if other := {op.instruction for op in pipeline.operations} - LETTERS.keys():
        raise InputError(
            f"PyTorch's schedules have no action for {shown(min(other))}; known: "
            f"{', '.join(LETTERS)}"
        )
    # The time step of each operation if each took one and transfers none.
    one_step = np.ones(len(pipeline.operations), np.int64)
    time_steps, _ = pipeline.earliest_starts(one_step, lags=False)
    rows: list[list[str]] = [[] for _ in range(pipeline.num_stages)]
    for op, time_step in zip(pipeline.operations, time_steps.tolist(), strict=True):
        row = rows[op.stage]
        num_idle = time_step - len(row)
        row += [""] * num_idle
        row.append(short_name(op))
    return "".join(",".join(row) + "\n" for row in rows)


def pipeline_from_torch(schedule: Any, *, p2p_latency: float = 0.0) -> Pipeline:
    """The pipeline that a live schedule object of torch.distributed.pipelining runs.

    Args:
        p2p_latency: seconds that a transfer between ranks takes.

    Raises:
        InputError: as for read_torch_schedule and Pipeline.from_orders.
    """
    return Pipeline.from_imported(read_torch_schedule(schedule), p2p_latency=p2p_latency)
