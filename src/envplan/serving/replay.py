"""Traces replayed under policies, request by request, with fleets that change as policies decide.

Between epochs it is checked every minute whether the last ten minutes need more than there is. So a
fleet grows within a minute and shrinks only with an epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from envplan.errors import InputError, NoAnswerError
from envplan.serving.classes import FloatArray
from envplan.serving.fleet import Fleet, PoolSpec
from envplan.serving.fleet_controller import EngineResults, FleetController
from envplan.serving.forecast import (
    YOUNG_S,
    DemandForecast,
    ScaledWindow,
    expected_windows,
    first_windows,
    recent_window,
)
from envplan.serving.observed_trace import ObservedTrace, observe_trace, past_end_s
from envplan.serving.policies import NEVER_RESHARD, POLICIES, RESHARD_POWER_RATIO, Situation
from envplan.serving.profile import ServingProfile
from envplan.serving.replayed_sizing import right_sized
from envplan.serving.settings import DISAGGREGATED, SPLIT_FLEETS, Settings
from envplan.serving.simulation import Simulation, TimeQuantiles, TimeSeries
from envplan.serving.split_fleet import SplitFleet, SplitFleetController
from envplan.serving.split_planner import SplitPlanner
from envplan.serving.trace import SLOT_S, Trace


def simulate(
    profile: ServingProfile, trace: Trace, policy: str = "envplan", settings: Settings | None = None
) -> Simulation:
    """Replay a trace under a policy.

    Args:
        profile: with the SLOs to be met.
        trace: what arrives when.
        policy: one of POLICIES or SPLIT_FLEETS.
        settings: default: Settings().

    Raises:
        InputError: no such policy.
        NoAnswerError: a class cannot be served at all, or the policy's fleet is too large.
    """
    return compare_policies(profile, trace, settings, policies=(policy,))[0]


def compare_policies(
    profile: ServingProfile,
    trace: Trace,
    settings: Settings | None = None,
    *,
    policies: Sequence[str] = tuple(POLICIES),
    progress: Callable[[int, int], None] = lambda done, count: None,
    on_omission: Callable[[str], None] | None = None,
) -> list[Simulation]:
    """Replay a trace under several policies; raises as simulate.

    Args:
        profile: with the SLOs to be met.
        trace: what arrives when.
        settings: default: Settings().
        policies: their names.
        progress: told how many are done, of how many.
        on_omission: told of each policy whose fleet is too large, which is left out then; without
            it, or where none is left, NoAnswerError is raised.
    """
    settings = settings or Settings()
    observed = observe_trace(profile, trace, settings)
    simulations: list[Simulation] = []
    for number, name in enumerate(policies, start=1):
        try:
            simulations.append(replay_policy(name, observed, settings))
        except NoAnswerError as error:
            none_is_left = number == len(policies) and not simulations
            if on_omission is None or none_is_left:
                raise
            on_omission(f"{error}; it is left out")
        progress(number, len(policies))
    return simulations


def replay_policy(policy_name: str, observed: ObservedTrace, settings: Settings) -> Simulation:
    """Replay an observed trace minute by minute; let the policy change the fleet.

    Raises:
        InputError: there is no such policy, or no request comes in or after the past.
        NoAnswerError: the policy's fleet is too large.
    """
    past_s = past_end_s(settings)
    if policy_name not in POLICIES and policy_name not in SPLIT_FLEETS:
        names = ", ".join([*POLICIES, *SPLIT_FLEETS])
        raise InputError(f"there is no policy {policy_name!r}; there are: {names}")
    _require_requests(observed, past_s)
    replayed = observed.from_time(past_s) if past_s else observed
    if policy_name in SPLIT_FLEETS:
        return _replay_split(policy_name, observed, replayed, settings)
    controller = FleetController(replayed, settings)
    forecast = DemandForecast(observed, settings, first_windows(observed, past_s))
    fleet = _plan_fleet(policy_name, Situation(forecast, is_first=True))
    controller.reconcile(fleet, 0.0, prewarmed=True)
    scaler = _Autoscaler(policy_name, observed, settings)
    scaling_begin_s = past_s if past_s else YOUNG_S
    slot_gpus: list[int] = []
    gpus_wanted = fleet.gpus_wanted
    for slot in range(observed.trace.num_slots):
        now_s = slot * SLOT_S
        if POLICIES[policy_name].autoscales and now_s >= scaling_begin_s:
            wanted = scaler.scale(fleet, slot)
            if wanted != fleet:
                fleet = wanted
                gpus_wanted = max(gpus_wanted, fleet.gpus_wanted)
                controller.reconcile(fleet, now_s)
        if controller.lacks_instances:
            controller.reconcile(fleet, now_s)
        controller.advance(now_s + SLOT_S)
        slot_gpus.append(controller.gpus_in_use())
    result = _result(policy_name, controller, slot_gpus, first_slot=round(past_s / SLOT_S))
    return replace(result, gpus_wanted=gpus_wanted)


def replay_fixed(
    name: str, fleet: Fleet | SplitFleet, observed: ObservedTrace, settings: Settings
) -> Simulation:
    """Replay an observed trace on a fleet that never changes.

    Args:
        name: of the fleet, in place of a policy's.
        fleet: of however many GPUs.
        observed: the trace.
        settings: of the simulation; the past is not replayed.

    Raises:
        InputError: no request comes after the past.
    """
    past_s = past_end_s(settings)
    _require_requests(observed, past_s)
    replayed = observed.from_time(past_s) if past_s else observed
    controller = _controller_of(fleet, replayed, settings)
    controller.advance(observed.trace.duration_s)
    slot_gpus = [fleet.gpus] * observed.trace.num_slots
    return _result(name, controller, slot_gpus, first_slot=round(past_s / SLOT_S))


def _controller_of(
    fleet: Fleet | SplitFleet, observed: ObservedTrace, settings: Settings
) -> FleetController | SplitFleetController:
    """The replay of a trace on a fleet that is there from the beginning."""
    if isinstance(fleet, SplitFleet):
        return SplitFleetController(observed, settings, fleet)
    controller = FleetController(observed, settings)
    controller.reconcile(fleet, 0.0, prewarmed=True)
    return controller


def _replay_split(
    policy_name: str, observed: ObservedTrace, replayed: ObservedTrace, settings: Settings
) -> Simulation:
    """Replay the best fleet that never changes, of instances that do both phases or one of them."""
    past_s = past_end_s(settings)
    sized_for = observed
    if past_s:
        sized_for = observed.window(0.0, past_s)
    planner = SplitPlanner(sized_for, settings)
    fleet = planner.apart() if policy_name == DISAGGREGATED else planner.together()
    controller = SplitFleetController(replayed, settings, fleet)
    slot_gpus = [fleet.gpus] * observed.trace.num_slots
    simulation = _result(policy_name, controller, slot_gpus, first_slot=round(past_s / SLOT_S))
    return replace(simulation, fleet=str(fleet))


def _require_requests(observed: ObservedTrace, past_s: float) -> None:
    """Refuse a trace without a request in the past, if there is one, or after it."""
    duration_s = observed.trace.duration_s
    if past_s and not observed.num_requests(0.0, past_s):
        raise InputError(f"no request comes in a past of {past_s:g} s of {duration_s:g} s")
    if not observed.num_requests(past_s, duration_s):
        raise InputError(f"no request comes after a past of {past_s:g} s of {duration_s:g} s")


def _plan_fleet(policy_name: str, situation: Situation) -> Fleet:
    """The fleet that a policy wants, or what does best on the GPUs there are.

    Raises:
        NoAnswerError: not even one instance of each of its pools fits on them.
    """
    fleet = POLICIES[policy_name].plan(situation)
    max_gpus = situation.forecast.settings.max_gpus
    if fleet.gpus > max_gpus:
        raise NoAnswerError(
            f"{policy_name} needs {fleet.gpus} GPUs, {fleet.gpus - max_gpus} more than the "
            f"{max_gpus} there are (--gpus)"
        )
    return fleet


@dataclass(frozen=True)
class _Autoscaler:
    """Resizes a fleet at each epoch; between epochs only grows it.

    Attributes:
        policy_name: one of POLICIES.
        observed: the trace, of which only what arrived until now counts.
        settings: of the simulation.
    """

    policy_name: str
    observed: ObservedTrace
    settings: Settings

    def scale(self, present: Fleet, slot: int) -> Fleet:
        """The fleet from a slot on; the present one where it suffices, or where nothing comes."""
        now_s = slot * SLOT_S
        is_epoch = slot % self._epoch_slots == 0
        recent = recent_window(now_s)
        is_unusual = self._falls_short(present, recent)
        if not (is_epoch or is_unusual):
            return present
        horizon_s = self.settings.epoch_s + self.settings.startup_s + SLOT_S
        windows = expected_windows(self.observed, now_s, horizon_s)
        if is_unusual:
            windows.append(recent)
        forecast = self._forecast(windows)
        if not forecast.classes:
            return present
        reshard_ratio = RESHARD_POWER_RATIO if is_epoch else NEVER_RESHARD
        try:
            wanted = _plan_fleet(self.policy_name, Situation(forecast, present, reshard_ratio))
        except NoAnswerError:  # there are too few GPUs for its pools: the fleet stays as it is
            return present
        return wanted if is_epoch else _without_shrinking(wanted, present)

    @property
    def _epoch_slots(self) -> int:
        return max(1, round(self.settings.epoch_s / SLOT_S))

    def _forecast(self, windows: Sequence[ScaledWindow]) -> DemandForecast:
        return DemandForecast(self.observed, self.settings, windows)

    def _falls_short(self, present: Fleet, recent: ScaledWindow) -> bool:
        """Whether some pool has fewer instances than what it serves needed of late."""
        forecast = self._forecast([recent])
        unserved = set(forecast.classes) - present.routes.keys()
        if unserved:
            return True
        return any(_is_too_small(pool, forecast) for pool in present.pools.values())


def _is_too_small(pool: PoolSpec, forecast: DemandForecast) -> bool:
    served = pool.serves.intersection(forecast.classes)
    if not served:
        return False
    if forecast.demand(served, pool.tp).instances <= pool.num_instances:
        return False
    estimate = forecast.instances_needed(served, pool.tp)
    return right_sized(forecast, replace(pool, num_instances=estimate)).num_instances > (
        pool.num_instances
    )


def _without_shrinking(wanted: Fleet, present: Fleet) -> Fleet:
    """The wanted fleet, but where a pool stays of a kind with no fewer instances than it has."""
    pools = dict(wanted.pools)
    for name, pool in wanted.pools.items():
        running = present.pools.get(name)
        if running is None:
            continue
        is_alike = (running.tp, running.frequency_mhz) == (pool.tp, pool.frequency_mhz)
        if is_alike and running.num_instances > pool.num_instances:
            pools[name] = replace(pool, num_instances=running.num_instances)
    return replace(wanted, pools=pools)


def _result(
    policy_name: str,
    controller: FleetController | SplitFleetController,
    slot_gpus: Sequence[int],
    *,
    first_slot: int,
) -> Simulation:
    """Results once the trace is over.

    Args:
        policy_name: for people.
        controller: which has replayed the trace up to its end.
        slot_gpus: GPUs in use at the end of each slot.
        first_slot: where the series begins; the replay has no request before.
    """
    results = controller.finish()
    observed = controller.observed
    series = _time_series(observed, results, slot_gpus, first_slot)
    total = results.total_counts
    return Simulation(
        policy=policy_name,
        energy_j=float(series.power_w.sum()) * SLOT_S,
        requests=total.requests,
        slo_attainment=total.attained / total.requests,
        slo_attainment_by_class=_attainment_by_class(results, observed.profile.classes),
        first_tokens_in_time=total.first_in_time / total.requests,
        further_tokens_in_time=total.further_in_time / total.requests,
        instances_started=controller.started,
        instances_resharded=controller.resharded,
        weights_moved_copies=controller.copies_moved,
        clock_changes=results.clock_changes,
        requests_helped=results.helped,
        requests_squashed=results.squashed,
        requests_hopeless=observed.hopeless_requests,
        requests_too_long=results.too_long,
        requests_unservable=results.unservable,
        preemptions=results.preempted,
        series=series,
        ttft_s=TimeQuantiles.of(results.first_token_times),
        tbt_s=TimeQuantiles.of(results.token_intervals),
    )


def _attainment_by_class(results: EngineResults, classes: Iterable[str]) -> dict[str, float]:
    """Share of the requests of each class that met their SLOs; classes that came only."""
    attainment = {}
    for index, name in enumerate(classes):
        counts = results.counts_of_class(index)
        if counts.requests:
            attainment[name] = counts.attainment
    return attainment


def _time_series(
    observed: ObservedTrace, results: EngineResults, slot_gpus: Sequence[int], first_slot: int
) -> TimeSeries:
    """The series from the first slot on."""
    num_slots = len(slot_gpus)
    arrivals = observed.trace.counts
    class_tokens = np.array([request.tokens for request in observed.profile.classes.values()])

    def from_first(values: npt.ArrayLike) -> FloatArray:
        return np.array(values, dtype=np.float64)[first_slot:num_slots]

    return TimeSeries(
        time_s=from_first(SLOT_S * np.arange(num_slots)),
        power_w=from_first(results.slot_energy_j / SLOT_S),
        load_tokens_s=from_first(arrivals @ class_tokens / SLOT_S),
        gpus=from_first(slot_gpus),
        requests=from_first(arrivals.sum(axis=1)),
        attained=from_first(results.slot_attained),
    )
