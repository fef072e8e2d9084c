"""`envplan check`: what a file is, and whether it holds."""

from __future__ import annotations

from pathlib import Path

import envplan
from envplan.cli import output as ui
from envplan.cli.command import argument
from envplan.cli.options import OutputOptions


def check(
    show: OutputOptions,
    file: Path = argument("FILE", "Any file of envplan."),
    profile: str | None = None,
    force: bool = False,
) -> None:
    """Prove that a file of envplan holds.

    Says what was proved, and exits with 2 if the file does not hold. A plan is replayed, priced
    again from its profile, and its lower bound is proved anew.

    \b
    Example:
      envplan check plan.json
      envplan check profile.csv
    """

    with ui.progress_bar("Tracing the frontier again", quiet=show.quiet) as progress:
        checked = envplan.check_file(file, profile=profile, force=force, progress=progress)

    def tell() -> None:
        ui.say(f"{file}: {checked.kind}, holds", *(f"  {line}" for line in checked.proved))

    name = str(file)
    then: dict[str, list[str]] = {
        "plan": ["apply", name],
        "frequency plan": ["devices"],
        "profile": ["frontier", name],
        "DAG": ["frontier", "PROFILE", "--dag", name],
        "frontier": ["solve", profile or "PROFILE"],
        "serving profile": ["serving", "solve", name, "--load", "SS=20000,MM=8000"],
        "serving plan": ["serving", "apply", name],
        "serving clocks": ["serving", "hold", name, "--node", "0"],
    }
    ui.answer(
        show,
        lambda: {"file": name, **checked._asdict()},
        tell,
        then=["envplan", *then[checked.kind]],
    )
