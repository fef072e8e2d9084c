"""A fleet for steady loads whose plan was replayed before it is stated.

Plans are made from load curves that replays of single instances show. Then every group of instances
of the plan is replayed with all that comes to it. Where that meets its SLOs too seldom, such
instances are given less load, and the fleet is planned again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final

from envplan.errors import InputError, NoAnswerError
from envplan.serving.build_plan import (
    beside_all_clocks,
    build_replayed_plan,
    one_clock_fleets,
    with_both,
    with_one_clock,
    with_replay,
)
from envplan.serving.exact_planner import TIME_LIMIT_S, exact_plan, power_bound_w
from envplan.serving.hierarchical_planner import hierarchical_plan
from envplan.serving.plan import Group, Pool, ServingPlan
from envplan.serving.plan_replay import PlanDraws, PlanReplay
from envplan.serving.plan_request import SLO_QUANTILE_PERCENT, PlanRequest
from envplan.serving.pool_sites import possible_promises
from envplan.serving.profile import ServingProfile
from envplan.serving.replayed_curves import replay_curves
from envplan.serving.settings import DISAGGREGATED, TOGETHER, Settings
from envplan.serving.split_fleet_planning import fleets_apart, shared_fleet
from envplan.serving.steady_state import CurveKey

PLANNERS: Final = ("exact", "hierarchical")

_MAX_ROUNDS: Final = 12
#: Share of its load that an instance keeps, once its group met its SLOs too seldom.
_KEPT_LOAD: Final = 0.97
#: A plan that draws so many times more than another fleet by its load curves does so when it is
#: replayed, too: replays differ from load curves by 1 or 2%.
_CURVE_MARGIN: Final = 1.05


@dataclass(frozen=True, kw_only=True)
class Planning:
    """How a fleet is planned.

    Attributes:
        planner: one of PLANNERS.
        merge: whether classes may be served by higher ones' pools.
        one_frequency: all instances of a pool with the same TP run at one clock; only the exact
            planner knows this.
        time_limit: s, for the solver of the exact planner, on a usual core.
        slo_quantile: percent of requests that must meet their SLOs.
        disaggregated: whether instances may run one phase only: the better of the best fleet with
            such instances and the best without is taken.
        kv_link_bytes_s: of a GPU's network, over which contexts go from prefill to decode.
    """

    planner: str = "exact"
    merge: bool = True
    one_frequency: bool = False
    time_limit: float = TIME_LIMIT_S
    slo_quantile: float = SLO_QUANTILE_PERCENT
    disaggregated: bool = False
    kv_link_bytes_s: float = Settings.link_bytes_s

    def plan(self, profile: ServingProfile, loads: Mapping[str, float], gpus: int) -> ServingPlan:
        """The plan that a profile's curves allow; raises as the planners do."""
        if self.planner == "hierarchical":
            return hierarchical_plan(profile, loads, gpus, merge=self.merge)
        return exact_plan(
            profile,
            loads,
            gpus,
            merge=self.merge,
            one_frequency=self.one_frequency,
            time_limit=self.time_limit,
        )


def plan_fleet(
    profile: ServingProfile,
    loads: Mapping[str, float],
    gpus: int,
    planning: Planning | None = None,
    progress: Callable[[int, int], None] = lambda done, count: None,
) -> ServingPlan:
    """The fleet of least power that keeps its SLOs when it is replayed.

    Args:
        profile: with the SLOs to be met.
        loads: tokens/s by class.
        gpus: at most.
        planning: default: Planning().
        progress: told how many load curves were replayed, of how many.

    Raises:
        InputError: no load, no GPU, or an unknown class or planner; or the profile does not say
            how large contexts are that go from instance to instance.
        NoAnswerError: the loads cannot be served; says which class and by how much.
    """
    planning = planning or Planning()
    if planning.planner not in PLANNERS:
        raise InputError(f"there is no planner {planning.planner!r}; take one of {PLANNERS}")
    request = PlanRequest.create(profile, loads, gpus, merge=planning.merge)
    if not planning.disaggregated:
        return _plan_together(profile, request, planning, progress)
    together = apart = None
    with suppress(NoAnswerError):
        apart = _plan_apart(profile, request, planning)
    try:
        together = _plan_together(profile, request, planning, progress)
    except NoAnswerError:
        if apart is None:
            raise
    plans = [plan for plan in (together, apart) if plan is not None]
    best = min(plans, key=lambda plan: plan.power)
    if together is not None:
        best = with_one_clock(best, together.predicted.one_clock)
    return with_both(best, together, apart)


