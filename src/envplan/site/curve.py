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
        widths = np.diff(self.throughput)
        rises_w = np.diff(self.power_w)
        assert np.all(widths > 0)
        assert np.all(rises_w > 0)
        slopes = rises_w / widths
        assert np.all(np.diff(slopes) >= -_ROUNDING * slopes[1:])

    @classmethod
    def of_frontier(cls, time_s: ArrayLike, energy_j: ArrayLike) -> Self:
        """The curve of a convex frontier.

        Args:
            time_s: of its breakpoints, strictly ascending, (n).
            energy_j: least energy at each, (n).
        """
        # The slowest breakpoint of the frontier is the first corner of the curve.
        falling_times_s = np.asarray(time_s, float)[::-1]
        energies_j = np.asarray(energy_j, float)[::-1]
        throughput = 1 / falling_times_s
        return cls(throughput, energies_j * throughput)

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
    def num_pieces(self) -> int:
        """Pieces between its corners."""
        return len(self.throughput) - 1

    def corners(self) -> list[OperatingPoint]:
        """The corners by ascending throughput."""
        return list(map(OperatingPoint, self.throughput.tolist(), self.power_w.tolist()))

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
        """Power that one iteration a second more takes on each piece, W s, (n - 1); ascending.

        Rounding may let a slope fall by a tiny bit; it is lifted to the one before it.
        """
        slopes = np.diff(self.power_w) / np.diff(self.throughput)
        return np.maximum.accumulate(slopes)

    def power_at(self, throughput: float) -> float:
        """The power of a throughput within the curve, W."""
        return float(np.interp(throughput, self.throughput, self.power_w))

    def throughput_at(self, power_w: float) -> float:
        """The highest throughput for a power within the curve."""
        return float(np.interp(power_w, self.power_w, self.throughput))

    def from_throughput(self, min_throughput: float) -> Self:
        """The part of the curve from a throughput on; the fastest point always remains."""
        if min_throughput <= self.throughput[0]:
            return self
        if min_throughput >= self.throughput[-1]:
            return type(self)(self.throughput[-1:], self.power_w[-1:])
        start = OperatingPoint(min_throughput, self.power_at(min_throughput))
        next_corner = int(np.searchsorted(self.throughput, min_throughput, side="right"))
        faster = type(self)(self.throughput[next_corner:], self.power_w[next_corner:])
        return faster._with_slower_corner(start)

    def with_pause(self, power_w: float) -> Self:
        """The curve extended to standing still at a power that is below the line of its pieces."""
        return self._with_slower_corner(OperatingPoint(0.0, power_w))

    def _with_slower_corner(self, corner: OperatingPoint) -> Self:
        """The curve with one more corner, which is slower than all others."""
        return type(self)(
            np.append(corner.throughput, self.throughput),
            np.append(corner.power_w, self.power_w),
        )

    def bounded_below(self, max_pieces: int) -> Self:
        """A curve of at most so many pieces that lies on or below this one.

        Each of its pieces is on the line of a piece of this curve, and a convex curve lies above
        the lines of all its pieces.
        """
        if self.num_pieces <= max_pieces:
            return self
        pieces = np.linspace(0, self.num_pieces - 1, max_pieces).round().astype(int)
        # Lines that are parallel, up to rounding, do not cross: the first of them is enough.
        slopes = self.slopes[pieces]
        is_steeper = np.concatenate([[True], np.diff(slopes) > _ROUNDING * slopes[1:]])
        pieces, slopes = pieces[is_steeper], slopes[is_steeper]
        # The line of a piece: power = offset + slope x throughput.
        offsets_w = self.power_w[pieces] - slopes * self.throughput[pieces]
        # The new corners are where each line crosses the next one.
        crossings = -np.diff(offsets_w) / np.diff(slopes)
        corners = np.concatenate([self.throughput[:1], crossings, self.throughput[-1:]])
        # The last corner is on the last line, which may end below the curve.
        lines = np.append(np.arange(len(slopes)), len(slopes) - 1)
        return type(self)(corners, offsets_w[lines] + slopes[lines] * corners)


def _is_above(left: OperatingPoint, middle: OperatingPoint, right: OperatingPoint) -> bool:
    """Whether a point lies on or above the line between its neighbours."""
    # Both slopes from the left point, multiplied by both widths: nothing is divided.
    width_to_middle = middle.throughput - left.throughput
    width_to_right = right.throughput - left.throughput
    rise_to_middle = middle.power_w - left.power_w
    rise_to_right = right.power_w - left.power_w
    return rise_to_middle * width_to_right >= rise_to_right * width_to_middle
