"""Clocks that somebody else has chosen, read from a file as data.

There are three kinds of files:

- What Perseus, Zeus and Kareus write, `freqs_pipeline_*.py`: a list for each stage of MHz, or of
  (instruction, MHz). It is read with ast.literal_eval and never run. Kareus writes a
  `scheds_pipeline_*.py` of the same number beside it, with the config of each operation.
- Our frequency plan.
- A CSV of stage, frequency and either position or instruction and microbatch; maybe with configs.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, TypeGuard, TypeVar

from pydantic import BaseModel, Field

from envplan._io.files import AnyPath, decoded, parse_json, read_bounded
from envplan._io.tables import Table, parse_table
from envplan.enforce.freqplan import FrequencyPlan, OperationKey, RankPlan
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

#: MHz, or MHz and a config.
_Clock = int | tuple[int, str]


class _Kind(Enum):
    """The kinds of files of clocks."""

    LISTS = auto()
    FREQUENCY_PLAN = auto()
    TABLE = auto()


def read_clocks(path: AnyPath, pipeline: Pipeline) -> _ByStage[_Clock]:
    """MHz of each stage's operations in execution order, as `plan_from_clocks` takes them.

    Where the file has configs, or Kareus's file of configs lies beside it, (MHz, config) instead.

    Args:
        path: of the file.
        pipeline: whose operations the clocks are for.

    Raises:
        InputError: the file is none of the three kinds, or does not fit the pipeline.
    """
    data, path = read_bounded(path, MAX_FILE_BYTES), Path(path)
    stages = _operations_by_stage(pipeline)
    with naming(path):
        kind = _kind_of(data, path)
        if kind is _Kind.FREQUENCY_PLAN:
            return _clocks_of_frequency_plan(data, path, stages)
        if kind is _Kind.TABLE:
            return _clocks_of_table(data, path, stages)
        clocks = _clocks_of_lists(_parse_lists(data, path), stages)
    configs_path = _configs_beside(path)
    if configs_path is None:
        return clocks
    with naming(configs_path):
        lists = _parse_lists(read_bounded(configs_path, MAX_FILE_BYTES), configs_path)
        return _with_configs(clocks, lists, stages)


def count_clocks(path: AnyPath) -> list[int]:
    """How many operations of each stage a list or table has clocks for, whatever their pipeline.

    Raises:
        InputError: the file is no list and no table of clocks.
    """
    data, path = read_bounded(path, MAX_FILE_BYTES), Path(path)
    with naming(path):
        if _kind_of(data, path) is _Kind.LISTS:
            lists = _parse_lists(data, path)
            return [len(_clocks_of_list(stage, entries)) for stage, entries in enumerate(lists)]
        rows = list(_read_table(data, path).rows())
    operations_by_stage: dict[int, set[_NamedOperation]] = defaultdict(set)
    for row in rows:
        operations_by_stage[row.stage].add(row.operation)
    last_stage = max(operations_by_stage)
    return [len(operations_by_stage[stage]) for stage in range(last_stage + 1)]


def _kind_of(data: bytes, path: Path) -> _Kind:
    """The kind of a file by how its text begins, and else by its name."""
    beginning = data.lstrip(_BLANK_OR_BYTE_ORDER_MARK)[:1]
    if beginning == b"{":
        return _Kind.FREQUENCY_PLAN
    if beginning in _LIST_BEGINNINGS or path.suffix.lower() in _LIST_SUFFIXES:
        return _Kind.LISTS
    return _Kind.TABLE


def _operations_by_stage(pipeline: Pipeline) -> _ByStage[Operation]:
    stages = []
    for begin, end in pairwise(pipeline.stage_begin.tolist()):
        stages.append(pipeline.operations[begin:end])
    return stages


def _require_stages(num_stages: int, stages: _ByStage[Operation]) -> None:
    """Raises: InputError: a file's number of stages is not the pipeline's."""
    if num_stages != len(stages):
        raise InputError(f"has {num_stages} stages; the pipeline has {len(stages)}")


# Frequency plans


def _clocks_of_frequency_plan(
    data: bytes, path: Path, stages: _ByStage[Operation]
) -> list[list[_Clock]]:
    plan = FrequencyPlan.from_document(parse_json(data, path), path=path)
    _require_stages(plan.layout.stages, stages)
    rank_of_stage = {rank.stage: rank for rank in plan.ranks}
    clocks = []
    for stage in range(len(stages)):
        rank = rank_of_stage[stage]
        clocks.append(_clocks_of_rank(rank))
    return clocks


def _clocks_of_rank(rank: RankPlan) -> list[_Clock]:
    if rank.configs is None:
        return list(rank.frequencies)
    return list(zip(rank.frequencies, rank.configs, strict=True))


# Python lists


def _parse_lists(data: bytes, path: Path) -> list[list[object]]:
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
    if not _is_list_of_lists(value):
        raise InputError("must hold a list for each stage")
    return value


def _is_list_of_lists(value: object) -> TypeGuard[list[list[object]]]:
    return isinstance(value, list) and all(isinstance(stage, list) for stage in value)


def _clocks_of_lists(lists: _ByStage[object], stages: _ByStage[Operation]) -> list[list[int]]:
    """Clocks of a list for each stage.

    Raises:
        InputError: they do not fit the pipeline.
    """
    _require_stages(len(lists), stages)
    clocks = []
    for stage, entries in enumerate(lists):
        clocks.append(_clocks_of_list(stage, entries, stages[stage]))
    return clocks


def _clocks_of_list(
    stage: int, entries: Sequence[object], operations: Sequence[Operation] = ()
) -> list[int]:
    """Clocks of one stage's list of MHz or (instruction, MHz).

    Operations of constant time may be left out of a list. Its instructions are therefore compared
    with those of the pipeline only where it has an entry for every operation.

    Args:
        stage: whose list it is, for errors.
        entries: of the list, as Python read them.
        operations: of the stage; none where the pipeline is not known.
    """
    has_all_operations = len(entries) == len(operations)
    clocks_mhz = []
    for position, entry in enumerate(entries):
        instruction = operations[position].instruction if has_all_operations else None
        clocks_mhz.append(_parse_clock(entry, f"[{stage}][{position}]", instruction))
    return clocks_mhz


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
        if isinstance(name, str) and instruction not in (None, name.lower()):
            raise InputError(f"{where} is {shown(name)}; the schedule has {instruction} there")
    if type(mhz) is not int or not 0 <= mhz <= _MAX_MHZ:  # True and False are no clocks
        raise InputError(f"{where} is {shown(entry)}, no clock in MHz")
    return mhz


# Kareus's configs


def _configs_beside(path: Path) -> Path | None:
    """The file of configs that Kareus wrote beside its file of clocks; None: there is none."""
    if not path.name.startswith(_CLOCKS_PREFIX):
        return None
    number_and_suffix = path.name.removeprefix(_CLOCKS_PREFIX)
    configs_path = path.with_name(f"{_CONFIGS_PREFIX}{number_and_suffix}")
    return configs_path if configs_path.exists() else None


def _with_configs(
    clocks: _ByStage[int], lists: _ByStage[object], stages: _ByStage[Operation]
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
    _require_stages(len(lists), stages)
    num_operations = [len(operations) for operations in stages]
    num_clocks = [len(stage_clocks) for stage_clocks in clocks]
    if num_operations != num_clocks:
        raise InputError(f"goes with clocks of {num_operations} operations, one each")
    clocks_and_configs = []
    for operations, stage_clocks, entries in zip(stages, clocks, lists, strict=True):
        configs = []
        for position, operation in enumerate(operations):
            configs.append(_config_of(operation, position, entries))
        clocks_and_configs.append(list(zip(stage_clocks, configs, strict=True)))
    return clocks_and_configs


def _config_of(operation: Operation, position: int, entries: Sequence[object]) -> str:
    """The config of an operation, from the entries of its stage.

    Raises:
        InputError: neither the entry of its position nor that of its microbatch has it.
    """
    for index in (position, operation.microbatch):
        if index < len(entries):
            config = _config_in(entries[index], operation.instruction)
            if config is not None:
                return config
    raise InputError(
        f"stage {operation.stage} says nothing of {operation.instruction} "
        f"{operation.microbatch}, its operation {position}"
    )


def _config_in(entry: object, instruction: str) -> str | None:
    """The config that an entry has for an instruction, its words joined; None: it has none.

    Args:
        entry: (instruction, word, ...), or a tuple of such tuples.
        instruction: that is looked for.
    """
    if not isinstance(entry, tuple):
        return None
    for candidate in (entry, *entry):
        if _is_tuple_of_words(candidate) and candidate[0] == instruction:
            _, *words = candidate
            return " ".join(word for word in words if word)
    return None


def _is_tuple_of_words(value: object) -> TypeGuard[tuple[str, ...]]:
    """Whether a value is a tuple of one string or more."""
    if not isinstance(value, tuple) or not value:
        return False
    return all(isinstance(word, str) for word in value)


# Tables


class _NamedOperation(NamedTuple):
    """An operation as a row names it: by its position, or by instruction and microbatch."""

    position: int | None
    instruction: str | None
    microbatch: int | None
    chunk: int


def _index(description: str) -> Any:
    """The field of a number that counts from 0."""
    return Field(ge=0, lt=2**31, description=description)


class _Row(BaseModel):
    stage: Annotated[int, _index("a stage from 0 up")]
    frequency: Annotated[int, Field(ge=0, le=_MAX_MHZ, description="a clock in MHz")]
    position: Annotated[int | None, _index("a place in the order of execution, from 0")] = None
    instruction: Annotated[str | None, Field(description="an instruction")] = None
    microbatch: Annotated[int | None, _index("a microbatch from 0 up")] = None
    chunk: Annotated[int | None, _index("a chunk from 0 up")] = None
    config: Annotated[str | None, Field(description="a config")] = None

    @property
    def clock(self) -> _Clock:
        """The clock, with its config where the table has any."""
        if self.config is None:
            return self.frequency
        return self.frequency, self.config

    @property
    def operation(self) -> _NamedOperation:
        """The operation of its stage that it is about; chunk 0 where it says none."""
        return _NamedOperation(self.position, self.instruction, self.microbatch, self.chunk or 0)

    @property
    def names_an_operation(self) -> bool:
        """Whether it says which operation of its stage it is about."""
        has_key = self.instruction is not None and self.microbatch is not None
        return self.position is not None or has_key


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


def _position_of(row: _Row, position_by_key: Mapping[OperationKey, int]) -> int | None:
    """The place of a row's operation in its stage's order; None: the stage has no such operation.

    Args:
        row: that names an operation.
        position_by_key: of each operation of the stage.
    """
    if row.position is not None:
        return row.position
    assert row.instruction is not None
    assert row.microbatch is not None
    return position_by_key.get(OperationKey(row.instruction, row.microbatch, row.chunk or 0))


def _clocks_of_table(data: bytes, path: Path, stages: _ByStage[Operation]) -> list[list[_Clock]]:
    """Clocks of a table with a row for each operation, in any order; 0 where there is no row.

    Raises:
        InputError: a row names no operation of the pipeline, or two rows contradict each other.
    """
    table = _read_table(data, path)
    positions = [_positions_by_key(operations) for operations in stages]
    clock_by_position: list[dict[int, _Clock]] = [{} for _ in stages]
    for number, row in enumerate(table.rows()):
        if row.stage >= len(stages):
            raise table.error(number, f"the pipeline has stages 0 to {len(stages) - 1}", "stage")
        if not row.names_an_operation:
            raise table.error(number, "give position, or instruction and microbatch")
        position = _position_of(row, positions[row.stage])
        if position is None or position >= len(stages[row.stage]):
            raise table.error(number, f"stage {row.stage} has no such operation")
        earlier_clock = clock_by_position[row.stage].setdefault(position, row.clock)
        if earlier_clock != row.clock:
            raise table.error(
                number,
                "says another clock of an operation than a row before it; is the file of one run?",
            )
    clocks = []
    for stage, operations in enumerate(stages):
        stage_clocks = clock_by_position[stage]
        clocks.append([stage_clocks.get(position, 0) for position in range(len(operations))])
    return clocks
