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

import gzip
import json
import os
import re
import statistics
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from itertools import pairwise
from typing import IO, TYPE_CHECKING, Any, Final, cast

from envplan._files import opened
from envplan.errors import InputError, shown
from envplan.pipeline.imports.steps import (
    COMPUTATION,
    ImportedSchedule,
    Place,
    Step,
    located,
    walk,
)

if TYPE_CHECKING:
    from envplan.profile import Profile

__all__ = ["ImportedTrace", "TimeCheck", "TraceMapping", "read_chrome_traces"]

MAX_TRACE_BYTES: Final = 256 * 2**20

_CHUNK: Final = "chunk"
_ORDER: Final = "order"
_GROUPS: Final = frozenset({"microbatch", _CHUNK, "stage", "rank"})
_NS_PER_US: Final = 1000
_NS_PER_S: Final = 10**9
_TOLERANCE: Final = 1.1
_LARGEST_US: Final = 10**16
_ARGS: Final = "args."
_BACKWARDS: Final = COMPUTATION - {"forward"}
V_PLACEMENT: Final = "v"
#: Where model stages may lie, if a rank has several.
PLACEMENTS: Final = ("interleaved", V_PLACEMENT)


@dataclass(frozen=True)
class TraceMapping:
    """How the events of a trace are read.

    Attributes:
        instructions: instruction -> regular expression of the names of its events.
        rank: where an event's rank stands: `file` (each file is one), `pid`, `tid`, or `args.NAME`.
            None: the group `rank`, else `file` where there are several, else `pid` where operations
            have several, else `tid`. Ranks are numbered by the order of what stands there.
        microbatch: `args.NAME`; None: the group, else by order of appearance, for each rank, chunk
            and instruction.
        chunk: `args.NAME`; `order`: a microbatch goes through a rank's chunks one after the other
            and comes back the other way, weights in the order of inputs; None: the group, 0 in a
            name without it; where no name has it, every rank has one model stage.
        placement: which model stage a chunk is where no group `stage` says so: `interleaved`
            (chunk c of rank r is stage c * ranks + r) or `v` (chunk 1 comes back, so that it is
            stage 2 * ranks - 1 - r).
        category: regular expression; events of another `cat` are left out. None: none are.
        within: regular expression of names; only operations that lie inside one such event of
            their file and process count, to take one iteration of several. None: all do.
    """

    instructions: Mapping[str, str]
    rank: str | None = None
    microbatch: str | None = None
    chunk: str | None = None
    placement: str = "interleaved"
    category: str | None = None
    within: str | None = None


@dataclass(frozen=True)
class TimeCheck:
    """What a profile says of the operations of one kind, beside what was recorded.

    Attributes:
        recorded: median over all microbatches, s.
        fastest, slowest: of the profile's options, s.
    """

    profile_stage: int
    instruction: str
    count: int
    recorded: float
    fastest: float
    slowest: float

    @property
    def fits(self) -> bool:
        """Whether the recorded time lies within the profile's, or 10% beyond them."""
        return self.fastest / _TOLERANCE <= self.recorded <= self.slowest * _TOLERANCE


@dataclass(frozen=True)
class ImportedTrace(ImportedSchedule):
    """A recorded schedule, and how long its operations took.

    Attributes:
        durations_ns: for each rank, the time of each of its operations; 0 where an event holds
            several, whose own times are not known.
        rank_labels: what each rank is called in the trace.
    """

    durations_ns: tuple[tuple[int, ...], ...] = ()
    rank_labels: tuple[str, ...] = ()

    def check_times(self, profile: Profile) -> list[TimeCheck]:
        """Compare how long operations took with how long a profile says they take.

        Raises:
            InputError: the profile has no rows for an operation.
        """
        times: dict[tuple[int, str], list[int]] = defaultdict(list)
        for order, durations in zip(self.orders, self.durations_ns, strict=True):
            for op, duration in zip(order, durations, strict=True):
                times[op.profile_stage, op.instruction] += [duration] if duration else []
        fitted = profile.fitted({instruction for _, instruction in times})
        checks = []
        for (stage, instruction), recorded in sorted(one for one in times.items() if one[1]):
            options = fitted.table(stage, instruction).time_ns
            checks.append(
                TimeCheck(
                    stage,
                    instruction,
                    len(recorded),
                    statistics.median(recorded) / _NS_PER_S,
                    int(options.min()) / _NS_PER_S,
                    int(options.max()) / _NS_PER_S,
                )
            )
        return checks


