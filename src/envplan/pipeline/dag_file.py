"""Pipelines of the user's own as files: the DAG format "envplan/dag/v1".

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

Every field is checked here; what leaves this module is trusted.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from envplan._io.documents import Index, Model, parse_document
from envplan.errors import InputError, shown
from envplan.pipeline.dependencies import Dag, Edges
from envplan.pipeline.schedules import Operation
from envplan.pipeline.spec import Latency
from envplan.units import ns_from_s

DAG_SCHEMA: Final = "envplan/dag/v1"
MAX_OPERATIONS: Final = 2**20


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
