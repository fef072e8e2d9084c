"""A timeline as a figure: what each stage does when, at which clock, and the power over it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from envplan.plotting.figures import Boxes, draw_bars, figure, legible_ink, name_rows
from envplan.plotting.titles import job_title, savings_words, scale_to_unit, with_unit
from envplan.units import NS_PER_S

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from envplan.simulation.iteration import Timeline

#: Its colours are in order of lightness, so it survives colour blindness and printing.
_COLOUR_MAP: Final = "cividis"
_USABLE: Final[dict[str, Any]] = {"facecolor": "#D9F0E3", "edgecolor": "#4DA97A", "hatch": "///"}
_UNUSABLE: Final[dict[str, Any]] = {"facecolor": "0.93"}
_CRITICAL: Final = "#D55E00"
_NO_CLOCK: Final = 0.55  # grey of operations that control no clock
_BAR_HEIGHT: Final = 0.84  # of a row
#: Height of an operation as a share of its bar; all but these fill it.
_HEIGHTS: Final = {"forward": 0.62, "backward_weight": 0.8}
_HIGH: Final = {"backward", "backward_input"}
_HATCHED: Final = "backward_weight"  # too busy for a number
_WEIGHT_HATCH: Final = "\\\\\\\\"
_BASELINE_POWER: Final[dict[str, Any]] = {"color": "0.35", "linewidth": 0.8}
_PLAN_POWER: Final[dict[str, Any]] = {"fill": True, "color": "#56B4E9", "alpha": 0.7}

_FONT_SIZE: Final = 11
_POINTS_PER_IN: Final = 72
_WIDTH_IN: Final = 13.0
_ROW_IN: Final = 0.42
_LOW_ROW_IN: Final = 0.3  # where there are many
_MANY_STAGES: Final = 8
_POWER_IN: Final = 1.3
_AXES_SHARE: Final = 0.83  # of the figure's width
_MAX_EDGED: Final = 1500  # operations; white edges of more would hide what is in them
_MAX_DRAWN: Final = 5000  # operations; of more nobody could tell one from the next
_EXCERPT: Final = 800  # operations in each of the two parts that are drawn then

_MARGIN_POINTS: Final = 1.0  # on either side of a number
_DIGIT_WIDTH: Final = 0.66  # in sizes of its font
_SUBSCRIPT_WIDTH: Final = 0.65  # of a digit
_MIN_NUMBER_SIZE: Final = 6.5
_MAX_NUMBER_SIZE: Final = 10.0
_SUBSCRIPTS: Final = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")


def timeline_figure(timeline: Timeline, *, before: Timeline | None = None) -> Figure:
    """Draw a row of operations and bubbles for each stage, and the power of all GPUs below.

    Of a timeline with very many operations it shows the first and the last ones, and says so.

    Args:
        timeline: what to draw.
        before: another timeline, drawn above on the same time axis, such as that of maximum
            frequency.
    """
    timelines = [timeline] if before is None else [before, timeline]
    excerpt = _excerpt(timelines)
    row_heights_in = [_height_in(drawn) for drawn in timelines]
    height_in = 2.9 + sum(row_heights_in) + 0.5 * len(row_heights_in)
    with figure(_WIDTH_IN, height_in, _FONT_SIZE) as drawn:
        grid = drawn.subplots(
            len(timelines) + 1,
            len(excerpt.windows),
            height_ratios=[*row_heights_in, _POWER_IN],
            squeeze=False,
            sharex="col",
            sharey="row",
        )
        stage_charts, power_charts = grid[:-1], grid[-1]
        all_bars = [_Bars.of(shown) for shown in timelines]
        scale = _add_clock_scale(drawn, stage_charts.ravel().tolist(), all_bars)
        for charts, shown, bars in zip(stage_charts, timelines, all_bars, strict=True):
            for axes, window in zip(charts, excerpt.windows, strict=True):
                _StageRows(axes, shown, bars, window, scale, excerpt.inches_per_s).draw()
            charts[0].set_title(_title(shown, before), loc="left")
        headline = job_title(timeline).replace("\n", ": ") + excerpt.note
        _add_legend(drawn, timelines, headline)
        _draw_power_charts(power_charts, timelines, excerpt.windows)
        handles, labels = power_charts[0].get_legend_handles_labels()
        drawn.legend(handles, labels, loc="outside lower left", ncols=2)
    return drawn


def _height_in(timeline: Timeline) -> float:
    """Height of all rows of a timeline."""
    num_stages = timeline.pipeline.num_stages
    row_in = _LOW_ROW_IN if num_stages > _MANY_STAGES else _ROW_IN
    return max(3 * _ROW_IN, num_stages * row_in)


class _Window(NamedTuple):
    """A part of the time axis, s."""

    begin_s: float
    end_s: float

    def overlaps(self, begin_s: NDArray[Any] | float, end_s: NDArray[Any] | float) -> Any:
        """Whether something between two times is seen in it; elementwise for arrays."""
        return (begin_s < self.end_s) & (end_s > self.begin_s)


class _Excerpt(NamedTuple):
    """The parts of timelines that a figure shows, side by side.

    Attributes:
        windows: their times.
        note: what to say of operations between them; "" where all is shown.
    """

    windows: Sequence[_Window]
    note: str

    @property
    def inches_per_s(self) -> float:
        """Width of a second."""
        shown_s = sum(window.end_s - window.begin_s for window in self.windows)
        return _AXES_SHARE * _WIDTH_IN / shown_s


def _excerpt(timelines: Sequence[Timeline]) -> _Excerpt:
    """All of the timelines, or where they have too many operations their first and last part."""
    span_s = max(timeline.sync_time for timeline in timelines)
    num_operations = max(len(timeline.pipeline.operations) for timeline in timelines)
    if num_operations <= _MAX_DRAWN:
        return _Excerpt([_Window(0.0, span_s)], "")
    head_end_s = span_s * _EXCERPT / num_operations
    tail_begin_s = span_s - head_end_s
    runs = timelines[-1].operations
    num_hidden = sum(head_end_s < run.start_s < tail_begin_s for run in runs)
    note = (
        f"\n{num_hidden:,} of {len(runs):,} operations, between {head_end_s:.4g} s and "
        f"{tail_begin_s:.4g} s, are not shown"
    )
    return _Excerpt([_Window(0.0, head_end_s), _Window(tail_begin_s, span_s)], note)


@dataclass(frozen=True)
class _Bars:
    """The bars of a timeline: operations, or parts of them at one clock each; all (num_bars,).

    Attributes:
        operation: index of each one's operation.
        frequency_mhz: its clock; 0 where it has none.
        begin_s, end_s: when it begins and ends.
        instruction, stage: those of its operation.
        is_whole: whether it is all of its operation.
    """

    operation: NDArray[np.int64]
    frequency_mhz: NDArray[np.int64]
    begin_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    instruction: NDArray[np.str_]
    stage: NDArray[np.int64]
    is_whole: NDArray[np.bool_]

    @classmethod
    def of(cls, timeline: Timeline) -> _Bars:
        """A bar for each slice of a timeline."""
        slices, operations = timeline.slices, timeline.pipeline.operations
        operation = np.array([piece.operation for piece in slices], np.int64)
        frequency_mhz = np.array([piece.frequency_mhz for piece in slices], np.int64)
        begin_ns = np.array([piece.start_ns for piece in slices], np.int64)
        end_ns = np.array([piece.finish_ns for piece in slices], np.int64)
        instruction_of = np.array([op.instruction for op in operations])
        stage_of = np.array([op.stage for op in operations])
        num_slices_of = np.bincount(operation)
        return cls(
            operation=operation,
            frequency_mhz=frequency_mhz,
            begin_s=begin_ns / NS_PER_S,
            end_s=end_ns / NS_PER_S,
            instruction=instruction_of[operation],
            stage=stage_of[operation],
            is_whole=num_slices_of[operation] == 1,
        )


def _add_clock_scale(
    drawn: Figure, charts: Sequence[Axes], all_bars: Sequence[_Bars]
) -> ScalarMappable:
    """One scale of colours for the clocks of all timelines, shown as a bar beside the charts."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    frequencies_mhz = np.concatenate([bars.frequency_mhz for bars in all_bars])
    clocks_mhz = np.unique(frequencies_mhz[frequencies_mhz > 0]).tolist()
    low_mhz, high_mhz = 0, 0
    if clocks_mhz:
        low_mhz, high_mhz = clocks_mhz[0], clocks_mhz[-1]
    if low_mhz == high_mhz:
        low_mhz = high_mhz - 1  # a single clock has the colour of the highest
    scale = ScalarMappable(Normalize(low_mhz, high_mhz), colormaps[_COLOUR_MAP])
    ticks = clocks_mhz if len(clocks_mhz) == 1 else None
    drawn.colorbar(scale, ax=charts, ticks=ticks, label="SM clock (MHz)", pad=0.01, fraction=0.03)
    return scale


