"""Choices that keep a limit on the whole plan because operations where it breaks were changed.

Some such limits know which operations break them, and which options break them less
(`Limit.relieve`). The candidates of some deadlines are changed step by step, and every step is a
choice that may keep all limits. A candidate of an early deadline has time to give away.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Final, NamedTuple

from envplan.errors import NoAnswerError
from envplan.frontier import Relaxation
from envplan.replay import Replay
from envplan.solve.candidates import Candidates
from envplan.solve.limit_keeper import LimitKeeper
from envplan.solve.solution import KnownChoice

#: Deadlines between T_min and T_star whose candidates are changed.
_STARTS: Final = 9
#: Changes of each candidate.
_MAX_STEPS: Final = 150


class ReliefStep(NamedTuple):
    """A choice that changes have led to.

    Attributes:
        known_choice: the choice, and what its replay takes.
        violation: of the first limit that it breaks; 0: it keeps all.
    """

    known_choice: KnownChoice
    violation: int


class Relief:
    """Changes the candidates of one request so that they rather keep its limits.

    Args:
        frontier: of the pipeline.
        candidates: from which changes start.
        keeper: of the request's limits.
    """

    def __init__(self, frontier: Relaxation, candidates: Candidates, keeper: LimitKeeper) -> None:
        self._frontier = frontier
        self._candidates = candidates
        self._keeper = keeper

    @cached_property
    def steps(self) -> list[ReliefStep]:
        """All that the changes came to on the way, from each start."""
        steps: list[ReliefStep] = []
        for start in self._starts():
            steps += self._relieved(start)
        return steps

    def choices_that_keep_all(self) -> list[KnownChoice]:
        """The choices that keep all limits, those of least energy first."""
        choices = [step.known_choice for step in self.steps if step.violation == 0]
        return sorted(choices, key=lambda choice: choice.energy_10fj)

    def closest_by(self, deadline_ns: int) -> Replay | None:
        """The replay in time that breaks limits least; None where none is in time."""
        in_time = [step for step in self.steps if step.known_choice.makespan_ns <= deadline_ns]
        if not in_time:
            return None
        closest = min(in_time, key=lambda step: step.violation)
        return self._candidates.replay(closest.known_choice.choice)

    def _starts(self) -> list[Replay]:
        """The candidates of some deadlines from T_min to T_star, and that of T_max."""
        frontier = self._frontier
        t_min_ns = frontier.min_time_ns
        span_ns = frontier.min_energy_time_ns - t_min_ns
        deadlines_ns = [t_min_ns + span_ns * step // (_STARTS - 1) for step in range(_STARTS)]
        deadlines_ns.append(frontier.slowest_time_ns)
        starts = []
        for deadline_ns in dict.fromkeys(deadlines_ns):  # of a short span, several are the same
            try:
                starts.append(self._candidates.near(deadline_ns))
            except NoAnswerError:
                continue
        return starts

    def _relieved(self, replay: Replay) -> Iterator[ReliefStep]:
        """A replay, and its changes, until nothing can be changed, or the changes repeat.

        The changes do not depend on how strict the limit is. So a limit that one of them just keeps
        can be asked for.
        """
        limit = self._keeper.relieving
        assert limit is not None
        seen = set[bytes]()
        for _ in range(_MAX_STEPS):
            context = self._keeper.context(replay.makespan_ns)
            violated = self._keeper.first_violated(replay, context)
            violation = 0 if violated is None else violated.violation(replay, context)
            yield ReliefStep(KnownChoice.of(replay), violation)
            choice = limit.relieve(replay, context)
            if choice is None or choice.tobytes() in seen:
                return
            seen.add(choice.tobytes())
            replay = self._candidates.replay(choice)
