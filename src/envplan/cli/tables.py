"""Tables as lines of text, drawn with rich.

A table is as wide as its terminal at most: headers and words wrap, and then columns are omitted. No
number is ever cut.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar

from envplan._io.words import column as with_equal_decimals
from envplan._io.words import signed_percent

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

T = TypeVar("T")

#: The width of tables in files and pipes.
UNLIMITED: Final = 10_000
_GAP: Final = 2  # characters between columns
_FOLDED_WIDTH: Final = 8  # characters that a column of long words may be folded to


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of a table.

    Attributes:
        header: its name, with a unit.
        cells: its text in each row.
        is_text: whether it is left-aligned and wraps between words; numbers are right-aligned.
        may_fold: whether its words may be broken where the terminal is narrow.
        keep: columns with the lowest value are omitted first; among equals, the last one.
    """

    header: str
    cells: Sequence[str]
    is_text: bool = False
    may_fold: bool = False
    keep: int = 0

    @property
    def min_width(self) -> int:
        """Characters that the column needs: for its longest number, or its longest word."""
        longest_cell = max(map(self._min_cell_width, self.cells), default=0)
        if self.may_fold:
            longest_cell = min(longest_cell, _FOLDED_WIDTH)
        return max(1, longest_cell, _longest_word(self.header))

    def _min_cell_width(self, cell: str) -> int:
        return _longest_word(cell) if self.is_text else _width(cell)

    @property
    def full_width(self) -> int:
        """Characters with which nothing wraps."""
        return max(map(_width, (self.header, *self.cells)))


def _longest_word(text: str) -> int:
    return max(map(_width, text.split()), default=0)


def _width(text: str) -> int:
    """Characters that a text takes on a terminal: wide ones count twice."""
    from rich.cells import cell_len  # only where a table is shown

    return cell_len(text)


def text_column(header: str, texts: Iterable[object]) -> Column:
    """Words."""
    return Column(header=header, cells=_cells(texts, str), is_text=True)


def value_column(header: str, values: Iterable[object]) -> Column:
    """Whole numbers, and numbers that are texts already; "-" for None."""
    return Column(header=header, cells=_cells(values, str))


def number_column(header: str, numbers: Iterable[float | None]) -> Column:
    """Fractions, all with as many decimals as the largest needs; "-" for None."""
    values = list(numbers)
    stated = [value for value in values if value is not None]
    texts = dict(zip(stated, with_equal_decimals(stated), strict=True))
    return Column(header=header, cells=_cells(values, texts.__getitem__))


def percent_column(header: str, percents: Iterable[float | None], *, decimals: int = 2) -> Column:
    """Shares in percent; "-" for None."""
    cells = _cells(percents, lambda percent: f"{percent:.{decimals}f}")
    return Column(header=header, cells=cells)


def change_column(header: str, percents: Iterable[float | None]) -> Column:
    """Changes in percent, with their sign; "-" for None."""
    return Column(header=header, cells=_cells(percents, signed_percent))


def _cells(values: Iterable[T | None], show: Callable[[T], str]) -> list[str]:
    return ["-" if value is None else show(value) for value in values]


def table_columns(
    headers: Sequence[str], rows: Sequence[Sequence[str]], *, num_texts: int = 1
) -> list[Column]:
    """The columns of a table that is given by its rows.

    Args:
        headers: of the columns.
        rows: with a cell for each header.
        num_texts: this many columns, the first ones, are text; all others are numbers.
    """
    columns = []
    for number, header in enumerate(headers):
        cells = [row[number] for row in rows]
        columns.append(Column(header=header, cells=cells, is_text=number < num_texts))
    return columns


def change_row(name: str, before: float, after: float) -> list[str]:
    """A row for `table_columns`: a quantity before and after, and its change in percent."""
    change = signed_percent(100 * (after / before - 1)) if before else "-"
    return [name, *with_equal_decimals([before, after]), change]


def table_lines(
    title: str, columns: Sequence[Column], *, width: int = UNLIMITED, bold: bool = False
) -> list[str]:
    """The lines of a table; the last one names columns that are omitted.

    Args:
        title: above it; may be empty.
        columns: at least one, all with as many cells.
        width: of the terminal, characters.
        bold: print title and headers in bold.
    """
    from rich.text import Text

    shown = _columns_that_fit(columns, width)
    lines = []
    if title:
        lines += _render(Text(title, style="bold"), width, bold)
    # A single column may need more than the terminal has.
    table_width = max(width, _min_table_width(shown))
    lines += _render(_rich_table(shown, width), table_width, bold)
    omitted = [column.header for column in columns if column not in shown]
    if omitted:
        lines.append(
            f"columns omitted (terminal too narrow): {', '.join(omitted)}; --json has them"
        )
    return lines


def _columns_that_fit(columns: Sequence[Column], width: int) -> list[Column]:
    """The columns for which a terminal is wide enough: one at least."""
    shown = list(columns)
    while len(shown) > 1 and _min_table_width(shown) > width:
        least_needed = min(reversed(shown), key=lambda column: column.keep)
        shown.remove(least_needed)
    return shown


def _rich_table(columns: Sequence[Column], width: int) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(
        box=SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True, header_style="bold"
    )
    column_widths = _share_width(columns, width)
    for column, column_width in zip(columns, column_widths, strict=True):
        table.add_column(
            Text(column.header),
            justify="left" if column.is_text else "right",
            overflow="fold",
            width=column_width,
        )
    for row in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*map(Text, row))
    return table


def _share_width(columns: Sequence[Column], width: int) -> list[int]:
    """The width of each column: what it needs, then what it can use, from the left."""
    widths = []
    spare = width - _min_table_width(columns)
    for column in columns:
        extra = max(0, min(spare, column.full_width - column.min_width))
        widths.append(column.min_width + extra)
        spare -= extra
    return widths


def _min_table_width(columns: Sequence[Column]) -> int:
    return sum(column.min_width for column in columns) + _GAP * (len(columns) - 1)


def _render(content: Table | Text, width: int, bold: bool) -> list[str]:
    from rich.console import Console

    buffer = io.StringIO()
    console = Console(
        file=buffer,
        width=width,
        force_terminal=bold,
        color_system="standard" if bold else None,  # rich prints bold with NO_COLOR, too
        highlight=False,
    )
    console.print(content)
    return [line.rstrip() for line in buffer.getvalue().splitlines()]