@dataclass(frozen=True, eq=False)
class _Event:
    """An event with a begin and an end, in ns, and what its name says if it is an operation.

    One of several operations that share an event is `shared`: its own times are not known.
    """

    name: str
    category: str
    file: int
    pid: int | str
    tid: int | str
    args: Mapping[str, Any]
    begin: int
    end: int
    instruction: str = ""
    groups: Mapping[str, int] = field(default_factory=dict)
    shared: bool = False

    def __str__(self) -> str:
        return f"{shown(self.name)} ({_us(self.begin)} to {_us(self.end)} us)"


def read_chrome_traces(
    paths: Sequence[str | os.PathLike[str]], mapping: TraceMapping
) -> ImportedTrace:
    """Read one iteration from a trace, or from one trace for each rank.

    Clocks of ranks need not agree: only the order on each rank counts, and what waits for what
    follows from the instructions.

    Raises:
        InputError: a file cannot be read or is larger than 256 MiB unpacked, an expression or event
            is malformed, or nothing matches; or two operations of one rank overlap: names both.
    """
    operations_of = _rules(mapping)
    found: list[_Event] = []
    skipped: Counter[str] = Counter()
    for number, path in enumerate(paths):
        try:
            found += operations_of(_spans(_events(path), number), skipped)
        except InputError as error:
            raise located(error, path) from None
    if not found:
        raise InputError(
            f"no event matches: of {sum(skipped.values())} events, the most frequent are "
            + ", ".join(f"{shown(name)} ({count})" for name, count in skipped.most_common(5))
            if skipped
            else "there are no events with a begin and an end"
        )
    labels = _rank_labels(found, mapping.rank, len(paths))
    numbers = _numbered(labels)
    ranks: list[list[_Event]] = [[] for _ in numbers]
    for operation, label in zip(found, labels, strict=True):
        ranks[numbers[label]].append(operation)
    for rank, operations in enumerate(ranks):
        operations.sort(key=lambda operation: (operation.begin, operation.end))
        _refuse_overlap(rank, operations)
    if all(operation.instruction not in _BACKWARDS for operation in found):
        raise InputError(
            "no event is a backward: say which are backward, or backward_input and backward_weight"
        )
    steps = _steps(mapping, ranks)
    schedule = walk(
        ([(Place(str(operation)), operation) for operation in rank] for rank in ranks),
        lambda _rank, _place, operation: [steps[operation]],
        again="; is this a trace of several iterations? Then name an event around one of them "
        "(--within); or of several model chunks on a rank (--chunk)?",
    )
    durations = tuple(
        tuple(0 if one.shared else one.end - one.begin for one in rank) for rank in ranks
    )
    return ImportedTrace(schedule.orders, skipped, durations, tuple(map(str, numbers)))


def _events(path: str | os.PathLike[str]) -> list[Any]:
    try:
        with opened(path) as raw:
            zipped = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            file = cast("IO[bytes]", gzip.GzipFile(fileobj=raw)) if zipped else raw
            data = file.read(MAX_TRACE_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"cannot be read: {reason}") from None
    if len(data) > MAX_TRACE_BYTES:
        raise InputError(f"is larger than {MAX_TRACE_BYTES // 2**20} MiB; cut it to one iteration")
    try:  # traces break rules that our own files keep, and their times want all their digits
        document = json.loads(data.decode("utf-8-sig", errors="replace"), parse_float=Decimal)
    except json.JSONDecodeError as error:
        raise InputError(
            f"not valid JSON: {error.msg}", line=error.lineno, column=error.colno
        ) from None
    except (RecursionError, ValueError):
        raise InputError("not valid JSON: nested too deeply, or a number too long") from None
    events = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(events, list):
        raise InputError("is no Chrome trace: it has no list of events under traceEvents")
    return events


