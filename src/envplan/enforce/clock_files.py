"""Clocks that somebody else has chosen, read from a file as data.

There are three kinds of files:

- What Perseus, Zeus and Kareus write, `freqs_pipeline_*.py`: a list for each stage of MHz, or of
  (instruction, MHz). It is read with ast.literal_eval and never run. Kareus writes a
  `scheds_pipeline_*.py` of the same number beside it, with the config of each operation.
- Our frequency plan.
- A CSV of stage, frequency and either position or instruction and microbatch.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

from pydantic import BaseModel, Field

from envplan._io.files import AnyPath, decoded, parse_json, read_bounded
from envplan._io.tables import Table, parse_table
from envplan.enforce.freqplan import FrequencyPlan, OperationKey
from envplan.errors import InputError, naming, shown
from envplan.pipeline import Operation, Pipeline

__all__ = ["count_clocks", "read_clocks"]

T = TypeVar("T")

MAX_FILE_BYTES: Final = 16 * 2**20
_MAX_MHZ: Final = 10**6
_CLOCKS_PREFIX: Final = "freqs_pipeline_"
_CONFIGS_PREFIX: Final = "scheds_pipeline_"
_LIST_SUFFIXES: Final = (".py", ".txt")
#: How a file of lists may begin.
_LIST_BEGINNINGS: Final = (b"[", b"(", b"#")
_BLANK_OR_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf \t\r\n"

#: A value for each operation of each stage, in execution order.
_ByStage = Sequence[Sequence[T]]


def read_clocks(path: AnyPath, pipeline: Pipeline) -> Sequence[Sequence[int | tuple[int, str]]]:
    """MHz of each stage's operations in execution order, as `plan_from_clocks` takes them.

    Where Kareus's file of configs lies beside the file, (MHz, config) instead.

    Args:
        path: of the file.
        pipeline: whose operations the clocks are for.

    Raises:
        InputError: the file is none of the three kinds, or does not fit the pipeline.
    """
    data, path = read_bounded(path, MAX_FILE_BYTES), Path(path)
    stages = _operations_by_stage(pipeline)
    beginning = data.lstrip(_BLANK_OR_BYTE_ORDER_MARK)[:1]
    with naming(path):
        if beginning == b"{":
            return _clocks_of_frequency_plan(data, path, stages)
        if beginning not in _LIST_BEGINNINGS and path.suffix.lower() not in _LIST_SUFFIXES:
            return _clocks_of_table(data, path, stages)
        lists = _parse_lists(data, path)
        _require_stages(len(lists), stages)
        clocks = _clocks_of_lists(lists, stages)
    configs_path = path.with_name(path.name.replace(_CLOCKS_PREFIX, _CONFIGS_PREFIX, 1))
    if not path.name.startswith(_CLOCKS_PREFIX) or not configs_path.exists():
        return clocks
    with naming(configs_path):
        lists = _parse_lists(read_bounded(configs_path, MAX_FILE_BYTES), configs_path)
        _require_stages(len(lists), stages)
        return _with_configs(clocks, lists, stages)


def count_clocks(path: AnyPath) -> list[int]:
    """How many operations of each stage a list or table has clocks for, whatever their pipeline.

    Raises:
        InputError: the file is no list and no table of clocks.
    """
    data, path = read_bounded(path, MAX_FILE_BYTES), Path(path)
    with naming(path):
        if path.suffix.lower() in _LIST_SUFFIXES:
            lists = _parse_lists(data, path)
            clocks = _clocks_of_lists(lists, [[]] * len(lists))
            return [len(stage) for stage in clocks]
        rows = list(_read_table(data, path).rows())
    keys_of_stages: dict[int, set[tuple[object, ...]]] = defaultdict(set)
    for row in rows:
        keys_of_stages[row.stage].add((row.position, row.instruction, row.microbatch))
    num_stages = max(keys_of_stages) + 1
    return [len(keys_of_stages[stage]) for stage in range(num_stages)]


def _operations_by_stage(pipeline: Pipeline) -> _ByStage[Operation]:
    bounds = pairwise(pipeline.stage_begin.tolist())
    return [pipeline.operations[begin:end] for begin, end in bounds]


def _require_stages(num_stages: int, stages: _ByStage[Operation]) -> None:
    """Raises: InputError: a file's number of stages is not the pipeline's."""
    if num_stages != len(stages):
        raise InputError(f"has {num_stages} stages; the pipeline has {len(stages)}")


# Frequency plans


def _clocks_of_frequency_plan(
    data: bytes, path: Path, stages: _ByStage[Operation]
) -> list[list[int]]:
    plan = FrequencyPlan.from_document(parse_json(data, path), path=path)
    planned = plan.stage_operations()
    _require_stages(len(planned), stages)
    return [[operation.frequency_mhz for operation in operations] for operations in planned]


# Python lists


def _parse_lists(data: bytes, path: Path) -> list[list[Any]]:
    """A list for each stage that Python would print, read without running anything.

    Raises:
        InputError: it is something else.
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
    return value


def _clocks_of_lists(lists: _ByStage[Any], stages: _ByStage[Operation]) -> list[list[int]]:
    """Clocks of lists of MHz or (instruction, MHz).

    Operations of constant time may be left out. Instructions are therefore compared with those of
    the pipeline only where there are as many of them.
    """
    clocks = []
    for stage, (entries, operations) in enumerate(zip(lists, stages, strict=True)):
        instructions: list[str] = []
        if len(operations) == len(entries):
            instructions = [operation.instruction for operation in operations]
        stage_clocks = []
        for position, (entry, instruction) in enumerate(zip_longest(entries, instructions)):
            stage_clocks.append(_parse_clock(entry, f"[{stage}][{position}]", instruction))
        clocks.append(stage_clocks)
    return clocks


