"""`envplan timeline`: a plan as a Gantt chart, before and after."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from envplan.cli.inputs import JsonOption, QuietOption
from envplan.cli.plan_file import ForceOption, PlanArgument, ProfileOption, load_plan
from envplan.errors import InputError

if TYPE_CHECKING:
    from envplan.plan import Plan
    from envplan.profile import Profile

_TYPES = (".png", ".svg", ".pdf", ".html")
_COLOURS = ("frequency", "power")


def timeline(
    plan: PlanArgument = Path("plan.json"),
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="FILE", help=f"One of {', '.join(_TYPES)}."),
    ] = Path("timeline.png"),
    colour: Annotated[
        str, typer.Option(metavar="BY", help="Colour operations by frequency or by power.")
    ] = "frequency",
    alone: Annotated[
        bool, typer.Option("--alone", help="Without maximum frequency above it.")
    ] = False,
    profile: ProfileOption = None,
    force: ForceOption = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Draw what every stage does when, at maximum frequency above and under the plan below.

    \b
    Example:
      envplan solve a40-gpt3-1.3b-4stage --microbatches 8
      envplan timeline plan.json -o timeline.png
      envplan timeline plan.json --colour power -o timeline.html
    """
    from envplan.cli.frontier import check_type
    from envplan.cli.output import print_json, say, spinner
    from envplan.plotting.timeline import plot_timeline
    from envplan.simulation import simulate

    check_type(output, "--output", _TYPES, "choose one of them")
    if colour not in _COLOURS:
        raise InputError(f"--colour must be {' or '.join(_COLOURS)}, not {colour}")
    loaded, source = load_plan(plan, profile, output)
    with spinner("Drawing", quiet=quiet):
        after = simulate(loaded, source, force=force)
        before = None if alone else simulate(max_frequency_of(loaded, source), source, force=force)
        plot_timeline(
            after, output, before=before, colour="power" if colour == "power" else "frequency"
        )
    if json:
        print_json(
            {
                "written": str(output),
                "iteration_time_s": after.iteration_time,
                "energy_j": after.energy,
                "max_frequency_iteration_time_s": before and before.iteration_time,
                "max_frequency_energy_j": before and before.energy,
            }
        )
    elif not quiet:
        say(f"wrote {output}")


def max_frequency_of(plan: Plan, profile: Profile) -> Plan:
    """The plan of the same job in which every operation runs at its highest frequency."""
    from envplan.verify import trace_job

    return trace_job(plan.job, profile).max_frequency_plan()
