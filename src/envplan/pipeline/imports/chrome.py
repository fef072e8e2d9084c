r"""A recorded training iteration as a schedule: Chrome trace events whose names the user maps.

Traces are JSON, gzipped or not: a list of events, or an object with one under `traceEvents`, as
PyTorch's profiler and most others write. Complete events (`ph` X) and pairs of B and E count. Which
of them are operations the user says by a regular expression for each instruction, searched for in
the events' names; named groups in it say what the name tells:

    forward=^PP:(?P<stage>\d+)F(?P<microbatch>\d+)$

Groups are `microbatch`, `chunk` (which of its rank's model stages), `stage` (the model stage, over
all ranks) and `rank`. What no name tells is taken from the events' other fields or from the order
in which they come: see TraceMapping.
"""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Annotated, Final, Literal, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field

from envplan._io.documents import Model
from envplan.errors import InputError, naming, shown
from envplan.pipeline.dag_file import identifier
from envplan.pipeline.imported import ImportedSchedule
from envplan.pipeline.imports import Computation, scheduled
from envplan.pipeline.imports.trace_events import TraceEvent, read_events
from envplan.pipeline.operations import BACKWARD, LETTERS

__all__ = ["TraceMapping", "read_chrome_traces"]

#: Named groups in expressions.
_GROUPS: Final = ("chunk", "microbatch", "rank", "stage")


def _expression(text: object) -> object:
    try:
        pattern = re.compile(str(text))
    except re.error as error:
        raise ValueError(f"must be a regular expression ({error})") from None
    if pattern.groupindex.keys() - set(_GROUPS):
        raise ValueError(f"must have no named groups but {', '.join(_GROUPS)}")
    return pattern


_Expression = Annotated[re.Pattern[str], BeforeValidator(_expression)]


class TraceMapping(Model):
    """How the events of a trace are read.

    Attributes:
        instructions: instruction -> regular expression of the names of its events.
        rank: where an event's rank stands: `file` (each file is one), `pid`, `tid`, or `args.NAME`.
            None: the group `rank`, else `file` where there are several, else `pid` where operations
            have several, else `tid`. Ranks are numbered by the order of what stands there.
        microbatch: `args.NAME`; None: the group, else by order of appearance, for each rank, chunk
            and instruction.
        chunk: `args.NAME`; None: the group, 0 in a name without it; where no name has it, every
            rank has one model stage.
        placement: which model stage a chunk is where no group `stage` says so: `interleaved`
            (chunk c of rank r is stage c * ranks + r) or `v` (chunk 1 comes back, so that it is
            stage 2 * ranks - 1 - r).
        category: regular expression; events of another `cat` are left out. None: none are.
        within: regular expression of names; only operations that lie inside one such event of
            their file and process count, to take one iteration of several. None: all do.
    """

    instructions: dict[Annotated[str, AfterValidator(identifier)], _Expression]
    rank: Annotated[str, Field(pattern=r"^(file|pid|tid|args\..+)$")] | None = None
    microbatch: Annotated[str, Field(pattern=r"^args\..+$")] | None = None
    chunk: Annotated[str, Field(pattern=r"^args\..+$")] | None = None
    placement: Literal["interleaved", "v"] = "interleaved"
    category: _Expression | None = None
    within: _Expression | None = None


def read_chrome_traces(
    paths: Sequence[str | os.PathLike[str]], mapping: TraceMapping
) -> ImportedSchedule:
    """Read one iteration from a trace, or from one trace for each rank.

    Clocks of ranks need not agree: only the order on each rank counts, and what waits for what
    follows from the instructions.

    Args:
        paths: of the traces.
        mapping: how events are read.

    Returns:
        The schedule, with what the trace calls each rank.

    Raises:
        InputError: a file cannot be read or is larger than 256 MiB unpacked, an expression or event
            is malformed, or nothing matches; or two operations of one rank overlap: names both.
    """
    operations: list[TraceEvent] = []
    skipped: Counter[str] = Counter()
    for number, path in enumerate(paths):
        with naming(path):
            operations += _find_operations(read_events(path, number), mapping, skipped)
    _check_backwards(operations, skipped)
    _check_categories(operations)
    ranks = _read_field(operations, "rank", _rank_source(operations, mapping, len(paths)))
    placed = _place(operations, ranks)
    _check_overlaps(placed)
    orders: list[list[Computation]] = [[] for _ in ranks.labels]
    computations = _computations(mapping, placed, len(orders))
    for (rank, _), computation in zip(placed, computations, strict=True):
        orders[rank].append(computation)
    try:
        schedule = scheduled(orders)
    except InputError as error:
        raise InputError(
            f"{error.message}; is this a trace of several iterations? Then name an event around "
            "one of them (--within); or of several model chunks on a rank (--chunk)?"
        ) from None
    return replace(schedule, skipped=skipped, rank_labels=tuple(map(str, ranks.labels)))


