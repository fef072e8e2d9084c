"""Lower bounds of late and held clocks on one frontier, whose prices are looked for once each.

Prices that are good for one deadline are valid for all, and near it they are nearly as good. So the
bound that a plan states also tells a search which deadlines cannot be the best any more.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from envplan.frontier import Relaxation
from envplan.plan.build import rounding_allowance_10fj
from envplan.plan.late_clock_prices import LateClockPrices
from envplan.replay import Replay
from envplan.solve.late_bound import (
    RELAXED_BOUND,
    ClockLimits,
    FlowPrices,
    PricedBound,
    StatedBound,
    late_clock_bound_10fj,
)
from envplan.solve.raised_prices import raised_prices

#: A bound that is higher than the relaxed one by less than this part of it is as good as that one.
_TOLERANCE: Final = 2e-6
#: Deadlines that differ by less than one part in so many need no relaxed prices of their own: those
#: that were looked for give the higher bound.
_NEAR_PART: Final = 50


class _Raised(NamedTuple):
    """Prices that were looked for, and the bound that they give."""

    prices: LateClockPrices
    bound: PricedBound


class LateClockBounds:
    """Lower bounds of plans whose clocks come late or are held.

    Clocks that change within an operation are known to the relaxed bound alone.

    Args:
        relaxation: of the pipeline.
        clocks: how late they come and how long they are held.
        effort: share of the usual trials of prices, at most 1.

    Attributes:
        clocks: how late they come and how long they are held.
    """

    def __init__(self, relaxation: Relaxation, clocks: ClockLimits, effort: float = 1.0) -> None:
        self._relaxation = relaxation
        self.clocks = clocks
        self._effort = effort
        has_parts = relaxation.profile.adjustments.by_parts is not None
        self._are_known = clocks.are_any and not has_parts
        self._raised: dict[int, _Raised | None] = {}
        self._at_relaxed_prices: dict[int, int] = {}

    def lower_bound_10fj(self, deadline_ns: int) -> int:
        """The highest bound known for a deadline not below T_min, one GPU a stage, 10 fJ.

        Prices are looked for if there are none yet.
        """
        relaxed_10fj = self._relaxation.lower_bound_10fj(deadline_ns)
        if not self._are_known:
            return relaxed_10fj
        if not self._raised:
            late_10fj = self._at_relaxed_prices_10fj(deadline_ns)
            if not _is_higher(late_10fj, relaxed_10fj):
                return max(relaxed_10fj, late_10fj)
            self._raised_at(deadline_ns)
        bounds_10fj = [relaxed_10fj]
        is_near = False
        for raised_ns, raised in self._raised.items():
            if raised is not None:
                bounds_10fj.append(raised.bound.energy_10fj(deadline_ns))
                is_near |= abs(deadline_ns - raised_ns) <= deadline_ns // _NEAR_PART
        if not is_near:
            bounds_10fj.append(self._at_relaxed_prices_10fj(deadline_ns))
        return max(bounds_10fj)

    def stated(self, replay: Replay, deadline_ns: int) -> StatedBound:
        """The bound that a plan states, whatever was asked before.

        Args:
            replay: of the plan.
            deadline_ns: that the plan is for.
        """
        if not self._are_known:
            return RELAXED_BOUND
        deadline_ns = max(self._relaxation.min_time_ns, deadline_ns)
        late_10fj = self._at_relaxed_prices_10fj(deadline_ns)
        relaxed_10fj = self._relaxation.lower_bound_10fj(deadline_ns) - rounding_allowance_10fj(
            replay
        )
        if not _is_higher(late_10fj, relaxed_10fj):
            return RELAXED_BOUND
        raised = self._raised_at(deadline_ns)
        if raised is not None:
            raised_10fj = raised.bound.energy_10fj(deadline_ns)
            if raised_10fj > late_10fj:
                return StatedBound("late-clocks", raised_10fj, raised.prices)
        return StatedBound("late-clocks", late_10fj)

    def _at_relaxed_prices_10fj(self, deadline_ns: int) -> int:
        """The bound that the relaxed optimum's prices give, each computed once, 10 fJ."""
        known = self._at_relaxed_prices
        if deadline_ns not in known:
            known[deadline_ns] = late_clock_bound_10fj(self._relaxation, deadline_ns, self.clocks)
        return known[deadline_ns]

    def _raised_at(self, deadline_ns: int) -> _Raised | None:
        """The best prices found for a deadline not below T_min, ns; None: none were found."""
        if deadline_ns not in self._raised:
            relaxation, clocks = self._relaxation, self.clocks
            prices = raised_prices(relaxation, deadline_ns, clocks, self._effort)
            raised = None
            if prices is not None:
                flow = FlowPrices.of_arcs(
                    relaxation.pipeline, prices.arcs_10uw(relaxation.pipeline)
                )
                raised = _Raised(prices, PricedBound.of_prices(relaxation, flow, clocks))
            self._raised[deadline_ns] = raised
        return self._raised[deadline_ns]


def _is_higher(late_10fj: int, relaxed_10fj: int) -> bool:
    """Whether a bound is higher than the relaxed one by more than counts."""
    return late_10fj > relaxed_10fj + _TOLERANCE * abs(relaxed_10fj)
