"""All planners on one picture of the frontier."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from envplan.plotting.frontier import (
    STYLE,
    draw_ends,
    draw_plans,
    energy_unit,
    label_axes,
    save_figure,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from envplan.plan import Plan
    from envplan.planners import Comparison

__all__ = ["comparison_figure", "plot_comparison"]

# Okabe and Ito's palette again; every planner has a shape of its own as well.
_CURVE: Final = "#0072B2"
_OURS: Final = ("D", "#000000")
_MARKS: Final = {
    "max_frequency": ("X", "#D55E00"),
    "zeus_global": ("v", "#56B4E9"),
    "zeus_per_stage": ("^", "#009E73"),
    "envpipe": ("s", "#CC79A7"),
    "frontier": _OURS,
}
#: zeus_global often lies on max_frequency, and ours on the curve: both shall be seen.
_SIZES: Final = {"max_frequency": 15}


def plot_comparison(
    comparison: Comparison, path: str | os.PathLike[str], along: Sequence[Plan] = ()
) -> None:
    """Draw the comparison to a .png, .svg or .pdf file, whole or not at all.

    Args:
        along: further plans of ours along the frontier.

    Raises:
        InputError: the file cannot be written.
    """
    save_figure(comparison_figure(comparison, along), path)


def comparison_figure(comparison: Comparison, along: Sequence[Plan] = ()) -> Figure:
    """The figure: exact relaxed curve, the planners' own frontiers and everyone's plans.

    Args:
        along: further plans of ours along the frontier.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    scale, unit = energy_unit(comparison.baseline.energy_j)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(10.4, 5.0), layout="constrained")
        axes = figure.add_subplot()
        _draw_curves(axes, comparison, scale)
        if along:
            draw_plans(axes, along, scale, "Plans along it")
        _draw_plans(axes, comparison, scale)
        _set_limits(axes, comparison, scale)
        draw_ends(axes, comparison.frontier, scale)
        label_axes(axes, comparison.frontier, unit)
        figure.legend(loc="outside right upper", frameon=False)  # curves are all over the axes
    return figure


def _draw_curves(axes: Axes, comparison: Comparison, scale: float) -> None:
    frontier, rescheduled = comparison.frontier, comparison.envpipe_frontier
    schedule = frontier.pipeline.schedule
    axes.plot(
        frontier.times,
        frontier.energies / scale,
        color=_CURVE,
        linewidth=2.2,
        label=f"Lower bound, {schedule}",
    )
    if rescheduled is not frontier:
        axes.plot(
            rescheduled.times,
            rescheduled.energies / scale,
            color=_MARKS["envpipe"][1],
            linewidth=1.6,
            linestyle="--",
            label="Lower bound, EnvPipe's schedule",
        )
    for planner, points in comparison.curves.items():
        axes.plot(
            [time for time, _ in points],
            [energy / scale for _, energy in points],
            color=_MARKS[planner][1],
            linewidth=1.2,
            marker=".",
            markersize=4,
        )


def _draw_plans(axes: Axes, comparison: Comparison, scale: float) -> None:
    named: set[str] = set()
    for entry in comparison.entries:
        marker, color = _MARKS[entry.planner]
        axes.plot(
            entry.plan.iteration_time,
            entry.plan.energy / scale,
            marker,
            color=color,
            markeredgecolor="white",
            markersize=_SIZES.get(entry.planner, 10),
            linestyle="none",
            zorder=4 if entry.planner in _SIZES else 5,
            label=None if entry.planner in named else entry.planner,
        )
        named.add(entry.planner)
    if comparison.straggler_time is not None:
        axes.axvline(
            comparison.straggler_time,
            color="#6D28D9",
            linestyle="--",
            linewidth=1.4,
            label="Straggler finished",
        )


def _set_limits(axes: Axes, comparison: Comparison, scale: float) -> None:
    """Around the frontier and all plans, with room below for T_min and T_star; the planners' own
    frontiers may run out on the right."""
    curves = (comparison.frontier, comparison.envpipe_frontier)
    times = [entry.plan.iteration_time for entry in comparison.entries]
    times += [time for curve in curves for time in curve.times]
    energies = [entry.plan.energy for entry in comparison.entries]
    energies += [energy for curve in curves for energy in curve.energies]
    if comparison.straggler_time is not None:
        times.append(comparison.straggler_time)
    width = max(times) - min(times) or 0.1 * min(times)
    height = max(energies) - min(energies) or 0.1 * max(energies) or 1.0
    axes.set_xlim(min(times) - 0.06 * width, max(times) + 0.08 * width)
    axes.set_ylim((min(energies) - 0.2 * height) / scale, (max(energies) + 0.15 * height) / scale)
