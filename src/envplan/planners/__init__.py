"""Planners: ways to choose a frequency for every operation, all behind one protocol.

Enters: a frontier and a request. Leaves: a plan; comparisons of planners; advice on schedules.
Simulation, sweeps and the command line may import it.
"""

from __future__ import annotations

from typing import Final

from envplan.errors import InputError, unknown
from envplan.plan import Plan, replay_plan
from envplan.plan.build import note_straggler
from envplan.plan.costs import priced
from envplan.planners.base import (
    FrontierPlanner,
    MaxFrequency,
    Planner,
    ZeusGlobal,
    ZeusPerStage,
)
from envplan.planners.comparison import (
    Advice,
    Comparison,
    Entry,
    advise,
    beside_one_clock,
    compare,
)
from envplan.planners.envpipe import EnvPipe, EnvPipeRun, forwards_ahead
from envplan.request import Effort, Request
from envplan.solve import Frontier
from envplan.units import ns_from_s_floor

__all__ = [
    "PLANNERS", "Advice", "Comparison", "Entry", "EnvPipe", "EnvPipeRun", "FrontierPlanner",
    "MaxFrequency", "Planner", "ZeusGlobal", "ZeusPerStage", "advise", "answer",
    "beside_one_clock", "compare", "forwards_ahead", "planner_named",
]  # fmt: skip

#: Every planner by name, in the order in which they are compared.
PLANNERS: Final[dict[str, Planner]] = {
    planner.name: planner
    for planner in (MaxFrequency(), ZeusGlobal(), ZeusPerStage(), EnvPipe(), FrontierPlanner())
}


def planner_named(name: str) -> Planner:
    """The planner of that name.

    Raises:
        InputError: there is none; lists those there are.
    """
    if name not in PLANNERS:
        raise InputError(unknown("planner", name, PLANNERS))
    return PLANNERS[name]


def answer(planner: Planner, frontier: Frontier, request: Request) -> Plan:
    """A planner's plan for what a request says of times and costs.

    A straggler leaves those planners that take a target until it has finished.

    Raises:
        NoAnswerError: the planner has no plan that fast; says its fastest.
        InputError: more is asked for than the planner knows, a target where it takes none, or a
            rate ends before the run does.
    """
    if planner.name == "frontier":
        return frontier.solve(request)
    straggler_s, deadline = request.straggler_time_s, request.deadline
    beyond = request.limits or request.switch_latency_s or request.objective != "energy"
    if beyond or request.effort != Effort():
        raise InputError(
            f"planner {planner.name} knows times only: no limits, late clocks, cheapest runs, "
            "polishing or ladders; planner frontier does"
        )
    target_ns = None
    if deadline.kind != "no-slowdown":
        asked_ns = deadline.resolve_ns(frontier.min_time_ns)
        target_ns = frontier.min_energy_time_ns if asked_ns is None else asked_ns
    plan = planner.plan(frontier, target_ns)
    if straggler_s is not None:
        if planner.takes_target:
            until_ns = max(ns_from_s_floor(straggler_s), plan.target.deadline_ns)
            plan = planner.plan(frontier, until_ns)
        replay = replay_plan(plan, frontier.profile)
        plan = note_straggler(plan, frontier, replay, straggler_s)
    return plan if request.run is None else priced(plan, request.run)
