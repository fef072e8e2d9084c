"""Options of commands that start from a plan, and how they come by its profile."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from envplan.cli.inputs import check_outputs, refuse_overwriting

if TYPE_CHECKING:
    from envplan.plan import Plan
    from envplan.profile import Profile

PlanArgument = Annotated[Path, typer.Argument(metavar="[PLAN]", help="A plan file.")]
ProfileOption = Annotated[
    str | None,
    typer.Option(metavar="PROFILE", help="The profile the plan was made from, if it moved."),
]
ForceOption = Annotated[
    bool, typer.Option("--force", help="Go on though the profile has changed since.")
]


def load_plan(path: Path, profile: str | None, *outputs: Path | None) -> tuple[Plan, Profile]:
    """A plan and the profile that it was made from.

    Args:
        profile: path or name of the profile, if it has moved.
        outputs: files that a command is about to write.

    Raises:
        InputError: one of the two cannot be read, or an output is one of them or cannot be written.
    """
    from envplan.plan import Plan
    from envplan.profile import Profile
    from envplan.verify import as_referenced, find_profile

    check_outputs(*outputs, inputs=[("the plan", path)])
    plan = Plan.load(path)
    source = find_profile(plan.profile, path) if profile is None else Profile.open(profile)
    source = as_referenced(plan.profile, source)
    refuse_overwriting(source, *outputs)
    return plan, source
