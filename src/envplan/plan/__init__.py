"""Plans: a frequency for every operation, what it costs, and its file plan.json."""

from envplan.plan.build import build_plan, gap_over, note_straggler, target_of
from envplan.plan.model import Baseline, Job, Plan, ProfileReference, Rung, Target
from envplan.plan.replayed import (
    as_referenced,
    beyond_raw_rows,
    check_operations,
    check_reference,
    find_profile,
    machine_of,
    problem_of,
    replay_plan,
    rung_rows,
)

__all__ = [
    "Baseline",
    "Job",
    "Plan",
    "ProfileReference",
    "Rung",
    "Target",
    "as_referenced",
    "beyond_raw_rows",
    "build_plan",
    "check_operations",
    "check_reference",
    "find_profile",
    "gap_over",
    "machine_of",
    "note_straggler",
    "problem_of",
    "replay_plan",
    "rung_rows",
    "target_of",
]