@dataclass(frozen=True)
class _StageRows:
    """The rows of a timeline's stages between two times: bars and bubbles, the first stage on top.

    Attributes:
        axes: the chart to draw them on.
        timeline: whose stages they are.
        bars: those of the timeline.
        window: what is shown.
        scale: gives clocks their colours.
        inches_per_s: width of a second.
    """

    axes: Axes
    timeline: Timeline
    bars: _Bars
    window: _Window
    scale: ScalarMappable
    inches_per_s: float

    def draw(self) -> None:
        """Draw bubbles, bars with the numbers of their microbatches, and the critical path."""
        self._draw_bubbles()
        visible = np.flatnonzero(self.window.overlaps(self.bars.begin_s, self.bars.end_s))
        has_edges = len(visible) <= _MAX_EDGED
        self._draw_operations(visible, has_edges=has_edges)
        critical = np.isin(self.bars.operation[visible], self.timeline.critical_path)
        self._draw_bars(
            visible[critical],
            edgecolor=_CRITICAL,
            facecolor="none",
            linewidth=1.5 if has_edges else 0.7,
            zorder=3,
        )
        names = [f"stage {stage}" for stage in range(self.timeline.pipeline.num_stages)]
        name_rows(self.axes, names, self.window.begin_s, self.window.end_s)

    def _draw_operations(self, visible: NDArray[np.intp], *, has_edges: bool) -> None:
        """Draw the visible bars, instruction by instruction, in the colours of their clocks."""
        look: dict[str, Any] = {"zorder": 2}
        if has_edges:
            look |= {"edgecolor": "white", "linewidth": 0.5}
        fills = self._fills()
        for instruction in dict.fromkeys(self.bars.instruction.tolist()):
            bars = visible[self.bars.instruction[visible] == instruction]
            if instruction == _HATCHED:
                self._draw_bars(bars, facecolor=fills[bars], hatch=_WEIGHT_HATCH, **look)
            else:
                boxes = self._draw_bars(bars, facecolor=fills[bars], **look)
                self._draw_numbers(bars, boxes, fills)

    def _fills(self) -> NDArray[np.float64]:
        """The colour of each bar, (num_bars, 4)."""
        fills: NDArray[np.float64] = self.scale.to_rgba(self.bars.frequency_mhz)
        fills[self.bars.frequency_mhz == 0] = (_NO_CLOCK, _NO_CLOCK, _NO_CLOCK, 1.0)
        return fills

    def _draw_bars(self, indices: NDArray[np.intp], **look: Any) -> Boxes:
        """Draw some of the bars as high as their instructions are."""
        shares = [_HEIGHTS.get(name, 1.0) for name in self.bars.instruction[indices].tolist()]
        heights = _BAR_HEIGHT * np.array(shares)
        low = self.bars.stage[indices] + _BAR_HEIGHT / 2 - heights
        begin_s, end_s = self.bars.begin_s[indices], self.bars.end_s[indices]
        return draw_bars(self.axes, begin_s, end_s, low, heights, **look)

    def _draw_numbers(
        self, indices: NDArray[np.intp], boxes: Boxes, fills: NDArray[np.float64]
    ) -> None:
        """Number bars by microbatch, with chunks as subscripts where stages have several.

        All have one size: as large as the narrowest bar that has room for one allows.
        """
        labels = list(self._labels(indices, boxes, fills))
        size = min([_MAX_NUMBER_SIZE, *(label.max_size for label in labels)])
        for label in labels:
            self.axes.text(
                label.x,
                label.y,
                label.text,
                color=label.colour,
                fontsize=size,
                ha="center",
                va="center_baseline",
                clip_on=True,
                zorder=4,
            )

    def _labels(
        self, indices: NDArray[np.intp], boxes: Boxes, fills: NDArray[np.float64]
    ) -> Iterator[_Label]:
        """The labels of the bars that are whole operations and have room for one."""
        bars = self.bars
        for bar, box in zip(indices.tolist(), boxes, strict=True):
            if not bars.is_whole[bar]:
                continue
            text = self._number(bars.operation[bar])
            width_in = (bars.end_s[bar] - bars.begin_s[bar]) * self.inches_per_s
            inner_width = width_in * _POINTS_PER_IN - 2 * _MARGIN_POINTS
            max_size = inner_width / (_DIGIT_WIDTH * _width_in_digits(text))
            if max_size >= _MIN_NUMBER_SIZE:
                x, y = box.mean(axis=0).tolist()
                yield _Label(text, x, y, max_size, legible_ink(fills[bar]))

    def _number(self, index: int) -> str:
        """The microbatch of an operation; with its chunk as a subscript where there are several."""
        pipeline = self.timeline.pipeline
        operation = pipeline.operations[index]
        if pipeline.num_chunks == 1:
            return str(operation.microbatch)
        return f"{operation.microbatch}{str(operation.chunk).translate(_SUBSCRIPTS)}"

    def _draw_bubbles(self) -> None:
        """Draw bubbles grey, and hatch what the operation before each could fill of it."""
        bubbles: list[_Gap] = []
        usable: list[_Gap] = []
        for stage in self.timeline.stages:
            for bubble in stage.bubbles:
                if not self.window.overlaps(bubble.start_s, bubble.finish_s):
                    continue
                bubbles.append(_Gap(stage.stage, bubble.start_s, bubble.finish_s))
                if bubble.could_fill_s > 0:
                    filled_until_s = bubble.start_s + bubble.could_fill_s
                    usable.append(_Gap(stage.stage, bubble.start_s, filled_until_s))
        self._draw_gaps(bubbles, _UNUSABLE)
        self._draw_gaps(usable, _USABLE)

    def _draw_gaps(self, gaps: Sequence[_Gap], look: dict[str, Any]) -> None:
        """Draw gaps of all stages with one look."""
        if gaps:
            stage, begin_s, end_s = np.array(gaps).T
            low = stage - _BAR_HEIGHT / 2
            draw_bars(self.axes, begin_s, end_s, low, _BAR_HEIGHT, linewidth=0, zorder=1, **look)


