"""A part of a long pipeline's frontier, from a short pipeline's trace.

The theorem is in `periodic.py`: while the short pipeline's optimum repeats at one split, each of
its breakpoints is one of the long pipeline's, later by a period for each round that was put in, and
of the same slope.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Protocol

import numpy as np

from envplan._kernel import Breakpoints, Optimum
from envplan.frontier.periodic import PeriodicInterval, PipelineSplit

if TYPE_CHECKING:
    from envplan._kernel import FrontierTrace, ParametricFlow


class Solve(Protocol):
    """Solves the long pipeline from an optimum of the short one.

    The split is where rounds are put in; None: where that optimum repeats best. The point asked for
    is that of a flow value, 10 uW, or of a time, ns.
    """

    def __call__(
        self,
        optimum: Optimum,
        split: PipelineSplit | None = None,
        *,
        flow_10uw: int | None = None,
        time_ns: int | None = None,
    ) -> ParametricFlow:
        """The solver of the long pipeline, which stands at that point."""


class ExtendedTrace:
    """A part of a long pipeline's frontier, with what a `FrontierTrace` tells of its own.

    Args:
        short: the trace of the short pipeline.
        interval: of it, in which it repeats.
        num_inserted_rounds: rounds that the long pipeline has more.
        solve: solves the long pipeline from optima of the short one.

    Attributes:
        start_time: the latest time, ns.
    """

    def __init__(
        self,
        short: FrontierTrace,
        interval: PeriodicInterval,
        num_inserted_rounds: int,
        solve: Solve,
    ) -> None:
        short_times_ns, slopes_10uw, _ = short.breakpoints()
        first = interval.first_breakpoint
        indices = slice(first, first + len(interval.periods_ns))
        self._short = short
        self._solve = solve
        self._short_times_ns = short_times_ns[indices]
        self._slopes_10uw = slopes_10uw[indices]
        self._times_ns = self._short_times_ns + num_inserted_rounds * interval.periods_ns
        self.start_time = int(self._times_ns[0])
        self._costs_10fj = self._integrated_costs_10fj(interval.split)

    def breakpoints(self) -> Breakpoints:
        """The breakpoints as of a FrontierTrace."""
        return Breakpoints(self._times_ns, self._slopes_10uw, self._costs_10fj)

    def optimum_at(self, time_ns: int) -> Optimum:
        """The optimum at a time as of a FrontierTrace."""
        k = max(1, int(np.searchsorted(-self._times_ns, -time_ns)))  # first not after time_ns
        later_ns, earlier_ns = self._times_ns[k - 1 : k + 1].tolist()
        short_later_ns, short_earlier_ns = self._short_times_ns[k - 1 : k + 1].tolist()
        short_past_ns = (
            (time_ns - earlier_ns)
            * (short_later_ns - short_earlier_ns)
            // max(1, later_ns - earlier_ns)
        )
        optimum = self._short_optimum(short_earlier_ns + short_past_ns)
        return self._solve(optimum, time_ns=time_ns).optimum()

    def solver_near_end(self) -> ParametricFlow:
        """A solver of the long pipeline that stands a little before this ends."""
        last_slope_10uw = int(self._slopes_10uw[-2])
        return self._solve(self._short_optimum(self._short_times_ns[-1]), flow_10uw=last_slope_10uw)

    def _integrated_costs_10fj(self, split: PipelineSplit) -> list[int]:
        """Cost at each breakpoint: that of one point, and what slopes save from there on."""
        slopes_10uw = self._slopes_10uw.tolist()
        solver = self._solve(
            self._short_optimum(self._short_times_ns[0]), split, flow_10uw=slopes_10uw[0]
        )
        assert self._times_ns[1] <= solver.time <= self.start_time
        first_cost_10fj = solver.cost - slopes_10uw[0] * (self.start_time - solver.time)
        drops_ns = (-np.diff(self._times_ns)).tolist()
        saved_10fj = [
            slope_10uw * drop_ns for slope_10uw, drop_ns in zip(slopes_10uw, drops_ns, strict=False)
        ]
        return list(accumulate(saved_10fj, initial=first_cost_10fj))

    def _short_optimum(self, short_time_ns: int) -> Optimum:
        return self._short.optimum_at(int(short_time_ns))
