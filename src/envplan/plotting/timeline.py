"""A timeline as a figure: what each stage does when, at which clock, and the power over it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from envplan.plotting.frontier import profile_title, save_figure
from envplan.units import UW_PER_W, s_from_ns

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure

    from envplan.simulation import Slice, Timeline

__all__ = [
    "Colour",
    "colour_scale",
    "draw_bubbles",
    "draw_operations",
    "label_stages",
    "plot_timeline",
    "timeline_figure",
]

#: What the colour of an operation stands for: its clock, or what one GPU draws meanwhile.
Colour = Literal["frequency", "power"]

_STYLE: Final[Any] = {
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "hatch.linewidth": 0.6,
}
_COLOURS: Final = "cividis"  # in order of lightness, so it survives colour blindness and printing
_COLOUR_LABELS: Final = {"frequency": "SM clock (MHz)", "power": "One GPU (W)"}
_USABLE: Final[dict[str, Any]] = {"facecolor": "#D9F0E3", "edgecolor": "#4DA97A", "hatch": "///"}
_UNUSABLE: Final[dict[str, Any]] = {"facecolor": "0.95", "edgecolor": "0.72", "hatch": "..."}
_CRITICAL: Final = "#D55E00"
_CONSTANT: Final = "0.55"
_BAR: Final = 0.84
#: How high an operation stands in its row, as a share of it; all but these fill it.
_HEIGHTS: Final = {"forward": 0.62, "backward_weight": 0.8}
_HATCHED: Final = "backward_weight"  # too busy for a number
_WIDTH_IN: Final = 13.0
_ROW_IN: Final = 0.42
_LOW_ROW_IN: Final = 0.3  # where there are many
_MANY_STAGES: Final = 8
_MOST_EDGES: Final = 1500  # operations; white edges of more would hide what is in them
_POINTS_PER_DIGIT: Final = 4.4  # at the font size of microbatch numbers
_NUMBER_SIZE: Final = 6.5


def plot_timeline(
    timeline: Timeline,
    path: str | os.PathLike[str],
    *,
    before: Timeline | None = None,
    colour: Colour = "frequency",
) -> None:
    """Draw a timeline to a .png, .svg, .pdf or .html file, whole or not at all.

    Args:
        before: as for timeline_figure; on a page it is called maximum frequency.
        colour: likewise; on a page the reader chooses.

    Raises:
        InputError: the file cannot be written.
    """
    if Path(path).suffix.lower() == ".html":
        from envplan.plotting.page import save_page
        from envplan.plotting.report import timeline_page

        save_page(timeline_page(timeline, before), path)
        return
    save_figure(timeline_figure(timeline, before=before, colour=colour), path)


def timeline_figure(
    timeline: Timeline, *, before: Timeline | None = None, colour: Colour = "frequency"
) -> Figure:
    """The figure: a row of operations and bubbles for each stage, and the power of all GPUs.

    Args:
        before: another timeline, drawn above on the same time axis, such as that of maximum
            frequency.
        colour: what the colour of an operation stands for.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    shown = [timeline] if before is None else [before, timeline]
    rows = [_height(len(each.stages)) for each in shown]
    span = max(each.sync_time for each in shown)
    with mpl.rc_context(_STYLE):
        figure = Figure(
            figsize=(_WIDTH_IN, 2.6 + sum(rows) + 0.5 * len(rows)),
            layout="constrained",
        )
        *charts, power = figure.subplots(len(shown) + 1, 1, sharex=True, height_ratios=[*rows, 1.3])
        scale = colour_scale(shown, colour)
        for axes, each in zip(charts, shown, strict=True):
            draw_bubbles(axes, each)
            draw_operations(axes, each, scale, colour, span)
            label_stages(axes, each)
            axes.set_title(_title(each, last=each is timeline), loc="left")
        _draw_legend(charts[0], shown)
        figure.colorbar(scale, ax=charts, label=_COLOUR_LABELS[colour], pad=0.01, fraction=0.03)
        _draw_power(power, timeline, before)
        power.set_xlim(0, span)
        power.set_xlabel("Time (s)")
    return figure


def _height(stages: int) -> float:
    """Inches of the rows of so many stages."""
    return max(3 * _ROW_IN, stages * (_LOW_ROW_IN if stages > _MANY_STAGES else _ROW_IN))


