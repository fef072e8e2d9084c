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
from numbers import Integral, Real
from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field

from envplan._documents import parse_document
from envplan._model import Count, Index, Model
from envplan.errors import InputError, shown
from envplan.pipeline.dependencies import Edges
from envplan.pipeline.schedules import Operation
from envplan.units import ns_from_s

DAG_SCHEMA: Final = "envplan/dag/v1"
#: The schedule name of a pipeline that comes from a DAG.
DAG_SCHEDULE: Final = "dag"
MAX_DAG_BYTES = 64 * 2**20
MAX_OPERATIONS: Final = 2**20
MAX_LATENCY_S: Final = 1e9

Latency = Annotated[float, Field(ge=0, le=MAX_LATENCY_S)]


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
    stages: Count
    microbatches: Count
    chunks: Count | None = None
    p2p_latency_s: Latency | list[Latency] = 0.0
    forwards_ahead: list[Index] | None = Field(
        None, description="schedule envpipe: forwards before the first backward beyond 1F1B's"
    )
    microbatch_group: Count | None = Field(
        None,
        description="schedule interleaved: microbatches that go through a chunk before the next",
    )
    extras: dict[str, list[Index]] | None = Field(
        None,
        description="operations beside forwards and backwards, and which model stages have them",
    )
    in_turn: list[Index] | None = Field(
        None, description="stages that take turns with the next one: transfers hold the sender"
    )
    dag: dict[str, Any] | None = None


class Dag(NamedTuple):
    """Operations and what they wait for.

    Attributes:
        ids: the name of each operation, (N).
        operations: grouped by stage, in execution order within a stage, (N).
        after: beside that order.
    """

    ids: tuple[str, ...]
    operations: tuple[Operation, ...]
    after: Edges


def whole_number(value: object, what: str, *, least: int, most: int = 2**31 - 1) -> int:
    """`value` as an int.

    Raises:
        InputError: it is no whole number, or out of bounds.
    """
    if value is None:
        raise InputError(f"{what} must be given")
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InputError(f"{what} must be a whole number, not {shown(value)}")
    number = int(value)
    if not least <= number <= most:
        bound = f"least {least}" if number < least else f"most {most}"
        raise InputError(f"{what} must be at {bound}, not {shown(number)}")
    return number


def whole_numbers(values: object, what: str, most: int = 2**31 - 1) -> list[int]:
    """The same of all values of a list, from 0 up.

    Raises:
        InputError: it is no list, or as for whole_number.
    """
    if not isinstance(values, list | tuple):
        raise InputError(f"{what} must be a list of whole numbers, not {shown(values)}")
    return [
        whole_number(value, f"{what}[{k}]", least=0, most=most) for k, value in enumerate(values)
    ]


def latency_ns(value: object, what: str) -> int:
    """A latency given in seconds, in whole nanoseconds.

    Raises:
        InputError: it is no number, not finite, negative or above 1e9 s.
    """
    number: Any = value if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    if not 0 <= number <= MAX_LATENCY_S:
        raise InputError(
            f"{what} must be a number of seconds from 0 to {MAX_LATENCY_S:.0e}, not {shown(value)}"
        )
    return ns_from_s(float(number))


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
