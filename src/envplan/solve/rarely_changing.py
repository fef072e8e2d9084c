"""Candidates that change clocks as seldom as can be for next to no energy.

Each is made from the best one whose changes count for nothing (the free one), under the same
conditions: clocks that come late or must be held, and caps on the peak, are kept by the same
search.

**Never more than 0.1% above.** A candidate for a deadline of the grid may use 0.1% more than the
free one for the ns before the next deadline. What is asked for lies between the two, so the free
plan for it uses at least as much: the 0.1% holds for it, too.

**A later deadline never costs more**, but for two exceptions. The answer is the candidate of least
energy of all deadlines of the grid that are not later. Few use less than the free one of their
deadline: once that uses as much as the best found, no earlier one is looked at but those that are
kept from clocks at once, which may end somewhat late. What comes upon a better plan than the free
one is not known to later deadlines, nor is one that was made for a free plan much better than those
of the grid.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Final

from envplan.frontier import Relaxation
from envplan.replay import Replay, Rows, Search
from envplan.solve.candidates import KEPT_PART, Candidates, IsPreferred, keeps_everything
from envplan.solve.conditions import SearchConditions
from envplan.solve.deadline_grid import RoundingGrid
from envplan.solve.fewer_changes import (
    ENERGY_PER_ALLOWANCE,
    WINDOW_OPERATIONS,
    num_moves,
    with_fewest_changes,
    with_fewest_changes_by_windows,
    with_priced_changes,
)
from envplan.solve.late_bound import FlowPrices, PricedBound, cheapest_stage_paths
from envplan.solve.solution import NoPlanInTimeError, Polished

#: Energy between the deadlines of the grid, as a part of it: a part of what fewer changes may cost.
_STEP_SHARE: Final = 5e-4
#: Between those that candidates are made for where clocks come late or something is limited: there
#: even free candidates take long to find.
_STEP_SHARE_IF_SLOW: Final = 1e-3
#: A plan for clocks at once may be late by one part in so many of its deadline.
_NEARLY_PART: Final = 1000
#: Of what polishing has gained, so much is given back for fewer changes: one in so many.
_PART_GIVEN_BACK: Final = 3
#: Of the time for polishing, so much is for fewer changes.
_POLISHING_SHARE: Final = 0.3


class RarelyChangingCandidates(Candidates):
    """Candidates with fewer changes of clock, as the conditions want them.

    Args:
        frontier: of the pipeline and profile.
        conditions: that every candidate keeps.
        free: candidates under the same conditions whose changes count for nothing.
        plain: candidates with as few changes for clocks that follow at once, without limits; None:
            these are they, or others may well be better.
    """

    def __init__(
        self,
        frontier: Relaxation,
        conditions: SearchConditions,
        free: Candidates,
        plain: RarelyChangingCandidates | None,
    ) -> None:
        super().__init__(frontier, conditions)
        self._plain = plain
        self._free = free
        num_operations = len(frontier.pipeline.operations)
        self._in_windows = conditions.is_plain and num_operations > WINDOW_OPERATIONS
        self._grid = RoundingGrid(frontier, _STEP_SHARE)
        self._coarse_grid = self._grid
        if not conditions.is_plain:
            self._coarse_grid = RoundingGrid(frontier, _STEP_SHARE_IF_SLOW)
        self._moves = num_moves(num_operations, conditions.moves_share)
        self._made: dict[int, Replay] = {}
        self._made_from_free: dict[bytes, Replay] = {}

    def best_by(
        self,
        deadline_ns: int,
        *,
        idle_until_deadline: bool = False,
        is_preferred: IsPreferred = keeps_everything,
    ) -> Replay:
        """The best candidate that ends by a deadline."""
        cost_10fj = partial(self.cost_10fj, idle_until_deadline=idle_until_deadline)
        free = self._free.best_by(
            deadline_ns, idle_until_deadline=idle_until_deadline, is_preferred=is_preferred
        )
        candidates: list[Replay] = []
        latest_ns = self.latest_useful_ns(deadline_ns, idle_until_deadline)
        for grid_deadline_ns in self._grid.descending_from(latest_ns):
            least_10fj = min(map(cost_10fj, candidates), default=math.inf)
            try:
                bound_10fj = self.bound_10fj(
                    grid_deadline_ns, idle_until_deadline=idle_until_deadline
                )
                kept_10fj = self._kept_bound_10fj(
                    grid_deadline_ns, idle_until_deadline=idle_until_deadline
                )
                if min(bound_10fj, kept_10fj) >= least_10fj:
                    break
                if bound_10fj >= least_10fj:
                    candidate = self._kept_plain_candidate(grid_deadline_ns)
                else:
                    candidate = self._at_or_kept(grid_deadline_ns)
            except NoPlanInTimeError:
                break
            if candidate is None or candidate.makespan_ns > deadline_ns:
                continue  # the plan for clocks at once may be late by a first clock's latency
            if is_preferred(candidate):
                candidates.append(candidate)
        best = min(candidates, key=cost_10fj, default=free)
        if self._is_dear(best, free):
            own = self._from_free(free)
            best = own if is_preferred(own) else free
        return best

    def _kept_bound_10fj(self, deadline_ns: int, *, idle_until_deadline: bool) -> float:
        """A lower bound on what the candidate for clocks at once costs here, if it is kept, 10 fJ.

        It may end after the deadline, so it may cost less than a free one that ends by it.
        """
        if self._plain is None:
            return math.inf
        plain_10fj = min(
            self._plain.bound_10fj(deadline_ns, idle_until_deadline=idle_until_deadline),
            self._plain._kept_bound_10fj(deadline_ns, idle_until_deadline=idle_until_deadline),
        )
        return plain_10fj - plain_10fj // KEPT_PART

    def _is_dear(self, replay: Replay, free: Replay) -> bool:
        """Whether a candidate uses more than it may beyond a free one.

        It may where the free one is much better than those for the deadlines of the grid.
        """
        if self.change_price_10fj:
            return False
        deadline_ns = max(free.makespan_ns, replay.makespan_ns)
        least_10fj = self._energy_10fj(free, deadline_ns)
        return (
            self._energy_10fj(replay, deadline_ns) > least_10fj + least_10fj // ENERGY_PER_ALLOWANCE
        )

    def _from_free(self, free: Replay) -> Replay:
        """The candidate made from a free one, by the same time."""
        key = free.rows.tobytes()
        if key not in self._made_from_free:
            spared_10fj = self._energy_10fj(free, free.makespan_ns) // ENERGY_PER_ALLOWANCE
            rows = self._seldom(free, free.makespan_ns, spared_10fj)
            self._made_from_free[key] = self.replay(rows)
        return self._made_from_free[key]

    def near(self, deadline_ns: int) -> Replay:
        """A candidate that ends by a deadline not below T_min, for pictures and tables of many."""
        candidate = self._at(next(self._coarse_grid.descending_from(deadline_ns)))
        return candidate if candidate.makespan_ns <= deadline_ns else self._free.near(deadline_ns)

    @property
    def num_made(self) -> int:
        """How many candidates have been made."""
        return len(self._made)

    def latest_useful_ns(self, deadline_ns: int, idle_until_deadline: bool) -> int:
        """The latest time up to a deadline that candidates may be the best for, ns."""
        return self._free.latest_useful_ns(deadline_ns, idle_until_deadline)

    @property
    def fastest(self) -> Replay:
        """The fastest candidate found that keeps the local limits."""
        return self._free.fastest

    @property
    def fastest_choice(self) -> Rows:
        """The fastest choice known, int32 (N,), whatever it uses."""
        return self._free.fastest_choice

    def faster_than(self, replay: Replay) -> Replay:
        """The fastest candidate that a search finds just before another one, or that one itself."""
        return self._free.faster_than(replay)

    def polished(
        self, incumbent: Replay, deadline_ns: int, *, idle_until_deadline: bool, seconds: float
    ) -> Polished:
        """Improve a candidate by a deadline for about so many seconds.

        Most of what that gains is kept, the rest is spent on fewer changes.
        """
        free = self._free.best_by(deadline_ns, idle_until_deadline=idle_until_deadline)
        polished = self._free.polished(
            free,
            deadline_ns,
            idle_until_deadline=idle_until_deadline,
            seconds=seconds * (1 - _POLISHING_SHARE),
        )
        deadline_ns = self.latest_useful_ns(deadline_ns, idle_until_deadline)
        gained_10fj = free.energy_until(deadline_ns) - polished.replay.energy_until(deadline_ns)
        rows = self._seldom(polished.replay, deadline_ns, max(0, gained_10fj) // _PART_GIVEN_BACK)
        replay = self.replay(rows)
        is_better = self.cost_10fj(
            replay, idle_until_deadline=idle_until_deadline
        ) < self.cost_10fj(incumbent, idle_until_deadline=idle_until_deadline)
        return replace(polished, replay=replay if is_better else incumbent)

    def _at_or_kept(self, deadline_ns: int) -> Replay | None:
        """The candidate for a deadline of the grid; None where it is not one to make one for.

        Raises:
            NoPlanInTimeError: no free one was found.
        """
        if next(self._coarse_grid.descending_from(deadline_ns)) == deadline_ns:
            return self._at(deadline_ns)
        return self._kept_plain_candidate(deadline_ns)

    def _at(self, deadline_ns: int) -> Replay:
        """The candidate for a deadline of the coarse grid.

        Raises:
            NoPlanInTimeError: no free one was found.
        """
        if deadline_ns not in self._made:
            kept = self._kept_plain_candidate(deadline_ns)
            if kept is None:
                free = self._free_by(deadline_ns, deadline_ns)
                spared_10fj = self._most_energy_10fj(deadline_ns) - self._energy_10fj(
                    free, deadline_ns
                )
                kept = self.replay(self._seldom(free, deadline_ns, max(0, spared_10fj)))
            self._made[deadline_ns] = kept
        return self._made[deadline_ns]

    def _kept_plain_candidate(self, deadline_ns: int) -> Replay | None:
        """The candidate for clocks at once, where it keeps these conditions as it is.

        Args:
            deadline_ns: of the grid.

        Returns:
            None where it breaks a condition, or costs more than without them. It may end somewhat
            after the deadline; then it is one for later deadlines.
        """
        plain = self._plain
        if plain is None:
            return None
        # Where the free one is not kept, one with few changes, which takes longer to find, is not.
        latest_ns = deadline_ns
        if deadline_ns > self._frontier.min_time_ns:  # else there are no earlier ones
            latest_ns += deadline_ns // _NEARLY_PART
        if self.kept(plain._free_by(deadline_ns, deadline_ns), latest_ns) is None:
            return None
        return self.kept(plain._at(deadline_ns), latest_ns)

    def _free_by(self, time_ns: int, deadline_ns: int) -> Replay:
        """The best free candidate by a time, for a deadline: beyond T_star everybody waits."""
        is_beyond_t_star = deadline_ns > self._frontier.min_energy_time_ns
        return self._free.best_by(time_ns, idle_until_deadline=is_beyond_t_star)

    def _most_energy_10fj(self, deadline_ns: int) -> int:
        """What the candidate for a deadline of the grid may use, 10 fJ."""
        t_star_ns = self._frontier.min_energy_time_ns
        last_ns = max(deadline_ns, self._coarse_grid.first_after(deadline_ns) - 1)
        if deadline_ns <= t_star_ns:
            last_ns = min(last_ns, t_star_ns)
        free = self._free_by(last_ns, deadline_ns)
        least_10fj = self._energy_10fj(free, deadline_ns)
        return least_10fj + least_10fj // ENERGY_PER_ALLOWANCE

    def _energy_10fj(self, replay: Replay, deadline_ns: int) -> int:
        """Energy as it counts for a deadline: beyond T_star everybody waits until then."""
        is_beyond_t_star = deadline_ns > self._frontier.min_energy_time_ns
        return replay.energy_until(deadline_ns) if is_beyond_t_star else replay.energy_10fj

    def _seldom(self, free: Replay, deadline_ns: int, spared_10fj: int) -> Rows:
        """The rows of a replay with fewer changes.

        Args:
            free: keeps the deadline and the limits.
            deadline_ns: by when it must end.
            spared_10fj: energy that fewer changes may cost, where they have no price of their own.
        """

        def make_search(price_10fj: int, allowance_10fj: int | None) -> Search:
            return self.search(
                free, deadline_ns, change_price_10fj=price_10fj, allowance_10fj=allowance_10fj
            )

        uniform = [known.choice for known in self.uniform_clocks]
        starts = [free.rows, *uniform]
        if self._conditions.changes.is_priced:
            priced = make_search(self.change_price_10fj, None)
            return with_priced_changes(priced, starts, self._moves)
        allowance_10fj = self._energy_10fj(free, deadline_ns) + spared_10fj
        rows = min(starts, key=make_search(0, allowance_10fj).score)
        if self._in_windows and rows is free.rows:
            return with_fewest_changes_by_windows(
                self._frontier,
                free,
                deadline_ns,
                price_10uw=self._lateness_price_10uw(deadline_ns),
                spared_10fj=spared_10fj,
                moves_share=self._conditions.moves_share,
            )
        return with_fewest_changes(
            make_search,
            rows,
            spared_10fj=spared_10fj,
            allowance_10fj=allowance_10fj,
            moves=self._moves,
            is_thorough=len(rows) <= WINDOW_OPERATIONS,
        )

    def bound_10fj(self, deadline_ns: int, *, idle_until_deadline: bool) -> int:
        """A lower bound on what candidates by a deadline are compared by, 10 fJ.

        Raises:
            NoPlanInTimeError: no free one was found.
        """
        frontier = self._frontier
        if not self.change_price_10fj:
            free = self._free.best_by(deadline_ns, idle_until_deadline=idle_until_deadline)
            least_10fj = self.cost_10fj(free, idle_until_deadline=idle_until_deadline)
            # A plan for clocks at once may cost somewhat more here than where it was compared.
            return least_10fj if self._plain is None else least_10fj - least_10fj // KEPT_PART
        bound_10fj = self._free.bound_10fj(deadline_ns, idle_until_deadline=idle_until_deadline)
        if idle_until_deadline or frontier.profile.adjustments.by_parts is not None:
            return bound_10fj
        prices = FlowPrices.relaxed(frontier, deadline_ns)
        paths = cheapest_stage_paths(
            frontier.problem,
            prices,
            self._conditions.machine,
            min_dwell_ns=self._penalties.min_dwell_ns,
            change_10fj=float(self.change_price_10fj),
        )
        priced = PricedBound.of_paths(frontier, prices, paths)
        return max(bound_10fj, priced.energy_10fj(deadline_ns))
