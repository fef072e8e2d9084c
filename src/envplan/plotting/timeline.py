"""A timeline as a figure: what each stage does when, at which clock, and the power over it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from envplan.plotting.figures import (
    bars,
    figure,
    in_unit,
    ink,
    rows_in_time,
    savings_words,
    title,
    unit_of,
)
from envplan.units import NS_PER_S

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from envplan.simulation import Timeline

_COLOURS: Final = "cividis"  # in order of lightness, so it survives colour blindness and printing
_USABLE: Final[dict[str, Any]] = {"facecolor": "#D9F0E3", "edgecolor": "#4DA97A", "hatch": "///"}
_UNUSABLE: Final[dict[str, Any]] = {"facecolor": "0.93"}
_CRITICAL: Final = "#D55E00"
_CONSTANT: Final = "0.55"
_BAR: Final = 0.84
#: How high an operation stands in its row, as a share of it; all but these fill it.
_HEIGHTS: Final = {"forward": 0.62, "backward_weight": 0.8}
_HATCHED: Final = "backward_weight"  # too busy for a number
_WEIGHT_HATCH: Final = "\\\\\\\\"
_FONT: Final = 11
_WIDTH_IN: Final = 13.0
_AXES_SHARE: Final = 0.83  # of the figure's width
_MOST_DRAWN: Final = 5000  # operations; of more the first ones are
_FIRST: Final = 1600
_MOST_EDGES: Final = 1500  # operations; white edges of more would hide what is in them
_DIGIT: Final = 0.66  # width of a digit, in sizes of its font
_SUBSCRIPT: Final = 0.65  # of that
_LEAST_NUMBER: Final = 6.5
_LARGEST_NUMBER: Final = 10.0
_SUBSCRIPTS: Final = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")


def timeline_figure(timeline: Timeline, *, before: Timeline | None = None) -> Figure:
    """The figure: a row of operations and bubbles for each stage, and the power of all GPUs.

    Of a timeline with very many operations it shows the first ones, and says so.

    Args:
        before: another timeline, drawn above on the same time axis, such as that of maximum
            frequency.
    """
    shown = [timeline] if before is None else [before, timeline]
    # Rows are lower where there are many.
    stages = [len(each.stages) for each in shown]
    heights = [max(1.26, count * (0.3 if count > 8 else 0.42)) for count in stages]
    span, about = max(each.sync_time for each in shown), title(timeline).replace("\n", ": ")
    if (most := max(len(each.operations) for each in shown)) > _MOST_DRAWN:
        part = span * _FIRST / most
        about += f"\nthe first {part:.4g} s of {span:.4g} s; a page, .html, shows all"
        span = part
    with figure(_WIDTH_IN, 2.9 + sum(heights) + 0.5 * len(heights), _FONT) as drawn:
        *charts, power = drawn.subplots(
            len(heights) + 1, height_ratios=[*heights, 1.3], sharex=True
        ).tolist()
        all_drawn = [_Drawn(each, span) for each in shown]
        scale = _colour_scale(drawn, charts, all_drawn)
        for axes, one in zip(charts, all_drawn, strict=True):
            one.draw(axes, scale, _AXES_SHARE * _WIDTH_IN / span)
            rows_in_time(axes, [f"stage {use.stage}" for use in one.timeline.stages], (0.0, span))
            axes.set_title(_title(one.timeline, before), loc="left")
        _draw_legend(drawn, shown, about)
        _draw_power(power, shown)
        drawn.legend(*power.get_legend_handles_labels(), loc="outside lower left", ncols=2)
    return drawn


def _colour_scale(drawn: Figure, charts: Sequence[Axes], shown: Sequence[_Drawn]) -> ScalarMappable:
    """One scale of clocks for all timelines drawn, and a bar that shows it beside the charts; a
    single clock is a highest one."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    clocks = np.unique(np.concatenate([one.mhz[one.mhz > 0] for one in shown]))
    low, high = (clocks[0], clocks[-1]) if len(clocks) else (0.0, 0.0)
    scale = ScalarMappable(Normalize(low if low < high else high - 1, high), colormaps[_COLOURS])
    look: Any = {"label": "SM clock (MHz)", "pad": 0.01, "fraction": 0.03}
    single = clocks.tolist() if len(clocks) == 1 else None
    drawn.colorbar(scale, ax=charts, ticks=single, **look)
    return scale


