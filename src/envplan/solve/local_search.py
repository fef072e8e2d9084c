"""Rows for clocks that follow late, and for limits that single moves can mend.

Where a clock comes late, how long an operation takes depends on its neighbours; where power or the
spacing of requests is limited, whether a row may be taken depends on all that runs at that time. So
rows are chosen by a search that replays every move exactly (csrc/annealing.hpp), and what comes out
is what `envplan.replay.engine` says of it, to the nanosecond. It starts from several choices:

- the rounded relaxed optimum of the deadline, and of one that is earlier by what it is late;
- one clock a stage;
- what was found for clocks that come later, where these come soon: the sooner they come, the more
  choices are in time by a ns only, which are hard to find;
- under a cap on the peak, plans made with power limits for single operations (peak_power.py).

All this is done for every second deadline of a fixed grid. For the others, a shorter search starts
from what was found for the one before and from rounded optima. What is found for a deadline often
ends earlier, so the next one after that asked for is looked at, too. Where a search finds nothing
in time, the fastest choice that is known is what there is.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, Final

from envplan.errors import NoAnswerError
from envplan.replay import Machine, Replay, Rows, Search
from envplan.replay.cores import side_by_side
from envplan.request.limits import NO_PENALTIES
from envplan.solve.candidates import Candidates
from envplan.solve.peak_power import PeakPowerHeuristic
from envplan.solve.solution import NoPlanInTimeError, Polished

# Annealings from the usual plan and from one clock a stage: hot enough to leave their pattern.
_ROUNDED_HEATS: Final = (1.5, 0.6)
_CONSTANT_HEAT: Final = 4.0
_LAST_HEAT: Final = 0.25  # from a plan that is nearly there; and once more, from the best of all
_MOVES_PER_OPERATION: Final = 20
_FURTHER_MOVES: Final = 60_000  # or this many an operation, where that is less:
_FURTHER_MOVES_PER_OPERATION: Final = 330
_LATENCY_ALONE: Final = 1.5  # times as many where clocks come late and nothing else is limited
_MOST_WORK: Final = 1.0 * 10**8  # moves x operations: a move may replay them all
_MOST_WORK_UNDER_PEAK: Final = 2.5 * 10**6  # there, a move looks at the power over all time
_LATE_PRICE: Final = 1.1  # of what a ns saves at the deadline
_HURRY: Final = 20.0  # the same where nothing but time counts, or little time is to be had
_HURRIED_MOVES: Final = 4.0  # times the usual moves; also of a round of polishing
#: Latencies, ns, whose choices the search for lower ones starts from as well.
_LATENCIES: Final = (10**6, 2 * 10**7)
#: The grid: whole searches are made for so many deadlines up to T_star, and for so many from there
#: to T_max; between two of them lie others, each of which starts from the one before.
_SEARCHED: Final = 96
_SEARCHED_BEYOND: Final = 32
_STEPS: Final = 2  # from one whole search to the next
_STEP_MOVES: Final = 0.5  # of the usual moves, for each start
_STEP_HEAT: Final = 0.6
_SOONER: Final = 4  # searches between two deadlines of the grid, for the least time
_BEND: Final = 1.5  # deadlines lie closer where the frontier is steep, near T_min


class LocalSearch(Candidates):
    """Candidates where clocks come late, or where a limit is local."""

    is_plain = False

    def __init__(self, *setup: Any) -> None:
        super().__init__(*setup)
        frontier = self._frontier
        self._penalties = NO_PENALTIES
        for limit in self._limits:
            self._penalties = self._penalties.combine(limit.penalties(frontier.num_gpus))
        count, work = len(frontier.pipeline.operations), _MOST_WORK
        self._power_limited: PeakPowerHeuristic | None = None
        peak_uw = self._penalties.peak_uw
        if peak_uw is not None:
            work = _MOST_WORK_UNDER_PEAK
            self._power_limited = PeakPowerHeuristic(frontier, self._machine, peak_uw)
        further = min(_FURTHER_MOVES, count * _FURTHER_MOVES_PER_OPERATION)
        wanted = count * _MOVES_PER_OPERATION + further
        times = 1.0 if self._penalties else _LATENCY_ALONE
        self._each = min(wanted, work / count) * times * self._moves

    def polished(self, best: Replay, deadline_ns: int, waits: bool, seconds: float) -> Polished:
        """As Candidates.polished: further rounds of the search."""
        seed, end = 100, time.monotonic() + seconds
        while time.monotonic() < end:
            search, heat = self._search(best, deadline_ns), (_STEP_HEAT, _LAST_HEAT)[seed % 2]
            best = self._replay(search.improve(best.rows, self._moved(_HURRIED_MOVES), heat, seed))
            seed += 1
        return Polished(best)

    @cached_property
    def fastest(self) -> Replay:
        """As Candidates.fastest."""
        hurried = self._replay(self._hurried(self._rounded(self._frontier.min_time_ns).rows))
        search = self._search(hurried, hurried.makespan_ns)
        return self._replay(search.improve(hurried.rows, self._moved(), _LAST_HEAT, 91))

    def sooner(self, replay: Replay) -> Replay:
        """As Candidates.sooner."""
        latest = replay.makespan_ns - 1
        span = latest - next(self._grid_below(latest), latest)
        found = [replay]
        for k in range(_SOONER):
            search, rows = self._searched(latest - span * k // _SOONER)
            found += [self._replay(rows)] if search.score(rows).holds else []
        return min(found, key=lambda one: one.makespan_ns)

    @property
    def fastest_rows(self) -> Rows:
        """As Candidates.fastest_rows."""
        return self.fastest.rows

    def _worth_a_look(self, deadline_ns: int, waits: bool) -> Iterator[int]:
        star = self._frontier.min_energy_time_ns
        if deadline_ns > star and not (waits or self._saves_beyond_star):
            deadline_ns = star
        # What is found for the next deadline of the grid may end by this one as well.
        after = self._grid[bisect_left(self._grid, deadline_ns) :][:1]
        return self._grid_below(max([deadline_ns, *after]))

    @cached_property
    def _saves_beyond_star(self) -> bool:
        """Whether choices for deadlines beyond T_star may use less: under a cap on the peak, and
        where none is in time by T_star."""
        if self._power_limited is not None:
            return True
        try:
            self.at(self._frontier.min_energy_time_ns)
        except NoPlanInTimeError:
            return True
        return False

    def _otherwise(self, deadline_ns: int) -> Replay:
        if self.fastest.makespan_ns > deadline_ns:
            raise self._late(deadline_ns)
        return self.fastest

    @cached_property
    def _grid(self) -> list[int]:
        """Deadlines that choices are made for, ns, ascending; of each _STEPS the first is searched
        for from the start."""
        frontier = self._frontier
        least, star = frontier.min_time_ns, frontier.min_energy_time_ns
        count, beyond = _SEARCHED * _STEPS, _SEARCHED_BEYOND * _STEPS
        parts = [round((star - least) * (k / count) ** _BEND) for k in range(count)]
        span = frontier.slowest_time_ns - star
        return [
            *(least + part for part in parts),
            *(star + span * k // beyond for k in range(beyond + 1)),
        ]

    def _grid_below(self, latest_ns: int) -> Iterator[int]:
        return (time_ns for time_ns in reversed(self._grid) if time_ns <= latest_ns)

    def _make(self, time_ns: int) -> Replay:
        """The replay of the best rows found; beyond T_star everybody waits until the deadline."""
        place = bisect_right(self._grid, time_ns) - 1
        search, rows = self._stepped(place) if place % _STEPS else self._searched(time_ns)
        if not search.score(rows).holds:
            raise self._late(time_ns)
        return self._replay(rows)

    def _late(self, deadline_ns: int) -> NoPlanInTimeError:
        least_ns = max(self.fastest.makespan_ns, deadline_ns + 1)
        return NoPlanInTimeError(deadline_ns, least_ns, self._why)

    def _stepped(self, place: int) -> tuple[Search, Rows]:
        """The best rows found from those for the deadline before on the grid, and from rounding."""
        before, time_ns = self._grid[place - 1 : place + 1]
        try:
            start = self.at(before)
        except NoPlanInTimeError:
            start = self.fastest
        search = self._search(start, time_ns)
        rounded = self._nearly(self._rounded(time_ns), time_ns)
        starts = [(start.rows, _LAST_HEAT), *((rows, _STEP_HEAT) for rows in rounded)]
        found = [*self._improved(search, starts, _STEP_MOVES), *self._later(time_ns)]
        return search, min(found, key=search.score)

    def _searched(self, time_ns: int) -> tuple[Search, Rows]:
        """The best rows found from everything that there is to start from."""
        rounded = self._rounded(time_ns)
        search = self._search(rounded, time_ns)
        best = min(self._found(search, rounded, time_ns), key=search.score)
        if not search.score(best).holds:
            hurry = self._search(self._replay(best), time_ns, _HURRY)
            hurried = hurry.improve(best, self._moved(_HURRIED_MOVES), 1.0, 90)
            best = min([hurried, self.fastest.rows], key=search.score)
        return search, search.improve(best, self._moved(), _LAST_HEAT, 91)

    def _nearly(self, rounded: Replay, deadline_ns: int) -> list[Rows]:
        """Rounded rows for a deadline, and those for one that is earlier by what these are late."""
        late_ns = self._replay(rounded.rows).makespan_ns - deadline_ns
        earlier_ns = deadline_ns - late_ns
        if late_ns <= 0 or earlier_ns < self._frontier.min_time_ns:
            return [rounded.rows]
        return [rounded.rows, self._rounded(earlier_ns).rows]

    def _rounded(self, time_ns: int) -> Replay:
        """The rounded relaxed optimum of a deadline, with clocks that follow at once."""
        return Candidates.of(self._frontier).near(time_ns)

    def _later(self, time_ns: int) -> list[Rows]:
        """Rows for a deadline, ns, at each of the fixed latencies above this one, the next first.

        Where they are in time with this latency, what is found uses no more than they do.
        """
        found: list[Rows] = []
        for latency_ns in _LATENCIES:
            if 0 < self._machine.latency_ns < latency_ns:
                machine = Machine(latency_ns)
                later = LocalSearch.of(self._frontier, machine, self._limits, self._moves)
                with suppress(NoPlanInTimeError):
                    found.append(later.near(time_ns).rows)
        return found

    def _found(self, search: Search, rounded: Replay, deadline_ns: int) -> list[Rows]:
        starts = [(rounded.rows, heat) for heat in _ROUNDED_HEATS]
        starts.append((search.constant(), _CONSTANT_HEAT))
        # Starts that are nearly there; one that is there twice is annealed by two seeds.
        later = self._later(deadline_ns)
        prepared = [*later[:1], *later, *self._nearly(rounded, deadline_ns)]
        peak_uw = self._penalties.peak_uw
        if self._power_limited is not None and peak_uw is not None and rounded.peak_uw > peak_uw:
            prepared += self._power_limited.cheapest_choices(deadline_ns)
        found = self._improved(search, [*starts, *((rows, _LAST_HEAT) for rows in prepared)])
        if not any(search.score(rows).holds for rows in found[: len(_ROUNDED_HEATS)]):
            hurried = self._search(rounded, deadline_ns, _HURRY)
            found.append(hurried.improve(rounded.rows, self._moved(), _ROUNDED_HEATS[0], 0))
        return found

    def _moved(self, times: float = 1.0) -> int:
        """How many moves an annealing of so many times the usual ones tries."""
        return max(1, int(self._each * times))

    def _improved(
        self, search: Search, starts: Sequence[tuple[Rows, float]], times: float = 1.0
    ) -> list[Rows]:
        """What annealing makes of rows at a heat, of each apart."""

        def one(seed: int) -> Rows:
            rows, heat = starts[seed]
            return search.improve(rows, self._moved(times), heat, seed)

        return side_by_side(one, range(len(starts)))

    def _hurried(self, rows: Rows) -> Rows:
        """The fastest rows found that keep the limits: one clock a stage is one choice."""
        hurry = self._search(self._replay(rows), 0, _HURRY)
        starts = [rows, hurry.constant()]
        if self._power_limited is not None:
            starts += [*self._power_limited.fastest_choices(), self._power_limited.thriftiest]
        found = self._improved(hurry, [(one, 1.0) for one in starts], _HURRIED_MOVES)

        def rank(one: Rows) -> tuple[bool, int]:
            score = hurry.score(one)
            return score.shortage_ns > 0 or score.over_fj > 0, score.late_ns

        best = min([*found, *starts[1:]], key=rank)
        if rank(best)[0]:
            if self._power_limited is not None:
                raise NoAnswerError(self._power_limited.refusal(self._replay(best)))
            raise NoAnswerError(f"no plan was found {self._why}")
        return best

    def _search(self, start: Replay, deadline_ns: int, price: float = _LATE_PRICE) -> Search:
        frontier = self._frontier
        return Search(
            frontier.problem,
            start.starts_ns,
            deadline_ns,
            price_uw=max(1, int(price * frontier.slope_uw(deadline_ns))),
            machine=self._machine,
            waits=deadline_ns > frontier.min_energy_time_ns,
            hold_ns=self._penalties.min_dwell_ns,
            peak_uw=self._penalties.peak_uw,
        )

    def _replay(self, rows: Rows) -> Replay:
        return self._frontier.problem.replay(rows, self._machine)

    @property
    def _why(self) -> str:
        """What makes it hard, in words."""
        obstacles = [limit.obstacle for limit in self._limits]
        if self._machine.latency_ns:
            late_ms = self._machine.latency_ns / 1e6
            obstacles.insert(0, f"clocks come {late_ms:g} ms after they are asked for")
        return "where " + " and ".join(obstacles)
