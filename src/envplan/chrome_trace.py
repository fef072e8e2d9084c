"""A timeline in Chrome's trace-event format, which ui.perfetto.dev and chrome://tracing open.

One process holds a track (thread) for each stage, on which every operation is a slice, and counter
tracks: each stage's clock, and the power of all GPUs. Timestamps are microseconds, with three
decimals that are whole nanoseconds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any, Final

from envplan._files import atomic_write
from envplan.simulation import TimedOperation, Timeline
from envplan.units import j_from_fj, s_from_ns

__all__ = ["save_chrome_trace"]

_PROCESS: Final = 1
_NS_PER_US: Final = 1000

Event = dict[str, Any]


def save_chrome_trace(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    """Write a timeline as a JSON trace, whole or not at all.

    Raises:
        InputError: it cannot be written there.
    """
    events = ",\n".join(json.dumps(event, allow_nan=False) for event in _events(timeline))
    head = {"planner": timeline.plan.planner, "profile": timeline.plan.profile.name}
    if timeline.plan.profile.source is not None:
        head["profile_source"] = timeline.plan.profile.source
    atomic_write(
        path,
        f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(head)}, "traceEvents": [\n'
        f"{events}\n]}}\n",
    )


def _events(timeline: Timeline) -> Iterator[Event]:
    """The events of a trace: names of tracks, then each track in time order."""
    modelled = " (modelled)" if timeline.plan.profile.source == "modelled" else ""
    title = f"{timeline.plan.profile.name}{modelled}, planner {timeline.plan.planner}"
    yield _event("process_name", "M", None, {"name": title})
    for stage in timeline.stages:
        yield _event("thread_name", "M", stage.stage, {"name": f"stage {stage.stage}"})
        yield _event("thread_sort_index", "M", stage.stage, {"sort_index": stage.stage})
    path = set(timeline.critical_path)
    for index, timed in enumerate(timeline.operations):
        op = timed.operation
        name = f"{op.instruction} {op.microbatch}" + (f" chunk {op.chunk}" if op.chunk else "")
        args = _details(timed, on_path=index in path)
        yield _span(name, op.instruction, op.stage, timed.start_ns, timed.time_ns, args)
        for part in timed.slices if timed.slices[0].part else ():
            # Within the operation, so that a viewer shows it below.
            ran = {
                "frequency_mhz": part.frequency_mhz,
                "energy_j_per_gpu": j_from_fj(part.energy_fj),
            }
            took_ns = part.finish_ns - part.start_ns
            yield _span(part.part, "part", op.stage, part.start_ns, took_ns, ran)
    for stage in timeline.stages:
        last = timeline.sync_time_ns, stage.clock_changes[-1][1]
        for at, mhz in (*stage.clock_changes, last):
            yield _counter(f"stage {stage.stage} clock", at, {"MHz": mhz})
    times, watts = timeline.power
    for at, power in zip(times.tolist(), [*watts.tolist(), 0.0], strict=True):
        yield _counter("power of all GPUs", at, {"W": round(power, 6)})


def _details(timed: TimedOperation, *, on_path: bool) -> Event:
    args: Event = {
        "microbatch": timed.operation.microbatch,
        "frequency_mhz": timed.frequency_mhz,
        "energy_j_per_gpu": j_from_fj(timed.energy_fj),
        "could_stretch_s": s_from_ns(timed.stretch_ns),
        "critical_path": on_path,
    }
    if timed.config:
        args["config"] = timed.config
    if len(timed.slices) > 1:
        args["ran_at_mhz"] = [part.frequency_mhz for part in timed.slices]
    return args


def _span(name: str, kind: str, stage: int, start_ns: int, time_ns: int, args: Event) -> Event:
    times = {"ts": start_ns / _NS_PER_US, "dur": time_ns / _NS_PER_US}
    return {**_event(name, "X", stage, args), "cat": kind, **times}


def _counter(name: str, at_ns: int, args: Event) -> Event:
    return {"name": name, "ph": "C", "pid": _PROCESS, "ts": at_ns / _NS_PER_US, "args": args}


def _event(name: str, phase: str, stage: int | None, args: Event) -> Event:
    # Thread 0 is the idle task to trace viewers, so stage 0 is thread 1.
    thread = 0 if stage is None else stage + 1
    return {"name": name, "ph": phase, "pid": _PROCESS, "tid": thread, "args": args}
