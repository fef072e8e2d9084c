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

Numbers given by a user are checked here, too; what leaves this module is trusted.
"""

from __future__ import annotations

from numbers import Integral
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field

from envplan._io.documents import Count, Index, Model, parse_document
from envplan.errors import InputError, shown
from envplan.pipeline.dependencies import Dag, Edges
from envplan.pipeline.schedules import Operation
from envplan.units import ns_from_s

DAG_SCHEMA: Final = "envplan/dag/v1"
#: The schedule name of a pipeline that comes from a DAG.
DAG_SCHEDULE: Final = "dag"
MAX_OPERATIONS: Final = 2**20
MAX_LATENCY_S: Final = 1e9

Latency = Annotated[float, Field(ge=0, le=MAX_LATENCY_S)]


def _plain(value: object) -> object:
    """Whole numbers of numpy and tuples as JSON has them."""
    if isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    return list(value) if isinstance(value, tuple) else value


_Index = Annotated[Index, BeforeValidator(_plain)]
_Count = Annotated[Count, BeforeValidator(_plain)]
_Indices = Annotated[list[_Index], BeforeValidator(_plain)]


def identifier(text: str) -> str:
    if not text.isidentifier():
        raise ValueError('must be a name such as "forward"')
    return text


def _named(item: object) -> object:
    return {"id": item} if isinstance(item, str) else item


class _After(Model):
    id: str
    latency: Latency = 0.0


class _Listed(Model):
    """An operation as a DAG document lists it."""

    id: Annotated[str, Field(min_length=1)]
    stage: Index
    instruction: Annotated[str, AfterValidator(identifier)]
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
    """The part of plan.json's `job` that describes a pipeline; further fields are left alone."""

    model_config = ConfigDict(extra="ignore")

    schedule: str
    stages: _Count
    microbatches: _Count
    chunks: _Count | None = None
    p2p_latency_s: Latency | Annotated[list[Latency], BeforeValidator(_plain)] = 0.0
    forwards_ahead: _Indices | None = Field(
        None, description="schedule envpipe: forwards before the first backward beyond 1F1B's"
    )
    microbatch_group: _Count | None = Field(
        None,
        description="schedule interleaved: microbatches that go through a chunk before the next",
    )
    extras: dict[str, _Indices] | None = Field(
        None,
        description="operations beside forwards and backwards, and which model stages have them",
    )
    in_turn: _Indices | None = Field(
        None, description="stages that take turns with the next one: transfers hold the sender"
    )
    dag: dict[str, Any] | None = None


def whole_number(value: object, what: str, *, least: int) -> int:
    """`value` as an int.

    Raises:
        InputError: it is no whole number, or too small.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InputError(f"{what} must be a whole number, not {shown(value)}")
    if value < least:
        raise InputError(f"{what} must be at least {least}, not {shown(value)}")
    return int(value)


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
    stages = {entry.stage for entry in listed}
    gap = next(stage for stage in range(len(stages) + 1) if stage not in stages)
    if gap < max(stages):
        raise InputError(f"stage {gap} has no operations, but stage {max(stages)} has")
    by_stage = sorted(listed, key=lambda entry: entry.stage)  # keeps their order
    index = {entry.id: place for place, entry in enumerate(by_stage)}
    after: Edges = {}
    for i, entry in enumerate(listed):
        for item in entry.after:
            if item.id not in index or item.id == entry.id:
                itself = "itself" if item.id == entry.id else f"{shown(item.id)}, no operation's id"
                raise InputError(f"operation {i} ({shown(entry.id)}) waits for {itself}")
            edge = (index[item.id], index[entry.id])
            after[edge] = max(ns_from_s(item.latency), after.get(edge, 0))
    return Dag(tuple(index), tuple(entry.operation() for entry in by_stage), after)
