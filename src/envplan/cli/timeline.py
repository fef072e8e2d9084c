"""`envplan timeline`: a plan as a Gantt chart, before and after."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from envplan.cli.inputs import JsonOption, QuietOption, refuse_overwriting
from envplan.errors import InputError

if TYPE_CHECKING:
    from envplan.plan import Plan
    from envplan.profile import Profile

_TYPES = (".png", ".svg", ".pdf", ".html")
_COLOURS = ("frequency", "power")

PlanArgument = Annotated[Path, typer.Argument(metavar="[PLAN]", help="A plan file.")]
ProfileOption = Annotated[
    str | None,
    typer.Option(metavar="PROFILE", help="The profile the plan was made from, if it moved."),
]
ForceOption = Annotated[
    bool, typer.Option("--force", help="Go on though the profile has changed since.")
]


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
    from envplan.simulation import simulate

    check_type(output, "--output", _TYPES, "choose one of them")
    if colour not in _COLOURS:
        raise InputError(f"--colour must be {' or '.join(_COLOURS)}, not {colour}")
    loaded, source = load_plan(plan, profile, output)
    with spinner("Drawing", quiet=quiet):
        after = simulate(loaded, source, force=force)
        before = None if alone else simulate(max_frequency_of(loaded, source), source, force=force)
        if output.suffix.lower() == ".html":
            from envplan.plotting.page import save_page
            from envplan.plotting.report import timeline_page

            timelines = [after] if before is None else [before, after]
            save_page(
                timeline_page(timelines, ["maximum frequency", "plan"][-len(timelines) :]), output
            )
        else:
            from envplan.plotting.timeline import plot_timeline

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


def load_plan(path: Path, profile: str | None, *outputs: Path) -> tuple[Plan, Profile]:
    """A plan and the profile that it was made from.

    Raises:
        InputError: one of them cannot be read, or an output is one of them.
    """
    from envplan.plan import Plan
    from envplan.profile import Profile
    from envplan.verify import as_referenced, find_profile

    plan = Plan.load(path)
    source = find_profile(plan.profile, path) if profile is None else Profile.open(profile)
    refuse_overwriting(source, *outputs)
    for output in outputs:
        if output.exists() and output.samefile(path):
            raise InputError("is the plan itself; choose another output file", path=output)
    return plan, as_referenced(plan.profile, source)


def max_frequency_of(plan: Plan, profile: Profile) -> Plan:
    """The plan of the same job in which every operation runs at its highest frequency."""
    from envplan.verify import trace_job

    return trace_job(plan.job, profile).max_frequency_plan()
