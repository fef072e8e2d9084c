"""Clocks that somebody else has chosen, read from a file as data.

Three kinds of files: what Perseus, Zeus and Kareus write, `freqs_pipeline_*.py` (a list for each
stage of MHz, or of (instruction, MHz), read with ast.literal_eval and never run); our frequency
plan; and a CSV of stage, frequency and either position or instruction and microbatch. Kareus's have
a `scheds_pipeline_*.py` of the same number beside them, with the second knob of each operation.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BaseModel, Field

from envplan._documents import read_json
from envplan._files import AnyPath, decoded, read_bounded
from envplan._tables import parse_table
from envplan.enforce.freqplan import FREQPLAN_SCHEMA, MAX_ZEUS_BYTES, FrequencyPlan
from envplan.errors import InputError, shown
from envplan.pipeline import Operation, Pipeline

__all__ = ["read_clocks"]

_FREQS: Final = "freqs_pipeline_"
_SCHEDS: Final = "scheds_pipeline_"


def read_clocks(path: AnyPath, pipeline: Pipeline) -> Sequence[Sequence[int | tuple[int, str]]]:
    """MHz of each stage's operations in execution order, as `plan_from_clocks` takes them.

    With Kareus's second knob, where there is a file of it, (MHz, config).

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
            clocks = _from_lists(decoded(data, path), pipeline)
            name = Path(path).name
            knobs = Path(path).with_name(name.replace(_FREQS, _SCHEDS, 1))
            if name.startswith(_FREQS) and knobs.exists():
                return _with_knobs(clocks, knobs, pipeline)
            return clocks
        # As `envplan apply --format csv` names it.
        return _from_table(data.replace(b"frequency_mhz", b"frequency", 1), path, pipeline)
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


def _with_knobs(
    clocks: Sequence[Sequence[int]], path: Path, pipeline: Pipeline
) -> list[list[tuple[int, str]]]:
    """The clocks with the config of each operation.

    The file has a list for each stage of (instruction, knob, ...) in execution order; or, where
    nothing is recomputed, of a pair of these for each microbatch.

    Raises:
        InputError: the file holds something else, or does not fit the pipeline.
    """
    try:
        stages = _literal(decoded(read_bounded(path, MAX_ZEUS_BYTES), path))
        bounds = list(pairwise(pipeline.stage_begin.tolist()))
        if len(stages) != len(bounds):
            raise InputError(f"has {len(stages)} stages; the pipeline has {len(bounds)}")
        counts = [last - first for first, last in bounds]
        if counts != list(map(len, clocks)):
            raise InputError(f"goes with clocks of {counts} operations, one each")
        configured = []
        for (first, last), stage, entries in zip(bounds, clocks, stages, strict=True):
            operations = enumerate(pipeline.operations[first:last])
            configured.append([(stage[at], _config(entries, at, op)) for at, op in operations])
        return configured
    except InputError as error:
        raise InputError(error.message, path=path, line=error.line) from None


def _config(entries: list[Any], at: int, op: Operation) -> str:
    for place in (at, op.microbatch):
        entry = entries[place] if place < len(entries) else None
        for one in [entry, *(entry if isinstance(entry, tuple) else ())]:
            named = isinstance(one, tuple) and one[:1] == (op.instruction,)
            if named and all(isinstance(text, str) for text in one):
                return " ".join(filter(None, one[1:]))
    raise InputError(
        f"stage {op.stage} says nothing of {op.instruction} {op.microbatch}, its operation {at}"
    )


def _literal(text: str) -> list[list[Any]]:
    """A list of lists that Python would print, read without running anything.

    Raises:
        InputError: it is something else.
    """
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
    return value


def _from_lists(text: str, pipeline: Pipeline) -> list[list[int]]:
    value = _literal(text)
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
        if clocks.setdefault(i, row.frequency) != row.frequency:
            raise table.error(number, "says another clock of an operation than a row before it")
    return [[clocks[i] for i in range(*bound) if i in clocks] for bound in bounds]
