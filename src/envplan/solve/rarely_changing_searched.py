"""Candidates that change clocks seldom where clocks come late, or where a limit is local.

From the free candidate for each deadline of its grid one is made that uses at most 0.1% more.
Earlier deadlines are skipped by the proved bound, not by what the free candidates cost: this search
often finds cheaper plans than they are. A free candidate that costs no less than the one just
before it is passed over.

**Plans for clocks at once.** Where the free candidate is a plan for clocks at once that also keeps
these conditions, the plan with fewer changes for clocks at once is taken, if it keeps them, too.
Those plans have a finer grid, which best_by goes through separately. Its deadlines are skipped by
what the free ones cost.

**A later deadline never costs more**: the answer is the best candidate of all deadlines of both
grids that are not later, and none that costs less than deadlines are skipped by is taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Final

from envplan.frontier import Relaxation
from envplan.replay import Replay
from envplan.solve.candidates import (
    KEPT_PART,
    GridCandidates,
    IsPreferred,
    Question,
    keeps_everything,
)
from envplan.solve.conditions import SearchConditions
from envplan.solve.fewer_changes import ENERGY_PER_ALLOWANCE
from envplan.solve.local_search import SearchedCandidates
from envplan.solve.rarely_changing import (
    STEP_PART,
    RarelyChangingAtOnce,
    RarelyChangingCandidates,
)
from envplan.solve.solution import NoPlanInTimeError

#: A plan for clocks at once may end late by one part in so many of its deadline.
_LATE_PART: Final = 500
#: Late clocks make a plan cheaper by at most one part in so many; cheaper ones are dropped.
_CHEAPER_PART: Final = 500
#: A free candidate is a start only if it costs less than each of so many just before it.
_NUM_JUST_BEFORE: Final = 1


class RarelyChangingSearched(RarelyChangingCandidates, GridCandidates):
    """Candidates with fewer changes where clocks come late, or where a limit is local.

    Args:
        frontier: of the pipeline and profile.
        conditions: that every candidate keeps.
        free: candidates under the same conditions whose changes count for nothing.
        at_once: candidates with fewer changes for clocks that follow at once, without limits; None:
            where late clocks may save energy, so these say nothing.
    """

    _free: SearchedCandidates

    def __init__(
        self,
        frontier: Relaxation,
        conditions: SearchConditions,
        free: SearchedCandidates,
        at_once: RarelyChangingAtOnce | None,
    ) -> None:
        super().__init__(frontier, conditions, free)
        self._at_once = at_once

    def best_by(
        self,
        deadline_ns: int,
        *,
        idle_until_deadline: bool = False,
        is_preferred: IsPreferred = keeps_everything,
    ) -> Replay:
        """The best candidate that ends by a deadline."""
        idle = idle_until_deadline
        # The bound that the plan will state says best which earlier deadlines matter.
        self._free.bound_10fj(deadline_ns, idle_until_deadline=idle)
        best = super().best_by(deadline_ns, idle_until_deadline=idle, is_preferred=is_preferred)
        if self._at_once is None:
            return best

        def rank(candidate: Replay) -> tuple[bool, int]:
            return not is_preferred(candidate), self.cost_10fj(candidate, idle_until_deadline=idle)

        for at_once_ns in self._at_once.grid_deadlines(self.latest_useful_ns(deadline_ns, idle)):
            _, enough_10fj = rank(best)
            if self._at_once_floor_10fj(at_once_ns, idle) >= enough_10fj:
                break
            free = self._free_from_at_once(at_once_ns)
            if free is None or self._floor_of_free_10fj(free, idle) >= enough_10fj:
                continue
            kept = self._from_at_once(at_once_ns, free)
            if kept is not None and kept.makespan_ns <= deadline_ns:
                best = min(best, kept, key=rank)
        return best

    def near(self, deadline_ns: int) -> Replay:
        """A candidate that ends by a deadline not below T_min, for pictures and tables of many."""
        candidate = super().near(deadline_ns)
        return candidate if candidate.makespan_ns <= deadline_ns else self._free.near(deadline_ns)

    def grid_deadlines(self, latest_ns: int) -> Iterator[int]:
        """The deadlines of the grid up to a time, ns, the latest first."""
        return self._free.grid_deadlines(latest_ns)

    def deadlines_to_try(self, deadline_ns: int, idle_until_deadline: bool) -> Iterable[int]:
        """Grid deadlines whose candidates may be the best by a deadline, ns, the latest first."""
        return self._free.deadlines_to_try(deadline_ns, idle_until_deadline)

    def _may_be_best(self, grid_deadline_ns: int, question: Question) -> bool:
        free = self._free.at(grid_deadline_ns)
        if free.makespan_ns > question.deadline_ns:
            return False
        if self._is_from_at_once(grid_deadline_ns):
            floor_10fj = self._floor_of_free_10fj(free, question.idle_until_deadline)
            if floor_10fj >= question.enough_10fj:
                return False
        is_beyond_t_star = grid_deadline_ns > self._frontier.min_energy_time_ns
        cost_10fj = partial(self._free.cost_10fj, idle_until_deadline=is_beyond_t_star)
        return all(cost_10fj(free) < cost_10fj(one) for one in self._just_before(grid_deadline_ns))

    def _just_before(self, deadline_ns: int) -> Iterator[Replay]:
        """The free candidates for the deadlines of the grid just before one."""
        for earlier_ns in islice(self.grid_deadlines(deadline_ns - 1), _NUM_JUST_BEFORE):
            with suppress(NoPlanInTimeError):
                yield self._free.at(earlier_ns)

    def _make(self, deadline_ns: int) -> Replay:
        free = self._free.at(deadline_ns)
        time_ns = free.makespan_ns
        free_10fj = self._energy_10fj(free, time_ns)
        spared_10fj = free_10fj // ENERGY_PER_ALLOWANCE
        if not self._is_from_at_once(deadline_ns):
            return self._rarely_changing(free, time_ns, spared_10fj)
        # The deadline that a kept plan was made for may lie a step of its grid earlier.
        kept_limit_10fj = free_10fj + spared_10fj + free_10fj // STEP_PART

        def bound_10fj(idle: bool) -> int:
            return self.bound_10fj(deadline_ns, idle_until_deadline=idle)

        assert self._at_once is not None
        # The first of these may be late; the one before is then in time.
        for at_once_ns in islice(self._at_once.grid_deadlines(time_ns), 2):
            kept = self._from_at_once(at_once_ns, free)
            if kept is None or kept.makespan_ns > deadline_ns:
                continue
            kept_10fj = self._energy_10fj(kept, time_ns)
            costs_little = self.change_price_10fj > 0 or kept_10fj <= kept_limit_10fj
            if costs_little and not self._undercuts(kept, bound_10fj):
                return kept
        candidate = self._rarely_changing(free, time_ns, spared_10fj)
        floor_10fj = partial(self._floor_of_free_10fj, free)
        return free if self._undercuts(candidate, floor_10fj) else candidate

    def _is_from_at_once(self, deadline_ns: int) -> bool:
        """Whether the free candidate for a deadline of the grid is a plan for clocks at once."""
        return self._at_once is not None and self._free.is_for_clocks_at_once(deadline_ns)

    def _from_at_once(self, at_once_ns: int, free: Replay) -> Replay | None:
        """The candidate for clocks at once, where it keeps these conditions as it is.

        Args:
            at_once_ns: a grid deadline of those candidates.
            free: a free candidate for clocks at once that keeps these conditions.

        Returns:
            None where it breaks a condition, or costs more than without them, or less than a floor.
            It may end just after the deadline; then it serves later deadlines only.
        """
        assert self._at_once is not None
        kept = self.kept(self._at_once.at(at_once_ns), self._latest_end_ns(at_once_ns))
        if kept is None or self._undercuts(kept, partial(self._floor_of_free_10fj, free)):
            return None
        return (
            None if self._undercuts(kept, partial(self._at_once_floor_10fj, at_once_ns)) else kept
        )

    def _free_from_at_once(self, at_once_ns: int) -> Replay | None:
        """The best free candidate for clocks at once, where it keeps these conditions as it is."""
        assert self._at_once is not None
        free = self._at_once.free_by(at_once_ns, at_once_ns)
        return self.kept(free, self._latest_end_ns(at_once_ns))

    def _latest_end_ns(self, at_once_ns: int) -> int:
        """When a plan for clocks at once may end that is late because the first clocks are, ns."""
        is_first = at_once_ns == self._frontier.min_time_ns
        return at_once_ns if is_first else at_once_ns + at_once_ns // _LATE_PART

    def _floor_of_free_10fj(self, free: Replay, idle_until_deadline: bool) -> float:
        """What a candidate made from a free one for clocks at once costs at least, 10 fJ.

        Where changes have a price, one with fewer may cost much less.
        """
        if self.change_price_10fj:
            return -math.inf
        cost_10fj = self.cost_10fj(free, idle_until_deadline=idle_until_deadline)
        return cost_10fj - abs(cost_10fj) // KEPT_PART

    def _at_once_floor_10fj(self, at_once_ns: int, idle_until_deadline: bool) -> int:
        """What plans for clocks at once that are kept cost at least by a deadline, 10 fJ."""
        assert self._at_once is not None
        bound_10fj = self._at_once.bound_10fj(at_once_ns, idle_until_deadline=idle_until_deadline)
        return bound_10fj - abs(bound_10fj) // _CHEAPER_PART
