"""What a planner is, and the frequencies it can choose from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from envplan.costs import priced
from envplan.errors import InputError, NoAnswerError
from envplan.pipeline import Pipeline
from envplan.plan import note_straggler, replay_plan
from envplan.profile import Profile
from envplan.solve.single_clocks import ClockRows
from envplan.units import ns_from_s_floor, s_from_ns

if TYPE_CHECKING:
    from envplan.plan import Plan
    from envplan.request import Request
    from envplan.solve import Frontier


class Planner(Protocol):
    """Chooses a frequency for every operation of a traced pipeline."""

    @property
    def takes_target(self) -> bool:
        """Whether plan() can be asked for a time; if not, it settles on one of its own."""

    @property
    def name(self) -> str:
        """What the user calls it, and plan.json's `planner`."""

    def plan(self, frontier: Frontier, target_time_ns: int | None = None) -> Plan:
        """The planner's plan, replayed, priced and set against the frontier's lower bound.

        Args:
            target_time_ns: when the iteration must be over, ns; default: as fast as it can.

        Raises:
            NoAnswerError: the planner has no plan that fast; says its fastest.
            InputError: a target was given and the planner takes none.
        """


def answer(planner: Planner, frontier: Frontier, request: Request) -> Plan:
    """A planner's plan for what a request says of times and costs; the rest it knows nothing of.

    A straggler leaves those planners that take a target until it has finished.

    Raises:
        NoAnswerError: the planner has no plan that fast; says its fastest.
        InputError: a target is asked for and the planner takes none, or a rate ends before the run
            does.
    """
    straggler_s, deadline = request.straggler_time_s, request.deadline
    target_ns: int | None = None
    if deadline.time_s is not None:
        target_ns = ns_from_s_floor(deadline.time_s)
    elif deadline.slowdown is not None:
        target_ns = frontier.min_time_ns + int(frontier.min_time_ns * deadline.slowdown)
    plan = planner.plan(frontier, target_ns)
    if straggler_s is not None:
        until_ns = ns_from_s_floor(straggler_s)
        if planner.takes_target:
            plan = planner.plan(frontier, max(until_ns, plan.target.deadline_ns))
        replay = replay_plan(plan, frontier.profile)
        plan = note_straggler(plan, frontier, replay, straggler_s, until_ns)
    return plan if request.run is None else priced(plan, request.run)


def refuse_target(planner: str, target_time_ns: int | None) -> None:
    """For planners that settle on a time of their own.

    Raises:
        InputError: a target was given.
    """
    if target_time_ns is not None:
        raise InputError(
            f"planner {planner} takes no target: it settles on an iteration time of its own"
        )


def no_plan_so_fast(planner: str, target_time_ns: int, fastest_ns: int) -> NoAnswerError:
    return NoAnswerError(
        f"planner {planner} has no plan that finishes in {s_from_ns(target_time_ns):.9f} s; its "
        f"fastest takes {s_from_ns(fastest_ns):.9f} s"
    )


def clocks_of_operations(pipeline: Pipeline, profile: Profile) -> list[ClockRows]:
    """The clocks of each operation, (N); operations with one table share them."""
    known: dict[tuple[int, str], ClockRows] = {}
    for op in pipeline.operations:
        key = (op.profile_stage, op.instruction)
        if key not in known:
            known[key] = ClockRows.of(profile.table(*key))
    return [known[op.profile_stage, op.instruction] for op in pipeline.operations]


def all_clocks(clocks: list[ClockRows]) -> list[int]:
    """Every frequency that some operation can be set to, ascending; [0] if none is controlled."""
    return sorted({mhz for one in set(clocks) for mhz in one.mhz if mhz}) or [0]
