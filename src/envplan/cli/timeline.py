"""`envplan timeline`: a plan as a Gantt chart, before and after."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from envplan.cli.command import MOST, file_of, one_of, option
from envplan.cli.options import OutputOptions, PlanOptions
from envplan.cli.plan_file import load_plan

_TYPES = (".png", ".svg", ".pdf", ".html")


def timeline(
    source: PlanOptions,
    show: OutputOptions,
    output: Annotated[
        Path,
        option(
            "-o, --output FILE",
            MOST,
            f"One of {', '.join(_TYPES)}.",
            file_of(_TYPES, "choose one of them"),
        ),
    ] = Path("timeline.png"),
    colour: Annotated[
        Literal["frequency", "power"],
        option(
            "--colour BY",
            MOST,
            "Colour operations by frequency or by power.",
            one_of("frequency", "power"),
        ),
    ] = "frequency",
    alone: Annotated[bool, option("--alone", MOST, "Without maximum frequency above it.")] = False,
) -> None:
    """Draw what every stage does when, at maximum frequency above and under the plan below.

    \b
    Example:
      envplan solve a40-gpt3-1.3b-4stage --microbatches 8
      envplan timeline plan.json -o timeline.png
      envplan timeline plan.json --colour power -o timeline.html
    """
    from envplan.cli.output import print_json, say, spinner
    from envplan.plotting.timeline import plot_timeline
    from envplan.simulation import simulate

    loaded, profile = load_plan(source, output)
    with spinner("Drawing", quiet=show.quiet):
        after = simulate(loaded, profile, force=source.force)
        before = None if alone else after.at_max_frequency()
        plot_timeline(after, output, before=before, colour=colour)
    if show.json:
        print_json(
            {
                "written": str(output),
                "iteration_time_s": after.iteration_time,
                "energy_j": after.energy,
                "max_frequency_iteration_time_s": before and before.iteration_time,
                "max_frequency_energy_j": before and before.energy,
            }
        )
    elif not show.quiet:
        say(f"wrote {output}")
