"""The deadlines for which candidates are made, a fixed grid for each frontier.

Candidates are made for the deadlines of a grid only, whatever deadline is asked for, so a later
deadline has every candidate that an earlier one has (candidates.py). Each of the two searches has a
grid of its own: the local search takes longer and loses more, so its deadlines lie farther apart.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from functools import cached_property
from typing import Final

import numpy as np

from envplan.frontier import Relaxation
from envplan.solve.rounding import relaxed_rounding

#: Steps of the rounding grid: this part of what rounding alone loses, and not less than that of the
#: energy. They are rounded down to powers of two.
_STEP_SHARE_OF_GAP: Final = 2 / 3
_MIN_STEP_SHARE: Final = 3e-5
#: About so many deadlines at most, up to T_star and beyond it.
_MAX_DEADLINES: Final = 256
_MAX_DEADLINES_BEYOND: Final = 128
#: So many at least.
_MIN_DEADLINES: Final = 32
#: More where there are few operations, so that candidates are rare and quickly made: so many
#: divided by the number of operations, but no more than this.
_DEADLINES_X_OPERATIONS: Final = 4096
_MIN_DEADLINES_IF_TINY: Final = 512
#: The loss of rounding is measured on so many microbatches, where the schedule has no chunks.
_SAMPLE_MICROBATCHES: Final = 8
#: Where plans can end at no more times than this, all of them are on the grid.
_FEW_TIMES: Final = 1000

#: The search grid: full searches are made for so many deadlines up to T_star, fewer where searches
#: take long, and for so many from there to T_max; after each of them lie others, for which a
#: shorter search starts from that one.
_FULL_SEARCHES: Final = 48
_FULL_SEARCHES_IF_SLOW: Final = 24
_FULL_SEARCHES_BEYOND: Final = 16
_DEADLINES_PER_FULL_SEARCH: Final = 4
_BEND: Final = 1.5  # deadlines lie closer where the frontier is steep, near T_min


class RoundingGrid:
    """Deadlines at which the relaxed energy differs by a fixed step.

    The grid is as fine as rounding is coarse: from one deadline to the next the relaxed energy
    changes by a part of what rounding loses. Whether a time is on the grid depends on the
    frontier's slope there alone, so nothing else of the frontier has to be known.

    Args:
        frontier: whose deadlines.
        step_share: of the energy, from one deadline to the next; None: as fine as rounding needs.
    """

    def __init__(self, frontier: Relaxation, step_share: float | None = None) -> None:
        self._frontier = frontier
        self._given_step_share = step_share

    def descending_from(self, latest_ns: int) -> Iterator[int]:
        """The grid's deadlines up to one, ns, the latest first.

        They are T_max, T_star, T_min, and those times that are multiples of the spacing which the
        frontier's slope just below them demands.
        """
        frontier = self._frontier
        always_on_grid_ns = {frontier.min_energy_time_ns, frontier.slowest_time_ns}
        latest_ns = min(latest_ns, frontier.slowest_time_ns)
        for begin_ns, end_ns, slope_10uw in frontier.intervals_below(latest_ns):
            highest_ns = end_ns
            if end_ns in always_on_grid_ns:
                yield end_ns
                highest_ns -= 1  # not twice
            spacing_ns = self.spacing_ns(slope_10uw)
            lowest_ns = max(begin_ns, frontier.min_time_ns)
            yield from range(highest_ns - highest_ns % spacing_ns, lowest_ns, -spacing_ns)
        yield frontier.min_time_ns

    def first_after(self, deadline_ns: int) -> int:
        """The grid's first deadline after one of its own, ns; itself if it is the last."""
        reach_ns = self.spacing_ns(self._frontier.slope_10uw(deadline_ns))
        while deadline_ns < self._frontier.slowest_time_ns:
            following_ns = deadline_ns
            for later_ns in self.descending_from(deadline_ns + reach_ns):
                if later_ns <= deadline_ns:
                    break
                following_ns = later_ns
            if following_ns > deadline_ns:
                return following_ns
            reach_ns *= 2
        return deadline_ns

    def number_of(self, deadline_ns: int) -> int:
        """The number of a deadline among those with its spacing."""
        return deadline_ns // self.spacing_ns(self._frontier.slope_10uw(deadline_ns))

    def spacing_ns(self, slope_10uw: int) -> int:
        """How far deadlines lie apart where the frontier has a slope, ns.

        The slope is what a ns more saves: up to T_star more than all GPUs draw while they wait, and
        beyond T_star no more than that.
        """
        frontier, waiting_10uw = self._frontier, self._frontier.total_power_10uw
        t_star_ns = frontier.min_energy_time_ns
        is_beyond_t_star = slope_10uw <= waiting_10uw
        if is_beyond_t_star:
            span_ns = frontier.slowest_time_ns - t_star_ns
            return self._even_spacing_ns(span_ns, slope_10uw, _MAX_DEADLINES_BEYOND)
        if self._has_few_times:
            return self._time_unit_ns
        span_ns = t_star_ns - frontier.min_time_ns
        return self._even_spacing_ns(span_ns, slope_10uw - waiting_10uw, _MAX_DEADLINES)

    def _even_spacing_ns(self, span_ns: int, price_10uw: int, max_deadlines: int) -> int:
        """A power of two with steps of energy as wished, and neither too many nor too few of them.

        Args:
            span_ns: of all deadlines.
            price_10uw: how fast the energy changes with time.
            max_deadlines: about so many at most.
        """
        if self._given_step_share is not None:
            return _power_of_two_up_to(self._step_10fj // max(1, price_10uw))
        wanted_ns = min(self._step_10fj // max(1, price_10uw), span_ns // self._min_deadlines)
        least_ns = span_ns // max(max_deadlines, self._min_deadlines)
        return _power_of_two_up_to(max(least_ns, wanted_ns))

    @cached_property
    def _min_deadlines(self) -> int:
        if self._given_step_share is not None:
            return 1
        quickly_made = _DEADLINES_X_OPERATIONS // len(self._frontier.pipeline.operations)
        return max(_MIN_DEADLINES, min(_MIN_DEADLINES_IF_TINY, quickly_made))

    @cached_property
    def _step_10fj(self) -> int:
        """By how much the relaxed energy changes from one deadline to the next, 10 fJ."""
        frontier = self._frontier
        energy_10fj = frontier.lower_bound_10fj(frontier.min_energy_time_ns)
        share = self._given_step_share
        if share is None:
            share = self._wanted_step_share
        return max(1, int(share * energy_10fj))

    @cached_property
    def _wanted_step_share(self) -> float:
        """From one deadline to the next, as a part of the energy, as fine as rounding is coarse."""
        return max(_MIN_STEP_SHARE, _STEP_SHARE_OF_GAP * self._rounding_gap())

    def _rounding_gap(self) -> float:
        """The mean loss of rounding alone at T_min and T_star, as a part of the energy."""
        sample, pipeline = self._frontier, self._frontier.pipeline
        has_plain_rounds = pipeline.num_chunks == 1 and pipeline.schedule != "dag"
        if has_plain_rounds and pipeline.num_microbatches > _SAMPLE_MICROBATCHES:
            short = pipeline.with_microbatches(_SAMPLE_MICROBATCHES)
            sample = sample.retraced(short, sample.profile)
        gap = 0.0
        for deadline_ns in (sample.min_time_ns, sample.min_energy_time_ns):
            choice = relaxed_rounding(sample, deadline_ns).choice
            energy_10fj = sample.problem.replay(choice).energy_10fj
            gap += (energy_10fj / max(1, sample.lower_bound_10fj(deadline_ns)) - 1) / 2
        return gap

    @cached_property
    def _has_few_times(self) -> bool:
        """Whether plans can end at few times only up to T_star."""
        frontier = self._frontier
        span_ns = frontier.min_energy_time_ns - frontier.min_time_ns
        return span_ns <= _FEW_TIMES * self._time_unit_ns

    @cached_property
    def _time_unit_ns(self) -> int:
        """The greatest common divisor of all times and lags, and so of makespans, ns.

        Makespans with stalls are others.
        """
        pipeline, profile = self._frontier.pipeline, self._frontier.profile
        times_ns = [table.time_ns for table in profile.tables()]
        return int(np.gcd.reduce(np.concatenate([pipeline.succ_lag_ns, *times_ns])))


def _power_of_two_up_to(number: int) -> int:
    """The greatest power of two that is not above a number; 1 where there is none."""
    return 1 << max(0, number.bit_length() - 1)


class SearchGrid:
    """Deadlines for the local search, closer where the frontier is steep.

    Args:
        frontier: whose deadlines.
        is_slow: whether searches take long, so that half as many deadlines are to do up to T_star.

    Attributes:
        deadlines_ns: strictly ascending from T_min to T_max, T_star among them.
    """

    def __init__(self, frontier: Relaxation, *, is_slow: bool = False) -> None:
        t_min_ns, t_star_ns = frontier.min_time_ns, frontier.min_energy_time_ns
        full_searches = _FULL_SEARCHES_IF_SLOW if is_slow else _FULL_SEARCHES
        num_fast = full_searches * _DEADLINES_PER_FULL_SEARCH
        num_slow = _FULL_SEARCHES_BEYOND * _DEADLINES_PER_FULL_SEARCH
        deadlines_ns: set[int] = set()  # of a short span, several are the same
        for k in range(num_fast):
            after_t_min_ns = round((t_star_ns - t_min_ns) * (k / num_fast) ** _BEND)
            deadlines_ns.add(t_min_ns + after_t_min_ns)
        for k in range(num_slow + 1):
            after_t_star_ns = (frontier.slowest_time_ns - t_star_ns) * k // num_slow
            deadlines_ns.add(t_star_ns + after_t_star_ns)
        self.deadlines_ns = sorted(deadlines_ns)

    def descending_from(self, latest_ns: int) -> Iterator[int]:
        """The grid's deadlines up to one, ns, the latest first."""
        return (deadline for deadline in reversed(self.deadlines_ns) if deadline <= latest_ns)

    def first_from(self, earliest_ns: int) -> int | None:
        """The earliest deadline that is not before a time, ns; None where all are."""
        index = bisect_left(self.deadlines_ns, earliest_ns)
        return self.deadlines_ns[index] if index < len(self.deadlines_ns) else None

    def start_of(self, deadline_ns: int) -> int | None:
        """The deadline from whose candidate a shorter search starts, ns; None: a full search."""
        index = bisect_right(self.deadlines_ns, deadline_ns) - 1
        if index % _DEADLINES_PER_FULL_SEARCH == 0:
            return None
        return self.deadlines_ns[index - index % _DEADLINES_PER_FULL_SEARCH]
