"""The frontier as a figure: energy of an iteration against its time, other planners beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from envplan.plotting.figures import (
    BLUE,
    ENDS,
    GREEN,
    ORANGE,
    RED,
    energy_unit,
    figure,
    label_axes,
    title,
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
#: Up to so many operations plans for pictures are searched for as long as others.
_FULL_SEARCH: Final = 2000


def brief_share(frontier: Frontier) -> float:
    """The share of the usual search that plans for a picture of so large a job get."""
    return min(1.0, _FULL_SEARCH / len(frontier.pipeline.operations))


def plans_along(
    frontier: Frontier, most: int, *, beyond: bool = False, progress: Progress | None = None
) -> list[Plan]:
    """Plans for a picture or page; fewer of large jobs, and those less searched for.

    Args:
        beyond, progress: as for sample_plans.
    """
    share = brief_share(frontier)
    count = max(3, round(most * min(1.0, 3 * share)))
    return frontier.sample_plans(count, beyond=beyond, progress=progress, moves=share)


def frontier_figure(
    frontier: Frontier, plans: Sequence[Plan], comparison: Comparison | None = None
) -> Figure:
    """The figure: exact relaxed curve, plans, T_min, T_star, all-maximum frequency, and the others.

    Args:
        plans: along the frontier, by ascending time; at least one, or a comparison.
        comparison: other planners to show beside it.
    """
    with figure(*((7.6, 5.2) if comparison is None else (10.4, 5.0))) as drawn:
        axes = drawn.add_subplot()
        baseline = comparison.baseline if comparison else plans[0].predicted.baseline
        scale = draw_frontier(axes, frontier, plans, baseline.energy_j)
        if comparison is None:
            _keep_limits(axes)
            _draw_savings(axes, plans, scale)
        else:
            _draw_others(axes, comparison, scale)
        _draw_ends(axes, frontier, scale)
        axes.set_title(title(frontier), loc="left")
        # Curves may be all over the axes.
        below: Any = {"loc": "outside lower left", "ncols": 2}
        drawn.legend(**(below if comparison is None else {"loc": "outside right upper"}))
    return drawn


def draw_frontier(
    axes: Axes, frontier: Frontier, plans: Sequence[Plan], most_j: float, dot: float = 5.5
) -> float:
    """The curve, a dot at every plan, and a cross at maximum frequency.

    Args:
        most_j: an energy whose unit the axis shall have, J.
        dot: size of the dots.

    Returns:
        What the energies on the axis are divided by.
    """
    scale, unit = energy_unit(most_j)
    axes.plot(frontier.times, frontier.energies / scale, color=BLUE, linewidth=2.2, label=_BOUND)
    if plans:
        dots = ([p.iteration_time for p in plans], [p.energy / scale for p in plans])
        edge: dict[str, Any] = {"markeredgecolor": "white", "markeredgewidth": 0.6}
        axes.plot(*dots, "o", color=ORANGE, markersize=dot, label=_PLANS, **edge)
        before = plans[0].predicted.baseline
        _mark(axes, BASELINE, before.iteration_time_s, before.energy_j / scale, BASELINE.name)
    off = "axis does not start at 0"
    label_axes(axes, f"Iteration time (s), {off}", f"Energy per iteration ({unit}),\n{off}")
    axes.margins(0.08, 0.1)
    axes.ticklabel_format(useOffset=False, style="plain")
    axes.locator_params(nbins=7)
    return scale


def _mark(axes: Axes, look: Look, time: float, energy: float, label: str) -> None:
    axes.plot(
        time,
        energy,
        look.marker,
        color=look.colour,
        markeredgecolor="white",
        # zeus_global often lies on maximum frequency, envpipe on ours: all shall be seen.
        markersize={"X": 15, "s": 14}.get(look.marker, 10),
        linestyle="none",
        zorder=4 if look.marker in "Xs" else 5,
        label=label,
    )


def _draw_others(axes: Axes, comparison: Comparison, scale: float) -> None:
    """All planners' plans, EnvPipe's bound, a straggler; and the planners' own frontiers, which may
    run out on the right."""
    other = comparison.envpipe_frontier
    style: dict[str, Any]
    if other is not comparison.frontier:
        style = {"color": LOOKS["envpipe"].colour, "linewidth": 1.6, "linestyle": "--"}
        label = "lower bound, EnvPipe's schedule"
        axes.plot(other.times, other.energies / scale, label=label, **style)
    named = {BASELINE.name} & set(axes.get_legend_handles_labels()[1])
    for entry in comparison.entries:
        look = LOOKS[entry.planner]
        label = "" if look.name in named else look.name
        _mark(axes, look, entry.plan.iteration_time, entry.plan.energy / scale, label)
        named.add(look.name)
    if comparison.straggler_time is not None:
        style = {"color": "#6D28D9", "linestyle": "--", "linewidth": 1.4}
        axes.axvline(comparison.straggler_time, label="straggler finished", **style)
    _keep_limits(axes)
    for planner, points in comparison.curves.items():
        heights = [energy / scale for _, energy in points]
        style = {"color": LOOKS[planner].colour, "linewidth": 1.2, "markersize": 4}
        axes.plot([time for time, _ in points], heights, ".-", **style)


def _keep_limits(axes: Axes) -> None:
    """Fix the axes around what is drawn so far, with room below for T_min and T_star."""
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    axes.set_xlim(left, right)
    axes.set_ylim(low - 0.16 * (high - low), high)


def _draw_ends(axes: Axes, frontier: Frontier, scale: float) -> None:
    """T_min and T_star: a diamond on the curve, and a line down to its label under the curve."""
    low, high = frontier.min_time, frontier.min_energy_time
    ends = [(low, 0, ENDS[0], "left"), (high, -1, ENDS[1], "right")]
    if low == high:
        ends = [(low, 0, "T_min = T_star", "left")]
    bottom = axes.get_ylim()[0]
    decimals = max(0, 3 - math.floor(math.log10(high)))
    for row, (time, index, name, side) in enumerate(ends):
        energy = frontier.energies[index] / scale
        axes.vlines(time, bottom, energy, color="0.45", linestyle=":", linewidth=1.2)
        axes.plot(time, energy, "D", color="#000000", markersize=7, zorder=6)
        axes.annotate(
            f"{name}: {time:.{decimals}f} s",
            (time, bottom),
            # Two rows, or they would run into each other where the two times are close.
            xytext=(6 if side == "left" else -6, 6 + 15 * row),
            textcoords="offset points",
            ha=side,
            va="bottom",
            fontsize="small",
        )


def _draw_savings(axes: Axes, plans: Sequence[Plan], scale: float) -> None:
    """An arrow from maximum frequency down to the cheapest plan that is no slower, and a note on
    the cheapest plan of all."""
    baseline = plans[0].predicted.baseline
    free = [plan for plan in plans if plan.iteration_time <= baseline.iteration_time_s]
    best = min(free or plans, key=lambda plan: plan.energy)
    if best.predicted.savings_percent < 0.05:
        return
    begin = (baseline.iteration_time_s, baseline.energy_j / scale)
    end = (best.iteration_time, best.energy / scale)
    arrow = {"arrowstyle": "-|>", "color": GREEN, "lw": 2, "shrinkA": 8, "shrinkB": 6}
    axes.annotate("", end, begin, arrowprops=arrow)
    middle = (max(begin[0], end[0]), (begin[1] + end[1]) / 2)
    note: dict[str, Any] = {"textcoords": "offset points", "color": GREEN, "weight": "bold"}
    axes.annotate(savings_note(best), middle, xytext=(10, 0), ha="left", va="center", **note)
    cheapest = min(plans, key=lambda plan: plan.energy)
    if cheapest is not best:
        place = (cheapest.iteration_time, cheapest.energy / scale)
        words = savings_note(cheapest)
        axes.annotate(words, place, xytext=(4, 12), ha="right", va="bottom", **note)


def savings_note(plan: Plan) -> str:
    """What a plan saves and how much slower it is, in two lines."""
    slower = plan.predicted.slowdown_percent
    return f"{plan.predicted.savings_percent:.1f}% saved,\n" + (
        f"{slower:.1f}% slower" if slower >= 0.05 else "no slowdown"
    )
