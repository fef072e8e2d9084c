"""The points of a sweep as a figure: energy saved against time lost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any, Final

from envplan._words import counted
from envplan.errors import InputError
from envplan.plotting.figures import OKABE_ITO, figure, label_axes, shortened
from envplan.plotting.frontier import LOOKS
from envplan.sweep.table import varying

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    from envplan.sweep import Row

_LINES: Final = ("-", "--", ":", "-.")
#: What tells jobs apart, in the order in which panels and then colours are given to it.
_TOLD_BY: Final = ("profile", "schedule", "microbatches", "chunks", "gpus_per_stage", "replicas")
_NOUNS: Final = {
    "microbatches": "microbatch",
    "chunks": "chunk",
    "gpus_per_stage": "GPU",
    "replicas": "replica",
}
_COLUMNS: Final = 3
_MOST_PANELS: Final = 12
_MOST_COLOURS: Final = 12
_PANEL_IN: Final = (4.2, 3.0)
_CHARACTERS_PER_IN: Final = 11


def sweep_figure(rows: Sequence[Row]) -> Figure:
    """A panel for each value of what varies first, such as profiles; colours tell the rest apart,
    marks planners; points of one job and planner are joined.

    Args:
        rows: those without a plan are left out.

    Raises:
        InputError: none has a plan.
    """
    rows = [row for row in rows if row.error is None]
    if not rows:
        raise InputError("there is nothing to draw: no point of the sweep has a plan")
    varied = [name for name in _TOLD_BY if name in varying(rows)]
    facet, *rest = varied or ["profile"]

    def kind(row: Row) -> str:
        """What tells a job apart from others in its panel."""
        parts = [_words(name, getattr(row, name)) for name in rest]
        return ", ".join([*parts, *(["recomputation"] if row.recompute else []), *row.conditions])

    panels = list(dict.fromkeys(getattr(row, facet) for row in rows))
    kinds = list(dict.fromkeys(map(kind, rows)))
    looks = ({"color": colour, "linestyle": line} for line in _LINES for colour in OKABE_ITO)
    styles = dict(zip(kinds, cycle(looks), strict=False))
    shown = panels[:_MOST_PANELS]
    columns = min(_COLUMNS, len(shown))
    lines = -(-len(shown) // columns)
    width = max(7.2, _PANEL_IN[0] * columns)
    with figure(width, 1.6 + _PANEL_IN[1] * lines, 10) as drawn:
        grid = drawn.subplots(lines, columns, squeeze=False, sharex=True, sharey=True).ravel()
        for axes, value in zip(grid, shown, strict=False):
            points: defaultdict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
            for row in rows:
                if getattr(row, facet) == value:
                    at = row.slowdown_percent or 0.0, row.savings_percent or 0.0
                    points[kind(row), row.planner].append(at)
            axes.axhline(0, color="0.6", linewidth=0.8)
            for (each, planner), line in points.items():
                look = {"markersize": 5, "linewidth": 1.2, **styles[each]}
                axes.plot(*zip(*sorted(line), strict=True), marker=LOOKS[planner].marker, **look)
            label_axes(axes, "", "", shortened(_words(facet, value)) if varied else "")
        for axes in grid[len(shown) :]:
            axes.set_visible(False)
        for axes in grid[max(0, len(shown) - columns) : len(shown)]:
            axes.set_xlabel("Slower than maximum frequency (%)")
            axes.tick_params(labelbottom=True)
        drawn.supylabel("Energy saved against maximum frequency (%)", fontsize=11)
        modelled = sum(row.source == "modelled" for row in rows)
        told = f" ({'' if modelled == len(rows) else f'{modelled} '}modelled)" if modelled else ""
        of = "" if "profile" in varied else f" of {shortened(rows[0].profile)}"
        left_out = f"; {len(shown)} of {len(panels)} shown" if len(shown) < len(panels) else ""
        drawn.suptitle(f"{len(rows)} plans{of}{told}{left_out}", fontsize=11)
        handles = _handles(styles, list(dict.fromkeys(row.planner for row in rows)))
        longest = max(len(str(handle.get_label())) for handle in handles) + 7
        beside = min(max(1, int(width * _CHARACTERS_PER_IN) // longest), len(handles))
        drawn.legend(handles=handles, loc="outside lower left", ncols=beside)
    return drawn


def _handles(styles: dict[str, Any], planners: Sequence[str]) -> list[Line2D]:
    """What stands in the legend: a line for each kind of job, a mark for each planner."""
    from matplotlib.lines import Line2D

    kinds = list(styles) if any(styles) else []
    handles = [
        Line2D([], [], linewidth=2.2, label=kind or "no conditions", **styles[kind])
        for kind in kinds[:_MOST_COLOURS]
    ]
    if len(kinds) > _MOST_COLOURS:
        words = f"and {len(kinds) - _MOST_COLOURS} more"
        handles.append(Line2D([], [], linestyle="none", label=words))
    for look in (LOOKS[planner] for planner in planners):
        if len(planners) > 1 or not kinds:
            mark: dict[str, Any] = {"marker": look.marker, "linestyle": "none", "color": "0.3"}
            handles.append(Line2D([], [], label=look.name, **mark))
    return handles


def _words(name: str, value: Any) -> str:
    return counted(value or 0, _NOUNS[name]) if name in _NOUNS else str(value)
