"""A timeline as a figure: what each stage does when, at which clock, and the power over it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

from envplan.plotting.frontier import save_figure
from envplan.units import s_from_ns

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from envplan.simulation import Timeline

__all__ = ["plot_timeline", "timeline_figure"]

_STYLE: Final[Any] = {
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
_COLOURS: Final = "cividis"  # in order of lightness, so it survives colour blindness and printing
_USABLE: Final = "#BFE3D0"
_UNUSABLE: Final = "0.90"
_CRITICAL: Final = "#D55E00"
_BAR: Final = 0.76
_MOST_OUTLINES: Final = 600  # operations; outlines of more would hide what is in them


def plot_timeline(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    """Draw a timeline to a .png, .svg or .pdf file, whole or not at all.

    Raises:
        InputError: the file cannot be written.
    """
    save_figure(timeline_figure(timeline), path)


def timeline_figure(timeline: Timeline) -> Figure:
    """The figure: a row of operations and bubbles for each stage, and the power of all GPUs."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    rows = len(timeline.stages)
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(12, 2.6 + 0.42 * rows), layout="constrained")
        stages, power = figure.subplots(
            2, 1, sharex=True, height_ratios=[max(1.6, 0.42 * rows), 1.0]
        )
        _draw_bubbles(stages, timeline)
        _draw_operations(stages, timeline)
        stages.set_yticks(range(rows), [f"stage {stage}" for stage in range(rows)])
        stages.set_ylim(rows - 0.5, -0.5)
        stages.set_title(_title(timeline), loc="left")
        _draw_power(power, timeline)
        power.set_xlim(0, timeline.sync_time)
        power.set_xlabel("Time (s)")
    return figure


def _draw_operations(axes: Axes, timeline: Timeline) -> None:
    """Bars coloured by clock; backwards are full height, forwards lower; the path is outlined."""
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    path = set(timeline.critical_path)
    outlined = len(timeline.operations) <= _MOST_OUTLINES
    bars, clocks, marked = [], [], []
    for index, timed in enumerate(timeline.operations):
        height = _BAR * (0.7 if timed.operation.instruction == "forward" else 1.0)
        for part in timed.slices:
            begin, width = s_from_ns(part.start_ns), s_from_ns(part.finish_ns - part.start_ns)
            corner = (begin, timed.operation.stage - height / 2)
            bars.append(Rectangle(corner, width, height))
            clocks.append(part.frequency_mhz)
        if index in path:
            begin, width = s_from_ns(timed.start_ns), s_from_ns(timed.time_ns)
            marked.append(Rectangle((begin, timed.operation.stage + _BAR / 2), width, 0.08))
    edge = {"edgecolor": "white", "linewidth": 0.5} if outlined else {"linewidth": 0}
    drawn = axes.add_collection(PatchCollection(bars, cmap=_COLOURS, **edge))
    drawn.set_array(clocks)
    axes.add_collection(PatchCollection(marked, facecolor=_CRITICAL, linewidth=0))
    assert axes.figure is not None
    axes.figure.colorbar(drawn, ax=axes, label="SM clock (MHz)", pad=0.01, aspect=12)


def _draw_bubbles(axes: Axes, timeline: Timeline) -> None:
    from matplotlib.patches import Patch

    for usable, colour in ((True, _USABLE), (False, _UNUSABLE)):
        for stage in range(len(timeline.stages)):
            spans = [
                (s_from_ns(bubble.start_ns), s_from_ns(bubble.finish_ns - bubble.start_ns))
                for bubble in timeline.bubbles
                if bubble.stage == stage and bubble.usable == usable
            ]
            axes.broken_barh(spans, (stage - _BAR / 2, _BAR), facecolors=colour)
    axes.legend(
        handles=[
            Patch(color=_USABLE, label="usable bubble"),
            Patch(color=_UNUSABLE, label="unusable bubble"),
            Patch(color=_CRITICAL, label="critical path"),
        ],
        loc="lower right",
        bbox_to_anchor=(1, 1),
        ncols=3,
        frameon=False,
    )


def _draw_power(axes: Axes, timeline: Timeline) -> None:
    times, watts = timeline.power
    seconds = [s_from_ns(time) for time in times.tolist()]
    scale, unit = (1e3, "kW") if timeline.peak_power >= 1e4 else (1.0, "W")
    axes.stairs(watts / scale, seconds, fill=True, color="#56B4E9", alpha=0.6)
    average = timeline.average_power / scale
    axes.axhline(average, color="black", linewidth=1, linestyle="--")
    axes.annotate(
        f"average {average:.4g} {unit}",
        (1, average),
        xycoords=("axes fraction", "data"),
        xytext=(-4, 4),
        textcoords="offset points",
        ha="right",
    )
    axes.set_ylim(0, 1.08 * timeline.peak_power / scale or 1.0)
    axes.set_ylabel(f"All GPUs ({unit})")


def _title(timeline: Timeline) -> str:
    reference = timeline.plan.profile
    name = reference.name if len(reference.name) <= 44 else reference.name[:43] + "…"
    modelled = " (modelled)" if reference.source == "modelled" else ""
    return f"{name}{modelled}, planner {timeline.plan.planner}"
