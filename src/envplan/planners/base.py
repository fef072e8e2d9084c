"""What a planner is, and those that choose by time alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import ClassVar

from envplan.errors import InputError, NoAnswerError
from envplan.plan import Plan, build_plan
from envplan.plan.model import Target, TargetKind
from envplan.replay import Replay, Rows
from envplan.solve import Frontier
from envplan.solve.single_clocks import StageClocks
from envplan.units import s_from_ns


class Planner:
    """Chooses a frequency for every operation of a traced pipeline.

    Attributes:
        name: what the user calls it, and plan.json's `planner`.
        takes_target: whether plan() can be asked for a time; if not, it settles on one of its own.
        target_kind: what plan.json calls what it aims at.
    """

    name: ClassVar[str]
    takes_target: ClassVar[bool] = False
    target_kind: ClassVar[TargetKind] = "planner"

    def plan(self, frontier: Frontier, target_time_ns: int | None = None) -> Plan:
        """The planner's plan, replayed, priced and set against the frontier's lower bound.

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
        replay = self.choose(frontier, target_time_ns)
        deadline_ns = replay.makespan_ns if target_time_ns is None else target_time_ns
        target = Target(
            kind=self.target_kind,
            time_s=None if target_time_ns is None else s_from_ns(deadline_ns),
            deadline_s=s_from_ns(deadline_ns),
        )
        return build_plan(frontier, replay, target=target, planner=self.name)

    def choose(self, frontier: Frontier, target_time_ns: int | None) -> Replay:
        """The replay of what it chooses; the arguments are those of plan."""
        raise NotImplementedError


class MaxFrequency(Planner):
    """Every operation at its highest frequency: what happens without any planning."""

    name = "max_frequency"
    target_kind = "max-frequency"

    def choose(self, frontier: Frontier, target_time_ns: int | None) -> Replay:
        """That of all the highest clocks."""
        return frontier.problem.replay(frontier.problem.max_frequency_rows)


class _SingleClocks(Planner):
    """Plans of one clock a stage.

    Attributes:
        choices: rows to choose from.
    """

    takes_target = True
    choices: ClassVar[Callable[[StageClocks], Iterator[Rows]]]

    def candidates(self, frontier: Frontier) -> list[Replay]:
        """This planner's frontier, those that no other one beats: ascending time, descending
        energy."""
        problem, kept = frontier.problem, list[Replay]()
        replays = (problem.replay(rows) for rows in type(self).choices(StageClocks(problem)))
        for replay in sorted(replays, key=lambda one: (one.makespan_ns, one.energy_fj)):
            if not kept or replay.energy_fj < kept[-1].energy_fj:
                kept.append(replay)
        return kept

    def choose(self, frontier: Frontier, target_time_ns: int | None) -> Replay:
        """The slowest in time, which is the cheapest; without a target, the fastest."""
        fastest, *slower = self.candidates(frontier)
        deadline_ns = fastest.makespan_ns if target_time_ns is None else target_time_ns
        if fastest.makespan_ns > deadline_ns:
            raise NoAnswerError(
                f"planner {self.name} has no plan that finishes in {s_from_ns(deadline_ns):.9f} "
                f"s; its fastest takes {s_from_ns(fastest.makespan_ns):.9f} s"
            )
        return [fastest, *(one for one in slower if one.makespan_ns <= deadline_ns)][-1]


class ZeusGlobal(_SingleClocks):
    """One frequency for all stages: the ZeusGlobal baseline of Perseus (SOSP 2024).

    Perseus scans power limits, we scan clocks: each clock of the profile is one point of this
    planner's own frontier.
    """

    name = "zeus_global"
    choices = StageClocks.one_for_all


class ZeusPerStage(_SingleClocks):
    """A frequency for each stage that balances forward times: the ZeusPerStage baseline of Perseus
    (SOSP 2024).

    The stage whose fastest forward is the slowest sets the pace: each of its clocks is one point.
    All other stages take their lowest clock at which a forward takes no longer than there.
    Backwards run at their stage's clock; they need not balance, which is why this planner can be
    slower than maximum frequency everywhere.
    """

    name = "zeus_per_stage"
    choices = StageClocks.balanced


class FrontierPlanner(Planner):
    """The exact relaxation, rounded: Frontier.plan as a planner."""

    name = "frontier"
    takes_target = True

    def plan(self, frontier: Frontier, target_time_ns: int | None = None) -> Plan:
        """Raises: NoAnswerError: the target is below T_min."""
        return frontier.plan(None if target_time_ns is None else s_from_ns(target_time_ns))