def _find_operations(
    events: Iterable[TraceEvent], mapping: TraceMapping, skipped: Counter[str]
) -> list[TraceEvent]:
    """The operations among a file's events; the others are counted in `skipped`."""
    category, within = mapping.category, mapping.within
    operations: list[TraceEvent] = []
    frames: defaultdict[str, list[TraceEvent]] = defaultdict(list)
    for event in events:
        if within and within.search(event.name):
            frames[str(event.fields["pid"])].append(event)
            continue
        named_operations: list[TraceEvent] = []
        if category is None or category.search(event.fields["cat"]):
            named_operations = _operations_of(event, mapping.instructions)
        if not named_operations:
            skipped[event.name] += 1
        operations += named_operations
    if within is None:
        return operations
    inside = [op for op in operations if _is_inside(op, frames[str(op.fields["pid"])])]
    num_outside = len(operations) - len(inside)
    if num_outside:
        skipped["operations of other iterations"] += num_outside
    return inside


def _is_inside(operation: TraceEvent, frames: Iterable[TraceEvent]) -> bool:
    """Whether an operation lies inside one of the events around iterations."""
    return any(
        frame.begin_ns <= operation.begin_ns and operation.end_ns <= frame.end_ns
        for frame in frames
    )


def _operations_of(
    event: TraceEvent, instructions: Mapping[str, re.Pattern[str]]
) -> list[TraceEvent]:
    """The operations of an event: several, one after the other, if its name has them so."""
    matches = []
    for instruction, pattern in instructions.items():
        match = pattern.search(event.name)
        if match:
            matches.append((match, instruction))
    matches.sort(key=lambda found: found[0].start())
    if any(match.end() > later.start() for (match, _), (later, _) in pairwise(matches)):
        names = " and ".join(sorted(instruction for _, instruction in matches))
        raise InputError(f"{event} matches the expressions of {names}")
    # The time of the event is shared out evenly.
    length_ns = event.end_ns - event.begin_ns
    operations = []
    end_ns = event.begin_ns
    for number, (match, instruction) in enumerate(matches, start=1):
        begin_ns = end_ns
        end_ns = event.begin_ns + length_ns * number // len(matches)
        operations.append(
            TraceEvent(
                name=event.name,
                begin_ns=begin_ns,
                end_ns=end_ns,
                fields={**event.fields, **_named_groups(match)},
                instruction=instruction,
            )
        )
    return operations


def _named_groups(match: re.Match[str]) -> dict[str, str]:
    return {group: text for group, text in match.groupdict().items() if text is not None}


def _check_backwards(operations: Sequence[TraceEvent], skipped: Counter[str]) -> None:
    if any(op.instruction.startswith(BACKWARD) for op in operations):
        return
    most_common = [f"{shown(name)} ({count})" for name, count in skipped.most_common(5)]
    raise InputError(
        "no event is a backward: say which are backward, or backward_input and "
        f"backward_weight; {sum(skipped.values())} events match nothing, most often: "
        f"{', '.join(most_common)}"
    )


def _check_categories(operations: Sequence[TraceEvent]) -> None:
    """Refuse operations of one name in two categories."""
    categories = sorted({(op.name, op.fields["cat"]) for op in operations if op.fields["cat"]})
    for (name, category), (next_name, next_category) in pairwise(categories):
        if name == next_name:
            raise InputError(
                f"events named {shown(name)} are of the categories {category} and "
                f"{next_category}: they are one operation seen twice, on CPU and GPU; take one "
                "(--category)"
            )


def _rank_source(
    operations: Sequence[TraceEvent], mapping: TraceMapping, num_files: int
) -> str | None:
    """The field that tells ranks; None: the group in names. See TraceMapping.rank."""
    if mapping.rank is not None or any("rank" in op.fields for op in operations):
        return mapping.rank
    if num_files > 1:
        return "file"
    processes = {str(op.fields["pid"]) for op in operations}
    return "pid" if len(processes) > 1 else "tid"


class _PlacedOperation(NamedTuple):
    """An operation and the number of its rank."""

    rank: int
    operation: TraceEvent


def _place(operations: Sequence[TraceEvent], ranks: _FieldValues) -> list[_PlacedOperation]:
    """Operations by rank, in the order in which they begin."""
    placed = [
        _PlacedOperation(rank, operation)
        for rank, operation in zip(ranks.numbers, operations, strict=True)
        if rank is not None  # every operation says its rank
    ]
    placed.sort(key=lambda one: (one.rank, one.operation.begin_ns, one.operation.end_ns))
    return placed


def _check_overlaps(placed: Sequence[_PlacedOperation]) -> None:
    for (rank, operation), (next_rank, following) in pairwise(placed):
        if rank == next_rank and following.begin_ns < operation.end_ns:
            raise InputError(
                f"{operation} and {following} overlap on rank {rank}: a GPU runs one operation at "
                "a time; are the expressions or the source of ranks wrong? (An event that holds "
                "a forward and a backward is read where its name has both, as DualPipeV's "
                "OVERLAP_F_B)"
            )


