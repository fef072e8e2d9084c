"""The protocol of planners, and the two that need no explanation: maximum frequency and ours."""

from __future__ import annotations

from typing import ClassVar

from envplan.errors import InputError
from envplan.plan import Plan, build_plan, replay_plan
from envplan.plan.build import note_straggler
from envplan.plan.costs import priced
from envplan.plan.target import Target, TargetKind
from envplan.replay import Replay
from envplan.request import Effort, Request
from envplan.solve import Frontier
from envplan.units import ns_from_s_floor, s_from_ns


class Planner:
    """Chooses a frequency for every operation of a traced pipeline.

    Attributes:
        name: on the command line, and plan.json's `planner`.
        takes_target: whether plan() accepts an iteration time; if not, the planner settles on one
            of its own.
        target_kind: plan.json's `target.kind` of its plans.
    """

    name: ClassVar[str]
    takes_target: ClassVar[bool] = False
    target_kind: ClassVar[TargetKind] = "planner"

    def plan(self, frontier: Frontier, target_time_ns: int | None = None) -> Plan:
        """Plan one iteration, replay it, and set it against the frontier's lower bound.

        Args:
            target_time_ns: when the iteration must be over, ns; default: as fast as it can.

        Raises:
            NoAnswerError: the planner has no plan that fast; says its fastest.
            InputError: a target was given and the planner takes none.
        """
        if target_time_ns is not None and not self.takes_target:
            raise InputError(
                f"planner {self.name} takes no target: it settles on an iteration time of its own"
            )
        return self.plan_of_replay(frontier, self.choose(frontier, target_time_ns), target_time_ns)

    def choose(self, frontier: Frontier, target_time_ns: int | None) -> Replay:
        """Choose an option for every operation; the arguments are those of plan().

        Returns:
            The replay of the choice.
        """
        raise NotImplementedError

    def plan_of_replay(
        self, frontier: Frontier, replay: Replay, target_time_ns: int | None = None
    ) -> Plan:
        """Build the plan that states a choice of this planner."""
        deadline_ns = replay.makespan_ns if target_time_ns is None else target_time_ns
        target = Target(
            kind=self.target_kind,
            time_s=None if target_time_ns is None else s_from_ns(deadline_ns),
            deadline_s=s_from_ns(deadline_ns),
        )
        return build_plan(frontier, replay, target=target, planner=self.name)

    def solve(self, frontier: Frontier, request: Request) -> Plan:
        """Plan for a request, as far as it speaks of times and costs.

        While a straggler makes everybody wait, planners that take a target use the time until it
        has finished.

        Raises:
            NoAnswerError: the planner has no plan that fast; says its fastest.
            InputError: more is asked for than the planner can do, a target where it takes none, or
                a rate ends before the run does.
        """
        self._refuse_all_but_times(request)
        plan = self.plan(frontier, _target_time_ns(frontier, request))
        if request.straggler_time_s is not None:
            plan = self._plan_for_straggler(frontier, plan, request.straggler_time_s)
        return plan if request.run is None else priced(plan, request.run)

    def _refuse_all_but_times(self, request: Request) -> None:
        is_about_times_alone = (
            not request.limits
            and not request.switch_latency_s
            and request.objective == "energy"
            and request.effort == Effort()
        )
        if not is_about_times_alone:
            raise InputError(
                f"planner {self.name} knows times only: no limits, late clocks, cheapest runs, "
                "polishing or ladders; planner frontier does"
            )

    def _plan_for_straggler(self, frontier: Frontier, plan: Plan, straggler_time_s: float) -> Plan:
        """The plan that uses a straggler's time if it can, with the energy of waiting noted."""
        if self.takes_target:
            straggler_ns = ns_from_s_floor(straggler_time_s)
            plan = self.plan(frontier, max(straggler_ns, plan.target.deadline_ns))
        replay = replay_plan(plan, frontier.profile)
        return note_straggler(plan, frontier, replay, straggler_time_s)


def _target_time_ns(frontier: Frontier, request: Request) -> int | None:
    """The iteration time that a request asks other planners for, ns; None: as fast as they can."""
    if request.deadline.kind == "no-slowdown":
        return None
    asked_ns = request.deadline.resolve_ns(frontier.min_time_ns)
    return frontier.min_energy_time_ns if asked_ns is None else asked_ns


class MaxFrequency(Planner):
    """Every operation at its highest frequency: what happens without any planning."""

    name = "max_frequency"
    target_kind = "max-frequency"

    def choose(self, frontier: Frontier, target_time_ns: int | None) -> Replay:
        """Choose all the highest clocks."""
        return frontier.problem.replay(frontier.problem.max_frequency_rows)


class FrontierPlanner(Planner):
    """The exact relaxation, rounded: Frontier.plan as a planner."""

    name = "frontier"
    takes_target = True

    def plan(self, frontier: Frontier, target_time_ns: int | None = None) -> Plan:
        """Plan as `Frontier.plan` does, for clocks that come at once, as all planners do.

        Raises:
            NoAnswerError: the target is below T_min.
        """
        target_time_s = None if target_time_ns is None else s_from_ns(target_time_ns)
        return frontier.plan(target_time_s, switch_latency=0.0)

    def solve(self, frontier: Frontier, request: Request) -> Plan:
        """Plan for whatever a request asks."""
        return frontier.solve(request)
