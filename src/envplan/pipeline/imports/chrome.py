"""A recorded training iteration as a schedule: Chrome trace events whose names the user maps.

Traces are JSON, gzipped or not: a list of events, or an object with one under `traceEvents`, as
PyTorch's profiler and most others write. Complete events (`ph` X) and pairs of B and E count. Which
of them are operations the user says by a regular expression for each instruction, searched for in
the events' names; named groups in it say what the name tells:

    forward=^PP:(?P<stage>\\d+)F(?P<microbatch>\\d+)$

Groups are `microbatch`, `chunk` (which of its rank's model stages), `stage` (the model stage, over
all ranks) and `rank`. What no name tells is taken from the events' other fields or from the order
in which they come: see TraceMapping.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from itertools import groupby, pairwise
from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field

from envplan._files import read_bounded
from envplan._model import Model
from envplan.errors import InputError, naming, shown
from envplan.pipeline.formats import identifier
from envplan.pipeline.imports import ImportedSchedule, Step, scheduled
from envplan.pipeline.schedules import BACKWARD, LETTERS

__all__ = ["TraceMapping", "read_chrome_traces"]

MAX_TRACE_BYTES: Final = 256 * 2**20

#: Named groups in expressions.
_GROUPS: Final = ("chunk", "microbatch", "rank", "stage")
_NS_PER_US: Final = 1000
_LARGEST_US: Final = 10**16


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


class _Event(NamedTuple):
    """An event with a begin and an end, in ns.

    Attributes:
        said: what it says of itself: `file`, `pid`, `tid`, its category as `cat`, its arguments as
            `args.NAME`, and the groups in its name.
        instruction: if it is an operation.
    """

    name: str
    begin: int
    end: int
    said: Mapping[str, Any]
    instruction: str = ""

    def __str__(self) -> str:
        begin, end = (f"{at // _NS_PER_US}.{at % _NS_PER_US:03d}" for at in (self.begin, self.end))
        return f"{shown(self.name)} ({begin} to {end} us)"


def read_chrome_traces(
    paths: Sequence[str | os.PathLike[str]], mapping: TraceMapping
) -> ImportedSchedule:
    """Read one iteration from a trace, or from one trace for each rank.

    Clocks of ranks need not agree: only the order on each rank counts, and what waits for what
    follows from the instructions.

    Returns:
        The schedule; its fact `rank_labels` says what the trace calls each rank.

    Raises:
        InputError: a file cannot be read or is larger than 256 MiB unpacked, an expression or event
            is malformed, or nothing matches; or two operations of one rank overlap: names both.
    """
    found: list[_Event] = []
    skipped: Counter[str] = Counter()
    for number, path in enumerate(paths):
        with naming(path):
            found += _operations(_spans(_events(path), number), mapping, skipped)
    if not any(one.instruction.startswith(BACKWARD) for one in found):
        most = ", ".join(f"{shown(name)} ({count})" for name, count in skipped.most_common(5))
        raise InputError(
            "no event is a backward: say which are backward, or backward_input and "
            f"backward_weight; {sum(skipped.values())} events match nothing, most often: {most}"
        )
    categories = {(one.name, one.said["cat"]) for one in found if one.said["cat"]}
    for (name, one), (other_name, other) in pairwise(sorted(categories)):
        if name == other_name:
            raise InputError(
                f"events named {shown(name)} are of the categories {one} and {other}: "
                "they are one operation seen twice, on CPU and GPU; take one (--category)"
            )
    source = mapping.rank
    if source is None and not any("rank" in one.said for one in found):
        several = len({str(one.said["pid"]) for one in found}) > 1
        source = "file" if len(paths) > 1 else "pid" if several else "tid"
    labels, ranks = _numbered(_told(found, source, "rank"))
    placed = sorted(zip(ranks, found, strict=True), key=lambda one: (one[0], *one[1][1:3]))
    for (rank, event), (other_rank, after) in pairwise(placed):
        if rank == other_rank and after.begin < event.end:
            raise InputError(
                f"{event} and {after} overlap on rank {rank}: a GPU runs one operation at a "
                "time; are the expressions or the source of ranks wrong? (An event that holds "
                "a forward and a backward is read where its name has both, as DualPipeV's "
                "OVERLAP_F_B)"
            )
    steps = zip((rank for rank, _ in placed), _steps(mapping, placed, len(labels)), strict=True)
    try:
        schedule = scheduled(
            [step for _, step in own] for _, own in groupby(steps, key=lambda one: one[0])
        )
    except InputError as error:
        raise InputError(
            f"{error.message}; is this a trace of several iterations? Then name an event around "
            "one of them (--within); or of several model chunks on a rank (--chunk)?"
        ) from None
    return replace(schedule, skipped=skipped, facts={"rank_labels": list(map(str, labels))})


def _events(path: str | os.PathLike[str]) -> list[Any]:
    data = read_bounded(path, MAX_TRACE_BYTES)
    try:  # traces break rules that our own files keep, and their times want all their digits
        document = json.loads(data.decode("utf-8-sig", errors="replace"), parse_float=Decimal)
    except (RecursionError, ValueError) as error:
        reason = getattr(error, "msg", "nested too deeply, or a number too long")
        line, column = getattr(error, "lineno", None), getattr(error, "colno", None)
        raise InputError(f"not valid JSON: {reason}", line=line, column=column) from None
    events = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(events, list):
        raise InputError("is no Chrome trace: it has no list of events under traceEvents")
    return events


def _spans(events: Sequence[Any], file: int) -> Iterator[_Event]:
    """Complete events, and pairs of begin and end of one thread, the innermost first."""
    timed = []
    for number, event in enumerate(events):
        if not isinstance(event, dict):
            raise InputError(f"event {number} must be an object, not {shown(event)}")
        if event.get("ph") in ("X", "B", "E"):
            timed.append((_ns(event, "ts", number), number, event))
    open_spans: dict[tuple[str, str], list[tuple[int, dict[str, Any]]]] = defaultdict(list)
    for at, number, event in sorted(timed, key=lambda one: one[0]):
        stack, begin, end = open_spans[str(event.get("pid")), str(event.get("tid"))], at, at
        closed = {}
        if event["ph"] == "B":
            stack.append((at, event))
            continue
        if event["ph"] == "X":
            end += _ns({"dur": 0, **event}, "dur", number, least=0)
        elif stack:
            closed, (begin, event) = event, stack.pop()
        else:
            continue
        said = {"file": file, "cat": str(event.get("cat", ""))}
        said |= {name: event.get(name, 0) for name in ("pid", "tid")}
        # Arguments may be said at the begin, at the end or at both.
        for args in (closed.get("args"), event.get("args")):
            if isinstance(args, dict):
                said |= {f"args.{name}": value for name, value in args.items()}
        yield _Event(str(event.get("name", "")), begin, end, said)


def _ns(event: Mapping[str, Any], field: str, number: int, least: int = -_LARGEST_US) -> int:
    """A time in microseconds, in whole ns."""
    us: Any = event.get(field)
    is_number = isinstance(us, int | Decimal) and not isinstance(us, bool)
    if not is_number or not least <= us < _LARGEST_US:
        raise InputError(
            f"event {number} ({shown(event.get('name'))}): {field} must be a number of "
            f"microseconds, not {shown(us)}"
        )
    ns: int = round(us * _NS_PER_US)
    return ns


def _operations(
    events: Iterable[_Event], mapping: TraceMapping, skipped: Counter[str]
) -> list[_Event]:
    """The operations among a file's events; the others are counted."""
    category, within = mapping.category, mapping.within
    found: list[_Event] = []
    frames: list[_Event] = []
    for event in events:
        counts = category is None or category.search(event.said["cat"])
        if within and within.search(event.name):
            frames.append(event)
        elif counts and (named := _named(event, mapping.instructions)):
            found += named
        else:
            skipped[event.name] += 1
    if within is None:
        return found
    inside = [
        one
        for one in found
        if any(
            frame.begin <= one.begin
            and one.end <= frame.end
            and str(frame.said["pid"]) == str(one.said["pid"])
            for frame in frames
        )
    ]
    if others := len(found) - len(inside):
        skipped["operations of other iterations"] += others
    return inside


