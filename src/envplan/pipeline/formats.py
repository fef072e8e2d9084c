"""Pipelines as files: the DAG format "envplan/dag/v1", and the job inside plan.json.

    {"schema": "envplan/dag/v1",
     "operations": [
       {"id": "f0", "stage": 0, "instruction": "forward"},
       {"id": "f1", "stage": 1, "instruction": "forward",
        "after": [{"id": "f0", "latency": 0.001}]},
       {"id": "b1", "stage": 1, "instruction": "backward"},
       {"id": "b0", "stage": 0, "instruction": "backward", "after": ["b1"]}]}

Operations of one stage run in the order listed; `after` adds dependencies between any two. A
latency is in seconds and defaults to 0; `microbatch` and `chunk` default to 0, `profile_stage` (the
stage of the profile that times the operation) to `stage`.

Here is also where numbers given by a user are checked; what leaves this module is trusted.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from envplan._files import parse_json, read_bounded
from envplan.errors import InputError, shown
from envplan.pipeline.schedules import Operation, traits
from envplan.units import ns_from_s, s_from_ns

DAG_SCHEMA = "envplan/dag/v1"
#: The schedule name of a pipeline that comes from a DAG.
DAG_SCHEDULE = "dag"
MAX_DAG_BYTES = 64 * 2**20
MAX_OPERATIONS = 2**20
MAX_LATENCY_S = 1e9
_MAX_COUNT = 2**31 - 1

_DAG_FIELDS = frozenset({"schema", "operations"})
_OPERATION_FIELDS = frozenset(
    {"id", "stage", "instruction", "microbatch", "chunk", "profile_stage", "after"}
)
_AFTER_FIELDS = frozenset({"id", "latency"})


@dataclass(frozen=True)
class Dag:
    """A DAG document whose every field has been checked, but for cycles and loose parts.

    Attributes:
        ids: the user's name of each operation, (N).
        operations: grouped by stage, in execution order within a stage, (N).
        after: (operation, operation that waits for it) -> latency in ns, by index.
    """

    ids: tuple[str, ...]
    operations: tuple[Operation, ...]
    after: dict[tuple[int, int], int]

    @property
    def num_stages(self) -> int:
        return self.operations[-1].stage + 1

    @property
    def num_microbatches(self) -> int:
        return max(operation.microbatch for operation in self.operations) + 1

    @property
    def num_chunks(self) -> int:
        return max(operation.chunk for operation in self.operations) + 1

    @property
    def num_profile_stages(self) -> int:
        return max(operation.profile_stage for operation in self.operations) + 1


@dataclass(frozen=True)
class Job:
    """The part of plan.json's `job` that describes a pipeline.

    Attributes:
        p2p_latency: in seconds; a list has one for each pair of neighbouring stages.
        forwards_ahead, extras: as the job has them, not yet checked; None where it has none.
        dag: None for a schedule.
    """

    schedule: str
    num_stages: int
    num_microbatches: int
    num_chunks: int
    p2p_latency: float | list[float]
    forwards_ahead: Any
    extras: Any
    dag: Dag | None


def whole_number(value: object, what: str, *, least: int) -> int:
    """`value` as an int.

    Raises:
        InputError: it is no whole number, less than `least` or above 2**31 - 1.
    """
    if value is None:
        raise InputError(f"{what} must be given")
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InputError(f"{what} must be a whole number, not {shown(value)}")
    number = int(value)
    if number < least:
        raise InputError(f"{what} must be at least {least}, not {shown(number)}")
    if number > _MAX_COUNT:
        raise InputError(f"{what} must be at most {_MAX_COUNT}, not {shown(number)}")
    return number


def latency_ns(value: object, what: str) -> int:
    """A latency given in seconds, in whole nanoseconds.

    Raises:
        InputError: it is no number, not finite, negative or above 1e9 s.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InputError(f"{what} must be a number of seconds, not {shown(value)}")
    try:
        seconds = float(value)
    except OverflowError:
        seconds = math.inf
    if not 0 <= seconds <= MAX_LATENCY_S:
        raise InputError(
            f"{what} must lie between 0 and {MAX_LATENCY_S:.0e} seconds, not {shown(value)}"
        )
    return ns_from_s(seconds)


