"""Candidates with as few changes of clock as 0.1% of energy can buy.

Each starts from a free candidate: one found under the same conditions, where changes cost nothing.

Where clocks follow at once, the candidate for a grid deadline may use 0.1% more than the best free
candidate of the last ns before the next grid deadline. Any deadline up to there has a free plan
that costs at least as much as that one.

**A later deadline never costs more**: the answer is the best candidate of all grid deadlines that
are not later. A candidate that costs less than the best free one of its deadline is dropped, and
the free one taken. So no earlier deadline can be cheaper than the best free candidate there: once
that costs as much as the best found, the search stops. For other conditions see
rarely_changing_searched.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from envplan.frontier import Relaxation
from envplan.replay import Replay, Rows, Search
from envplan.solve.candidates import (
    Candidates,
    GridCandidates,
    RoundedCandidates,
)
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
from envplan.solve.solution import Polished

#: Grid step for clocks at once: the relaxed energy changes by one part in so many, half of what
#: fewer changes may cost.
STEP_PART: Final = 2000
#: One part in so many of what polishing gains is spent on fewer changes.
_PART_GIVEN_BACK: Final = 3
#: Share of the polishing time that is kept for fewer changes.
_POLISHING_SHARE: Final = 0.3


class RarelyChangingCandidates(Candidates):
    """Candidates with fewer changes of clock, as the conditions want them.

    Args:
        frontier: of the pipeline and profile.
        conditions: that every candidate keeps.
        free: candidates under the same conditions whose changes count for nothing.
    """

    def __init__(
        self, frontier: Relaxation, conditions: SearchConditions, free: Candidates
    ) -> None:
        super().__init__(frontier, conditions)
        self._free = free
        self._moves = num_moves(len(frontier.pipeline.operations), conditions.moves_share)

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

    def faster_than(self, replay: Replay) -> list[Replay]:
        """Candidates that searches find just before another one, the fastest first."""
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
        spared_10fj = max(0, gained_10fj) // _PART_GIVEN_BACK
        replay = self._rarely_changing(polished.replay, deadline_ns, spared_10fj)
        is_better = self.cost_10fj(
            replay, idle_until_deadline=idle_until_deadline
        ) < self.cost_10fj(incumbent, idle_until_deadline=idle_until_deadline)
        return replace(polished, replay=replay if is_better else incumbent)

    def bound_10fj(self, deadline_ns: int, *, idle_until_deadline: bool) -> int:
        """A lower bound on what candidates by a deadline are compared by, 10 fJ."""
        bound_10fj = self._free.bound_10fj(deadline_ns, idle_until_deadline=idle_until_deadline)
        frontier = self._frontier
        # Stage paths give no bound while everybody waits, nor where clocks change within a row.
        has_no_paths = idle_until_deadline or frontier.profile.adjustments.by_parts is not None
        if has_no_paths or not self.change_price_10fj:
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

    def _rarely_changing(self, free: Replay, deadline_ns: int, spared_10fj: int) -> Replay:
        """A free candidate with fewer changes, as their price says, or as few as can be.

        Args:
            free: keeps the deadline and the limits.
            deadline_ns: by when it must end.
            spared_10fj: energy that fewer changes may cost, where they have no price of their own.
        """

        def make_search(price_10fj: int, allowance_10fj: int | None) -> Search:
            return self.search(
                free, deadline_ns, change_price_10fj=price_10fj, allowance_10fj=allowance_10fj
            )

        starts = [free.rows, *(known.choice for known in self.uniform_clocks)]
        if self._conditions.changes.is_priced:
            priced = make_search(self.change_price_10fj, None)
            return self.replay(with_priced_changes(priced, starts, self._moves))
        free_10fj = self._energy_10fj(free, deadline_ns)
        allowance_10fj = free_10fj + spared_10fj
        start = min(starts, key=make_search(0, allowance_10fj).score)
        is_in_windows = self._conditions.is_plain and len(start) > WINDOW_OPERATIONS
        if is_in_windows and start is free.rows:
            rows = with_fewest_changes_by_windows(
                self._frontier,
                free,
                deadline_ns,
                price_10uw=self._lateness_price_10uw(deadline_ns),
                spared_10fj=spared_10fj,
                moves_share=self._conditions.moves_share,
            )
            return self.replay(rows)
        found: list[Replay] = []
        for moves_share, is_thorough in self._attempts:
            rows = with_fewest_changes(
                make_search,
                start,
                spared_10fj=spared_10fj,
                allowance_10fj=allowance_10fj,
                moves=max(1, int(self._moves * moves_share)),
                is_thorough=is_thorough,
            )
            found.append(self.replay(rows))
            spent_10fj = self._energy_10fj(found[-1], deadline_ns) - free_10fj
            has_few_changes = found[-1].num_changes <= free.num_changes // 2
            if has_few_changes or spent_10fj >= spared_10fj // 2:
                break
        return min(found, key=lambda replay: (replay.num_changes, replay.energy_10fj))

    @property
    def _attempts(self) -> Sequence[tuple[float, bool]]:
        """Searches for fewer changes: shares of the usual moves, and whether they are thorough.

        The next is made where one leaves more than half of the changes and of the energy.
        """
        is_large = len(self._frontier.pipeline.operations) > WINDOW_OPERATIONS
        if self._conditions.is_plain:
            return [(1.0, not is_large)]
        return [(0.5, False), (1.0, False)] if is_large else [(1.0, False), (1.0, True)]

    def _energy_10fj(self, replay: Replay, deadline_ns: int) -> int:
        """Energy as it counts for a deadline: beyond T_star everybody waits until then."""
        is_beyond_t_star = deadline_ns > self._frontier.min_energy_time_ns
        return replay.energy_until(deadline_ns) if is_beyond_t_star else replay.energy_10fj

    def _fallback(self, deadline_ns: int) -> Replay:
        return self._free.best_by(deadline_ns)

    def _undercuts(self, candidate: Replay, floor_10fj: Callable[[bool], float]) -> bool:
        """Whether a candidate costs less than a floor by which the search skips deadlines.

        Args:
            candidate: whose cost is compared.
            floor_10fj: by whether everybody waits until the deadline.
        """
        return any(
            self.cost_10fj(candidate, idle_until_deadline=idle) < floor_10fj(idle)
            for idle in (False, True)
        )


class RarelyChangingAtOnce(RarelyChangingCandidates, GridCandidates):
    """Candidates with fewer changes for clocks that follow at once, without local limits.

    Args:
        frontier: of the pipeline and profile.
        conditions: that every candidate keeps.
        free: candidates under the same conditions whose changes count for nothing.
    """

    def __init__(
        self, frontier: Relaxation, conditions: SearchConditions, free: RoundedCandidates
    ) -> None:
        super().__init__(frontier, conditions, free)
        self._grid = RoundingGrid(frontier, 1 / STEP_PART)

    def grid_deadlines(self, latest_ns: int) -> Iterator[int]:
        """The deadlines of the grid up to a time, ns, the latest first.

        Between two, free candidates may get so much better that fewer changes may cost less than
        that. The times by which they do are on the grid, too.
        """
        for grid_ns in self._grid.descending_from(latest_ns):
            if self._has_jump_after(grid_ns):
                yield from self._jumps_between(grid_ns, min(latest_ns, self._last_ns(grid_ns)))
            yield grid_ns

    def _has_jump_after(self, grid_ns: int) -> bool:
        """Whether free candidates get much better up to the next deadline of the even grid."""
        if self.change_price_10fj:
            return False
        free_10fj = self._energy_10fj(self.free_by(grid_ns, grid_ns), grid_ns)
        return self._most_energy_10fj(self._last_ns(grid_ns), grid_ns) < free_10fj

    def _jumps_between(self, grid_ns: int, latest_ns: int) -> Iterator[int]:
        """The times after a deadline of the even grid by which free candidates get better."""
        time_ns = self.free_by(latest_ns, grid_ns).makespan_ns
        while time_ns > grid_ns:
            yield time_ns
            time_ns = self.free_by(time_ns - 1, grid_ns).makespan_ns

    def _last_ns(self, grid_ns: int) -> int:
        """The last time before the next deadline of the even grid, ns; T_star at the latest."""
        t_star_ns = self._frontier.min_energy_time_ns
        last_ns = max(grid_ns, self._grid.first_after(grid_ns) - 1)
        return min(last_ns, t_star_ns) if grid_ns <= t_star_ns else last_ns

    def bound_10fj(self, deadline_ns: int, *, idle_until_deadline: bool) -> int:
        """A lower bound on what candidates by a deadline are compared by, 10 fJ.

        Where changes have no price, that is what the best free candidate costs.
        """
        if self.change_price_10fj:
            return super().bound_10fj(deadline_ns, idle_until_deadline=idle_until_deadline)
        free = self._free.best_by(deadline_ns, idle_until_deadline=idle_until_deadline)
        return self.cost_10fj(free, idle_until_deadline=idle_until_deadline)

    def free_by(self, time_ns: int, deadline_ns: int) -> Replay:
        """The free candidate of least cost by a time, for a deadline.

        Beyond T_star everybody waits until the deadline, and that counts.
        """
        is_beyond_t_star = deadline_ns > self._frontier.min_energy_time_ns
        return self._free.best_by(time_ns, idle_until_deadline=is_beyond_t_star)

    def _make(self, deadline_ns: int) -> Replay:
        free = self.free_by(deadline_ns, deadline_ns)
        if self.change_price_10fj:
            return self._rarely_changing(free, deadline_ns, 0)
        grid_ns = next(self._grid.descending_from(deadline_ns))
        is_even = grid_ns == deadline_ns and not self._has_jump_after(grid_ns)
        last_ns = self._last_ns(grid_ns) if is_even else deadline_ns
        most_10fj = self._most_energy_10fj(last_ns, deadline_ns)
        spared_10fj = max(0, most_10fj - self._energy_10fj(free, deadline_ns))
        candidate = self._rarely_changing(free, deadline_ns, spared_10fj)

        def floor_10fj(idle: bool) -> int:
            return self.bound_10fj(deadline_ns, idle_until_deadline=idle)

        # Earlier deadlines are skipped by the free costs, so a candidate must not cost less.
        return free if self._undercuts(candidate, floor_10fj) else candidate

    def _most_energy_10fj(self, time_ns: int, deadline_ns: int) -> int:
        """What a candidate for a deadline may use if it is taken until a time, 10 fJ."""
        least_10fj = self._energy_10fj(self.free_by(time_ns, deadline_ns), deadline_ns)
        return least_10fj + least_10fj // ENERGY_PER_ALLOWANCE
