"""Zeus's two planners: one clock for the whole pipeline, or one for each stage.

They are the baselines ZeusGlobal and ZeusPerStage of Perseus (Chung et al., SOSP 2024). Perseus
scans power limits; here clocks are scanned.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from envplan.errors import NoAnswerError
from envplan.planners.base import Planner
from envplan.replay import Replay, Rows
from envplan.solve import Frontier
from envplan.solve.uniform_clocks import UniformClocks
from envplan.units import s_from_ns


class ZeusPlanner(Planner, ABC):
    """Chooses among a few assignments of one clock to each stage."""

    takes_target = True

    @abstractmethod
    def choices(self, clocks: UniformClocks) -> Iterator[Rows]:
        """All choices that this planner considers, each (N,)."""

    def undominated_replays(self, frontier: Frontier) -> list[Replay]:
        """This planner's own frontier: replays by ascending time, and so by descending energy."""
        problem = frontier.problem
        replays = [problem.replay(choice) for choice in self.choices(UniformClocks(problem))]
        replays.sort(key=lambda replay: (replay.makespan_ns, replay.energy_10fj))
        undominated: list[Replay] = []
        for replay in replays:
            if not undominated or replay.energy_10fj < undominated[-1].energy_10fj:
                undominated.append(replay)
        return undominated

    def choose(self, frontier: Frontier, target_time_ns: int | None) -> Replay:
        """Choose the slowest replay in time, which is the cheapest; without a target the fastest.

        Raises:
            NoAnswerError: the fastest is too slow.
        """
        replays = self.undominated_replays(frontier)
        fastest = replays[0]
        deadline_ns = fastest.makespan_ns if target_time_ns is None else target_time_ns
        if fastest.makespan_ns > deadline_ns:
            raise NoAnswerError(
                f"planner {self.name} has no plan that finishes in {s_from_ns(deadline_ns):.9f} "
                f"s; its fastest takes {s_from_ns(fastest.makespan_ns):.9f} s"
            )
        return [replay for replay in replays if replay.makespan_ns <= deadline_ns][-1]


class ZeusGlobal(ZeusPlanner):
    """One frequency for all stages; each clock of the profile is a point of its frontier."""

    name = "zeus_global"

    def choices(self, clocks: UniformClocks) -> Iterator[Rows]:
        """Every clock, for all stages alike."""
        return clocks.one_for_all()


class ZeusPerStage(ZeusPlanner):
    """A frequency for each stage that balances forward times.

    The stage whose fastest forward is the slowest sets the pace: each of its clocks is one point.
    All other stages take their lowest clock at which a forward takes no longer than there.
    Backwards run at their stage's clock; they need not balance, which is why this planner can be
    slower than maximum frequency everywhere.
    """

    name = "zeus_per_stage"

    def choices(self, clocks: UniformClocks) -> Iterator[Rows]:
        """Every clock of the slowest stage, with clocks of all others that keep its pace."""
        return clocks.balanced()
