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
from typing import Annotated, Any, Final, Generic, NamedTuple, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from envplan._io.files import AnyPath, decoded, read_bounded, refuse_slip
from envplan.errors import InputError, shown

MAX_TABLE_BYTES: Final = 256 * 2**20
_MOST_COLUMNS: Final = 1000
_LONGEST_HEADER: Final = 100_000

#: Rows and cells that a table may have; larger ones are read in pieces, as traces are.
MAX_ROWS: Final = 2**21
_MOST_CELLS: Final = 2**23

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
    required = [name for name, field in model.model_fields.items() if field.is_required()]
    needed = ",".join(required)
    cells = _read_cells(decoded(content, path), path)
    if not cells.rows:
        raise InputError(f"is empty; expected a CSV file with the header {needed}", path=path)
    header, *rows = cells.rows
    header_line, *lines = cells.lines
    _check_header(header, model.model_fields, f"{kind} needs {needed}", path, header_line)
    if not rows:
        raise InputError("has a header but no rows", path=path)
    columns = zip(*rows, strict=True)
    texts = {name: list(column) for name, column in zip(header, columns, strict=True)}
    table = Table(model, {}, texts, lines, path)
    complaints: list[_Complaint] = []
    for name, field in model.model_fields.items():
        column = texts.get(name) or [""] * len(lines)
        try:
            table.columns[name] = _validated(column, field)
        except ValidationError as error:
            complaints.append(_complain(error, column, header.index(name), field))
    if complaints:
        earliest = min(complaints)
        raise table.error(earliest.row, earliest.message, header[earliest.column])
    return table


class _Complaint(NamedTuple):
    """A bad cell. Of several, the smallest is the first in the file.

    Attributes:
        row: its index, from 0.
        column: its index in the header.
        message: what is wrong.
    """

    row: int
    column: int
    message: str


class _Cells(NamedTuple):
    """Stripped cells of a CSV text without its blank lines, the header's first.

    Attributes:
        rows: all of the header's width.
        lines: where each row stands in the file, from 1.
    """

    rows: list[list[str]]
    lines: list[int]


def header_names(line: str) -> list[str]:
    """The names in the first line of a table."""
    return [name.strip() for name in line.split(_delimiter(line))]


def _delimiter(header: str) -> str:
    """The character between the names of a header: a comma, or what spreadsheets write instead."""
    for delimiter in (",", ";", "\t"):
        if delimiter in header:
            return delimiter
    return ","


def _read_cells(text: str, path: Path | None) -> _Cells:
    """Read the cells of a CSV text.

    Raises:
        InputError: it is no CSV text; names the line.
    """
    table_text = text.lstrip()
    blank = text[: len(text) - len(table_text)]
    num_blank_lines = len(re.findall("\r\n|\r|\n", blank))
    first_line = num_blank_lines + 1
    header = re.split("[\r\n]", table_text[:_LONGEST_HEADER])[0]
    delimiter = _delimiter(header)
    num_delimiters = header.count(delimiter)
    if num_delimiters >= _MOST_COLUMNS:
        problem = f"has more than {num_delimiters} columns"
        raise InputError(problem, path=path, line=first_line)
    num_cells = text.count(delimiter)
    if text.count("\n") + text.count("\r") > 2 * MAX_ROWS or num_cells > _MOST_CELLS:
        problem = f"has more than {MAX_ROWS} rows or {_MOST_CELLS} values"
        raise InputError(problem, path=path)
    # A strict reader refuses a quote that is never closed.
    reader = csv.reader(
        io.StringIO(table_text, newline=""), delimiter=delimiter, skipinitialspace=True, strict=True
    )
    cells = _Cells([], [])
    line = first_line
    try:
        for raw_row in reader:
            next_line = first_line + reader.line_num
            row = [cell.strip() for cell in raw_row]
            width = len(cells.rows[0]) if cells.rows else len(row)
            if len(row) > width:
                problem = f"has {len(row)} values where the header has {width}; check its commas"
                raise InputError(problem, path=path, line=line)
            if next_line > line + 1 and "\n" in "".join(raw_row):
                problem = "has a quoted value with a line break in it"
                raise InputError(problem, path=path, line=line)
            if any(row):
                cells.rows.append(row + [""] * (width - len(row)))
                cells.lines.append(line)
            line = next_line
    except csv.Error as error:
        problem = f"is not a CSV file ({error})"
        if str(error) == "unexpected end of data":
            problem = "opens a quote that is never closed"
        raise InputError(problem, path=path, line=line) from None
    return cells


def _check_header(
    header: Sequence[str], fields: dict[str, FieldInfo], needs: str, path: Path | None, line: int
) -> None:
    """Refuse a header that lacks a column, has one twice, or nearly has one.

    Args:
        header: names of the columns.
        fields: of the model.
        needs: what the table needs, for errors.
        path: of the file, for errors.
        line: of the header, for errors.
    """
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
    """The validator of a column whose cells have a type; metadata are bounds and the like."""
    cell: Any = Annotated[annotation, *metadata] if metadata else annotation
    return TypeAdapter(list[cell])


def _validated(column: Sequence[str], field: FieldInfo) -> Sequence[Any]:
    """The values of a column; blank cells take the field's default.

    Raises:
        ValidationError: a cell is none; of the first one.
    """
    is_required = field.is_required()
    if not is_required and not any(column):
        return [field.default] * len(column)
    values: Sequence[Any] = column
    if not all(column):
        blank = None if is_required else field.default
        values = [text or blank for text in column]
    if field.annotation is not str and "_" in "".join(column):
        # Python alone reads 1_000 as 1000: a lone underscore is refused by every validator.
        values = ["_" if "_" in text else value for text, value in zip(column, values, strict=True)]
    adapter = _adapter(field.annotation, tuple(field.metadata))  # type: ignore[arg-type]
    return adapter.validate_python(values)


def _complain(
    error: ValidationError, column: Sequence[str], index: int, field: FieldInfo
) -> _Complaint:
    """The complaint about the first bad cell of a column.

    Args:
        error: what pydantic has against it.
        column: the texts of its cells.
        index: of the column in the header.
        field: of the column.
    """
    problem = error.errors(include_url=False)[0]
    row = int(problem["loc"][0])
    expected = f"; expected {field.description}" if field.description else ""
    if not column[row]:
        return _Complaint(row, index, f"is empty{expected}")
    words = problem["ctx"]["error"] if problem["type"] == "value_error" else problem["msg"]
    complaint = str(words).replace("Input should", "should", 1)
    return _Complaint(row, index, f"{shown(column[row])} {complaint}{expected}")
