"""The columns of a profile's CSV: what a cell may hold, checked as it is read."""

from __future__ import annotations

import re
from typing import Annotated, Final

from pydantic import AfterValidator, BaseModel, Field

from envplan.clocks import MARK, PART_NAME
from envplan.units import MAX_OPERATION_J

#: Columns with what was measured, in a profile whose times and energies were smoothed.
RAW_COLUMNS: Final = ("raw_time", "raw_energy")

#: Columns of Kareus's profiles: how the parts of an operation overlap with communication. All of a
#: row together are its config.
KAREUS_COLUMN: Final = re.compile(r"(recompute_)?(attention|mlp)_configs|(fwd|bwd)_[a-z_]+")


def _check_name(text: str) -> str:
    if not text.isidentifier():
        raise ValueError("is not a name")
    return text


def _check_part(text: str) -> str:
    if text and not PART_NAME.fullmatch(text):
        raise ValueError("has a space or one of @ = / , in it")
    return text


def _check_config(text: str) -> str:
    if text.startswith(MARK):
        raise ValueError("begins with @, which stands for clocks by part")
    return text


Seconds = Annotated[float, Field(ge=1e-9, le=1e9, allow_inf_nan=False)]
Joules = Annotated[float, Field(ge=0, le=MAX_OPERATION_J, allow_inf_nan=False)]
Spread = Annotated[float, Field(ge=0, allow_inf_nan=False)]

_SECONDS: Final = "seconds from 1e-9 to 1e9"
_JOULES: Final = (
    f"joules an operation on one GPU from 0 to {MAX_OPERATION_J}, the range of exact integers; "
    "larger ones want more stages, or more tensor parallelism"
)
_SPREAD: Final = "a number from 0 up, or nothing"


class ProfileRow(BaseModel):
    """A row of a profile; its fields are the columns. Energies are per GPU."""

    stage: int = Field(ge=0, le=10**6, description="a stage number from 0 up")
    instruction: Annotated[str, AfterValidator(_check_name)] = Field(
        description="one such as forward or backward"
    )
    frequency: int = Field(
        ge=0, le=10**6, description="an SM clock in MHz, or 0 for a constant time"
    )
    time: Seconds = Field(description=_SECONDS)
    energy: Joules = Field(description=_JOULES)
    config: Annotated[str, AfterValidator(_check_config)] = Field("", description="a label")
    part: Annotated[str, AfterValidator(_check_part)] = Field(
        "", description="the name of a part of the operation, such as a module's, or nothing"
    )
    time_std: Spread | None = Field(None, description=_SPREAD)
    energy_std: Spread | None = Field(None, description=_SPREAD)
    samples: Spread | None = Field(None, description=_SPREAD)
    raw_time: Seconds | None = Field(None, description=_SECONDS)
    raw_energy: Joules | None = Field(None, description=_JOULES)
    rank: Annotated[int, Field(ge=0)] | None = Field(None, description="a global rank, from 0 up")


#: The columns that every profile has.
COLUMNS: Final = tuple(
    name for name, field in ProfileRow.model_fields.items() if field.is_required()
)
