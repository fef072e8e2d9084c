"""A timeline in Chrome's trace-event format, which ui.perfetto.dev and chrome://tracing open.

One process holds a track (thread) for each stage, on which every operation is a slice, and counter
tracks: each stage's clock, and the power of all GPUs. Timestamps are microseconds, with three
decimals that are whole nanoseconds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from itertools import groupby
from typing import Any, Final

from envplan._io.files import atomic_write
from envplan.simulation.iteration import Timeline
from envplan.units import j_from_fj, ns_from_s

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
    yield _event("process_name", "M", {"name": title}, tid=0)
    for stage in range(len(timeline.stages)):
        # Thread 0 is the idle task to trace viewers, so stage 0 is thread 1.
        thread = {"tid": stage + 1}
        yield _event("thread_name", "M", {"name": f"stage {stage}"}, **thread)
        yield _event("thread_sort_index", "M", {"sort_index": stage}, **thread)
    operations, rows = timeline.pipeline.operations, timeline.rows
    for i, of in groupby(timeline.slices, key=lambda one: one.operation):
        op, row, slices = operations[i], rows[i], list(of)
        args = {name: row[name] for name in ("microbatch", "frequency_mhz")}
        args |= {"energy_j_per_gpu": row["energy_j"]}
        args |= {name: row[name] for name in ("could_stretch_s", "critical_path")}
        if row["config"]:
            args["config"] = row["config"]
        if len(slices) > 1:
            args["ran_at_mhz"] = [part.frequency_mhz for part in slices]
        name = f"{op.instruction} {op.microbatch}" + (f" chunk {op.chunk}" if op.chunk else "")
        span = slices[0].start_ns, slices[-1].finish_ns
        yield _span(name, op.instruction, op.stage, *span, args)
        for part in slices if slices[0].part else ():
            # Within the operation, so that a viewer shows it below.
            energy_j = j_from_fj(part.energy_fj)
            ran = {"frequency_mhz": part.frequency_mhz, "energy_j_per_gpu": energy_j}
            yield _span(part.part, "part", op.stage, part.start_ns, part.finish_ns, ran)
    for use in timeline.stages:
        changes = [(ns_from_s(one["at_s"]), one["frequency_mhz"]) for one in use["clock_changes"]]
        for at, mhz in (*changes, (timeline.sync_time_ns, changes[-1][1])):
            yield _event(f"stage {use['stage']} clock", "C", {"MHz": mhz}, ts=at / _NS_PER_US)
    times, watts = timeline.power
    for at, power in zip(times.tolist(), [*watts.tolist(), 0.0], strict=True):
        yield _event("power of all GPUs", "C", {"W": round(power, 6)}, ts=at / _NS_PER_US)


def _span(name: str, kind: str, stage: int, start_ns: int, finish_ns: int, args: Event) -> Event:
    times = {"ts": start_ns / _NS_PER_US, "dur": (finish_ns - start_ns) / _NS_PER_US}
    return _event(name, "X", args, tid=stage + 1, cat=kind, **times)


def _event(name: str, phase: str, args: Event, **more: Any) -> Event:
    return {"name": name, "ph": phase, "pid": _PROCESS, **more, "args": args}