def _parse_clock(entry: object, where: str, instruction: str | None) -> int:
    """The clock of an entry, MHz or (instruction, MHz).

    Args:
        entry: as Python read it.
        where: it stands, for errors.
        instruction: that the schedule has there; None: any.

    Raises:
        InputError: it is no clock, or that of another instruction.
    """
    mhz = entry
    if isinstance(entry, tuple) and len(entry) == 2:
        name, mhz = entry
        if instruction is not None and isinstance(name, str) and name.lower() != instruction:
            raise InputError(f"{where} is {shown(name)}; the schedule has {instruction} there")
    if type(mhz) is not int or not 0 <= mhz <= _MAX_MHZ:
        raise InputError(f"{where} is {shown(entry)}, no clock in MHz")
    return mhz


# Kareus's configs


def _with_configs(
    clocks: _ByStage[int], lists: _ByStage[Any], stages: _ByStage[Operation]
) -> list[list[tuple[int, str]]]:
    """The clocks with the config of each operation.

    Args:
        clocks: MHz.
        lists: for each stage (instruction, word, ...) in execution order; or, where nothing is
            recomputed, a pair of these for each microbatch.
        stages: the pipeline's operations.

    Raises:
        InputError: there is something else, or it does not fit the pipeline.
    """
    counts = [len(operations) for operations in stages]
    if counts != [len(stage_clocks) for stage_clocks in clocks]:
        raise InputError(f"goes with clocks of {counts} operations, one each")
    settings = []
    for operations, stage_clocks, entries in zip(stages, clocks, lists, strict=True):
        configs = [
            _config_of(operation, position, entries)
            for position, operation in enumerate(operations)
        ]
        settings.append(list(zip(stage_clocks, configs, strict=True)))
    return settings


def _config_of(operation: Operation, position: int, entries: Sequence[Any]) -> str:
    """The config of an operation, from the entries of its stage.

    Raises:
        InputError: neither the entry of its position nor that of its microbatch has it.
    """
    for index in (position, operation.microbatch):
        if index >= len(entries):
            continue
        for words in _instruction_and_config(entries[index]):
            if words[0] == operation.instruction:
                return " ".join(word for word in words[1:] if word)
    raise InputError(
        f"stage {operation.stage} says nothing of {operation.instruction} "
        f"{operation.microbatch}, its operation {position}"
    )


def _instruction_and_config(entry: object) -> Iterator[tuple[str, ...]]:
    """The (instruction, word, ...) that an entry is, or else those that it holds."""
    if not isinstance(entry, tuple):
        return
    for candidate in (entry, *entry):
        is_words = isinstance(candidate, tuple) and all(isinstance(word, str) for word in candidate)
        if is_words and candidate:
            yield candidate


# Tables


class _Row(BaseModel):
    stage: Annotated[int, Field(ge=0, lt=2**31, description="a stage from 0 up")]
    frequency: Annotated[int, Field(ge=0, le=_MAX_MHZ, description="a clock in MHz")]
    position: Annotated[
        int | None, Field(ge=0, lt=2**31, description="a place in the order of execution, from 0")
    ] = None
    instruction: Annotated[str | None, Field(description="an instruction")] = None
    microbatch: Annotated[
        int | None, Field(ge=0, lt=2**31, description="a microbatch from 0 up")
    ] = None
    chunk: Annotated[int | None, Field(ge=0, lt=2**31, description="a chunk from 0 up")] = None


def _read_table(data: bytes, path: Path) -> Table[_Row]:
    # `envplan apply --format csv` calls the column frequency_mhz.
    data = data.replace(b"frequency_mhz", b"frequency", 1)
    return parse_table(data, _Row, path=path, kind="a file of clocks")


def _positions_by_key(operations: Sequence[Operation]) -> dict[OperationKey, int]:
    """The place of each operation of a stage in the order of execution."""
    positions = {}
    for position, operation in enumerate(operations):
        key = OperationKey(operation.instruction, operation.microbatch, operation.chunk)
        positions[key] = position
    return positions


def _clocks_of_table(data: bytes, path: Path, stages: _ByStage[Operation]) -> list[list[int]]:
    """Clocks of a table with a row for each operation, in any order.

    Raises:
        InputError: a row names no operation of the pipeline, or two rows contradict each other.
    """
    table = _read_table(data, path)
    positions = [_positions_by_key(operations) for operations in stages]
    clocks: list[dict[int, int]] = [{} for _ in stages]
    for number, row in enumerate(table.rows()):
        if row.stage >= len(stages):
            raise table.error(number, f"the pipeline has stages 0 to {len(stages) - 1}", "stage")
        position = row.position
        if position is None:
            if row.instruction is None or row.microbatch is None:
                raise table.error(number, "give position, or instruction and microbatch")
            key = OperationKey(row.instruction, row.microbatch, row.chunk or 0)
            position = positions[row.stage].get(key)
        if position is None or position >= len(stages[row.stage]):
            raise table.error(number, f"stage {row.stage} has no such operation")
        if clocks[row.stage].setdefault(position, row.frequency) != row.frequency:
            raise table.error(
                number,
                "says another clock of an operation than a row before it; is the file of one run?",
            )
    return [[mhz for _, mhz in sorted(stage.items())] for stage in clocks]
