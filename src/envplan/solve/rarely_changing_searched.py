"""Candidates that change clocks seldom where clocks come late, or where a limit is local.

From the free candidate for each deadline of its grid one is made that uses at most 0.1% more.
Earlier deadlines are left out by the bound that is proved for them, since this search often comes
upon better plans than that for the free ones. Free candidates that are no better than those just
before them are passed over.

**Plans for clocks at once.** Where the free candidate is a plan for clocks at once that keeps the
conditions as it is, so is this one, if it keeps them. Deadlines of such plans lie closer together,
so they are looked at apart. They are left out by what the free ones cost.

**A later deadline never costs more**: the answer is the best candidate of all deadlines of both
grids that are not later, and none costs less than what others are left out by.
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
from envplan.solve.rarely_changing import RarelyChangingAtOnce, RarelyChangingCandidates
from envplan.solve.solution import NoPlanInTimeError

#: A plan for clocks at once may be late by one part in so many of its deadline where clocks come
#: late, or cost so much less.
_NEARLY_PART: Final = 500
#: A free candidate is one to start from if those for so many deadlines before are no better.
_NUM_JUST_BEFORE: Final = 2


class RarelyChangingSearched(RarelyChangingCandidates, GridCandidates):
    """Candidates with fewer changes where clocks come late, or where a limit is local.

    Args:
        frontier: of the pipeline and profile.
        conditions: that every candidate keeps.
        free: candidates under the same conditions whose changes count for nothing.
        at_once: candidates with fewer changes for clocks that follow at once, without limits; None:
            others may well be better.
    """

    def __init__(
        self,
        frontier: Relaxation,
        conditions: SearchConditions,
        free: SearchedCandidates,
        at_once: RarelyChangingAtOnce | None,
    ) -> None:
        super().__init__(frontier, conditions, free)
        self._searched = free
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
        best = super().best_by(deadline_ns, idle_until_deadline=idle, is_preferred=is_preferred)
        if self._at_once is None:
            return best

        def rank(candidate: Replay) -> tuple[bool, int]:
            return not is_preferred(candidate), self.cost_10fj(candidate, idle_until_deadline=idle)

        # Plans for clocks at once are made for deadlines that lie closer together.
        for at_once_ns in self._at_once.grid_deadlines(self.latest_useful_ns(deadline_ns, idle)):
            _, enough_10fj = rank(best)
            if self._kept_bound_10fj(at_once_ns, idle) >= enough_10fj:
                break
            free = self._kept_free(at_once_ns)
            if free is None or self._least_10fj(free, idle) >= enough_10fj:
                continue
            kept = self._kept(at_once_ns, free)
            if kept is not None and kept.makespan_ns <= deadline_ns:
                best = min(best, kept, key=rank)
        return best

    def near(self, deadline_ns: int) -> Replay:
        """A candidate that ends by a deadline not below T_min, for pictures and tables of many."""
        candidate = super().near(deadline_ns)
        return candidate if candidate.makespan_ns <= deadline_ns else self._free.near(deadline_ns)

    def grid_deadlines(self, latest_ns: int) -> Iterator[int]:
        """The deadlines of the grid up to a time, ns, the latest first."""
        return self._searched.grid_deadlines(latest_ns)

    def deadlines_to_try(self, deadline_ns: int, idle_until_deadline: bool) -> Iterable[int]:
        """Grid deadlines whose candidates may be the best by a deadline, ns, the latest first."""
        return self._searched.deadlines_to_try(deadline_ns, idle_until_deadline)

    def _may_be_best(self, grid_deadline_ns: int, question: Question) -> bool:
        free, idle = self._searched.at(grid_deadline_ns), question.idle_until_deadline
        if free.makespan_ns > question.deadline_ns:
            return False
        if self._is_kept(free) and self._least_10fj(free, idle) >= question.enough_10fj:
            return False
        cost_10fj = partial(self._searched.cost_10fj, idle_until_deadline=idle)
        return all(cost_10fj(free) < cost_10fj(one) for one in self._just_before(grid_deadline_ns))

    def _just_before(self, deadline_ns: int) -> Iterator[Replay]:
        """The free candidates for the deadlines of the grid just before one."""
        for earlier_ns in islice(self.grid_deadlines(deadline_ns - 1), _NUM_JUST_BEFORE):
            with suppress(NoPlanInTimeError):
                yield self._searched.at(earlier_ns)

    def _make(self, deadline_ns: int) -> Replay:
        free = self._searched.at(deadline_ns)
        time_ns = free.makespan_ns
        if self._is_kept(free):
            assert self._at_once is not None
            kept = self._kept(next(self._at_once.grid_deadlines(time_ns)), free)
            if kept is not None:
                return kept
        spared_10fj = self._energy_10fj(free, time_ns) // ENERGY_PER_ALLOWANCE
        candidate = self._rarely_changing(free, time_ns, spared_10fj)
        if self._is_kept(free) and self._is_below(candidate, partial(self._least_10fj, free)):
            return free
        return candidate

    def _is_kept(self, free: Replay) -> bool:
        """Whether a free candidate is one for clocks at once."""
        return self._at_once is not None and self._searched.is_for_clocks_at_once(free)

    def _kept(self, deadline_ns: int, free: Replay) -> Replay | None:
        """The candidate for clocks at once, where it keeps these conditions as it is.

        Args:
            deadline_ns: of the grid of those candidates.
            free: a free candidate for clocks at once that is kept.

        Returns:
            None where it breaks a condition, or costs more than without them, or less than the free
            one. It may end somewhat after the deadline; then it is one for later deadlines.
        """
        assert self._at_once is not None
        kept = self.kept(self._at_once.at(deadline_ns), self._latest_end_ns(deadline_ns))
        if kept is None or self._is_below(kept, partial(self._least_10fj, free)):
            return None
        return kept

    def _kept_free(self, deadline_ns: int) -> Replay | None:
        """The best free candidate for clocks at once, where it keeps these conditions as it is."""
        assert self._at_once is not None
        free = self._at_once.free_by(deadline_ns, deadline_ns)
        kept = self.kept(free, self._latest_end_ns(deadline_ns))
        if kept is None or self._is_below(kept, partial(self._kept_bound_10fj, deadline_ns)):
            return None
        return kept

    def _latest_end_ns(self, deadline_ns: int) -> int:
        """When a plan for clocks at once may end that is late because the first clocks are, ns."""
        is_first = deadline_ns == self._frontier.min_time_ns
        return deadline_ns if is_first else deadline_ns + deadline_ns // _NEARLY_PART

    def _least_10fj(self, free: Replay, idle_until_deadline: bool) -> float:
        """What a candidate made from one for clocks at once that is kept costs at least, 10 fJ.

        Where changes have a price, it may cost much less.
        """
        if self.change_price_10fj:
            return -math.inf
        cost_10fj = self.cost_10fj(free, idle_until_deadline=idle_until_deadline)
        return cost_10fj - abs(cost_10fj) // KEPT_PART

    def _kept_bound_10fj(self, deadline_ns: int, idle_until_deadline: bool) -> int:
        """What free candidates for clocks at once that are kept cost at least by a deadline."""
        assert self._at_once is not None
        bound_10fj = self._at_once.bound_10fj(deadline_ns, idle_until_deadline=idle_until_deadline)
        return bound_10fj - abs(bound_10fj) // _NEARLY_PART

    def _fallback(self, deadline_ns: int) -> Replay:
        return self._free.best_by(deadline_ns)
