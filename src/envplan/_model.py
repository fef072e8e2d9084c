"""The base of everything that envplan reads from and writes to files: strict, frozen models."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Model(BaseModel):
    """A frozen value whose fields are checked when it is made; unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
