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

from collections.abc import Collection, Sequence
from dataclasses import asdict
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field, JsonValue

from envplan._io.documents import Index, Model, parse_document
from envplan.errors import InputError, shown
from envplan.pipeline.dependencies import Dag, Edges
from envplan.pipeline.operations import Operation
from envplan.pipeline.spec import MAX_OPERATIONS, Latency
from envplan.units import ns_from_s, s_from_ns

DAG_SCHEMA: Final = "envplan/dag/v1"


def identifier(text: str) -> str:
    """A text that is a name.

    Raises:
        ValueError: it is none.
    """
    if not text.isidentifier():
        raise ValueError('must be a name such as "forward"')
    return text


def _as_dependency(item: object) -> object:
    """A dependency without a latency may be written as an id alone."""
    return {"id": item} if isinstance(item, str) else item


class _Dependency(Model):
    """An operation that another one waits for."""

    id: str
    latency: Latency = 0.0


class _ListedOperation(Model):
    """An operation as a DAG document lists it."""

    id: Annotated[str, Field(min_length=1)]
    stage: Index
    instruction: Annotated[str, AfterValidator(identifier)]
    microbatch: Index = 0
    chunk: Index = 0
    profile_stage: Index | None = None
    after: list[Annotated[_Dependency, BeforeValidator(_as_dependency)]] = Field([])

    def to_operation(self) -> Operation:
        profile_stage = self.stage if self.profile_stage is None else self.profile_stage
        return Operation(self.stage, self.instruction, self.microbatch, self.chunk, profile_stage)


class _DagDocument(Model):
    schema_id: Literal["envplan/dag/v1"] = Field(alias="schema")
    operations: Annotated[list[_ListedOperation], Field(min_length=1, max_length=MAX_OPERATIONS)]


def parse_dag(document: object) -> Dag:
    """Check every field of a DAG document.

    Args:
        document: a JSON value as parsed.

    Raises:
        InputError: names the operation and the field that is wrong.
    """
    listed = parse_document(document, _DagDocument, kind="DAG", schema=DAG_SCHEMA).operations
    _check_ids(listed)
    _check_stages(listed)
    by_stage = sorted(listed, key=lambda entry: entry.stage)  # keeps their order
    index = {entry.id: i for i, entry in enumerate(by_stage)}
    edges: Edges = {}
    for number, entry in enumerate(listed):
        for dependency in entry.after:
            _check_dependency(dependency, entry, number, index.keys())
            edge = (index[dependency.id], index[entry.id])
            edges[edge] = max(ns_from_s(dependency.latency), edges.get(edge, 0))
    return Dag(tuple(index), tuple(entry.to_operation() for entry in by_stage), edges)


def dag_document(dag: Dag) -> dict[str, JsonValue]:
    """The DAG document of operations and their dependencies, in JSON types."""
    dependencies: list[list[JsonValue]] = [[] for _ in dag.operations]
    for (source, target), lag_ns in dag.edges.items():
        name = dag.ids[source]
        dependency: JsonValue = name
        if lag_ns:
            dependency = {"id": name, "latency": s_from_ns(lag_ns)}
        dependencies[target].append(dependency)
    entries: list[JsonValue] = [
        {"id": name, **asdict(operation), "after": after}
        for name, operation, after in zip(dag.ids, dag.operations, dependencies, strict=True)
    ]
    return {"schema": DAG_SCHEMA, "operations": entries}


def _check_ids(listed: Sequence[_ListedOperation]) -> None:
    """Refuse an id that two operations have."""
    number_of: dict[str, int] = {}
    for number, entry in enumerate(listed):
        if entry.id in number_of:
            raise InputError(
                f"operation {number} has the id {shown(entry.id)} of operation "
                f"{number_of[entry.id]}"
            )
        number_of[entry.id] = number


def _check_stages(listed: Sequence[_ListedOperation]) -> None:
    """Refuse a stage without operations below one that has some."""
    stages = {entry.stage for entry in listed}
    first_empty = next(stage for stage in range(len(stages) + 1) if stage not in stages)
    if first_empty < max(stages):
        raise InputError(f"stage {first_empty} has no operations, but stage {max(stages)} has")


def _check_dependency(
    dependency: _Dependency, entry: _ListedOperation, number: int, ids: Collection[str]
) -> None:
    """Refuse an operation that waits for itself, or for one that does not exist."""
    if dependency.id == entry.id:
        problem = "itself"
    elif dependency.id not in ids:
        problem = f"{shown(dependency.id)}, no operation's id"
    else:
        return
    raise InputError(f"operation {number} ({shown(entry.id)}) waits for {problem}")
