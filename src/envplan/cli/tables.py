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
_FOLDED: Final = 8  # characters that a column of long words may be folded to


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of a table.

    Attributes:
        header: of the column, with a unit.
        cells: of each row.
        is_text: whether it stands left and wraps between words; numbers stand right.
        may_fold: whether its words may be broken where the terminal is narrow.
        keep: columns with the least are omitted first, of several with the same the last one.
    """

    header: str
    cells: Sequence[str]
    is_text: bool = False
    may_fold: bool = False
    keep: int = 0

    @property
    def min_width(self) -> int:
        """Characters that it needs at least."""
        parts = [part for cell in self.cells for part in (cell.split() if self.is_text else [cell])]
        longest = max(map(_width, parts), default=0)
        if self.may_fold:
            longest = min(longest, _FOLDED)
        return max(1, longest, *map(_width, self.header.split()))

    @property
    def full_width(self) -> int:
        """Characters with which nothing wraps."""
        return max(map(_width, (self.header, *self.cells)))


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
    texts = iter(with_equal_decimals([value for value in values if value is not None]))
    return Column(header=header, cells=_cells(values, lambda _: next(texts)))


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
    return [
        Column(header=header, cells=[row[place] for row in rows], is_text=place < num_texts)
        for place, header in enumerate(headers)
    ]


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
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    shown = _shown_columns(columns, width)
    table = Table(
        box=SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True, header_style="bold"
    )
    for column, column_width in zip(shown, _widths(shown, width), strict=True):
        table.add_column(
            Text(column.header),
            justify="left" if column.is_text else "right",
            overflow="fold",
            width=column_width,
        )
    for row in zip(*(column.cells for column in shown), strict=True):
        table.add_row(*map(Text, row))
    lines = _render(Text(title, style="bold"), width, bold) if title else []
    lines += _render(table, max(width, _total([column.min_width for column in shown])), bold)
    omitted = [column.header for column in columns if column not in shown]
    if omitted:
        lines.append(
            f"columns omitted (terminal too narrow): {', '.join(omitted)}; --json has them"
        )
    return lines


def _shown_columns(columns: Sequence[Column], width: int) -> list[Column]:
    """The columns for which there is room: one at least."""
    shown = list(columns)
    while len(shown) > 1 and _total([column.min_width for column in shown]) > width:
        shown.remove(min(reversed(shown), key=lambda column: column.keep))
    return shown


def _widths(columns: Sequence[Column], width: int) -> list[int]:
    """Of each column: what it needs, and what it could use of the rest, from the left."""
    widths = [column.min_width for column in columns]
    spare = width - _total(widths)
    for place, column in enumerate(columns):
        more = min(spare, column.full_width - widths[place])
        if more > 0:
            widths[place] += more
            spare -= more
    return widths


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + _GAP * (len(widths) - 1)


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
