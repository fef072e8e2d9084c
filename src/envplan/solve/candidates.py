"""Choices of rows for deadlines, each made once, and the best of those that are in time.

**A later deadline never costs more.** Choices are made for the deadlines of one fixed grid only,
whatever deadline is asked for, and the answer is the best choice of all grid deadlines that are not
later. So a later deadline has every choice that an earlier one has. Few of them have to be made: a
choice for a grid deadline uses at least the relaxed energy there, so once that is more than the
best found, no earlier one can be better. The grid is as fine as rounding is coarse: between two of
its deadlines the relaxed energy changes by a part of what rounding loses. Whether a time is on the
grid depends on the frontier's slope there alone, so nothing else of the frontier has to be known.

Where clocks come late or a limit is local (local_search.py), choices take longer and lose more, so
the grid is another one, and most choices start from that for the deadline before.

One clock for each stage is a candidate, too: no planner that chooses such is ever better.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from typing import Final, Self

import numpy as np

from envplan.frontier import Relaxation
from envplan.replay import Machine, Replay, Rows
from envplan.request.limits import Limit
from envplan.solve.rounding import TEMPERATURES, Rounding
from envplan.solve.solution import KnownChoice, NoPlanInTimeError, Polished
from envplan.solve.uniform_clocks import UniformClocks

#: Steps of the grid: this part of what rounding alone loses, and not less than that of the energy.
#: They are rounded down to powers of two.
_PART_OF_GAP: Final = 2 / 3
_LEAST_STEP: Final = 3e-5
#: About so many deadlines at most, up to T_star and beyond it.
_MOST_TIMES: Final = 256
_MOST_TIMES_BEYOND: Final = 128
#: So many at least.
_FEWEST_TIMES: Final = 32
#: More where there are few operations, so that choices are rare and quickly made: so many divided
#: by the number of operations, but no more than this.
_TIMES_X_OPERATIONS: Final = 4096
_FEWEST_TIMES_IF_TINY: Final = 512
#: What rounding loses is measured on so many microbatches, where the schedule has no chunks.
_FEW_MICROBATCHES: Final = 8
#: Where plans can end at no more times than this, all of them are on the grid.
_FEW_TIMES: Final = 1000
#: Annealing of choices for the grid: in turn hot, for other arrangements, and cool.
_MEMBER_HEATS: Final[tuple[tuple[float, ...], ...]] = ((0.3,), (1.0, 0.3))
_MEMBER_MOVES: Final = 0.4
#: After so many deadlines in a row that nothing was found for, earlier ones are not looked at.
_MOST_FAILURES: Final = 8
#: Clocks follow at once.
_AT_ONCE: Final = Machine()


class Candidates:
    """Choices of rows for one frontier, machine and set of local limits; these, where clocks follow
    at once and no limit is local.

    Args:
        moves: share of the usual moves of the searches.
    """

    is_plain = True

    def __init__(
        self, frontier: Relaxation, machine: Machine, limits: tuple[Limit, ...], moves: float
    ) -> None:
        self._frontier = frontier
        self._machine = machine
        self._limits = limits
        self._moves = moves
        self._known: dict[int, Replay | NoPlanInTimeError] = {}

    @classmethod
    def of(
        cls,
        frontier: Relaxation,
        machine: Machine = _AT_ONCE,
        limits: Sequence[Limit] = (),
        moves: float = 1.0,
    ) -> Self:
        """The candidates of these, shared by all who ask for them.

        Plain choices do not depend on what was asked before, so all frontiers of one trace share
        them.
        """
        key = (machine, tuple(limits), moves)
        store = frontier.traced_once if cls.is_plain else frontier.asked_once
        found: Self = store.get(key) or store.setdefault(key, cls(frontier, *key))
        return found

    def best_by(
        self,
        deadline_ns: int,
        *,
        waits: bool = False,
        keeps: Callable[[Replay], bool] = lambda _: True,
    ) -> Replay:
        """The best known choice that ends by a deadline and keeps the local limits.

        Args:
            deadline_ns: not below T_min, ns.
            waits: everybody waits until then, so what counts is used above waiting.
            keeps: whether a choice keeps the limits on the whole plan; one that does goes before
                all that do not.

        Raises:
            NoPlanInTimeError: none was found.
        """
        frontier, found, keeping = self._frontier, list[Replay](), list[Replay]()
        bound = frontier.effective_bound_fj if waits else frontier.lower_bound_fj

        def value(one: Replay) -> int:
            return one.effective_fj if waits else one.energy_fj

        failures = 0
        for time_ns in self._worth_a_look(deadline_ns, waits):
            if failures == _MOST_FAILURES:
                break
            if found and bound(time_ns) >= min(map(value, keeping or found)):
                break
            try:
                choice = self.at(time_ns)
            except NoPlanInTimeError:
                failures += 1
                continue
            failures = 0
            if choice.makespan_ns <= deadline_ns:
                found.append(choice)
                keeping += [choice] if keeps(choice) else []
        found = keeping or found
        return min(found, key=value) if found else self._otherwise(deadline_ns)

    @cached_property
    def single_clocks(self) -> list[KnownChoice]:
        """One clock for all stages, or a balanced one for each."""
        problem = self._frontier.problem
        clocks = UniformClocks(problem)
        return [
            KnownChoice.of(problem.replay(rows, self._machine))
            for rows in chain(clocks.one_for_all(), clocks.balanced())
        ]

    def near(self, deadline_ns: int) -> Replay:
        """A choice that ends by a deadline, for pictures and tables of many."""
        return self.at(next(self._grid_below(deadline_ns)))

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

    @property
    def fastest(self) -> Replay:
        """The fastest choice found that keeps the local limits; T_min's where there are none.

        Raises:
            NoAnswerError: none keeps them; says by how much.
        """
        return self.at(self._frontier.min_time_ns)

    def sooner(self, replay: Replay) -> Replay:
        """The fastest choice that a search from a choice finds, or that one itself."""
        return replay

    @property
    def fastest_rows(self) -> Rows:
        """The fastest rows known, (N,), whatever they use."""
        return np.zeros_like(self._frontier.problem.table)

    def polished(self, best: Replay, deadline_ns: int, waits: bool, seconds: float) -> Polished:
        """Improve a choice by a deadline for about so many seconds."""
        from envplan.solve.polish import polish  # ortools takes a while to import

        frontier = self._frontier
        latest = frontier.slowest_time_ns if waits else frontier.min_energy_time_ns
        rounding = self.rounded(min(deadline_ns, latest))
        return polish(frontier, best, rounding, idle_until_deadline=waits, seconds=seconds)

    def rounded(
        self, time_ns: int, heats: Sequence[float] = TEMPERATURES, moves: float = 1.0
    ) -> Rounding:
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

    def _make(self, time_ns: int) -> Replay:
        frontier, heats, moves = self._frontier, TEMPERATURES, 1.0
        if time_ns not in (frontier.min_time_ns, frontier.min_energy_time_ns):
            spacing_ns, moves = self._spacing_ns(frontier.slope_uw(time_ns)), _MEMBER_MOVES
            heats = _MEMBER_HEATS[time_ns // spacing_ns % 2]
        return frontier.problem.replay(self.rounded(time_ns, heats, moves).choice)

    def _worth_a_look(self, deadline_ns: int, waits: bool) -> Iterable[int]:
        """Deadlines to make choices for, ns, the latest first."""
        frontier = self._frontier
        latest = frontier.slowest_time_ns if waits else frontier.min_energy_time_ns
        return self._grid_below(min(deadline_ns, latest))

    def _otherwise(self, deadline_ns: int) -> Replay:
        """What ends by a deadline where no choice for one of the grid does; raises as best_by."""
        raise NoPlanInTimeError(deadline_ns, self._frontier.min_time_ns, "")

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
        fewest = self._fewest_times
        wanted = min(self._step_fj // max(1, price_uw), span // fewest)
        return 1 << max(0, max(span // max(most, fewest), wanted).bit_length() - 1)

    @cached_property
    def _fewest_times(self) -> int:
        quick = _TIMES_X_OPERATIONS // len(self._frontier.pipeline.operations)
        return max(_FEWEST_TIMES, min(_FEWEST_TIMES_IF_TINY, quick))

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
        roundings = Candidates.of(sample)
        lost = 0.0
        for time_ns in (least, star):
            energy_fj = sample.problem.replay(roundings.rounded(time_ns, ()).choice).energy_fj
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
