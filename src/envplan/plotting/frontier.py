"""The frontier as a figure: energy of an iteration against its time, other planners beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from envplan.plotting.figures import (
    BLUE,
    ENDS,
    GREEN,
    ORANGE,
    RED,
    figure,
    label_axes,
    savings_words,
    title,
    unit_of,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from envplan.frontier import Progress
    from envplan.plan import Plan
    from envplan.planners import Comparison
    from envplan.solve import Frontier


class Look(NamedTuple):
    """What a planner is called in pictures, and its mark there."""

    name: str
    marker: str
    colour: str


#: Every planner has a shape of its own as well as a colour.
LOOKS: Final = {
    "max_frequency": Look("maximum frequency", "X", RED),
    "zeus_global": Look("Zeus, one clock for all", "v", "#56B4E9"),
    "zeus_per_stage": Look("Zeus, one clock a stage", "^", "#009E73"),
    "envpipe": Look("EnvPipe", "s", "#CC79A7"),
    "frontier": Look("envplan", "D", "#000000"),
}
BASELINE: Final = LOOKS["max_frequency"]
_BOUND: Final = "lower bound: the exact relaxed frontier"
_PLANS: Final = "plans, one frequency per operation"
_OFFSET: Final[dict[str, Any]] = {"textcoords": "offset points"}
#: Up to so many operations plans for pictures are searched for as long as others.
_FULL_SEARCH: Final = 2000


def plans_along(
    frontier: Frontier, most: int, *, beyond: bool = False, progress: Progress | None = None
) -> list[Plan]:
    """Plans for a picture or page; fewer of large jobs, and those less searched for.

    Args:
        beyond, progress: as for sample_plans.
    """
    share = min(1.0, _FULL_SEARCH / len(frontier.pipeline.operations))
    count = max(3, round(most * min(1.0, 3 * share)))
    return frontier.sample_plans(count, beyond=beyond, progress=progress, moves=share)


def frontier_figure(
    frontier: Frontier, plans: Sequence[Plan], comparison: Comparison | None = None
) -> Figure:
    """The figure: exact relaxed curve, plans, T_min, T_star, all-maximum frequency, and the others.

    Args:
        plans: along the frontier, at least one, by ascending time.
        comparison: other planners to show beside it.
    """
    before = plans[0].predicted.baseline
    scale, unit = unit_of(before.energy_j, "J")
    with figure(*((7.6, 5.2) if comparison is None else (10.4, 5.0))) as drawn:
        axes = drawn.add_subplot()
        exact = frontier.times, frontier.energies / scale
        axes.plot(*exact, color=BLUE, linewidth=2.2, label=_BOUND)
        dots = [p.iteration_time for p in plans], [p.energy / scale for p in plans]
        edge: dict[str, Any] = {"markeredgecolor": "white", "markeredgewidth": 0.6}
        axes.plot(*dots, "o", color=ORANGE, markersize=5.5, label=_PLANS, **edge)
        _mark(axes, BASELINE, before.iteration_time_s, before.energy_j / scale, BASELINE.name)
        off = "axis does not start at 0"
        label_axes(axes, f"Iteration time (s), {off}", f"Energy per iteration ({unit}),\n{off}")
        axes.margins(0.08, 0.1)
        axes.ticklabel_format(useOffset=False, style="plain")
        axes.locator_params(nbins=7)
        if comparison is not None:
            _draw_others(axes, comparison, scale)
        # From here on the axes stay as they are, with room below for T_min and T_star.
        (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
        axes.set_xlim(left, right)
        axes.set_ylim(low - 0.16 * (high - low), high)
        if comparison is None:
            _draw_savings(axes, plans, scale)
        else:  # may run out on the right
            for planner, points in comparison.curves.items():
                times, energies = np.array(points).T
                thin: Any = {"color": LOOKS[planner].colour, "linewidth": 1.2, "markersize": 4}
                axes.plot(times, energies / scale, ".-", **thin)
        _draw_ends(axes, frontier, scale)
        axes.set_title(title(frontier), loc="left")
        # Curves may be all over the axes.
        alone: Any = {"loc": "outside lower left", "ncols": 2}
        drawn.legend(**(alone if comparison is None else {"loc": "outside right upper"}))
    return drawn


def _mark(axes: Axes, look: Look, time: float, energy: float, label: str) -> None:
    # zeus_global often lies on maximum frequency, envpipe on ours: all shall be seen.
    size, height = {"X": (15, 4), "s": (14, 4)}.get(look.marker, (10, 5))
    style: dict[str, Any] = {"color": look.colour, "markeredgecolor": "white", "linestyle": "none"}
    axes.plot(time, energy, look.marker, markersize=size, zorder=height, label=label, **style)


def _draw_others(axes: Axes, comparison: Comparison, scale: float) -> None:
    """All planners' plans, EnvPipe's bound, a straggler."""
    other = comparison.envpipe_frontier
    dashed: dict[str, Any] = {"linestyle": "--", "linewidth": 1.6, "color": LOOKS["envpipe"].colour}
    if other is not comparison.frontier:
        label = "lower bound, EnvPipe's schedule"
        axes.plot(other.times, other.energies / scale, label=label, **dashed)
    named = {BASELINE.name}
    for entry in comparison.entries:
        look = LOOKS[entry.plan.planner]
        label = "" if look.name in named else look.name
        _mark(axes, look, entry.plan.iteration_time, entry.plan.energy / scale, label)
        named.add(look.name)
    if comparison.straggler_time is not None:
        dashed |= {"color": "#6D28D9", "linewidth": 1.4}
        axes.axvline(comparison.straggler_time, label="straggler finished", **dashed)


def _draw_ends(axes: Axes, frontier: Frontier, scale: float) -> None:
    """T_min and T_star: a diamond on the curve, and a line down to its label under the curve."""
    ends = [(frontier.min_time, ENDS[0], "left"), (frontier.min_energy_time, ENDS[1], "right")]
    if frontier.min_time == frontier.min_energy_time:
        ends = [(frontier.min_time, "T_min = T_star", "left")]
    bottom = axes.get_ylim()[0]
    decimals = max(0, 3 - math.floor(math.log10(frontier.min_energy_time)))
    for row, (time, name, side) in enumerate(ends):
        energy = frontier.energies[-row] / scale
        axes.vlines(time, bottom, energy, color="0.45", linestyle=":", linewidth=1.2)
        axes.plot(time, energy, "D", color="#000000", markersize=7, zorder=6)
        # Two rows, or they would run into each other where the two times are close.
        offset = (6 if side == "left" else -6, 6 + 15 * row)
        look: dict[str, Any] = {"xytext": offset, "fontsize": "small", "ha": side, "va": "bottom"}
        axes.annotate(f"{name}: {time:.{decimals}f} s", (time, bottom), **_OFFSET, **look)


def _draw_savings(axes: Axes, plans: Sequence[Plan], scale: float) -> None:
    """An arrow from maximum frequency down to the cheapest plan that is no slower, and a note on
    the cheapest plan of all."""
    before = plans[0].predicted.baseline
    cheapest = min(plans, key=lambda plan: plan.energy)
    free = [plan for plan in plans if plan.iteration_time <= before.iteration_time_s]
    best = min(free, key=lambda plan: plan.energy, default=cheapest)
    if best.predicted.savings_percent < 0.05:
        return
    begin = before.iteration_time_s, before.energy_j / scale
    end, least = ((plan.iteration_time, plan.energy / scale) for plan in (best, cheapest))
    arrow = {"arrowstyle": "-|>", "color": GREEN, "lw": 2, "shrinkA": 8, "shrinkB": 6}
    axes.annotate("", end, begin, arrowprops=arrow)
    middle = max(begin[0], end[0]), (begin[1] + end[1]) / 2
    notes: list[tuple[Plan, Any, dict[str, Any]]] = [
        (best, middle, {"xytext": (10, 0), "ha": "left", "va": "center"}),
        (cheapest, least, {"xytext": (4, 12), "ha": "right", "va": "bottom"}),
    ]
    for plan, place, how in notes[: 1 + (cheapest is not best)]:
        words = savings_words(plan.predicted.savings_percent, plan.predicted.slowdown_percent)
        green: dict[str, Any] = {"color": GREEN, "weight": "bold", **_OFFSET, **how}
        axes.annotate(words.replace(", ", ",\n"), place, **green)
