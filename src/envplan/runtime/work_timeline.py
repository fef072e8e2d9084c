"""What a GPU worked on when: the kinds of work of some iterations, one after the other."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, NamedTuple, TypeVar

from envplan.errors import InputError
from envplan.runtime.timestamps import Timestamp, seconds_between

__all__ = ["OtherWork", "Span", "Timeline", "WorkKind", "spans_on_host", "work_timeline"]

M = TypeVar("M")


class Span(NamedTuple, Generic[M]):
    """An operation as it ran, and the begins of its parts where it has some.

    Its moments are Timestamps, or s of perf_counter.
    """

    instruction: str
    chunk: int
    begin: M
    end: M
    parts: tuple[tuple[str, M], ...] = ()


def spans_on_host(iterations: Sequence[Sequence[Span[Timestamp]]]) -> list[list[Span[float]]]:
    """Spans by the host's clock, s, of perf_counter; waits until the device has got there."""
    origin = iterations[0][0].begin
    if isinstance(origin, int):
        origin_s = origin / 1e9
    else:
        # The host learns of each moment a little late, so the earliest estimate is the nearest.
        origin_s = math.inf
        for spans in iterations:
            for span in spans:
                since_origin_s = seconds_between(origin, span.end)
                origin_s = min(origin_s, time.perf_counter() - since_origin_s)

    def on_host(timestamp: Timestamp) -> float:
        return origin_s + seconds_between(origin, timestamp)

    def span_on_host(span: Span[Timestamp]) -> Span[float]:
        parts = tuple((name, on_host(begin)) for name, begin in span.parts)
        begin, end = on_host(span.begin), on_host(span.end)
        return Span(span.instruction, span.chunk, begin, end, parts)

    return [[span_on_host(span) for span in spans] for spans in iterations]


class WorkKind(NamedTuple):
    """Operations, or parts of them, that are taken to draw the same power."""

    stage: int
    instruction: str
    part: str


class OtherWork(Enum):
    """Time that is no operation's.

    OUTSIDE: between iterations, and backwards that may hold an all-reduce.
    """

    WAITING = "waiting"
    OUTSIDE = "outside"


@dataclass
class Timeline:
    """The work of some iterations, one after the other.

    Attributes:
        edges_s: when the work changed, ascending.
        work: between one edge and the next, one fewer.
        durations_s: of each operation, or part of one, by its kind, in order of appearance.
    """

    edges_s: list[float] = field(default_factory=list)
    work: list[WorkKind | OtherWork] = field(default_factory=list)
    durations_s: dict[WorkKind, list[float]] = field(default_factory=lambda: defaultdict(list))

    def begin(self, time_s: float, work_before: OtherWork) -> None:
        """Something begins, after other work."""
        if self.edges_s:
            self.work.append(work_before)
        self.edges_s.append(time_s)

    def go_on(self, until_s: float, work: WorkKind | OtherWork) -> None:
        """Work of a kind lasts until a moment."""
        self.work.append(work)
        self.edges_s.append(until_s)


def work_timeline(iterations: Sequence[Sequence[Span[float]]], stages: Sequence[int]) -> Timeline:
    """The work of iterations.

    Raises:
        InputError: an operation is of a chunk that has no stage.
    """
    timeline = Timeline()
    for spans in iterations:
        may_reduce = _backwards_that_may_reduce(spans)
        for position, span in enumerate(spans):
            work_before = OtherWork.WAITING if position else OtherWork.OUTSIDE
            timeline.begin(span.begin, work_before)
            if position in may_reduce:
                timeline.go_on(span.end, OtherWork.OUTSIDE)
                continue
            if span.chunk >= len(stages):
                raise InputError(
                    f"{span.instruction} came for chunk {span.chunk}, but Profiler knows the "
                    f"stages of {len(stages)} chunks; give it stages="
                )
            seconds_of_kind: dict[WorkKind, float] = defaultdict(float)
            for part in _parts_of(span):
                kind = WorkKind(stages[span.chunk], span.instruction, part.name)
                timeline.go_on(part.end_s, kind)
                seconds_of_kind[kind] += part.end_s - part.begin_s
            for kind, seconds in seconds_of_kind.items():
                timeline.durations_s[kind].append(seconds)
    return timeline


class _PartSpan(NamedTuple):
    """A part of an operation as it ran, s of perf_counter; "" is the name of a whole operation."""

    name: str
    begin_s: float
    end_s: float


def _parts_of(span: Span[float]) -> Iterator[_PartSpan]:
    """The parts of an operation in order; the whole where it has none.

    Each ends where the next one begins. What comes before the first one's own begin belongs to it.
    """
    names = [name for name, _ in span.parts] or [""]
    begins_s = [span.begin, *(begin_s for _, begin_s in span.parts[1:])]
    ends_s = [*begins_s[1:], span.end]
    return map(_PartSpan, names, begins_s, ends_s)


def _backwards_that_may_reduce(spans: Sequence[Span[float]]) -> set[int]:
    """Positions of backwards that may hold an all-reduce: the last of each chunk.

    Only where there are others of the same kind to go by.
    """
    num_alike = Counter((span.instruction, span.chunk) for span in spans)
    last_backward: dict[int, int] = {}
    for position, span in enumerate(spans):
        if span.instruction.startswith("backward"):
            last_backward[span.chunk] = position
    return {
        position
        for position in last_backward.values()
        if num_alike[spans[position].instruction, spans[position].chunk] > 1
    }
