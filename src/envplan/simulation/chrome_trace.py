"""A timeline in Chrome's trace-event format, which ui.perfetto.dev and chrome://tracing open.

One process holds a track (thread) for each stage, on which every operation is a slice, and counter
tracks: each stage's clock, and the power of all GPUs. Timestamps are microseconds, with three
decimals that are whole nanoseconds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Final

from envplan._io.files import atomic_write
from envplan.simulation.iteration import Timeline
from envplan.simulation.results import OperationRun, Slice, StageUse
from envplan.units import j_from_10fj

__all__ = ["save_chrome_trace"]

_PROCESS: Final = 1
_NS_PER_US: Final = 1000

Event = dict[str, object]


def save_chrome_trace(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    """Write a timeline as a JSON trace, whole or not at all.

    Raises:
        InputError: it cannot be written there.
    """
    profile = timeline.plan.profile
    about = {"planner": timeline.plan.planner, "profile": profile.name}
    if profile.source is not None:
        about["profile_source"] = profile.source
    # An event a line, so that a trace can be read and compared as text.
    lines = [json.dumps(event, allow_nan=False) for event in _events(timeline)]
    events = ",\n".join(lines)
    head = f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(about)}, "traceEvents": ['
    atomic_write(path, f"{head}\n{events}\n]}}\n")


def _events(timeline: Timeline) -> Iterator[Event]:
    """The events of a trace: names of tracks, operations, clocks, power."""
    yield from _track_names(timeline)
    for operation, slices in _slices_by_operation(timeline):
        yield from _operation_events(timeline.operations[operation], slices)
    for stage in timeline.stages:
        yield from _clock_events(stage, timeline.sync_time_ns)
    yield from _power_events(timeline)


def _track_names(timeline: Timeline) -> Iterator[Event]:
    """The name of the process, and name and position of each stage's track."""
    profile = timeline.plan.profile
    modelled = " (modelled)" if profile.source == "modelled" else ""
    title = f"{profile.name}{modelled}, planner {timeline.plan.planner}"
    yield _event("process_name", "M", {"name": title}, tid=0)
    for stage in range(timeline.pipeline.num_stages):
        thread = _thread(stage)
        yield _event("thread_name", "M", {"name": f"stage {stage}"}, tid=thread)
        yield _event("thread_sort_index", "M", {"sort_index": stage}, tid=thread)


def _slices_by_operation(timeline: Timeline) -> Iterator[tuple[int, list[Slice]]]:
    """The index of each operation with its slices in time order."""
    for operation, slices in groupby(timeline.slices, key=lambda piece: piece.operation):
        yield operation, list(slices)


def _operation_events(run: OperationRun, slices: Sequence[Slice]) -> Iterator[Event]:
    """An operation, and its parts where they have clocks of their own."""
    chunk = f" chunk {run.chunk}" if run.chunk else ""
    arguments: Event = {
        "microbatch": run.microbatch,
        "frequency_mhz": run.frequency_mhz,
        "energy_j_per_gpu": run.energy_j,
        "could_stretch_s": run.could_stretch_s,
        "critical_path": run.critical_path,
    }
    if run.config:
        arguments["config"] = run.config
    if len(slices) > 1:
        arguments["ran_at_mhz"] = [piece.frequency_mhz for piece in slices]
    yield _span(
        f"{run.instruction} {run.microbatch}{chunk}",
        category=run.instruction,
        stage=run.stage,
        start_ns=slices[0].start_ns,
        finish_ns=slices[-1].finish_ns,
        arguments=arguments,
    )
    for piece in slices:
        if piece.part:
            # Within the operation, so that a viewer shows it below.
            yield _part_event(run.stage, piece)


def _part_event(stage: int, piece: Slice) -> Event:
    """A part of an operation at a clock of its own."""
    return _span(
        piece.part,
        category="part",
        stage=stage,
        start_ns=piece.start_ns,
        finish_ns=piece.finish_ns,
        arguments={
            "frequency_mhz": piece.frequency_mhz,
            "energy_j_per_gpu": j_from_10fj(piece.energy_10fj),
        },
    )


def _clock_events(stage: StageUse, end_ns: int) -> Iterator[Event]:
    """The clock of a stage until the end, as a counter."""
    name = f"stage {stage.stage} clock"
    for change in stage.clock_changes:
        yield _counter(name, change.at_ns, {"MHz": change.frequency_mhz})
    yield _counter(name, end_ns, {"MHz": stage.clock_changes[-1].frequency_mhz})


def _power_events(timeline: Timeline) -> Iterator[Event]:
    """The power of all GPUs, as a counter that ends at 0."""
    times_ns = timeline.power.times_ns.tolist()
    power_w = [*timeline.power.power_w.tolist(), 0.0]
    for time_ns, watts in zip(times_ns, power_w, strict=True):
        yield _counter("power of all GPUs", time_ns, {"W": round(watts, 6)})


def _thread(stage: int) -> int:
    """The thread of a stage: thread 0 is the idle task to trace viewers, so stage 0 is thread 1."""
    return stage + 1


def _span(
    name: str, *, category: str, stage: int, start_ns: int, finish_ns: int, arguments: Event
) -> Event:
    """Something that a stage does from one time to another."""
    return _event(
        name,
        "X",
        arguments,
        tid=_thread(stage),
        cat=category,
        ts=start_ns / _NS_PER_US,
        dur=(finish_ns - start_ns) / _NS_PER_US,
    )


def _counter(name: str, time_ns: int, values: Event) -> Event:
    """Values of a counter from a time on."""
    return _event(name, "C", values, ts=time_ns / _NS_PER_US)


def _event(name: str, phase: str, arguments: Event, **fields: float | str) -> Event:
    """An event of Chrome's format; its fields come in the order of the format's description."""
    return {"name": name, "ph": phase, "pid": _PROCESS, **fields, "args": arguments}
