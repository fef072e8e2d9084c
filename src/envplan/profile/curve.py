"""Effective cost of an operation against its duration: Pareto options and their convex hull."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from envplan.errors import InputError
from envplan.profile.options import OptionTable, frozen
from envplan.profile.part_costs import IntArray
from envplan.units import MAX_INTEGER


@dataclass(frozen=True, eq=False)
class CostCurve:
    """Effective cost of an operation against its duration, under a blocking power.

    The effective cost of an option is its energy minus what the GPU would draw anyway if it
    waited that long: c = e - P t (as in Perseus, SOSP 2024). It may be negative.

    Attributes:
        option: indices into the table of its Pareto options, shape (p,).
        time_ns: their times, ns, shape (p,), strictly ascending.
        cost_10fj: their effective costs, 10 fJ, shape (p,), strictly descending.
        hull_time_ns: vertices of the lower convex hull, ns, shape (k + 1,), slowest first.
        hull_slope_10uw: marginal cost of going from vertex j to the faster vertex j + 1, 10 uW
            (10 fJ per ns saved), shape (k,), positive and strictly ascending, rounded down.
        base_cost_10fj: the curve's value at its slowest vertex, 10 fJ.
    """

    option: IntArray
    time_ns: IntArray
    cost_10fj: IntArray
    hull_time_ns: IntArray
    hull_slope_10uw: IntArray
    base_cost_10fj: int


@lru_cache(maxsize=1024)  # short pipelines that stand for long ones have the same
def cost_curve(
    table: OptionTable, blocking_power_10uw: int, power_limit_10uw: int | None = None
) -> CostCurve:
    """Pareto options of a table by time and effective cost, and their lower convex hull.

    Exact: all comparisons are made in unbounded integers.

    Args:
        table: the options, n >= 1 of them.
        blocking_power_10uw: power of the waiting GPU, 10 uW, not negative.
        power_limit_10uw: leave out options that draw more power than this, 10 uW; at least one has
            less. None: take them all.

    Returns:
        The curve. No option within the limit lies below it.

    Raises:
        InputError: costs or slopes do not fit the integer range.
    """
    times: list[int] = table.time_ns.tolist()
    energies: list[int] = table.energy_10fj.tolist()
    costs = [
        energy - blocking_power_10uw * time for energy, time in zip(energies, times, strict=True)
    ]
    if min(costs) < -MAX_INTEGER:
        raise _out_of_range(table)
    admissible: Iterable[int] = range(len(costs))
    if power_limit_10uw is not None:
        admissible = np.flatnonzero(table.peak_10uw <= power_limit_10uw).tolist()
    pareto = _pareto_options(costs, admissible)
    hull = _lower_hull([(times[option], costs[option]) for option in pareto])
    vertices, slopes = _floor_slopes(hull)
    if slopes and slopes[-1] > MAX_INTEGER:
        raise _out_of_range(table)
    return CostCurve(
        option=frozen(pareto),
        time_ns=frozen([times[option] for option in pareto]),
        cost_10fj=frozen([costs[option] for option in pareto]),
        hull_time_ns=frozen(vertices),
        hull_slope_10uw=frozen(slopes),
        base_cost_10fj=hull[-1][1],
    )


def _pareto_options(costs: Sequence[int], admissible: Iterable[int]) -> list[int]:
    """The admissible options that are cheaper than every faster one; options ascend by time."""
    pareto: list[int] = []
    for option in admissible:
        if not pareto or costs[option] < costs[pareto[-1]]:
            pareto.append(option)
    return pareto


def _lower_hull(points: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Vertices of the lower hull of points of strictly ascending time (Andrew's monotone chain)."""
    hull: list[tuple[int, int]] = []
    for time, cost in points:
        while len(hull) >= 2:
            (t0, c0), (t1, c1) = hull[-2:]
            if (c1 - c0) * (time - t0) < (cost - c0) * (t1 - t0):
                break
            hull.pop()
        hull.append((time, cost))
    return hull


def _floor_slopes(hull: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """Times of a hull's vertices, slowest first, and slopes between them, rounded down.

    Why rounding slopes down keeps the curve below every option: on the hull, the cost at a
    duration d is the cost at D_0 plus the sum of slope x length over the segments between D_0 and
    d. The lengths are positive, so replacing each slope by its floor cannot raise the sum, and the
    hull itself is below every option. Floors of ascending slopes ascend, so the curve stays convex.
    Segments of equal floor are one straight line: merging them changes nothing. A floor of zero can
    only come first, where the curve then is level at the cost of D_0: the segment is dropped, D_0
    moves to its faster end and the base cost stays.

    Args:
        hull: (time, cost) of its vertices, fastest first.
    """
    vertices, slopes = [hull[-1][0]], list[int]()
    for (fast_time, fast_cost), (slow_time, slow_cost) in reversed(list(itertools.pairwise(hull))):
        slope = (fast_cost - slow_cost) // (slow_time - fast_time)
        if slope == 0 or (slopes and slope == slopes[-1]):
            vertices[-1] = fast_time
        else:
            slopes.append(slope)
            vertices.append(fast_time)
    return vertices, slopes


def _out_of_range(table: OptionTable) -> InputError:
    return InputError(
        f"stage {table.stage} {table.instruction}: costs or their slopes are too large for exact "
        "64-bit arithmetic; check that times are in seconds, energies in joules and the blocking "
        "power in watts"
    )
