"""The base of values that are checked when they are made, and kept in files."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from envplan._documents import (
    first_problem,
    json_schema,
    parse_document,
    read_json,
    readable_json,
)
from envplan._files import AnyPath, atomic_write
from envplan.errors import InputError

Index = Annotated[int, Field(ge=0, lt=2**31)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
GpuCount = Annotated[int, Field(ge=1, le=10**6)]
Seconds = Annotated[float, Field(ge=0)]
Joules = Annotated[float, Field(ge=0)]
Watts = Annotated[float, Field(ge=0)]


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


class Document(Model):
    """A JSON file: its model has a field `schema_id`, written as "schema".

    Attributes:
        kind: what it is, for people.
        schema_name: what its field "schema" says.
        writes_null: fields that say nothing are written as null; else they are left out.
    """

    kind: ClassVar[str]
    schema_name: ClassVar[str]
    writes_null: ClassVar[bool] = False

    def to_json(self) -> str:
        """The text of the file: readable, with an object of a list in a line."""
        return readable_json(self.model_dump(by_alias=True, exclude_none=not self.writes_null))

    def save(self, path: AnyPath) -> None:
        """Write the file, whole or not at all.

        Raises:
            InputError: it cannot be written there.
        """
        atomic_write(path, self.to_json())

    @classmethod
    def load(cls, path: AnyPath) -> Self:
        """Read a file and check its form; `envplan check` proves what it says.

        Raises:
            InputError: the file cannot be read, is larger than 256 MiB, is not JSON (says line and
                column) or not of this kind (names the field).
        """
        return cls.from_document(read_json(path), path=path)

    @classmethod
    def from_document(cls, document: object, *, path: AnyPath | None = None) -> Self:
        """The same from a JSON value as parsed.

        Args:
            path: the file that errors shall name.

        Raises:
            InputError: it is not of this kind; names the field.
        """
        return parse_document(document, cls, kind=cls.kind, schema=cls.schema_name, path=path)

    @classmethod
    def schema_file(cls) -> Path:
        """Where the JSON Schema of the format is."""
        name, version = cls.schema_name.split("/")[1:]
        return Path(__file__).parent / "schemas" / f"{name}.{version}.schema.json"

    @classmethod
    def write_schema(cls) -> None:
        """Write the JSON Schema of the format, generated from the model."""
        atomic_write(cls.schema_file(), json_schema(cls))


def check_stated(where: str, stated: Any, true: Any, tolerance: float = 0.0) -> None:
    """That what a file states is what was recomputed.

    Args:
        where: what to call it in an error, such as "predicted".
        stated, true: numbers, or models or lists of them, which are compared one by one.
        tolerance: how far numbers may lie apart, relatively.

    Raises:
        InputError: the first number that differs; names it.
    """
    if stated == true:
        return
    if isinstance(stated, BaseModel) and isinstance(true, type(stated)):
        for name in type(stated).model_fields:
            check_stated(f"{where}.{name}", getattr(stated, name), getattr(true, name), tolerance)
    elif isinstance(stated, list) and isinstance(true, list) and len(stated) == len(true):
        for k, (one, other) in enumerate(zip(stated, true, strict=True)):
            check_stated(f"{where}[{k}]", one, other, tolerance)
    elif not (
        isinstance(stated, float)
        and isinstance(true, float)
        and math.isclose(stated, true, rel_tol=tolerance, abs_tol=tolerance / 1000)
    ):
        raise InputError(f"{where} is {_shown(stated)}; recomputed it is {_shown(true)}")


def _shown(value: object) -> str:
    return f"a list of {len(value)} values" if isinstance(value, list) else repr(value)
