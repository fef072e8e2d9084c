"""A curve drawn in characters, for terminals.

A braille character is a cell of 2 x 4 dots, so that a picture of `width` x `height` characters has
2 * width x 4 * height dots. Rows and columns count from the top left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

_DOTS_ACROSS: Final = 2
_DOTS_DOWN: Final = 4
#: The braille character without dots. Each dot adds its bit to it.
_BLANK: Final = 0x2800
#: The bit of each dot of a character, by its row and column.
_DOT_BITS: Final = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


class Mark(NamedTuple):
    """A single point that a character shows."""

    x: float
    y: float
    character: str


class _Dot(NamedTuple):
    """Where a dot of the picture is."""

    row: int
    column: int


@dataclass(frozen=True)
class _Axis:
    """The values along one side of a picture.

    Attributes:
        low: the lowest value.
        span: from the lowest to the highest, above 0.
        unit: what follows its numbers.
    """

    low: float
    span: float
    unit: str

    @classmethod
    def over(cls, values: Sequence[float], unit: str) -> _Axis:
        """From the lowest of some values to the highest."""
        span = max(values) - min(values)
        return cls(min(values), span or 1.0, unit)

    def share(self, value: float) -> float:
        """Where a value is: 0 at the lowest, 1 at the highest."""
        return (value - self.low) / self.span

    @property
    def low_label(self) -> str:
        """The lowest value with its unit."""
        return f"{self.low:.5g}{self.unit}"

    @property
    def high_label(self) -> str:
        """The highest value with its unit."""
        return f"{self.low + self.span:.5g}{self.unit}"


class _Picture:
    """Characters that are drawn on, `width` x `height` of them."""

    def __init__(self, width: int, height: int) -> None:
        self.width = width
        self.height = height
        self._rows = [[" "] * width for _ in range(height)]

    def dot_at(self, x_share: float, y_share: float) -> _Dot:
        """The dot of a point, which is given by its shares of both axes."""
        last_row = self.height * _DOTS_DOWN - 1
        last_column = self.width * _DOTS_ACROSS - 1
        row = round((1 - y_share) * last_row)  # the highest y is in the first row
        column = round(x_share * last_column)
        return _Dot(row, column)

    def draw_line(self, begin: _Dot, end: _Dot) -> None:
        """Join two dots, both included."""
        rows = end.row - begin.row
        columns = end.column - begin.column
        steps = max(abs(rows), abs(columns), 1)
        for k in range(steps + 1):
            row = round(begin.row + rows * k / steps)
            column = round(begin.column + columns * k / steps)
            self._draw_dot(_Dot(row, column))

    def _draw_dot(self, dot: _Dot) -> None:
        bit = _DOT_BITS[dot.row % _DOTS_DOWN][dot.column % _DOTS_ACROSS]
        characters = self._rows[dot.row // _DOTS_DOWN]
        column = dot.column // _DOTS_ACROSS
        dots = _BLANK if characters[column] == " " else ord(characters[column])
        characters[column] = chr(dots | bit)

    def put(self, dot: _Dot, character: str) -> None:
        """Put a character where a dot is, in place of what is drawn there."""
        self._rows[dot.row // _DOTS_DOWN][dot.column // _DOTS_ACROSS] = character

    def lines(self) -> list[str]:
        """The rows, from the top."""
        return ["".join(characters) for characters in self._rows]


def sketch(
    curve: Sequence[tuple[float, float]],
    marks: Sequence[Mark],
    *,
    width: int = 60,
    height: int = 10,
    units: tuple[str, str] = ("", ""),
) -> list[str]:
    """A curve and marks on it between labelled axes, as lines of text.

    Args:
        curve: points (x, y) to join, at least one.
        marks: points to show beside the curve.
        width: of the area that is drawn on, in characters.
        height: of the same, at least 2.
        units: what follows the numbers of the x axis, and of the y axis.
    """
    x_unit, y_unit = units
    points = [*curve, *((mark.x, mark.y) for mark in marks)]
    x_axis = _Axis.over([x for x, _ in points], x_unit)
    y_axis = _Axis.over([y for _, y in points], y_unit)
    picture = _Picture(width, height)
    dots = [picture.dot_at(x_axis.share(x), y_axis.share(y)) for x, y in curve]
    for begin, end in pairwise([dots[0], *dots]):
        picture.draw_line(begin, end)
    for mark in marks:
        dot = picture.dot_at(x_axis.share(mark.x), y_axis.share(mark.y))
        picture.put(dot, mark.character)
    return _with_axes(picture, x_axis, y_axis)


def _with_axes(picture: _Picture, x_axis: _Axis, y_axis: _Axis) -> list[str]:
    """The lines of a picture, with an axis on its left and one below, labelled at their ends."""
    high, low = y_axis.high_label, y_axis.low_label
    gutter = max(len(high), len(low))
    y_labels = [high, *[""] * (picture.height - 2), low]
    lines = []
    for label, row in zip(y_labels, picture.lines(), strict=True):
        lines.append(f"{label:>{gutter}} │{row}")
    left, right = x_axis.low_label, x_axis.high_label
    lines.append(f"{'':>{gutter}} └{'─' * picture.width}")
    lines.append(f"{'':>{gutter}}  {left}{right:>{picture.width - len(left)}}")
    return [line.rstrip() for line in lines]
