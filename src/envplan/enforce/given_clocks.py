"""Clocks that somebody else has chosen, read from a file as data.

Three kinds of files: what Perseus and Zeus write, `freqs_pipeline_*.py` (a list for each stage of
MHz, or of (instruction, MHz), read with ast.literal_eval and never run); our frequency plan; and a
CSV of stage, frequency and either position or instruction and microbatch.
"""

from __future__ import annotations

import ast
from itertools import pairwise
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field

from envplan._documents import read_json
from envplan._files import AnyPath, decoded, read_bounded
from envplan._tables import parse_table
from envplan.enforce.freqplan import FREQPLAN_SCHEMA, MAX_ZEUS_BYTES, FrequencyPlan
from envplan.errors import InputError, shown
from envplan.pipeline import Pipeline

__all__ = ["read_clocks"]


def read_clocks(path: AnyPath, pipeline: Pipeline) -> list[list[int]]:
    """MHz of each stage's operations in execution order, as `plan_from_clocks` takes them.

    Args:
        pipeline: whose operations the clocks are for.

    Raises:
        InputError: the file is none of the three kinds, or does not fit the pipeline.
    """
    data = read_bounded(path, MAX_ZEUS_BYTES)
    start = data.lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
    try:
        if start == b"{":
            return _from_frequency_plan(path, pipeline)
        suffix = Path(path).suffix.lower()
        if start in (b"[", b"(", b"#") or suffix in (".py", ".txt"):
            return _from_lists(decoded(data, path), pipeline)
        return _from_table(data, path, pipeline)
    except InputError as error:
        if error.path is not None:
            raise
        raise InputError(error.message, path=path, line=error.line, column=error.column) from None


def _from_frequency_plan(path: AnyPath, pipeline: Pipeline) -> list[list[int]]:
    document = read_json(path)
    if document.get("schema") != FREQPLAN_SCHEMA:
        raise InputError(f"is no file of clocks: its schema is {shown(document.get('schema'))}")
    plan = FrequencyPlan.from_document(document, path=path)
    clocks: dict[int, list[int]] = {}
    for rank in plan.ranks:
        clocks.setdefault(rank.stage, [operation[3] for operation in rank.operations])
    if sorted(clocks) != list(range(pipeline.num_stages)):
        raise InputError(f"is for {len(clocks)} stages; the pipeline has {pipeline.num_stages}")
    return [clocks[stage] for stage in range(pipeline.num_stages)]


def _from_lists(text: str, pipeline: Pipeline) -> list[list[int]]:
    try:
        value = ast.literal_eval(text)
    except SyntaxError as error:
        raise InputError(
            f"holds no list of clocks, or is cut short: {error.msg}", line=error.lineno
        ) from None
    except (ValueError, TypeError, MemoryError, RecursionError):
        raise InputError(
            "must hold nothing but a list of lists of clocks; code in it is not run"
        ) from None
    if not isinstance(value, list) or not all(isinstance(stage, list) for stage in value):
        raise InputError("must hold a list for each stage")
    if len(value) != pipeline.num_stages:
        raise InputError(f"has {len(value)} stages; the pipeline has {pipeline.num_stages}")
    names = [
        [op.instruction for op in pipeline.operations[first:last]]
        for first, last in pairwise(pipeline.stage_begin.tolist())
    ]
    return [
        [
            _mhz(entry, stage, position, names[stage] if len(names[stage]) == len(entries) else [])
            for position, entry in enumerate(entries)
        ]
        for stage, entries in enumerate(value)
    ]


def _mhz(entry: object, stage: int, position: int, names: list[str]) -> int:
    """The clock of an entry, MHz or (instruction, MHz)."""
    place, mhz = f"[{stage}][{position}]", entry
    if isinstance(entry, tuple) and len(entry) == 2:
        name, mhz = entry
        if names and isinstance(name, str) and name.lower() != names[position]:
            raise InputError(f"{place} is {shown(name)}; the schedule has {names[position]} there")
    if type(mhz) is not int or not 0 <= mhz <= 10**6:
        raise InputError(f"{place} is {shown(entry)}, no clock in MHz")
    return mhz


class _Row(BaseModel):
    stage: Annotated[int, Field(ge=0, lt=2**31, description="a stage from 0 up")]
    frequency: Annotated[int, Field(ge=0, le=10**6, description="a clock in MHz")]
    position: Annotated[
        int | None, Field(ge=0, lt=2**31, description="a place in the order of execution, from 0")
    ] = None
    instruction: Annotated[str | None, Field(description="an instruction")] = None
    microbatch: Annotated[
        int | None, Field(ge=0, lt=2**31, description="a microbatch from 0 up")
    ] = None
    chunk: Annotated[int | None, Field(ge=0, lt=2**31, description="a chunk from 0 up")] = None


def _from_table(data: bytes, path: AnyPath, pipeline: Pipeline) -> list[list[int]]:
    table = parse_table(data, _Row, path=path, kind="a file of clocks")
    bounds = list(pairwise(pipeline.stage_begin.tolist()))
    index = {
        (op.stage, op.instruction, op.microbatch, op.chunk): i
        for i, op in enumerate(pipeline.operations)
    }
    clocks: dict[int, int] = {}
    for number, row in enumerate(table.rows()):
        if row.stage >= len(bounds):
            raise table.error(number, f"the pipeline has stages 0 to {len(bounds) - 1}", "stage")
        first, last = bounds[row.stage]
        if row.position is not None:
            i = first + row.position
            known = i < last
        elif row.instruction is not None and row.microbatch is not None:
            key = (row.stage, row.instruction, row.microbatch, row.chunk or 0)
            known, i = key in index, index.get(key, 0)
        else:
            raise table.error(number, "give position, or instruction and microbatch")
        if not known:
            raise table.error(number, f"stage {row.stage} has no such operation")
        if i in clocks:
            raise table.error(number, "says the clock of an operation that a row before it says")
        clocks[i] = row.frequency
    return [[clocks[i] for i in range(*bound) if i in clocks] for bound in bounds]
