"""The frontier as a figure: energy of an iteration against its time."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from envplan._files import atomic_write
from envplan._words import job_in_words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from envplan.plan import Plan
    from envplan.solve import Frontier

__all__ = [
    "STYLE",
    "draw_ends",
    "energy_unit",
    "frontier_figure",
    "in_joules",
    "ink",
    "label_axes",
    "label_job",
    "plot_frontier",
    "profile_title",
    "save_figure",
    "title",
]

# Okabe and Ito's palette, which colour-blind readers can tell apart; shapes differ as well.
_CURVE = "#0072B2"
_PLANS = "#E69F00"
_ENDS = "#000000"
_BASELINE = "#D55E00"
_SAVINGS = "#007A5A"
#: How all our figures look.
STYLE: Any = {
    "font.size": 12,
    "axes.titlesize": 13,
    "axes.labelsize": 13,
    "legend.fontsize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "envplan",
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
}


def plot_frontier(frontier: Frontier, plans: Sequence[Plan], path: str | os.PathLike[str]) -> None:
    """Draw the frontier to a .png, .svg or .pdf file, whole or not at all.

    Args:
        plans: discrete plans along the frontier, at least one, by ascending time.

    Raises:
        InputError: the file cannot be written.
    """
    save_figure(frontier_figure(frontier, plans), path)


def frontier_figure(frontier: Frontier, plans: Sequence[Plan]) -> Figure:
    """The figure: exact relaxed curve, discrete plans, T_min, T_star and all-maximum frequency."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    scale, unit = energy_unit(plans[0].predicted.baseline.energy_j)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 4.8), layout="constrained")
        axes = figure.add_subplot()
        _set_limits(axes, frontier, plans, scale)
        _draw_points(axes, frontier, plans, scale)
        draw_ends(axes, frontier, scale)
        _draw_savings(axes, plans, scale)
        label_axes(axes, frontier, unit)
        axes.legend(loc="upper right", frameon=True, edgecolor="0.85", framealpha=1)
    return figure


def label_axes(axes: Axes, frontier: Frontier, unit: str) -> None:
    """Title, axes and grid of a figure of energy against time, once all is drawn.

    Args:
        unit: of energy, see energy_unit.
    """
    axes.set_xlabel("Iteration time (s), axis does not start at 0")
    axes.set_ylabel(f"Energy per iteration ({unit}),\naxis does not start at 0")
    axes.ticklabel_format(useOffset=False, style="plain")
    axes.locator_params(nbins=7)
    axes.set_title(title(frontier), loc="left")
    axes.grid(color="0.92", linewidth=0.8)
    axes.set_axisbelow(True)


