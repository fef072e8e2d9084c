"""Labels in charts that cover neither a line, nor a mark, nor each other.

assets/labels.js does the same on pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.text import Annotation, Text

#: Room around a text, in points of a 72nd of an inch: letters fill it sideways, but not above.
_GAP_BESIDE = 3
_GAP_ABOVE = 1


class Place(NamedTuple):
    """A place for a label: a point, and where the text lies from there.

    Attributes:
        x, y: the point, in the units of the axes.
        right, up: how far from it the text is anchored, in points of a 72nd of an inch.
        side: whether the text begins or ends there.
    """

    x: float
    y: float
    right: float
    up: float
    side: Literal["left", "right"]


class _Box(NamedTuple):
    left: float
    bottom: float
    right: float
    top: float

    def overlaps(self, other: _Box) -> bool:
        across = self.left < other.right and other.left < self.right
        return across and self.bottom < other.top and other.bottom < self.top


@dataclass
class Labels:
    """Places labels on axes whose limits and layout are final.

    Attributes:
        axes: what is drawn on.
    """

    axes: Axes
    _lines: list[NDArray[np.float64]] = field(default_factory=list)
    _boxes: list[_Box] = field(default_factory=list)

    @classmethod
    def on(cls, axes: Axes) -> Labels:
        """Labels that keep clear of all lines and marks that are on the axes now."""
        axes.figure.draw_without_rendering()  # type: ignore[union-attr]
        labels = cls(axes)
        for line in axes.lines:
            points = line.get_transform().transform(np.column_stack(line.get_data()))
            points = points[np.isfinite(points).all(axis=1)]
            if line.get_linestyle() != "None":
                labels._lines.append(points)
            if line.get_marker() not in ("None", None, ""):
                labels._keep_clear_of(points, labels._pixels(float(line.get_markersize())) / 2 + 2)
        labels._boxes += [labels._box_of(text) for text in axes.texts if text.get_text()]
        return labels

    def add_line(self, begin: tuple[float, float], end: tuple[float, float]) -> None:
        """Keep clear of a line between two points in the units of the axes."""
        self._lines.append(self.axes.transData.transform([begin, end]))

    def _keep_clear_of(self, centres: NDArray[np.float64], radius: float) -> None:
        for x, y in centres:
            self._boxes.append(_Box(x - radius, y - radius, x + radius, y + radius))

    def put(self, text: str, places: Iterable[Place], **look: Any) -> bool:
        """Write a text at the first place where it covers nothing; False where there is none."""
        return self._put(text, places, None, look)

    def name_curve(self, text: str, x: ArrayLike, y: ArrayLike, **look: Any) -> bool:
        """Name a curve at its end or along it, where no other line is nearer to the name."""
        own = self.axes.transData.transform(np.column_stack([x, y]))
        return self._put(text, places_along(x, y), own, look)

    def _put(
        self,
        text: str,
        places: Iterable[Place],
        own: NDArray[np.float64] | None,
        look: dict[str, Any],
    ) -> bool:
        for place in places:
            label = self._annotate(text, place, look)
            box = self._box_of(label)
            if self._is_free(box) and (own is None or self._is_nearest(box, own)):
                self._boxes.append(box)
                return True
            label.remove()
        return False

    def _annotate(self, text: str, place: Place, look: dict[str, Any]) -> Annotation:
        label = self.axes.annotate(
            text,
            (place.x, place.y),
            xytext=(place.right, place.up),
            textcoords="offset points",
            ha=place.side,
            va="center",
            **look,
        )
        label.set_in_layout(False)  # the layout is final
        return label

    def _box_of(self, label: Text) -> _Box:
        extent = label.get_window_extent()
        beside, above = self._pixels(_GAP_BESIDE), self._pixels(_GAP_ABOVE)
        return _Box(
            left=extent.x0 - beside,
            bottom=extent.y0 - above,
            right=extent.x1 + beside,
            top=extent.y1 + above,
        )

    def _is_free(self, box: _Box) -> bool:
        room = self.axes.bbox
        if box.left < room.x0 or box.right > room.x1 or box.bottom < room.y0 or box.top > room.y1:
            return False
        if any(box.overlaps(other) for other in self._boxes):
            return False
        return not any(_meets(line, box) for line in self._lines)

    def _is_nearest(self, box: _Box, own: NDArray[np.float64]) -> bool:
        """Whether no other curve is nearer to a box than one is; straight lines are no curves."""
        distance = _distance(box, own)
        curves = [line for line in self._lines if len(line) > 2]
        others = [line for line in curves if not np.array_equal(line, own)]
        return all(_distance(box, other) > distance for other in others)

    def _pixels(self, points: float) -> float:
        figure = self.axes.figure
        return points * figure.dpi / 72


def _meets(line: NDArray[np.float64], box: _Box) -> bool:
    """Whether a polyline has a point in a box (Liang and Barsky, over all its segments)."""
    begin, step = line[:-1], np.diff(line, axis=0)
    enter, leave = np.zeros(len(step)), np.ones(len(step))
    for axis, low, high in ((0, box.left, box.right), (1, box.bottom, box.top)):
        along = step[:, axis]
        with np.errstate(divide="ignore", invalid="ignore"):
            to_low = (low - begin[:, axis]) / along
            to_high = (high - begin[:, axis]) / along
        inside = (begin[:, axis] >= low) & (begin[:, axis] <= high)
        still = along == 0
        enter = np.maximum(enter, np.where(still, 0, np.minimum(to_low, to_high)))
        leave = np.minimum(
            leave, np.where(still, np.where(inside, 1, -1), np.maximum(to_low, to_high))
        )
    return bool((enter <= leave).any())


def _distance(box: _Box, line: NDArray[np.float64]) -> float:
    """The distance from a box to the nearest corner of a polyline."""
    if not len(line):
        return float("inf")
    across = np.maximum(box.left - line[:, 0], line[:, 0] - box.right).clip(min=0)
    along = np.maximum(box.bottom - line[:, 1], line[:, 1] - box.top).clip(min=0)
    return float(np.hypot(across, along).min())


#: Points from a line to the middle of a text beside it.
_GAPS = (10, 18, 28, 40)


def places_along(x: ArrayLike, y: ArrayLike) -> list[Place]:
    """Places for the name of a curve, from its right end: beside it, above it, below it."""
    xs, ys = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    places = [Place(xs[-1], ys[-1], 8, up, "left") for up in (0, 3, -3, 6, -6, 9, -9)]
    for share in (1.0, 0.85, 0.7, 0.55, 0.4):
        k = int(share * (len(xs) - 1))
        places += around(xs[k], ys[k])
    return places


def around(x: float, y: float) -> list[Place]:
    """Places above and below a point, near ones first."""
    places = []
    for gap in _GAPS:
        for up in (gap, -gap):
            places += [Place(x, y, 0, up, "right"), Place(x, y, 0, up, "left")]
    return places


def places_down(x: float, top: float, bottom: float) -> list[Place]:
    """Places on both sides of an upright line, from its middle to its ends."""
    shares: Sequence[float] = (0.5, 0.4, 0.6, 0.3, 0.7, 0.2, 0.8)
    heights = [top + share * (bottom - top) for share in shares]
    on_right = [Place(x, height, 10, 0, "left") for height in heights]
    on_left = [Place(x, height, -10, 0, "right") for height in heights]
    return on_right + on_left
