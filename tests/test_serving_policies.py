"""Policies on real traffic: SLOs kept request by request, fleets that grow before they must."""

from __future__ import annotations

import numpy as np
import pytest

from envplan.costs.rates import Rate
from envplan.errors import NoAnswerError
from envplan.serving.policies import POLICIES, Settings, compare_policies, expected, simulate
from envplan.serving.policies.outlook import Outlook, Stretch
from envplan.serving.profile import ServingProfile, with_slos
from envplan.serving.simulation import FleetSpec, Machines, Overheads, PoolSpec
from envplan.serving.sizing import Stream
from envplan.serving.trace import Trace, make_week

HOURS = ["azure-2023-code", "azure-2023-conversation"]
QUICK = [name for name in POLICIES if name != "static"]  # whose integer program takes seconds


def stream_of(trace: Trace) -> Stream:
    return Stream.of(trace, ServingProfile.builtin(), trace.known)


@pytest.mark.parametrize("hour", HOURS)
def test_every_policy_keeps_the_slos_of_a_real_hour(hour: str) -> None:
    results = compare_policies(ServingProfile.builtin(), Trace.open(hour), policies=QUICK)
    base = results[0]
    for result in results:
        assert result.requests == len(Trace.open(hour))
        assert result.attainment >= 0.999, result.policy
    saved = {result.policy: result.saved_percent(base) for result in results}
    assert saved["SinglePool"] == 0
    assert saved["envplan"] is not None
    assert saved["envplan"] > 30


@pytest.mark.parametrize(("factor", "seed"), [(0.3, 1), (2.0, 2)])
def test_slos_are_kept_at_other_loads(factor: float, seed: int) -> None:
    trace = Trace.open(HOURS[0]).scaled(factor, seed)
    for policy in ("SinglePool", "DynamoLLM", "envplan"):
        assert simulate(ServingProfile.builtin(), trace, policy).attainment >= 0.999


def test_a_scaling_fleet_follows_a_real_shaped_morning() -> None:
    day = make_week("coding-week", days=0.25).scaled(0.25)
    single, ours = compare_policies(
        ServingProfile.builtin(), day, policies=("SinglePool", "envplan")
    )
    assert ours.attainment >= 0.998
    assert ours.energy_j < 0.7 * single.energy_j
    assert ours.series.gpus.min() < ours.series.gpus.max()


def test_what_is_expected_is_the_last_hour_and_the_same_hours_of_other_days() -> None:
    arrival = np.arange(0.0, 9 * 86_400.0, 60.0)
    ones = np.ones(len(arrival), dtype=np.int32)
    stream = stream_of(Trace("even", arrival, ones, ones, np.zeros(len(arrival), dtype=np.uint8)))
    now, ahead = 8 * 86_400.0, 1800.0
    last, day, week = expected(stream, now, ahead)
    assert last[:2] == (now - 3600, now)
    assert day == Stretch(now - 86_400, now - 86_400 + ahead, 1.0)
    assert week.begin_s == now - 7 * 86_400
    assert len(expected(stream, 7200.0, ahead)) == 1


def test_needs_grow_with_bursts_at_the_same_load() -> None:
    even = np.linspace(0, 600, 1200)
    ones = np.full(1200, 1000, dtype=np.int32)
    known = np.full(1200, 4, dtype=np.uint8)
    traces = [Trace("a", at, ones, ones // 10, known) for at in (even, np.sort(even // 60 * 60))]
    calm, bursty = (stream_of(trace).need(0, 600, ["MM"], "MM", 8, 0.001) for trace in traces)
    assert calm.busy == pytest.approx(bursty.busy)
    assert bursty.instances > 3 * calm.instances


def test_a_change_never_takes_away_what_serves() -> None:
    trace = Trace.open(HOURS[1])
    machines = Machines(stream_of(trace), Overheads(), 64)
    profile = ServingProfile.builtin()
    key = ("LL", profile.classes["SS"].slo)

    def fleet(tp: int, count: int) -> FleetSpec:
        pool = PoolSpec(*key, {(tp, 1980): count})
        return FleetSpec({key: pool}, dict.fromkeys(profile.classes, ((key, 1.0),)))

    machines.adopt(fleet(8, 2), 0.0, warm=True)
    machines.advance(600.0)
    machines.adopt(fleet(4, 3), 600.0)
    machines.advance(660.0)
    assert machines.in_use() == 28  # the old ones serve until the new ones are ready
    machines.advance(1200.0)
    assert machines.in_use() == 12
    assert (machines.started, machines.resharded) == (3, 0)
    tight = Machines(stream_of(trace), Overheads(), 16)
    tight.adopt(fleet(8, 2), 0.0, warm=True)
    tight.advance(600.0)
    tight.adopt(fleet(4, 4), 600.0)
    assert (tight.started, tight.resharded) == (0, 4)


def test_overheads_are_the_published_ones() -> None:
    assert (Overheads().start, Overheads().reshard) == (423.0, 33.0)
    assert Overheads(prepared=True).start == 33.0


def test_mispredicted_lengths_cost_multipool_little_and_one_pool_nothing() -> None:
    trace = Trace.open(HOURS[1])
    runs = [
        simulate(ServingProfile.builtin(), trace, "envplan", Settings(mispredicted=share))
        for share in (0.0, 0.5)
    ]
    assert runs[0].energy_j == pytest.approx(runs[1].energy_j, rel=0.02)
    spoiled = simulate(ServingProfile.builtin(), trace, "MultiPool", Settings(mispredicted=0.5))
    assert spoiled.attainment >= 0.999


def test_energy_at_a_rate_is_the_integral_over_slots() -> None:
    result = simulate(ServingProfile.builtin(), Trace.open(HOURS[0]), "SinglePool")
    assert result.at_rate(Rate.fixed(0.5)) == pytest.approx(0.5 * result.energy_j / 3.6e6)
    half = Rate(begins_s=[0.0, 1740.0], per_kwh=[1.0, 0.0], end_s=3480.0)
    first = result.series.power_w[:29].sum() * 60 / 3.6e6
    assert result.at_rate(half) == pytest.approx(first)


def test_too_few_gpus_and_an_impossible_slo_are_told() -> None:
    trace = Trace.open(HOURS[0])
    with pytest.raises(NoAnswerError, match="SinglePool needs 72 GPUs"):
        simulate(ServingProfile.builtin(), trace, "SinglePool", Settings(gpus=16))
    strict = with_slos(ServingProfile.builtin(), {}, 0.01)
    with pytest.raises(NoAnswerError, match="its first token within"):
        simulate(strict, trace)


def test_one_request_and_a_class_never_seen_are_served() -> None:
    one = Trace("one", np.zeros(1), np.array([500], dtype=np.int32),
                np.array([20], dtype=np.int32), np.array([3], dtype=np.uint8))  # fmt: skip
    for result in compare_policies(ServingProfile.builtin(), one, policies=QUICK):
        assert result.attainment == 1.0


def test_outlooks_keep_what_they_have_counted() -> None:
    outlook = Outlook(stream_of(Trace.open(HOURS[0])), Settings(), [Stretch(0.0, 3480.0, 1.0)])
    first = outlook.need(["LS"], "LS", 4)
    assert len(outlook.needs) == 1
    assert outlook.need(["LS"], "LS", 4) == first
    assert outlook.count(["LS"], "LS", 4) >= first.instances
