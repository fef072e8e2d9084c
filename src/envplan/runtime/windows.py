"""What some iterations at one clock say: rows of a profile, from spans and energy readings."""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from envplan.errors import InputError
from envplan.profile import BLOCKING
from envplan.profiling.sweep_file import Row
from envplan.runtime.metering import Powers, Seen, powers
from envplan.runtime.runlog import Moment

__all__ = ["HostSpan", "Measured", "Span", "Window", "measure", "on_host"]

#: Work that is no operation's: between iterations, and backwards that may hold an all-reduce.
_OUTSIDE: Final = "outside"

Kind = tuple[int, str]  # model stage, instruction
Span = tuple[str, int, Moment, Moment]  # instruction, chunk, begin, end
HostSpan = tuple[str, int, float, float]  # the same, in s of perf_counter


@dataclass(frozen=True)
class Window:
    """Iterations at one clock; None: at whatever clock the driver chooses."""

    clock: int | None
    iterations: list[list[Span]]


@dataclass(frozen=True)
class Measured:
    """What a window says.

    Attributes:
        rows: of the profile.
        energy: of the rank's operations in an iteration, J; energy_error: its standard error, J.
        busy: time of the same, s.
        microbatches: of an iteration.
    """

    rows: list[Row]
    energy: float
    energy_error: float
    busy: float
    microbatches: int


def on_host(iterations: Sequence[Sequence[Span]]) -> list[list[HostSpan]]:
    """Spans by the host's clock, s, of perf_counter; waits until the device has got there."""
    first = iterations[0][0][2]
    if isinstance(first, int):
        return [
            [(name, chunk, begin * 1e-9, end * 1e-9) for name, chunk, begin, end in spans]  # type: ignore[operator]
            for spans in iterations
        ]
    # The host learns of a moment just after it has come, some time or other soonest of all.
    offset = math.inf
    relative: list[list[HostSpan]] = []
    for spans in iterations:
        line: list[HostSpan] = []
        for name, chunk, begin, end in spans:
            assert not isinstance(begin, int)
            assert not isinstance(end, int)
            end.synchronize()
            now = time.perf_counter()
            begun, ended = first.elapsed_time(begin) / 1e3, first.elapsed_time(end) / 1e3
            offset = min(offset, now - ended)
            line.append((name, chunk, begun, ended))
        relative.append(line)
    return [
        [(name, chunk, begin + offset, end + offset) for name, chunk, begin, end in spans]
        for spans in relative
    ]


def measure(
    iterations: Sequence[Sequence[HostSpan]],
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
        for position, (name, chunk, begin, end) in enumerate(spans):
            if position:
                labels.append(BLOCKING)
            edges += [begin, end]
            if position in reducing:
                labels.append(_OUTSIDE)
                continue
            if chunk >= len(stages):
                raise InputError(
                    f"{name} came for chunk {chunk}, but Profiler knows the stages of "
                    f"{len(stages)} chunks; give it stages="
                )
            kind = stages[chunk], name
            labels.append(kind)
            kinds[kind].append(end - begin)
    known: list[Kind | str] = [*kinds, BLOCKING, _OUTSIDE]
    places = {label: k for k, label in enumerate(known)}
    found = powers(seen, edges, [places[label] for label in labels], len(places))
    if found is None or not (clock or seen.clock):
        return None
    return _rows(kinds, found, seen, clock or seen.clock, iterations)


def _reducing(spans: Sequence[HostSpan]) -> set[int]:
    """Positions of backwards that may hold an all-reduce: the last of each chunk.

    Only where there are others of the same kind to go by.
    """
    last: dict[int, int] = {}
    count: dict[tuple[str, int], int] = defaultdict(int)
    for position, (name, chunk, _, _) in enumerate(spans):
        count[name, chunk] += 1
        if name.startswith("backward"):
            last[chunk] = position
    return {position for position in last.values() if count[spans[position][:2]] > 1}


def _rows(
    kinds: Mapping[Kind, list[float]],
    found: Powers,
    seen: Seen,
    clock: int,
    iterations: Sequence[Sequence[HostSpan]],
) -> Measured:
    throttle = "+".join(sorted(seen.throttle))
    rows: list[Row] = []
    shares: list[float] = []
    time_variance = 0.0
    for k, ((stage, name), times) in enumerate(kinds.items()):
        mean, spread = statistics.fmean(times), statistics.pstdev(times)
        watts, error = float(found.watts[k]), math.sqrt(found.covariance[k, k])
        variance = (watts * spread) ** 2 / len(times) + (error * mean) ** 2
        shares.append(math.fsum(times) / len(iterations))
        time_variance += (watts * spread) ** 2 * len(times) / len(iterations) ** 2
        rows.append(
            Row(
                stage=stage,
                instruction=name,
                frequency=clock,
                time=mean,
                energy=watts * mean,
                time_std=spread,
                energy_std=math.sqrt(variance * len(times)),
                samples=len(times),
                clock=seen.clock,
                throttle=throttle,
            )
        )
    count = len(kinds)
    energy = float(found.watts[:count] @ shares)
    power_variance = float(shares @ found.covariance[:count, :count] @ shares)
    waiting, unsure = float(found.watts[count]), math.sqrt(found.covariance[count, count])
    rows.append(
        Row(
            stage=rows[0].stage,
            instruction=BLOCKING,
            frequency=clock,
            time=1.0,
            energy=waiting,  # energy over time is all that counts of it
            time_std=0.0,
            energy_std=unsure,
            samples=1,
            clock=seen.clock,
            throttle=throttle,
        )
    )
    forwards = sum(name == "forward" and chunk == 0 for name, chunk, *_ in iterations[0])
    return Measured(
        rows=rows,
        energy=energy,
        energy_error=math.sqrt(power_variance + time_variance),
        busy=math.fsum(shares),
        microbatches=forwards,
    )
