"""The machine of envplan.replay once more, operation by operation in plain Python integers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

from envplan.pipeline import Pipeline
from envplan.profile import OptionTable, Profile
from envplan.units import MAX_INTEGER


class Part(NamedTuple):
    operation: int
    frequency_mhz: int
    begin_ns: int
    end_ns: int
    energy_10fj: int
    power_10uw: int


class Stage:
    """Requests of one stage: when they come, for what; and the clock it begins with."""

    def __init__(self, left: int) -> None:
        self.asked = left
        self.coming = [(-1, left)]

    def clock(self, now: int) -> int:
        return [mhz for at, mhz in self.coming if at <= now][-1]

    def next_change(self, now: int) -> float:
        return min((at for at, _ in self.coming if at > now), default=math.inf)


def half_up(value: Fraction) -> int:
    return math.floor(value + Fraction(1, 2))


class Replayed(NamedTuple):
    """Parts by operation and in time order; and when each operation's clock is asked for."""

    parts: list[Part]
    requests: list[int | None]


def replayed_with_requests(
    pipeline: Pipeline,
    profile: Profile,
    rows: Sequence[int],
    latency_ns: int = 0,
    factors: Sequence[float] | None = None,
    ask: str = "ahead",
) -> Replayed:
    """Everything that runs, and every request."""
    tables = [profile.table(op.profile_stage, op.instruction) for op in pipeline.operations]
    asked = [int(table.frequency_mhz[row]) for table, row in zip(tables, rows, strict=True)]
    left = [0] * pipeline.num_stages
    before: list[int | None] = [None] * len(rows)
    after: list[int | None] = [None] * len(rows)
    for i, (op, mhz) in enumerate(zip(pipeline.operations, asked, strict=True)):
        left[op.stage] = mhz or left[op.stage]
        if i > 0 and pipeline.operations[i - 1].stage == op.stage:
            before[i], after[i - 1] = i - 1, i
    timers: list[tuple[str, int]] | None = None
    if ask == "ahead" and factors is not None and latency_ns > 0:
        planned = replayed_with_requests(pipeline, profile, rows, latency_ns, None, ask).parts
        timers = [_timer(i, before[i], planned, latency_ns) for i in range(len(rows))]
    stages = [Stage(mhz) for mhz in left]
    starts = [0] * len(rows)
    requests: list[int | None] = [None] * len(rows)
    ran: list[list[Part]] = [[] for _ in rows]
    for i in pipeline.order.tolist():
        stage = stages[pipeline.operations[i].stage]
        previous = before[i]
        if asked[i] not in (0, stage.asked):
            begun = 0 if previous is None else starts[previous]
            if ask == "start":
                at = starts[i]
            elif timers is None:
                at = max(begun, starts[i] - latency_ns)
            else:
                event, after_ns = timers[i]
                if event == "end" and previous is not None:
                    begun = ran[previous][-1].end_ns
                at = min(starts[i], begun + after_ns)
            requests[i] = at
            stage.coming.append((at + latency_ns, asked[i]))
            stage.asked = asked[i]
        factor = 1.0 if factors is None else factors[i]
        following = after[i]
        expected = list(stage.coming)
        if timers is not None and following is not None:
            # The timer of the next may fire while this runs.
            event, after_ns = timers[following]
            if event == "start" and asked[following] not in (0, stage.asked):
                stage.coming.append((starts[i] + after_ns + latency_ns, asked[following]))
        ran[i] = _run(i, tables[i], rows[i], starts[i], stage, factor)
        stage.coming = expected
        for k in range(pipeline.succ_begin[i], pipeline.succ_begin[i + 1]):
            lag = int(pipeline.succ_lag_ns[k])
            j = int(pipeline.succ[k])
            starts[j] = max(starts[j], ran[i][-1].end_ns + lag)
    return Replayed([part for parts in ran for part in parts], requests)


def _timer(
    i: int, previous: int | None, planned: Sequence[Part], latency_ns: int
) -> tuple[str, int]:
    """When an operation's timer begins, at the start or end of the one before, and its ns."""
    start = min(part.begin_ns for part in planned if part.operation == i)
    if previous is None:
        return "start", max(0, start - latency_ns)
    parts = [part for part in planned if part.operation == previous]
    begun, ended = parts[0].begin_ns, parts[-1].end_ns
    if start - ended >= latency_ns:
        return "end", start - ended - latency_ns
    return "start", max(0, start - begun - latency_ns)


def _run(i: int, table: OptionTable, row: int, now: int, stage: Stage, factor: float) -> list[Part]:
    parts: list[Part] = []
    planned = int(table.frequency_mhz[row])
    left: tuple[int, int] | None = None  # what is left, and of how much
    while left is None or left[0] > 0:
        mhz = stage.clock(now) if planned else 0
        by = row if mhz == planned else _nearest(table, row, mhz)
        listed, energy = int(table.time_ns[by]), int(table.energy_10fj[by])
        time = listed
        if factor != 1:
            time = min(max(1, round(listed * factor)), MAX_INTEGER)
            energy = half_up(Fraction(energy * time, listed))
        remaining = time if left is None else math.ceil(Fraction(left[0] * time, left[1]))
        until = stage.next_change(now) if planned else math.inf
        spent = int(min(remaining, until - now))
        power = -(-int(table.energy_10fj[by]) // listed)
        share = half_up(Fraction(energy * spent, time))
        parts.append(Part(i, mhz, now, now + spent, share, power))
        now += spent
        left = remaining - spent, time
    return parts


def _nearest(table: OptionTable, row: int, mhz: int) -> int:
    alike = [
        k
        for k in range(len(table))
        if table.frequency_mhz[k] and table.config[k] == table.config[row]
    ]
    return min(alike, key=lambda k: (abs(table.frequency_mhz[k] - mhz), -table.frequency_mhz[k], k))


def energy_10fj(
    parts: Sequence[Part], stage: Sequence[int], powers: Sequence[int], end: int
) -> int:
    """What everything takes until a time, all waiting included."""
    ran = sum(part.energy_10fj for part in parts)
    busy = sum(powers[stage[part.operation]] * (part.end_ns - part.begin_ns) for part in parts)
    return ran + end * sum(powers) - busy


def power_10uw(parts: Sequence[Part], stage: Sequence[int], powers: Sequence[int], at: int) -> int:
    """What one GPU a stage draws at a time."""
    drawn = list(powers)
    for part in parts:
        if part.begin_ns <= at < part.end_ns:
            drawn[stage[part.operation]] = part.power_10uw
    return sum(drawn)


def over_10fj(parts: Sequence[Part], stage: Sequence[int], powers: Sequence[int], cap: int) -> int:
    """The energy above a cap on power."""
    times = sorted({0, *(p.begin_ns for p in parts), *(p.end_ns for p in parts)})
    return sum(
        max(0, power_10uw(parts, stage, powers, begin) - cap) * (end - begin)
        for begin, end in pairwise(times)
    )


def hold_shortages(
    pipeline: Pipeline, requests: Sequence[int | None], makespan: int, hold: int
) -> list[int]:
    """For every request of an iteration, what is missing until the next one."""
    missing = []
    for stage in range(pipeline.num_stages):
        made = [
            at
            for op, at in zip(pipeline.operations, requests, strict=True)
            if op.stage == stage and at is not None
        ]
        for at, following in pairwise([*made, *(at + makespan for at in made[:1])]):
            missing.append(max(0, hold - (following - at)))
    return missing
