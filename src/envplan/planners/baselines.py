"""What there is without planning operation by operation: one clock for all, or one a stage."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from envplan.plan import Plan, build_plan
from envplan.plan.model import Target
from envplan.planners.base import no_plan_so_fast, refuse_target
from envplan.replay import Replay
from envplan.solve import Frontier
from envplan.solve.single_clocks import StageClocks
from envplan.units import s_from_ns


class MaxFrequency:
    """Every operation at its highest frequency: what happens without any planning."""

    name: Final = "max_frequency"
    takes_target: Final = False

    def plan(self, frontier: Frontier, target_time_ns: int | None = None) -> Plan:
        """Raises: InputError: a target was given."""
        refuse_target(self.name, target_time_ns)
        return frontier.max_frequency_plan()


class ZeusGlobal:
    """One frequency for all stages: the ZeusGlobal baseline of Perseus (SOSP 2024).

    Perseus scans power limits, we scan clocks: each clock of the profile is one point of this
    planner's own frontier.
    """

    name: Final = "zeus_global"
    takes_target: Final = True

    def candidates(self, frontier: Frontier) -> list[Replay]:
        """This planner's frontier: ascending time, descending energy."""
        problem = frontier.problem
        return _pareto(problem.replay(rows) for rows in StageClocks(problem).one_for_all())

    def plan(self, frontier: Frontier, target_time_ns: int | None = None) -> Plan:
        """Raises: NoAnswerError: no clock is that fast."""
        return cheapest_in_time(self.name, frontier, self.candidates(frontier), target_time_ns)


class ZeusPerStage:
    """A frequency for each stage that balances forward times: the ZeusPerStage baseline of Perseus
    (SOSP 2024).

    The stage whose fastest forward is the slowest sets the pace: each of its clocks is one point.
    All other stages take their lowest clock at which a forward takes no longer than there.
    Backwards run at their stage's clock; they need not balance, which is why this planner can be
    slower than maximum frequency everywhere.
    """

    name: Final = "zeus_per_stage"
    takes_target: Final = True

    def candidates(self, frontier: Frontier) -> list[Replay]:
        """This planner's frontier: ascending time, descending energy."""
        problem = frontier.problem
        return _pareto(problem.replay(rows) for rows in StageClocks(problem).balanced())

    def plan(self, frontier: Frontier, target_time_ns: int | None = None) -> Plan:
        """Raises: NoAnswerError: no balanced choice is that fast."""
        return cheapest_in_time(self.name, frontier, self.candidates(frontier), target_time_ns)


def _pareto(replays: Iterable[Replay]) -> list[Replay]:
    """Those that no other one beats, ascending in time."""
    kept: list[Replay] = []
    for replay in sorted(replays, key=lambda one: (one.makespan_ns, one.energy_fj)):
        if not kept or replay.energy_fj < kept[-1].energy_fj:
            kept.append(replay)
    return kept


def cheapest_in_time(
    name: str, frontier: Frontier, replays: list[Replay], target_time_ns: int | None
) -> Plan:
    """The plan of the slowest, which is the cheapest, replay in time; without a target, of the
    fastest."""
    chosen = replays[0]
    deadline_ns = chosen.makespan_ns if target_time_ns is None else target_time_ns
    if chosen.makespan_ns > deadline_ns:
        raise no_plan_so_fast(name, deadline_ns, chosen.makespan_ns)
    if target_time_ns is not None:
        chosen = [one for one in replays if one.makespan_ns <= deadline_ns][-1]
    target = Target(
        kind="planner",
        time_s=None if target_time_ns is None else s_from_ns(deadline_ns),
        deadline_s=s_from_ns(deadline_ns),
    )
    return build_plan(frontier, chosen, target=target, planner=name)
