"""Tables as lines of text, drawn with rich.

A table is as wide as its terminal at most: headers and words wrap, and then columns are omitted. No
number is ever cut.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

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
        longest = max(map(cell_len, parts), default=0)
        if self.may_fold:
            longest = min(longest, _FOLDED)
        return max(1, longest, *map(cell_len, self.header.split()))

    @property
    def full_width(self) -> int:
        """Characters with which nothing wraps."""
        return max(map(cell_len, (self.header, *self.cells)))


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