def _named(event: _Event, instructions: Mapping[str, re.Pattern[str]]) -> list[_Event]:
    """The operations of an event: several, one after the other, if its name has them so."""
    searched = ((pattern.search(event.name), name) for name, pattern in instructions.items())
    found = sorted(
        ((match, name) for match, name in searched if match), key=lambda one: one[0].start()
    )
    if any(one.end() > other.start() for (one, _), (other, _) in pairwise(found)):
        names = " and ".join(sorted(name for _, name in found))
        raise InputError(f"{event} matches the expressions of {names}")
    operations = []
    for k, (match, name) in enumerate(found):
        groups = {group: text for group, text in match.groupdict().items() if text is not None}
        begin, end = (
            event.begin + (event.end - event.begin) * at // len(found) for at in (k, k + 1)
        )
        operations.append(_Event(event.name, begin, end, {**event.said, **groups}, name))
    return operations


def _told(operations: Sequence[_Event], source: str | None, what: str) -> list[Any]:
    """What operations say of themselves at a source, or without one in a group in their names;
    None where they say nothing.

    If one says it, all computation must, and of ranks a data loader's or an optimizer's events,
    too; but names that say no chunk mean the first. All but ranks are whole numbers.
    """
    told = [one.said.get(source or what) for one in operations]
    first = 0 if what == "chunk" and source is None else None
    if source is None and told.count(None) == len(told):
        return told
    for k, (one, value) in enumerate(zip(operations, told, strict=True)):
        if value is None:
            told[k] = first
            if first is None and (what == "rank" or one.instruction in LETTERS):
                where = source or "a group in its name"
                raise InputError(f"{one} does not say its {what} (by {where}), as others do")
        elif what == "rank":
            told[k] = value if isinstance(value, int) else str(value)
        elif re.fullmatch(r"[0-9]{1,18}", str(value)):
            told[k] = int(value)
        else:
            raise InputError(f"{one}: {what} must be a whole number, not {shown(value)}")
    return told


