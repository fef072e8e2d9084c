"""A timeline as a figure: what each stage does when, at which clock, and the power over it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from envplan._words import job_in_words
from envplan.plotting.frontier import in_joules, ink, profile_title, save_figure
from envplan.units import UW_PER_W, s_from_ns

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure

    from envplan.simulation import Slice, TimedOperation, Timeline

__all__ = [
    "Colour",
    "colour_scale",
    "draw_bubbles",
    "draw_colour_bar",
    "draw_legend",
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
_WEIGHT_HATCH: Final = "\\\\\\\\"
_WIDTH_IN: Final = 13.0
_ROW_IN: Final = 0.42
_LOW_ROW_IN: Final = 0.3  # where there are many
_MANY_STAGES: Final = 8
_AXES_SHARE: Final = 0.85  # of the figure's width
_MOST_EDGES: Final = 1500  # operations; white edges of more would hide what is in them
_DIGIT: Final = 0.66  # width of a digit, in sizes of its font
_SUBSCRIPT: Final = 0.65  # of that
_LEAST_NUMBER: Final = 6.5
_LARGEST_NUMBER: Final = 10.0
_SUBSCRIPTS: Final = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")


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
    inches_per_s = _AXES_SHARE * _WIDTH_IN / span
    with mpl.rc_context(_STYLE):
        figure = Figure(
            figsize=(_WIDTH_IN, 2.9 + sum(rows) + 0.5 * len(rows)),
            layout="constrained",
        )
        *charts, power = figure.subplots(len(shown) + 1, 1, sharex=True, height_ratios=[*rows, 1.3])
        scale = colour_scale(shown, colour)
        for axes, each in zip(charts, shown, strict=True):
            draw_bubbles(axes, each)
            draw_operations(axes, each, scale, colour, inches_per_s)
            label_stages(axes, each)
            axes.set_title(_title(each, before if each is timeline else None), loc="left")
        draw_legend(figure, shown, _headline(timeline))
        draw_colour_bar(figure, charts, scale, colour)
        _draw_power(power, timeline, before)
        power.set_xlim(0, span)
        power.set_xlabel("Time (s)")
    return figure


def _height(stages: int) -> float:
    """Inches of the rows of so many stages."""
    return max(3 * _ROW_IN, stages * (_LOW_ROW_IN if stages > _MANY_STAGES else _ROW_IN))


def colour_scale(shown: Sequence[Timeline], colour: Colour) -> ScalarMappable:
    """One scale for all timelines drawn; a single clock is a highest one."""
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
    scale = ScalarMappable(Normalize(low if low < high else high - 1, high), colormaps[_COLOURS])
    scale.set_array(sorted(set(values)))
    return scale


def draw_colour_bar(
    figure: Figure, charts: Sequence[Axes], scale: ScalarMappable, colour: Colour
) -> None:
    """What the colours of the charts stand for."""
    values = scale.get_array()
    assert values is not None
    single = values.tolist() if len(values) == 1 else None
    figure.colorbar(
        scale, ax=charts, label=_COLOUR_LABELS[colour], pad=0.01, fraction=0.03, ticks=single
    )


def _value(part: Slice, colour: Colour) -> float:
    if colour == "frequency":
        return float(part.frequency_mhz)
    return part.energy_fj / ((part.finish_ns - part.start_ns) * UW_PER_W)


def draw_operations(
    axes: Axes, timeline: Timeline, scale: ScalarMappable, colour: Colour, inches_per_s: float
) -> None:
    """Bars; those on the critical path are outlined, and microbatches numbered where they fit.

    Args:
        scale: gives colours, see colour_scale.
        inches_per_s: how wide a second is drawn.
    """
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    path = set(timeline.critical_path)
    edged = len(timeline.operations) <= _MOST_EDGES
    # By kind, and whether it is of a part: these have no edges, which would hide them.
    bars: dict[tuple[str, bool], list[Rectangle]] = {}
    fills: dict[tuple[str, bool], list[Any]] = {}
    outlines: list[Rectangle] = []
    sizes = _number_sizes(timeline, inches_per_s)
    parts = [part for timed in timeline.operations for part in timed.slices]
    shades = iter(scale.to_rgba(np.array([_value(part, colour) for part in parts])))
    for index, timed in enumerate(timeline.operations):
        kind, stage = timed.operation.instruction, timed.operation.stage
        height = _BAR * _HEIGHTS.get(kind, 1.0)
        bottom = stage + _BAR / 2 - height
        key = kind, bool(timed.slices[0].part)
        for part in timed.slices:
            begin, width = s_from_ns(part.start_ns), s_from_ns(part.finish_ns - part.start_ns)
            shade = next(shades)
            fill = shade if part.frequency_mhz else _CONSTANT
            bars.setdefault(key, []).append(Rectangle((begin, bottom), width, height))
            fills.setdefault(key, []).append(fill)
        begin, width = s_from_ns(timed.start_ns), s_from_ns(timed.time_ns)
        if index in path:
            outlines.append(Rectangle((begin, bottom), width, height))
        number = _number(timed, timeline)
        if kind in sizes and _room(number, width, inches_per_s) >= _LEAST_NUMBER:
            axes.text(
                begin + width / 2,
                bottom + height / 2,
                number,
                fontsize=sizes[kind],
                ha="center",
                va="center_baseline",
                color=ink(fills[key][-1 - len(timed.slices) // 2]),
                clip_on=True,
                zorder=4,
            )
    for (kind, of_parts), patches in bars.items():
        axes.add_collection(
            PatchCollection(
                patches,
                facecolor=fills[kind, of_parts],
                edgecolor="white" if edged and not of_parts else "none",
                linewidth=0.5 if edged and not of_parts else 0,
                hatch=_WEIGHT_HATCH if kind == _HATCHED else None,
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


def _number(timed: TimedOperation, timeline: Timeline) -> str:
    """The microbatch, and where stages have several chunks the chunk as a subscript."""
    chunk = str(timed.operation.chunk) if timeline.pipeline.num_chunks > 1 else ""
    return f"{timed.operation.microbatch}{chunk.translate(_SUBSCRIPTS)}"


def _number_sizes(timeline: Timeline, inches_per_s: float) -> dict[str, float]:
    """For each kind of operation the size of its numbers: as large as the narrowest one allows."""
    sizes: dict[str, float] = {}
    for timed in timeline.operations:
        kind = timed.operation.instruction
        room = _room(_number(timed, timeline), s_from_ns(timed.time_ns), inches_per_s)
        if kind != _HATCHED and room >= _LEAST_NUMBER:
            sizes[kind] = min(sizes.get(kind, _LARGEST_NUMBER), room)
    return sizes


def _room(number: str, width: float, inches_per_s: float) -> float:
    """The largest font in which a number fits into a bar, with a point left on either side."""
    digits = sum(1.0 if digit.isascii() else _SUBSCRIPT for digit in number)
    return (width * inches_per_s * 72 - 2) / (_DIGIT * digits)


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


def draw_legend(figure: Figure, shown: Sequence[Timeline], headline: str) -> None:
    """What heights, hatches and outlines stand for, in a line above the charts."""
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
            Patch(facecolor="0.4", edgecolor="white", hatch=_WEIGHT_HATCH, label="weight gradient")
        )
    handles += [
        Patch(**_USABLE, linewidth=0, label="usable bubble"),
        Patch(**_UNUSABLE, linewidth=0, label="unusable bubble"),
        Patch(facecolor="none", edgecolor=_CRITICAL, linewidth=1.5, label="critical path"),
    ]
    if any(each.pipeline.num_chunks > 1 for each in shown):
        mark = Line2D([], [], marker="$3_1$", markersize=13, color="black", linestyle="none")
        mark.set_label("chunk 1")
        handles.append(mark)
    figure.legend(
        handles=handles,
        title=headline,
        title_fontsize="large",
        alignment="left",
        loc="outside upper left",
        ncols=len(handles),
        frameon=False,
        columnspacing=1.4,
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


def _headline(timeline: Timeline) -> str:
    """The profile and the job."""
    reference, job = timeline.plan.profile, timeline.plan.job
    words = job_in_words(
        job.schedule, job.stages, job.chunks, job.microbatches, job.stages * job.num_gpus
    )
    return f"{profile_title(reference.name, reference.source)}: {words}"


def _title(timeline: Timeline, before: Timeline | None) -> str:
    """Such as "Plan (frontier): 14.20 s, 12.300 kJ, 11.2% saved, 1.0% slower".

    Args:
        before: what is saved and slower against it; None: say neither.
    """
    planner = timeline.plan.planner.replace("_", " ")
    name = "Maximum frequency" if planner == "max frequency" else f"Plan ({planner})"
    parts = [f"{timeline.iteration_time:#.4g} s", in_joules(timeline.energy)]
    if timeline.sync_time_ns > timeline.iteration_time_ns:
        parts.insert(1, f"all wait until {timeline.sync_time:#.4g} s")
    if before is not None and before.energy_fj and before.iteration_time_ns:
        slower = 100 * (timeline.iteration_time_ns / before.iteration_time_ns - 1)
        parts.append(f"{100 * (1 - timeline.energy_fj / before.energy_fj):.1f}% saved")
        parts.append(f"{slower:.1f}% slower" if slower >= 0.05 else "no slowdown")
    return f"{name}: {', '.join(parts)}"
