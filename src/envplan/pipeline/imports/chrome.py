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
import os
import re
import statistics
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import pairwise
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple, cast

from envplan._files import opened
from envplan.errors import InputError, shown
from envplan.pipeline.imports.steps import (
    COMPUTATION,
    ImportedSchedule,
    Step,
    located,
    parsed_json,
    place,
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
        durations_ns: for each rank, the time of each of its operations.
        rank_labels: what each rank is called in the trace.
        skipped: events that are no operation, and how often, by name.
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
                times[op.profile_stage, op.instruction].append(duration)
        fitted = profile.fitted({instruction for _, instruction in times})
        checks = []
        for (stage, instruction), recorded in sorted(times.items()):
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


class _Span(NamedTuple):
    """An event with a begin and an end, in ns."""

    name: str
    category: str
    file: int
    pid: int | str
    tid: int | str
    args: Mapping[str, Any]
    begin: int
    end: int

    def __str__(self) -> str:
        return f"{shown(self.name)} ({_us(self.begin)} to {_us(self.end)} us)"


@dataclass(frozen=True, eq=False)
class _Found:
    """An event that is an operation."""

    span: _Span
    instruction: str
    groups: Mapping[str, int]


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
    rules = _Rules(mapping)
    found: list[_Found] = []
    skipped: Counter[str] = Counter()
    for number, path in enumerate(paths):
        try:
            found += rules.operations(_spans(_events(path), number), skipped)
        except InputError as error:
            raise located(error, path) from None
    if not found:
        raise InputError(
            f"no event matches: of {sum(skipped.values())} events, the most frequent are "
            f"{_frequent(skipped)}"
            if skipped
            else "there are no events with a begin and an end"
        )
    return _assembled(found, mapping, skipped, len(paths))


def _events(path: str | os.PathLike[str]) -> list[Any]:
    document = parsed_json(_unpacked(path).decode("utf-8-sig", errors="replace"), Decimal)
    events = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(events, list):
        raise InputError("is no Chrome trace: it has no list of events under traceEvents")
    return events


def _unpacked(path: str | os.PathLike[str]) -> bytes:
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
    return data


def _spans(events: Sequence[Any], file: int) -> Iterator[_Span]:
    """Complete events, and pairs of begin and end of one thread, the innermost first."""
    paired = []
    for number, event in enumerate(events):
        if not isinstance(event, dict):
            raise InputError(f"event {number} must be an object, not {shown(event)}")
        phase = event.get("ph")
        if phase == "X":
            begin = _ns(event, "ts", number)
            yield _span(event, file, begin, begin + _duration(event, number))
        elif phase in ("B", "E"):
            paired.append((_ns(event, "ts", number), event))
    open_spans: dict[tuple[str, str], list[tuple[int, dict[str, Any]]]] = defaultdict(list)
    for at, event in sorted(paired, key=lambda pair: pair[0]):
        stack = open_spans[str(event.get("pid")), str(event.get("tid"))]
        if event["ph"] == "B":
            stack.append((at, event))
        elif stack:
            begin, opened = stack.pop()
            yield _span(_merged(opened, event), file, begin, at)


def _merged(begin: dict[str, Any], end: dict[str, Any]) -> dict[str, Any]:
    """The begin with the arguments that only the end has."""
    args = {**_args(end), **_args(begin)}
    return {**begin, "args": args}


def _args(event: Mapping[str, Any]) -> Mapping[str, Any]:
    args = event.get("args")
    return args if isinstance(args, dict) else {}


def _span(event: Mapping[str, Any], file: int, begin: int, end: int) -> _Span:
    name, category = str(event.get("name", "")), str(event.get("cat", ""))
    pid, tid = _label(event.get("pid", 0)), _label(event.get("tid", 0))
    return _Span(name, category, file, pid, tid, _args(event), begin, end)


def _label(value: Any) -> int | str:
    return value if isinstance(value, int) else str(value)


def _ns(event: Mapping[str, Any], field_name: str, number: int) -> int:
    """A time in microseconds, in whole ns."""
    value = event.get(field_name)
    if isinstance(value, bool) or not isinstance(value, int | Decimal):
        raise InputError(
            f"event {number} ({shown(event.get('name'))}): {field_name} must be a number of "
            f"microseconds, not {shown(value)}"
        )
    if not -_LARGEST_US < value < _LARGEST_US:
        raise InputError(f"event {number} ({shown(event.get('name'))}): {field_name} is too large")
    return round(value * _NS_PER_US)


def _duration(event: Mapping[str, Any], number: int) -> int:
    duration = _ns(event, "dur", number) if "dur" in event else 0
    if duration < 0:
        raise InputError(f"event {number} ({shown(event.get('name'))}) has a negative duration")
    return duration


class _Rules:
    """A mapping with its expressions compiled."""

    def __init__(self, mapping: TraceMapping) -> None:
        if not mapping.instructions:
            raise InputError("give the names of at least one instruction's events")
        if mapping.placement not in PLACEMENTS:
            raise InputError(
                f"the placement must be {' or '.join(PLACEMENTS)}, not {shown(mapping.placement)}"
            )
        for instruction in mapping.instructions:
            if not instruction.isidentifier():
                raise InputError(f"{shown(instruction)} is no name of an instruction")
        self._patterns = {
            instruction: _compiled(text, f"the expression for {instruction}")
            for instruction, text in mapping.instructions.items()
        }
        self._category = _optional(mapping.category, "the expression for categories")
        self._within = _optional(mapping.within, "the expression for the event around")

    def operations(self, spans: Iterable[_Span], skipped: Counter[str]) -> list[_Found]:
        """The operations among the events of a file; others are counted."""
        found = []
        frames: dict[str, list[_Span]] = defaultdict(list)
        for span in spans:
            if self._within and self._within.search(span.name):
                frames[str(span.pid)].append(span)
            elif (operation := self._operation(span)) is None:
                skipped[span.name] += 1
            else:
                found.append(operation)
        if self._within is None:
            return found
        inside = [operation for operation in found if _is_inside(operation.span, frames)]
        if len(inside) < len(found):
            skipped["operations of other iterations"] += len(found) - len(inside)
        return inside

    def _operation(self, span: _Span) -> _Found | None:
        if self._category and not self._category.search(span.category):
            return None
        matches = {
            instruction: match
            for instruction, pattern in self._patterns.items()
            if (match := pattern.search(span.name))
        }
        if len(matches) > 1:
            raise InputError(f"{span} matches the expressions of {' and '.join(matches)}")
        for instruction, match in matches.items():
            groups = {name: value for name, value in match.groupdict().items() if value is not None}
            return _Found(span, instruction, {g: _whole(v, g, span) for g, v in groups.items()})
        return None


def _is_inside(span: _Span, frames: Mapping[str, Sequence[_Span]]) -> bool:
    return any(f.begin <= span.begin and span.end <= f.end for f in frames.get(str(span.pid), ()))


def _optional(text: str | None, what: str) -> re.Pattern[str] | None:
    return None if text is None else _compiled(text, what)


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


def _whole(value: Any, what: str, span: _Span) -> int:
    text = str(value)
    if isinstance(value, bool) or not re.fullmatch(r"[0-9]{1,18}", text):
        raise InputError(f"{span}: {what} must be a whole number, not {shown(value)}")
    return int(text)


def _assembled(
    found: Sequence[_Found], mapping: TraceMapping, skipped: Mapping[str, int], num_files: int
) -> ImportedTrace:
    labels = _rank_labels(found, mapping.rank, num_files)
    numbers = _numbered(labels)
    by_rank: list[list[_Found]] = [[] for _ in numbers]
    for operation, label in zip(found, labels, strict=True):
        by_rank[numbers[label]].append(operation)
    for rank, operations in enumerate(by_rank):
        operations.sort(key=lambda operation: (operation.span.begin, operation.span.end))
        _refuse_overlap(rank, operations)
    if all(operation.instruction not in _BACKWARDS for operation in found):
        raise InputError(
            "no event is a backward: say which are backward, or backward_input and backward_weight"
        )
    steps = _Numbering(mapping, by_rank).steps()
    _refuse_repeated(step for rank in steps for step in rank)
    schedule = place(steps, skipped)
    return ImportedTrace(
        schedule.orders,
        schedule.num_chunks,
        schedule.skipped,
        tuple(tuple(o.span.end - o.span.begin for o in operations) for operations in by_rank),
        tuple(map(str, numbers)),
    )


def _refuse_repeated(steps: Iterable[Step]) -> None:
    first: dict[tuple[str, int, int], Step] = {}
    for step in steps:
        other = first.setdefault((step.instruction, step.microbatch, step.model_stage), step)
        if other is not step:
            raise step.error(
                f"is the same operation as {other.label}: is this a trace of several iterations? "
                "Then name an event around one of them (--within); or of several model chunks on "
                "a rank (--chunk)?"
            )


def _rank_labels(found: Sequence[_Found], source: str | None, num_files: int) -> list[Any]:
    if source is None:
        if any("rank" in operation.groups for operation in found):
            return [_group(operation, "rank") for operation in found]
        if num_files > 1:
            source = "file"
        else:
            source = "pid" if len({str(o.span.pid) for o in found}) > 1 else "tid"
    if source in ("file", "pid", "tid"):
        return [getattr(operation.span, source) for operation in found]
    return [_argument(operation.span, source, "the rank") for operation in found]


def _group(operation: _Found, group: str) -> int:
    if group not in operation.groups:
        if group == _CHUNK:
            return 0
        raise InputError(f"{operation.span}: its name does not say the {group}, others' names do")
    return operation.groups[group]


def _argument(span: _Span, source: str, what: str) -> Any:
    if not source.startswith(_ARGS):
        known = {"the rank": "file, pid, tid or args.NAME", "the chunk": "args.NAME or order"}
        raise InputError(
            f"{what} cannot be taken from {shown(source)}; give {known.get(what, 'args.NAME')}"
        )
    name = source.removeprefix(_ARGS)
    if name not in span.args:
        raise InputError(f"{span} has no {source} for {what}")
    label = span.args[name]
    if not isinstance(label, int | str):
        raise InputError(f"{span}: {source} must be a number or a name, not {shown(label)}")
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


def _refuse_overlap(rank: int, operations: Sequence[_Found]) -> None:
    for one, other in pairwise(operations):
        if other.span.begin < one.span.end:
            raise InputError(
                f"{one.span} and {other.span} overlap on rank {rank}: a GPU runs one operation at "
                f"a time; {_overlap_hint({one.instruction, other.instruction})}"
            )


def _overlap_hint(instructions: set[str]) -> str:
    if "forward" in instructions and instructions & _BACKWARDS:
        return (
            "if it is DualPipeV's OVERLAP_F_B, which runs a forward and a backward together, "
            "import the schedule's order with --format torch-csv"
        )
    return "are the expressions or the source of ranks wrong?"


class _Numbering:
    """Finds out each event's microbatch and model stage.

    What one name or argument tells, those of all computation must tell; of a data loader's or an
    optimizer's events they need not: these are counted, and belong to their rank's first chunk.
    """

    def __init__(self, mapping: TraceMapping, by_rank: Sequence[Sequence[_Found]]) -> None:
        self._mapping, self._by_rank = mapping, by_rank
        self._everything = [operation for operations in by_rank for operation in operations]

    def steps(self) -> list[list[Step]]:
        stages = self._stages()
        microbatches = self._microbatches(stages)
        return [
            [Step(o.instruction, microbatches[o], stages[o], str(o.span)) for o in operations]
            for operations in self._by_rank
        ]

    def _stages(self) -> dict[_Found, int]:
        """The model stage of each event."""
        stages: dict[_Found, int] = {}
        named = self._told(None, "stage")
        chunks = {} if named else self._chunks()
        for rank, operations in enumerate(self._by_rank):
            first = min((named[o] for o in operations if o in named), default=rank)
            for o in operations:
                stages[o] = named.get(o, first) if named else self._placed(rank, chunks.get(o, 0))
        return stages

    def _chunks(self) -> dict[_Found, int]:
        """The chunk of each event of which that is known."""
        if self._mapping.chunk != _ORDER:
            return _renumbered(self._told(self._mapping.chunk, _CHUNK))
        microbatches = self._told(self._mapping.microbatch, "microbatch")
        if not microbatches:
            raise InputError(
                "chunks go by the order of a microbatch's operations, so say where the microbatch "
                "stands: in a group microbatch, or in args.NAME"
            )
        told = [[(o, microbatches[o]) for o in ops if o in microbatches] for ops in self._by_rank]
        passes = Counter(
            (rank, microbatch)
            for rank, operations in enumerate(told)
            for o, microbatch in operations
            if o.instruction == "forward"
        )
        count = max(passes.values(), default=1)
        return {o: chunk for ops in told for o, chunk in _in_order(ops, count).items()}

    def _placed(self, rank: int, chunk: int) -> int:
        ranks = len(self._by_rank)
        back = self._mapping.placement == V_PLACEMENT and chunk % 2
        return chunk * ranks + (ranks - 1 - rank if back else rank)

    def _microbatches(self, stages: Mapping[_Found, int]) -> dict[_Found, int]:
        microbatches = _renumbered(self._told(self._mapping.microbatch, "microbatch"))
        seen: Counter[tuple[str, int]] = Counter()
        for o in self._everything:
            if o not in microbatches:
                microbatches[o] = seen[o.instruction, stages[o]]
                seen[o.instruction, stages[o]] += 1
        return microbatches

    def _told(self, source: str | None, what: str) -> dict[_Found, int]:
        """What arguments or names say; empty where no name says anything."""
        if source is None:
            if not any(what in o.groups for o in self._everything):
                return {}
            return {o: _group(o, what) for o in self._everything if _must_tell(o, what in o.groups)}
        name = source.removeprefix(_ARGS)
        return {
            o: _whole(_argument(o.span, source, f"the {what}"), what, o.span)
            for o in self._everything
            if _must_tell(o, name in o.span.args)
        }


def _in_order(operations: Iterable[tuple[_Found, int]], count: int) -> dict[_Found, int]:
    """The chunk of each operation of a rank, given with its microbatch, in the order they run.

    Data go through the chunks forwards and gradients backwards, so the n-th of `count` is certain.
    Weights are nobody's data: they are taken to come in the order of their inputs' gradients.
    """
    chunks: dict[_Found, int] = {}
    seen: Counter[tuple[str, int]] = Counter()
    split: dict[int, list[int]] = defaultdict(list)
    for o, microbatch in operations:
        kind = "backward" if o.instruction == "backward_input" else o.instruction
        n = seen[kind, microbatch]
        seen[kind, microbatch] += 1
        if kind == "backward":
            n = count - 1 - n
        elif kind == "backward_weight":
            if n >= len(split[microbatch]):
                raise InputError(
                    f"{o.span}: no backward_input of microbatch {microbatch} comes before it"
                )
            n = split[microbatch][n]
        if n < 0:
            raise InputError(
                f"{o.span}: there are more backwards of microbatch {microbatch} than its rank has "
                f"chunks, {count}; is this a trace of several iterations?"
            )
        if o.instruction == "backward_input":
            split[microbatch].append(n)
        chunks[o] = n
    return chunks


def _must_tell(operation: _Found, tells: bool) -> bool:
    return tells or operation.instruction in COMPUTATION


def _renumbered(told: Mapping[_Found, int]) -> dict[_Found, int]:
    """The same from 0 on: counters often run on through all iterations."""
    numbers = _numbered(told.values())
    return {operation: numbers[label] for operation, label in told.items()}


def _frequent(names: Counter[str]) -> str:
    return ", ".join(f"{shown(name)} ({count})" for name, count in names.most_common(5))


def _us(nanoseconds: int) -> str:
    return f"{nanoseconds // _NS_PER_US}.{nanoseconds % _NS_PER_US:03d}"