class _Drawn:
    """A timeline as arrays of what operations do at one clock each, parts with clocks of their own
    included.

    Args:
        until: what starts later is left out, s.

    Attributes:
        mhz: each one's clock; 0 where it has none, (parts,).
    """

    def __init__(self, timeline: Timeline, until: float) -> None:
        self.timeline, self.until_ns = timeline, until * NS_PER_S
        rows = [
            (i, one.frequency_mhz, one.start_ns, one.finish_ns)
            for i, timed in enumerate(timeline.operations)
            for one in timed.slices
            if one.start_ns <= self.until_ns
        ]
        self.operation, self.mhz, begin_ns, end_ns = np.array(rows, np.int64).T
        operations = timeline.pipeline.operations
        self.kinds = np.array([op.instruction for op in operations])[self.operation]
        self.stages = np.array([op.stage for op in operations])[self.operation]
        self.begin, self.end = begin_ns / NS_PER_S, end_ns / NS_PER_S

    def draw(self, axes: Axes, scale: ScalarMappable, inches_per_s: float) -> None:
        """A row of bars and bubbles for each stage, the first on top.

        Bars on the critical path are outlined, and microbatches numbered where they fit.

        Args:
            scale: gives colours, see _colour_scale.
            inches_per_s: how wide a second is drawn.
        """
        few = len(self.mhz) <= _MOST_EDGES
        self._draw_bubbles(axes)
        edges: dict[str, Any] = {"edgecolor": "white", "linewidth": 0.5} if few else {}
        fills = scale.to_rgba(self.mhz)
        fills[self.mhz == 0] = (*(float(_CONSTANT),) * 3, 1.0)
        for kind in dict.fromkeys(self.kinds.tolist()):
            of_kind = np.flatnonzero(self.kinds == kind)
            hatch: Any = {"hatch": _WEIGHT_HATCH} if kind == _HATCHED else {}
            look = {"facecolor": fills[of_kind], "zorder": 2, **edges, **hatch}
            boxes = self._bars(axes, of_kind, **look)
            if kind != _HATCHED:
                self._number(axes, of_kind, boxes, fills, inches_per_s)
        path = np.flatnonzero(np.isin(self.operation, self.timeline.critical_path))
        outlined: Any = {"facecolor": "none", "linewidth": 1.5 if few else 0.7, "zorder": 3}
        self._bars(axes, path, edgecolor=_CRITICAL, **outlined)

    def _bars(self, axes: Axes, parts: NDArray[Any], **look: Any) -> Any:
        heights = _BAR * np.array([_HEIGHTS.get(kind, 1.0) for kind in self.kinds[parts]])
        low = self.stages[parts] + _BAR / 2 - heights
        return bars(axes, self.begin[parts], self.end[parts], low, heights, **look)

    def _number(
        self, axes: Axes, parts: NDArray[Any], boxes: Any, fills: Any, inches_per_s: float
    ) -> None:
        """Microbatches, and where stages have several chunks those as subscripts, in one size: as
        large as the narrowest bar that has room for one allows."""
        labels = []
        for part, box in zip(parts.tolist(), boxes, strict=True):
            timed = self.timeline.operations[self.operation[part]]
            op = timed.operation
            chunk = str(op.chunk) if self.timeline.pipeline.num_chunks > 1 else ""
            number = f"{op.microbatch}{chunk.translate(_SUBSCRIPTS)}"
            digits = sum(1.0 if digit.isascii() else _SUBSCRIPT for digit in number)
            room = (timed.time_ns / NS_PER_S * inches_per_s * 72 - 2) / (_DIGIT * digits)
            if room >= _LEAST_NUMBER and len(timed.slices) == 1:
                labels.append((room, number, box.mean(axis=0).tolist(), ink(fills[part])))
        size = min([room for room, *_ in labels] + [_LARGEST_NUMBER])
        look: dict[str, Any] = {"ha": "center", "va": "center_baseline", "fontsize": size}
        for _, number, (x, y), colour in labels:
            axes.text(x, y, number, color=colour, clip_on=True, zorder=4, **look)

    def _draw_bubbles(self, axes: Axes) -> None:
        """What no operation fills, grey; of that what the one before it could fill, hatched."""
        gaps = [
            (gap.stage, gap.start_ns, gap.finish_ns, gap.usable_ns)
            for gap in self.timeline.bubbles
            if gap.start_ns <= self.until_ns
        ]
        columns: Any = np.array(gaps, np.int64).reshape(-1, 4).T
        stage, begin, end, usable = columns
        for look, until in ((_UNUSABLE, end), (_USABLE, begin + usable)):
            some = until > begin
            left, right, low = (
                begin[some] / NS_PER_S,
                until[some] / NS_PER_S,
                stage[some] - _BAR / 2,
            )
            bars(axes, left, right, low, _BAR, linewidth=0, zorder=1, **look)


