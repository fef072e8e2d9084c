"""Labels in charts that cover neither a line, nor a mark, nor each other.

assets/labels.js does the same on pages.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D
    from matplotlib.text import Annotation, Text

#: Points in pixels, or one coordinate of them.
Points = NDArray[np.float64]

#: Room around a text, in points of a 72nd of an inch: letters fill it sideways, but not above.
_GAP_BESIDE: Final = 3
_GAP_ABOVE: Final = 1
#: Room around marks, in pixels.
_GAP_AROUND_MARKS: Final = 2


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

    @classmethod
    def around(cls, x: float, y: float, radius: float) -> _Box:
        """The square around a point."""
        return cls(
            left=x - radius,
            bottom=y - radius,
            right=x + radius,
            top=y + radius,
        )

    def overlaps(self, other: _Box) -> bool:
        """Whether two boxes have a point in common."""
        across = self.left < other.right and other.left < self.right
        along = self.bottom < other.top and other.bottom < self.top
        return across and along

    def is_within(self, outer: _Box) -> bool:
        """Whether the whole of it lies in another."""
        across = outer.left <= self.left and self.right <= outer.right
        along = outer.bottom <= self.bottom and self.top <= outer.top
        return across and along


@dataclass
class Labels:
    """Places labels on axes whose limits and layout are final.

    Attributes:
        axes: what is drawn on.
    """

    axes: Axes
    _lines: list[Points] = field(default_factory=list)
    _boxes: list[_Box] = field(default_factory=list)

    @classmethod
    def on(cls, axes: Axes) -> Labels:
        """Labels that keep clear of all lines and marks that are on the axes now."""
        axes.figure.draw_without_rendering()  # type: ignore[union-attr]
        labels = cls(axes)
        for line in axes.lines:
            labels._keep_clear_of_line(line)
        for text in axes.texts:
            if text.get_text():
                labels._boxes.append(labels._box_of(text))
        return labels

    def add_line(self, begin: tuple[float, float], end: tuple[float, float]) -> None:
        """Keep clear of a line between two points in the units of the axes."""
        ends = self.axes.transData.transform([begin, end])
        self._lines.append(ends)

    def _keep_clear_of_line(self, line: Line2D) -> None:
        """Keep clear of a line that is drawn, and of its marks."""
        corners = np.column_stack(line.get_data())
        points = line.get_transform().transform(corners)
        is_drawn = np.isfinite(points).all(axis=1)
        points = points[is_drawn]
        if line.get_linestyle() != "None":
            self._lines.append(points)
        if line.get_marker() not in ("None", None, ""):
            mark_size = self._pixels(float(line.get_markersize()))
            radius = mark_size / 2 + _GAP_AROUND_MARKS
            self._boxes += [_Box.around(x, y, radius) for x, y in points]

    def put(self, text: str, places: Iterable[Place], **look: Any) -> bool:
        """Write a text at the first place where it covers nothing; False where there is none."""
        return self._put(text, places, None, look)

    def name_curve(self, text: str, x: ArrayLike, y: ArrayLike, **look: Any) -> bool:
        """Name a curve at its end or along it, where no other line is nearer to the name."""
        points = np.column_stack([x, y])
        curve = self.axes.transData.transform(points)
        return self._put(text, places_along(x, y), curve, look)

    def _put(
        self,
        text: str,
        places: Iterable[Place],
        curve: Points | None,
        look: dict[str, Any],
    ) -> bool:
        """Write a text at the first place that is free and, where it names one, near its curve."""
        for place in places:
            label = self._annotate(text, place, look)
            box = self._box_of(label)
            is_free = self._is_free(box)
            if is_free and curve is not None:
                is_free = self._is_nearest(box, curve)
            if is_free:
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
        room = _Box(*self.axes.bbox.extents)
        if not box.is_within(room):
            return False
        if any(box.overlaps(other) for other in self._boxes):
            return False
        return not any(_meets(line, box) for line in self._lines)

    def _is_nearest(self, box: _Box, curve: Points) -> bool:
        """Whether no other curve is nearer to a box than one is; straight lines are no curves."""
        distance = _distance(box, curve)
        for line in self._lines:
            is_straight = len(line) <= 2
            if is_straight or np.array_equal(line, curve):
                continue
            if _distance(box, line) <= distance:
                return False
        return True

    def _pixels(self, points: float) -> float:
        figure = self.axes.figure
        return points * figure.dpi / 72


def _meets(line: Points, box: _Box) -> bool:
    """Whether a polyline has a point in a box (Liang and Barsky, over all its segments).

    A segment goes from 0 to 1. Across and along, it is between two edges from one moment to
    another; it is in the box where both are.
    """
    begin, step = line[:-1], np.diff(line, axis=0)
    across = _between(begin[:, 0], step[:, 0], box.left, box.right)
    along = _between(begin[:, 1], step[:, 1], box.bottom, box.top)
    enter = np.maximum(across.begin, along.begin).clip(min=0)
    leave = np.minimum(across.end, along.end).clip(max=1)
    return bool((enter <= leave).any())


class _Moments(NamedTuple):
    """When each segment begins and ends to be between two edges, (N,); it never is: ends first."""

    begin: Points
    end: Points


def _between(begin: Points, step: Points, low: float, high: float) -> _Moments:
    """When segments are between two edges, in one coordinate.

    Args:
        begin: where they begin, (N,).
        step: how far they go, (N,).
        low, high: the edges.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        to_low = (low - begin) / step
        to_high = (high - begin) / step
    stands_still = step == 0
    is_inside = (low <= begin) & (begin <= high)
    end_of_still = np.where(is_inside, 1, -1)
    return _Moments(
        begin=np.where(stands_still, 0, np.minimum(to_low, to_high)),
        end=np.where(stands_still, end_of_still, np.maximum(to_low, to_high)),
    )


