"""Alike instances replayed under steady loads: what they attain, and what they draw.

Their requests decode where their prompts ran, or at other alike instances (split_fleet.py).

Requests of each class come as a Poisson process and have the class's mean lengths. A router spreads
them over the instances, as in the replay of traces (csrc/serving/replay.hpp), which this is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Self

import numpy as np

from envplan.serving.classes import FloatArray, RequestClasses, Slo
from envplan.serving.fleet import Fleet, PoolSpec
from envplan.serving.fleet_controller import FleetController, RequestCounts, TimeCounts
from envplan.serving.instances import Instances
from envplan.serving.observed_trace import ObservedTrace
from envplan.serving.performance import Configuration
from envplan.serving.profile import ServingProfile
from envplan.serving.settings import Settings
from envplan.serving.split_fleet import SplitFleet, SplitFleetController
from envplan.serving.trace import SLOT_S, Trace

#: Parts of a replay after each of which it may end.
_PIECES: Final = 16


@dataclass(frozen=True, eq=False)
class SteadyReplay:
    """Results of a replay under a steady load.

    Attributes:
        counts: of requests, and of those that met their SLOs, by class; only classes of which any
            came.
        power_w: mean power of an instance that requests come to.
        first_token_times: of all requests.
        token_intervals: mean time between further tokens of each request.
        decode_power_w: mean power of an instance that only decodes; 0 where none does.
    """

    counts: Mapping[str, RequestCounts]
    power_w: float
    first_token_times: TimeCounts
    token_intervals: TimeCounts
    decode_power_w: float = 0.0

    @classmethod
    def idle(cls, profile: ServingProfile, load: SteadyLoad) -> Self:
        """The replay of a load of which nothing came."""
        idle_w = profile.performance[load.configuration].idle_w
        decode_idle_w = 0.0
        if load.decode is not None:
            decode_idle_w = profile.performance[load.decode.configuration].idle_w
        return cls({}, idle_w, TimeCounts.none(), TimeCounts.none(), decode_idle_w)

    @property
    def total_counts(self) -> RequestCounts:
        """The same of all classes together."""
        return RequestCounts.sum(self.counts.values())

    @property
    def attainment(self) -> float:
        """Share of all requests that met their SLOs; 1 where none came."""
        return self.total_counts.attainment


@dataclass(frozen=True, kw_only=True)
class SteadyLoad:
    """Alike instances, and the requests that come to them.

    Attributes:
        configuration: of each instance.
        num_instances: that share the requests.
        requests_s: requests per second by class, above 0.
        slo: that all of these must meet instead of their classes' own, as in a pool that promises
            more than some of them need; None: their own.
        decode: the instances at which these requests decode; None: where their prompts ran.
        link_bytes_s: of a GPU's network, over which contexts go to `decode`.
    """

    configuration: Configuration
    num_instances: int
    requests_s: Mapping[str, float]
    slo: Slo | None = None
    decode: Instances | None = None
    link_bytes_s: float = Settings.link_bytes_s

    @property
    def instances(self) -> Instances:
        """The instances that requests come to."""
        return Instances(self.configuration, self.num_instances)

    @property
    def total_requests_s(self) -> float:
        """Requests of all classes per second."""
        return sum(self.requests_s.values())

    def duration_for(self, num_requests: float) -> float:
        """How long it takes until so many requests have come, s, rounded up to whole minutes."""
        return SLOT_S * math.ceil(num_requests / self.total_requests_s / SLOT_S)


def replay_steadily(
    profile: ServingProfile, load: SteadyLoad, *, duration_s: float, seed: int
) -> SteadyReplay:
    """Replay a load from idle instances on.

    Args:
        profile: with the performance of the configuration, and the SLOs.
        load: what comes, and to whom.
        duration_s: whole minutes.
        seed: of the arrivals; the same arrivals, closer together, come to a higher load.
    """
    trace = _draw_trace(load, profile.classes, duration_s, seed)
    if not len(trace):
        return SteadyReplay.idle(profile, load)
    controller = _started_controller(profile, load, trace)
    controller.advance(duration_s)
    results = controller.finish()
    energy_j = controller.pool_energy_j()
    power_w = energy_j[0] / duration_s / load.num_instances
    decode_power_w = 0.0
    if load.decode is not None:
        decode_power_w = energy_j[1] / duration_s / load.decode.count
    counts = {}
    for index, name in enumerate(profile.classes):
        of_class = results.counts_of_class(index)
        if of_class.requests:
            counts[name] = of_class
    return SteadyReplay(
        counts=counts,
        power_w=power_w,
        first_token_times=results.first_token_times,
        token_intervals=results.token_intervals,
        decode_power_w=decode_power_w,
    )


def stays_within(
    profile: ServingProfile, load: SteadyLoad, late_share: float, *, duration_s: float, seed: int
) -> bool:
    """Whether no more than a share of a load's requests misses its SLOs, as replay_steadily shows.

    The replay ends as soon as too many have missed them.

    Args:
        profile: with the performance of the configuration, and the SLOs.
        load: what comes, and to whom.
        late_share: of its requests.
        duration_s: whole minutes.
        seed: of the arrivals.
    """
    trace = _draw_trace(load, profile.classes, duration_s, seed)
    if not len(trace):
        return True
    controller = _started_controller(profile, load, trace)
    allowed = late_share * len(trace)
    for piece in range(1, _PIECES + 1):
        controller.advance(duration_s * piece / _PIECES)
        counts = controller.counts_so_far()
        if counts.requests - counts.attained > allowed:
            return False
    counts = controller.finish_and_count()
    return counts.requests - counts.attained <= allowed


def _started_controller(
    profile: ServingProfile, load: SteadyLoad, trace: Trace
) -> FleetController | SplitFleetController:
    """The instances of a load, to which nothing has come yet."""
    observed = ObservedTrace(
        trace,
        _profile_of_load(profile, load),
        trace.class_index,
        link_bytes_s=load.link_bytes_s,
    )
    if load.decode is not None:
        fleet = SplitFleet(load.instances, load.decode)
        return SplitFleetController(observed, Settings(), fleet)
    controller = FleetController(observed, Settings())
    pool = PoolSpec(
        home_class=next(iter(load.requests_s)),
        serves=frozenset(load.requests_s),
        tp=load.configuration.tp,
        frequency_mhz=load.configuration.frequency_mhz,
        num_instances=load.num_instances,
    )
    controller.reconcile(Fleet({"pool": pool}), 0.0, prewarmed=True)
    return controller


def _draw_trace(load: SteadyLoad, classes: RequestClasses, duration_s: float, seed: int) -> Trace:
    """The requests that come."""
    arrival_s = _draw_arrivals(load.total_requests_s, duration_s, seed)
    names = list(load.requests_s)
    shares = np.array([load.requests_s[name] for name in names]) / load.total_requests_s
    numbers = np.array([classes.index(name) for name in names], dtype=np.uint8)
    drawn = np.zeros(len(arrival_s), dtype=np.int64)
    if len(names) > 1:
        random = np.random.default_rng((seed, 1))
        drawn = random.choice(len(names), size=len(arrival_s), p=shares)
    return Trace(
        name="steady load",
        arrival_s=arrival_s,
        input_tokens=None,
        output_tokens=None,
        class_index=numbers[drawn],
        covered_s=duration_s,
        classes=classes,
    )


def _draw_arrivals(requests_s: float, duration_s: float, seed: int) -> FloatArray:
    """Times of a Poisson process, s."""
    random = np.random.default_rng((seed, 0))
    expected = requests_s * duration_s
    # More than ever come: eight standard deviations, and some for small numbers.
    num_gaps = math.ceil(expected + 8 * math.sqrt(expected) + 40)
    arrival_s: FloatArray = np.cumsum(random.exponential(size=num_gaps)) / requests_s
    return arrival_s[arrival_s < duration_s]


def _profile_of_load(profile: ServingProfile, load: SteadyLoad) -> ServingProfile:
    """What the replay needs of a profile: instances of one size, and the SLOs of the load."""
    tps = {load.configuration.tp}
    if load.decode is not None:
        tps.add(load.decode.configuration.tp)
    performance = {
        configuration: instance
        for configuration, instance in profile.performance.items()
        if configuration.tp in tps
    }
    of_size = replace(profile, performance=performance)
    if load.slo is None:
        return of_size
    return of_size.with_slos(dict.fromkeys(load.requests_s, load.slo))
