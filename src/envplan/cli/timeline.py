"""`envplan timeline`: a plan as a Gantt chart, before and after."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import envplan
from envplan.cli import output as ui
from envplan.cli.command import PLOT_TYPES, file_of, one_of, takes
from envplan.cli.options import PlanOptions

if TYPE_CHECKING:
    from envplan.plotting.timeline import Colour


@takes(
    """
    Most used:
      -o, --output FILE  One of .png, .svg, .pdf, .html.
      --colour BY  Colour operations by frequency or by power.
      --alone  Without maximum frequency above it.
    """,
    output=file_of(PLOT_TYPES, "choose one of them"),
    colour=one_of("frequency", "power"),
)
def timeline(
    source: PlanOptions,
    output: Path = Path("timeline.png"),
    colour: Literal["frequency", "power"] = "frequency",
    alone: bool = False,
) -> None:
    """Draw what every stage does when, at maximum frequency above and under the plan below.

    \b
    Example:
      envplan solve a40-gpt3-1.3b-4stage --microbatches 8
      envplan timeline plan.json -o timeline.png
      envplan timeline plan.json --colour power -o timeline.html
    """
    loaded, profile = source.load()
    with ui.Working("Drawing"):
        after = envplan.simulate(loaded, profile, force=source.force)
        before = None if alone else after.at_max_frequency()
        draw_timeline(output, after, before, colour)
    ui.respond(
        lambda: {
            "written": str(output),
            "iteration_time_s": after.iteration_time,
            "energy_j": after.energy,
            "max_frequency_iteration_time_s": before and before.iteration_time,
            "max_frequency_energy_j": before and before.energy,
        },
        then=["envplan", "report", str(source.plan)],
    )


def draw_timeline(
    path: Path,
    timeline: envplan.Timeline,
    before: envplan.Timeline | None = None,
    colour: Colour = "frequency",
) -> None:
    """Write the picture or the page of a timeline.

    Args:
        before: that of maximum frequency, to show above it.
        colour: what colours stand for in a picture; on a page the reader chooses.
    """
    from envplan.plotting.report import timeline_page
    from envplan.plotting.timeline import timeline_figure

    ui.draw(
        path,
        lambda: timeline_figure(timeline, before=before, colour=colour),
        lambda: timeline_page(timeline, before),
    )
