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
import statistics
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, Final

from envplan._files import unzipped
from envplan.errors import InputError, shown
from envplan.pipeline.dependencies import Place
from envplan.pipeline.formats import located
from envplan.pipeline.imports.steps import ImportedSchedule, Step, scheduled
from envplan.pipeline.schedules import LETTERS

if TYPE_CHECKING:
    from envplan.profile import Profile

__all__ = ["ImportedTrace", "TimeCheck", "TraceMapping", "read_chrome_traces"]

MAX_TRACE_BYTES: Final = 256 * 2**20

_GROUPS: Final = ("chunk", "microbatch", "rank", "stage")
_ARGS: Final = "args."
#: Where an option may say that something stands, besides args.NAME.
_SOURCES: Final[dict[str, tuple[str, ...]]] = {
    "rank": ("file", "pid", "tid"),
    "microbatch": (),
    "chunk": ("order",),
}
#: Where model stages may lie, if a rank has several.
_PLACEMENTS: Final = ("interleaved", "v")
_NS_PER_US: Final = 1000
_NS_PER_S: Final = 10**9
_TOLERANCE: Final = 1.1
_LARGEST_US: Final = 10**16


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
        stage: of the profile.
        operations: how many were recorded.
        recorded_s: their median.
        profile_fastest_s, profile_slowest_s: of the profile's options.
        fits: whether the recorded time lies within the profile's, or 10% beyond them.
    """

    stage: int
    instruction: str
    operations: int
    recorded_s: float
    profile_fastest_s: float
    profile_slowest_s: float
    fits: bool


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
        operations, durations = chain(*self.orders), chain(*self.durations_ns)
        for op, duration in zip(operations, durations, strict=True):
            if duration:
                times[op.profile_stage, op.instruction].append(duration)
        fitted = profile.fitted({op.instruction for order in self.orders for op in order})
        checks = []
        for (stage, instruction), recorded in sorted(times.items()):
            options = fitted.table(stage, instruction).time_ns
            middle = statistics.median(recorded) / _NS_PER_S
            fastest, slowest = int(options.min()) / _NS_PER_S, int(options.max()) / _NS_PER_S
            fits = fastest / _TOLERANCE <= middle <= slowest * _TOLERANCE
            checks.append(
                TimeCheck(stage, instruction, len(recorded), middle, fastest, slowest, fits)
            )
        return checks


@dataclass(frozen=True, eq=False)
class _Event:
    """An event with a begin and an end, in ns.

    Attributes:
        said: what it says of itself: `file`, `pid`, `tid`, its arguments as `args.NAME`, and the
            groups in its name.
        instruction: if it is an operation.
        shared: whether it is one of several operations that are one event in the trace: its own
            times are not known.
    """

    name: str
    category: str
    begin: int
    end: int
    said: Mapping[str, Any]
    instruction: str = ""
    shared: bool = False

    def __str__(self) -> str:
        begin, end = (f"{at // _NS_PER_US}.{at % _NS_PER_US:03d}" for at in (self.begin, self.end))
        return f"{shown(self.name)} ({begin} to {end} us)"


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
    patterns = _patterns(mapping)
    found: list[_Event] = []
    skipped: Counter[str] = Counter()
    for number, path in enumerate(paths):
        try:
            found += _operations(_spans(_events(path), number), patterns, skipped)
        except InputError as error:
            raise located(error, path) from None
    if not found:
        raise InputError(
            f"no event matches: of {sum(skipped.values())} events, the most frequent are "
            + ", ".join(f"{shown(name)} ({count})" for name, count in skipped.most_common(5))
            if skipped
            else "there are no events with a begin and an end"
        )
    if not any(operation.instruction.startswith("backward") for operation in found):
        raise InputError(
            "no event is a backward: say which are backward, or backward_input and backward_weight"
        )
    labels = _rank_labels(found, mapping.rank, len(paths))
    numbers = _numbered(labels.values())
    ranks: list[list[_Event]] = [[] for _ in numbers]
    for operation in sorted(found, key=lambda one: (one.begin, one.end)):
        ranks[numbers[labels[operation]]].append(operation)
    for rank, operations in enumerate(ranks):
        for one, other in pairwise(operations):
            if other.begin < one.end:
                raise InputError(
                    f"{one} and {other} overlap on rank {rank}: a GPU runs one operation at a "
                    "time; are the expressions or the source of ranks wrong? (An event that holds "
                    "a forward and a backward is read where its name has both, as DualPipeV's "
                    "OVERLAP_F_B)"
                )
    steps = _steps(mapping, ranks)
    schedule = scheduled(
        ([(Place(str(operation)), steps[operation]) for operation in rank] for rank in ranks),
        again="; is this a trace of several iterations? Then name an event around one of them "
        "(--within); or of several model chunks on a rank (--chunk)?",
    )
    durations = tuple(
        tuple(0 if one.shared else one.end - one.begin for one in rank) for rank in ranks
    )
    return ImportedTrace(schedule.orders, skipped, durations, tuple(map(str, numbers)))


def _events(path: str | os.PathLike[str]) -> list[Any]:
    try:
        with unzipped(path) as file:
            data = file.read(MAX_TRACE_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"cannot be read: {reason}") from None
    if len(data) > MAX_TRACE_BYTES:
        raise InputError(f"is larger than {MAX_TRACE_BYTES // 2**20} MiB; cut it to one iteration")
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
    paired = []
    for number, event in enumerate(events):
        if not isinstance(event, dict):
            raise InputError(f"event {number} must be an object, not {shown(event)}")
        phase = event.get("ph")
        if phase == "X":
            begin = _ns(event, "ts", number)
            duration = _ns({"dur": 0, **event}, "dur", number)
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
    said: dict[str, Any] = {"file": file}
    for name in ("pid", "tid"):
        value = event.get(name, 0)
        said[name] = value if isinstance(value, int) else str(value)
    for args in (closed.get("args"), event.get("args")):
        if isinstance(args, dict):
            said |= {_ARGS + name: value for name, value in args.items()}
    return _Event(str(event.get("name", "")), str(event.get("cat", "")), begin, end, said)


def _ns(event: Mapping[str, Any], field_name: str, number: int) -> int:
    """A time in microseconds, in whole ns."""
    value = event.get(field_name)
    where = f"event {number} ({shown(event.get('name'))}): {field_name}"
    if isinstance(value, bool) or not isinstance(value, int | Decimal):
        raise InputError(f"{where} must be a number of microseconds, not {shown(value)}")
    if not -_LARGEST_US < value < _LARGEST_US:
        raise InputError(f"{where} is too large")
    return round(value * _NS_PER_US)


def _patterns(mapping: TraceMapping) -> dict[str, re.Pattern[str]]:
    """The expressions of a mapping: of instructions, and those of `--category` and `--within`.

    Raises:
        InputError: something in the mapping cannot be.
    """
    if not mapping.instructions:
        raise InputError(
            "say which events are operations: --map 'forward=REGEX' --map 'backward=REGEX'"
        )
    if mapping.placement not in _PLACEMENTS:
        raise InputError(
            f"the placement must be {' or '.join(_PLACEMENTS)}, not {shown(mapping.placement)}"
        )
    for what, known in _SOURCES.items():
        source = getattr(mapping, what)
        if source is not None and source not in known and not source.startswith(_ARGS):
            raise InputError(
                f"the {what} cannot be taken from {shown(source)}; give "
                f"{' or '.join([*known, 'args.NAME'])}"
            )
    patterns = {}
    beside = {"--category": mapping.category, "--within": mapping.within}
    for name, text in {**mapping.instructions, **beside}.items():
        if text is None:
            continue
        if name not in beside and not name.isidentifier():
            raise InputError(f"{shown(name)} is no name of an instruction")
        try:
            patterns[name] = re.compile(text)
        except re.error as error:
            raise InputError(
                f"the expression for {name} is no regular expression: {error}"
            ) from None
        if unknown := patterns[name].groupindex.keys() - set(_GROUPS):
            raise InputError(
                f"the expression for {name} has a group {shown(min(unknown))}; known: "
                f"{', '.join(_GROUPS)}"
            )
    return patterns


def _operations(
    events: Iterable[_Event], patterns: Mapping[str, re.Pattern[str]], skipped: Counter[str]
) -> list[_Event]:
    """The operations among a file's events; the others are counted."""
    instructions = dict(patterns)
    category, within = (instructions.pop(name, None) for name in ("--category", "--within"))
    found: list[_Event] = []
    frames: list[_Event] = []
    for event in events:
        counts = category is None or category.search(event.category)
        if within and within.search(event.name):
            frames.append(event)
        elif counts and (named := _named(event, instructions)):
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
    if len(inside) < len(found):
        skipped["operations of other iterations"] += len(found) - len(inside)
    return inside


