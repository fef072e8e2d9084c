"""From a request to a plan."""

from __future__ import annotations

import logging
from time import perf_counter

from envplan.frontier import Progress, Relaxation
from envplan.plan import Plan
from envplan.plan.costs import priced
from envplan.request import Request
from envplan.request.limits import MinDwell
from envplan.solve.cache import CachedFrontier, PlanCache
from envplan.solve.request_solver import RequestSolver
from envplan.solve.straggler_ladder import straggler_ladder

_logger = logging.getLogger(__name__)


def solve(
    frontier: Relaxation, request: Request, cache: PlanCache, progress: Progress | None = None
) -> Plan:
    """The best plan found for a request.

    Args:
        frontier: of the pipeline, the profile and the GPUs.
        request: what is asked.
        cache: of the frontier.
        progress: called now and then with (steps to go, 0), the former falling.

    Raises:
        NoAnswerError: no plan was found that keeps the deadline and all limits; says what can be
            had.
        InputError: the profile does not say how times vary, or a rate ends before the run.
    """
    begin_s = perf_counter()
    frontier, cache = admissible_frontier(frontier, request, cache)
    solver = RequestSolver(frontier, request, cache, progress)
    match request.objective:
        case "energy":
            frontier.walk(solver.requested_deadline_ns(), progress)
            solution = solver.least_energy()
        case "time":
            solution = solver.fastest()
        case "cost" if request.straggler_time_s is None:
            solution = solver.cheapest()
        case "cost":
            solution = solver.least_energy_in_time()
    plan = solver.plan(solution)
    _logger.info(
        "plan for least %s by %.9f s: %.9f s, %.6g J, gap %.4f%%, candidates: %d, in %.2f s",
        request.objective,
        plan.target.deadline_s,
        plan.iteration_time,
        plan.energy,
        100 * plan.gap,
        solver.num_candidates,
        perf_counter() - begin_s,
    )
    if request.effort.ladder:
        plan = plan.with_ladder(straggler_ladder(frontier, request, cache, progress))
    return plan if request.run is None else priced(plan, request.run)


def admissible_frontier(frontier: Relaxation, request: Request, cache: PlanCache) -> CachedFrontier:
    """The frontier of the options that a request's clocks leave.

    Where operations have clocks by part, and the request's clocks come later, or must be held
    longer, than the profile's options were made for, they are made anew. Else it is the same.
    """
    by_parts, min_dwell = frontier.profile.adjustments.by_parts, request.limit(MinDwell)
    if by_parts is None:
        return CachedFrontier(frontier, cache)
    requested = by_parts.model_copy(
        update={
            "switch_latency_s": request.switch_latency_s,
            "min_hold_s": 0.0 if min_dwell is None else min_dwell.time_s,
        }
    )
    if requested == by_parts:
        return CachedFrontier(frontier, cache)
    return cache.frontier_by_parts(frontier, requested)
