"""The points of a sweep as a figure: energy saved against time lost."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any, Final

from envplan._io.words import counted
from envplan.errors import InputError
from envplan.plotting.figures import OKABE_ITO, figure, label_axes, shortened
from envplan.plotting.frontier import LOOKS
from envplan.sweep.table import varying

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    from envplan.sweep import SweepRow

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


def sweep_figure(rows: Sequence[SweepRow]) -> Figure:
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

    def words(name: str, row: SweepRow) -> str:
        value = getattr(row, name)
        return counted(value or 0, _NOUNS[name]) if name in _NOUNS else str(value)

    # For each panel the points of each kind of job and planner.
    panels: dict[str, dict[tuple[str, str], list[tuple[float, float]]]] = {}
    for row in rows:
        told = [*(words(name, row) for name in rest), *["recomputation"] * row.recompute]
        lines = panels.setdefault(words(facet, row), {})
        line = lines.setdefault((", ".join([*told, *row.conditions]), row.planner), [])
        line.append((row.slowdown_percent or 0.0, row.savings_percent or 0.0))
    kinds = dict.fromkeys(kind for lines in panels.values() for kind, _ in lines)
    looks = ({"color": colour, "linestyle": line} for line in _LINES for colour in OKABE_ITO)
    styles: dict[str, Any] = dict(zip(kinds, cycle(looks), strict=False))
    shown = list(panels)[:_MOST_PANELS]
    columns = min(_COLUMNS, len(shown))
    height, width = -(-len(shown) // columns), max(7.2, _PANEL_IN[0] * columns)
    with figure(width, 1.6 + _PANEL_IN[1] * height, 10) as drawn:
        grid = drawn.subplots(height, columns, squeeze=False, sharex=True, sharey=True).ravel()
        for axes, name in zip(grid, shown, strict=False):
            axes.axhline(0, color="0.6", linewidth=0.8)
            for (kind, planner), line in panels[name].items():
                look = {"markersize": 5, "linewidth": 1.2, **styles[kind]}
                axes.plot(*zip(*sorted(line), strict=True), marker=LOOKS[planner].marker, **look)
            label_axes(axes, "", "", shortened(name) if varied else "")
        for axes in grid[len(shown) :]:
            axes.set_visible(False)
        for axes in grid[max(0, len(shown) - columns) : len(shown)]:
            axes.set_xlabel("Slower than maximum frequency (%)")
            axes.tick_params(labelbottom=True)
        drawn.supylabel("Energy saved against maximum frequency (%)", fontsize=11)
        modelled = sum(row.source == "modelled" for row in rows)
        said = f" ({'' if modelled == len(rows) else f'{modelled} '}modelled)" if modelled else ""
        of = "" if "profile" in varied else f" of {shortened(rows[0].profile)}"
        left_out = f"; {len(shown)} of {len(panels)} shown" if len(shown) < len(panels) else ""
        drawn.suptitle(f"{len(rows)} plans{of}{said}{left_out}", fontsize=11)
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
    for look in (LOOKS[planner] for planner in planners if len(planners) > 1 or not kinds):
        mark: dict[str, Any] = {"marker": look.marker, "linestyle": "none", "color": "0.3"}
        handles.append(Line2D([], [], label=look.name, **mark))
    return handles