def read_dag(path: str | os.PathLike[str]) -> object:
    """The JSON value in a DAG file, not yet checked.

    Raises:
        InputError: the file cannot be read, is larger than 64 MiB or is not JSON; says the line.
    """
    return parse_json(read_bounded(path, MAX_DAG_BYTES), path)


def parse_dag(document: object) -> Dag:
    """Check every field of a DAG document.

    Args:
        document: a JSON value as parsed.

    Raises:
        InputError: names the operation (index and id) and the field that is wrong.
    """
    entries = _entries(document)
    ids = _ids(entries)
    listed = [_operation(entry, _named(i, entry)) for i, entry in enumerate(entries)]
    _refuse_gaps(listed)
    by_stage = sorted(range(len(listed)), key=lambda i: listed[i].stage)  # stable: keeps the order
    index = {ids[i]: place for place, i in enumerate(by_stage)}
    after: dict[tuple[int, int], int] = {}
    for i, entry in enumerate(entries):
        for before, lag in _after(entry, _named(i, entry), index):
            edge = (before, index[ids[i]])
            after[edge] = max(lag, after.get(edge, 0))
    return Dag(tuple(ids[i] for i in by_stage), tuple(listed[i] for i in by_stage), after)


def _entries(document: object) -> list[dict[str, Any]]:
    if not isinstance(document, dict):
        raise InputError(f"a DAG must be an object, not {shown(document)}")
    if document.get("schema") != DAG_SCHEMA:
        found = shown(document["schema"]) if "schema" in document else "missing"
        raise InputError(f'schema must be "{DAG_SCHEMA}"; it is {found}')
    _refuse_unknown(document, _DAG_FIELDS, "the DAG")
    entries = document.get("operations")
    if not isinstance(entries, list):
        raise InputError(f"operations must be a list, not {shown(entries)}")
    if not entries:
        raise InputError("operations is empty: a DAG needs at least one operation")
    if len(entries) > MAX_OPERATIONS:
        raise InputError(f"{len(entries)} operations; at most {MAX_OPERATIONS} are possible")
    for i, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise InputError(f"operation {i} must be an object, not {shown(entry)}")
    return entries


def _named(i: int, entry: dict[str, Any]) -> str:
    return f"operation {i} ({shown(entry['id'])})"


def _refuse_unknown(fields: dict[str, Any], known: frozenset[str], what: str) -> None:
    if not fields.keys() <= known:
        unknown = next(key for key in fields if key not in known)
        raise InputError(
            f"{what} has an unknown field {shown(unknown)}; known: {', '.join(sorted(known))}"
        )


def _ids(entries: list[dict[str, Any]]) -> list[str]:
    first: dict[str, int] = {}
    for i, entry in enumerate(entries):
        name = entry.get("id")
        if not isinstance(name, str) or not name:
            found = shown(name) if "id" in entry else "missing"
            raise InputError(f"operation {i}: id must be a non-empty string; it is {found}")
        if name in first:
            raise InputError(f"operation {i} has the id {shown(name)} of operation {first[name]}")
        first[name] = i
    return list(first)


def _operation(entry: dict[str, Any], name: str) -> Operation:
    _refuse_unknown(entry, _OPERATION_FIELDS, name)
    instruction = entry.get("instruction")
    if not isinstance(instruction, str) or not instruction.isidentifier():
        found = shown(instruction) if "instruction" in entry else "missing"
        raise InputError(f'{name}: instruction must be a name such as "forward"; it is {found}')
    stage = whole_number(entry.get("stage"), f"{name}: stage", least=0)
    return Operation(
        stage,
        instruction,
        whole_number(entry.get("microbatch", 0), f"{name}: microbatch", least=0),
        whole_number(entry.get("chunk", 0), f"{name}: chunk", least=0),
        whole_number(entry.get("profile_stage", stage), f"{name}: profile_stage", least=0),
    )


def _refuse_gaps(operations: list[Operation]) -> None:
    stages = {operation.stage for operation in operations}
    last = max(stages)
    if len(stages) <= last:
        gap = next(stage for stage in range(last) if stage not in stages)
        raise InputError(f"stage {gap} has no operations, but stage {last} has")


