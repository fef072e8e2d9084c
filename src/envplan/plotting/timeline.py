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

    from envplan.simulation.iteration import Timeline

Window = tuple[float, float]

_COLOURS: Final = "cividis"  # in order of lightness, so it survives colour blindness and printing
_USABLE: Final[dict[str, Any]] = {"facecolor": "#D9F0E3", "edgecolor": "#4DA97A", "hatch": "///"}
_UNUSABLE: Final[dict[str, Any]] = {"facecolor": "0.93"}
_CRITICAL: Final = "#D55E00"
_CONSTANT: Final = "0.55"
_BAR: Final = 0.84
#: How high an operation stands in its row, as a share of it; all but these fill it.
_HEIGHTS: Final = {"forward": 0.62, "backward_weight": 0.8}
_HIGH: Final = {"backward", "backward_input"}
_HATCHED: Final = "backward_weight"  # too busy for a number
_WEIGHT_HATCH: Final = "\\\\\\\\"
_FONT: Final = 11
_WIDTH_IN: Final = 13.0
_ROW_IN: Final = 0.42
_LOW_ROW_IN: Final = 0.3  # where there are many
_MANY_STAGES: Final = 8
_AXES_SHARE: Final = 0.83  # of the figure's width
_MOST_EDGES: Final = 1500  # operations; white edges of more would hide what is in them
_MOST_DRAWN: Final = 5000  # operations; of more nobody could tell one from the next
_WINDOW: Final = 800  # operations of such that the first and the last part show
_DIGIT: Final = 0.66  # width of a digit, in sizes of its font
_SUBSCRIPT: Final = 0.65  # of that
_LEAST_NUMBER: Final = 6.5
_LARGEST_NUMBER: Final = 10.0
_SUBSCRIPTS: Final = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")


def timeline_figure(timeline: Timeline, *, before: Timeline | None = None) -> Figure:
    """The figure: a row of operations and bubbles for each stage, and the power of all GPUs.

    Of a timeline with very many operations it shows the first and the last ones, and says so.

    Args:
        before: another timeline, drawn above on the same time axis, such as that of maximum
            frequency.
    """
    shown = [timeline] if before is None else [before, timeline]
    stages = [len(each.stages) for each in shown]
    low = [_LOW_ROW_IN if count > _MANY_STAGES else _ROW_IN for count in stages]
    rows = [max(3 * _ROW_IN, count * inches) for count, inches in zip(stages, low, strict=True)]
    spans, about = _windows(shown)
    per_s = _AXES_SHARE * _WIDTH_IN / sum(end - begin for begin, end in spans)
    with figure(_WIDTH_IN, 2.9 + sum(rows) + 0.5 * len(rows), _FONT) as drawn:
        shape: Any = {"squeeze": False, "sharex": "col", "sharey": "row"}
        heights = [*rows, 1.3]
        grid = drawn.subplots(len(heights), len(spans), height_ratios=heights, **shape)
        all_drawn = [_Drawn(each) for each in shown]
        scale = _colour_scale(drawn, grid[:-1].ravel().tolist(), all_drawn)
        for axes_row, one in zip(grid, all_drawn, strict=False):
            for axes, span in zip(axes_row, spans, strict=True):
                one.draw(axes, scale, span, per_s)
            axes_row[0].set_title(_title(one.timeline, before), loc="left")
        _draw_legend(drawn, shown, title(timeline).replace("\n", ": ") + about)
        peak = max(each.peak_power for each in shown)
        watts, unit = unit_of(peak, "W")
        for axes, span in zip(grid[-1], spans, strict=True):
            _draw_power(axes, shown, watts, span)
            axes.set_xlabel("Time (s)")
        grid[-1][0].set_ylim(0, 1.1 * peak / watts or 1.0)
        grid[-1][0].set_ylabel(f"All GPUs ({unit})")
        handles, labels = grid[-1][0].get_legend_handles_labels()
        drawn.legend(handles, labels, loc="outside lower left", ncols=2)
    return drawn


