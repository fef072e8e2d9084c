"""Choices of rows for deadlines, each made once, and the best of those that are in time.

**A later deadline never costs more.** Where clocks follow at once and no limit is local, choices
are made for the deadlines of one fixed grid only, whatever deadline is asked for, and the answer is
the best choice of all grid deadlines that are not later. So a later deadline has every choice that
an earlier one has. Few of them have to be made: a choice for a grid deadline uses at least the
relaxed energy there, so once that is more than the best found, no earlier one can be better. The
grid is as fine as rounding is coarse: between two of its deadlines the relaxed energy changes by a
part of what rounding loses. Whether a time is on the grid depends on the frontier's slope there
alone, so nothing else of the frontier has to be known.

Other choices take long, so they are made for the deadline asked for, for a few fixed ones before
it where the relaxation lets them be better, and all that were made before are remembered.

One clock for each stage is a candidate, too: no planner that chooses such is ever better.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from typing import Final, NamedTuple

import numpy as np

from envplan.frontier import Relaxation
from envplan.limits import Limit
from envplan.replay import Machine, Replay, Rows
from envplan.solve.local_search import LocalSearch, NoPlanInTimeError
from envplan.solve.rounding import HEATS, Rounding
from envplan.solve.single_clocks import StageClocks

#: Steps of the grid: this part of what rounding alone loses, and not less than that of the energy.
#: They are rounded down to powers of two.
_PART_OF_GAP: Final = 2 / 3
_LEAST_STEP: Final = 3e-5
#: About so many deadlines at most, up to T_star and beyond it.
_MOST_TIMES: Final = 256
_MOST_TIMES_BEYOND: Final = 128
#: So many at least.
_FEWEST_TIMES: Final = 32
#: What rounding loses is measured on so many microbatches, where the schedule has no chunks.
_FEW_MICROBATCHES: Final = 8
#: Where plans can end at no more times than this, all of them are on the grid.
_FEW_TIMES: Final = 1000
#: Annealing of choices for the grid: in turn hot, for other arrangements, and cool.
_MEMBER_HEATS: Final[tuple[tuple[float, ...], ...]] = ((0.3,), (1.0, 0.3))
_MEMBER_MOVES: Final = 0.4
#: Latencies, ns, whose choices the search for a lower one starts from as well.
_LATENCIES: Final = (10**6, 2 * 10**7)
#: Earlier deadlines that other choices are made for, as parts of the way from T_min to T_star.
_FIXED: Final = (0.0, 0.25, 0.5, 0.75, 1.0)
#: Under a cap on the peak, later times may save energy: parts of the way from T_star to T_max.
_LATER: Final = (0.25, 0.5, 1.0)


class Known(NamedTuple):
    """A choice that is tried wherever it is in time, and what its replay takes."""

    rows: Rows
    makespan_ns: int
    energy_fj: int

    @classmethod
    def of(cls, replay: Replay) -> Known:
        """What is kept of a replay."""
        return cls(replay.rows, replay.makespan_ns, replay.energy_fj)


class Candidates:
    """Choices of rows for one frontier, machine and set of local limits.

    Args:
        moves: share of the usual moves of the searches.
    """

    def __init__(
        self, frontier: Relaxation, machine: Machine, limits: Sequence[Limit], moves: float = 1.0
    ) -> None:
        self._frontier = frontier
        self._machine = machine
        self._limits = tuple(limits)
        self._moves = moves
        self._known: dict[int, Replay | NoPlanInTimeError] = {}

    @classmethod
    def of(
        cls, frontier: Relaxation, machine: Machine, limits: Sequence[Limit], moves: float = 1.0
    ) -> Candidates:
        """The candidates of these, shared by all who ask for them.

        Plain choices do not depend on what was asked before, so all frontiers of one trace share
        them.
        """
        new, key = cls(frontier, machine, limits, moves), (machine, tuple(limits), moves)
        store = frontier.traced_once if new.is_plain else frontier.asked_once
        found: Candidates = store.setdefault(key, new)
        return found

    @property
    def is_plain(self) -> bool:
        """Whether clocks follow at once and no limit is local."""
        return self._machine.latency_ns == 0 and not self._limits

    def best_by(self, deadline_ns: int, *, waits: bool = False) -> Replay:
        """The best known choice that ends by a deadline and keeps the local limits.

        Args:
            deadline_ns: not below T_min, ns.
            waits: everybody waits until then, so what counts is used above waiting.

        Raises:
            NoPlanInTimeError: none was found.
        """
        frontier, found = self._frontier, list[Replay]()
        bound = frontier.effective_bound_fj if waits else frontier.lower_bound_fj
        refusal: NoPlanInTimeError | None = None

        def value(one: Replay) -> int:
            return one.effective_fj if waits else one.energy_fj

        for time_ns in self._worth_a_look(deadline_ns, waits):
            if found and bound(time_ns) >= min(map(value, found)):
                break
            try:
                found.append(self.at(time_ns))
            except NoPlanInTimeError as error:
                refusal = refusal or error
        if not self.is_plain:
            if not found and deadline_ns > frontier.min_energy_time_ns:
                found.append(self.at(min(deadline_ns, frontier.slowest_time_ns)))
            known = (one for one in self._known.values() if isinstance(one, Replay))
            found += (one for one in known if one.makespan_ns <= deadline_ns)
        if not found:
            assert refusal is not None
            raise refusal
        return min(found, key=value)

    @cached_property
    def single_clocks(self) -> list[Known]:
        """One clock for all stages, or a balanced one for each."""
        problem = self._frontier.problem
        clocks = StageClocks(problem)
        return [
            Known.of(problem.replay(rows, self._machine))
            for rows in chain(clocks.one_for_all(), clocks.balanced())
        ]

    def near(self, deadline_ns: int) -> Replay:
        """A choice that ends by a deadline, for pictures and tables of many.

        Raises:
            NoPlanInTimeError: none was found.
        """
        deadline_ns = min(deadline_ns, self._frontier.slowest_time_ns)
        return self.at(next(self._grid_below(deadline_ns)) if self.is_plain else deadline_ns)

    def at(self, time_ns: int) -> Replay:
        """The choice made for a deadline from T_min to T_max, ns.

        Raises:
            NoPlanInTimeError: none was found.
        """
        found = self._known.get(time_ns)
        if found is None:
            try:
                found = self._make(time_ns)
            except NoPlanInTimeError as error:
                found = error
            self._known[time_ns] = found
        if isinstance(found, NoPlanInTimeError):
            raise found
        return found

    def fastest(self) -> Replay:
        """The fastest choice found that keeps the local limits; T_min's where there are none.

        Raises:
            NoAnswerError: none keeps them.
        """
        if self.is_plain:
            return self.at(self._frontier.min_time_ns)
        return self._search.fastest

    @cached_property
    def fastest_rows(self) -> Rows:
        """The fastest rows known, (N,), whatever they use."""
        if self.is_plain:
            return np.zeros(len(self._frontier.pipeline.operations), np.int32)
        return self._search.fastest.rows

    def polished(self, rows: Rows, deadline_ns: int, rounds: int) -> Rows:
        """Rows after further rounds of the search from them, where local limits are searched."""
        return self._search.polished(rows, deadline_ns, rounds)

    def rounded(self, time_ns: int, heats: Sequence[float] = HEATS, moves: float = 1.0) -> Rounding:
        """The rounded relaxed optimum of a deadline from T_min to T_max, clocks at once.

        Args:
            heats: of the annealing that follows.
            moves: share of the usual moves at each.
        """
        frontier = self._frontier
        events, _ = frontier.state_at(time_ns)
        rounding = Rounding(frontier.pipeline, frontier.network, events, time_ns)
        rounding.anneal(heats, moves * self._moves)
        return rounding

    @cached_property
    def _search(self) -> LocalSearch:
        return LocalSearch(
            self._frontier,
            self._machine,
            self._limits,
            self._moves,
            lambda time_ns: Candidates.of(self._frontier, Machine(), ()).near(time_ns),
            self._slower,
        )

    def _slower(self, time_ns: int) -> Rows | None:
        """Rows for a deadline at the next of the fixed latencies above this one, ns."""
        latency_ns = next((own for own in _LATENCIES if own > self._machine.latency_ns), 0)
        if not 0 < self._machine.latency_ns < latency_ns:
            return None
        slower = Candidates.of(self._frontier, Machine(latency_ns), self._limits, self._moves)
        try:
            return slower.at(time_ns).rows
        except NoPlanInTimeError:
            return None

    def _make(self, time_ns: int) -> Replay:
        if not self.is_plain:
            return self._search.by(time_ns)
        frontier, heats, moves = self._frontier, HEATS, 1.0
        if time_ns not in (frontier.min_time_ns, frontier.min_energy_time_ns):
            spacing_ns, moves = self._spacing_ns(frontier.slope_uw(time_ns)), _MEMBER_MOVES
            heats = _MEMBER_HEATS[time_ns // spacing_ns % 2]
        return frontier.problem.replay(self.rounded(time_ns, heats, moves).rows)

    def _worth_a_look(self, deadline_ns: int, waits: bool) -> Iterable[int]:
        """Deadlines to make choices for, ns, the latest first."""
        frontier = self._frontier
        latest = min(
            deadline_ns, frontier.slowest_time_ns if waits else frontier.min_energy_time_ns
        )
        if self.is_plain:
            return self._grid_below(latest)
        least, star = frontier.min_time_ns, frontier.min_energy_time_ns
        wanted = {latest, *(least + int((star - least) * part) for part in _FIXED)}
        if any("peak_uw" in limit.prices(1) for limit in self._limits):
            later = frontier.slowest_time_ns - star
            wanted |= {star + int(later * part) for part in _LATER}
            latest = min(deadline_ns, frontier.slowest_time_ns)
            wanted.add(latest)
        return sorted((time for time in wanted if time <= latest), reverse=True)

    def _grid_below(self, latest_ns: int) -> Iterator[int]:
        """The grid's deadlines up to one, ns, the latest first: T_max, T_star, T_min, and those
        times of which the frontier's slope just below them makes multiples of their spacing."""
        frontier = self._frontier
        ends = {frontier.min_energy_time_ns, frontier.slowest_time_ns}
        for first, last, slope in frontier.intervals_below(
            min(latest_ns, frontier.slowest_time_ns)
        ):
            if last in ends:
                yield last
            spacing = self._spacing_ns(slope)
            until = last - (last in ends)
            yield from range(until - until % spacing, max(first, frontier.min_time_ns), -spacing)
        yield frontier.min_time_ns

    def _spacing_ns(self, slope_uw: int) -> int:
        """How far deadlines lie apart where the frontier has a slope."""
        frontier, waiting = self._frontier, self._frontier.total_power_uw
        star = frontier.min_energy_time_ns
        price_uw, span, most = slope_uw - waiting, star - frontier.min_time_ns, _MOST_TIMES
        if slope_uw > waiting and self._has_few_times:
            return self._time_unit_ns
        if slope_uw <= waiting:
            price_uw, span = slope_uw, frontier.slowest_time_ns - star
            most = _MOST_TIMES_BEYOND
        wanted = min(self._step_fj // max(1, price_uw), span // _FEWEST_TIMES)
        return 1 << max(0, max(span // most, wanted).bit_length() - 1)

    @cached_property
    def _step_fj(self) -> int:
        """By how much the relaxed energy changes from one deadline to the next, fJ."""
        whole, pipeline = self._frontier, self._frontier.pipeline
        sample, few = whole, _FEW_MICROBATCHES
        if (
            pipeline.num_chunks == 1
            and pipeline.schedule != "dag"
            and few < pipeline.num_microbatches
        ):
            sample = whole.retraced(pipeline.with_microbatches(few), whole.profile)
        least, star = sample.min_time_ns, sample.min_energy_time_ns
        roundings = Candidates.of(sample, Machine(), ())
        lost = 0.0
        for time_ns in (least, star):
            energy_fj = sample.problem.replay(roundings.rounded(time_ns, ()).rows).energy_fj
            lost += (energy_fj / max(1, sample.lower_bound_fj(time_ns)) - 1) / 2
        energy_fj = whole.lower_bound_fj(whole.min_energy_time_ns)
        return max(1, int(max(_LEAST_STEP, _PART_OF_GAP * lost) * energy_fj))

    @cached_property
    def _has_few_times(self) -> bool:
        frontier = self._frontier
        span = frontier.min_energy_time_ns - frontier.min_time_ns
        return span <= _FEW_TIMES * self._time_unit_ns

    @cached_property
    def _time_unit_ns(self) -> int:
        """What every time and lag is a multiple of, and so every makespan without stalls, ns."""
        pipeline, profile = self._frontier.pipeline, self._frontier.profile
        times = [table.time_ns for table in profile.tables()]
        return int(np.gcd.reduce(np.concatenate([pipeline.succ_lag_ns, *times])))
