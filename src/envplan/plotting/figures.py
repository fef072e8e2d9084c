"""The common ground of all figures: their look, their files, and parts that several draw."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from envplan._io.files import atomic_write
from envplan.errors import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, which colour-blind readers can tell apart; shapes differ as well.
BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#007A5A", "#D55E00"
OKABE_ITO: Final = (BLUE, ORANGE, GREEN, RED, "#CC79A7", "#56B4E9", "#000000")
_GRID: Final = "0.92"
_STYLE: Final[Any] = {
    "font.size": 12,
    "axes.titlesize": 13,
    "axes.labelsize": 13,
    "legend.fontsize": 11,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "hatch.linewidth": 0.6,
    "svg.hashsalt": "envplan",
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
}
_TEXT_SIZES: Final = ("font.size", "axes.titlesize", "axes.labelsize", "legend.fontsize")
_ENDINGS: Final = (".png", ".svg", ".pdf")
#: Metadata that would make two files of the same figure differ.
_UNDATED: Final = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
#: The luminance above which black is legible on a colour, and white is not.
_BRIGHT: Final = 0.45

#: Corners of bars, (n, 4, 2).
Boxes = NDArray[np.float64]


@contextmanager
def figure(width_in: float, height_in: float, font_size: float = 12) -> Iterator[Figure]:
    """A figure that is laid out so that nothing is cut, while it is drawn.

    Args:
        width_in: its width in inches.
        height_in: its height in inches.
        font_size: size of its text in points; titles and legends follow.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    scale = font_size / _STYLE["font.size"]
    scaled: Any = {name: _STYLE[name] * scale for name in _TEXT_SIZES}
    with mpl.rc_context({**_STYLE, **scaled}):
        yield Figure(figsize=(width_in, height_in), layout="constrained")


def render(drawn: Figure, file_format: str, dpi: int = 200) -> bytes:
    """A figure as a file, "png", "svg" or "pdf". The same figure gives the same bytes."""
    import matplotlib as mpl

    buffer = io.BytesIO()
    with mpl.rc_context(_STYLE):
        drawn.savefig(buffer, format=file_format, dpi=dpi, metadata=_UNDATED.get(file_format))
    return buffer.getvalue()


def save_figure(drawn: Figure, path: str | os.PathLike[str]) -> None:
    """Write a figure in the format its file name ends in, whole or not at all.

    Raises:
        InputError: its name ends in something else, or it cannot be written.
    """
    ending = Path(path).suffix.lower()
    if ending not in _ENDINGS:
        raise InputError(
            f"must end in {' or '.join(_ENDINGS)}: pictures have these formats", path=path
        )
    atomic_write(path, render(drawn, ending.removeprefix(".")))


def label_axes(axes: Axes, x: str, y: str, heading: str = "") -> None:
    """Give a chart labels, a title and a grid."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if heading:
        axes.set_title(heading, loc="left")
    axes.grid(color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)


class GridShape(NamedTuple):
    """The shape of a grid of charts, filled row by row.

    Attributes:
        num_charts: how many there are, at least one.
        num_columns, num_rows: room for all of them; the last row may have some left.
    """

    num_charts: int
    num_columns: int
    num_rows: int

    @classmethod
    def of(cls, num_charts: int, *, max_columns: int) -> Self:
        """The shape for so many charts, of which so many fit beside each other."""
        num_columns = min(max_columns, num_charts)
        num_rows = math.ceil(num_charts / num_columns)
        return cls(num_charts, num_columns, num_rows)


class Grid(NamedTuple):
    """The charts of a grid.

    Attributes:
        used: those that are drawn on, row by row.
        lowest: those of them that have none below.
    """

    used: Sequence[Axes]
    lowest: Sequence[Axes]


def draw_grid(drawn: Figure, shape: GridShape, *, sharex: bool, sharey: bool) -> Grid:
    """Add a grid of charts to a figure; those that are not needed stay invisible."""
    charts = drawn.subplots(
        shape.num_rows, shape.num_columns, squeeze=False, sharex=sharex, sharey=sharey
    )
    used, unused = np.split(charts.ravel(), [shape.num_charts])
    for axes in unused:
        axes.set_visible(False)
    lowest = used[-shape.num_columns :]
    return Grid(used.tolist(), lowest.tolist())


def name_rows(axes: Axes, names: Sequence[str], begin: float, end: float) -> None:
    """Give a chart over time named rows, the first on top, between two times."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(begin, end)
    axes.tick_params(axis="y", length=0)


def draw_bars(
    axes: Axes,
    left: NDArray[Any],
    right: NDArray[Any],
    low: NDArray[Any],
    height: NDArray[Any] | float,
    **look: Any,
) -> Boxes:
    """Draw n bars in one collection; returns their corners."""
    from matplotlib.collections import PolyCollection

    high = low + height
    corners = ((left, low), (right, low), (right, high), (left, high))
    boxes: Boxes = np.stack([np.stack(corner, axis=-1) for corner in corners], axis=1)
    axes.add_collection(PolyCollection(boxes, **look))  # type: ignore[arg-type]
    return boxes


def legible_ink(fill: Any) -> str:
    """Black or white, whichever is legible on a colour."""
    from matplotlib.colors import to_rgb

    red, green, blue = to_rgb(fill)
    luminance = 0.299 * red + 0.587 * green + 0.114 * blue
    return "black" if luminance > _BRIGHT else "white"
