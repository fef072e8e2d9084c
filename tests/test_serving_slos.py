"""No plan and no fleet of a policy ever violates an SLO of its own profile."""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from envplan.errors import NoAnswerError
from envplan.serving.classes import CLASSES
from envplan.serving.plan import ServingPlan
from envplan.serving.planners import exact_plan, hierarchical_plan
from envplan.serving.policies import POLICIES, simulate
from envplan.serving.profile import ServingProfile
from envplan.serving.settings import Settings
from envplan.serving.trace import Trace
from serving_helpers import profile_of, write_profile

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
            assert load <= curve.load[-1]
            for served in pool.serves:
                slo = profile.classes[served.request_class].slo
                assert np.interp(load, curve.load, curve.ttft_s) <= slo.ttft_s * (1 + 1e-9)
                assert np.interp(load, curve.load, curve.tbt_s) <= slo.tbt_s * (1 + 1e-9)
    assert sum(pool.gpus for pool in plan.pools) <= plan.asked.gpus


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


@st.composite
def profiles_by_phases(draw: st.DrawFn) -> ServingProfile:
    """One or two TPs at two clocks, with any times and powers, and with much or little memory."""
    rows, watts = [], st.floats(50, 700)
    tps = draw(st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=2, unique=True))
    for tp, clock in product(tps, (1000, 2000)):
        rows.append(f"{tp},{clock},idle,0,0,{tp * 50}")
        for phase, longest in (("prefill", 5.0), ("decode", 0.15)):
            sizes = draw(st.lists(st.integers(1, 4000), min_size=1, max_size=3, unique=True))
            rows += [
                f"{tp},{clock},{phase},{size},{draw(st.floats(1e-3, longest))},{tp * draw(watts)}"
                for size in sorted(sizes)
            ]
    memory = {str(tp): draw(st.sampled_from([300, 10_000, 500_000])) for tp in tps}
    with TemporaryDirectory() as folder:
        return ServingProfile.read_csv(write_profile(Path(folder, "p.csv"), rows, kv_tokens=memory))


@settings(max_examples=20, deadline=None)
@given(profiles_by_phases(), st.lists(st.integers(1, 300), min_size=4, max_size=12), st.data())
def test_any_profile_by_phases_can_be_replayed_under_every_policy(
    profile: ServingProfile, counts: list[int], data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, len(CLASSES) - 1))
    arrival = np.concatenate([60.0 * k + np.linspace(0, 59, n) for k, n in enumerate(counts)])
    trace = Trace("any", arrival, None, None, np.full(len(arrival), place, dtype=np.uint8))
    policy = data.draw(st.sampled_from(list(POLICIES)))
    for curve in profile.curves.values():
        assert min(map(np.min, map(np.diff, (curve.ttft_s, curve.tbt_s)))) >= 0
    try:
        result = simulate(profile, trace, policy, Settings(gpus=256, epoch=600.0))
    except NoAnswerError:
        return
    assert result.requests == len(trace)
    assert 0 <= result.attainment <= 1
    assert result.energy_j >= 0