def _named(event: _Event, instructions: Mapping[str, re.Pattern[str]]) -> list[_Event]:
    """The operations of an event: several, one after the other, if its name has them so."""
    found = [
        (match, instruction)
        for instruction, pattern in instructions.items()
        if (match := pattern.search(event.name))
    ]
    found.sort(key=lambda one: one[0].start())
    if any(one.end() > other.start() for (one, _), (other, _) in pairwise(found)):
        names = " and ".join(sorted(instruction for _, instruction in found))
        raise InputError(f"{event} matches the expressions of {names}")
    operations = []
    for k, (match, instruction) in enumerate(found):
        groups = {name: text for name, text in match.groupdict().items() if text is not None}
        said = {**event.said} | {name: _whole(text, name, event) for name, text in groups.items()}
        begin, end = (
            event.begin + (event.end - event.begin) * at // len(found) for at in (k, k + 1)
        )
        shared = len(found) > 1
        operations.append(_Event(event.name, "", begin, end, said, instruction, shared))
    return operations


def _whole(value: Any, what: str, event: _Event) -> int:
    text = str(value)
    if isinstance(value, bool) or not re.fullmatch(r"[0-9]{1,18}", text):
        raise InputError(f"{event}: {what} must be a whole number, not {shown(value)}")
    return int(text)


