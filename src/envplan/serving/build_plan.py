"""From what a planner decides to a serving plan: pools, their figures, the baseline."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import NamedTuple

from envplan.serving.classes import Slo
from envplan.serving.plan import (
    DECODE,
    PREFILL,
    Baseline,
    FleetFigures,
    Group,
    OneClockFleet,
    Pool,
    Predicted,
    ProfileReference,
    Role,
    Served,
    ServingPlan,
    attainment_by_class,
    long_run_by_class,
)
from envplan.serving.plan_replay import ClassReplay, PlanReplay
from envplan.serving.plan_request import PlanRequest
from envplan.serving.profile import ServingProfile
from envplan.serving.split_fleet_planning import HeldFleet
from envplan.serving.steady_state import LoadCurve


class InstanceGroup(NamedTuple):
    """Alike instances that a planner has decided on.

    Attributes:
        curve: their configuration.
        num_instances: at least one.
        load_tokens_s: of each.
    """

    curve: LoadCurve
    num_instances: int
    load_tokens_s: float


def build_pool(
    request_class: str,
    slo: Slo,
    served_tokens_s: Mapping[str, float],
    groups: Iterable[InstanceGroup],
    order: Iterable[str],
) -> Pool:
    """The pool of a class, with the power and the latencies of its instances.

    Args:
        request_class: whose configurations the pool runs.
        slo: the strictest of what it serves.
        served_tokens_s: load of each class that it serves, in that class's own tokens.
        groups: its instances.
        order: of all classes.
    """
    return Pool(
        request_class=request_class,
        slo=slo,
        serves=[
            Served(request_class=name, load_tokens_s=served_tokens_s[name])
            for name in order
            if name in served_tokens_s
        ],
        groups=[_build_group(group) for group in groups],
    )


def _build_group(group: InstanceGroup) -> Group:
    curve, load_tokens_s = group.curve, group.load_tokens_s
    latencies = curve.latencies_at(load_tokens_s)
    return Group(
        tp=curve.tp,
        frequency_mhz=curve.frequency_mhz,
        instances=group.num_instances,
        load_tokens_s=load_tokens_s,
        power_w=curve.power_at(load_tokens_s),
        ttft_s=latencies.ttft_s,
        tbt_s=latencies.tbt_s,
    )


def build_plan(
    planner: str,
    profile: ServingProfile,
    request: PlanRequest,
    pools: Sequence[Pool],
    power_lower_bound_w: float | None = None,
) -> ServingPlan:
    """The plan of pools that a planner has decided on, checked.

    Args:
        planner: its name.
        profile: that it was made from.
        request: what was asked for.
        pools: that serve it.
        power_lower_bound_w: no plan draws less; None where nothing was proved.
    """
    predicted = _predict(profile, request, pools, power_lower_bound_w)
    plan = _assemble(planner, profile, request, pools, predicted)
    plan.check(profile)
    return plan


def _assemble(
    planner: str,
    profile: ServingProfile,
    request: PlanRequest,
    pools: Sequence[Pool],
    predicted: Predicted,
) -> ServingPlan:
    return ServingPlan(
        schema="envplan/serving-plan/v1",
        planner=planner,
        profile=ProfileReference(
            name=profile.name, path=str(profile.path), sha256=profile.sha256, source=profile.source
        ),
        asked=request,
        predicted=predicted,
        pools=list(pools),
    )


def build_replayed_plan(
    planner: str,
    profile: ServingProfile,
    request: PlanRequest,
    fleets: Iterable[HeldFleet],
    *,
    curves: ServingProfile,
) -> ServingPlan:
    """The plan of fleets that hold, each of which is a pool, with what their replays showed.

    Args:
        planner: its name.
        profile: that it was made from.
        request: what was asked for.
        fleets: that serve it.
        curves: load curves that the fleet at maximum frequency beside it is by.
    """
    pools = []
    classes: dict[str, ClassReplay] = {}
    for held in fleets:
        pools.append(_pool_of(profile, request, held))
        classes |= held.replay.classes
    predicted = _predict(curves, request, pools)
    predicted = _with_classes(predicted, classes)
    return _assemble(planner, profile, request, pools, predicted)


def _pool_of(profile: ServingProfile, request: PlanRequest, held: HeldFleet) -> Pool:
    """The pool of a fleet: a group for each role, or one for both."""
    classes = [name for name in profile.classes if name in held.requests_s]
    home = profile.classes.lowest_host(classes)
    loads = request.loads_tokens_s
    carried_tokens_s = sum(
        loads[name] * profile.load_conversion_factor(name, home) for name in classes
    )
    groups = []
    roles: tuple[Role | None, ...] = (None,) if held.fleet.decode is None else (PREFILL, DECODE)
    for role, instances, replayed in zip(
        roles, held.fleet.by_role, held.replay.groups[0], strict=True
    ):
        groups.append(
            Group(
                tp=instances.configuration.tp,
                frequency_mhz=instances.configuration.frequency_mhz,
                instances=instances.count,
                load_tokens_s=carried_tokens_s / instances.count,
                role=role,
                **asdict(replayed),
            )
        )
    return Pool(
        request_class=home,
        slo=Slo.strictest(request.slos[name] for name in classes),
        serves=[Served(request_class=name, load_tokens_s=loads[name]) for name in classes],
        groups=groups,
    )


def with_both(
    plan: ServingPlan, together: ServingPlan | None, apart: ServingPlan | None
) -> ServingPlan:
    """The plan with what the best fleets take whose instances run both phases, or one of them."""
    update = {"together": _figures(together), "apart": _figures(apart)}
    return plan.model_copy(update={"predicted": plan.predicted.model_copy(update=update)})


def _figures(plan: ServingPlan | None) -> FleetFigures | None:
    return None if plan is None else FleetFigures(gpus=plan.gpus, power_w=plan.power)


def with_replay(plan: ServingPlan, replay: PlanReplay) -> ServingPlan:
    """The plan with what its replay showed in place of what its load curves say.

    Args:
        plan: as a planner made it.
        replay: of its pools.
    """
    pools = []
    for pool, replayed_groups in zip(plan.pools, replay.groups, strict=True):
        groups = []
        for group, replayed in zip(pool.groups, replayed_groups, strict=True):
            groups.append(group.model_copy(update=asdict(replayed)))
        pools.append(pool.model_copy(update={"groups": groups}))
    stated = plan.predicted
    predicted = _predicted_of(pools, stated.baseline, stated.power_lower_bound_w)
    predicted = _with_classes(predicted, replay.classes)
    return plan.model_copy(update={"pools": pools, "predicted": predicted})


def beside_all_clocks(
    plan: ServingPlan, curves: ServingProfile, power_bound_w: float
) -> ServingPlan:
    """A plan that was made from curves at one clock, beside what all clocks allow.

    Args:
        plan: of one clock.
        curves: at all clocks.
        power_bound_w: below which no plan by these lies; replaces the plan's bound, if it has one.
    """
    stated = plan.predicted
    bound_w = None if stated.power_lower_bound_w is None else power_bound_w
    predicted = _predict(curves, plan.request, plan.pools, bound_w)
    shown = {
        "attainment_by_class": stated.attainment_by_class,
        "long_run_by_class": stated.long_run_by_class,
    }
    return plan.model_copy(update={"predicted": predicted.model_copy(update=shown)})


def _with_classes(predicted: Predicted, classes: Mapping[str, ClassReplay]) -> Predicted:
    """The prediction with what a replay showed of each class."""
    shown = {
        "attainment_by_class": attainment_by_class(classes),
        "long_run_by_class": long_run_by_class(classes),
    }
    return predicted.model_copy(update=shown)


def one_clock_fleets(plans: Iterable[ServingPlan], profile: ServingProfile) -> list[OneClockFleet]:
    """The fleets of plans each of which has one clock.

    Args:
        plans: the plans.
        profile: with all clocks.
    """
    highest_mhz = max(configuration.frequency_mhz for configuration in profile.performance)
    fleets = []
    for plan in plans:
        clocks_mhz = {group.frequency_mhz for pool in plan.pools for group in pool.groups}
        (clock_mhz,) = clocks_mhz
        fleets.append(
            OneClockFleet(
                frequency_mhz=clock_mhz,
                gpus=plan.gpus,
                power_w=plan.power,
                is_highest=clock_mhz == highest_mhz,
            )
        )
    return fleets


def with_one_clock(plan: ServingPlan, fleets: list[OneClockFleet] | None) -> ServingPlan:
    """The plan with others for the same loads beside it, each of which has one clock."""
    predicted = plan.predicted.model_copy(update={"one_clock": fleets})
    return plan.model_copy(update={"predicted": predicted})


def _predict(
    profile: ServingProfile,
    request: PlanRequest,
    pools: Sequence[Pool],
    power_lower_bound_w: float | None = None,
) -> Predicted:
    baseline = _baseline(profile, request.loads_tokens_s)
    return _predicted_of(pools, baseline, power_lower_bound_w)


def _predicted_of(
    pools: Sequence[Pool], baseline: Baseline | None, power_lower_bound_w: float | None
) -> Predicted:
    """The figures of some pools, beside a baseline and a bound."""
    power_w = sum(pool.power_w for pool in pools)
    gap = savings_percent = None
    if power_lower_bound_w is not None:
        gap = max(0.0, power_w / power_lower_bound_w - 1) if power_lower_bound_w else 0.0
    if baseline is not None and baseline.power_w:
        savings_percent = 100 * (1 - power_w / baseline.power_w)
    return Predicted(
        gpus=sum(pool.gpus for pool in pools),
        power_w=power_w,
        power_lower_bound_w=power_lower_bound_w,
        gap=gap,
        baseline=baseline,
        savings_percent=savings_percent,
    )


def _baseline(profile: ServingProfile, loads_tokens_s: Mapping[str, float]) -> Baseline | None:
    """The fewest instances on the highest TP; None if a class cannot be served so."""
    gpus, power_w = 0, 0.0
    for name, load in loads_tokens_s.items():
        curves = profile.curves_of(name)
        if not curves:
            return None
        largest = curves[-1]  # the highest TP at its highest clock
        capacity = largest.capacity(profile.classes[name].slo)
        if capacity == 0:
            return None
        num_instances = -int(-load // capacity)  # rounded up
        gpus += num_instances * largest.tp
        power_w += num_instances * largest.power_at(load / num_instances)
    return Baseline(gpus=gpus, power_w=power_w)
