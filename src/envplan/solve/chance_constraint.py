"""Deadlines that are held with a probability though times vary: a chance constraint.

Under noise an iteration is on average longer than its plan says, for it waits for the slowest of
what runs side by side. So the choice is one for an earlier deadline than the one it has to hold,
or, where even T_min's is too slow for that, T_min's with operations made faster. All of these stand
in one order, the levels of a SpeedLadder, whatever the deadline is, and the first of those that
hold is found by bisection, every candidate meeting the same draws (a sample average approximation).
What holds a deadline holds a later one, so a later deadline never leads to a higher level. Fresh
draws prove what comes out; where they do not, the next attempt aims higher.
"""

from __future__ import annotations

from functools import partial
from typing import Final

import numpy as np

from envplan.errors import NoAnswerError
from envplan.frontier import Progress, Relaxation
from envplan.replay import Replay
from envplan.request.limits import HoldsWithProbability, LimitContext
from envplan.solve.candidates import Candidates
from envplan.solve.deadline_solver import FINE_RESOLUTION, bisect_first_feasible
from envplan.solve.limit_keeper import MAX_PROOFS, LimitKeeper
from envplan.solve.solution import NoPlanInTimeError, Solution

#: Levels with deadlines, from the slowest to T_min's,
_DEADLINE_LEVELS: Final = 750
#: and from there to the fastest options.
_FASTER_LEVELS: Final = 250


class SpeedLadder:
    """Choices from the slowest worth having to the fastest there is, by level.

    Level 0 is the slowest. Up to _DEADLINE_LEVELS, a level is a deadline, the last of them T_min.
    From there on, T_min's options move towards the fastest ones.

    Args:
        frontier: of the pipeline.
        candidates: of the frontier.
        idle_until_deadline: everybody waits until the deadline.
    """

    top: Final = _DEADLINE_LEVELS + _FASTER_LEVELS

    def __init__(
        self, frontier: Relaxation, candidates: Candidates, *, idle_until_deadline: bool
    ) -> None:
        self._candidates = candidates
        self._idle_until_deadline = idle_until_deadline
        self._t_min_ns = frontier.min_time_ns
        self._slowest_ns = frontier.min_energy_time_ns
        if idle_until_deadline:
            self._slowest_ns = frontier.slowest_time_ns

    def deadline_ns(self, level: int) -> int:
        """The deadline of a level, ns; from _DEADLINE_LEVELS on T_min."""
        span_ns = self._slowest_ns - self._t_min_ns
        return self._slowest_ns - span_ns * min(level, _DEADLINE_LEVELS) // _DEADLINE_LEVELS

    def replay_at(self, level: int) -> Replay:
        """The replay of a level's choice."""
        candidates = self._candidates
        try:
            replay = candidates.best_by(
                self.deadline_ns(level), idle_until_deadline=self._idle_until_deadline
            )
        except NoPlanInTimeError:
            replay = candidates.fastest
        if level <= _DEADLINE_LEVELS:
            return replay
        # Options of a table are sorted by time, the fastest first.
        share = (level - _DEADLINE_LEVELS) / _FASTER_LEVELS
        steps = np.floor((candidates.fastest_choice - replay.rows) * share).astype(np.int32)
        return candidates.replay(replay.rows + steps)


def solve_with_probability(
    limit: HoldsWithProbability,
    keeper: LimitKeeper,
    ladder: SpeedLadder,
    context: LimitContext,
    progress: Progress | None = None,
) -> Solution:
    """The choice of least energy found that holds its deadline with a probability.

    Args:
        limit: on the probability.
        keeper: of all limits; the local ones must hold, too.
        ladder: to choose from.
        context: with the deadline.
        progress: called with (bisections to go, 0).

    Raises:
        NoAnswerError: none was proved; says what could be held.
    """
    fastest = ladder.replay_at(SpeedLadder.top)

    def keeps_deadline_and_local_limits(replay: Replay) -> bool:
        is_in_time = replay.makespan_ns <= context.deadline_ns
        return is_in_time and keeper.keeps(replay, context, keeper.local_limits)

    def replay_if_likely(level: int, attempt: int) -> Replay | None:
        if ladder.deadline_ns(level) > context.deadline_ns:
            return None
        replay = ladder.replay_at(level)
        if not keeps_deadline_and_local_limits(replay):
            return None
        return None if limit.violation(replay, context, attempt=attempt) else replay

    for attempt in range(MAX_PROOFS):
        likely_replay = partial(replay_if_likely, attempt=attempt)
        replay = bisect_first_feasible(
            -1, SpeedLadder.top, likely_replay, resolution=FINE_RESOLUTION, progress=progress
        )
        if replay is None:
            replay = fastest
        robustness = limit.certify(replay, context, attempt=attempt)
        if robustness is not None and keeps_deadline_and_local_limits(replay):
            return Solution(replay, context.deadline_ns, robustness=robustness)
    raise NoAnswerError(limit.explain_violation(fastest, context))
