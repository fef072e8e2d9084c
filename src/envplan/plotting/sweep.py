"""The points of a sweep as a figure: energy saved against time lost."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

from envplan._words import counted
from envplan.errors import InputError
from envplan.plotting.frontier import STYLE, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from envplan.sweep import Row

__all__ = ["plot_sweep", "sweep_figure"]

# Okabe and Ito's palette, which colour-blind readers can tell apart.
_COLORS: Final = ("#0072B2", "#E69F00", "#007A5A", "#D55E00", "#CC79A7", "#56B4E9", "#000000")
_LINES: Final = ("-", "--", ":", "-.")
_MARKS: Final = {
    "frontier": "o",
    "max_frequency": "X",
    "zeus_global": "s",
    "zeus_per_stage": "D",
    "envpipe": "^",
}
_MAX_NAMED: Final = 12
_LINE_IN: Final = 0.23  # of the legend
_CHARACTERS: Final = 106  # fit side by side under the axes
_HANDLE: Final = 7  # characters that a line or mark in the legend takes


def plot_sweep(rows: Sequence[Row], path: str | os.PathLike[str]) -> None:
    """Draw the rows that have a plan to a .png, .svg or .pdf file, whole or not at all.

    Raises:
        InputError: no row has a plan, or the file cannot be written.
    """
    drawn = [row for row in rows if row.error is None]
    if not drawn:
        raise InputError("there is nothing to draw: no point of the sweep has a plan", path=path)
    save_figure(sweep_figure(drawn), path)


def sweep_figure(rows: Sequence[Row]) -> Figure:
    """Colours and lines tell jobs apart, marks planners; points of one of each are joined.

    Args:
        rows: with plans, at least one.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    modelled = " (modelled)" if any(row.source == "modelled" for row in rows) else ""
    with mpl.rc_context(STYLE):
        figure = Figure(layout="constrained")
        axes = figure.add_subplot()
        entries, columns = _draw(axes, rows)
        lines = -(-entries // columns)
        figure.set_size_inches(9.6, 4.9 + _LINE_IN * lines)
        axes.axhline(0, color="0.6", linewidth=0.8)
        axes.set_xlabel("Slower than maximum frequency (%)")
        axes.set_ylabel("Energy saved against maximum frequency (%)")
        axes.set_title(f"{len(rows)} plans{modelled}", loc="left")
        axes.grid(color="0.92", linewidth=0.8)
        axes.set_axisbelow(True)
        figure.legend(loc="outside lower left", frameon=False, ncols=columns)
    return figure


def _draw(axes: Axes, rows: Sequence[Row]) -> tuple[int, int]:
    """Draws all rows.

    Returns:
        How many entries the legend has, and in how many columns they fit under the axes.
    """
    jobs = sorted({_job(row) for row in rows})
    styles = {job: _style(k) for k, job in enumerate(jobs)}
    names = _names(jobs)
    for (job, planner), group in groupby(sorted(rows, key=_series), key=_series):
        points = sorted((row.slowdown_percent or 0.0, row.savings_percent or 0.0) for row in group)
        axes.plot(
            [slower for slower, _ in points],
            [saved for _, saved in points],
            marker=_MARKS.get(planner, "v"),
            markersize=5,
            linewidth=1.2,
            **styles[job],
        )
    for job in jobs[:_MAX_NAMED]:
        axes.plot([], [], linewidth=2.2, label=names[job], **styles[job])
    if len(jobs) > _MAX_NAMED:
        axes.plot([], [], linestyle="none", label=f"and {len(jobs) - _MAX_NAMED} more")
    for planner in sorted({row.planner for row in rows}):
        mark = _MARKS.get(planner, "v")
        axes.plot([], [], mark, color="0.3", markersize=6, label=planner)
    _, labels = axes.get_legend_handles_labels()
    columns = max(1, _CHARACTERS // (max(map(len, labels)) + _HANDLE))
    return len(labels), min(columns, len(labels))


_Job = tuple[str, str, int, int, int, int, bool, str]


def _job(row: Row) -> _Job:
    return (
        row.profile,
        row.schedule or "",
        row.microbatches or 0,
        row.chunks,
        row.gpus_per_stage,
        row.replicas,
        row.recompute,
        ", ".join(row.conditions),
    )


def _series(row: Row) -> tuple[_Job, str]:
    return _job(row), row.planner


def _style(k: int) -> dict[str, Any]:
    return {
        "color": _COLORS[k % len(_COLORS)],
        "linestyle": _LINES[k // len(_COLORS) % len(_LINES)],
    }


def _names(jobs: Sequence[_Job]) -> dict[_Job, str]:
    """Each job by its profile and, of the rest, what differs between jobs."""
    nouns = ("", "", "microbatch", "chunk", "GPU", "replica")
    differs = [k == 0 or len({job[k] for job in jobs}) > 1 for k in range(len(nouns))]
    names = {}
    for job in jobs:
        parts = [
            counted(value, noun) if isinstance(value, int) else str(value)
            for noun, value, told in zip(nouns, job, differs, strict=False)
            if told
        ]
        recomputed = ["recomputation"] if job[6] else []
        names[job] = ", ".join([*parts, *recomputed, *filter(None, job[7:])])
    return names
