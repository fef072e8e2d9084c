"""What the JSON files of serving have in common: what is not known is written as null."""

from __future__ import annotations

from envplan import _model
from envplan._documents import readable_json

__all__ = ["Document"]


class Document(_model.Document):
    """A file that has all of its fields, known or not."""

    def to_json(self) -> str:
        """As for all documents."""
        return readable_json(self.model_dump(by_alias=True))
