"""The frontier as text, for terminals: a curve of braille dots between labelled axes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # Unicode's numbering, by row
_BLANK = 0x2800


def sketch(
    curve: Sequence[tuple[float, float]],
    marks: Sequence[tuple[float, float, str]],
    *,
    width: int = 60,
    height: int = 10,
    units: tuple[str, str] = ("", ""),
) -> list[str]:
    """Lines of text that show a curve and marks on it.

    Args:
        curve: points (x, y) to join, at least one.
        marks: single points (x, y, character).
        width, height: of the plotting area, in characters.
        units: what follows the numbers of the axes.
    """
    points = [*curve, *((x, y) for x, y, _ in marks)]
    xs, ys = [x for x, _ in points], [y for _, y in points]
    low_x, low_y = min(xs), min(ys)
    span_x, span_y = max(xs) - low_x or 1.0, max(ys) - low_y or 1.0

    def place(x: float, y: float) -> tuple[int, int]:
        """Dot column and dot row, the latter from the top."""
        across = (x - low_x) / span_x * (2 * width - 1)
        return round(across), round((1 - (y - low_y) / span_y) * (4 * height - 1))

    cells = [[_BLANK] * width for _ in range(height)]
    dots = [place(x, y) for x, y in curve]
    for begin, end in pairwise([dots[0], *dots]):
        steps = max(abs(end[0] - begin[0]), abs(end[1] - begin[1]), 1)
        for k in range(steps + 1):
            column = round(begin[0] + (end[0] - begin[0]) * k / steps)
            row = round(begin[1] + (end[1] - begin[1]) * k / steps)
            cells[row // 4][column // 2] |= _DOTS[row % 4][column % 2]
    rows = [[chr(cell).replace(chr(_BLANK), " ") for cell in row] for row in cells]
    for x, y, character in marks:
        column, row = place(x, y)
        rows[row // 4][column // 2] = character
    high, low = (f"{y:.5g}{units[1]}" for y in (low_y + span_y, low_y))
    gutter = max(len(high), len(low))
    labels = [high, *[""] * (height - 2), low]
    lines = [f"{label:>{gutter}} │{''.join(row)}" for label, row in zip(labels, rows, strict=True)]
    left, right = f"{low_x:.5g}{units[0]}", f"{low_x + span_x:.5g}{units[0]}"
    lines.append(f"{'':>{gutter}} └{'─' * width}")
    lines.append(f"{'':>{gutter}}  {left}{right:>{width - len(left)}}")
    return [line.rstrip() for line in lines]
