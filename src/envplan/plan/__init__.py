"""Plans: a frequency for every operation, what it costs, and its file plan.json.

Enters: a replayed choice and a bound, or a file. Leaves: plans, frontier files, replays of plans.
Does not look for plans; solve/ and everything after it import it.
"""

from envplan.clocks import Rung
from envplan.plan.build import (
    as_referenced,
    build_plan,
    check_reference,
    find_profile,
    replay_plan,
    rung_rows,
)
from envplan.plan.model import Job, Plan
from envplan.plan.target import Target

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
