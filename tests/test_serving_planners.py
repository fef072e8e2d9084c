"""The planners: exact is as good as brute force, the managers each do their part."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envplan.errors import InputError, NoAnswerError
from envplan.serving.classes import CLASSES, DEFAULT_CLASSES, Slo
from envplan.serving.exact_planner import exact_plan, power_bound_w
from envplan.serving.hierarchical_planner import (
    choose_instances,
    hierarchical_plan,
    power_by_clock,
    rated_curves,
    size_pools,
)
from envplan.serving.plan import ServingPlan
from envplan.serving.plan_request import PlanRequest
from envplan.serving.pool_sites import possible_promises
from envplan.serving.profile import ServingProfile
from serving_helpers import (
    EQUAL,
    UNIT,
    Curves,
    least_power,
    profile_of,
    queueing_profile,
    small_serving_profile,
)


@st.composite
def fleets(
    draw: st.DrawFn, names: tuple[str, str] = ("SS", "SM"), tps: tuple[int, ...] = (1, 2),
    clocks: tuple[int, ...] = (1000, 2000), starts: tuple[tuple[int, ...], ...] = ((0,), ()),
    fewest: int = 0, gpus: int = 5,
) -> tuple[Curves, dict[str, int], int]:  # fmt: skip
    """Random curves of two classes, some left out, loads and GPUs, which may run short."""
    curves: dict[tuple[str, int, int], list[tuple[int, float]]] = {}
    for key in product(names, tps, clocks):
        knots = draw(st.lists(st.integers(1, 8), min_size=fewest, max_size=3, unique=True))
        if knots:
            loads = [*draw(st.sampled_from(starts)), *sorted(knots)]
            curves[key] = [(load, draw(st.integers(1, 60))) for load in loads]
    curves.setdefault((names[1], tps[0], 1000), [(0, 10), (3, 20)])
    demand = {names[0]: draw(st.integers(fewest, 8)), names[1]: draw(st.integers(1, 8))}
    return curves, demand, draw(st.integers(1, gpus))


def power_or_nothing(
    profile: ServingProfile, demand: dict[str, float], gpus: int, unit: float = UNIT, **how: bool
) -> float:
    try:
        plan = exact_plan(
            profile, {name: load * unit for name, load in demand.items()}, gpus, **how
        )
    except NoAnswerError:
        return math.inf
    bound = plan.predicted.power_lower_bound_w
    assert bound is not None
    assert bound <= plan.power
    return plan.power


@settings(max_examples=130, deadline=None)
@given(
    st.one_of(fleets(), fleets(tps=(2, 4, 8), clocks=(1000,), starts=((0,),), gpus=18)),
    st.booleans(),
)
def test_the_plan_is_as_good_as_brute_force(
    case: tuple[Curves, dict[str, int], int], one_clock: bool
) -> None:
    curves, demand, gpus = case
    pairs = sorted({key[:2] for key in curves})
    clocks = [[key for key in curves if key[:2] == pair] for pair in pairs]
    best = min(
        least_power({key: curves[key] for key in chosen}, demand, gpus)
        for chosen in (product(*clocks) if one_clock else [curves])
    )
    profile = small_serving_profile(curves)
    power_w = power_or_nothing(profile, demand, gpus, one_frequency=one_clock)
    assert power_w == pytest.approx(best, rel=1e-5, abs=1e-6)
    if best == math.inf and not one_clock:
        fits = next(n for n in range(gpus, 200) if least_power(curves, demand, n) < math.inf)
        loads = {name: float(load * UNIT) for name, load in demand.items()}
        with pytest.raises(NoAnswerError, match=f"at least {fits} GPUs, {fits - gpus} more than"):
            exact_plan(profile, loads, gpus)


@settings(max_examples=40, deadline=None)
@given(fleets(), st.sampled_from([2, 3]))
def test_merging_requests_of_other_lengths_is_as_good_as_brute_force(
    case: tuple[Curves, dict[str, int], int], longer: int
) -> None:
    # A request of SM has `longer` times the tokens of one of SS, whose unit is as much shorter: a
    # unit of SS that is merged is one of SM again.
    curves, demand, gpus = case
    units = {"SS": UNIT / longer, "SM": float(UNIT)}
    scaled = {
        key: [(load * units[key[0]], power) for load, power in points]
        for key, points in curves.items()
    }
    profile = profile_of(scaled, {"SM": EQUAL | {"input_tokens": 2 * longer - 1}})
    loads = {name: load * units[name] for name, load in demand.items()}
    power_w = power_or_nothing(profile, loads, gpus, unit=1)
    assert power_w == pytest.approx(least_power(curves, demand, gpus), rel=1e-5, abs=1e-4)


@settings(max_examples=60, deadline=None)
@given(fleets(), st.booleans())
def test_no_plan_draws_less_than_the_bound_of_fractions_of_instances(
    case: tuple[Curves, dict[str, int], int], one_clock: bool
) -> None:
    curves, demand, gpus = case
    profile = small_serving_profile(curves)
    loads = {name: float(load * UNIT) for name, load in demand.items()}
    try:
        request = PlanRequest.create(profile, loads, gpus)
    except (InputError, NoAnswerError):
        return
    bound_w = power_bound_w(profile, request)
    power_w = power_or_nothing(profile, demand, gpus, one_frequency=one_clock)
    assert 0 < bound_w <= power_w * (1 + 1e-6)
    # With so many GPUs fractions of instances that carry all that they can make up a fleet.
    assert power_bound_w(profile, request.model_copy(update={"gpus": 10_000})) < math.inf


def test_the_bound_of_too_few_gpus_is_infinite() -> None:
    profile = profile_of({("SS", 4, 1000): [(100, 300)]})
    request = PlanRequest.create(profile, {"SS": 250.0}, 9)
    assert power_bound_w(profile, request) == math.inf
    assert power_bound_w(profile, request.model_copy(update={"gpus": 10})) == pytest.approx(750)


def test_the_bound_of_a_class_that_no_configuration_serves_in_time_is_infinite() -> None:
    profile = profile_of({("SS", 4, 1000): [(100, 300)], ("SM", 4, 1000): [(100, 300, 9.0)]})
    request = PlanRequest.create(profile, {"SS": 250.0}, 16)
    unreachable = request.model_copy(update={"loads_tokens_s": {"SM": 10.0}})
    assert power_bound_w(profile, unreachable) == math.inf


@pytest.mark.parametrize("steep", [500, 540, 600])
def test_instances_may_share_a_load_inside_a_stretch(steep: float) -> None:
    # Power is flat up to 40 tokens/s and then rises; the SLO is reached at 50. For 85 tokens/s two
    # instances must rise by 5 tokens/s in all, where 50 and 35 would be 10.
    profile = profile_of({("SS", 1, 1000): [(40, 310, 0.5), (80, steep, 2.5)]})
    plan = exact_plan(profile, {"SS": 85.0}, 2)
    assert plan.power == pytest.approx(620 + 5 * (steep - 310) / 40)
    assert plan.predicted.gap == pytest.approx(0.0, abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(fleets(names=("SS", "LS"), starts=((0,),), gpus=4), st.data())
def test_pools_with_different_slos_are_as_good_as_brute_force(
    case: tuple[Curves, dict[str, int], int], data: st.DataObject
) -> None:
    curves, demand, gpus = case
    slopes = {key: data.draw(st.sampled_from([0.25, 0.5, 1.0])) for key in curves}
    demand["SS"] = max(1, demand["SS"])
    power_w = power_or_nothing(queueing_profile(curves, slopes), demand, gpus)
    best = least_power(curves, demand, gpus, slopes)
    assert power_w == pytest.approx(best, rel=1e-5, abs=1e-4)


@settings(max_examples=6, deadline=None)
@given(st.lists(st.floats(-2, 4), min_size=2, max_size=4))
def test_loads_may_differ_by_orders_of_magnitude(powers_of_ten: list[float]) -> None:
    loads = dict(zip(("SS", "MM", "LS", "LL"), (10**x for x in powers_of_ten), strict=False))
    plan = exact_plan(ServingProfile.builtin(), loads, 256, time_limit=0.5)
    served = dict.fromkeys(loads, 0.0)
    for pool in plan.pools:
        for part in pool.serves:
            served[part.request_class] += part.load_tokens_s
    assert served == pytest.approx(loads)


@pytest.mark.parametrize("planner", [exact_plan, hierarchical_plan])
def test_a_small_load_is_merged_into_a_higher_pool(planner: Callable[..., ServingPlan]) -> None:
    asked = (ServingProfile.builtin(), {"SS": 5.0, "SM": 500.0}, 16)
    merged, apart = planner(*asked), planner(*asked, merge=False)
    assert merged.pools[0].classes == ["SS", "SM"]
    assert len(apart.pools) == 2
    assert merged.power < apart.power


def test_the_limit_of_the_search_does_not_depend_on_the_machine() -> None:
    loads = dict.fromkeys(CLASSES, 3000.0)
    alone = exact_plan(ServingProfile.builtin(), loads, 256, time_limit=1.0)
    assert alone.predicted.gap is not None
    assert alone.predicted.gap > 1e-5  # the limit has ended the search
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            beside = exact_plan(ServingProfile.builtin(), loads, 256, time_limit=1.0)
        finally:
            busy.kill()
    assert beside == alone


@pytest.mark.parametrize("seconds", [0.05, 0.3, 1.0])
def test_a_solver_short_of_time_does_not_claim_that_gpus_are_missing(seconds: float) -> None:
    # TP8 at maximum frequency serves these loads on 960 GPUs.
    draw = random.Random(5)
    loads = {name: draw.uniform(1, 100_000) for name in CLASSES}
    try:
        plan = exact_plan(ServingProfile.builtin(), loads, 1024, time_limit=seconds)
    except NoAnswerError as none:
        said = str(none)
    else:
        said = f"a plan within {seconds:g} s"
        bound = plan.predicted.power_lower_bound_w
        assert (plan.predicted.gap is None) == (bound is None)
        assert bound is None or 0 < bound <= plan.power
    assert f"within {seconds:g} s" in said


@pytest.mark.parametrize(
    ("loads", "gpus", "words"),
    [
        ({"SS": 100.0}, 0, "at least one GPU"),
        ({"SS": 0.0}, 8, "no load"),
        ({"XX": 1.0}, 8, "no class 'XX'"),
        *(
            ({"SS": load}, 8, r"SS must be 0, or from 0.01 to 1e\+09 tokens/s")
            for load in (math.nan, -1.0, 0.001, 1e10)
        ),
    ],
)
def test_what_makes_no_sense_is_refused(loads: dict[str, float], gpus: int, words: str) -> None:
    with pytest.raises(InputError, match=words):
        exact_plan(ServingProfile.builtin(), loads, gpus)


def test_a_class_without_a_configuration_is_served_by_a_higher_one_or_not_at_all() -> None:
    profile = small_serving_profile({("SM", 1, 1000): [(0, 10), (3, 20)]})
    plan = exact_plan(profile, {"SS": 10.0}, 4)
    assert plan.pools[0].request_class == "SM"
    with pytest.raises(NoAnswerError, match="has memory for SS"):
        exact_plan(profile, {"SS": 10.0}, 4, merge=False)
    with pytest.raises(NoAnswerError, match=r"no pool for SS.*the exact planner can"):
        hierarchical_plan(profile, {"SS": 10.0}, 4)


CLOCKS = {("SS", 2, 1000): [(0, 10), (4, 50)], ("SS", 2, 2000): [(0, 20), (6, 90)]}
LARGE = {("SS", 4, 1000): [(0, 30), (10, 60)], ("SS", 4, 2000): [(0, 30), (12, 95)]}
DENSE = {("SS", 4, 1000): [(0, 1), (10, 10)], ("SS", 1, 1000): [(0, 1), (10, 50)]}


@pytest.mark.parametrize(
    ("curves", "load", "gpus", "tp", "power"),
    [
        # One on four GPUs at 2000 MHz draws 95 W, two on two 180 W.
        (CLOCKS | LARGE, 120.0, 16, 4, 95.0),
        (DENSE, 200.0, 8, 4, 20.0),
        (DENSE, 200.0, 7, 1, 100.0),  # denser where GPUs run short
    ],
)
def test_the_pool_manager_sizes_at_maximum_frequency(
    curves: Curves, load: float, gpus: int, tp: int, power: float
) -> None:
    profile = small_serving_profile(curves)
    (pool,) = size_pools(profile, PlanRequest.create(profile, {"SS": load}, gpus))
    assert (pool.tp, pool.power_w) == (tp, power)
    with pytest.raises(NoAnswerError, match=r"[24] GPUs, [13] more than the 1 there are; class SS"):
        size_pools(profile, PlanRequest.create(profile, {"SS": load}, 1))


def test_the_instance_manager_reshards_where_that_draws_less() -> None:
    profile = small_serving_profile(
        {("SS", 4, 1000): [(0, 40), (10, 60)], ("SS", 1, 1000): [(0, 4), (2, 30)]}
    )
    able = rated_curves(profile, "SS", Slo(1.0, 1.0))
    for load, best in ((10.0, {1: 1}), (80.0, {4: 1}), (110.0, None)):
        assert choose_instances(able, 4, load) == best


def test_the_gpu_manager_knows_what_each_clock_draws_at_a_load() -> None:
    curves = rated_curves(small_serving_profile(CLOCKS), "SS", Slo(1.0, 1.0))[2]
    assert power_by_clock(curves, np.array([0.0, 40.0, 50.0, 61.0])).tolist() == [
        [10.0, 50.0, np.inf, np.inf],
        pytest.approx([20.0, 20 + 70 * 4 / 6, 20 + 70 * 5 / 6, np.inf]),
    ]
    assert power_by_clock(curves, 40.0).argmin() == 0


LOADS = st.lists(st.integers(1, 3000), min_size=1, max_size=4, unique=True)
TTFT, TBT = st.floats(0.01, 3.0), st.floats(0.005, 0.15)


@st.composite
def profiles(draw: st.DrawFn) -> ServingProfile:
    """Up to four classes on any TP at two clocks; latencies rise with load."""
    curves = {}
    for name in draw(st.lists(st.sampled_from(CLASSES), min_size=1, max_size=4, unique=True)):
        for tp in draw(st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, unique=True)):
            for clock in draw(st.sampled_from([[1000], [2000], [1000, 2000]])):
                loads = sorted(draw(st.sampled_from([{0}, set[int]()])) | set(draw(LOADS)))
                power, ttft, tbt = (
                    draw(st.lists(each, min_size=len(loads), max_size=len(loads)))
                    for each in (st.floats(10 * tp, 700 * tp), TTFT, TBT)
                )
                points = zip(loads, power, sorted(ttft), sorted(tbt), strict=True)
                curves[name, tp, clock] = list(points)
    return profile_of(curves)


def assert_within_slos(plan: ServingPlan, profile: ServingProfile) -> None:
    """By the profile's points alone."""
    for pool in plan.pools:
        for group in pool.groups:
            curve = profile.curves[pool.request_class, group.tp, group.frequency_mhz]
            load = group.load_tokens_s
            assert load <= curve.load_tokens_s[-1]
            for served in pool.serves:
                slo = profile.classes[served.request_class].slo
                assert np.interp(load, curve.load_tokens_s, curve.ttft_s) <= slo.ttft_s * (1 + 1e-9)
                assert np.interp(load, curve.load_tokens_s, curve.tbt_s) <= slo.tbt_s * (1 + 1e-9)
    assert sum(pool.gpus for pool in plan.pools) <= plan.request.gpus


