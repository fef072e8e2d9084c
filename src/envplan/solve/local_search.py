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

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Final

from envplan.cores import side_by_side
from envplan.errors import NoAnswerError
from envplan.frontier import Relaxation
from envplan.limits import Limit
from envplan.replay import Machine, Replay, Rows, Search
from envplan.solve.power_limits import PowerLimited
from envplan.units import s_from_ns

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


class NoPlanInTimeError(NoAnswerError):
    """No plan was found that ends by a deadline and keeps the local limits.

    Attributes:
        least_ns: the least time that was found, ns.
    """

    def __init__(self, deadline_ns: int, least_ns: int, why: str) -> None:
        self.least_ns = least_ns
        super().__init__(
            f"no plan was found that finishes in {s_from_ns(deadline_ns):.9f} s {why}; the least "
            f"time found is {s_from_ns(least_ns):.9f} s"
        )


class LocalSearch:
    """The search for one frontier, machine and set of local limits.

    Args:
        moves: share of the usual moves.
        rounded: the replay of the rounded relaxed optimum for a deadline from T_min to T_max, with
            clocks that follow at once.
        later: rows found for a deadline where clocks come later, from which the search starts, too.
    """

    def __init__(
        self,
        frontier: Relaxation,
        machine: Machine,
        limits: Sequence[Limit],
        moves: float,
        rounded: Callable[[int], Replay],
        later: Callable[[int], Rows | None],
    ) -> None:
        self._frontier = frontier
        self._machine = machine
        self._limits = limits
        self._rounded = rounded
        self._later = later
        self._prices: dict[str, Any] = {}
        for limit in limits:
            self._prices |= limit.prices(frontier.num_gpus)
        count, work = len(frontier.pipeline.operations), _MOST_WORK
        self._power_limited: PowerLimited | None = None
        if "peak_uw" in self._prices:
            work = _MOST_WORK_UNDER_PEAK
            self._power_limited = PowerLimited(frontier, machine, self._prices["peak_uw"])
        further = min(_FURTHER_MOVES, count * _FURTHER_MOVES_PER_OPERATION)
        wanted = count * _MOVES_PER_OPERATION + further
        self._moves = max(1, int(min(wanted, work // count) * moves))

    def by(self, deadline_ns: int) -> Replay:
        """The replay of the best rows found that end by a deadline and keep the limits.

        Args:
            deadline_ns: from T_min to T_max, ns. Beyond T_star everybody waits until then.

        Raises:
            NoPlanInTimeError: none was found; says the least time that was.
        """
        rounded = self._rounded(deadline_ns)
        search = self._search(rounded, deadline_ns)
        best = min(self._found(search, rounded, deadline_ns), key=search.score)
        if not search.score(best).holds:
            best = search.improve(self._hurried(best), self._moves, _LAST_HEAT, 90)
        best = search.improve(best, self._moves, _LAST_HEAT, 91)
        if not search.score(best).holds:
            least_ns = self._replay(self._hurried(best)).makespan_ns
            raise NoPlanInTimeError(deadline_ns, max(least_ns, deadline_ns + 1), self._why)
        return self._replay(best)

    def polished(self, rows: Rows, deadline_ns: int, rounds: int) -> Rows:
        """Rows after so many further rounds of the search from them."""
        search = self._search(self._replay(rows), deadline_ns)
        for seed in range(rounds):
            rows = search.improve(rows, self._moves, (0.6, _LAST_HEAT)[seed % 2], 100 + seed)
        return rows

    @cached_property
    def fastest(self) -> Replay:
        """The replay of the fastest rows found that keep the limits.

        Raises:
            NoAnswerError: none keep them; says by how much.
        """
        return self._replay(self._hurried(self._rounded(self._frontier.min_time_ns).rows))

    def _found(self, search: Search, rounded: Replay, deadline_ns: int) -> list[Rows]:
        starts = [(rounded.rows, heat) for heat in _ROUNDED_HEATS]
        starts.append((search.constant(), _CONSTANT_HEAT))
        # Starts that are nearly there; one that is there twice is annealed by two seeds.
        later = self._later(deadline_ns)
        prepared = [] if later is None else [later, later]
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
            found.append(hurried.improve(rounded.rows, self._moves, _ROUNDED_HEATS[0], 0))
        return found

    def _improved(self, search: Search, starts: Sequence[tuple[Rows, float]]) -> list[Rows]:
        """What annealing makes of rows at a heat, of each apart."""

        def one(seed: int) -> Rows:
            rows, heat = starts[seed]
            return search.improve(rows, self._moves, heat, seed)

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
        reasons = []
        if self._machine.latency_ns:
            late_ms = self._machine.latency_ns / 1e6
            reasons.append(f"clocks come {late_ms:g} ms after they are asked for")
        reasons += [
            {"hold_ns": "they may not change so soon", "peak_uw": "power is capped"}[name]
            for name in self._prices
        ]
        return "where " + " and ".join(reasons)
