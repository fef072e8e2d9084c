"""What a planner is."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from envplan.costs import priced
from envplan.errors import InputError
from envplan.plan import build_plan, replay_plan
from envplan.plan.build import note_straggler
from envplan.plan.model import Target
from envplan.request import Effort
from envplan.units import ns_from_s_floor, s_from_ns

if TYPE_CHECKING:
    from envplan.plan import Plan
    from envplan.replay import Replay
    from envplan.request import Request
    from envplan.solve import Frontier


class Planner:
    """Chooses a frequency for every operation of a traced pipeline.

    Attributes:
        name: what the user calls it, and plan.json's `planner`.
        takes_target: whether plan() can be asked for a time; if not, it settles on one of its own.
    """

    name: ClassVar[str]
    takes_target: ClassVar[bool] = False

    def plan(self, frontier: Frontier, target_time_ns: int | None = None) -> Plan:
        """The planner's plan, replayed, priced and set against the frontier's lower bound.

        Args:
            target_time_ns: when the iteration must be over, ns; default: as fast as it can.

        Raises:
            NoAnswerError: the planner has no plan that fast; says its fastest.
            InputError: a target was given and the planner takes none.
        """
        self.check_target(target_time_ns)
        replay = self.choose(frontier, target_time_ns)
        deadline_ns = replay.makespan_ns if target_time_ns is None else target_time_ns
        target = Target(
            kind="planner",
            time_s=None if target_time_ns is None else s_from_ns(deadline_ns),
            deadline_s=s_from_ns(deadline_ns),
        )
        return build_plan(frontier, replay, target=target, planner=self.name)

    def check_target(self, target_time_ns: int | None) -> None:
        """Raises: InputError: a target was given and the planner takes none."""
        if target_time_ns is not None and not self.takes_target:
            raise InputError(
                f"planner {self.name} takes no target: it settles on an iteration time of its own"
            )

    def choose(self, frontier: Frontier, target_time_ns: int | None) -> Replay:
        """The replay of what it chooses; the arguments are those of plan."""
        raise NotImplementedError


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
        asked_ns = deadline.asked_ns(frontier.min_time_ns)
        target_ns = frontier.min_energy_time_ns if asked_ns is None else asked_ns
    plan = planner.plan(frontier, target_ns)
    if straggler_s is not None:
        if planner.takes_target:
            until_ns = max(ns_from_s_floor(straggler_s), plan.target.deadline_ns)
            plan = planner.plan(frontier, until_ns)
        replay = replay_plan(plan, frontier.profile)
        plan = note_straggler(plan, frontier, replay, straggler_s)
    return plan if request.run is None else priced(plan, request.run)
