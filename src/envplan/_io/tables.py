"""The one reader of CSV tables: columns through a pydantic model, errors with line and column.

A model's fields are the table's columns; fields with a default may be absent or blank. Each column
is validated as a whole by pydantic's compiled core, so a million rows take seconds.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Final, Generic, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from envplan._io.files import AnyPath, decoded, read_bounded, refuse_slip
from envplan.errors import InputError, shown

MAX_TABLE_BYTES: Final = 256 * 2**20
_MOST_COLUMNS: Final = 1000
_LONGEST_HEADER: Final = 100_000

Row = TypeVar("Row", bound=BaseModel)


@dataclass(frozen=True)
class Table(Generic[Row]):
    """The rows of a CSV file, column by column.

    Attributes:
        model: what a row is.
        columns: values of each field of the model, n of each.
        texts: stripped cells of each column of the file, field or not, n of each.
        lines: where each row stands in the file, from 1; n of them.
        path: of the file; None if it was made in memory.
    """

    model: type[Row]
    columns: dict[str, Sequence[Any]]
    texts: Mapping[str, Sequence[str]]
    lines: Sequence[int]
    path: Path | None

    def __len__(self) -> int:
        return len(self.lines)

    def rows(self) -> Iterator[Row]:
        """The rows as instances of the model. Its fields are validated, one by one."""
        for values in zip(*self.columns.values(), strict=True):
            yield self.model.model_construct(**dict(zip(self.columns, values, strict=True)))

    def error(self, row: int, message: str, column: str | None = None) -> InputError:
        """A complaint about a row, or one of its cells.

        Args:
            row: its index, from 0.
        """
        return InputError(message, path=self.path, line=self.lines[row], column=column)


def read_table(
    path: AnyPath, model: type[Row], *, kind: str, max_bytes: int = MAX_TABLE_BYTES
) -> Table[Row]:
    """The table in a CSV file; see parse_table.

    Raises:
        InputError: it cannot be read or is no such table; says line and column.
    """
    return parse_table(read_bounded(path, max_bytes), model, path=path, kind=kind)


def parse_table(content: bytes, model: type[Row], *, path: AnyPath | None, kind: str) -> Table[Row]:
    """The table in a file's content. Columns that the model does not name are kept as text only.

    Args:
        model: the columns. A bad cell is explained by its field's description: "'x' is not a
            number; expected DESCRIPTION".
        path: for errors.
        kind: what a table of this model is, such as "a profile".

    Raises:
        InputError: it is no CSV text, has no rows, a column is missing or there twice, or a cell is
            not what its field says; names line and column of the first one.
    """
    path = None if path is None else Path(path)
    needed = ",".join(name for name, field in model.model_fields.items() if field.is_required())
    texts, lines = _cells(decoded(content, path), path)
    if not lines:
        raise InputError(f"is empty; expected a CSV file with the header {needed}", path=path)
    line, *lines = lines
    header = [column.pop(0) for column in texts]
    _check_header(header, model.model_fields, f"{kind} needs {needed}", path, line)
    if not lines:
        raise InputError("has a header but no rows", path=path)
    table = Table(model, {}, dict(zip(header, texts, strict=True)), lines, path)
    problems: list[tuple[int, int, str, str]] = []
    for name, field in model.model_fields.items():
        cells = table.texts.get(name) or [""] * len(lines)
        try:
            table.columns[name] = _validated(cells, field)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            row = int(first["loc"][0])
            expected = f"; expected {field.description}" if field.description else ""
            words = f"{_complaint(cells[row], first)}{expected}"
            problems.append((row, header.index(name), words, name))
    if problems:
        row, _, *complaint = min(problems)
        raise table.error(row, *complaint)
    return table


def header_names(line: str) -> list[str]:
    """The names in the first line of a table."""
    return [name.strip() for name in line.split(_delimiter(line))]


def _delimiter(header: str) -> str:
    """The character between the names of a header: a comma, or what spreadsheets write instead."""
    return next((delimiter for delimiter in ",;\t" if delimiter in header), ",")


def _cells(text: str, path: Path | None) -> tuple[list[list[str]], list[int]]:
    """Columns of stripped cells, the header's first, and the number of each line. No blank lines.

    Raises:
        InputError: it is no CSV text; names the line.
    """
    skipped = text[: len(text) - len(text.lstrip())].replace("\r\n", "\n").replace("\r", "\n")
    line = first = skipped.count("\n") + 1
    text = text.lstrip()
    header = re.split("[\r\n]", text[:_LONGEST_HEADER])[0]
    delimiter = _delimiter(header)
    if (names := header.count(delimiter)) >= _MOST_COLUMNS:
        raise InputError(f"has more than {names} columns", path=path, line=first)
    # A strict reader refuses a quote that is never closed.
    reader = csv.reader(
        io.StringIO(text, newline=""), delimiter=delimiter, skipinitialspace=True, strict=True
    )
    rows: list[list[str]] = []
    lines: list[int] = []
    try:
        for cells in reader:
            row = [cell.strip() for cell in cells]
            width = len(rows[0]) if rows else len(row)
            if len(row) > width:
                problem = f"has {len(row)} values where the header has {width}; check its commas"
                raise InputError(problem, path=path, line=line)
            if reader.line_num > line - first + 1 and "\n" in "".join(cells):
                problem = "has a quoted value with a line break in it"
                raise InputError(problem, path=path, line=line)
            if any(row):
                rows.append(row + [""] * (width - len(row)))
                lines.append(line)
            line = first + reader.line_num
    except csv.Error as error:
        problem = f"is not a CSV file ({error})"
        if str(error) == "unexpected end of data":
            problem = "opens a quote that is never closed"
        raise InputError(problem, path=path, line=line) from None
    return [list(column) for column in zip(*rows, strict=True)], lines


def _check_header(
    header: Sequence[str], fields: dict[str, FieldInfo], needs: str, path: Path | None, line: int
) -> None:
    for name, field in fields.items():
        if header.count(name) > 1:
            problem = "the header names this column twice; remove one"
        elif name not in header and field.is_required():
            problem = f"the column is missing from the header {shown(','.join(header))}; {needs}"
        else:
            continue
        raise InputError(problem, path=path, line=line, column=name)
    absent = [name for name in fields if name not in header]
    for name in header:
        if name not in fields:
            refuse_slip(name, absent, path, line)


@lru_cache(maxsize=256)
def _adapter(annotation: Any, metadata: tuple[Any, ...]) -> TypeAdapter[list[Any]]:
    cell: Any = Annotated[annotation, *metadata] if metadata else annotation
    return TypeAdapter(list[cell])


def _validated(column: Sequence[str], field: FieldInfo) -> Sequence[Any]:
    """The values of a column; blank cells take the field's default.

    Raises:
        ValidationError: a cell is none; of the first one.
    """
    given: Sequence[Any] = column
    if not field.is_required():
        if not any(column):
            return [field.default] * len(column)
        given = [text or field.default for text in column]
    elif not all(column):
        given = [text or None for text in column]
    # Python's 1_000 is no number anywhere else.
    if field.annotation is not str and "_" in "".join(column):
        given = ["_" if "_" in text else value for text, value in zip(column, given, strict=True)]
    return _adapter(field.annotation, tuple(field.metadata)).validate_python(given)  # type: ignore[arg-type]


def _complaint(text: str, error: Any) -> str:
    """What pydantic has against a cell."""
    if not text:
        return "is empty"
    words = error["ctx"]["error"] if error["type"] == "value_error" else error["msg"]
    return f"{shown(text)} {str(words).replace('Input should', 'should', 1)}"