def _spans(events: Sequence[Any], file: int) -> Iterator[_Event]:
    """Complete events, and pairs of begin and end of one thread, the innermost first."""
    paired = []
    for number, event in enumerate(events):
        if not isinstance(event, dict):
            raise InputError(f"event {number} must be an object, not {shown(event)}")
        phase = event.get("ph")
        if phase == "X":
            begin = _ns(event, "ts", number)
            duration = _ns(event, "dur", number) if "dur" in event else 0
            if duration < 0:
                name = shown(event.get("name"))
                raise InputError(f"event {number} ({name}) has a negative duration")
            yield _event(event, {}, file, begin, begin + duration)
        elif phase in ("B", "E"):
            paired.append((_ns(event, "ts", number), event))
    open_spans: dict[tuple[str, str], list[tuple[int, dict[str, Any]]]] = defaultdict(list)
    for at, event in sorted(paired, key=lambda pair: pair[0]):
        stack = open_spans[str(event.get("pid")), str(event.get("tid"))]
        if event["ph"] == "B":
            stack.append((at, event))
        elif stack:
            begin, opened = stack.pop()
            yield _event(opened, event, file, begin, at)


def _event(
    event: Mapping[str, Any], closed: Mapping[str, Any], file: int, begin: int, end: int
) -> _Event:
    """An event, with the arguments that only its end has, if that is one of its own."""
    given = [one.get("args") for one in (closed, event)]
    args = {name: value for one in given if isinstance(one, dict) for name, value in one.items()}
    pid, tid = (
        value if isinstance(value, int) else str(value)
        for value in (event.get("pid", 0), event.get("tid", 0))
    )
    name, category = str(event.get("name", "")), str(event.get("cat", ""))
    return _Event(name, category, file, pid, tid, args, begin, end)


def _ns(event: Mapping[str, Any], field_name: str, number: int) -> int:
    """A time in microseconds, in whole ns."""
    value, name = event.get(field_name), shown(event.get("name"))
    if isinstance(value, bool) or not isinstance(value, int | Decimal):
        raise InputError(
            f"event {number} ({name}): {field_name} must be a number of microseconds, not "
            f"{shown(value)}"
        )
    if not -_LARGEST_US < value < _LARGEST_US:
        raise InputError(f"event {number} ({name}): {field_name} is too large")
    return round(value * _NS_PER_US)


def _rules(mapping: TraceMapping) -> Callable[[Iterable[_Event], Counter[str]], list[_Event]]:
    """What finds the operations among a file's events, and counts the others."""
    if not mapping.instructions:
        raise InputError("give the names of at least one instruction's events")
    if mapping.placement not in PLACEMENTS:
        raise InputError(
            f"the placement must be {' or '.join(PLACEMENTS)}, not {shown(mapping.placement)}"
        )
    for instruction in mapping.instructions:
        if not instruction.isidentifier():
            raise InputError(f"{shown(instruction)} is no name of an instruction")
    patterns = {
        instruction: _compiled(text, f"the expression for {instruction}")
        for instruction, text in mapping.instructions.items()
    }
    category = _compiled(mapping.category or "", "the expression for categories")
    within = _compiled(mapping.within or "", "the expression for the event around")

    def named(event: _Event) -> list[_Event]:
        """The operations of an event: several, one after the other, if its name has them so."""
        if not category.search(event.category):
            return []
        found = [
            (match, instruction)
            for instruction, pattern in patterns.items()
            if (match := pattern.search(event.name))
        ]
        found.sort(key=lambda one: one[0].start())
        if any(one.end() > other.start() for (one, _), (other, _) in pairwise(found)):
            names = " and ".join(sorted(instruction for _, instruction in found))
            raise InputError(f"{event} matches the expressions of {names}")
        operations = []
        for k, (match, instruction) in enumerate(found):
            said = {name: value for name, value in match.groupdict().items() if value is not None}
            begin, end = (
                event.begin + (event.end - event.begin) * at // len(found) for at in (k, k + 1)
            )
            groups = {name: _whole(value, name, event) for name, value in said.items()}
            shared = len(found) > 1
            one = replace(event, instruction=instruction, groups=groups, shared=shared)
            operations.append(replace(one, begin=begin, end=end))
        return operations

    def operations(events: Iterable[_Event], skipped: Counter[str]) -> list[_Event]:
        found, frames = [], []
        for event in events:
            if mapping.within is not None and within.search(event.name):
                frames.append(event)
            elif not (operations := named(event)):
                skipped[event.name] += 1
            else:
                found += operations
        if mapping.within is None:
            return found
        inside = [one for one in found if any(_holds(frame, one) for frame in frames)]
        if len(inside) < len(found):
            skipped["operations of other iterations"] += len(found) - len(inside)
        return inside

    return operations


