"""Plans: a frequency for every operation, what it costs, and its file plan.json."""

from envplan.plan.build import (
    as_referenced,
    build_plan,
    check_reference,
    find_profile,
    replay_plan,
    rung_rows,
)
from envplan.plan.model import Job, Plan, Rung, Target

__all__ = [
    "Job",
    "Plan",
    "Rung",
    "Target",
    "as_referenced",
    "build_plan",
    "check_reference",
    "find_profile",
    "replay_plan",
    "rung_rows",
]
