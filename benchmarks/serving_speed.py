"""Section g: serving. Planning a slot, replaying a day, reading millions of rows."""

from __future__ import annotations

import gzip
import heapq
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import Section, megabytes, percent, ratio, seconds, table
from benchmarks.running import in_fresh_process, note
from envplan.errors import NoAnswerError
from envplan.serving import CLASSES, ServingProfile, exact_plan, hierarchical_plan, simulate
from envplan.serving.trace import Trace, make_week

GPUS = 1024
SLOTS = 4  # random loads that fill a fleet
ROWS, ROWS_QUICK = 10_000_000, 1_000_000
DAYS, DAYS_QUICK = 1.0, 0.1
INSTANCES = 16  # of the peer
PATIENCE_S = 60.0  # of the exact planner
READERS = {"read_trace": "envplan", "read_pandas": "pandas", "read_pyarrow": "pyarrow"}
MOST_MEMORY = 1e9


def run(quick: bool, folder: Path) -> Section:
    """All three, each beside a peer in the same run."""
    section = Section("Serving: planning, replaying, reading")
    for part in (planning, replaying, reading):
        note(part.__name__)
        part(section, quick, folder)
    return section


def _cpu(work: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.process_time()
    result = work()
    return time.process_time() - begin, result


def planning(section: Section, quick: bool, _: Path) -> None:
    """The exact planner against the hierarchical one on random loads of all nine classes."""
    profile, random = ServingProfile.builtin(), np.random.default_rng(0)
    rows, most_s, worst = [], 0.0, 1.0
    for slot in range(2 if quick else SLOTS):
        shares = random.dirichlet(np.ones(len(CLASSES)))
        plans: dict[str, tuple[float, Any]] = {}
        for total in (4e6, 2e6, 1e6, 5e5, 2.5e5, 1e5):  # tokens/s: the first that fits
            loads = {n: total * x for n, x in zip(CLASSES, shares, strict=True) if total * x > 1}
            try:
                plans["hierarchical"] = _cpu(partial(hierarchical_plan, profile, loads, GPUS))
                patient = partial(exact_plan, time_limit=PATIENCE_S)
                plans["exact"] = _cpu(partial(patient, profile, loads, GPUS))
                break
            except NoAnswerError:
                continue
        (slow, exact), (fast, near) = plans["exact"], plans["hierarchical"]
        most_s, worst = max(most_s, slow), max(worst, near.power / exact.power)
        gap = "-" if exact.predicted.gap is None else percent(exact.predicted.gap, 2)
        rows.append([f"{slot}", f"{total:,.0f}", f"{exact.gpus}", seconds(slow), gap,
                     ratio(fast / slow), ratio(near.power / exact.power)])  # fmt: skip
        section.raw.append({"slot": slot, "exact_s": slow, "hierarchical_s": fast,
                            "power_ratio": near.power / exact.power})  # fmt: skip
    section.paragraphs += [
        f"A slot of random loads of all nine classes on at most {GPUS:,} GPUs; CPU time. The "
        f"exact planner has a limit of {PATIENCE_S:g} s. Ratios are the hierarchical planner's "
        "time and power against its own.",
        table(["slot", "tokens/s", "GPUs", "exact", "gap", "time", "power"], rows),
    ]
    section.target("exact plan of a slot, 1,024 GPUs", "< 10 s", seconds(most_s), most_s < 10)


def python_replay(trace: Trace, instances: int) -> int:
    """What any replay in plain Python must do at least: arrivals and departures in a heap."""
    events = [(float(at), k, -1) for k, at in enumerate(trace.arrival_s)]
    heapq.heapify(events)
    inside = [0] * instances
    served = 0
    while events:
        at, k, where = heapq.heappop(events)
        if where < 0:
            where = min(range(instances), key=inside.__getitem__)
            inside[where] += 1
            heapq.heappush(events, (at + 0.02 * float(trace.output_tokens[k]), k, where))  # type: ignore[index]
        else:
            inside[where] -= 1
            served += 1
    return served


def replaying(section: Section, quick: bool, _: Path) -> None:
    """Requests per second of CPU time, against events in plain Python."""
    trace = make_week("conversation-week", days=DAYS_QUICK if quick else DAYS)
    few = trace.part(np.arange(min(len(trace), 100_000)))
    slow, _served = _cpu(lambda: python_replay(few, INSTANCES))
    peer = len(few) / slow
    rows = []
    for policy in ("SinglePool", "DynamoLLM", "exact", "envplan"):
        took, result = _cpu(lambda: simulate(ServingProfile.builtin(), trace, policy))  # noqa: B023
        each = result.requests / took
        rows.append([policy, f"{each:,.0f}", ratio(each / peer), seconds(27.2e6 / each),
                     ratio(result.duration_s / took)])  # fmt: skip
        section.raw.append({"policy": policy, "requests_per_s": each, "peer_per_s": peer})
    section.paragraphs += [
        f"{len(trace):,} requests of conversation-week, replayed with all decisions of the policy; "
        f"CPU time of one core. The peer only takes arrivals and departures from a heap in plain "
        f"Python, {peer:,.0f} requests a second.",
        table(["policy", "requests/s", "against the peer", "27.2 million", "real time"], rows),
    ]


def azure_rows(path: Path, count: int) -> None:
    """An Azure file of so many rows: those of the real hour of conversations, over and over.

    Times are shifted by an hour each time round, and written as in the week of 2024.
    """
    hour = Trace.open("azure-2023-conversation")
    assert hour.input_tokens is not None
    assert hour.output_tokens is not None
    begin = np.datetime64("2024-05-10T00:00:00")
    rests = [
        f"+00:00,{a},{b}\n" for a, b in zip(hour.input_tokens, hour.output_tokens, strict=True)
    ]
    offsets = (hour.arrival_s * 1e6).astype("timedelta64[us]")
    with path.open("w") as file:
        file.write("TIMESTAMP,ContextTokens,GeneratedTokens\n")
        for k in range(-(-count // len(hour))):
            times = np.datetime_as_string(begin + np.timedelta64(k, "h") + offsets)
            rows = zip(times[: count - k * len(hour)], rests, strict=False)
            file.writelines(f"{at.replace('T', ' ')}{rest}" for at, rest in rows)


def reading(section: Section, quick: bool, folder: Path) -> None:
    """A trace in Azure's format, plain and gzipped, against pandas and pyarrow."""
    count = ROWS_QUICK if quick else ROWS
    path, zipped = folder / "trace.csv", folder / "trace.csv.gz"
    azure_rows(path, count)
    with path.open("rb") as plain, gzip.open(zipped, "wb", compresslevel=1) as file:
        shutil.copyfileobj(plain, file, 2**20)
    rows = []
    for file_path in (path, zipped):
        runs = {job: in_fresh_process(job, path=str(file_path)) for job in READERS}
        peer = runs["read_pandas"]["cpu_s"]
        for job, run in runs.items():
            assert run["rows"] == count
            section.raw.append({"file": file_path.name, "reader": job, **run})
            rows.append([
                READERS[job], file_path.name, seconds(run["cpu_s"]),
                f"{count / run['cpu_s']:,.0f}", ratio(peer / run["cpu_s"]),
                megabytes(run["memory_peak"]),
            ])  # fmt: skip
    section.paragraphs += [
        f"{count:,} rows of Azure's real hour of conversations, over and over with shifted times, "
        "in fresh processes; CPU time of all threads. The peers read the same columns and times "
        "into one table each, and check nothing; envplan reads in pieces, checks every cell and "
        "the order, and sorts requests into classes.",
        table(["", "file", "CPU time", "rows/s", "against pandas", "most memory"], rows),
    ]
    memory = max(run["memory_peak"] for run in section.raw if run.get("reader") == "read_trace")
    section.target(
        "memory while reading a trace", "< 1 GB", megabytes(memory), memory < MOST_MEMORY
    )
