"""Reading small CSV files strictly: every complaint names its line and column."""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from envplan._files import decimal, read_bounded, refuse_slip
from envplan.errors import InputError

__all__ = ["Row", "exists", "read_bytes", "read_rows"]

MAX_TABLE_BYTES: Final = 256 * 2**20
_MAX_NUMBER: Final = 1e15


@dataclass(frozen=True)
class Row:
    """One line of a table.

    Attributes:
        cells: text by column; a column the file lacks is not there.
        line: 1-based.
        path: the file.
    """

    cells: dict[str, str]
    line: int
    path: Path | None

    def text(self, column: str) -> str:
        """Raises: InputError: the cell is blank."""
        text = self.cells[column].strip()
        if not text:
            raise self.error(column, "is blank; the table must have no holes")
        return text

    def blank(self, column: str) -> bool:
        """Whether there is nothing in this column, or no such column."""
        return not self.cells.get(column, "").strip()

    def number(self, column: str, *, least: float = 0.0, above: bool = False) -> float:
        """A finite number from `least` up, or strictly above it.

        Raises:
            InputError: it is something else.
        """
        text = self.text(column)
        try:
            value = decimal(text)
        except ValueError:
            raise self.error(column, f"must be a number, not {text!r}") from None
        if not (math.isfinite(value) and value >= least and value <= _MAX_NUMBER) or (
            above and value == least
        ):
            bound = "above" if above else "from"
            up = "" if above else " up"
            raise self.error(column, f"must be a number {bound} {least:g}{up}, not {text}")
        return value

    def whole(self, column: str) -> int:
        """A whole number from 1 up.

        Raises:
            InputError: it is something else.
        """
        value = self.number(column)
        if value != int(value) or value < 1:
            raise self.error(column, f"must be a whole number from 1 up, not {self.text(column)}")
        return int(value)

    def error(self, column: str | None, message: str) -> InputError:
        """A complaint about a cell, or about the line."""
        return InputError(message, path=self.path, line=self.line, column=column)


def exists(path: str) -> bool:
    """Whether there is something at a path that a user gave, which may be no path at all."""
    try:
        return Path(path).exists()
    except (OSError, ValueError):  # too long a name, or one with a null in it
        return False


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """A file's content, of at most 256 MiB.

    Raises:
        InputError: it cannot be read or is larger.
    """
    return read_bounded(path, MAX_TABLE_BYTES)


def read_rows(
    content: bytes, path: Path | None, required: Sequence[str], optional: Sequence[str] = ()
) -> Iterator[Row]:
    """The lines of a CSV file; columns of other names are left out.

    Raises:
        InputError: it is no such table, or a line has too many or too few cells.
    """
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InputError("is not a text file in UTF-8", path=path) from None
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        header = [name.strip() for name in next(reader, [])]
        if missing := [name for name in required if name not in header]:
            raise InputError(
                f"has no column {missing[0]}; the first line must name {', '.join(required)}",
                path=path,
                line=1,
            )
        if twice := [name for k, name in enumerate(header) if name in header[:k]]:
            raise InputError(f"column {twice[0]!r} is there twice", path=path, line=1)
        wanted = [*required, *optional]
        for name in header:
            if name not in wanted:
                refuse_slip(name, wanted, path, 1)
        for cells in reader:
            if not cells:
                continue
            if len(cells) != len(header):
                raise InputError(
                    f"has {len(cells)} cells, but the first line names {len(header)} columns",
                    path=path,
                    line=reader.line_num,
                )
            named = {n: c for n, c in zip(header, cells, strict=True) if n in wanted}
            yield Row(named, reader.line_num, path)
    except csv.Error as error:
        raise InputError(f"is not a CSV table ({error})", path=path, line=reader.line_num) from None
