"""The base of values that are checked when they are made, and kept in files."""

from __future__ import annotations

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from envplan._documents import first_problem
from envplan.errors import InputError


class Model(BaseModel):
    """A frozen value whose fields are checked when it is made; unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @classmethod
    def of(cls, **fields: Any) -> Self:
        """The value with these fields.

        Raises:
            InputError: a field is missing, unknown or out of range.
        """
        try:
            return cls(**fields)
        except ValidationError as error:
            raise InputError(first_problem(error, cls.__name__.lower())) from None