def _plan_together(
    profile: ServingProfile,
    request: PlanRequest,
    planning: Planning,
    progress: Callable[[int, int], None],
) -> ServingPlan:
    """The fleet of least power that holds and whose instances run both phases."""
    max_late_share = 1 - planning.slo_quantile / 100
    replayed = replay_curves(profile, possible_promises(profile, request), max_late_share, progress)
    search = _FleetSearch(profile, request, planning)
    rivals = list(search.plans_at_one_clock(replayed))
    # Load curves are of single instances: what was planned to draw least may not draw least.
    least_w = min((plan.power for plan in rivals), default=math.inf)
    try:
        by_class = search.plan_that_holds(replayed, to_beat_w=least_w)
    except NoAnswerError:
        if not rivals:
            raise
        by_class = None
    plans = rivals if by_class is None else [by_class, *rivals]
    best = _asked_for(min(plans, key=lambda plan: plan.power), planning)
    return with_one_clock(best, one_clock_fleets(rivals, profile))


def _plan_apart(profile: ServingProfile, request: PlanRequest, planning: Planning) -> ServingPlan:
    """The fleet of least power that was found to hold and whose instances run one phase."""
    fleets = fleets_apart(
        profile,
        _requests_s(profile, request),
        request.gpus,
        slo_quantile=planning.slo_quantile,
        link_bytes_s=planning.kv_link_bytes_s,
        merge=planning.merge,
    )
    plan = build_replayed_plan(DISAGGREGATED, profile, request, fleets, curves=profile)
    return _asked_for(plan, planning)


def _requests_s(profile: ServingProfile, request: PlanRequest) -> dict[str, float]:
    """Requests per second of each class."""
    return {
        name: load_tokens_s / profile.classes[name].tokens
        for name, load_tokens_s in request.loads_tokens_s.items()
    }


def _asked_for(plan: ServingPlan, planning: Planning) -> ServingPlan:
    """The plan with what it was asked for beside the loads."""
    asked = {"slo_quantile_percent": planning.slo_quantile}
    if planning.disaggregated:
        asked["kv_link_bytes_s"] = planning.kv_link_bytes_s
    return plan.model_copy(update={"request": plan.request.model_copy(update=asked)})