def _draw_legend(drawn: Figure, shown: Sequence[Timeline], headline: str) -> None:
    """What heights, hatches and outlines stand for, in a line above the charts."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    kinds = {timed.operation.instruction for each in shown for timed in each.operations}
    weight: dict[str, Any] = {"edgecolor": "white", "hatch": _WEIGHT_HATCH}
    of_kinds: list[tuple[set[str], Line2D | Patch]] = [
        ({"forward"}, Line2D([], [], color="0.4", linewidth=4, label="forward (low)")),
        ({"backward", "backward_input"}, Patch(color="0.4", label="backward (high)")),
        ({_HATCHED}, Patch(facecolor="0.4", **weight, label="weight gradient")),
    ]
    handles = [
        *(handle for some, handle in of_kinds if kinds & some),
        Patch(**_USABLE, linewidth=0, label="waiting that slower clocks could fill"),
        Patch(**_UNUSABLE, linewidth=0, label="other waiting"),
        Patch(facecolor="none", edgecolor=_CRITICAL, linewidth=1.5, label="critical path"),
    ]
    if any(each.pipeline.num_chunks > 1 for each in shown):
        mark = Line2D([], [], marker="$3_1$", markersize=13, color="black", linestyle="none")
        mark.set_label("chunk 1")
        handles.append(mark)
    drawn.legend(
        handles=handles,
        title=headline,
        title_fontsize="large",
        alignment="left",
        loc="outside upper left",
        ncols=len(handles),
        columnspacing=1.4,
    )


def _draw_power(axes: Axes, shown: Sequence[Timeline]) -> None:
    peak = max(each.peak_power for each in shown)
    scale, unit = unit_of(peak, "W")
    before: dict[str, Any] = {"color": "0.35", "linewidth": 0.8}
    plan: dict[str, Any] = {"fill": True, "color": "#56B4E9", "alpha": 0.7}
    names = ("maximum frequency, ", "plan, ") if len(shown) > 1 else ("",)
    for each, name, look in zip(shown, names, (before, plan)[-len(shown) :], strict=True):
        times, watts = each.power
        label = f"{name}average {in_unit(each.average_power, 'W')}"
        axes.stairs(watts / scale, times / NS_PER_S, label=label, **look)
    axes.set_xlabel("Time (s)")
    axes.set_ylim(0, 1.1 * peak / scale or 1.0)
    axes.set_ylabel(f"All GPUs ({unit})")


def _title(timeline: Timeline, before: Timeline | None) -> str:
    """Such as "Plan (frontier): 14.20 s, 12.300 kJ, 11.2% saved, 1.0% slower".

    Args:
        before: what is saved and slower against it; None or the same: say neither.
    """
    planner = timeline.plan.planner.replace("_", " ")
    name = "Maximum frequency" if planner == "max frequency" else f"Plan ({planner})"
    parts = [f"{timeline.iteration_time:#.4g} s", in_unit(timeline.energy, "J")]
    if timeline.sync_time_ns > timeline.iteration_time_ns:
        parts.insert(1, f"all wait until {timeline.sync_time:#.4g} s")
    if before is not None and before is not timeline and before.energy_fj:
        slower = 100 * (timeline.iteration_time_ns / before.iteration_time_ns - 1)
        parts.append(savings_words(100 * (1 - timeline.energy_fj / before.energy_fj), slower))
    return f"{name}: {', '.join(parts)}"
