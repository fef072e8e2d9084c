"""The frontier as a figure: energy of an iteration against its time, other planners beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from envplan.plotting.figures import BLUE, GREEN, ORANGE, RED, figure, label_axes
from envplan.plotting.labels import Labels, Place, around, places_down
from envplan.plotting.titles import (
    T_MIN_LABEL,
    T_STAR_LABEL,
    job_title,
    savings_words,
    scale_to_unit,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from envplan.plan import Plan
    from envplan.planners import Comparison
    from envplan.solve import Frontier


class Look(NamedTuple):
    """A planner's name in pictures, and its mark there."""

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


def look_of(planner: str) -> Look:
    """The look of a planner; one without a look of its own is a grey dot with its name."""
    return LOOKS.get(planner, Look(planner, "o", "0.45"))


_STRAGGLER_COLOUR: Final = "#6D28D9"
_BOUND: Final = "lower bound: the exact relaxed frontier"
#: The lower bound of EnvPipe's order of operations, as pictures and pages name it.
ENVPIPE_BOUND_LABEL: Final = "lower bound, EnvPipe's order"
_PLANS: Final = "plans, one frequency per operation"
_OFF_ZERO: Final = "axis does not start at 0"
#: Savings in percent that one decimal shows as none.
_NOTHING_SAVED: Final = 0.05
#: The height of the axes that is added below for the names of T_min and T_star.
_ROOM_BELOW: Final = 0.16
#: The width that is added for names at the ends of curves.
_ROOM_FOR_NAMES: Final = 0.46


class _Mark(NamedTuple):
    """Size and place in the drawing order of a planner's mark."""

    size: int
    zorder: int


#: zeus_global often lies on maximum frequency, envpipe on ours: all shall be seen.
_LARGE_MARKS: Final = {"X": _Mark(15, 4), "s": _Mark(14, 4)}
_USUAL_MARK: Final = _Mark(10, 5)


def frontier_figure(
    frontier: Frontier, plans: Sequence[Plan], comparison: Comparison | None = None
) -> Figure:
    """Draw the exact relaxed curve, plans, T_min, T_star, maximum frequency, and other planners.

    Args:
        frontier: whose curve it is.
        plans: along the frontier, at least one, by ascending time.
        comparison: other planners to show beside it.
    """
    baseline = plans[0].predicted.baseline
    scale, unit = scale_to_unit(baseline.energy_j, "J")
    width_in, height_in = (7.6, 5.2) if comparison is None else (10.4, 5.0)
    with figure(width_in, height_in) as drawn:
        axes = drawn.add_subplot()
        axes.plot(
            frontier.times, frontier.energies / scale, color=BLUE, linewidth=2.2, label=_BOUND
        )
        _draw_plans(axes, plans, scale)
        _mark(axes, BASELINE, baseline.iteration_time_s, baseline.energy_j / scale, BASELINE.name)
        _label_axes(axes, unit)
        if comparison is not None:
            _draw_comparison(axes, comparison, scale)
        curves: list[_Curve] = []
        if comparison is not None:
            curves = _planner_curves(comparison, axes.get_xlim()[1], scale)
        _freeze_axes(axes, _ROOM_FOR_NAMES if curves else 0)
        _draw_planner_curves(axes, curves)
        _draw_ends(axes, frontier, scale)
        axes.set_title(job_title(frontier), loc="left")
        # Curves may be all over the axes.
        if comparison is None:
            drawn.legend(loc="outside lower left", ncols=2)
        else:
            drawn.legend(loc="outside right upper")
        labels = Labels.on(axes)
        if comparison is None:
            _draw_savings(axes, labels, plans, scale)
        else:
            _name_curves(labels, comparison, curves, scale)
    return drawn


def _draw_plans(axes: Axes, plans: Sequence[Plan], scale: float) -> None:
    times_s = [plan.iteration_time for plan in plans]
    energies = [plan.energy / scale for plan in plans]
    axes.plot(
        times_s,
        energies,
        "o",
        color=ORANGE,
        markersize=5.5,
        label=_PLANS,
        markeredgecolor="white",
        markeredgewidth=0.6,
    )