def _windows(shown: Sequence[Timeline]) -> tuple[list[Window], str]:
    """Which parts of timelines a figure shows, s: all, or where there are too many operations as
    long a part at the start and at the end; and what to say of what the last one has between."""
    span = max(each.sync_time for each in shown)
    most = max(len(each.operations) for each in shown)
    if most <= _MOST_DRAWN:
        return [(0.0, span)], ""
    first, rows = span * _WINDOW / most, shown[-1].operations
    last = span - first
    count = sum(first < row.start_s < last for row in rows)
    between = f"between {first:.4g} s and {last:.4g} s, are not shown"
    return [(0.0, first), (last, span)], f"\n{count:,} of {len(rows):,} operations, {between}"


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

    Attributes:
        mhz: each one's clock; 0 where it has none, (parts,).
        whole: whether each is all of its operation, (parts,).
    """

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        columns = np.array(
            [(s.operation, s.frequency_mhz, s.start_ns, s.finish_ns) for s in timeline.slices],
            np.int64,
        ).T
        self.operation, self.mhz, begin_ns, end_ns = columns
        operations = timeline.pipeline.operations
        self.kinds = np.array([op.instruction for op in operations])[self.operation]
        self.stages = np.array([op.stage for op in operations])[self.operation]
        self.begin, self.end = begin_ns / NS_PER_S, end_ns / NS_PER_S
        self.whole = np.bincount(self.operation)[self.operation] == 1

    def draw(self, axes: Axes, scale: ScalarMappable, window: Window, inches_per_s: float) -> None:
        """A row of bars and bubbles for each stage, the first on top, between two times.

        Bars on the critical path are outlined, and microbatches numbered where they fit.

        Args:
            scale: gives colours, see _colour_scale.
            inches_per_s: how wide a second is drawn.
        """
        self._draw_bubbles(axes, window)
        seen = np.flatnonzero((self.begin < window[1]) & (self.end > window[0]))
        edged = len(seen) <= _MOST_EDGES
        edges: dict[str, Any] = {"edgecolor": "white", "linewidth": 0.5} if edged else {}
        fills = scale.to_rgba(self.mhz)
        fills[self.mhz == 0] = (*(float(_CONSTANT),) * 3, 1.0)
        for kind in dict.fromkeys(self.kinds.tolist()):
            of_kind = seen[self.kinds[seen] == kind]
            hatch = _WEIGHT_HATCH if kind == _HATCHED else None
            look = {"facecolor": fills[of_kind], "zorder": 2, "hatch": hatch, **edges}
            boxes = self._bars(axes, of_kind, **look)
            if kind != _HATCHED:
                self._number(axes, of_kind, boxes, fills, inches_per_s)
        path = seen[np.isin(self.operation[seen], self.timeline.critical_path)]
        outlined: Any = {"facecolor": "none", "linewidth": 1.5 if edged else 0.7, "zorder": 3}
        self._bars(axes, path, edgecolor=_CRITICAL, **outlined)
        rows_in_time(axes, [f"stage {k}" for k in range(len(self.timeline.stages))], window)

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
            op = self.timeline.pipeline.operations[self.operation[part]]
            chunk = str(op.chunk) if self.timeline.pipeline.num_chunks > 1 else ""
            number = f"{op.microbatch}{chunk.translate(_SUBSCRIPTS)}"
            digits = sum(1.0 if digit.isascii() else _SUBSCRIPT for digit in number)
            seconds = self.end[part] - self.begin[part]
            room = (seconds * inches_per_s * 72 - 2) / (_DIGIT * digits)
            if room >= _LEAST_NUMBER and self.whole[part]:
                labels.append((room, number, box.mean(axis=0).tolist(), ink(fills[part])))
        size = min([room for room, *_ in labels] + [_LARGEST_NUMBER])
        look: dict[str, Any] = {"ha": "center", "va": "center_baseline", "fontsize": size}
        for _, number, (x, y), colour in labels:
            axes.text(x, y, number, color=colour, clip_on=True, zorder=4, **look)

    def _draw_bubbles(self, axes: Axes, window: Window) -> None:
        """What no operation fills, grey; of that what the one before it could fill, hatched."""
        seen = [
            (use.stage, gap.start_s, gap.finish_s, gap.start_s + gap.could_fill_s)
            for use in self.timeline.stages
            for gap in use.bubbles
            if gap.start_s < window[1] and gap.finish_s > window[0]
        ]
        for look, end in ((_UNUSABLE, 2), (_USABLE, 3)):
            spans = np.array([(one[0], one[1], one[end]) for one in seen if one[end] > one[1]])
            if len(spans):
                low = spans[:, 0] - _BAR / 2
                bars(axes, spans[:, 1], spans[:, 2], low, _BAR, linewidth=0, zorder=1, **look)


def _draw_legend(drawn: Figure, shown: Sequence[Timeline], headline: str) -> None:
    """What heights, hatches and outlines stand for, in a line above the charts."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    kinds = {op.instruction for each in shown for op in each.pipeline.operations}
    weight: dict[str, Any] = {"edgecolor": "white", "hatch": _WEIGHT_HATCH}
    subscript: Any = {"marker": "$3_1$", "markersize": 13, "color": "black", "linestyle": "none"}
    known: list[tuple[bool, Line2D | Patch]] = [
        ("forward" in kinds, Line2D([], [], color="0.4", linewidth=4, label="forward (low)")),
        (bool(kinds & _HIGH), Patch(color="0.4", label="backward (high)")),
        (_HATCHED in kinds, Patch(facecolor="0.4", **weight, label="weight gradient")),
        (True, Patch(**_USABLE, linewidth=0, label="waiting that slower clocks could fill")),
        (True, Patch(**_UNUSABLE, linewidth=0, label="other waiting")),
        (True, Patch(fc="none", ec=_CRITICAL, linewidth=1.5, label="critical path")),
        (
            any(each.pipeline.num_chunks > 1 for each in shown),
            Line2D([], [], label="chunk 1", **subscript),
        ),
    ]
    handles = [handle for there, handle in known if there]
    drawn.legend(
        handles=handles,
        title=headline,
        title_fontsize="large",
        alignment="left",
        loc="outside upper left",
        ncols=len(handles),
        columnspacing=1.4,
    )


def _draw_power(axes: Axes, shown: Sequence[Timeline], scale: float, window: Window) -> None:
    before: dict[str, Any] = {"color": "0.35", "linewidth": 0.8}
    plan: dict[str, Any] = {"fill": True, "color": "#56B4E9", "alpha": 0.7}
    names = ("maximum frequency, ", "plan, ") if len(shown) > 1 else ("",)
    for each, name, look in zip(shown, names, (before, plan)[-len(shown) :], strict=True):
        times, watts = each.power
        seconds = times / NS_PER_S
        first = max(0, int(np.searchsorted(seconds, window[0], side="right")) - 1)
        last = int(np.searchsorted(seconds, window[1]))
        label = f"{name}average {in_unit(each.average_power, 'W')}"
        axes.stairs(watts[first:last] / scale, seconds[first : last + 1], label=label, **look)


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
