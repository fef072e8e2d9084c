"""`envplan check`: what a file is, and whether it holds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

import envplan
from envplan.check.files import Checked
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
    "site plan": ("site", "JOBS", "--power", "W"),
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
    next_words = _next_words(checked, file)
    ui.answer(
        lambda: {"file": str(file), **checked._asdict()},
        lambda: ui.say(f"{file}: {checked.kind}, holds", *lines),
        next_command=["envplan", *next_words] if next_words else (),
    )


def _next_words(checked: Checked, file: Path) -> list[str]:
    """What to type next, after `envplan`; nothing where that depends on the user."""
    match checked.kind:
        case "requests":
            words = _compare_words(file)
        case "serving profile":
            words = _serving_solve_words(file)
        case kind:
            words = list(_NEXT.get(kind, ()))
    stand_ins = {"FILE": str(file), "PROFILE": checked.profile or "PROFILE"}
    return [stand_ins.get(word, word) for word in words]


def _compare_words(trace: Path) -> list[str]:
    """The comparison of policies on a trace, which may name classes of its user's own."""
    from envplan.serving.classes import CLASSES
    from envplan.serving.trace_file import read_class_names

    words = ["serving", "compare", "--trace", "FILE"]
    if not set(read_class_names(trace)) <= set(CLASSES):
        words += ["--classes", "CLASSES"]
    return words


def _serving_solve_words(profile: Path) -> list[str]:
    """The plan for loads of a serving profile's own classes."""
    from envplan.cli.serving.service import example_loads
    from envplan.serving.profile import ServingProfile

    names = ServingProfile.read_csv(profile).classes.names
    return ["serving", "solve", "FILE", "--load", example_loads(names)]


def _in_words(names: Sequence[str]) -> str:
    """Names of fields in a line."""
    if "*" in names:
        return "what it says, which is measured or asked for; that it can be used is all"
    return ", ".join(names)