def _numbered(told: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """What is told, in order: whole numbers by value, before others by their digits.

    Returns:
        All different values; and for each one told its place among them, for counters often run
        on through all iterations. None stays None.
    """

    def key(label: int | str) -> tuple[bool, list[int | str]]:
        parts = re.split(r"([0-9]+)", str(label))
        return isinstance(label, str), [int(p) if k % 2 else p for k, p in enumerate(parts)]

    labels = sorted({*told} - {None}, key=key)
    place = {label: number for number, label in enumerate(labels)}
    return labels, [place.get(value) for value in told]


def _steps(
    mapping: TraceMapping, placed: Sequence[tuple[int, _Event]], num_ranks: int
) -> Iterator[Step]:
    """Microbatch and model stage of each operation of each rank.

    What one name or argument tells, those of all computation must tell; of a data loader's or an
    optimizer's events they need not: these are counted, and belong to their rank's first chunk.
    """
    events = [event for _, event in placed]
    _, microbatches = _numbered(_told(events, mapping.microbatch, "microbatch"))
    stages, chunks = _told(events, None, "stage"), [None] * len(events)
    first: dict[int, int] = {}
    if named := stages.count(None) < len(stages):
        for (rank, _), stage in zip(placed, stages, strict=True):
            if stage is not None:
                first[rank] = min(stage, first.get(rank, stage))
    else:
        _, chunks = _numbered(_told(events, mapping.chunk, "chunk"))
    seen: Counter[tuple[str, int]] = Counter()
    told = zip(placed, microbatches, stages, chunks, strict=True)
    for (rank, event), microbatch, stage, chunk in told:
        if named:
            at = first.get(rank, rank) if stage is None else stage
        else:
            back = mapping.placement == "v" and (chunk or 0) % 2
            at = (chunk or 0) * num_ranks + (num_ranks - 1 - rank if back else rank)
        counted = seen[event.instruction, at]
        seen[event.instruction, at] += microbatch is None
        yield Step(event.instruction, counted if microbatch is None else microbatch, at)
