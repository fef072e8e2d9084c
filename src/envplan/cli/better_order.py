"""Whether another order of the same operations would save more in the same time."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import Final

import envplan
from envplan._io.words import exact_seconds

#: A further saving that is worth a line, percent of the energy at maximum frequency.
_NOTABLE_PERCENT: Final = 0.5
#: The other order is traced for jobs of up to so many operations: a fraction of a second.
_MAX_OPERATIONS: Final = 8_000


def better_order(
    frontier: envplan.Frontier, plan: envplan.Plan, solve_command: Sequence[str]
) -> Iterator[str]:
    """A line where EnvPipe's order saves notably more than 1F1B, with the command for its plan.

    Both orders are judged by their relaxed frontiers, from which plans are a tenth of a percent
    away. Plans under limits, for stragglers or of other planners are left alone.

    Args:
        frontier: of the plan's job.
        plan: the plan.
        solve_command: that made it, without its target.
    """
    request = plan.request
    is_plain = not request.limits and not request.sync_ns and request.objective == "energy"
    is_small = len(frontier.pipeline.operations) <= _MAX_OPERATIONS
    if plan.planner != "frontier" or not is_plain or not is_small:
        return
    from envplan.planners.advice import in_envpipe_order

    other = in_envpipe_order(frontier)
    time_s = plan.iteration_time
    if other is None or other.min_time > time_s:
        return
    usual_j = plan.predicted.baseline.energy_j
    by_other_percent = 100 * (1 - other.energy_at(time_s) / usual_j)
    further_percent = 100 * (frontier.energy_at(time_s) - other.energy_at(time_s)) / usual_j
    if further_percent < _NOTABLE_PERCENT:
        return
    target = ["--schedule", "envpipe", "--target-time", exact_seconds(time_s)]
    yield (
        f"EnvPipe's order of the same operations saves up to {by_other_percent:.1f}% in the same "
        f"time, where memory allows more activations: {shlex.join([*solve_command, *target])}"
    )
