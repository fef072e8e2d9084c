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
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field

from envplan._documents import parse_document
from envplan._files import AnyPath, parse_json, read_bounded
from envplan._model import Model
from envplan.errors import InputError, shown
from envplan.pipeline.schedules import Operation, traits
from envplan.units import ns_from_s, s_from_ns

DAG_SCHEMA: Final = "envplan/dag/v1"
#: The schedule name of a pipeline that comes from a DAG.
DAG_SCHEDULE: Final = "dag"
MAX_DAG_BYTES = 64 * 2**20
MAX_OPERATIONS: Final = 2**20
MAX_LATENCY_S: Final = 1e9
_MAX_COUNT: Final = 2**31 - 1


def _identifier(text: str) -> str:
    if not text.isidentifier():
        raise ValueError('must be a name such as "forward"')
    return text


def _named(item: object) -> object:
    return {"id": item} if isinstance(item, str) else item


Index = Annotated[int, Field(ge=0, le=_MAX_COUNT)]
Count = Annotated[int, Field(ge=1, le=_MAX_COUNT)]
Latency = Annotated[float, Field(ge=0, le=MAX_LATENCY_S)]


class _After(Model):
    id: str
    latency: Latency = 0.0


class _Listed(Model):
    """An operation as a DAG document lists it."""

    id: Annotated[str, Field(min_length=1)]
    stage: Index
    instruction: Annotated[str, AfterValidator(_identifier)]
    microbatch: Index = 0
    chunk: Index = 0
    profile_stage: Index | None = None
    after: list[Annotated[_After, BeforeValidator(_named)]] = Field([])

    def operation(self) -> Operation:
        timed = self.stage if self.profile_stage is None else self.profile_stage
        return Operation(self.stage, self.instruction, self.microbatch, self.chunk, timed)


class _DagDocument(Model):
    schema_id: Literal["envplan/dag/v1"] = Field(alias="schema")
    operations: Annotated[list[_Listed], Field(min_length=1, max_length=MAX_OPERATIONS)]


class Job(Model):
    """The part of plan.json's `job` that describes a pipeline; further fields are left alone.

    Attributes:
        forwards_ahead, microbatch_group, extras, in_turn: as the job has them; Pipeline checks
            them.
        dag: a DAG document, for schedule `dag` alone.
    """

    model_config = ConfigDict(extra="ignore")

    schedule: str
    stages: Count
    microbatches: Count
    chunks: Count | None = None
    p2p_latency_s: Latency | list[Latency] = 0.0
    forwards_ahead: Any = None
    microbatch_group: Count | None = None
    extras: Any = None
    in_turn: Any = None
    dag: Any = None

    @property
    def num_chunks(self) -> int:
        """Chunks per stage; where the job does not say, the schedule's usual number."""
        return traits(self.schedule).chunks if self.chunks is None else self.chunks


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


def read_dag(path: AnyPath) -> object:
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
        InputError: names the operation and the field that is wrong.
    """
    listed = parse_document(document, _DagDocument, kind="DAG", schema=DAG_SCHEMA).operations
    first: dict[str, int] = {}
    for i, entry in enumerate(listed):
        if first.setdefault(entry.id, i) != i:
            raise InputError(
                f"operation {i} has the id {shown(entry.id)} of operation {first[entry.id]}"
            )
    operations = [entry.operation() for entry in listed]
    _refuse_gaps(operations)
    by_stage = sorted(range(len(listed)), key=lambda i: operations[i].stage)  # keeps their order
    index = {listed[i].id: place for place, i in enumerate(by_stage)}
    after: dict[tuple[int, int], int] = {}
    for i, entry in enumerate(listed):
        for item in entry.after:
            if item.id not in index or item.id == entry.id:
                itself = "itself" if item.id == entry.id else f"{shown(item.id)}, no operation's id"
                raise InputError(f"operation {i} ({shown(entry.id)}) waits for {itself}")
            edge = (index[item.id], index[entry.id])
            after[edge] = max(ns_from_s(item.latency), after.get(edge, 0))
    return Dag(tuple(index), tuple(operations[i] for i in by_stage), after)


def _refuse_gaps(operations: list[Operation]) -> None:
    stages = {operation.stage for operation in operations}
    last = max(stages)
    if len(stages) <= last:
        gap = next(stage for stage in range(last) if stage not in stages)
        raise InputError(f"stage {gap} has no operations, but stage {last} has")


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


def parse_job(document: object) -> tuple[Job, Dag | None]:
    """Read the pipeline's part of a job, and its DAG where it has one.

    Raises:
        InputError: names the field that is missing, wrong or at odds with the job's DAG.
    """
    job = parse_document(document, Job, kind="job")
    if (job.schedule == DAG_SCHEDULE) != (job.dag is not None):
        raise InputError('job: schedule "dag" and the field dag go together; one is missing')
    if job.dag is None:
        return job, None
    dag = parse_dag(job.dag)
    meant = {
        "stages": dag.num_stages,
        "microbatches": dag.num_microbatches,
        "chunks": dag.num_chunks,
        "p2p_latency_s": 0,
        "forwards_ahead": None,
        "microbatch_group": None,
        "extras": None,
        "in_turn": None,
    }
    for field, value in meant.items():
        stated = getattr(job, field)
        if field in job.model_fields_set and stated != value:
            raise InputError(f"job: {field} is {shown(stated)}, but its DAG means {value}")
    return job, dag


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
