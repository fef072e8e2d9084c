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

import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from itertools import pairwise
from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field

from envplan._io.documents import Model
from envplan._io.files import read_bounded
from envplan.errors import InputError, naming, shown
from envplan.pipeline.dag_file import identifier
from envplan.pipeline.imported import ImportedSchedule
from envplan.pipeline.imports import Step, scheduled
from envplan.pipeline.operations import BACKWARD, LETTERS

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
        The schedule, with what the trace calls each rank.

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
    categories = sorted({(one.name, one.said["cat"]) for one in found if one.said["cat"]})
    for (name, one), (other_name, other) in pairwise(categories):
        if name == other_name:
            raise InputError(
                f"events named {shown(name)} are of the categories {one} and {other}: "
                "they are one operation seen twice, on CPU and GPU; take one (--category)"
            )
    source = mapping.rank
    if source is None and not any("rank" in one.said for one in found):
        several = len({str(one.said["pid"]) for one in found}) > 1
        source = "file" if len(paths) > 1 else "pid" if several else "tid"
    labels, ranks = _column(found, "rank", source)
    placed = sorted(zip(ranks, found, strict=True), key=lambda one: (one[0], *one[1][1:3]))
    for (rank, event), (other_rank, after) in pairwise(placed):
        if rank == other_rank and after.begin < event.end:
            raise InputError(
                f"{event} and {after} overlap on rank {rank}: a GPU runs one operation at a "
                "time; are the expressions or the source of ranks wrong? (An event that holds "
                "a forward and a backward is read where its name has both, as DualPipeV's "
                "OVERLAP_F_B)"
            )
    orders: list[list[Step]] = [[] for _ in labels]
    for (rank, _), step in zip(placed, _steps(mapping, placed, len(labels)), strict=True):
        orders[rank].append(step)
    try:
        schedule = scheduled(orders)
    except InputError as error:
        raise InputError(
            f"{error.message}; is this a trace of several iterations? Then name an event around "
            "one of them (--within); or of several model chunks on a rank (--chunk)?"
        ) from None
    return replace(schedule, skipped=skipped, rank_labels=tuple(map(str, labels)))


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
    begun: dict[tuple[str, str], list[tuple[int, dict[str, Any]]]] = defaultdict(list)
    for at, number, event in sorted(timed, key=lambda one: one[0]):
        stack, begin, end = begun[str(event.get("pid")), str(event.get("tid"))], at, at
        args = [event.get("args")]
        if event["ph"] == "B":
            stack.append((at, event))
            continue
        if event["ph"] == "X":
            end += _ns({"dur": 0, **event}, "dur", number, least=0)
        elif stack:  # arguments may be said at the begin, at the end or at both
            begin, event = stack.pop()
            args.append(event.get("args"))
        else:
            continue
        said = {"file": file, "cat": str(event.get("cat", ""))}
        said |= {name: event.get(name, 0) for name in ("pid", "tid")}
        for given in args:
            if isinstance(given, dict):
                said |= {f"args.{name}": value for name, value in given.items()}
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
    frames: dict[str, list[_Event]] = defaultdict(list)
    for event in events:
        counts = category is None or category.search(event.said["cat"])
        if within and within.search(event.name):
            frames[str(event.said["pid"])].append(event)
        elif counts and (named := _named(event, mapping.instructions)):
            found += named
        else:
            skipped[event.name] += 1
    if within is None:
        return found

    def is_inside(one: _Event) -> bool:
        around = frames[str(one.said["pid"])]
        return any(frame.begin <= one.begin and one.end <= frame.end for frame in around)

    inside = list(filter(is_inside, found))
    if len(inside) < len(found):
        skipped["operations of other iterations"] += len(found) - len(inside)
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
    count, length = max(1, len(found)), event.end - event.begin
    ends = [event.begin + length * k // count for k in range(count + 1)]
    return [
        _Event(event.name, ends[k], ends[k + 1], {**event.said, **_groups(match)}, name)
        for k, (match, name) in enumerate(found)
    ]


def _groups(match: re.Match[str]) -> dict[str, str]:
    return {group: text for group, text in match.groupdict().items() if text is not None}


def _column(
    operations: Sequence[_Event], what: str, source: str | None = None
) -> tuple[list[Any], list[Any]]:
    """What operations say of themselves at a source, or without one in a group in their names.

    If one says it, all computation must, and of ranks a data loader's or an optimizer's events,
    too; but names that say no chunk mean the first. All but ranks are whole numbers.

    Returns:
        All different values in order: whole numbers by value, before others by their digits; and
        for each operation the place of its own among them, for counters often run on through all
        iterations. None where it says nothing.
    """
    told = [one.said.get(source or what) for one in operations]
    if source is None and told.count(None) == len(told):
        return [], told
    for k, (one, value) in enumerate(zip(operations, told, strict=True)):
        if value is None and what == "chunk" and source is None:
            told[k] = 0
        elif value is None:
            if what == "rank" or one.instruction in LETTERS:
                where = source or "a group in its name"
                raise InputError(f"{one} does not say its {what} (by {where}), as others do")
        elif what == "rank":
            told[k] = value if isinstance(value, int) else str(value)
        elif re.fullmatch(r"[0-9]{1,18}", str(value)):
            told[k] = int(value)
        else:
            raise InputError(f"{one}: {what} must be a whole number, not {shown(value)}")

    def key(label: Any) -> tuple[bool, list[int | str]]:
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
    _, microbatches = _column(events, "microbatch", mapping.microbatch)
    stages, places = _column(events, "stage")
    _, chunks = _column([] if stages else events, "chunk", mapping.chunk)
    first: dict[int, int] = {}
    for (rank, _), place in zip(placed, places, strict=True):
        if place is not None:
            first[rank] = min(stages[place], first.get(rank, stages[place]))
    seen: Counter[tuple[str, int]] = Counter()
    for k, (rank, event) in enumerate(placed):
        if stages:
            at = first.get(rank, rank) if places[k] is None else stages[places[k]]
        else:
            chunk = chunks[k] or 0
            back = mapping.placement == "v" and chunk % 2
            at = chunk * num_ranks + (num_ranks - 1 - rank if back else rank)
        counted = seen[event.instruction, at]
        seen[event.instruction, at] += microbatches[k] is None
        yield Step(event.instruction, counted if microbatches[k] is None else microbatches[k], at)