def _after(entry: dict[str, Any], name: str, index: dict[str, int]) -> list[tuple[int, int]]:
    """(index of the operation waited for, latency in ns) for each item of `after`."""
    items = entry.get("after", [])
    if not isinstance(items, list):
        raise InputError(f"{name}: after must be a list, not {shown(items)}")
    found = []
    for item in items:
        if isinstance(item, dict):
            _refuse_unknown(item, _AFTER_FIELDS, f"{name}: an item of after")
        fields = item if isinstance(item, dict) else {"id": item}
        before = fields.get("id")
        if not isinstance(before, str):
            raise InputError(
                f"{name}: after must list ids, or objects with an id; one is {shown(before)}"
            )
        if before == entry["id"]:
            raise InputError(f"{name} waits for itself")
        if before not in index:
            raise InputError(f"{name} waits for {shown(before)}, which is no operation's id")
        lag = latency_ns(fields.get("latency", 0), f"{name}: latency after {shown(before)}")
        found.append((index[before], lag))
    return found


def dag_document(dag: Dag) -> dict[str, Any]:
    """The DAG as a JSON document; parse_dag gives an equal DAG back."""
    waits: list[list[Any]] = [[] for _ in dag.ids]
    for (before, then), lag in dag.after.items():
        name = dag.ids[before]
        waits[then].append({"id": name, "latency": s_from_ns(lag)} if lag else name)
    entries = [
        {
            "id": name,
            "stage": operation.stage,
            "instruction": operation.instruction,
            "microbatch": operation.microbatch,
            "chunk": operation.chunk,
            "profile_stage": operation.profile_stage,
            "after": after,
        }
        for name, operation, after in zip(dag.ids, dag.operations, waits, strict=True)
    ]
    return {"schema": DAG_SCHEMA, "operations": entries}


def parse_job(job: object) -> Job:
    """Read the pipeline's part of a job; other fields of the job are left alone.

    Raises:
        InputError: names the field that is missing, wrong or at odds with the job's DAG.
    """
    if not isinstance(job, dict):
        raise InputError(f"job must be an object, not {shown(job)}")
    schedule = job.get("schedule")
    if not isinstance(schedule, str):
        raise InputError(f"job: schedule must be a name, not {shown(schedule)}")
    if (schedule == DAG_SCHEDULE) != (job.get("dag") is not None):
        raise InputError('job: schedule "dag" and the field dag go together; one is missing')
    dag = parse_dag(job["dag"]) if schedule == DAG_SCHEDULE else None
    if dag is not None:
        _refuse_contradiction(job, dag)
    stages = whole_number(job.get("stages"), "job: stages", least=1)
    p2p_latency = job.get("p2p_latency_s", 0.0)
    transfer_ns(p2p_latency, "job: p2p_latency_s", stages)
    return Job(
        schedule,
        stages,
        whole_number(job.get("microbatches"), "job: microbatches", least=1),
        whole_number(job.get("chunks", traits(schedule).chunks), "job: chunks", least=1),
        p2p_latency,
        job.get("forwards_ahead"),
        job.get("extras"),
        dag,
    )


def transfer_ns(value: object, what: str, num_stages: int) -> int | tuple[int, ...]:
    """A latency in seconds, or one for each pair of neighbouring stages, in whole nanoseconds.

    Raises:
        InputError: as for latency_ns, or there are not num_stages - 1 of them.
    """
    if not isinstance(value, list | tuple):
        return latency_ns(value, what)
    if len(value) != num_stages - 1 or not value:
        raise InputError(
            f"{what} must be one number, or a list of {num_stages - 1}, one for each pair of "
            "neighbouring stages"
        )
    return tuple(latency_ns(one, f"{what}[{k}]") for k, one in enumerate(value))


def _refuse_contradiction(job: dict[str, Any], dag: Dag) -> None:
    meant = {
        "stages": dag.num_stages,
        "microbatches": dag.num_microbatches,
        "chunks": dag.num_chunks,
        "p2p_latency_s": 0,
        "forwards_ahead": None,
        "extras": None,
    }
    for field, value in meant.items():
        if field in job and job[field] != value:
            raise InputError(f"job: {field} is {shown(job[field])}, but its DAG means {value}")
