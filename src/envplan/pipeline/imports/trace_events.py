"""Events of Chrome traces that have a begin and an end, as PyTorch's profiler writes them.

Complete events (`ph` X) and pairs of B and E of one thread count. Times become whole nanoseconds.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any, Final, NamedTuple

from envplan._io.files import read_bounded
from envplan.errors import InputError, shown

MAX_TRACE_BYTES: Final = 256 * 2**20

_NS_PER_US: Final = 1000
_LARGEST_US: Final = 10**16


class TraceEvent(NamedTuple):
    """An event with a begin and an end.

    Attributes:
        name: as the trace says it.
        begin_ns: on the clock of its trace.
        end_ns: likewise.
        fields: further facts by name: `file`, `pid`, `tid`, its category as `cat`, its arguments
            as `args.NAME` and, of an operation, the groups in its name.
        instruction: of an operation; "" of another event.
    """

    name: str
    begin_ns: int
    end_ns: int
    fields: Mapping[str, Any]
    instruction: str = ""

    def __str__(self) -> str:
        return f"{shown(self.name)} ({_us_text(self.begin_ns)} to {_us_text(self.end_ns)} us)"


def _us_text(ns: int) -> str:
    return f"{ns // _NS_PER_US}.{ns % _NS_PER_US:03d}"


def read_events(path: str | os.PathLike[str], file: int) -> Iterator[TraceEvent]:
    """The events of a trace that have a begin and an end, by the time at which they are known.

    Args:
        path: of the trace, gzipped or not.
        file: its number among the files that are read.

    Raises:
        InputError: it cannot be read or is too large, is no trace, or an event is malformed.
    """
    return _spans(_listed_events(path), file)


def _listed_events(path: str | os.PathLike[str]) -> list[Any]:
    data = read_bounded(path, MAX_TRACE_BYTES)
    try:  # traces break rules that our own files keep, and their times want all their digits
        document = json.loads(data.decode("utf-8-sig", errors="replace"), parse_float=Decimal)
    except (RecursionError, ValueError, InvalidOperation) as error:
        reason = getattr(error, "msg", "nested too deeply, or a number too large or too small")
        line, column = getattr(error, "lineno", None), getattr(error, "colno", None)
        raise InputError(f"not valid JSON: {reason}", line=line, column=column) from None
    events = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(events, list):
        raise InputError("is no Chrome trace: it has no list of events under traceEvents")
    return events


class _TimedEvent(NamedTuple):
    """An event as it is listed, with its time."""

    time_ns: int
    number: int
    event: dict[str, Any]


def _spans(events: Sequence[Any], file: int) -> Iterator[TraceEvent]:
    """Complete events, and pairs of begin and end of one thread, the innermost first."""
    begun: defaultdict[tuple[str, str], list[_TimedEvent]] = defaultdict(list)
    for timed in sorted(_timed_events(events), key=lambda timed: timed.time_ns):
        time_ns, number, event = timed
        open_events = begun[str(event.get("pid")), str(event.get("tid"))]
        match event["ph"]:
            case "B":
                open_events.append(timed)
            case "X":
                duration_ns = _field_ns({"dur": 0, **event}, "dur", number, least_us=0)
                yield _event(event, time_ns, time_ns + duration_ns, file, [event])
            case "E" if open_events:  # arguments may be said at the begin, at the end or at both
                begin = open_events.pop()
                yield _event(begin.event, begin.time_ns, time_ns, file, [event, begin.event])


def _timed_events(events: Sequence[Any]) -> Iterator[_TimedEvent]:
    for number, event in enumerate(events):
        if not isinstance(event, dict):
            raise InputError(f"event {number} must be an object, not {shown(event)}")
        if event.get("ph") in ("X", "B", "E"):
            yield _TimedEvent(_field_ns(event, "ts", number), number, event)


def _event(
    event: Mapping[str, Any],
    begin_ns: int,
    end_ns: int,
    file: int,
    with_arguments: Sequence[Mapping[str, Any]],
) -> TraceEvent:
    """The span of an event.

    Args:
        event: as it is listed, or its begin.
        begin_ns: its begin.
        end_ns: its end.
        file: the number of its trace.
        with_arguments: listed events whose arguments it has; later ones win.
    """
    fields: dict[str, Any] = {"file": file, "cat": str(event.get("cat", ""))}
    for name in ("pid", "tid"):
        fields[name] = event.get(name, 0)
    for listed in with_arguments:
        arguments = listed.get("args")
        if isinstance(arguments, dict):
            fields |= {f"args.{name}": value for name, value in arguments.items()}
    return TraceEvent(str(event.get("name", "")), begin_ns, end_ns, fields)


def _field_ns(
    event: Mapping[str, Any], field: str, number: int, least_us: int = -_LARGEST_US
) -> int:
    """A field in microseconds, in whole ns."""
    us: Any = event.get(field)
    is_number = isinstance(us, int | Decimal) and not isinstance(us, bool)
    if not is_number or not least_us <= us < _LARGEST_US:
        raise InputError(
            f"event {number} ({shown(event.get('name'))}): {field} must be a number of "
            f"microseconds, not {shown(us)}"
        )
    ns: int = round(us * _NS_PER_US)
    return ns