def _distance(box: _Box, line: Points) -> float:
    """The distance from a box to the nearest corner of a polyline."""
    if not len(line):
        return float("inf")
    x, y = line.T
    across = np.maximum(box.left - x, x - box.right).clip(min=0)
    along = np.maximum(box.bottom - y, y - box.top).clip(min=0)
    distances = np.hypot(across, along)
    return float(distances.min())


#: Points from a line to the middle of a text above or below it.
_GAPS: Final = (10, 18, 28, 40)
#: Points from an upright line to a text beside it.
_GAP_BESIDE_LINE: Final = 10
#: Parts of an upright line's height at which a text may stand, the best first.
_SHARES_OF_HEIGHT: Final = (0.5, 0.4, 0.6, 0.3, 0.7, 0.2, 0.8)
#: Points from the end of a curve to its name, and how far up that may stand.
_GAP_AT_END: Final = 8
_HEIGHTS_AT_END: Final = (0, 3, -3, 6, -6, 9, -9)
#: Where along a curve its name may stand, as parts of its points.
_SHARES_OF_CURVE: Final = (1.0, 0.85, 0.7, 0.55, 0.4)


def places_along(x: ArrayLike, y: ArrayLike) -> list[Place]:
    """Places for the name of a curve, from its right end: beside it, above it, below it."""
    xs = np.asarray(x, dtype=float)
    ys = np.asarray(y, dtype=float)
    last = len(xs) - 1
    places = [Place(xs[last], ys[last], _GAP_AT_END, up, "left") for up in _HEIGHTS_AT_END]
    for share in _SHARES_OF_CURVE:
        point = int(share * last)
        places += around(xs[point], ys[point])
    return places


def around(x: float, y: float) -> list[Place]:
    """Places above and below a point, near ones first."""
    places = []
    for gap in _GAPS:
        for up in (gap, -gap):
            places.append(Place(x, y, 0, up, "right"))
            places.append(Place(x, y, 0, up, "left"))
    return places


def places_down(x: float, top: float, bottom: float) -> list[Place]:
    """Places on both sides of an upright line, from its middle to its ends."""
    on_right, on_left = [], []
    for share in _SHARES_OF_HEIGHT:
        height = top + share * (bottom - top)
        on_right.append(Place(x, height, _GAP_BESIDE_LINE, 0, "left"))
        on_left.append(Place(x, height, -_GAP_BESIDE_LINE, 0, "right"))
    return on_right + on_left
