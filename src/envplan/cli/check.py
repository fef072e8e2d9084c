"""`envplan check`: what a file is, and whether it holds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

import envplan
from envplan.cli import output as ui
from envplan.cli.progress import progress
from envplan.cli.shared import Force, MovedProfile
from envplan.cli.types import InputFile

#: What to do with a file that holds, by its kind.
_NEXT: Final[dict[str, tuple[str, ...]]] = {
    "plan": ("apply", "FILE"),
    "frequency plan": ("devices",),
    "profile": ("frontier", "FILE"),
    "DAG": ("frontier", "PROFILE", "--dag", "FILE"),
    "frontier": ("solve", "PROFILE"),
    "frontier table": ("solve", "PROFILE"),
    "schedule": ("schedule", "import", "FILE", "--format", "torch-csv"),
    "clocks": ("solve", "PROFILE", "--clocks", "FILE"),
    "sweep configuration": ("sweep", "FILE"),
    "run log": ("refine", "plan.json", "FILE"),
    "rates": ("savings", "PROFILE", "--price", "FILE"),
    "stragglers": ("simulate", "plan.json", "--straggler-trace", "FILE"),
    "requests": ("serving", "compare", "--trace", "FILE"),
    "site plan": ("site", "JOBS", "--power", "W"),
    "serving profile": ("serving", "solve", "FILE", "--load", "SS=20000,MM=8000"),
    "serving plan": ("serving", "apply", "FILE"),
    "serving clocks": ("serving", "hold", "FILE", "--node", "0"),
}


def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Any file of envplan."), InputFile()],
    profile: MovedProfile = None,
    force: Force = False,
) -> None:
    """Prove that a file of envplan holds.

    Says what was proved, and exits with 2 if the file does not hold. A plan is replayed, priced
    again from its profile, and its lower bound is proved anew. Tables, traces and clocks are read
    as the commands that take them read them.

    \b
    Example:
      envplan check plan.json
      envplan check profile.csv
    """
    with progress("Tracing the frontier again") as work:
        checked = envplan.check_file(
            file, profile=profile, force=force, progress=work.frontier_step
        )
    lines = [f"  {line}" for line in checked.proved]
    if checked.not_proved:
        lines.append(f"  not proved: {_in_words(checked.not_proved)}")
    stand_ins = {"FILE": str(file), "PROFILE": checked.profile or "PROFILE"}
    next_words = [stand_ins.get(word, word) for word in _NEXT.get(checked.kind, ())]
    ui.answer(
        lambda: {"file": str(file), **checked._asdict()},
        lambda: ui.say(f"{file}: {checked.kind}, holds", *lines),
        next_command=["envplan", *next_words] if next_words else (),
    )


def _in_words(names: Sequence[str]) -> str:
    """Names of fields in a line."""
    if "*" in names:
        return "what it says, which is measured or asked for; that it can be used is all"
    return ", ".join(names)
