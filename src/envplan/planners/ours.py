"""Our own planner: the frontier's plan, never worse than a plan it is shown."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from envplan.frontier import network_events
from envplan.plan import Plan, build_plan
from envplan.plan.model import Target
from envplan.planners.base import Planner
from envplan.replay import Replay
from envplan.solve import Frontier
from envplan.solve.rounding import Rounding
from envplan.units import ns_from_s, s_from_ns


class FrontierPlanner(Planner):
    """The exact relaxation, rounded: Frontier.plan as a planner."""

    name = "frontier"
    takes_target = True

    def plan(self, frontier: Frontier, target_time_ns: int | None = None) -> Plan:
        """Raises: NoAnswerError: the target is below T_min."""
        return frontier.plan(None if target_time_ns is None else s_from_ns(target_time_ns))


def best_plan_beside(
    frontier: Frontier, time_ns: int, others: Iterable[Plan], *, waits: bool = False
) -> Plan:
    """Our plan for a time, and at least as good as what other planners make of the same pipeline.

    Rounding is a heuristic: once in a while another planner's choice happens to lie closer to the
    bound than what it finds. Then the same local search starts again from that choice, and what
    comes out uses at most as much energy.

    Args:
        time_ns: when the iteration must be over, not below T_min, ns.
        others: plans of the same pipeline; those that are slower are passed over.
        waits: everybody waits until then however early they are.
    """
    time_s = s_from_ns(time_ns)
    best = frontier.plan(sync_time=time_s) if waits else frontier.plan(time_s)
    star_ns = frontier.min_energy_time_ns
    for other in others:
        taken_ns = ns_from_s(other.iteration_time)
        better = other.uses_less_until_any_time_after(best) if waits else other.energy < best.energy
        if taken_ns > time_ns or not better:
            continue
        latest_ns = min(time_ns, frontier.slowest_time_ns if waits else star_ns)
        deadline_ns = max(taken_ns, latest_ns)
        replay = searched_from(frontier, rows_of(frontier, other), deadline_ns)
        if waits:
            target = Target(kind="sync-time", time_s=time_s, deadline_s=time_s)
        else:
            # Beyond T_star the relaxed plan waits for nobody, but a discrete one may be lucky.
            stated_s = s_from_ns(deadline_ns)
            target = Target(kind="planner", time_s=stated_s, deadline_s=stated_s)
            if deadline_ns <= star_ns:
                target = Target(kind="time", time_s=time_s, deadline_s=stated_s)
        best = build_plan(frontier, replay, target=target)
    return best


def searched_from(frontier: Frontier, rows: NDArray[np.int32], deadline_ns: int) -> Replay:
    """What local search makes of rows that meet a deadline: it does, too, and costs no more.

    The rows' own replay takes the place of the relaxed optimum: diffusion lets each operation use
    what its predecessors left it, until the finish it had, so no operation gets dearer.
    """
    replay = frontier.problem.replay(rows)
    events = network_events(replay.starts_ns, replay.finishes_ns)
    rounding = Rounding(frontier.pipeline, frontier.network, events, deadline_ns)
    rounding.anneal()
    return frontier.problem.replay(rounding.rows)


def rows_of(frontier: Frontier, plan: Plan) -> NDArray[np.int32]:
    """For each operation the row of its option table that a plan of this pipeline chose, (N,)."""
    planned = chain(*plan.stages)
    return frontier.problem.rows_at([(op.frequency_mhz, op.config) for op in planned])