@settings(max_examples=30, deadline=None)
@given(
    profiles(),
    st.dictionaries(st.sampled_from(CLASSES), st.floats(0.01, 10_000), min_size=1, max_size=4),
    st.sampled_from([4, 64, 1024]),
)
def test_a_plan_of_either_planner_for_any_profile_keeps_its_slos(
    profile: ServingProfile, loads: dict[str, float], gpus: int
) -> None:
    power = dict.fromkeys(("exact", "hierarchical"), math.inf)
    for planner in (exact_plan, hierarchical_plan):
        try:
            plan = planner(profile, loads, gpus)
        except NoAnswerError:
            continue
        assert_within_slos(plan, profile)
        assert plan.check(profile)
        power[plan.planner] = plan.power
    assert power["exact"] <= power["hierarchical"] * (1 + 1e-5) + 0.01


def test_pools_of_longer_classes_for_the_same_guests_are_not_planned() -> None:
    profile = ServingProfile.builtin().with_classes(DEFAULT_CLASSES)

    def pool_classes(*names: str) -> set[str]:
        request = PlanRequest.create(profile, dict.fromkeys(names, 1000.0), gpus=64)
        return {promise.request_class for promise in possible_promises(profile, request)}

    assert pool_classes("SS", "MM", "LL") == {"SS", "MM", "LL"}
    assert pool_classes("SL", "MS") == {"SL", "MS", "ML"}
    no_ml = {key: curve for key, curve in profile.curves.items() if key.request_class != "ML"}
    profile = replace(profile, curves=no_ml)
    assert pool_classes("SL", "MS") == {"SL", "MS", "ML", "LL"}


def test_nothing_is_lost_by_leaving_out_pools_of_longer_classes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    profile, loads = ServingProfile.builtin(), {"SS": 3000.0, "MM": 900.0}
    plan = exact_plan(profile, loads, 64, time_limit=60)
    every_class = "envplan.serving.pool_sites._useful_pool_classes"
    monkeypatch.setattr(every_class, lambda profile, request: list(profile.classes))
    unpruned = exact_plan(profile, loads, 64, time_limit=60)
    assert plan.power == pytest.approx(unpruned.power, rel=1e-5)
