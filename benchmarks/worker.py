"""One measurement, in a process of its own: `python -m benchmarks.worker JOB ARGUMENTS`.

ARGUMENTS and the result, on standard output, are JSON objects. Imports and reading the profile are
not timed.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.machine import memory_bytes, peak_memory_bytes
from envplan import Pipeline, Profile
from envplan.frontier import Relaxation
from envplan.replay.cores import use_cores
from envplan.solve import trace_frontier


def trace(
    *,
    profile: str,
    stages: int,
    microbatches: int,
    schedule: str = "1f1b",
    chunks: int = 1,
    jobs: int = 1,
    full: bool = False,
    repetitions: int = 5,
    at_most_s: float = 10.0,
) -> dict[str, Any]:
    """Build the pipeline and trace its frontier on so many cores, several times over.

    Returns:
        wall_s and cpu_s of each repetition (the first one is cold), breakpoints, and memory before,
        and its peak, bytes.
    """
    tables = Profile.read_csv(profile)
    before = memory_bytes()
    use_cores(jobs)
    wall: list[float] = []
    cpu: list[float] = []
    breakpoints = 0
    while len(wall) < repetitions and sum(wall) < at_most_s:
        wall_begin, cpu_begin = time.perf_counter(), time.process_time()
        pipeline = Pipeline(schedule, stages, microbatches, num_chunks=chunks)
        frontier = Relaxation(pipeline, fitted(tables, pipeline), full=full).walk()
        wall.append(time.perf_counter() - wall_begin)
        cpu.append(time.process_time() - cpu_begin)
        breakpoints = len(frontier.times)
        del frontier
    return {
        "wall_s": wall,
        "cpu_s": cpu,
        "breakpoints": breakpoints,
        "memory_before": before,
        "memory_peak": peak_memory_bytes(),
    }


def fitted(profile: Profile, pipeline: Pipeline) -> Profile:
    """A profile with all operations of a pipeline; a V of DualPipe has backwards of two kinds."""
    return profile.fitted({op.instruction for op in pipeline.operations})


def plan(
    *, profile: str, stages: int, microbatches: int, schedule: str, chunks: int, slowdown: float
) -> dict[str, Any]:
    """Build the pipeline and plan one deadline from nothing, on one core.

    Returns:
        cpu_s, operations, gap, and the most memory held, bytes.
    """
    tables = Profile.read_csv(profile)
    use_cores(1)
    begin = time.process_time()
    pipeline = Pipeline(schedule, stages, microbatches, num_chunks=chunks)
    single = trace_frontier(pipeline, fitted(tables, pipeline), whole=False)
    found = single.plan(slowdown=slowdown)
    return {
        "cpu_s": time.process_time() - begin,
        "operations": len(pipeline.operations),
        "gap": found.gap,
        "memory_peak": peak_memory_bytes(),
    }


def lowtime(
    *, profile: str, stages: int, microbatches: int, quantum_s: float, plans_file: str
) -> dict[str, Any]:
    """Run lowtime to its end; its plans go to `plans_file` (.npz: stated_time_s, frequency_mhz).

    Returns:
        wall_s and cpu_s of its solver, fit_s, build_s, iterations, and memory, bytes.
    """
    from benchmarks import lowtime_peer

    tables = Profile.read_csv(profile)
    pipeline = Pipeline("1f1b", num_stages=stages, num_microbatches=microbatches)
    before = memory_bytes()
    walk = lowtime_peer.walk(pipeline, tables, quantum_s)
    np.savez(plans_file, stated_time_s=walk.stated_time_s, frequency_mhz=walk.frequency_mhz)
    return {
        "wall_s": walk.wall_s,
        "cpu_s": walk.cpu_s,
        "fit_s": walk.fit_s,
        "build_s": walk.build_s,
        "iterations": walk.iterations,
        "memory_before": before,
        "memory_peak": peak_memory_bytes(),
    }


def read_trace(*, path: str) -> dict[str, Any]:
    """Read a trace of requests; cpu_s, rows, and most memory, bytes."""
    import pandas as pd

    from envplan.serving.trace import Trace

    assert pd.__version__  # imported before the clock runs, as for the others
    begin = time.process_time()
    rows = len(Trace.read_csv(path))
    cpu_s = time.process_time() - begin
    return {"cpu_s": cpu_s, "rows": rows, "memory_peak": peak_memory_bytes()}


def read_pandas(*, path: str) -> dict[str, Any]:
    """The same file as a table of pandas, with its times; the same figures."""
    import pandas as pd

    begin = time.process_time()
    frame = pd.read_csv(path)
    frame["TIMESTAMP"] = pd.to_datetime(frame["TIMESTAMP"], format="ISO8601", utc=True)
    cpu_s = time.process_time() - begin
    return {"cpu_s": cpu_s, "rows": len(frame), "memory_peak": peak_memory_bytes()}


def read_pyarrow(*, path: str) -> dict[str, Any]:
    """The same as a table of pyarrow."""
    from pyarrow import csv

    begin = time.process_time()
    found = csv.read_csv(path)
    cpu_s = time.process_time() - begin
    assert str(found.schema.field("TIMESTAMP").type).startswith("timestamp")
    return {"cpu_s": cpu_s, "rows": found.num_rows, "memory_peak": peak_memory_bytes()}


JOBS: dict[str, Callable[..., dict[str, Any]]] = {
    "trace": trace,
    "plan": plan,
    "lowtime": lowtime,
    "read_trace": read_trace,
    "read_pandas": read_pandas,
    "read_pyarrow": read_pyarrow,
}


if __name__ == "__main__":
    print(json.dumps(JOBS[sys.argv[1]](**json.loads(sys.argv[2]))))