@dataclass(frozen=True)
class _FleetSearch:
    """Plans for some loads, made from load curves and replayed.

    Attributes:
        profile: with the SLOs.
        request: the loads, and how many GPUs may serve them.
        planning: how plans are made.
    """

    profile: ServingProfile
    request: PlanRequest
    planning: Planning
    # By the curves: several searches ask for the same.
    _bounds_w: dict[ServingProfile, float] = field(default_factory=dict, init=False)
    _plans: dict[ServingProfile, ServingPlan] = field(default_factory=dict, init=False)

    def plan_that_holds(
        self, curves: ServingProfile, *, to_beat_w: float = math.inf
    ) -> ServingPlan | None:
        """The plan by some curves, relieved until enough requests meet their SLOs in its replay.

        Args:
            curves: that it is made by.
            to_beat_w: power of another fleet.

        Returns:
            None: it would draw more than the other fleet.

        Raises:
            NoAnswerError: there is no plan, or none that holds.
        """
        target = self.planning.slo_quantile / 100
        limit_w = _CURVE_MARGIN * to_beat_w
        if self._bound_w(curves) > limit_w:
            return None
        for _ in range(_MAX_ROUNDS):
            plan = self._plan(curves)
            if plan.power > limit_w:
                return None
            draws = PlanDraws(self.profile, plan.group_loads(self.profile))
            replay = draws.replay_unless_below(target)
            if replay.meets(target):
                return with_replay(plan, replay)
            curves = _relieved(curves, plan, replay, target)
        raise NoAnswerError(
            f"no plan met the SLOs of {self.planning.slo_quantile:g}% of requests when it was "
            "replayed; ask for less with --slo-quantile, or keep classes apart with --no-merge"
        )

    def plans_at_one_clock(self, curves: ServingProfile) -> Iterator[ServingPlan]:
        """The best plan at one lower clock and that at the highest, where these hold."""
        clocks_mhz = sorted({key.frequency_mhz for key in curves.performance})
        for candidates_mhz in (clocks_mhz[:-1], clocks_mhz[-1:]):
            shared = self._shared_at_one_of(curves, candidates_mhz)
            to_beat_w = math.inf if shared is None else shared.power
            by_class = self._by_class_at_one_of(curves, candidates_mhz, to_beat_w)
            found = [plan for plan in (by_class, shared) if plan is not None]
            if found:
                yield min(found, key=lambda plan: plan.power)

    def _by_class_at_one_of(
        self, curves: ServingProfile, clocks_mhz: Sequence[int], to_beat_w: float
    ) -> ServingPlan | None:
        """The plan of least power, by its curves, at one of these clocks.

        Args:
            curves: that it is made by.
            clocks_mhz: the clocks.
            to_beat_w: power of another fleet.

        Returns:
            None: none holds, or it would draw more than the other fleet.
        """
        best: ServingProfile | None = None
        least_w = _CURVE_MARGIN * to_beat_w
        at_one_clock = [curves.at_clocks([clock_mhz]) for clock_mhz in clocks_mhz]
        for candidate in sorted(at_one_clock, key=self._bound_w):
            if self._bound_w(candidate) > least_w:
                break
            with suppress(NoAnswerError):
                power_w = self._plan(candidate).power
                if power_w < least_w:
                    best, least_w = candidate, power_w
        if best is None:
            return None
        with suppress(NoAnswerError):
            plan = self.plan_that_holds(best, to_beat_w=to_beat_w)
            if plan is not None:
                return beside_all_clocks(plan, curves, self._bound_w(curves))
        return None

    def _shared_at_one_of(
        self, curves: ServingProfile, clocks_mhz: Sequence[int]
    ) -> ServingPlan | None:
        """The plan of alike instances for all classes, at one of these clocks.

        Requests of all lengths together need fewer spare instances than each class by itself.

        Args:
            curves: what the fleet at maximum frequency beside it is by.
            clocks_mhz: the clocks.

        Returns:
            None: classes are to be kept apart, or no such fleet holds.
        """
        if not self.planning.merge or not clocks_mhz:
            return None
        with suppress(NoAnswerError):
            held = shared_fleet(
                self.profile,
                _requests_s(self.profile, self.request),
                self.request.gpus,
                slo_quantile=self.planning.slo_quantile,
                clocks_mhz=clocks_mhz,
            )
            return build_replayed_plan(TOGETHER, self.profile, self.request, [held], curves=curves)
        return None

    def _bound_w(self, curves: ServingProfile) -> float:
        """The power below which no plan by some curves lies, W."""
        if curves not in self._bounds_w:
            self._bounds_w[curves] = power_bound_w(curves, self.request)
        return self._bounds_w[curves]

    def _plan(self, curves: ServingProfile) -> ServingPlan:
        """The plan that some curves allow; raises as the planners do."""
        if curves not in self._plans:
            loads, gpus = self.request.loads_tokens_s, self.request.gpus
            self._plans[curves] = self.planning.plan(curves, loads, gpus)
        return self._plans[curves]


def _relieved(
    profile: ServingProfile, plan: ServingPlan, replay: PlanReplay, attainment: float
) -> ServingProfile:
    """The profile with less load for the instances of groups that met their SLOs too seldom."""
    curves = dict(profile.curves)
    for pool, group in _overloaded(plan, replay, attainment):
        key = CurveKey(pool.request_class, group.tp, group.frequency_mhz)
        bearable = _KEPT_LOAD * group.load_tokens_s
        max_load_by_slo = dict(curves[key].max_load_by_slo)
        for slo, max_load in max_load_by_slo.items():
            if slo.covers(pool.slo):
                max_load_by_slo[slo] = min(max_load, bearable)
        curves[key] = replace(curves[key], max_load_by_slo=max_load_by_slo)
    return replace(profile, curves=curves)


def _overloaded(
    plan: ServingPlan, replay: PlanReplay, attainment: float
) -> Iterator[tuple[Pool, Group]]:
    """The groups whose own attainment, or that of a class they serve, is too low."""
    too_low = set(replay.missing_classes(attainment))
    for pool, replayed_groups in zip(plan.pools, replay.groups, strict=True):
        for group, replayed in zip(pool.groups, replayed_groups, strict=True):
            if replayed.attainment < attainment or too_low.intersection(pool.classes):
                yield pool, group