class _FieldValues(NamedTuple):
    """The values of a field of operations.

    Attributes:
        labels: all different values in order: whole numbers by value, before others by their
            digits.
        numbers: for each operation the index of its own among the labels, for counters often run
            on through all iterations; None where it says nothing.
    """

    labels: list[int | str]
    numbers: list[int | None]


def _read_field(
    operations: Sequence[TraceEvent], name: str, source: str | None = None
) -> _FieldValues:
    """The values of a field: in a group of names, or at a source.

    If one operation says it, all computation must, and of ranks a data loader's or an optimizer's
    events, too; but names that say no chunk mean the first. All but ranks are whole numbers.

    Args:
        operations: of all files.
        name: of the group, and of the field in errors.
        source: where it stands; None: in the group.

    Raises:
        InputError: an operation does not say it, or it is no whole number.
    """
    raw = [op.fields.get(source or name) for op in operations]
    if source is None and all(value is None for value in raw):
        return _FieldValues([], [None] * len(raw))
    values: list[int | str | None] = []
    for operation, value in zip(operations, raw, strict=True):
        if value is None and name == "chunk" and source is None:
            values.append(0)
        elif value is None:
            if name == "rank" or operation.instruction in LETTERS:
                where = source or "a group in its name"
                raise InputError(f"{operation} does not say its {name} (by {where}), as others do")
            values.append(None)
        elif name == "rank":
            values.append(value if isinstance(value, int) else str(value))
        elif re.fullmatch(r"[0-9]{1,18}", str(value)):
            values.append(int(value))
        else:
            raise InputError(f"{operation}: {name} must be a whole number, not {shown(value)}")
    labels = sorted({value for value in values if value is not None}, key=_in_natural_order)
    number_of = {label: number for number, label in enumerate(labels)}
    numbers = [None if value is None else number_of[value] for value in values]
    return _FieldValues(labels, numbers)


def _in_natural_order(label: int | str) -> tuple[bool, list[int | str]]:
    """A key that sorts digits in texts by their value, and numbers before texts."""
    parts: list[int | str] = []
    for index, text in enumerate(re.split(r"([0-9]+)", str(label))):
        is_digits = index % 2 == 1
        parts.append(int(text) if is_digits else text)
    return isinstance(label, str), parts


def _computations(
    mapping: TraceMapping, placed: Sequence[_PlacedOperation], num_ranks: int
) -> Iterator[Computation]:
    """Microbatch and model stage of each operation of each rank.

    What one name or argument tells, those of all computation must tell; of a data loader's or an
    optimizer's events they need not: these are counted, and belong to their rank's first chunk.
    """
    operations = [operation for _, operation in placed]
    microbatches = _read_field(operations, "microbatch", mapping.microbatch).numbers
    stages = _model_stages(mapping, placed, num_ranks)
    num_seen: Counter[tuple[str, int]] = Counter()
    for operation, microbatch, stage in zip(operations, microbatches, stages, strict=True):
        if microbatch is None:
            microbatch = num_seen[operation.instruction, stage]
            num_seen[operation.instruction, stage] += 1
        yield Computation(operation.instruction, microbatch, stage)


def _model_stages(
    mapping: TraceMapping, placed: Sequence[_PlacedOperation], num_ranks: int
) -> list[int]:
    """The model stage of each operation, by the group `stage` or by its rank and chunk."""
    operations = [operation for _, operation in placed]
    stages = _read_field(operations, "stage")
    if not stages.labels:
        chunks = _read_field(operations, "chunk", mapping.chunk).numbers
        return [
            _stage_of_chunk(chunk or 0, rank, num_ranks, mapping.placement)
            for (rank, _), chunk in zip(placed, chunks, strict=True)
        ]
    stated_stages: list[int | None] = []
    first_of_rank: dict[int, int] = {}
    for (rank, _), number in zip(placed, stages.numbers, strict=True):
        if number is None:
            stated_stages.append(None)
            continue
        stage = int(stages.labels[number])
        stated_stages.append(stage)
        first_of_rank[rank] = min(stage, first_of_rank.get(rank, stage))
    # Where neither a name nor its rank says a stage, there is one stage a rank.
    return [
        first_of_rank.get(rank, rank) if stage is None else stage
        for (rank, _), stage in zip(placed, stated_stages, strict=True)
    ]


def _stage_of_chunk(
    chunk: int, rank: int, num_ranks: int, placement: Literal["interleaved", "v"]
) -> int:
    """The model stage of a chunk of a rank."""
    comes_back = placement == "v" and chunk % 2 == 1
    position = num_ranks - 1 - rank if comes_back else rank
    return chunk * num_ranks + position
