"""The shape of a pipeline, as plan.json's `job` and the arguments of Pipeline give it.

Numbers that a user gives are checked here; what leaves this module is trusted.
"""

from __future__ import annotations

from numbers import Integral
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, ConfigDict, Field

from envplan._io.documents import Count, Index, Model
from envplan.errors import InputError, shown

#: The schedule name of a pipeline that comes from a DAG.
DAG_SCHEDULE: Final = "dag"
MAX_OPERATIONS: Final = 2**21
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


class PipelineSpec(Model):
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


def refuse_too_large(num_operations: int) -> None:
    """Refuse a pipeline of more operations than are possible.

    Raises:
        InputError: it has.
    """
    if num_operations > MAX_OPERATIONS:
        raise InputError(
            f"stages x chunks x microbatches make {shown(num_operations)} operations; "
            f"at most {MAX_OPERATIONS} are possible"
        )


def whole_number(value: object, what: str, *, least: int) -> int:
    """A value as an int.

    Args:
        value: to be checked.
        what: to call it in errors.
        least: it may be.

    Raises:
        InputError: it is no whole number, or too small.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InputError(f"{what} must be a whole number, not {shown(value)}")
    if value < least:
        raise InputError(f"{what} must be at least {least}, not {shown(value)}")
    return int(value)