def _mark(axes: Axes, look: Look, time_s: float, energy: float, label: str) -> None:
    """Draw a planner's mark."""
    mark = _LARGE_MARKS.get(look.marker, _USUAL_MARK)
    axes.plot(
        time_s,
        energy,
        look.marker,
        markersize=mark.size,
        zorder=mark.zorder,
        label=label,
        color=look.colour,
        markeredgecolor="white",
        linestyle="none",
    )


def _label_axes(axes: Axes, unit: str) -> None:
    """Label time and energy, and say that neither axis starts at 0."""
    label_axes(
        axes, f"Iteration time (s), {_OFF_ZERO}", f"Energy per iteration ({unit}),\n{_OFF_ZERO}"
    )
    axes.margins(0.08, 0.1)
    axes.ticklabel_format(useOffset=False, style="plain")
    axes.locator_params(nbins=7)


def _freeze_axes(axes: Axes, room_on_right: float) -> None:
    """Keep the limits of the axes from here on, with room below for T_min and T_star.

    Args:
        axes: the axes.
        room_on_right: for names at the ends of curves, as a share of their width.
    """
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    axes.set_xlim(left, right + room_on_right * (right - left))
    axes.set_ylim(low - _ROOM_BELOW * (high - low), high)


def _draw_comparison(axes: Axes, comparison: Comparison, scale: float) -> None:
    """Draw all planners' plans, EnvPipe's bound and a straggler."""
    envpipe_frontier = comparison.envpipe_frontier
    if envpipe_frontier is not comparison.frontier:
        axes.plot(
            envpipe_frontier.times,
            envpipe_frontier.energies / scale,
            label=ENVPIPE_BOUND_LABEL,
            linestyle="--",
            linewidth=1.6,
            color=LOOKS["envpipe"].colour,
        )
    for entry in comparison.entries:
        plan = entry.plan
        if not _is_drawn_already(comparison, plan):
            look = look_of(plan.planner)
            name = "" if plan.planner in comparison.curves else look.name
            if plan.planner == "frontier":
                name = f"{look.name}, EnvPipe's order"
            _mark(axes, look, plan.iteration_time, plan.energy / scale, name)
    if comparison.straggler_time is not None:
        axes.axvline(
            comparison.straggler_time,
            label="straggler finished",
            linestyle="--",
            linewidth=1.4,
            color=_STRAGGLER_COLOUR,
        )


def _is_drawn_already(comparison: Comparison, plan: Plan) -> bool:
    """Whether a plan is maximum frequency's, or one of ours on the curve, which have marks."""
    is_on_curve = plan.job.schedule == comparison.frontier.pipeline.schedule
    return plan.planner == "max_frequency" or (plan.planner == "frontier" and is_on_curve)


class _Curve(NamedTuple):
    """A planner's own plans, as far as the chart shows them."""

    look: Look
    times_s: NDArray[np.float64]
    energies: NDArray[np.float64]


def _planner_curves(comparison: Comparison, end_s: float, scale: float) -> list[_Curve]:
    """All plans of planners that have several, up to a time."""
    curves = []
    for planner, points in comparison.curves.items():
        shown = [point for point in points if point.time_s <= end_s]
        if shown:
            times_s, energies_j = np.array(shown).T
            curves.append(_Curve(look_of(planner), times_s, energies_j / scale))
    return curves


def _draw_planner_curves(axes: Axes, curves: Sequence[_Curve]) -> None:
    """Draw the curves of planners; the legend has each with the mark of the planner's plan."""
    for look, times_s, energies in curves:
        axes.plot(times_s, energies, ".-", color=look.colour, linewidth=1.2, markersize=4)
        axes.plot(
            [],
            [],
            look.marker,
            linestyle="-",
            color=look.colour,
            linewidth=1.2,
            markersize=_USUAL_MARK.size,
            markeredgecolor="white",
            label=look.name,
        )


