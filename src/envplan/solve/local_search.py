"""Rows for clocks that follow late, and for limits that single moves can mend.

Where a clock comes late, how long an operation takes depends on its neighbours; where power or the
spacing of requests is limited, whether a row may be taken depends on all that runs at that time. So
rows are chosen by a search that replays every move exactly (csrc/annealing.hpp), and what comes out
is what `envplan.replay` says of it, to the nanosecond. It starts from several choices:

- the rounded relaxed optimum of the deadline, and of one that is earlier by what it is late;
- one clock a stage;
- what was found for clocks that come later, where these come soon: the sooner they come, the more
  choices are in time by a ns only, which are hard to find;
- under a cap on the peak, plans made with power limits for single operations (power_limits.py).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, Final

from envplan.cores import side_by_side
from envplan.errors import NoAnswerError
from envplan.replay import Machine, Replay, Rows, Search
from envplan.solve.candidates import Candidates, NoPlanInTimeError
from envplan.solve.power_limits import PowerLimited

# Annealings from the usual plan and from one clock a stage: hot enough to leave their pattern.
_ROUNDED_HEATS: Final = (1.5, 0.6)
_CONSTANT_HEAT: Final = 4.0
_LAST_HEAT: Final = 0.25  # from a plan that is nearly there; and once more, from the best of all
_MOVES_PER_OPERATION: Final = 120
_FURTHER_MOVES: Final = 350_000  # or this many an operation, where that is less:
_FURTHER_MOVES_PER_OPERATION: Final = 2_000
_MOST_WORK: Final = 6 * 10**8  # moves x operations: a move may replay them all
_MOST_WORK_UNDER_PEAK: Final = 10**7  # there, a move looks at the power over all time
_LATE_PRICE: Final = 1.1  # of what a ns saves at the deadline
_HURRY: Final = 20.0  # the same where nothing but time counts, or little time is to be had
#: Latencies, ns, whose choices the search for lower ones starts from as well.
_LATENCIES: Final = (10**6, 2 * 10**7)
#: Earlier deadlines that choices are made for, as parts of the way from T_min to T_star.
_FIXED: Final = (0.0, 0.25, 0.5, 0.75, 1.0)
#: Under a cap on the peak, later times may save energy: parts of the way from T_star to T_max.
_LATER: Final = (0.25, 0.5, 1.0)


class LocalSearch(Candidates):
    """Candidates where clocks come late, or where a limit is local."""

    is_plain = False

    def __init__(self, *setup: Any) -> None:
        super().__init__(*setup)
        frontier = self._frontier
        self._prices: dict[str, Any] = {}
        for limit in self._limits:
            self._prices |= limit.prices(frontier.num_gpus)
        count, work = len(frontier.pipeline.operations), _MOST_WORK
        self._power_limited: PowerLimited | None = None
        if "peak_uw" in self._prices:
            work = _MOST_WORK_UNDER_PEAK
            self._power_limited = PowerLimited(frontier, self._machine, self._prices["peak_uw"])
        further = min(_FURTHER_MOVES, count * _FURTHER_MOVES_PER_OPERATION)
        wanted = count * _MOVES_PER_OPERATION + further
        self._each = max(1, int(min(wanted, work // count) * self._moves))

    def near(self, deadline_ns: int) -> Replay:
        """As Candidates.near."""
        return self.at(min(deadline_ns, self._frontier.slowest_time_ns))

    def polished(
        self, best: Replay, deadline_ns: int, waits: bool, seconds: float
    ) -> tuple[Replay, None]:
        """As Candidates.polished: further rounds of the search."""
        seed, end = 100, time.monotonic() + seconds
        while time.monotonic() < end:
            search = self._search(best, deadline_ns)
            heat = (0.6, _LAST_HEAT)[seed % 2]
            best = self._replay(search.improve(best.rows, self._each, heat, seed))
            seed += 1
        return best, None

    @cached_property
    def fastest(self) -> Replay:
        """As Candidates.fastest."""
        return self._replay(self._hurried(self._rounded(self._frontier.min_time_ns).rows))

    @property
    def fastest_rows(self) -> Rows:
        """As Candidates.fastest_rows."""
        return self.fastest.rows

    def _worth_a_look(self, deadline_ns: int, waits: bool) -> list[int]:
        frontier = self._frontier
        least, star = frontier.min_time_ns, frontier.min_energy_time_ns
        slowest = frontier.slowest_time_ns
        latest = min(deadline_ns, slowest if waits else star)
        wanted = {latest, *(least + int((star - least) * part) for part in _FIXED)}
        if self._power_limited is not None:
            wanted |= {star + int((slowest - star) * part) for part in _LATER}
            latest = min(deadline_ns, slowest)
            wanted.add(latest)
        return sorted((one for one in wanted if one <= latest), reverse=True)

    def _besides(self, deadline_ns: int, none_yet: bool) -> list[Replay]:
        if none_yet and deadline_ns > self._frontier.min_energy_time_ns:
            self.near(deadline_ns)
        known = (one for one in self._known.values() if isinstance(one, Replay))
        return [one for one in known if one.makespan_ns <= deadline_ns]

    def _make(self, time_ns: int) -> Replay:
        """The replay of the best rows found; beyond T_star everybody waits until the deadline."""
        rounded = self._rounded(time_ns)
        search = self._search(rounded, time_ns)
        best = min(self._found(search, rounded, time_ns), key=search.score)
        if not search.score(best).holds:
            best = search.improve(self._hurried(best), self._each, _LAST_HEAT, 90)
        best = search.improve(best, self._each, _LAST_HEAT, 91)
        if not search.score(best).holds:
            least_ns = self._replay(self._hurried(best)).makespan_ns
            raise NoPlanInTimeError(time_ns, max(least_ns, time_ns + 1), self._why)
        return self._replay(best)

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
                    found.append(later.at(time_ns).rows)
        return found

    def _found(self, search: Search, rounded: Replay, deadline_ns: int) -> list[Rows]:
        starts = [(rounded.rows, heat) for heat in _ROUNDED_HEATS]
        starts.append((search.constant(), _CONSTANT_HEAT))
        # Starts that are nearly there; one that is there twice is annealed by two seeds.
        later = self._later(deadline_ns)
        prepared = [*later[:1], *later]
        late_ns = self._replay(rounded.rows).makespan_ns - deadline_ns
        if late_ns > 0:
            prepared.append(rounded.rows)
            if deadline_ns - late_ns >= self._frontier.min_time_ns:
                prepared.append(self._rounded(deadline_ns - late_ns).rows)
        if self._power_limited is not None and rounded.peak_uw > self._prices["peak_uw"]:
            prepared += self._power_limited.by(deadline_ns)
        found = self._improved(search, [*starts, *((rows, _LAST_HEAT) for rows in prepared)])
        if not any(search.score(rows).holds for rows in found[: len(_ROUNDED_HEATS)]):
            hurried = self._search(rounded, deadline_ns, _HURRY)
            found.append(hurried.improve(rounded.rows, self._each, _ROUNDED_HEATS[0], 0))
        return found

    def _improved(self, search: Search, starts: Sequence[tuple[Rows, float]]) -> list[Rows]:
        """What annealing makes of rows at a heat, of each apart."""

        def one(seed: int) -> Rows:
            rows, heat = starts[seed]
            return search.improve(rows, self._each, heat, seed)

        return side_by_side(one, range(len(starts)))

    def _hurried(self, rows: Rows) -> Rows:
        """The fastest rows found that keep the limits: one clock a stage is one choice."""
        hurry = self._search(self._replay(rows), 0, _HURRY)
        starts = [rows, hurry.constant()]
        if self._power_limited is not None:
            starts += [*self._power_limited.by(None), self._power_limited.thriftiest]
        found = self._improved(hurry, [(one, 1.0) for one in starts])

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
            **self._prices,
        )

    def _replay(self, rows: Rows) -> Replay:
        return self._frontier.problem.replay(rows, self._machine)

    @property
    def _why(self) -> str:
        """What makes it hard, in words."""
        late_ms = self._machine.latency_ns / 1e6
        reasons = {
            "latency": f"clocks come {late_ms:g} ms after they are asked for",
            "hold_ns": "they may not change so soon",
            "peak_uw": "power is capped",
        }
        present = [*(["latency"] if late_ms else []), *self._prices]
        return "where " + " and ".join(reasons[name] for name in present)
