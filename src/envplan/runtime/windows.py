"""What some iterations at one clock say: rows of a profile, from spans and energy readings."""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Final, Generic, NamedTuple, TypeVar

import numpy as np

from envplan.errors import InputError
from envplan.profile import BLOCKING
from envplan.profiling.sweep_file import Row
from envplan.runtime.metering import Powers, Seen, powers
from envplan.runtime.runlog import Moment, seconds

__all__ = ["Measured", "PartRow", "Span", "Window", "measure", "on_host"]

#: Work that is no operation's: between iterations, and backwards that may hold an all-reduce.
_OUTSIDE: Final = "outside"

Kind = tuple[int, str, str]  # model stage, instruction, part


M = TypeVar("M")


class Span(NamedTuple, Generic[M]):
    """An operation as it ran, and the begins of its parts where it has some.

    Its moments are Moments, or s of perf_counter.
    """

    instruction: str
    chunk: int
    begin: M
    end: M
    parts: tuple[tuple[str, M], ...] = ()


@dataclass(frozen=True)
class PartRow(Row):
    """A row of an operation, or of a part of it."""

    part: str = ""


@dataclass(frozen=True)
class Window:
    """Iterations at one clock; None: at whatever clock the driver chooses."""

    clock: int | None
    iterations: list[list[Span[Moment]]]


@dataclass(frozen=True)
class Measured:
    """What a window says.

    Attributes:
        rows: of the profile.
        energy: of the rank's operations in an iteration, J; energy_error: its standard error, J.
        busy: time of the same, s.
        microbatches: of an iteration.
    """

    rows: list[PartRow]
    energy: float
    energy_error: float
    busy: float
    microbatches: int


def on_host(iterations: Sequence[Sequence[Span[Moment]]]) -> list[list[Span[float]]]:
    """Spans by the host's clock, s, of perf_counter; waits until the device has got there."""
    first = iterations[0][0].begin
    if isinstance(first, int):
        offset = first / 1e9
    else:
        # The host learns of a moment just after it has come, some time or other soonest of all.
        ends = [span.end for spans in iterations for span in spans]
        offset = min(-seconds(first, end) + time.perf_counter() for end in ends)

    def host(at: Moment) -> float:
        return offset + seconds(first, at)

    return [
        [
            Span(name, chunk, host(begin), host(end), tuple((part, host(at)) for part, at in parts))
            for name, chunk, begin, end, parts in spans
        ]
        for spans in iterations
    ]


def measure(
    iterations: Sequence[Sequence[Span[float]]],
    seen: Seen,
    stages: Sequence[int],
    clock: int | None,
) -> Measured | None:
    """Rows of one clock; None if the counter has not told anything.

    Args:
        iterations: the operations of each, in order.
        seen: what the GPU did meanwhile.
        stages: the model stage of each chunk.
        clock: MHz, as asked for; None: as seen.

    Raises:
        InputError: an operation is of a chunk that has no stage.
    """
    kinds: dict[Kind, list[float]] = defaultdict(list)
    edges: list[float] = []
    labels: list[Kind | str] = []
    for spans in iterations:
        if edges:
            labels.append(_OUTSIDE)
        reducing = _reducing(spans)
        for position, (name, chunk, begin, end, parts) in enumerate(spans):
            if position:
                labels.append(BLOCKING)
            edges.append(begin)
            if position in reducing:
                edges.append(end)
                labels.append(_OUTSIDE)
                continue
            if chunk >= len(stages):
                raise InputError(
                    f"{name} came for chunk {chunk}, but Profiler knows the stages of "
                    f"{len(stages)} chunks; give it stages="
                )
            # What comes before the first part's own begin belongs to it.
            starts = [begin, *(at for _, at in parts[1:]), end]
            taken: dict[Kind, float] = defaultdict(float)
            for part, (at, until) in zip(parts or (("", begin),), pairwise(starts), strict=True):
                kind = stages[chunk], name, part[0]
                edges.append(until)
                labels.append(kind)
                taken[kind] += until - at
            for kind, time_s in taken.items():
                kinds[kind].append(time_s)
    known: list[Kind | str] = [*kinds, BLOCKING, _OUTSIDE]
    places = {label: k for k, label in enumerate(known)}
    found = powers(seen, edges, [places[label] for label in labels], len(places))
    if found is None or not (clock or seen.clock):
        return None
    return _rows(kinds, found, seen, clock or seen.clock, iterations)


def _reducing(spans: Sequence[Span[float]]) -> set[int]:
    """Positions of backwards that may hold an all-reduce: the last of each chunk.

    Only where there are others of the same kind to go by.
    """
    last: dict[int, int] = {}
    count: dict[tuple[str, int], int] = defaultdict(int)
    for position, (name, chunk, *_) in enumerate(spans):
        count[name, chunk] += 1
        if name.startswith("backward"):
            last[chunk] = position
    return {position for position in last.values() if count[spans[position][:2]] > 1}


def _rows(
    kinds: Mapping[Kind, list[float]],
    found: Powers,
    seen: Seen,
    clock: int,
    iterations: Sequence[Sequence[Span[float]]],
) -> Measured:
    row = partial(
        PartRow, frequency=clock, clock=seen.clock, throttle="+".join(sorted(seen.throttle))
    )
    rows: list[PartRow] = []
    shares: list[float] = []
    time_variance = 0.0
    errors = np.sqrt(np.diag(found.covariance)).tolist()
    for (stage, name, part), times, watts, error in zip(
        kinds, kinds.values(), found.watts.tolist(), errors, strict=False
    ):
        mean, spread = statistics.fmean(times), statistics.pstdev(times)
        variance = (watts * spread) ** 2 / len(times) + (error * mean) ** 2
        shares.append(math.fsum(times) / len(iterations))
        time_variance += (watts * spread) ** 2 * len(times) / len(iterations) ** 2
        rows.append(
            row(
                stage=stage,
                instruction=name,
                part=part,
                time=mean,
                energy=watts * mean,
                time_std=spread,
                energy_std=math.sqrt(variance * len(times)),
                samples=len(times),
            )
        )
    count = len(kinds)
    # Of waiting, energy over time is all that counts.
    waiting: dict[str, Any] = {"time": 1.0, "time_std": 0.0, "energy": float(found.watts[count])}
    waiting["energy_std"] = errors[count]
    rows.append(row(stage=rows[0].stage, instruction=BLOCKING, samples=1, **waiting))
    power_variance = float(shares @ found.covariance[:count, :count] @ shares)
    return Measured(
        rows=rows,
        energy=float(found.watts[:count] @ shares),
        energy_error=math.sqrt(power_variance + time_variance),
        busy=math.fsum(shares),
        microbatches=sum(name == "forward" and chunk == 0 for name, chunk, *_ in iterations[0]),
    )
