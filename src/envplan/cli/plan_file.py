"""How commands that start from a plan come by it and its profile."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from envplan.cli.inputs import check_outputs, refuse_overwriting
from envplan.cli.options import PlanOptions

if TYPE_CHECKING:
    from envplan.plan import Plan
    from envplan.profile import Profile


def load_plan(given: PlanOptions, *outputs: Path | None) -> tuple[Plan, Profile]:
    """A plan and the profile that it was made from.

    Args:
        outputs: files that a command is about to write.

    Raises:
        InputError: one of the two cannot be read, or an output is one of them or cannot be written.
    """
    from envplan.plan import Plan, as_referenced, find_profile
    from envplan.profile import Profile

    check_outputs(*outputs, inputs=[("the plan", given.plan)])
    plan = Plan.load(given.plan)
    profile = (
        find_profile(plan.profile, given.plan)
        if given.profile is None
        else Profile.open(given.profile)
    )
    profile = as_referenced(plan.profile, profile)
    refuse_overwriting(profile, *outputs)
    return plan, profile
