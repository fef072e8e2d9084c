"""Policies on real traffic: SLOs kept request by request, fleets that grow before they must."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import combinations

import numpy as np
import pytest

from envplan.costs.rates import Rate
from envplan.errors import InputError, NoAnswerError
from envplan.serving.classes import CLASSES, classify_all
from envplan.serving.policies import (
    POLICIES,
    Outlook,
    Stretch,
    compare_policies,
    expected,
    least_power,
    predicted,
    simulate,
)
from envplan.serving.profile import ServingProfile
from envplan.serving.settings import READY, Settings
from envplan.serving.simulation import Fleet, Machines, PoolSpec
from envplan.serving.sizing import Stream
from envplan.serving.trace import Trace, make_week

HOURS = ["azure-2023-code", "azure-2023-conversation"]


def stream_of(trace: Trace) -> Stream:
    return Stream(trace, ServingProfile.builtin(), trace.known)


@pytest.mark.parametrize("hour", HOURS)
def test_every_policy_keeps_the_slos_of_a_real_hour(hour: str) -> None:
    results = compare_policies(ServingProfile.builtin(), Trace.open(hour), policies=list(POLICIES))
    base = results[0]
    for result in results:
        assert result.requests == len(Trace.open(hour))
        assert result.attainment >= 0.999, result.policy
    saved = {result.policy: result.saved_percent(base) for result in results}
    assert saved["SinglePool"] == 0
    assert saved["envplan"] is not None
    assert saved["envplan"] > 30


@pytest.mark.parametrize("hour", HOURS)
def test_policies_that_scale_keep_the_slos_without_hindsight(hour: str) -> None:
    trace, past = Trace.open(hour), 900.0
    scaling = [name for name, policy in POLICIES.items() if policy.scales]
    for result in compare_policies(
        ServingProfile.builtin(), trace, Settings(past=past), policies=scaling
    ):
        assert result.requests == (trace.arrival >= past).sum() == result.series.requests.sum()
        assert (result.series.time_s[0], result.duration_s) == (past, trace.duration_s - past)
        assert result.attainment >= 0.999, result.policy


@pytest.mark.parametrize("policy", POLICIES)
def test_with_a_past_nothing_knows_what_is_still_to_come(policy: str) -> None:
    """What is done in the first minutes is the same whether or not anything follows them."""
    trace, until = Trace.open(HOURS[0]), 2400.0
    settings = Settings(past=900.0, mispredicted=0.0)
    whole = simulate(ServingProfile.builtin(), trace, policy, settings)
    begun = trace.part(slice(int(np.searchsorted(trace.arrival, until))))
    cut = simulate(ServingProfile.builtin(), begun, policy, settings)
    slots = round((until - settings.past) / 60)
    assert cut.series.gpus[:slots].tolist() == whole.series.gpus[:slots].tolist()
    assert cut.series.power_w[:slots] == pytest.approx(whole.series.power_w[:slots], rel=1e-9)


def test_a_past_must_have_requests_and_so_must_what_follows() -> None:
    trace = Trace.open(HOURS[0])
    late = trace.part(trace.arrival > 1800)
    for known, past, words in (
        (trace, 3600.0, "after a past of 3600 s"),
        (late, 600.0, "in a past"),
    ):
        with pytest.raises(InputError, match=words):
            simulate(ServingProfile.builtin(), known, "envplan", Settings(past=past))


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
    calm, bursty = (stream_of(trace).need(0, 600, ["MM"], 8, 0.001) for trace in traces)
    assert calm.busy == pytest.approx(bursty.busy)
    assert bursty.instances > 3 * calm.instances


def test_pools_are_compared_by_the_same_work() -> None:
    """However classes are sorted into pools, their work adds up to the same."""
    stretches = [Stretch(0.0, 1800.0), Stretch(1800.0, 2400.0, 1.25), Stretch(2400.0, 3400.0)]
    outlook = Outlook(stream_of(Trace.open(HOURS[1])), Settings(), stretches)
    for tp in outlook.stream.clocks:
        together = outlook.need(outlook.classes, tp)
        apart = [outlook.need([name], tp) for name in outlook.classes]
        assert sum(need.busy for need in apart) == pytest.approx(together.busy)
        assert sum(need.decoding for need in apart) == pytest.approx(together.decoding)


def a_fleet(tp: int, count: int) -> Fleet:
    """One pool for everything."""
    return Fleet({"LL": PoolSpec("LL", frozenset(CLASSES), tp, 1980, count)})


def gpus_over_time(machines: Machines, fleet: Fleet, now: float, until: float) -> list[int]:
    """GPUs in use at the end of each minute after going over to a fleet."""
    machines.adopt(fleet, now)
    used = []
    while now < until:
        now += 60.0
        machines.advance(now)
        used.append(machines.in_use())
    return used


def test_a_change_never_takes_away_what_serves() -> None:
    machines = Machines(stream_of(Trace.open(HOURS[1])), Settings(gpus=64))
    machines.adopt(a_fleet(8, 2), 0.0, warm=True)
    machines.advance(600.0)
    used = gpus_over_time(machines, a_fleet(4, 3), 600.0, 1800.0)
    assert used[0] == 20  # there are 4 GPUs more than enough, 4 more are started beforehand
    assert used[-1] == min(used) == 12
    assert (machines.started, machines.resharded, machines.moved) == (1, 2, 1.0)


def test_a_fleet_is_resharded_part_after_part() -> None:
    machines = Machines(stream_of(Trace.open(HOURS[1])), Settings(gpus=1024))
    machines.adopt(a_fleet(8, 16), 0.0, warm=True)
    machines.advance(60.0)
    used = gpus_over_time(machines, a_fleet(4, 32), 60.0, 1200.0)
    assert max(used) <= 160  # an eighth is started beforehand; what leaves finishes what it has
    assert used[-1] == 128
    assert machines.started == 4
    assert machines.resharded == 28
    tight = Machines(stream_of(Trace.open(HOURS[1])), Settings(gpus=16))
    tight.adopt(a_fleet(8, 2), 0.0, warm=True)
    tight.advance(600.0)
    assert gpus_over_time(tight, a_fleet(4, 4), 600.0, 1200.0)[-1] == 16
    assert (tight.started, tight.resharded) == (0, 4)


def test_overheads_are_the_published_ones() -> None:
    assert (Settings().startup_s, Settings().reshard_s) == (423.0, 33.0)
    for ready, start in (("vm", 333.0), ("weights", 243.0), ("snapshot", 285.0)):
        assert Settings(ready=ready).startup_s == start
    assert Settings(ready=",".join(READY)).startup_s == 15.0


def test_no_split_of_classes_over_pools_draws_less_than_the_exact_one() -> None:
    stream = stream_of(Trace.open(HOURS[0]))
    outlook = Outlook(stream, Settings(), [Stretch(0.0, 1200.0, 1.0)])
    found, _ = least_power(outlook)
    assert len(outlook.classes) > 3
    drawn = {
        (tp, classes): outlook.power(classes, tp, outlook.count(classes, tp), packs=True)
        for size in range(1, len(outlook.classes) + 1)
        for classes in combinations(outlook.classes, size)
        for tp in outlook.able(classes)
    }

    @cache
    def best(rest: tuple[str, ...]) -> float:
        """Over all partitions."""
        if not rest:
            return 0.0
        return min(
            watts + best(tuple(name for name in rest if name not in classes))
            for (_, classes), watts in drawn.items()
            if rest[0] in classes and set(classes) <= set(rest)
        )

    assert found == pytest.approx(best(tuple(outlook.classes)))


@pytest.mark.parametrize("pools", [1, 3, 9])
def test_dynamo_llm_has_no_more_pools_than_it_may(pools: int) -> None:
    outlook = Outlook(stream_of(Trace.open(HOURS[0])), Settings(pools=pools),
                      [Stretch(0.0, 3480.0, 1.0)])  # fmt: skip
    fleet = POLICIES["DynamoLLM"].plan(outlook)
    assert len(fleet) <= pools
    assert set(fleet.routes) == set(outlook.classes)


@pytest.mark.parametrize(("under", "longer"), [(100.0, False), (0.0, True)])
def test_outputs_are_predicted_as_wrongly_as_is_asked_for(under: float, longer: bool) -> None:
    trace = Trace.open(HOURS[1])
    taken = predicted(trace, Settings(mispredicted=30.0, underestimated=under))
    wrong = taken != trace.known
    assert np.all((taken > trace.known)[wrong] == longer)
    able = trace.known % 3 != (2 if longer else 0)
    assert wrong.sum() / able.sum() == pytest.approx(0.3, abs=0.02)
    assert np.array_equal(taken // 3, trace.known // 3)


def test_mispredicted_lengths_cost_multipool_little_and_one_pool_nothing() -> None:
    trace = Trace.open(HOURS[1])
    runs = [
        simulate(ServingProfile.builtin(), trace, "envplan", Settings(mispredicted=share))
        for share in (0.0, 50.0)
    ]
    assert runs[0].energy_j == pytest.approx(runs[1].energy_j, rel=0.02)
    spoiled = simulate(ServingProfile.builtin(), trace, "MultiPool", Settings(mispredicted=50.0))
    assert spoiled.attainment >= 0.999


def test_energy_at_a_rate_is_the_integral_over_slots() -> None:
    result = simulate(ServingProfile.builtin(), Trace.open(HOURS[0]), "SinglePool")
    assert result.at_rate(Rate.fixed(0.5)) == pytest.approx(0.5 * result.energy_j / 3.6e6)
    half = Rate(begins_s=[0.0, 1740.0], per_kwh=[1.0, 0.0], end_s=3480.0)
    first = result.series.power_w[:29].sum() * 60 / 3.6e6
    assert result.at_rate(half) == pytest.approx(first)


def test_too_few_gpus_and_an_impossible_slo_are_told() -> None:
    trace = Trace.open(HOURS[0])
    with pytest.raises(NoAnswerError, match=r"SinglePool needs \d+ GPUs"):
        simulate(ServingProfile.builtin(), trace, "SinglePool", Settings(gpus=16))
    strict = ServingProfile.builtin().with_slos({}, 0.01)
    with pytest.raises(NoAnswerError, match=r"gives SS its tokens 0.001 s apart; the best"):
        simulate(strict, trace)


def test_one_request_and_a_class_never_seen_are_served() -> None:
    one = Trace("one", np.zeros(1), np.array([500], dtype=np.int32),
                np.array([20], dtype=np.int32), np.array([3], dtype=np.uint8))  # fmt: skip
    for result in compare_policies(ServingProfile.builtin(), one, policies=list(POLICIES)):
        assert result.attainment == 1.0


def test_large_batches_of_long_outputs_keep_their_slos() -> None:
    """At twenty times the rate, prompts have to share their iterations with large batches."""
    hour = Trace.open(HOURS[1])
    calm = hour.part(hour.arrival < 300)
    given, made = calm.lengths(ServingProfile.builtin())
    given, made = np.maximum(1, given // 4), 2 * made
    known = classify_all(given, made)
    trace = replace(calm, input_tokens=given, output_tokens=made, known=known, lasts_s=300.0)
    for result in compare_policies(
        ServingProfile.builtin(), trace.scaled(20), policies=("SinglePool", "DynamoLLM", "envplan")
    ):
        assert result.attainment >= 0.999, result.policy


def test_a_fleet_is_sized_for_the_requests_that_it_can_answer_in_time() -> None:
    hour = Trace.open(HOURS[1])
    given, made = hour.lengths(ServingProfile.builtin())
    long = np.arange(len(hour)) % 50 == 0
    given = np.where(long, 200_000, given).astype(np.int32)
    trace = replace(hour, input_tokens=given, known=classify_all(given, made))
    result = simulate(ServingProfile.builtin(), trace)
    assert result.hopeless == long.sum()
    assert result.attainment * len(hour) >= 0.999 * (len(hour) - long.sum())
    assert result.gpus_most <= 100


def test_a_policy_whose_fleet_is_too_large_is_left_out_where_that_is_asked_for() -> None:
    trace, few = Trace.open(HOURS[0]), Settings(gpus=60)
    told: list[str] = []
    names = ("SinglePool", "static")
    (only,) = compare_policies(
        ServingProfile.builtin(), trace, few, policies=names, left_out=told.append
    )
    assert only.policy == "static"
    assert [line.split()[:2] for line in told] == [["SinglePool", "needs"]]
    with pytest.raises(NoAnswerError, match="SinglePool needs"):
        compare_policies(ServingProfile.builtin(), trace, few, policies=names)
