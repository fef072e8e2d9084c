"""Candidates for deadlines, each made once, and the best of those that are in time.

A candidate is a choice of options made for one deadline, with its replay.

**A later deadline never costs more.** Candidates are made for the deadlines of one fixed grid only
(deadline_grid.py), whatever deadline is asked for, and the answer is the best candidate of all grid
deadlines that are not later. So a later deadline has every candidate that an earlier one has. Few
of them have to be made: a candidate for a grid deadline uses at least the relaxed energy there, so
once that is more than the best found, no earlier one can be better.

One clock for each stage is a candidate, too: no planner that chooses such is ever better.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, partial
from typing import Final, NamedTuple

import numpy as np

from envplan.frontier import Relaxation
from envplan.replay import Replay, Rows, Search
from envplan.request.limits import NO_PENALTIES
from envplan.solve.conditions import SearchConditions
from envplan.solve.deadline_grid import RoundingGrid
from envplan.solve.rounding import TEMPERATURES, Rounding, relaxed_rounding
from envplan.solve.solution import KnownChoice, NoPlanInTimeError, Polished
from envplan.solve.uniform_clocks import UniformClocks

_logger = logging.getLogger(__name__)

#: After so many deadlines in a row that nothing was found for, earlier ones are not looked at.
_MAX_FAILURES: Final = 8
#: Annealing of candidates for the grid: in turn hot, for other arrangements, and cool.
_GRID_TEMPERATURES: Final[tuple[tuple[float, ...], ...]] = ((0.3,), (1.0, 0.3))
_GRID_MOVES_SHARE: Final = 0.4
#: A plan for clocks at once is that for late ones, too, if it then costs more by less than one part
#: in so many.
KEPT_PART: Final = 10_000
#: What a ns late costs in a search, in what a ns saves at the deadline.
LATENESS_PRICE: Final = 1.1


IsPreferred = Callable[[Replay], bool]


def keeps_everything(replay: Replay) -> bool:
    """The test of replays where nothing is limited."""
    del replay
    return True


class Question(NamedTuple):
    """What the best candidate is looked for by.

    Attributes:
        deadline_ns: by when it ends.
        idle_until_deadline: everybody waits until then, so what is used above waiting counts.
        enough_10fj: what costs as much as this is not looked for.
    """

    deadline_ns: int
    idle_until_deadline: bool
    enough_10fj: float


class Candidates(ABC):
    """Candidates of one frontier under one set of conditions.

    Args:
        frontier: of the pipeline and profile.
        conditions: that every candidate keeps; no global limits.

    Attributes:
        change_price_10fj: of a change of clock, 10 fJ; 0 where none was asked for.
    """

    def __init__(
        self,
        frontier: Relaxation,
        conditions: SearchConditions,
    ) -> None:
        self._frontier = frontier
        self._conditions = conditions
        blocking_10uw = frontier.problem.blocking_power_10uw.tolist()
        self._penalties = NO_PENALTIES
        for limit in conditions.limits:
            self._penalties = self._penalties.combine(limit.penalties(frontier.num_gpus))
        self.change_price_10fj = conditions.changes.price_10fj(blocking_10uw)

    @abstractmethod
    def best_by(
        self,
        deadline_ns: int,
        *,
        idle_until_deadline: bool = False,
        is_preferred: IsPreferred = keeps_everything,
    ) -> Replay:
        """The best candidate that ends by a deadline.

        Args:
            deadline_ns: not below T_min, ns.
            idle_until_deadline: everybody waits until then, so what is used above waiting counts.
            is_preferred: whether a candidate keeps the limits on the whole plan; one that does goes
                before all that do not.

        Raises:
            NoPlanInTimeError: none was found.
        """

    def taken_over(self, theirs: Replay, deadline_ns: int) -> Replay | None:
        """A replay under other conditions, replayed under these; None: it does not hold here."""
        replay = self.replay(theirs.rows)
        return replay if self.holds(replay, deadline_ns) else None

    def kept(self, theirs: Replay, deadline_ns: int) -> Replay | None:
        """A replay under easier conditions, if it holds here and costs next to nothing more.

        As an iteration begins, the first clock comes late whatever is planned, which costs an
        operation some energy and sometimes some time.
        """
        replay = self.taken_over(theirs, deadline_ns)
        if replay is None:
            return None
        most_10fj = theirs.energy_10fj + theirs.energy_10fj // KEPT_PART
        return replay if replay.energy_10fj <= most_10fj else None

    def holds(self, replay: Replay, deadline_ns: int) -> bool:
        """Whether a replay ends by a deadline and keeps the local limits."""
        if replay.makespan_ns > deadline_ns:
            return False
        if not self._conditions.limits:
            return True
        return self.search(replay, deadline_ns).score(replay.rows).holds

    @abstractmethod
    def near(self, deadline_ns: int) -> Replay:
        """A candidate that ends by a deadline not below T_min, for pictures and tables of many.

        Raises:
            NoPlanInTimeError: none was found.
        """

    @property
    @abstractmethod
    def num_made(self) -> int:
        """How many candidates have been made."""

    @abstractmethod
    def bound_10fj(self, deadline_ns: int, *, idle_until_deadline: bool) -> int:
        """A lower bound on what candidates by a deadline are compared by, 10 fJ."""

    def cost_10fj(self, replay: Replay, *, idle_until_deadline: bool) -> int:
        """What candidates are compared by: energy, with what changes of clock cost, 10 fJ.

        Args:
            idle_until_deadline: everybody waits until then, so what is used above waiting counts.
        """
        energy_10fj = replay.effective_10fj if idle_until_deadline else replay.energy_10fj
        if not self.change_price_10fj:
            return energy_10fj
        return energy_10fj + self.change_price_10fj * replay.num_changes

    @cached_property
    def uniform_clocks(self) -> list[KnownChoice]:
        """One clock for all stages, or a balanced one for each."""
        clocks = UniformClocks(self._frontier.problem)
        choices = [*clocks.one_for_all(), *clocks.balanced()]
        return [KnownChoice.of(self.replay(choice)) for choice in choices]

    def replay(self, choice: Rows) -> Replay:
        """The replay of a choice, int32 (N,), on the machine of the conditions."""
        return self._frontier.problem.replay(choice, self._conditions.machine)

    def search(
        self,
        replay: Replay,
        deadline_ns: int,
        *,
        lateness_price: float = LATENESS_PRICE,
        change_price_10fj: int = 0,
        allowance_10fj: int | None = None,
    ) -> Search:
        """The search for rows by a deadline that keep the conditions.

        Args:
            replay: of about when operations start.
            deadline_ns: beyond T_star everybody waits until then; 0: only time counts.
            lateness_price: of a ns late, in what a ns saves at the deadline.
            change_price_10fj, allowance_10fj: as for Search.
        """
        return Search(
            self._frontier.problem,
            replay.starts_ns,
            deadline_ns,
            price_10uw=self._lateness_price_10uw(deadline_ns, lateness_price),
            machine=self._conditions.machine,
            waits=deadline_ns > self._frontier.min_energy_time_ns,
            min_dwell_ns=self._penalties.min_dwell_ns,
            peak_10uw=self._penalties.peak_10uw,
            change_price_10fj=change_price_10fj,
            allowance_10fj=allowance_10fj,
        )

    def _lateness_price_10uw(self, deadline_ns: int, lateness_price: float = LATENESS_PRICE) -> int:
        """What a ns late costs in a search, 10 uW."""
        return max(1, int(lateness_price * self._frontier.slope_10uw(deadline_ns)))

    @abstractmethod
    def latest_useful_ns(self, deadline_ns: int, idle_until_deadline: bool) -> int:
        """The latest time up to a deadline that candidates may be the best for, ns."""

    @property
    @abstractmethod
    def fastest(self) -> Replay:
        """The fastest candidate found that keeps the local limits.

        Raises:
            NoAnswerError: none keeps them; says by how much.
        """

    @property
    @abstractmethod
    def fastest_choice(self) -> Rows:
        """The fastest choice known, int32 (N,), whatever it uses."""

    @abstractmethod
    def faster_than(self, replay: Replay) -> list[Replay]:
        """Candidates that searches find just before another one, the fastest first."""

    @abstractmethod
    def polished(
        self, incumbent: Replay, deadline_ns: int, *, idle_until_deadline: bool, seconds: float
    ) -> Polished:
        """Improve a candidate by a deadline for about so many seconds."""


class GridCandidates(Candidates):
    """Candidates made for the deadlines of a grid, each once.

    Args:
        frontier: of the pipeline and profile.
        conditions: that every candidate keeps; no global limits.
    """

    def __init__(
        self,
        frontier: Relaxation,
        conditions: SearchConditions,
    ) -> None:
        super().__init__(frontier, conditions)
        self._found: dict[int, Replay] = {}
        self._not_found: dict[int, NoPlanInTimeError] = {}

    def best_by(
        self,
        deadline_ns: int,
        *,
        idle_until_deadline: bool = False,
        is_preferred: IsPreferred = keeps_everything,
    ) -> Replay:
        """The best candidate that ends by a deadline."""
        cost_10fj = partial(self.cost_10fj, idle_until_deadline=idle_until_deadline)
        in_time: list[Replay] = []
        preferred: list[Replay] = []
        failures = 0
        enough_10fj: float = math.inf
        bound_10fj = partial(self.bound_10fj, idle_until_deadline=idle_until_deadline)
        for grid_deadline_ns in self.deadlines_to_try(deadline_ns, idle_until_deadline):
            if failures == _MAX_FAILURES:
                break
            if in_time:
                enough_10fj = min(map(cost_10fj, preferred or in_time))
                if bound_10fj(grid_deadline_ns) >= enough_10fj:
                    break
            question = Question(deadline_ns, idle_until_deadline, enough_10fj)
            try:
                if not self._may_be_best(grid_deadline_ns, question):
                    failures = 0
                    continue
                candidate = self.at(grid_deadline_ns)
            except NoPlanInTimeError:
                failures += 1
                continue
            failures = 0
            if candidate.makespan_ns <= deadline_ns:
                in_time.append(candidate)
                if is_preferred(candidate):
                    preferred.append(candidate)
        if not in_time:
            return self._fallback(deadline_ns)
        return min(preferred or in_time, key=cost_10fj)

    def bound_10fj(self, deadline_ns: int, *, idle_until_deadline: bool) -> int:
        """A lower bound on what candidates by a deadline are compared by, 10 fJ."""
        frontier = self._frontier
        bound_10fj = (
            frontier.effective_bound_10fj if idle_until_deadline else frontier.lower_bound_10fj
        )
        return bound_10fj(deadline_ns)

    def near(self, deadline_ns: int) -> Replay:
        """A candidate that ends by a deadline not below T_min, for pictures and tables of many."""
        return self.at(next(self.grid_deadlines(deadline_ns)))

    def at(self, deadline_ns: int) -> Replay:
        """The candidate made for a deadline from T_min to T_max, ns.

        Raises:
            NoPlanInTimeError: none was found.
        """
        if deadline_ns in self._not_found:
            raise self._not_found[deadline_ns]
        if deadline_ns not in self._found:
            try:
                self._found[deadline_ns] = self._make(deadline_ns)
            except NoPlanInTimeError as error:
                self._not_found[deadline_ns] = error
                _logger.debug("candidate for %d ns: none", deadline_ns)
                raise
            replay = self._found[deadline_ns]
            _logger.debug(
                "candidate for %d ns: %d ns, %d x 10 fJ",
                deadline_ns,
                replay.makespan_ns,
                replay.energy_10fj,
            )
        return self._found[deadline_ns]

    @property
    def num_made(self) -> int:
        """How many candidates have been made."""
        return len(self._found)

    @abstractmethod
    def grid_deadlines(self, latest_ns: int) -> Iterator[int]:
        """The deadlines of the grid up to a time, ns, the latest first."""

    @abstractmethod
    def _make(self, deadline_ns: int) -> Replay:
        """Make the candidate for a deadline. Raises: NoPlanInTimeError: none was found."""

    def deadlines_to_try(self, deadline_ns: int, idle_until_deadline: bool) -> Iterable[int]:
        """Grid deadlines whose candidates may be the best by a deadline, ns, the latest first."""
        return self.grid_deadlines(self.latest_useful_ns(deadline_ns, idle_until_deadline))

    def _may_be_best(self, grid_deadline_ns: int, question: Question) -> bool:
        """Whether the candidate for a deadline of the grid may be the answer to a question.

        Raises:
            NoPlanInTimeError: there is no candidate for it.
        """
        del grid_deadline_ns, question
        return True

    @abstractmethod
    def _fallback(self, deadline_ns: int) -> Replay:
        """A replay in time where no candidate of the grid is.

        Raises:
            NoPlanInTimeError: there is none.
        """


class RoundedCandidates(GridCandidates):
    """Rounded relaxed optima: for clocks that follow at once, with no local limits.

    They do not depend on what was asked before.
    """

    def __init__(
        self,
        frontier: Relaxation,
        conditions: SearchConditions,
    ) -> None:
        super().__init__(frontier, conditions)
        self._grid = RoundingGrid(frontier)

    def grid_deadlines(self, latest_ns: int) -> Iterator[int]:
        """The deadlines of the grid up to a time, ns, the latest first."""
        return self._grid.descending_from(latest_ns)

    @property
    def fastest(self) -> Replay:
        """The candidate at T_min."""
        return self.at(self._frontier.min_time_ns)

    @property
    def fastest_choice(self) -> Rows:
        """The fastest option of each operation, int32 (N,): option 0."""
        return np.zeros_like(self._frontier.problem.table)

    def faster_than(self, replay: Replay) -> list[Replay]:
        """An empty list: rounded optima use all of their time."""
        del replay
        return []

    def polished(
        self, incumbent: Replay, deadline_ns: int, *, idle_until_deadline: bool, seconds: float
    ) -> Polished:
        """Improve a candidate by a deadline for about so many seconds."""
        from envplan.solve.polish import polish  # ortools takes a while to import

        latest_ns = self.latest_useful_ns(deadline_ns, idle_until_deadline)
        return polish(
            self._frontier,
            incumbent,
            self._rounded(latest_ns),
            idle_until_deadline=idle_until_deadline,
            seconds=seconds,
        )

    def _rounded(
        self,
        deadline_ns: int,
        temperatures: tuple[float, ...] = TEMPERATURES,
        moves_share: float = 1.0,
    ) -> Rounding:
        """The rounded and annealed relaxed optimum of a deadline from T_min to T_max."""
        rounding = relaxed_rounding(self._frontier, deadline_ns)
        rounding.anneal(temperatures, moves_share * self._conditions.moves_share)
        return rounding

    def _make(self, deadline_ns: int) -> Replay:
        return self.replay(self._rounding_for_grid(deadline_ns).choice)

    def _rounding_for_grid(self, deadline_ns: int) -> Rounding:
        frontier = self._frontier
        if deadline_ns in (frontier.min_time_ns, frontier.min_energy_time_ns):
            return self._rounded(deadline_ns)
        number = self._grid.number_of(deadline_ns)
        temperatures = _GRID_TEMPERATURES[number % len(_GRID_TEMPERATURES)]
        return self._rounded(deadline_ns, temperatures, _GRID_MOVES_SHARE)

    def latest_useful_ns(self, deadline_ns: int, idle_until_deadline: bool) -> int:
        """The latest time up to a deadline that candidates may be the best for, ns."""
        frontier = self._frontier
        if idle_until_deadline:
            return min(deadline_ns, frontier.slowest_time_ns)
        return min(deadline_ns, frontier.min_energy_time_ns)

    def _fallback(self, deadline_ns: int) -> Replay:
        raise NoPlanInTimeError(deadline_ns, self._frontier.min_time_ns, "")
