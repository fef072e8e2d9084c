"""Candidates for clocks that follow late, and for limits that single moves can mend.

Where a clock comes late, how long an operation takes depends on its neighbours; where power or the
spacing of requests is limited, whether an option may be taken depends on all that runs at that
time. So options are chosen by a search that replays every move exactly (csrc/annealing.hpp), and
what comes out is what `envplan.replay.engine` says of it, to the nanosecond. It starts from several
choices:

- the rounded relaxed optimum of the deadline, and of one that is earlier by what it is late; if it
  keeps the limits as it is, it is the start;
- where clocks come late or must be held, the cheapest way of every stage at the prices that a bound
  of such clocks is made of (stage_path_starts.py): they hold clocks, and are somewhat late;
- one clock a stage;
- candidates for clocks that come later, where these come soon: the sooner they come, the more
  choices are in time by a ns only, which are hard to find;
- under a cap on the peak, plans made with power limits for single operations (peak_power.py).

In large pipelines with late or held clocks, all get a short search and the best two a longer one.

All this is done for every fourth deadline of a fixed grid (deadline_grid.py). For the others, a
shorter search starts from the candidate for the last such one and from rounded optima. A candidate
for a deadline often ends earlier, so the next one after that asked for is looked at, too. Where a
search finds nothing in time, the fastest choice that is known is what there is.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Final, NamedTuple

from envplan.errors import NoAnswerError
from envplan.frontier import Relaxation
from envplan.replay import Replay, Rows, Search
from envplan.replay.cores import parallel_map
from envplan.solve.candidates import (
    GridCandidates,
    IsPreferred,
    RoundedCandidates,
    keeps_everything,
)
from envplan.solve.conditions import SearchConditions
from envplan.solve.deadline_grid import SearchGrid
from envplan.solve.late_clock_bounds import LateClockBounds
from envplan.solve.peak_power import PeakPowerHeuristic
from envplan.solve.solution import NoPlanInTimeError, Polished
from envplan.solve.stage_path_starts import PRICE_FACTORS, stage_path_starts

# Temperatures. From the usual plan and from one clock a stage: hot enough to leave their pattern.
_ROUNDED_TEMPERATURES: Final = (1.5, 0.6)
_UNIFORM_TEMPERATURE: Final = 4.0
#: From the cheapest ways of stages, where clocks come late, and where they must be held: there only
#: many moves together are of use.
_LATE_PATH_TEMPERATURE: Final = 3.0
_HELD_PATH_TEMPERATURE: Final = 6.0
#: Prices of those ways in large pipelines where clocks are asked for ahead and need not be held:
#: others never came out best there.
_AHEAD_FACTORS: Final[tuple[float, ...]] = (1.0,)
#: A rounded optimum is nearly there if time and energy are above the wanted by less than one part
#: in so many. It is of use as a start, beside others, up to the second one.
_NEARLY_PART: Final = 1000
_USEFUL_PART: Final = 100
#: From a plan that is nearly there; and once more, from the best of all.
_FINAL_TEMPERATURE: Final = 0.25
_SHORT_SEARCH_TEMPERATURE: Final = 0.6
_URGENT_TEMPERATURE: Final = 1.0

#: Pipelines of more operations than this are large: each search takes long.
_LARGE_OPERATIONS: Final = 512

# Moves of one annealing.
_MOVES_PER_OPERATION: Final = 500
_MAX_MOVES: Final = 200_000
#: At most so many moves x operations: a move may replay them all.
_MAX_WORK: Final = 3.0 * 10**8
#: Under a cap on the peak, a move looks at the power over all time.
_MOVES_PER_OPERATION_UNDER_PEAK: Final = 350
_MAX_WORK_UNDER_PEAK: Final = 2.5 * 10**6
_SHORT_SEARCH_MOVES_SHARE: Final = 0.5  # for each start
#: In large pipelines: for each start at first, then for each of the best starts, and for the best.
_FIRST_ROUND_MOVES_SHARE: Final = 0.3
_BEST_STARTS_MOVES_SHARE: Final = 0.5
#: So many of the starts are the best, and go on at this part of their first temperature.
_BEST_STARTS: Final = 2
_COOLED: Final = 0.4
_LONG_MOVES_SHARE: Final = 2.0  # where time is short; also of a round of polishing

# What a ns late costs, in what a ns saves at the deadline.
_URGENT_LATENESS_PRICE: Final = 20.0  # where nothing but time counts, or little time is to be had

# Seeds of annealings; those of several starts side by side are their positions, from 0 up.
_URGENT_SEED: Final = 90
_FINAL_SEED: Final = 91
_FIRST_POLISHING_SEED: Final = 100

#: Latencies, ns, whose candidates the search for lower ones starts from as well.
START_LATENCIES_NS: Final = (10**6, 2 * 10**7)
#: Searches between two deadlines of the grid, for the least time.
_SEARCHES_FOR_LEAST_TIME: Final = 4


class _Start(NamedTuple):
    """A choice to anneal from, at a first temperature."""

    choice: Rows
    temperature: float


class _SearchResult(NamedTuple):
    """The best choice of a search, and the annealer that knows the deadline and the limits."""

    annealer: Search
    choice: Rows

    @property
    def holds(self) -> bool:
        """Whether the choice is in time and keeps the limits."""
        return self.annealer.score(self.choice).holds


class SearchedCandidates(GridCandidates):
    """Candidates where clocks come late, or where a limit is local.

    Args:
        frontier: of the pipeline and profile.
        conditions: that every candidate keeps.
        rounded: candidates of the same frontier for clocks that follow at once, without limits.
        later: candidates under the same limits for clocks that come later, the next latency first.
        late_bounds: lower bounds under the conditions.
    """

    def __init__(
        self,
        frontier: Relaxation,
        conditions: SearchConditions,
        rounded: RoundedCandidates,
        later: Sequence[SearchedCandidates],
        late_bounds: LateClockBounds,
    ) -> None:
        super().__init__(frontier, conditions)
        self._rounded = rounded
        self._later = later
        self._late_bounds = late_bounds
        self._grid = SearchGrid(frontier, is_slow=self._has_good_starts)
        self._kept_deadlines_ns: set[int] = set()
        self._between_grid_cache: dict[int, Replay | None] = {}
        self._peak_power: PeakPowerHeuristic | None = None
        peak_10uw = self._penalties.peak_10uw
        if peak_10uw is not None:
            self._peak_power = PeakPowerHeuristic(frontier, conditions.machine, peak_10uw)
        self._usual_moves = self._moves_of_an_annealing()

    def _moves_of_an_annealing(self) -> float:
        num_operations = len(self._frontier.pipeline.operations)
        if self._peak_power is None:
            wanted = min(num_operations * _MOVES_PER_OPERATION, _MAX_MOVES)
            most = _MAX_WORK / num_operations
        else:
            wanted = num_operations * _MOVES_PER_OPERATION_UNDER_PEAK
            most = _MAX_WORK_UNDER_PEAK / num_operations
        return min(wanted, most) * self._conditions.moves_share

    def polished(
        self, incumbent: Replay, deadline_ns: int, *, idle_until_deadline: bool, seconds: float
    ) -> Polished:
        """Improve a candidate by a deadline by further annealing, for about so many seconds."""
        del idle_until_deadline
        temperatures = (_SHORT_SEARCH_TEMPERATURE, _FINAL_TEMPERATURE)
        seed, end_s = _FIRST_POLISHING_SEED, time.monotonic() + seconds
        while time.monotonic() < end_s:
            annealer = self.search(incumbent, deadline_ns)
            temperature = temperatures[seed % len(temperatures)]
            moves = self._num_moves(_LONG_MOVES_SHARE)
            incumbent = self.replay(annealer.improve(incumbent.rows, moves, temperature, seed))
            seed += 1
        return Polished(incumbent)

    def best_by(
        self,
        deadline_ns: int,
        *,
        idle_until_deadline: bool = False,
        is_preferred: IsPreferred = keeps_everything,
    ) -> Replay:
        """The best candidate that ends by a deadline."""
        if not idle_until_deadline:
            # The bound that the plan will state says best which earlier deadlines matter.
            self._late_bounds.lower_bound_10fj(deadline_ns)
        return super().best_by(
            deadline_ns, idle_until_deadline=idle_until_deadline, is_preferred=is_preferred
        )

    def is_for_clocks_at_once(self, deadline_ns: int) -> bool:
        """Whether the candidate for a deadline of the grid is one for clocks at once that is kept.

        Raises:
            NoPlanInTimeError: there is no candidate for it.
        """
        self.at(deadline_ns)
        return deadline_ns in self._kept_deadlines_ns

    def grid_deadlines(self, latest_ns: int) -> Iterator[int]:
        """The deadlines of the grid up to a time, ns, the latest first."""
        return self._grid.descending_from(latest_ns)

    @cached_property
    def fastest(self) -> Replay:
        """The fastest candidate found that keeps the local limits.

        Raises:
            NoAnswerError: none keeps them; says by how much.
        """
        t_min_choice = self._rounded.near(self._frontier.min_time_ns).rows
        fastest = self.replay(self._fastest_choice_from(t_min_choice))
        annealer = self.search(fastest, fastest.makespan_ns)
        moves = self._num_moves()
        return self.replay(annealer.improve(fastest.rows, moves, _FINAL_TEMPERATURE, _FINAL_SEED))

    @property
    def fastest_choice(self) -> Rows:
        """The choice of the fastest candidate, int32 (N,)."""
        return self.fastest.rows

    def faster_than(self, replay: Replay) -> list[Replay]:
        """Candidates that searches find between the grid and another candidate, the fastest first.

        Searches are made for fixed deadlines, and only candidates that end after the last deadline
        of the grid are returned. So what a smaller budget finds here is not faster than what a
        larger one finds in an earlier step of the grid.
        """
        end_ns = self._grid.first_from(replay.makespan_ns)
        begin_ns = next(self.grid_deadlines(replay.makespan_ns - 1), None)
        if begin_ns is None or end_ns is None:
            return []  # nothing is faster than T_min, nor slower than T_max
        candidates = []
        for k in range(1, _SEARCHES_FOR_LEAST_TIME + 1):
            deadline_ns = begin_ns + (end_ns - begin_ns) * k // _SEARCHES_FOR_LEAST_TIME
            candidate = self._between_grid(deadline_ns)
            if candidate is not None and begin_ns < candidate.makespan_ns < replay.makespan_ns:
                candidates.append(candidate)
        return sorted(candidates, key=lambda candidate: candidate.makespan_ns)

    def _between_grid(self, deadline_ns: int) -> Replay | None:
        """The candidate of a full search for any deadline, made once; None: none holds."""
        cache = self._between_grid_cache
        if deadline_ns not in cache:
            result = self._full_search(deadline_ns)
            cache[deadline_ns] = self.replay(result.choice) if result.holds else None
        return cache[deadline_ns]

    def deadlines_to_try(self, deadline_ns: int, idle_until_deadline: bool) -> Iterable[int]:
        """Grid deadlines whose candidates may be the best by a deadline, ns, the latest first."""
        deadline_ns = self.latest_useful_ns(deadline_ns, idle_until_deadline)
        # A candidate for the next deadline of the grid may end by this one as well.
        next_ns = self._grid.first_from(deadline_ns)
        return self.grid_deadlines(deadline_ns if next_ns is None else next_ns)

    def bound_10fj(self, deadline_ns: int, *, idle_until_deadline: bool) -> int:
        """The higher one of the relaxed bound and that of late and held clocks, 10 fJ."""
        if idle_until_deadline:
            return super().bound_10fj(deadline_ns, idle_until_deadline=True)
        return self._late_bounds.lower_bound_10fj(deadline_ns)

    def latest_useful_ns(self, deadline_ns: int, idle_until_deadline: bool) -> int:
        """The latest time up to a deadline that candidates may be the best for, ns."""
        t_star_ns = self._frontier.min_energy_time_ns
        is_beyond_t_star = deadline_ns > t_star_ns and not idle_until_deadline
        if is_beyond_t_star and not self._saves_beyond_t_star:
            return t_star_ns
        return deadline_ns

    @cached_property
    def _saves_beyond_t_star(self) -> bool:
        """Whether candidates for deadlines beyond T_star may use less.

        They may under a cap on the peak, and where none is in time by T_star.
        """
        if self._peak_power is not None:
            return True
        try:
            self.at(self._frontier.min_energy_time_ns)
        except NoPlanInTimeError:
            return True
        return False

    def _fallback(self, deadline_ns: int) -> Replay:
        if self.fastest.makespan_ns > deadline_ns:
            raise self._too_late(deadline_ns)
        return self.fastest

    def _make(self, deadline_ns: int) -> Replay:
        kept = self._kept_plain_candidate(deadline_ns)
        if kept is not None:
            return kept
        start_deadline_ns = self._grid.start_of(deadline_ns)
        if start_deadline_ns is None:
            result = self._full_search(deadline_ns)
        else:
            result = self._short_search(deadline_ns, start_deadline_ns)
        if not result.holds:
            raise self._too_late(deadline_ns)
        return self.replay(result.choice)

    def _kept_plain_candidate(self, deadline_ns: int) -> Replay | None:
        """The best rounded candidate by a deadline, where it keeps these conditions as it is.

        Then nothing better is looked for: a plan for late clocks is no better than one for clocks
        at once. What clocks that come still later bring is taken, if it is less.

        Returns:
            None where it breaks a condition, or costs more than without them; and where late
            clocks may save more.
        """
        if self._conditions.later_may_be_better:
            return None
        is_beyond_t_star = deadline_ns > self._frontier.min_energy_time_ns
        kept = None
        for plain in self._rounded_by(deadline_ns, is_beyond_t_star):
            kept = kept or self.kept(plain, deadline_ns)
        if kept is None:
            return None
        annealer = self.search(kept, deadline_ns)
        choices = [kept.rows, *self._choices_for_later_clocks(deadline_ns)]
        best = min(choices, key=annealer.score)
        if best is kept.rows:
            self._kept_deadlines_ns.add(deadline_ns)
        return self.replay(best)

    def _rounded_by(self, deadline_ns: int, idle_until_deadline: bool) -> Iterator[Replay]:
        """The best rounded candidate by a deadline, and by as much earlier as it is late here."""
        rounded = self._rounded.best_by(deadline_ns, idle_until_deadline=idle_until_deadline)
        yield rounded
        late_ns = self.replay(rounded.rows).makespan_ns - deadline_ns
        earlier_ns = deadline_ns - late_ns
        is_slightly_late = 0 < late_ns <= deadline_ns // _NEARLY_PART
        if is_slightly_late and earlier_ns >= self._frontier.min_time_ns:
            yield self._rounded.best_by(earlier_ns, idle_until_deadline=idle_until_deadline)

    def _too_late(self, deadline_ns: int) -> NoPlanInTimeError:
        least_ns = max(self.fastest.makespan_ns, deadline_ns + 1)
        return NoPlanInTimeError(deadline_ns, least_ns, self._why_it_is_hard)

    def _full_search(self, deadline_ns: int) -> _SearchResult:
        """Anneal from everything that there is to start from."""
        rounded = self._rounded.near(deadline_ns)
        annealer = self.search(rounded, deadline_ns)
        best = min(self._annealed_starts(annealer, rounded, deadline_ns), key=annealer.score)
        if not annealer.score(best).holds:
            urgent = self.search(
                self.replay(best), deadline_ns, lateness_price=_URGENT_LATENESS_PRICE
            )
            moves = self._num_moves(_LONG_MOVES_SHARE)
            sooner = urgent.improve(best, moves, _URGENT_TEMPERATURE, _URGENT_SEED)
            best = min([sooner, self.fastest.rows], key=annealer.score)
        moves = self._num_moves(_BEST_STARTS_MOVES_SHARE if self._has_good_starts else 1.0)
        final = annealer.improve(best, moves, _FINAL_TEMPERATURE, _FINAL_SEED)
        return _SearchResult(annealer, final)

    def _short_search(self, deadline_ns: int, start_deadline_ns: int) -> _SearchResult:
        """Anneal from the candidate for an earlier deadline, and from rounded optima."""
        try:
            incumbent = self.at(start_deadline_ns)
        except NoPlanInTimeError:
            incumbent = self.fastest
        annealer = self.search(incumbent, deadline_ns)
        starts = [_Start(incumbent.rows, _FINAL_TEMPERATURE)]
        rounded = self._rounded.near(deadline_ns)
        if self._is_of_use(rounded, deadline_ns):
            # Of two rounded optima, the one for an earlier deadline is nearly in time.
            *_, in_time = self._rounded_choices(rounded, deadline_ns)
            starts.append(_Start(in_time, _SHORT_SEARCH_TEMPERATURE))
        choices = self._annealed(annealer, starts, _SHORT_SEARCH_MOVES_SHARE)
        choices += self._choices_for_later_clocks(deadline_ns)
        return _SearchResult(annealer, min(choices, key=annealer.score))

    def _annealed_starts(self, annealer: Search, rounded: Replay, deadline_ns: int) -> list[Rows]:
        """Choices of a full search, annealed from each of its starts.

        Args:
            annealer: for the deadline.
            rounded: the rounded relaxed optimum of the deadline.
            deadline_ns: of the search.
        """
        is_nearly_there = self._is_within(_NEARLY_PART, rounded, deadline_ns)
        holds = annealer.score(rounded.rows).holds
        if holds or (is_nearly_there and self._has_good_starts):
            starts = [_Start(rounded.rows, _FINAL_TEMPERATURE)]
        else:
            starts = self._stage_path_starts(deadline_ns)
            if not starts:
                starts += [_Start(rounded.rows, heat) for heat in _ROUNDED_TEMPERATURES]
            if self._penalties.min_dwell_ns == 0:
                starts.append(_Start(annealer.constant(), _UNIFORM_TEMPERATURE))
        nearly_there = self._choices_for_later_clocks(deadline_ns)
        if self._is_of_use(rounded, deadline_ns):
            nearly_there += self._rounded_choices(rounded, deadline_ns)[1:]
        nearly_there += self._choices_under_cap(rounded, deadline_ns)
        starts += [_Start(choice, _FINAL_TEMPERATURE) for choice in nearly_there]
        moves_share = 1.0
        if self._has_good_starts and len(starts) > _BEST_STARTS:
            starts, moves_share = self._best_starts(annealer, starts), _BEST_STARTS_MOVES_SHARE
        choices = self._annealed(annealer, starts, moves_share)
        if not any(annealer.score(choice).holds for choice in choices):
            urgent = self.search(rounded, deadline_ns, lateness_price=_URGENT_LATENESS_PRICE)
            temperature = _ROUNDED_TEMPERATURES[0]
            choices.append(urgent.improve(rounded.rows, self._num_moves(), temperature, 0))
        return choices

    def _best_starts(self, annealer: Search, starts: Sequence[_Start]) -> list[_Start]:
        """What the most promising starts lead to after short annealings, to go on from.

        That is a round of successive halving (Jamieson and Talwalkar, AISTATS 2016).
        """
        choices = self._annealed(annealer, starts, _FIRST_ROUND_MOVES_SHARE)
        ranked = sorted(range(len(starts)), key=lambda k: annealer.score(choices[k]))
        return [_Start(choices[k], _COOLED * starts[k].temperature) for k in ranked[:_BEST_STARTS]]

    @property
    def _has_good_starts(self) -> bool:
        """Whether only those starts are taken that may well come out best.

        In large pipelines each search takes long, and for late and held clocks it can be told.
        """
        is_large = len(self._frontier.pipeline.operations) > _LARGE_OPERATIONS
        return is_large and self._late_bounds.clocks.are_any

    def _is_of_use(self, rounded: Replay, deadline_ns: int) -> bool:
        """Whether searches start from a rounded optimum as well as from others.

        Where all clocks come late, or are not held, it is too far from a plan.
        """
        return not self._has_good_starts or self._is_within(_USEFUL_PART, rounded, deadline_ns)

    def _is_within(self, part: int, rounded: Replay, deadline_ns: int) -> bool:
        """Whether a rounded optimum is nearly as good here as with clocks at once.

        Args:
            part: one part in so many is what time and energy may be above it.
        """
        score = self.search(rounded, deadline_ns).score(rounded.rows)
        most_ns = deadline_ns // part
        most_10fj = rounded.energy_10fj + rounded.energy_10fj // part
        is_in_time = score.late_ns <= most_ns and score.shortage_ns <= most_ns
        return is_in_time and score.energy_10fj <= most_10fj

    def _stage_path_starts(self, deadline_ns: int) -> list[_Start]:
        """The cheapest ways of all stages where clocks come late or must be held."""
        clocks = self._late_bounds.clocks
        if not clocks.are_any:
            return []
        is_held = clocks.min_dwell_ns > 0
        temperature = _HELD_PATH_TEMPERATURE if is_held else _LATE_PATH_TEMPERATURE
        is_always_late = clocks.machine.latency_ns > 0 and not clocks.machine.asks_ahead
        is_dear = is_held or is_always_late
        factors = PRICE_FACTORS if is_dear or not self._has_good_starts else _AHEAD_FACTORS
        paths = stage_path_starts(self._frontier, deadline_ns, clocks, price_factors=factors)
        return [_Start(path, temperature) for path in paths]

    def _rounded_choices(self, rounded: Replay, deadline_ns: int) -> list[Rows]:
        """A deadline's rounded optimum, and one for as much earlier as this one is late."""
        late_ns = self.replay(rounded.rows).makespan_ns - deadline_ns
        earlier_ns = deadline_ns - late_ns
        if late_ns <= 0 or earlier_ns < self._frontier.min_time_ns:
            return [rounded.rows]
        return [rounded.rows, self._rounded.near(earlier_ns).rows]

    def _choices_for_later_clocks(self, deadline_ns: int) -> list[Rows]:
        """Choices of a deadline's candidates for later clocks, the next latency first.

        Where they are in time with this latency, what is found uses no more than they do.
        """
        choices: list[Rows] = []
        for candidates in self._later:
            with suppress(NoPlanInTimeError):
                choices.append(candidates.near(deadline_ns).rows)
        return choices

    def _choices_under_cap(self, rounded: Replay, deadline_ns: int) -> list[Rows]:
        """Choices with power limits for single operations, where the rounded one breaks the cap."""
        peak_10uw = self._penalties.peak_10uw
        if self._peak_power is None or peak_10uw is None or rounded.peak_10uw <= peak_10uw:
            return []
        return self._peak_power.cheapest_choices(deadline_ns)

    def _fastest_choice_from(self, choice: Rows) -> Rows:
        """The fastest choice found that keeps the limits, from several starts on.

        One clock a stage is one of them.

        Raises:
            NoAnswerError: none keeps them; says by how much.
        """
        annealer = self.search(self.replay(choice), 0, lateness_price=_URGENT_LATENESS_PRICE)
        starts = [choice, annealer.constant()]
        if self._peak_power is not None:
            starts += [*self._peak_power.fastest_choices(), self._peak_power.least_power_choice]
        hot_starts = [_Start(start, _URGENT_TEMPERATURE) for start in starts]
        annealed = self._annealed(annealer, hot_starts, _LONG_MOVES_SHARE)

        def breaks_limits(candidate: Rows) -> bool:
            score = annealer.score(candidate)
            return score.shortage_ns > 0 or score.over_10fj > 0

        def rank(candidate: Rows) -> tuple[bool, int]:
            return breaks_limits(candidate), annealer.score(candidate).late_ns

        fastest = min([*annealed, *starts[1:]], key=rank)
        if breaks_limits(fastest):
            if self._peak_power is not None:
                raise NoAnswerError(self._peak_power.refusal(self.replay(fastest)))
            raise NoAnswerError(f"no plan was found {self._why_it_is_hard}")
        return fastest

    def _num_moves(self, share: float = 1.0) -> int:
        """How many moves an annealing tries, for a share of the usual ones."""
        return max(1, int(self._usual_moves * share))

    def _annealed(
        self, annealer: Search, starts: Sequence[_Start], moves_share: float = 1.0
    ) -> list[Rows]:
        """Anneal from each start apart, side by side; the seed of each is its position."""
        moves = self._num_moves(moves_share)

        def anneal(seed: int) -> Rows:
            start = starts[seed]
            return annealer.improve(start.choice, moves, start.temperature, seed)

        return parallel_map(anneal, range(len(starts)))

    @property
    def _why_it_is_hard(self) -> str:
        """Why there may be no plan in time, in words."""
        obstacles = [limit.obstacle for limit in self._conditions.limits]
        if self._conditions.machine.latency_ns:
            late_ms = self._conditions.machine.latency_ns / 1e6
            obstacles.insert(0, f"clocks come {late_ms:g} ms after they are asked for")
        return "where " + " and ".join(obstacles)
