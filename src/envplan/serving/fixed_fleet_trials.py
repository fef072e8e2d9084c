"""Trials of fleets that never change, on one trace: how many SLOs they miss, and their energy.

A replay of a long trace takes a minute. Two parts of it take seconds. Its busiest hours show which
fleets are too small, whatever comes in the other hours. Minutes that are spread over all of it tell
the energy, to half a percent, and about how many requests meet their SLOs. How many do in all, only
a replay of the whole trace shows.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, MutableMapping
from dataclasses import replace
from functools import cache, cached_property
from typing import Final

import numpy as np

from envplan.serving.classes import RequestClasses
from envplan.serving.fleet import Fleet
from envplan.serving.forecast import DemandForecast, first_windows
from envplan.serving.instances import Instances
from envplan.serving.observed_trace import ObservedTrace, past_end_s
from envplan.serving.performance import Configuration
from envplan.serving.replay import replay_fixed
from envplan.serving.replayed_sizing import missed_requests
from envplan.serving.settings import Settings
from envplan.serving.simulation import Simulation
from envplan.serving.trace import SLOT_S

#: A trace of more requests is long: it is replayed whole only where parts of it do not suffice.
_MOST_SEARCHED_REQUESTS: Final = 60_000
#: The spread minutes of a long trace have about so many requests at most.
_MOST_SAMPLED_REQUESTS: Final = 300_000
#: Share of requests by which the spread minutes may show too low an attainment. Too high it is
#: often by more, as no queue lasts for longer than a minute.
_ATTAINMENT_ERROR: Final = 0.02
#: Share by which energies that the same minutes show may be off, compared with each other.
ESTIMATE_ERROR: Final = 0.005


def single_pool(instances: Instances, classes: RequestClasses) -> Fleet:
    """The fleet of one pool, for all classes, that alike instances make."""
    return Fleet({"pool": instances.pool(classes)})


class FixedFleetTrials:
    """Fleets of alike instances on one trace.

    Args:
        observed: the trace.
        settings: of the simulation; the past is not replayed.
        replays: replays of the trace on such fleets, by the fleets' names; new ones are added.
    """

    def __init__(
        self, observed: ObservedTrace, settings: Settings, replays: MutableMapping[str, Simulation]
    ) -> None:
        self._observed = observed
        self._settings = settings
        self._replays = replays
        past_s = past_end_s(settings)
        self._replayed = observed.from_time(past_s) if past_s else observed
        self._missed = _MissedShares(lambda fleet: 1 - self.replay(fleet).slo_attainment)
        self._replay_minutes = cache(self._simulate_minutes)

    def replay(self, fleet: Instances) -> Simulation:
        """The whole trace on a fleet."""
        name = str(fleet)
        if name not in self._replays:
            pool = self._pool_of(fleet)
            self._replays[name] = replay_fixed(name, pool, self._observed, self._settings)
        return self._replays[name]

    def passes(self, fleet: Instances, attainment: float) -> bool:
        """Whether a fleet meets the SLOs of such a share of all requests."""
        return self._missed.are_within(fleet, 1 - attainment)

    def may_pass(self, fleet: Instances, attainment: float) -> bool:
        """Whether a fleet passes or, on a long trace, may pass.

        It cannot if it misses clearly too many SLOs in the spread minutes, or more in one of the
        busiest hours than it may miss in all.
        """
        if self._is_searched_whole:
            return self.passes(fleet, attainment)
        if self._replay_minutes(fleet).slo_attainment < attainment - _ATTAINMENT_ERROR:
            return False
        return all(missed.are_within(fleet, 1 - attainment) for missed in self._missed_in_hours)

    def is_likely_to_pass(self, fleet: Instances, attainment: float) -> bool:
        """Whether a fleet passes or, on a long trace, would by its spread minutes."""
        if self._is_searched_whole:
            return self.passes(fleet, attainment)
        return self._replay_minutes(fleet).slo_attainment >= attainment

    def energy_j(self, fleet: Instances) -> float:
        """Energy of a fleet on the trace or, on a long one, by its spread minutes, J."""
        if self._is_searched_whole:
            return self.replay(fleet).energy_j
        replayed_s = self._replayed.trace.duration_s - past_end_s(self._settings)
        sample = self._replay_minutes(fleet)
        return sample.energy_j * replayed_s / sample.duration_s

    def instances_needed(self, tp: int) -> int:
        """Instances on so many GPUs at their highest clock that the busiest hours need, about."""
        windows = first_windows(self._replayed, past_s=0.0)
        settings = replace(self._settings, headroom_percent=0.0)
        forecast = DemandForecast(self._replayed, settings, windows)
        return forecast.instances_needed(forecast.classes, tp)

    def _pool_of(self, fleet: Instances) -> Fleet:
        return single_pool(fleet, self._observed.profile.classes)

    @property
    def _is_searched_whole(self) -> bool:
        return len(self._replayed.trace) <= _MOST_SEARCHED_REQUESTS

    @cached_property
    def _missed_in_hours(self) -> list[_MissedShares]:
        """SLOs missed in each of the busiest hours, as a share of all requests of the trace."""
        hours = [
            self._replayed.window(window.begin_s, window.end_s)
            for window in first_windows(self._replayed, past_s=0.0)
        ]
        return [_MissedShares(self._missed_share_in(hour)) for hour in hours]

    def _missed_share_in(self, hour: ObservedTrace) -> Callable[[Instances], float]:
        num_requests = len(self._replayed.trace)

        def missed_share(fleet: Instances) -> float:
            return missed_requests(hour, self._settings, self._pool_of(fleet)) / num_requests

        return missed_share

    def _simulate_minutes(self, fleet: Instances) -> Simulation:
        settings = replace(self._settings, past_s=0.0)
        return replay_fixed(str(fleet), self._pool_of(fleet), self._spread_minutes, settings)

    @cached_property
    def _spread_minutes(self) -> ObservedTrace:
        """One in so many minutes of the replayed part of the trace, put one after another."""
        trace = self._replayed.trace
        first_slot = round(past_end_s(self._settings) / SLOT_S)
        slots = (trace.arrival_s / SLOT_S).astype(np.int64)
        every = math.ceil(len(trace) / _MOST_SAMPLED_REQUESTS)
        selection = np.flatnonzero((slots - first_slot) % every == 0)
        new_slots = (slots[selection] - first_slot) // every
        num_new_slots = math.ceil((trace.num_slots - first_slot) / every)
        return self._replayed.of_requests(
            selection,
            arrival_s=trace.arrival_s[selection] + (new_slots - slots[selection]) * SLOT_S,
            covered_s=SLOT_S * num_new_slots,
        )


class _MissedShares:
    """Shares of requests whose SLOs fleets miss, each found by one replay.

    Args:
        missed_share: replays a fleet, and says what share it misses.
    """

    def __init__(self, missed_share: Callable[[Instances], float]) -> None:
        self._missed_share = missed_share
        self._share_by_count: dict[Configuration, dict[int, float]] = defaultdict(dict)

    def are_within(self, fleet: Instances, allowed: float) -> bool:
        """Whether a fleet misses no larger share than is allowed.

        It is not replayed where more instances are known to miss too many.
        """
        share_by_count = self._share_by_count[fleet.configuration]
        for count, share in share_by_count.items():
            if count > fleet.count and share > allowed:
                return False
        if fleet.count not in share_by_count:
            share_by_count[fleet.count] = self._missed_share(fleet)
        return share_by_count[fleet.count] <= allowed
