"""Plans for stragglers: one for each of several times, to look up while training runs.

Perseus (SOSP 2024) looks up the plan for a straggler's time among those made before.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from envplan.errors import NoAnswerError
from envplan.frontier import Progress, Relaxation
from envplan.plan import Plan
from envplan.request import Request
from envplan.solve.cache import PlanCache
from envplan.solve.request_solver import RequestSolver


def straggler_ladder(
    frontier: Relaxation, request: Request, cache: PlanCache, progress: Progress | None = None
) -> list[Plan]:
    """Rungs from T_min to T_max, T_star's among them, as `plans_at`.

    Each saves about as much on the one before as all others do.

    Args:
        frontier: of the pipeline.
        request: its effort says how many at most; its deadline does not matter.
        cache: of the frontier.
        progress: as for plans_at.

    Raises:
        NoAnswerError: waiting alone breaks a limit, such as a cap on power.
    """
    for limit in request.limits:
        complaint = limit.explain_waiting(frontier.total_power_10uw * frontier.num_gpus)
        if complaint is not None:
            raise NoAnswerError(complaint)
    num_rungs = max(1, request.effort.ladder)
    t_min_ns, *later_ns = times_of_equal_savings(frontier, frontier.min_time_ns, num_rungs)
    t_star_ns = frontier.min_energy_time_ns
    if later_ns:  # T_star's plan stands in for the one next to it
        next_to_t_star_ns = min(later_ns, key=lambda time_ns: abs(time_ns - t_star_ns))
        later_ns.remove(next_to_t_star_ns)
        later_ns.append(t_star_ns)
    return plans_at(frontier, request, sorted({t_min_ns, *later_ns}), cache, progress)


def plans_at(
    frontier: Relaxation,
    request: Request,
    times_ns: Sequence[int],
    cache: PlanCache,
    progress: Progress | None = None,
) -> list[Plan]:
    """Plans by some times, ascending in time: each beats all faster ones where there is time.

    Args:
        frontier: of the pipeline.
        request: whose limits all keep; times that no plan is found for are left out.
        times_ns: ascending, ns. Beyond T_star everybody waits until then.
        cache: of the frontier.
        progress: called with (plans to go, 0), the former falling to the latter.
    """
    solver = RequestSolver(frontier, request, cache)
    plans: list[Plan] = []
    for number, time_ns in enumerate(times_ns):
        if progress is not None:
            progress(len(times_ns) - number, 0)
        try:
            plan = solver.rung_by(time_ns)
        except NoAnswerError:
            continue
        if not plans or plan.effective_10fj < plans[-1].effective_10fj:
            plans.append(plan)
    return plans


def times_of_equal_savings(frontier: Relaxation, first_ns: int, count: int) -> list[int]:
    """Times up to T_max between which the relaxed effective cost falls alike, ns, ascending.

    Args:
        frontier: of the pipeline.
        first_ns: the first of them.
        count: at most so many.
    """
    times_ns = _breakpoints_from(frontier, first_ns)
    costs_10fj = [frontier.effective_bound_10fj(time_ns) for time_ns in times_ns]
    saved_10fj = [float(costs_10fj[0] - cost_10fj) for cost_10fj in costs_10fj]
    wanted_10fj = np.linspace(0.0, saved_10fj[-1], count)
    interpolated_ns = np.interp(wanted_10fj, saved_10fj, times_ns).tolist()
    return sorted({round(time_ns) for time_ns in interpolated_ns})


def _breakpoints_from(frontier: Relaxation, first_ns: int) -> list[int]:
    """Breakpoints of the frontier from a time to T_max, both included, ns, ascending."""
    beyond_ns = [time_ns for time_ns in frontier.beyond.times_ns.tolist() if time_ns >= first_ns]
    times_ns = {*beyond_ns, first_ns, frontier.slowest_time_ns}
    if beyond_ns:
        for time_ns in frontier.times_ns.tolist():
            if first_ns <= time_ns < beyond_ns[0]:
                times_ns.add(time_ns)
    return sorted(times_ns)