def _holds(frame: _Event, event: _Event) -> bool:
    inside = frame.begin <= event.begin and event.end <= frame.end
    return inside and str(frame.pid) == str(event.pid)


def _compiled(text: str, what: str) -> re.Pattern[str]:
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise InputError(f"{what} is no regular expression: {error}") from None
    if unknown := pattern.groupindex.keys() - _GROUPS:
        raise InputError(
            f"{what} has a group {shown(min(unknown))}; known: {', '.join(sorted(_GROUPS))}"
        )
    return pattern


def _whole(value: Any, what: str, event: _Event) -> int:
    text = str(value)
    if isinstance(value, bool) or not re.fullmatch(r"[0-9]{1,18}", text):
        raise InputError(f"{event}: {what} must be a whole number, not {shown(value)}")
    return int(text)


def _rank_labels(found: Sequence[_Event], source: str | None, num_files: int) -> list[Any]:
    if source is None:
        if any("rank" in operation.groups for operation in found):
            return [_group(operation, "rank") for operation in found]
        several = len({str(operation.pid) for operation in found}) > 1
        source = "file" if num_files > 1 else "pid" if several else "tid"
    if source in ("file", "pid", "tid"):
        return [getattr(operation, source) for operation in found]
    return [_argument(operation, source, "the rank") for operation in found]


def _group(operation: _Event, group: str) -> int:
    if group not in operation.groups and group != _CHUNK:
        raise InputError(f"{operation}: its name does not say the {group}, others' names do")
    return operation.groups.get(group, 0)


def _argument(event: _Event, source: str, what: str) -> Any:
    if not source.startswith(_ARGS):
        known = {"the rank": "file, pid, tid or args.NAME", "the chunk": "args.NAME or order"}
        raise InputError(
            f"{what} cannot be taken from {shown(source)}; give {known.get(what, 'args.NAME')}"
        )
    name = source.removeprefix(_ARGS)
    if name not in event.args:
        raise InputError(f"{event} has no {source} for {what}")
    label = event.args[name]
    if not isinstance(label, int | str):
        raise InputError(f"{event}: {source} must be a number or a name, not {shown(label)}")
    return label


def _numbered(labels: Iterable[Any]) -> dict[Any, int]:
    """Label -> its place among all: whole numbers by value, before others by their digits."""

    def key(label: Any) -> tuple[bool, Any]:
        if isinstance(label, int):
            return (False, label)
        parts = re.split(r"([0-9]+)", str(label))
        return (
            True,
            [(part.isdecimal(), int(part) if part.isdecimal() else part) for part in parts],
        )

    return {label: number for number, label in enumerate(sorted(set(labels), key=key))}


def _refuse_overlap(rank: int, operations: Sequence[_Event]) -> None:
    for one, other in pairwise(operations):
        if other.begin < one.end:
            raise InputError(
                f"{one} and {other} overlap on rank {rank}: a GPU runs one operation at a time; "
                "are the expressions or the source of ranks wrong? (An event that holds a forward "
                "and a backward is read where its name has both, as DualPipeV's OVERLAP_F_B)"
            )