def colour_scale(shown: Sequence[Timeline], colour: Colour) -> ScalarMappable:
    """One scale for all timelines drawn."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    values = [
        _value(part, colour)
        for each in shown
        for timed in each.operations
        for part in timed.slices
        if part.frequency_mhz
    ] or [0.0]
    low, high = min(values), max(values)
    return ScalarMappable(Normalize(low, high if high > low else low + 1), colormaps[_COLOURS])


def _value(part: Slice, colour: Colour) -> float:
    if colour == "frequency":
        return float(part.frequency_mhz)
    return part.energy_fj / ((part.finish_ns - part.start_ns) * UW_PER_W)


def draw_operations(
    axes: Axes, timeline: Timeline, scale: ScalarMappable, colour: Colour, span: float
) -> None:
    """Bars; those on the critical path are outlined, and microbatches numbered where they fit.

    Args:
        scale: gives colours, see colour_scale.
        span: s that the axes show, where they are as wide as a figure of our own.
    """
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    path = set(timeline.critical_path)
    edged = len(timeline.operations) <= _MOST_EDGES
    bars: dict[str, list[Rectangle]] = {}
    fills: dict[str, list[Any]] = {}
    outlines: list[Rectangle] = []
    parts = [part for timed in timeline.operations for part in timed.slices]
    shades = iter(scale.to_rgba(np.array([_value(part, colour) for part in parts])))
    for index, timed in enumerate(timeline.operations):
        kind, stage = timed.operation.instruction, timed.operation.stage
        height = _BAR * _HEIGHTS.get(kind, 1.0)
        bottom = stage + _BAR / 2 - height
        for part in timed.slices:
            begin, width = s_from_ns(part.start_ns), s_from_ns(part.finish_ns - part.start_ns)
            shade = next(shades)
            fill = shade if part.frequency_mhz else _CONSTANT
            bars.setdefault(kind, []).append(Rectangle((begin, bottom), width, height))
            fills.setdefault(kind, []).append(fill)
        begin, width = s_from_ns(timed.start_ns), s_from_ns(timed.time_ns)
        if index in path:
            outlines.append(Rectangle((begin, bottom), width, height))
        number = str(timed.operation.microbatch)
        if kind != _HATCHED and _fits(number, width, span):
            axes.text(
                begin + width / 2,
                bottom + height / 2,
                number,
                fontsize=_NUMBER_SIZE,
                ha="center",
                va="center_baseline",
                color=_ink(fills[kind][-1]),
                clip_on=True,
                zorder=4,
            )
    for kind, patches in bars.items():
        axes.add_collection(
            PatchCollection(
                patches,
                facecolor=fills[kind],
                edgecolor="white" if edged else "none",
                linewidth=0.5 if edged else 0,
                hatch="xxxx" if kind == _HATCHED else None,
                zorder=2,
            )
        )
    axes.add_collection(
        PatchCollection(
            outlines,
            facecolor="none",
            edgecolor=_CRITICAL,
            linewidth=1.5 if edged else 0.7,
            zorder=3,
        )
    )


def _fits(number: str, width: float, span: float) -> bool:
    points = width / span * _WIDTH_IN * 72 * 0.85  # the axes' share of the figure
    return points >= _POINTS_PER_DIGIT * len(number) + 2


def _ink(fill: Any) -> str:
    """Black or white, whichever is legible on a colour."""
    from matplotlib.colors import to_rgb

    red, green, blue = to_rgb(fill)
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.45 else "white"


def draw_bubbles(axes: Axes, timeline: Timeline) -> None:
    """What no operation fills, hatched: usable or not."""
    for usable, look in ((True, _USABLE), (False, _UNUSABLE)):
        for stage in range(len(timeline.stages)):
            spans = [
                (s_from_ns(bubble.start_ns), s_from_ns(bubble.finish_ns - bubble.start_ns))
                for bubble in timeline.bubbles
                if bubble.stage == stage and bubble.usable == usable
            ]
            axes.broken_barh(spans, (stage - _BAR / 2, _BAR), linewidth=0, zorder=1, **look)


def label_stages(axes: Axes, timeline: Timeline) -> None:
    """A row for each stage, the first on top."""
    rows = len(timeline.stages)
    axes.set_yticks(range(rows), [f"stage {stage}" for stage in range(rows)])
    axes.set_ylim(rows - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)


def _draw_legend(axes: Axes, shown: Sequence[Timeline]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    kinds = {timed.operation.instruction for each in shown for timed in each.operations}
    handles: list[Line2D | Patch] = []
    if "forward" in kinds:
        handles.append(Line2D([], [], color="0.4", linewidth=4, label="forward (low)"))
    if kinds & {"backward", "backward_input"}:
        handles.append(Patch(color="0.4", label="backward (high)"))
    if _HATCHED in kinds:
        handles.append(
            Patch(facecolor="0.4", edgecolor="white", hatch="xxxx", label="weight gradient")
        )
    handles += [
        Patch(**_USABLE, linewidth=0, label="usable bubble"),
        Patch(**_UNUSABLE, linewidth=0, label="unusable bubble"),
        Patch(facecolor="none", edgecolor=_CRITICAL, linewidth=1.5, label="critical path"),
    ]
    assert axes.figure is not None
    axes.figure.legend(
        handles=handles, loc="outside upper right", ncols=len(handles), frameon=False
    )


def _draw_power(axes: Axes, timeline: Timeline, before: Timeline | None) -> None:
    peak = max(each.peak_power for each in (timeline, before) if each is not None)
    scale, unit = (1e3, "kW") if peak >= 1e4 else (1.0, "W")
    if before is not None:
        times, watts = before.power
        label = f"maximum frequency, average {before.average_power / scale:.4g} {unit}"
        _stairs(axes, times, watts / scale, label, color="0.35", linewidth=0.8)
    times, watts = timeline.power
    label = f"{'plan, ' if before else ''}average {timeline.average_power / scale:.4g} {unit}"
    _stairs(axes, times, watts / scale, label, fill=True, color="#56B4E9", alpha=0.7)
    axes.set_ylim(0, 1.35 * peak / scale or 1.0)
    axes.set_ylabel(f"All GPUs ({unit})")
    axes.legend(loc="upper right", ncols=2, frameon=False)


def _stairs(axes: Axes, times: Any, watts: Any, label: str, **look: Any) -> None:
    axes.stairs(watts, [s_from_ns(time) for time in times.tolist()], label=label, **look)


def _title(timeline: Timeline, *, last: bool) -> str:
    """Such as "a40-gpt3 (modelled), planner frontier: 14.2 s, 12.3 kJ"; short on all but the last
    chart."""
    from envplan.plotting.frontier import energy_unit

    scale, unit = energy_unit(timeline.energy)
    result = f"{timeline.iteration_time:.4g} s, {timeline.energy / scale:.5g} {unit}"
    planner = timeline.plan.planner.replace("_", " ").replace("max ", "maximum ")
    if not last:
        return f"{planner}: {result}"
    reference = timeline.plan.profile
    return f"{profile_title(reference.name, reference.source)}, planner {planner}: {result}"
