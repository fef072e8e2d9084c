"""What a planner is, and the frequencies it can choose from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from envplan.errors import InputError, NoAnswerError
from envplan.pipeline import Pipeline
from envplan.profile import Profile
from envplan.solve.single_clocks import ClockRows
from envplan.units import s_from_ns

if TYPE_CHECKING:
    from envplan.plan import Plan
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