def _steps(mapping: TraceMapping, ranks: Sequence[Sequence[_Event]]) -> dict[_Event, Step]:
    """Each event's microbatch and model stage.

    What one name or argument tells, those of all computation must tell; of a data loader's or an
    optimizer's events they need not: these are counted, and belong to their rank's first chunk.
    """
    everything = [operation for rank in ranks for operation in rank]
    told = _told(everything, mapping.microbatch, "microbatch")
    named = _told(everything, None, "stage")
    chunks: Mapping[_Event, int] = {}
    if mapping.chunk == _ORDER and not named:
        if not told:
            raise InputError(
                "chunks go by the order of a microbatch's operations, so say where the microbatch "
                "stands: in a group microbatch, or in args.NAME"
            )
        chunks = _in_order([[(one, told[one]) for one in rank if one in told] for rank in ranks])
    elif not named:
        chunks = _renumbered(_told(everything, mapping.chunk, _CHUNK))
    microbatches, seen = _renumbered(told), Counter[tuple[str, int]]()
    steps: dict[_Event, Step] = {}
    for rank, operations in enumerate(ranks):
        first = min((named[one] for one in operations if one in named), default=rank)
        for one in operations:
            chunk = chunks.get(one, 0)
            back = mapping.placement == V_PLACEMENT and chunk % 2
            placed = chunk * len(ranks) + (len(ranks) - 1 - rank if back else rank)
            stage = named.get(one, first) if named else placed
            counted = seen[one.instruction, stage]
            seen[one.instruction, stage] += one not in microbatches
            steps[one] = Step(one.instruction, microbatches.get(one, counted), stage)
    return steps


def _told(everything: Sequence[_Event], source: str | None, what: str) -> dict[_Event, int]:
    """What arguments or names say; empty where no name says anything."""
    if source is None:
        if not any(what in one.groups for one in everything):
            return {}
        return {
            one: _group(one, what)
            for one in everything
            if what in one.groups or one.instruction in COMPUTATION
        }
    name = source.removeprefix(_ARGS)
    return {
        one: _whole(_argument(one, source, f"the {what}"), what, one)
        for one in everything
        if name in one.args or one.instruction in COMPUTATION
    }


def _in_order(ranks: Sequence[Sequence[tuple[_Event, int]]]) -> dict[_Event, int]:
    """The chunk of each operation, given with its microbatch, in the order that ranks run them.

    Data go through the chunks forwards and gradients backwards, so the n-th of `count` is certain.
    Weights are nobody's data: they are taken to come in the order of their inputs' gradients.
    """
    passes = Counter(
        (rank, microbatch)
        for rank, operations in enumerate(ranks)
        for one, microbatch in operations
        if one.instruction == "forward"
    )
    count = max(passes.values(), default=1)
    chunks: dict[_Event, int] = {}
    seen: Counter[tuple[int, str, int]] = Counter()
    split: dict[tuple[int, int], list[int]] = defaultdict(list)
    for rank, one, microbatch in ((rank, *of) for rank, ops in enumerate(ranks) for of in ops):
        kind = "backward" if one.instruction == "backward_input" else one.instruction
        n = seen[rank, kind, microbatch]
        seen[rank, kind, microbatch] += 1
        inputs = split[rank, microbatch]
        if kind == "backward":
            n = count - 1 - n
        elif kind == "backward_weight":
            if n >= len(inputs):
                raise InputError(
                    f"{one}: no backward_input of microbatch {microbatch} comes before it"
                )
            n = inputs[n]
        if n < 0:
            raise InputError(
                f"{one}: there are more backwards of microbatch {microbatch} than its rank has "
                f"chunks, {count}; is this a trace of several iterations?"
            )
        if one.instruction == "backward_input":
            inputs.append(n)
        chunks[one] = n
    return chunks


def _renumbered(told: Mapping[_Event, int]) -> dict[_Event, int]:
    """The same from 0 on: counters often run on through all iterations."""
    numbers = _numbered(told.values())
    return {operation: numbers[label] for operation, label in told.items()}


def _us(nanoseconds: int) -> str:
    return f"{nanoseconds // _NS_PER_US}.{nanoseconds % _NS_PER_US:03d}"
