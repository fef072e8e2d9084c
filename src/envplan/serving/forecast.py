"""Forecasts of demand: the most of what some windows of the past needed.

A policy that scales expects the most of these windows: the last hour, and the hours around this one
a day or a week ago, times how much the last hour differs from its counterpart then. In the first
two hours there is no past to judge from: the fleet stays as it was sized by the trace's peak or,
with a past, by the trace's first minutes, which are then not replayed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np

from envplan.serving.classes import RequestClasses
from envplan.serving.observed_trace import Demand, ObservedTrace
from envplan.serving.settings import Settings
from envplan.serving.steady_state import CurveKey
from envplan.serving.trace import SLOT_S

HOUR_S: Final = 3600.0
#: A trace this young has no past to judge from.
YOUNG_S: Final = 2 * HOUR_S
_SEASONS_S: Final = (24 * HOUR_S, 7 * 24 * HOUR_S)
_LAST_HOUR_FACTOR: Final = 1.125  # times the last hour
_RECENT_S: Final = 600.0
_RECENT_FACTOR: Final = 1.25  # times the last ten minutes, for what comes while instances start
_MAX_SEASONAL_GROWTH: Final = 3.0  # times another day's hours
_PEAK_MINUTES: Final = (60, 10)


class ScaledWindow(NamedTuple):
    """A window of the trace, and how many times its requests are expected."""

    begin_s: float
    end_s: float
    factor: float = 1.0


@dataclass(frozen=True, eq=False)
class DemandForecast:
    """Expected demand: the most of what several windows of a trace needed.

    Attributes:
        observed: the trace, as policies see it.
        settings: of the simulation.
        windows: whose likes are expected.
    """

    observed: ObservedTrace
    settings: Settings
    windows: Sequence[ScaledWindow]

    @property
    def all_classes(self) -> RequestClasses:
        """All classes, whether they come or not."""
        return self.observed.profile.classes

    def lowest_host(self, names: Iterable[str]) -> str:
        """The first class whose pool may serve all of these."""
        return self.all_classes.lowest_host(names)

    @cached_property
    def classes(self) -> list[str]:
        """The classes that come, in their order."""
        expected = set[str]()
        for window in self.windows:
            expected.update(self.observed.request_counts(window.begin_s, window.end_s))
        return [name for name in self.all_classes if name in expected]

    @cached_property
    def busiest_window(self) -> ScaledWindow:
        """The window with the highest rate."""
        return max(self.windows, key=lambda window: expected_rate(self.observed, window))

    def demand(self, classes: Iterable[str], tp: int) -> Demand:
        """The demand of these classes on one pool of instances of a TP, headroom included.

        Instances are the most of all windows. Their work is that of the busiest window whatever the
        classes and the TP are, so that the powers of different pools can be compared.
        """
        names = frozenset(classes)
        busiest = self._demand_of(self.busiest_window, names, tp)
        demands = [self._demand_of(window, names, tp) for window in self.windows]
        peak = max(demands, key=lambda demand: demand.instances)
        headroom = 1 + self.settings.headroom_percent / 100
        return Demand(
            instances=peak.instances * headroom,
            busy_instances=busiest.busy_instances,
            decoding_requests=busiest.decoding_requests,
            hopeless_share=peak.hopeless_share,
        )

    def _demand_of(self, window: ScaledWindow, classes: frozenset[str], tp: int) -> Demand:
        demand = self.observed.demand(
            window.begin_s, window.end_s, classes, tp, self.settings.max_late_share
        )
        return Demand(
            instances=window.factor * demand.instances,
            busy_instances=window.factor * demand.busy_instances,
            decoding_requests=window.factor * demand.decoding_requests,
            hopeless_share=demand.hopeless_share,
        )

    def instances_needed(self, classes: Iterable[str], tp: int) -> int:
        """Whole instances that these classes need, at least one."""
        return max(1, math.ceil(self.demand(classes, tp).instances))

    def feasible_tps(self, classes: Iterable[str]) -> list[int]:
        """TPs on which the SLOs of these classes can be met at all, ascending; at least one.

        Where there is none, the largest TP, which comes nearest.
        """
        names = list(classes)
        tps = [tp for tp in self.observed.tps if self._can_meet_all(names, tp)]
        return tps if tps else [max(self.observed.tps)]

    def _can_meet_all(self, names: Sequence[str], tp: int) -> bool:
        """Whether instances on so many GPUs meet the SLOs of these classes at some load."""
        profile = self.observed.profile
        for name in names:
            curve = profile.curves.get(CurveKey(name, tp, self.observed.max_clock_mhz(tp)))
            if curve is None or curve.capacity(profile.classes[name].slo) == 0:
                return False
        return True

    def responsive_tps(self, classes: Sequence[str], tps: Iterable[int]) -> list[int]:
        """The TPs among these on which hardly more requests are hopeless than on the best one."""
        hopeless_share = {tp: self.demand(classes, tp).hopeless_share for tp in tps}
        max_share = min(hopeless_share.values()) + self.settings.max_late_share
        return [tp for tp, share in hopeless_share.items() if share <= max_share]


def expected_rate(observed: ObservedTrace, window: ScaledWindow) -> float:
    """Requests per second that are expected by one window."""
    num_requests = observed.num_requests(window.begin_s, window.end_s)
    return window.factor * num_requests / (window.end_s - window.begin_s)


def first_windows(observed: ObservedTrace, past_s: float) -> list[ScaledWindow]:
    """The windows that the first fleet is sized by: the past or, with hindsight, the trace's peak.

    The peak is the trace or, where it is longer than two hours, those two of it with the most
    tokens: the busiest hour, and the hour around the busiest ten minutes.
    """
    duration_s = observed.trace.duration_s
    if past_s:
        return [ScaledWindow(0.0, past_s, _LAST_HOUR_FACTOR)]
    if duration_s <= YOUNG_S:
        return [ScaledWindow(0.0, duration_s)]
    class_tokens = [request.tokens for request in observed.profile.classes.values()]
    tokens_by_minute = observed.trace.counts @ class_tokens
    windows = []
    for minutes in _PEAK_MINUTES:
        moving_sums = np.convolve(tokens_by_minute, np.ones(minutes), mode="valid")
        busiest_minute = int(moving_sums.argmax())  # the first of so many
        middle_s = (busiest_minute + minutes / 2) * SLOT_S
        begin_s = min(max(0.0, middle_s - HOUR_S / 2), duration_s - HOUR_S)
        windows.append(ScaledWindow(begin_s, begin_s + HOUR_S))
    return windows


def expected_windows(observed: ObservedTrace, now_s: float, horizon_s: float) -> list[ScaledWindow]:
    """The windows whose likes are expected until `horizon_s` from now."""
    windows = [ScaledWindow(max(0.0, now_s - HOUR_S), now_s, _LAST_HOUR_FACTOR)]
    for season_s in _SEASONS_S:
        then_s = now_s - season_s
        if then_s - HOUR_S < 0:
            continue
        requests_now = observed.num_requests(now_s - HOUR_S, now_s)
        requests_then = observed.num_requests(then_s - HOUR_S, then_s)
        growth = requests_now / requests_then if requests_then else 1.0
        end_s = min(now_s, then_s + horizon_s)
        windows.append(ScaledWindow(then_s, end_s, min(_MAX_SEASONAL_GROWTH, growth)))
    return windows


def recent_window(now_s: float) -> ScaledWindow:
    """The last ten minutes, and a quarter more for what comes while instances start."""
    return ScaledWindow(max(0.0, now_s - _RECENT_S), now_s, _RECENT_FACTOR)
