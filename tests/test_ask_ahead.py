"""When clocks are asked for ahead, against the requests of the plain replay."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

import replay_oracle as oracle
from envplan.pipeline import Pipeline
from envplan.profile import Profile
from envplan.runtime.ask_ahead import (
    NUM_RECENT_ITERATIONS,
    AheadTimer,
    TimerTable,
    Trigger,
    WaitAndDuration,
    timers,
)
from strategies import dags, pipelines, profiles

LATENCIES = [1, 7, 3_000_000, 20_000_000, 30_000_003, 300_000_000, 5_000_000_000]
NOISE = st.floats(0.5, 2.0)


def times_of(parts: list[oracle.Part], operations: range) -> list[tuple[int, int]]:
    """Begin and end of operations."""
    times = []
    for operation in operations:
        own = [part for part in parts if part.operation == operation]
        times.append((own[0].begin_ns, own[-1].end_ns))
    return times


def as_operation_times(times: list[tuple[int, int]]) -> list[WaitAndDuration]:
    ends = [0, *(end for _, end in times)]
    return [
        WaitAndDuration(begin - before, end - begin)
        for before, (begin, end) in zip(ends, times, strict=False)
    ]


def fires_at(timer: AheadTimer, position: int, times: list[tuple[int, int]]) -> int:
    """When a timer asks, or the operation itself if that begins before."""
    if position == 0:
        trigger_ns = 0
    else:
        begin, end = times[position - 1]
        trigger_ns = begin if timer.trigger is Trigger.BEGIN else end
    return min(trigger_ns + timer.delay_ns, times[position][0])


@settings(deadline=None)
@given(data=st.data(), noisy=st.booleans())
def test_timers_ask_when_the_replay_does(data: Any, noisy: bool) -> None:
    pipeline: Pipeline = data.draw(
        st.one_of(pipelines(max_stages=3, max_microbatches=4), dags(num_stages=2))
    )
    profile: Profile = data.draw(profiles(pipeline.num_profile_stages, max_options=6))
    latency_ns = data.draw(st.sampled_from(LATENCIES))
    rows = [
        data.draw(st.integers(0, len(profile.table(op.profile_stage, op.instruction)) - 1))
        for op in pipeline.operations
    ]
    factors = [data.draw(NOISE) for _ in rows] if noisy else None
    planned = oracle.replayed_with_requests(pipeline, profile, rows, latency_ns)
    run = oracle.replayed_with_requests(pipeline, profile, rows, latency_ns, factors)
    for begin, end in pairwise(pipeline.stage_begin.tolist()):
        operations = range(begin, end)
        table = timers(
            as_operation_times(times_of(planned.parts, operations)), [latency_ns] * (end - begin)
        )
        times = times_of(run.parts, operations)
        for position, operation in enumerate(operations):
            requested_ns = run.requests[operation]
            if requested_ns is not None:
                assert fires_at(table[position], position, times) == requested_ns


def test_timers_follow_what_the_latest_steps_have_shown() -> None:
    planned = [WaitAndDuration(0, 100), WaitAndDuration(5, 40)]
    table = TimerTable(planned, [20, 20, 20])
    first = AheadTimer(Trigger.BEGIN, 0)
    assert table.timers == [first, AheadTimer(Trigger.BEGIN, 85), AheadTimer(Trigger.BEGIN, 20)]
    for duration_ns in (120, 130, 9000, 125):  # one step had to wait for something
        table.add_iteration([0, 5], [duration_ns, 60])
    assert table.timers == [first, AheadTimer(Trigger.BEGIN, 110), AheadTimer(Trigger.BEGIN, 40)]
    later = [first, AheadTimer(Trigger.END, 30), AheadTimer(Trigger.BEGIN, 40)]
    num_iterations = 4
    while table.timers != later and num_iterations < 100:
        table.add_iteration([0, 50], [120, 60])
        num_iterations += 1
    assert num_iterations <= 2 * NUM_RECENT_ITERATIONS
    for _ in range(2 * NUM_RECENT_ITERATIONS):  # later the timers are not corrected after each one
        table.add_iteration([0, 0], [120, 80])
    assert table.timers == [first, AheadTimer(Trigger.BEGIN, 100), AheadTimer(Trigger.BEGIN, 60)]
