"""Clocks that somebody else has chosen, read from a file as data.

Three kinds of files: what Perseus, Zeus and Kareus write, `freqs_pipeline_*.py` (a list for each
stage of MHz, or of (instruction, MHz), read with ast.literal_eval and never run); our frequency
plan; and a CSV of stage, frequency and either position or instruction and microbatch. Kareus's have
a `scheds_pipeline_*.py` of the same number beside them, with the second knob of each operation.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BaseModel, Field

from envplan._io.files import AnyPath, decoded, parse_json, read_bounded
from envplan._io.tables import Table, parse_table
from envplan.enforce.freqplan import FrequencyPlan
from envplan.errors import InputError, naming, shown
from envplan.pipeline import Operation, Pipeline

__all__ = ["count_clocks", "read_clocks"]

_MAX_BYTES: Final = 16 * 2**20
_FREQS: Final = "freqs_pipeline_"
_SCHEDS: Final = "scheds_pipeline_"
_LISTS: Final = (".py", ".txt")

_Stages = Sequence[Sequence[Operation]]


def read_clocks(path: AnyPath, pipeline: Pipeline) -> Sequence[Sequence[int | tuple[int, str]]]:
    """MHz of each stage's operations in execution order, as `plan_from_clocks` takes them.

    With Kareus's second knob, where there is a file of it, (MHz, config).

    Args:
        pipeline: whose operations the clocks are for.

    Raises:
        InputError: the file is none of the three kinds, or does not fit the pipeline.
    """
    data, path = read_bounded(path, _MAX_BYTES), Path(path)
    bounds = pairwise(pipeline.stage_begin.tolist())
    stages = [pipeline.operations[first:last] for first, last in bounds]
    start = data.lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
    with naming(path):
        if start == b"{":
            plan = FrequencyPlan.from_document(parse_json(data, path), path=path)
            _check_count(plan.stage_operations(), stages)
            return [[operation[3] for operation in stage] for stage in plan.stage_operations()]
        if start not in (b"[", b"(", b"#") and path.suffix.lower() not in _LISTS:
            return _from_table(data, path, stages)
        clocks = _from_lists(_literal(data, path, stages), stages)
    knobs = path.with_name(path.name.replace(_FREQS, _SCHEDS, 1))
    if not path.name.startswith(_FREQS) or not knobs.exists():
        return clocks
    with naming(knobs):
        return _with_knobs(clocks, _literal(read_bounded(knobs, _MAX_BYTES), knobs, stages), stages)


def count_clocks(path: AnyPath) -> list[int]:
    """How many operations of each stage a list or table has clocks for, whatever their pipeline.

    Raises:
        InputError: the file is no list and no table of clocks.
    """
    data, path = read_bounded(path, _MAX_BYTES), Path(path)
    with naming(path):
        if path.suffix.lower() in _LISTS:
            lists = _literal(data, path)
            return list(map(len, _from_lists(lists, [[]] * len(lists))))
        rows = _table(data, path).rows()
        placed = {(row.stage, row.position, row.instruction, row.microbatch) for row in rows}
    counts = Counter(stage for stage, *_ in placed)
    return [counts[stage] for stage in range(max(counts) + 1)]


def _check_count(found: Sequence[object], stages: _Stages) -> None:
    if len(found) != len(stages):
        raise InputError(f"has {len(found)} stages; the pipeline has {len(stages)}")


def _with_knobs(
    clocks: Sequence[Sequence[int]], lists: Sequence[Sequence[Any]], stages: _Stages
) -> list[list[tuple[int, str]]]:
    """The clocks with the config of each operation.

    Args:
        lists: for each stage (instruction, knob, ...) in execution order; or, where nothing is
            recomputed, a pair of these for each microbatch.

    Raises:
        InputError: there is something else, or it does not fit the pipeline.
    """
    counts = list(map(len, stages))
    if counts != list(map(len, clocks)):
        raise InputError(f"goes with clocks of {counts} operations, one each")
    return [
        [(mhz, _config(entries, at, op)) for at, (op, mhz) in enumerate(zip(ops, own, strict=True))]
        for ops, own, entries in zip(stages, clocks, lists, strict=True)
    ]


def _config(entries: Sequence[Any], at: int, op: Operation) -> str:
    for place in (at, op.microbatch):
        entry = entries[place] if place < len(entries) else None
        for one in [entry, *(entry if isinstance(entry, tuple) else ())]:
            named = isinstance(one, tuple) and one[:1] == (op.instruction,)
            if named and all(isinstance(text, str) for text in one):
                return " ".join(filter(None, one[1:]))
    raise InputError(
        f"stage {op.stage} says nothing of {op.instruction} {op.microbatch}, its operation {at}"
    )


def _literal(data: bytes, path: Path, stages: _Stages | None = None) -> list[list[Any]]:
    """A list for each stage that Python would print, read without running anything.

    Args:
        stages: of the pipeline; None: there is none yet.

    Raises:
        InputError: it is something else, or of another number of stages.
    """
    try:
        value = ast.literal_eval(decoded(data, path))
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
    if stages is not None:
        _check_count(value, stages)
    return value


def _from_lists(lists: Sequence[Sequence[Any]], stages: _Stages) -> list[list[int]]:
    """Clocks of lists of MHz or (instruction, MHz); operations of constant time may be left out."""
    clocks = []
    for stage, (entries, ops) in enumerate(zip(lists, stages, strict=True)):
        names = [op.instruction for op in ops] if len(ops) == len(entries) else []
        clocks.append(
            [
                _mhz(entry, f"[{stage}][{k}]", name)
                for k, (entry, name) in enumerate(zip_longest(entries, names))
            ]
        )
    return clocks


def _mhz(entry: object, place: str, wanted: str | None) -> int:
    """The clock of an entry, MHz or (instruction, MHz)."""
    mhz = entry
    if isinstance(entry, tuple) and len(entry) == 2:
        name, mhz = entry
        if wanted is not None and isinstance(name, str) and name.lower() != wanted:
            raise InputError(f"{place} is {shown(name)}; the schedule has {wanted} there")
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


def _table(data: bytes, path: Path) -> Table[_Row]:
    # As `envplan apply --format csv` names it.
    data = data.replace(b"frequency_mhz", b"frequency", 1)
    return parse_table(data, _Row, path=path, kind="a file of clocks")


def _from_table(data: bytes, path: Path, stages: _Stages) -> list[list[int]]:
    table = _table(data, path)
    places: dict[tuple[object, ...], int] = {}
    for stage, ops in enumerate(stages):
        for k, op in enumerate(ops):
            places |= {(stage, k): k, (stage, op.instruction, op.microbatch, op.chunk): k}
    clocks: list[dict[int, int]] = [{} for _ in stages]
    for number, row in enumerate(table.rows()):
        if row.stage >= len(stages):
            raise table.error(number, f"the pipeline has stages 0 to {len(stages) - 1}", "stage")
        if row.position is None and (row.instruction is None or row.microbatch is None):
            raise table.error(number, "give position, or instruction and microbatch")
        by_name = (row.stage, row.instruction, row.microbatch, row.chunk or 0)
        place = places.get(by_name if row.position is None else (row.stage, row.position))
        if place is None:
            raise table.error(number, f"stage {row.stage} has no such operation")
        if clocks[row.stage].setdefault(place, row.frequency) != row.frequency:
            raise table.error(
                number,
                "says another clock of an operation than a row before it; is the file of one run?",
            )
    return [[mhz for _, mhz in sorted(stage.items())] for stage in clocks]