def _name_curves(
    labels: Labels, comparison: Comparison, curves: Sequence[_Curve], scale: float
) -> None:
    """Name every curve at its end, where there is room."""
    frontier, envpipe = comparison.frontier, comparison.envpipe_frontier
    ours, small = LOOKS["frontier"].name, "small"
    energies = frontier.energies / scale
    labels.name_curve(ours, frontier.times, energies, color=BLUE, fontsize=small)
    for look, times_s, planner_energies in curves:
        labels.name_curve(look.name, times_s, planner_energies, color="0.25", fontsize=small)
    if envpipe is not frontier:
        bound = envpipe.energies / scale
        labels.name_curve("EnvPipe's order", envpipe.times, bound, color="0.25", fontsize=small)


def _draw_ends(axes: Axes, frontier: Frontier, scale: float) -> None:
    """Draw T_min and T_star: a line down from the curve to its label below."""
    decimals = max(0, 3 - math.floor(math.log10(frontier.min_energy_time)))
    energies = frontier.energies / scale
    if frontier.min_time == frontier.min_energy_time:
        label = f"T_min = T_star: {frontier.min_time:.{decimals}f} s"
        _draw_end(axes, frontier.min_time, energies[0], label, "left")
        return
    t_min = f"{T_MIN_LABEL}: {frontier.min_time:.{decimals}f} s"
    t_star = f"{T_STAR_LABEL}: {frontier.min_energy_time:.{decimals}f} s"
    _draw_end(axes, frontier.min_time, energies[0], t_min, "left")
    # In a second row, or they would run into each other where the two times are close.
    _draw_end(axes, frontier.min_energy_time, energies[-1], t_star, "right", row=1)


def _draw_end(
    axes: Axes,
    time_s: float,
    energy: float,
    label: str,
    side: Literal["left", "right"],
    *,
    row: int = 0,
) -> None:
    """Draw an end of the frontier; its label begins or ends at its time, in a row of labels."""
    bottom, top = axes.get_ylim()
    foot = bottom + (top - bottom) / 1000  # rounding leaves it inside
    axes.plot([time_s, time_s], [foot, energy], color="0.45", linestyle=":", linewidth=1.2)
    axes.annotate(
        label,
        (time_s, bottom),
        xytext=(6 if side == "left" else -6, 6 + 15 * row),
        textcoords="offset points",
        fontsize="small",
        ha=side,
        va="bottom",
    )


def _draw_savings(axes: Axes, labels: Labels, plans: Sequence[Plan], scale: float) -> None:
    """Draw an arrow from maximum frequency down to the cheapest plan that is no slower.

    A note stands beside the arrow, and another on the cheapest plan of all.
    """
    baseline = plans[0].predicted.baseline
    cheapest = min(plans, key=lambda plan: plan.energy)
    not_slower = [plan for plan in plans if plan.iteration_time <= baseline.iteration_time_s]
    best = min(not_slower, key=lambda plan: plan.energy, default=cheapest)
    if best.predicted.savings_percent < _NOTHING_SAVED:
        return
    arrow_begin = baseline.iteration_time_s, baseline.energy_j / scale
    arrow_end = best.iteration_time, best.energy / scale
    axes.annotate(
        "",
        arrow_end,
        arrow_begin,
        arrowprops={"arrowstyle": "-|>", "color": GREEN, "lw": 2, "shrinkA": 8, "shrinkB": 6},
    )
    labels.add_line(arrow_begin, arrow_end)
    beside_arrow = max(arrow_begin[0], arrow_end[0])
    _note_savings(labels, best, places_down(beside_arrow, arrow_begin[1], arrow_end[1]))
    if cheapest is not best:
        _note_savings(labels, cheapest, around(cheapest.iteration_time, cheapest.energy / scale))


def _note_savings(labels: Labels, plan: Plan, places: Sequence[Place]) -> None:
    """Note what a plan saves, where there is room."""
    predicted = plan.predicted
    words = savings_words(predicted.savings_percent, predicted.slowdown_percent)
    labels.put(words.replace(", ", ",\n"), places, color=GREEN, weight="bold")
