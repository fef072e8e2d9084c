"""The points of a sweep as a figure: energy saved against time lost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, cycle, product
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from envplan._io.words import counted
from envplan.errors import InputError
from envplan.plotting.figures import OKABE_ITO, GridShape, draw_grid, figure, label_axes
from envplan.plotting.frontier import look_of
from envplan.plotting.titles import shorten
from envplan.sweep.table import varying

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from envplan.sweep import SweepRow

Dashes = Literal["-", "--", ":", "-."]
_DASHES: Final[tuple[Dashes, ...]] = ("-", "--", ":", "-.")
#: The columns that tell jobs apart, in the order in which panels and then colours are given to it.
_JOB_COLUMNS: Final = (
    "profile", "schedule", "microbatches", "chunks", "gpus_per_stage", "replicas"
)  # fmt: skip
_NOUNS: Final = {
    "microbatches": "microbatch",
    "chunks": "chunk",
    "gpus_per_stage": "GPU",
    "replicas": "replica",
}
_MAX_COLUMNS: Final = 3
_MAX_PANELS: Final = 12
_MAX_COLOURS: Final = 12
_PANEL_WIDTH_IN: Final = 4.2
_PANEL_HEIGHT_IN: Final = 3.0
_MIN_WIDTH_IN: Final = 7.2
_TITLE_AND_LEGEND_IN: Final = 1.6
_FONT_SIZE: Final = 10
_LARGE_FONT_SIZE: Final = 11
_CHARACTERS_PER_IN: Final = 11
_LEGEND_MARK_CHARACTERS: Final = 7


class _Kind(NamedTuple):
    """The points that one line joins.

    Attributes:
        job: what tells their job from others, in words; "" where nothing does.
        planner: their planner.
    """

    job: str
    planner: str


class _Point(NamedTuple):
    """A plan, beside maximum frequency."""

    slower_percent: float
    saved_percent: float


#: Points of each kind.
_Panel = dict[_Kind, list[_Point]]


class _Style(NamedTuple):
    """Colour and dashes of a line."""

    colour: str
    dashes: Dashes


def sweep_figure(rows: Sequence[SweepRow]) -> Figure:
    """Draw a panel for each value of the first column that varies, such as profiles.

    Colours tell all else apart, marks planners; points of one job and planner are joined.

    Args:
        rows: those without a plan are left out.

    Raises:
        InputError: none has a plan.
    """
    planned = [row for row in rows if row.error is None]
    if not planned:
        raise InputError("there is nothing to draw: no point of the sweep has a plan")
    varying_columns = varying(planned)
    varied = [name for name in _JOB_COLUMNS if name in varying_columns]
    facet, *told_by_colour = varied or ["profile"]
    panels = _panels(planned, facet, told_by_colour)
    styles = _styles(panels)
    shown = list(panels)[:_MAX_PANELS]
    shape = GridShape.of(len(shown), max_columns=_MAX_COLUMNS)
    width_in = max(_MIN_WIDTH_IN, _PANEL_WIDTH_IN * shape.num_columns)
    height_in = _TITLE_AND_LEGEND_IN + _PANEL_HEIGHT_IN * shape.num_rows
    with figure(width_in, height_in, _FONT_SIZE) as drawn:
        grid = draw_grid(drawn, shape, sharex=True, sharey=True)
        for axes, name in zip(grid.used, shown, strict=True):
            _draw_panel(axes, panels[name], styles, title=shorten(name) if varied else "")
        for axes in grid.lowest:
            axes.set_xlabel("Slower than maximum frequency (%)")
            axes.tick_params(labelbottom=True)
        drawn.supylabel("Energy saved against maximum frequency (%)", fontsize=_LARGE_FONT_SIZE)
        title = _title(planned, names_profile="profile" not in varied)
        if len(shown) < len(panels):
            title += f"; {len(shown)} of {len(panels)} shown"
        drawn.suptitle(title, fontsize=_LARGE_FONT_SIZE)
        _add_legend(drawn, styles, planned, width_in)
    return drawn


def _panels(
    rows: Sequence[SweepRow], facet: str, told_by_colour: Sequence[str]
) -> dict[str, _Panel]:
    """The panels by name, each with its points by kind."""
    panels: dict[str, _Panel] = {}
    for row in rows:
        job_words = [_cell_words(row, name) for name in told_by_colour]
        if row.recompute:
            job_words.append("recomputation")
        job_words += row.conditions
        kind = _Kind(", ".join(job_words), row.planner)
        panel = panels.setdefault(_cell_words(row, facet), {})
        point = _Point(row.slowdown_percent or 0.0, row.savings_percent or 0.0)
        panel.setdefault(kind, []).append(point)
    return panels


def _cell_words(row: SweepRow, column: str) -> str:
    """A value in words, such as "8 microbatches"."""
    value = getattr(row, column)
    if column not in _NOUNS:
        return str(value)
    return counted(value or 0, _NOUNS[column])


def _styles(panels: Mapping[str, _Panel]) -> dict[str, _Style]:
    """A style for each job, in the order in which panels show them; after all come the same."""
    kinds = chain.from_iterable(panels.values())
    jobs = dict.fromkeys(kind.job for kind in kinds)
    # All colours with one kind of dashes, then all with the next.
    styles = [_Style(colour, dashes) for dashes, colour in product(_DASHES, OKABE_ITO)]
    return dict(zip(jobs, cycle(styles), strict=False))


def _draw_panel(axes: Axes, panel: _Panel, styles: Mapping[str, _Style], title: str) -> None:
    """Draw the points of a panel, joined by slowdown."""
    axes.axhline(0, color="0.6", linewidth=0.8)
    for kind, points in panel.items():
        style = styles[kind.job]
        in_order = sorted(points)
        axes.plot(
            [point.slower_percent for point in in_order],
            [point.saved_percent for point in in_order],
            marker=look_of(kind.planner).marker,
            markersize=5,
            linewidth=1.2,
            color=style.colour,
            linestyle=style.dashes,
        )
    label_axes(axes, "", "", title)


def _title(rows: Sequence[SweepRow], *, names_profile: bool) -> str:
    """How many plans there are, of what where all have one profile, and how many are modelled."""
    title = f"{len(rows)} plans"
    if names_profile:
        title += f" of {shorten(rows[0].profile)}"
    num_modelled = sum(row.source == "modelled" for row in rows)
    if num_modelled == len(rows):
        title += " (modelled)"
    elif num_modelled:
        title += f" ({num_modelled} modelled)"
    return title


def _add_legend(
    drawn: Figure, styles: Mapping[str, _Style], rows: Sequence[SweepRow], width_in: float
) -> None:
    """Add a legend below, with as many entries beside each other as fit."""
    planners = list(dict.fromkeys(row.planner for row in rows))
    handles = list(_legend_handles(styles, planners))
    max_length = max(len(str(handle.get_label())) for handle in handles)
    entry_characters = max_length + _LEGEND_MARK_CHARACTERS
    num_beside = max(1, int(width_in * _CHARACTERS_PER_IN) // entry_characters)
    drawn.legend(handles=handles, loc="outside lower left", ncols=min(num_beside, len(handles)))


def _legend_handles(styles: Mapping[str, _Style], planners: Sequence[str]) -> Iterator[Artist]:
    """A line for each job that is told from others, and a mark for each planner of several."""
    from matplotlib.lines import Line2D

    jobs = list(styles) if any(styles) else []
    for job in jobs[:_MAX_COLOURS]:
        yield Line2D(
            [],
            [],
            linewidth=2.2,
            label=job or "no conditions",
            color=styles[job].colour,
            linestyle=styles[job].dashes,
        )
    if len(jobs) > _MAX_COLOURS:
        yield Line2D([], [], linestyle="none", label=f"and {len(jobs) - _MAX_COLOURS} more")
    if len(planners) > 1 or not jobs:
        # A mark stands for all jobs of its planner: it has a colour where all have one.
        colours = {style.colour for style in styles.values()}
        colour = colours.pop() if len(colours) == 1 else "0.3"
        for planner in planners:
            look = look_of(planner)
            yield Line2D(
                [], [], label=look.name, marker=look.marker, linestyle="none", color=colour
            )
