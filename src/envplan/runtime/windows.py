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
from typing import Final, Generic, NamedTuple, TypeVar

import numpy as np

from envplan.errors import InputError
from envplan.profile import BLOCKING
from envplan.profiling.sweep_file import Row
from envplan.runtime.listener import Moment, seconds
from envplan.runtime.metering import Powers, Seen, powers

__all__ = ["Measured", "PartRow", "Span", "measure", "on_host"]

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
    count = len(kinds)
    *watts, waiting_w = found.watts[: count + 1].tolist()
    *errors, waiting_error = np.sqrt(np.diag(found.covariance))[: count + 1].tolist()
    shares = np.array([math.fsum(times) / len(iterations) for times in kinds.values()])
    throttle = "+".join(sorted(seen.throttle))
    row = partial(PartRow, frequency=clock, clock=seen.clock, throttle=throttle)
    rows: list[PartRow] = []
    time_variance = 0.0
    for ((stage, name, part), times), power, error in zip(
        kinds.items(), watts, errors, strict=True
    ):
        mean, spread, samples = statistics.fmean(times), statistics.pstdev(times), len(times)
        time_variance += (power * spread) ** 2 * samples / len(iterations) ** 2
        rows.append(
            row(
                stage=stage,
                instruction=name,
                part=part,
                time=mean,
                energy=power * mean,
                time_std=spread,
                energy_std=math.hypot(power * spread, error * mean * math.sqrt(samples)),
                samples=samples,
            )
        )
    # Of waiting, energy over time is all that counts.
    waiting = {"time": 1.0, "time_std": 0.0, "energy": waiting_w, "energy_std": waiting_error}
    rows.append(row(stage=rows[0].stage, instruction=BLOCKING, samples=1, **waiting))
    return Measured(
        rows=rows,
        energy=float(np.array(watts) @ shares),
        energy_error=math.sqrt(shares @ found.covariance[:count, :count] @ shares + time_variance),
        busy=float(shares.sum()),
        microbatches=sum(name == "forward" and chunk == 0 for name, chunk, *_ in iterations[0]),
    )
