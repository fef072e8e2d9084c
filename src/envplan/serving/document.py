"""What the JSON files of serving have in common: a schema, loading, saving whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import ClassVar, Final, Self

from envplan._documents import json_schema, read_document, readable_json
from envplan._files import atomic_write
from envplan._model import Model

__all__ = ["Document"]

_SCHEMAS: Final = Path(__file__).parents[1] / "schemas"


class Document(Model):
    """A file: its model has a field `schema_id`, written as "schema".

    Attributes:
        kind: what it is, for people.
        schema_name: what its field "schema" says.
    """

    kind: ClassVar[str]
    schema_name: ClassVar[str]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it, whole or not at all.

        Raises:
            InputError: it cannot be written.
        """
        atomic_write(path, readable_json(self.model_dump(by_alias=True)))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read and check a file.

        Raises:
            InputError: it is none of this kind, or does not hold together.
        """
        return read_document(path, cls, kind=cls.kind, schema=cls.schema_name)

    @classmethod
    def schema_file(cls) -> Path:
        """Where the JSON Schema of the format is."""
        return _SCHEMAS / f"{cls.schema_name.split('/')[1]}.v1.schema.json"

    @classmethod
    def write_schema(cls) -> None:
        """Write the JSON Schema of the format, generated from the model."""
        atomic_write(cls.schema_file(), json_schema(cls))