def save_figure(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Write a figure in the format its file name ends in, whole or not at all.

    The same figure always gives the same bytes.

    Raises:
        InputError: the file cannot be written.
    """
    import matplotlib as mpl

    kind = Path(path).suffix.lower().removeprefix(".")
    dated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    buffer = io.BytesIO()
    with mpl.rc_context(STYLE):
        figure.savefig(buffer, format=kind, dpi=200, metadata=dated.get(kind))
    atomic_write(path, buffer.getvalue())


def energy_unit(joules: float) -> tuple[float, str]:
    """What to divide joules by, and what they are then called."""
    factors = {1e9: "GJ", 1e6: "MJ", 1e3: "kJ"}
    return next(((f, unit) for f, unit in factors.items() if joules >= 10 * f), (1.0, "J"))


def in_joules(joules: float) -> str:
    """An energy to five digits, with its unit."""
    scale, unit = energy_unit(joules)
    return f"{joules / scale:#.5g}".rstrip(".") + f" {unit}"


def ink(fill: Any) -> str:
    """Black or white, whichever is legible on a colour."""
    from matplotlib.colors import to_rgb

    red, green, blue = to_rgb(fill)
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.45 else "white"


def _set_limits(axes: Axes, frontier: Frontier, plans: Sequence[Plan], scale: float) -> None:
    """Room for the labels of T_min and T_star below the curve, and for the legend beside or, where
    the baseline is not at the left, above it."""
    baseline = plans[0].predicted.baseline
    times = [*frontier.times, baseline.iteration_time_s]
    energies = [e / scale for e in (*frontier.energies, baseline.energy_j)]
    width = max(times) - min(times) or 0.1 * min(times)
    height = max(energies) - min(energies) or 0.1 * max(energies) or 1.0
    axes.set_xlim(min(times) - 0.08 * width, max(times) + 0.08 * width)
    at_left = baseline.iteration_time_s < min(times) + 0.3 * width
    headroom = 0.12 if at_left else 0.5
    axes.set_ylim(min(energies) - 0.22 * height, max(energies) + headroom * height)


def _draw_points(axes: Axes, frontier: Frontier, plans: Sequence[Plan], scale: float) -> None:
    baseline = plans[0].predicted.baseline
    axes.plot(
        frontier.times,
        frontier.energies / scale,
        color=_CURVE,
        linewidth=2.2,
        label="Exact relaxed frontier (lower bound)",
    )
    draw_plans(axes, plans, scale, "Plans, one frequency per operation")
    axes.plot(
        baseline.iteration_time_s,
        baseline.energy_j / scale,
        "X",
        color=_BASELINE,
        markeredgecolor="white",
        markersize=12,
        linestyle="none",
        zorder=5,
        label="Maximum frequency everywhere",
    )


def draw_plans(axes: Axes, plans: Sequence[Plan], scale: float, label: str) -> None:
    """Put a dot at every plan.

    Args:
        scale: of the axis of energies, see energy_unit.
        label: for the legend.
    """
    axes.plot(
        [plan.iteration_time for plan in plans],
        [plan.energy / scale for plan in plans],
        "o",
        color=_PLANS,
        markeredgecolor="white",
        markeredgewidth=0.6,
        markersize=5.5,
        label=label,
    )


def draw_ends(axes: Axes, frontier: Frontier, scale: float) -> None:
    """T_min and T_star: a diamond on the curve, and a line down to its label under the curve.

    Args:
        scale: of the axis of energies, see energy_unit.
    """
    low, high = frontier.min_time, frontier.min_energy_time
    ends = [(low, 0, "$T_{min}$", "left"), (high, -1, "$T^*$", "right")]
    if low == high:
        ends = [(low, 0, "$T_{min} = T^*$", "left")]
    bottom = axes.get_ylim()[0]
    decimals = max(0, 3 - math.floor(math.log10(high)))
    for time, index, name, side in ends:
        energy = frontier.energies[index] / scale
        axes.vlines(time, bottom, energy, color="0.45", linestyle=":", linewidth=1.2)
        axes.plot(time, energy, "D", color=_ENDS, markersize=7, zorder=6)
        axes.annotate(
            f"{name} = {time:.{decimals}f} s",
            (time, bottom),
            xytext=(6 if side == "left" else -6, 6),
            textcoords="offset points",
            ha=side,
            va="bottom",
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
    arrow = {"arrowstyle": "-|>", "color": _SAVINGS, "lw": 2, "shrinkA": 8, "shrinkB": 6}
    axes.annotate("", end, begin, arrowprops=arrow)
    middle = (max(begin[0], end[0]), (begin[1] + end[1]) / 2)
    _note(axes, best, middle, offset=(10, 0), ha="left", va="center")
    cheapest = min(plans, key=lambda plan: plan.energy)
    if cheapest is not best:
        place = (cheapest.iteration_time, cheapest.energy / scale)
        _note(axes, cheapest, place, offset=(4, 12), ha="right", va="bottom")


def _note(
    axes: Axes,
    plan: Plan,
    place: tuple[float, float],
    *,
    offset: tuple[int, int],
    ha: Literal["left", "right"],
    va: Literal["center", "bottom"],
) -> None:
    slower = plan.predicted.slowdown_percent
    axes.annotate(
        f"{plan.predicted.savings_percent:.1f}% saved,\n"
        + (f"{slower:.1f}% slower" if slower >= 0.05 else "no slowdown"),
        place,
        xytext=offset,
        textcoords="offset points",
        color=_SAVINGS,
        weight="bold",
        ha=ha,
        va=va,
    )


def title(frontier: Frontier) -> str:
    """Two lines that say what a figure is about."""
    profile = frontier.profile
    return f"{profile_title(profile.name, profile.metadata.source)}\n{label_job(frontier)}"


def label_job(frontier: Frontier) -> str:
    """Such as "1f1b, 4 stages, 8 microbatches, 4 GPUs"."""
    pipeline = frontier.pipeline
    gpus = pipeline.num_stages * frontier.gpus_per_stage * frontier.replicas
    return job_in_words(
        pipeline.schedule,
        pipeline.num_stages,
        pipeline.num_chunks,
        pipeline.num_microbatches,
        gpus,
    )


def profile_title(name: str, source: str | None) -> str:
    """A profile's name, cut to fit over a figure, and whether it is modelled."""
    cut = name if len(name) <= 44 else name[:43] + "…"
    return cut + (" (modelled)" if source == "modelled" else "")