class _Gap(NamedTuple):
    """A time in which a stage waits."""

    stage: int
    begin_s: float
    end_s: float


class _Label(NamedTuple):
    """A number in the middle of a bar.

    Attributes:
        text: the number.
        x, y: where its middle is, in data coordinates.
        max_size: the largest size of font for which the bar has room.
        colour: legible on the bar.
    """

    text: str
    x: float
    y: float
    max_size: float
    colour: str


def _width_in_digits(text: str) -> float:
    """The width of a number, in widths of a digit."""
    return sum(1.0 if digit.isascii() else _SUBSCRIPT_WIDTH for digit in text)


def _add_legend(drawn: Figure, timelines: Sequence[Timeline], headline: str) -> None:
    """Say in a line above the charts what heights, hatches and outlines stand for."""
    handles = list(_legend_handles(timelines))
    drawn.legend(
        handles=handles,
        title=headline,
        title_fontsize="large",
        alignment="left",
        loc="outside upper left",
        ncols=len(handles),
        columnspacing=1.4,
    )


def _legend_handles(timelines: Sequence[Timeline]) -> Iterator[Artist]:
    """The entries of the legend for the instructions that there are, waiting and critical path."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    pipelines = [timeline.pipeline for timeline in timelines]
    instructions: set[str] = set()
    for pipeline in pipelines:
        instructions.update(operation.instruction for operation in pipeline.operations)
    if "forward" in instructions:
        yield Line2D([], [], color="0.4", linewidth=4, label="forward (low)")
    if instructions & _HIGH:
        yield Patch(color="0.4", label="backward (high)")
    if _HATCHED in instructions:
        yield Patch(
            facecolor="0.4", edgecolor="white", hatch=_WEIGHT_HATCH, label="weight gradient"
        )
    yield Patch(**_USABLE, linewidth=0, label="waiting that slower clocks could fill")
    yield Patch(**_UNUSABLE, linewidth=0, label="other waiting")
    yield Patch(facecolor="none", edgecolor=_CRITICAL, linewidth=1.5, label="critical path")
    if any(pipeline.num_chunks > 1 for pipeline in pipelines):
        yield Line2D(
            [], [], marker="$3_1$", markersize=13, color="black", linestyle="none", label="chunk 1"
        )


def _draw_power_charts(
    charts: Sequence[Axes], timelines: Sequence[Timeline], windows: Sequence[_Window]
) -> None:
    """Draw the power of all GPUs, a chart for each window."""
    peak_w = max(timeline.peak_power for timeline in timelines)
    scale, unit = scale_to_unit(peak_w, "W")
    for axes, window in zip(charts, windows, strict=True):
        if len(timelines) == 1:
            _draw_power(axes, timelines[0], window, scale, "", _PLAN_POWER)
        else:
            baseline, plan = timelines
            _draw_power(axes, baseline, window, scale, "maximum frequency, ", _BASELINE_POWER)
            _draw_power(axes, plan, window, scale, "plan, ", _PLAN_POWER)
        axes.set_xlabel("Time (s)")
    charts[0].set_ylim(0, 1.1 * peak_w / scale or 1.0)  # 1 where nothing draws power
    charts[0].set_ylabel(f"All GPUs ({unit})")


def _draw_power(
    axes: Axes,
    timeline: Timeline,
    window: _Window,
    scale: float,
    name: str,
    look: dict[str, Any],
) -> None:
    """Draw the power of a timeline's GPUs in a window, divided by a scale."""
    times_s = timeline.power.times_ns / NS_PER_S
    # Step k lasts from time k to time k + 1.
    first_step = max(0, int(np.searchsorted(times_s, window.begin_s, side="right")) - 1)
    end_step = int(np.searchsorted(times_s, window.end_s))
    power = timeline.power.power_w[first_step:end_step] / scale
    edges_s = times_s[first_step : end_step + 1]
    label = f"{name}average {with_unit(timeline.average_power, 'W')}"
    axes.stairs(power, edges_s, label=label, **look)


def _title(timeline: Timeline, before: Timeline | None) -> str:
    """The title of a timeline: "Plan (frontier): 14.20 s, 12.300 kJ, 11.2% saved, 1.0% slower".

    Args:
        timeline: whose title it is.
        before: says what is saved and slower against it; None or the same: neither.
    """
    planner = timeline.plan.planner.replace("_", " ")
    name = "Maximum frequency" if planner == "max frequency" else f"Plan ({planner})"
    parts = [f"{timeline.iteration_time:#.4g} s"]
    if timeline.sync_time_ns > timeline.iteration_time_ns:
        parts.append(f"all wait until {timeline.sync_time:#.4g} s")
    parts.append(with_unit(timeline.energy, "J"))
    if before is not None and before is not timeline and before.energy_10fj:
        saved_percent = 100 * (1 - timeline.energy_10fj / before.energy_10fj)
        slower_percent = 100 * (timeline.iteration_time_ns / before.iteration_time_ns - 1)
        parts.append(savings_words(saved_percent, slower_percent))
    return f"{name}: {', '.join(parts)}"