def _rank_labels(
    found: Sequence[_Event], source: str | None, num_files: int
) -> dict[_Event, int | str]:
    """What says which rank an operation is of."""
    if source is None and not any("rank" in one.said for one in found):
        several = len({str(one.said["pid"]) for one in found}) > 1
        source = "file" if num_files > 1 else "pid" if several else "tid"
    labels = _told(found, source, "rank", by_all=True)
    for one, label in labels.items():
        if not isinstance(label, int | str):
            raise InputError(f"{one}: {source} must be a number or a name, not {shown(label)}")
    return labels


def _told(
    operations: Iterable[_Event], source: str | None, what: str, *, by_all: bool = False
) -> dict[_Event, Any]:
    """What operations say of themselves at a source, or without one in a group in their names.

    Empty where no name says anything. Else all computation must say it, and with `by_all` a data
    loader's or an optimizer's events, too; names that say no chunk mean the first.
    """
    told, silent = {}, []
    for one in operations:
        if (source or what) in one.said:
            told[one] = one.said[source or what]
        elif by_all or one.instruction in LETTERS:
            silent.append(one)
    if source is None and not told:
        return {}
    if source is None and what == "chunk":
        return told | dict.fromkeys(silent, 0)
    for one in silent:
        lacking = f"has no {source} for" if source else "has a name that does not say"
        raise InputError(f"{one} {lacking} the {what}, which others do")
    return told


def _numbered(labels: Iterable[int | str]) -> dict[int | str, int]:
    """Label -> its place among all: whole numbers by value, before others by their digits."""

    def key(label: int | str) -> tuple[bool, list[int | str]]:
        parts = re.split(r"([0-9]+)", str(label))
        return isinstance(label, str), [int(p) if k % 2 else p for k, p in enumerate(parts)]

    return {label: number for number, label in enumerate(sorted(set(labels), key=key))}


def _steps(mapping: TraceMapping, ranks: Sequence[Sequence[_Event]]) -> dict[_Event, Step]:
    """Each event's microbatch and model stage.

    What one name or argument tells, those of all computation must tell; of a data loader's or an
    optimizer's events they need not: these are counted, and belong to their rank's first chunk.
    """
    everything = list(chain(*ranks))
    microbatches = _renumbered(_told(everything, mapping.microbatch, "microbatch"), "microbatch")
    named = _told(everything, None, "stage")
    chunks: Mapping[_Event, int] = {}
    if not named and mapping.chunk == "order":
        chunks = _in_order(ranks, microbatches)
    elif not named:
        chunks = _renumbered(_told(everything, mapping.chunk, "chunk"), "chunk")
    seen: Counter[tuple[str, int]] = Counter()
    steps: dict[_Event, Step] = {}
    for rank, operations in enumerate(ranks):
        first = min((named[one] for one in operations if one in named), default=rank)
        for one in operations:
            chunk = chunks.get(one, 0)
            back = mapping.placement == "v" and chunk % 2
            placed = chunk * len(ranks) + (len(ranks) - 1 - rank if back else rank)
            stage = named.get(one, first) if named else placed
            counted = seen[one.instruction, stage]
            seen[one.instruction, stage] += one not in microbatches
            steps[one] = Step(one.instruction, microbatches.get(one, counted), stage)
    return steps


def _in_order(
    ranks: Sequence[Sequence[_Event]], microbatches: Mapping[_Event, int]
) -> dict[_Event, int]:
    """The chunk of each operation whose microbatch is known, in the order that ranks run them.

    Data go through the chunks forwards and gradients backwards, so the n-th of `count` is certain.
    Weights are nobody's data: they are taken to come in the order of their inputs' gradients.
    """
    if not microbatches:
        raise InputError(
            "chunks go by the order of a microbatch's operations, so say where the microbatch "
            "stands: in a group microbatch, or in args.NAME"
        )
    listed = [
        ((rank, microbatches[one]), one)
        for rank, operations in enumerate(ranks)
        for one in operations
        if one in microbatches
    ]
    passes = Counter(key for key, one in listed if one.instruction == "forward")
    count = max(passes.values(), default=1)
    chunks: dict[_Event, int] = {}
    seen: Counter[tuple[tuple[int, int], str]] = Counter()
    inputs: dict[tuple[int, int], list[int]] = defaultdict(list)
    for key, one in listed:
        kind = one.instruction.removesuffix("_input")
        n = seen[key, kind]
        seen[key, kind] += 1
        turns = {"backward": range(count)[::-1], "backward_weight": inputs[key]}
        try:
            chunks[one] = turns.get(kind, range(count))[n]
        except IndexError:
            raise InputError(
                f"{one}: there are more of microbatch {key[1]} than its rank has chunks, {count}, "
                "or it comes before its backward_input; is this a trace of several iterations?"
            ) from None
        if one.instruction == "backward_input":
            inputs[key].append(chunks[one])
    return chunks


def _renumbered(told: Mapping[_Event, Any], what: str) -> dict[_Event, int]:
    """The same from 0 on: counters often run on through all iterations."""
    numbers = _numbered(_whole(value, what, one) for one, value in told.items())
    return {one: numbers[int(value)] for one, value in told.items()}
