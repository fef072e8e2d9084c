"""The least power of a job at every throughput.

If E(T) is the least energy of an iteration that takes T seconds, then the least power at a
throughput of x = 1/T iterations a second is P(x) = x E(1/x), the perspective of E. E is convex, so
P is convex, too. Where E is a straight line between two breakpoints, E(T) = a + b T, the power is
P(x) = a x + b: a straight line as well. So the curve of a frontier is known exactly by its
breakpoints.

Beyond T_star an iteration takes more energy, but less power, so the curve goes on with slower
plans. It ends at T_max, where a second more costs as much energy as a second of waiting. From there
it is best to pause for a part of the time: the straight line down to the power of a paused job,
which continues the curve with the slope that it ends with.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray = NDArray[np.float64]

#: Breakpoints are rounded to floats, so slopes of tiny pieces are off by about so much.
_ROUNDING = 1e-6


class OperatingPoint(NamedTuple):
    """A throughput of a job and the power that it takes.

    Attributes:
        throughput: iterations a second.
        power_w: over all GPUs of the job, W.
    """

    throughput: float
    power_w: float


@dataclass(frozen=True, eq=False)
class PowerCurve:
    """Convex, rising and piecewise linear power of a job over its throughput.

    Invariants, checked when it is made: throughputs ascend strictly, powers ascend, and so do the
    slopes of the pieces between them, up to the rounding of floats.

    Attributes:
        throughput: of the corners, iterations a second, (n) with n >= 1; the last is the fastest.
        power_w: at each corner, W, (n).
    """

    throughput: FloatArray
    power_w: FloatArray

    def __post_init__(self) -> None:
        assert len(self.throughput) == len(self.power_w) >= 1
        assert np.all(np.diff(self.throughput) > 0)
        assert np.all(np.diff(self.power_w) > 0)
        slopes = np.diff(self.power_w) / np.diff(self.throughput)
        assert np.all(np.diff(slopes) >= -_ROUNDING * slopes[1:])

    @classmethod
    def of_frontier(cls, time_s: ArrayLike, energy_j: ArrayLike) -> Self:
        """The curve of a convex frontier.

        Args:
            time_s: of its breakpoints, strictly ascending, (n).
            energy_j: least energy at each, (n).
        """
        throughput = 1 / np.asarray(time_s, float)[::-1]
        return cls(throughput, np.asarray(energy_j, float)[::-1] * throughput)

    @classmethod
    def hull_of(cls, points: Iterable[OperatingPoint]) -> Self:
        """The lower convex hull of points, from the slowest one to the fastest.

        Every point of the hull can be had: by the plan of a corner, or by two plans whose
        iterations alternate, which average time and energy.

        Points that take more power for no more throughput are not on it.
        """
        corners: list[OperatingPoint] = []
        for point in sorted(points, key=lambda point: (point.throughput, -point.power_w)):
            # A faster point of no more power makes a slower one pointless.
            while corners and corners[-1].power_w >= point.power_w:
                corners.pop()
            while len(corners) > 1 and _is_above(corners[-2], corners[-1], point):
                corners.pop()
            corners.append(point)
        return cls.through(corners)

    @classmethod
    def through(cls, points: Iterable[OperatingPoint]) -> Self:
        """The curve with these corners, by ascending throughput."""
        corners = np.array(list(points), float)
        return cls(corners[:, 0], corners[:, 1])

    @property
    def slowest(self) -> OperatingPoint:
        """The least throughput, and the least power."""
        return OperatingPoint(float(self.throughput[0]), float(self.power_w[0]))

    @property
    def fastest(self) -> OperatingPoint:
        """The highest throughput, and the most power."""
        return OperatingPoint(float(self.throughput[-1]), float(self.power_w[-1]))

    @property
    def slopes(self) -> FloatArray:
        """Of each piece the power that an iteration a second more takes, W s, (n - 1); ascending.

        What rounding makes of a convex curve is made convex again.
        """
        return np.maximum.accumulate(np.diff(self.power_w) / np.diff(self.throughput))

    def power_at(self, throughput: float) -> float:
        """The power of a throughput within the curve, W."""
        return float(np.interp(throughput, self.throughput, self.power_w))

    def from_throughput(self, least: float) -> Self:
        """The part of the curve whose throughput is at least this; the fastest point remains."""
        if least <= self.throughput[0]:
            return self
        if least >= self.throughput[-1]:
            return type(self)(self.throughput[-1:], self.power_w[-1:])
        first = int(np.searchsorted(self.throughput, least, side="right"))
        return type(self)(
            np.concatenate([[least], self.throughput[first:]]),
            np.concatenate([[self.power_at(least)], self.power_w[first:]]),
        )

    def with_pause(self, power_w: float) -> Self:
        """The curve extended to standing still at a power that is below the line of its pieces."""
        return type(self)(
            np.concatenate([[0.0], self.throughput]), np.concatenate([[power_w], self.power_w])
        )

    def bounded_below(self, max_pieces: int) -> Self:
        """A curve of at most so many pieces that lies on or below this one.

        Each of its pieces is on the line of a piece of this curve, and a convex curve lies above
        the lines of all its pieces.
        """
        num_pieces = len(self.throughput) - 1
        if num_pieces <= max_pieces:
            return self
        spread = np.linspace(0, num_pieces - 1, max_pieces).round().astype(int)
        slopes, first = np.unique(self.slopes[spread], return_index=True)
        chosen = spread[first]
        heights = self.power_w[chosen] - slopes * self.throughput[chosen]  # at no throughput
        crossing = -np.diff(heights) / np.diff(slopes)
        return type(self)(
            np.concatenate([self.throughput[:1], crossing, self.throughput[-1:]]),
            np.concatenate(
                [self.power_w[:1], heights[:-1] + slopes[:-1] * crossing, self.power_w[-1:]]
            ),
        )


def _is_above(left: OperatingPoint, middle: OperatingPoint, right: OperatingPoint) -> bool:
    """Whether a point lies on or above the line between its neighbours."""
    rise = (right.power_w - left.power_w) * (middle.throughput - left.throughput)
    return (middle.power_w - left.power_w) * (right.throughput - left.throughput) >= rise
