"""Policies on real traffic: SLOs kept request by request, fleets that grow before they must."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import combinations, product
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envplan.costs.rates import Rate
from envplan.errors import InputError, NoAnswerError
from envplan.serving.classes import CLASSES, DEFAULT_CLASSES
from envplan.serving.fleet import Fleet, PoolSpec
from envplan.serving.fleet_controller import FleetController
from envplan.serving.forecast import DemandForecast, ScaledWindow, expected_windows
from envplan.serving.observed_trace import ObservedTrace, observe_trace, predict_classes
from envplan.serving.policies import POLICIES, Situation
from envplan.serving.pool_assignment import least_power
from envplan.serving.power_model import pool_power_w
from envplan.serving.profile import ServingProfile
from envplan.serving.replay import compare_policies, simulate
from envplan.serving.settings import STARTUP_STEPS_S, Settings
from envplan.serving.trace import Trace, make_week
from serving_helpers import write_profile

CODE, TALK = "azure-2023-code", "azure-2023-conversation"
PROFILE = ServingProfile.builtin()
MAIN = ("SinglePool", "DynamoLLM", "envplan")
SCALING = [name for name, policy in POLICIES.items() if policy.autoscales]


def observed(trace: Trace) -> ObservedTrace:
    return ObservedTrace(trace, PROFILE, trace.class_index)


def large_batches() -> Trace:
    """Short inputs, long outputs, at twenty times the rate: prompts share their iterations."""
    calm = Trace.open(TALK)
    calm = calm.part(calm.arrival_s < 300)
    inputs, outputs = calm.lengths(PROFILE)
    inputs, outputs = np.maximum(1, inputs // 4), 2 * outputs
    classes = DEFAULT_CLASSES.classify(inputs, outputs)
    trace = replace(
        calm, input_tokens=inputs, output_tokens=outputs, class_index=classes, covered_s=300.0
    )
    return trace.scaled(20)


def one_request() -> Trace:
    code = Trace.open(CODE)
    return replace(code.part(np.array([3])), arrival_s=np.zeros(1), covered_s=None)


@pytest.mark.parametrize(
    ("trace", "settings", "policies"),
    [
        (partial(Trace.open, TALK), Settings(mispredicted_percent=50.0), ["MultiPool"]),
        *((partial(Trace.open, hour), Settings(), list(POLICIES)) for hour in (CODE, TALK)),
        *((partial(Trace.open, hour), Settings(past_s=900.0), SCALING)
          for hour in (CODE, TALK)),
        *((lambda factor=factor: Trace.open(CODE).scaled(factor, 1), Settings(), MAIN)
          for factor in (0.3, 2.0)),
        (large_batches, Settings(), MAIN),
        (one_request, Settings(), list(POLICIES)),
    ],
)  # fmt: skip
def test_every_policy_keeps_the_slos(
    trace: Callable[[], Trace], settings: Settings, policies: Sequence[str]
) -> None:
    """Of real hours, with hindsight and without, at other loads; of one request alone."""
    known, past = trace(), settings.past_s
    results = compare_policies(PROFILE, known, settings, policies=policies)
    for result in results:
        assert result.requests == (known.arrival_s >= past).sum() == result.series.requests.sum()
        assert (result.series.time_s[0], result.duration_s) == (past, known.duration_s - past)
        assert result.slo_attainment >= 0.999, result.policy
    if len(results) == len(POLICIES) and len(known) > 1:
        assert results[0].saved_percent(results[0]) == 0
        assert (results[-1].saved_percent(results[0]) or 0) > 30


@pytest.mark.parametrize("policy", POLICIES)
def test_with_a_past_nothing_knows_what_is_still_to_come(policy: str) -> None:
    """What is done in the first minutes is the same whether or not anything follows them."""
    trace, until = Trace.open(CODE), 2400.0
    settings = Settings(past_s=900.0, mispredicted_percent=0.0)
    whole = simulate(PROFILE, trace, policy, settings)
    begun = trace.before(until)
    cut = simulate(PROFILE, begun, policy, settings)
    slots = round((until - settings.past_s) / 60)
    assert cut.series.gpus[:slots].tolist() == whole.series.gpus[:slots].tolist()
    assert cut.series.power_w[:slots] == pytest.approx(whole.series.power_w[:slots], rel=1e-9)


def test_what_cannot_be_replayed_is_told() -> None:
    trace = Trace.open(CODE)
    late, strict = trace.part(trace.arrival_s > 1800), PROFILE.with_slos({}, 0.01)
    for profile, known, how, kind, words in (
        (PROFILE, trace, Settings(past_s=3600.0), InputError, "after a past of 3600 s"),
        (PROFILE, late, Settings(past_s=600.0), InputError, "in a past"),
        (PROFILE, trace, Settings(max_gpus=1), NoAnswerError, r"envplan needs \d+ GPUs"),
        (strict, trace, Settings(), NoAnswerError, "gives SS its tokens 0.001 s apart; the best"),
    ):
        with pytest.raises(kind, match=words):
            simulate(profile, known, "envplan", how)


def test_a_scaling_fleet_follows_a_real_shaped_morning() -> None:
    day = make_week("coding-week", days=0.25).scaled(0.25)
    single, ours = compare_policies(PROFILE, day, policies=("SinglePool", "envplan"))
    assert ours.slo_attainment >= 0.998
    assert ours.energy_j < 0.7 * single.energy_j
    assert ours.series.gpus.min() < ours.series.gpus.max()


def test_what_is_expected_is_the_last_hour_and_the_same_hours_of_other_days() -> None:
    arrival = np.arange(0.0, 9 * 86_400.0, 60.0)
    ones = np.ones(len(arrival), dtype=np.int32)
    trace = observed(Trace("even", arrival, ones, ones, np.zeros(len(arrival), dtype=np.uint8)))
    now, ahead = 8 * 86_400.0, 1800.0
    last, day, week = expected_windows(trace, now, ahead)
    assert last[:2] == (now - 3600, now)
    assert day == ScaledWindow(now - 86_400, now - 86_400 + ahead, 1.0)
    assert week.begin_s == now - 7 * 86_400
    assert len(expected_windows(trace, 7200.0, ahead)) == 1


def test_lengths_are_those_of_the_past_that_is_not_replayed() -> None:
    """A past is rounded up to whole minutes, wherever it counts."""
    trace = Trace.open(CODE)
    begun, rounded = (
        observe_trace(PROFILE, trace, Settings(past_s=past_s)).profile.classes
        for past_s in (550.0, 600.0)
    )
    assert begun == rounded


def test_needs_grow_with_bursts_at_the_same_load() -> None:
    even = np.linspace(0, 600, 1200)
    ones = np.full(1200, 1000, dtype=np.int32)
    known = np.full(1200, 4, dtype=np.uint8)
    traces = [Trace("a", at, ones, ones // 10, known) for at in (even, np.sort(even // 60 * 60))]
    calm, bursty = (observed(trace).demand(0, 600, ["MM"], 8, 0.001) for trace in traces)
    assert calm.busy_instances == pytest.approx(bursty.busy_instances)
    assert bursty.instances > 3 * calm.instances


def test_pools_are_compared_by_the_same_work() -> None:
    """However classes are sorted into pools, their work adds up to the same."""
    windows = [
        ScaledWindow(0.0, 1800.0),
        ScaledWindow(1800.0, 2400.0, 1.25),
        ScaledWindow(2400.0, 3400.0),
    ]
    forecast = DemandForecast(observed(Trace.open(TALK)), Settings(), windows)
    for tp in forecast.observed.tps:
        together = forecast.demand(forecast.classes, tp)
        apart = [forecast.demand([name], tp) for name in forecast.classes]
        busy = sum(demand.busy_instances for demand in apart)
        decoding = sum(demand.decoding_requests for demand in apart)
        assert busy == pytest.approx(together.busy_instances)
        assert decoding == pytest.approx(together.decoding_requests)


def gone_over(gpus: int, before: int, at: float, after: int) -> tuple[FleetController, list[int]]:
    """From so many instances on TP8 to so many on TP4; GPUs in use at the end of each minute."""
    controller = FleetController(observed(Trace.open(TALK)), Settings(max_gpus=gpus))
    used = []
    for tp, count, now in ((8, before, 0.0), (4, after, at)):
        fleet = Fleet({"LL": PoolSpec("LL", frozenset(CLASSES), tp, 1980, count)})
        controller.advance(now)
        controller.reconcile(fleet, now, prewarmed=now == 0)
    for minute in range(1, 21):
        controller.advance(at + 60.0 * minute)
        used.append(controller.gpus_in_use())
    return controller, used


def test_a_change_never_takes_away_what_serves_and_goes_part_after_part() -> None:
    controller, used = gone_over(64, 2, 600.0, 3)
    assert used[0] == 20  # there are 4 GPUs more than enough, 4 more are started beforehand
    assert used[-1] == min(used) == 12
    assert (controller.started, controller.resharded, controller.copies_moved) == (1, 2, 1.0)
    controller, used = gone_over(1024, 16, 60.0, 32)
    assert max(used) <= 160  # an eighth is started beforehand; what leaves finishes what it has
    assert used[-1] == 128
    assert (controller.started, controller.resharded) == (4, 28)
    controller, used = gone_over(16, 2, 600.0, 4)
    assert used[-1] == 16
    assert (controller.started, controller.resharded) == (0, 4)


def test_overheads_are_the_published_ones() -> None:
    assert (Settings().startup_s, Settings().reshard_s) == (423.0, 33.0)
    for ready, start in (("vm", 333.0), ("weights", 243.0), ("snapshot", 285.0)):
        assert Settings(ready=(ready,)).startup_s == start
    assert Settings(ready=tuple(STARTUP_STEPS_S)).startup_s == 15.0


def test_no_split_of_classes_over_pools_draws_less_than_the_exact_one() -> None:
    forecast = DemandForecast(
        observed(Trace.open(CODE)), Settings(), [ScaledWindow(0.0, 1200.0, 1.0)]
    )
    assert len(forecast.classes) > 3
    drawn = {
        (tp, classes): pool_power_w(
            forecast, classes, tp, forecast.instances_needed(classes, tp), consolidates=True
        )
        for size in range(1, len(forecast.classes) + 1)
        for classes in combinations(forecast.classes, size)
        for tp in forecast.feasible_tps(classes)
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

    assert least_power(forecast).power_w == pytest.approx(best(tuple(forecast.classes)))


@pytest.mark.parametrize("pools", [1, 3, 9])
def test_dynamo_llm_has_no_more_pools_than_it_may(pools: int) -> None:
    forecast = DemandForecast(
        observed(Trace.open(CODE)), Settings(max_pools=pools), [ScaledWindow(0.0, 3480.0, 1.0)]
    )
    fleet = POLICIES["DynamoLLM"].plan(Situation(forecast))
    assert len(fleet.pools) <= pools
    assert set(fleet.routes) == set(forecast.classes)


@pytest.mark.parametrize(("under", "longer"), [(100.0, False), (0.0, True)])
def test_outputs_are_predicted_as_wrongly_as_is_asked_for(under: float, longer: bool) -> None:
    trace = Trace.open(TALK)
    predicted = predict_classes(
        trace, Settings(mispredicted_percent=30.0, underestimated_percent=under)
    )
    wrong = predicted != trace.class_index
    assert np.all((predicted > trace.class_index)[wrong] == longer)
    can_be_wrong = trace.class_index % 3 != (2 if longer else 0)
    assert wrong.sum() / can_be_wrong.sum() == pytest.approx(0.3, abs=0.02)
    assert np.array_equal(predicted // 3, trace.class_index // 3)


def test_one_pool_needs_no_predictor() -> None:
    right, wrong = (
        simulate(PROFILE, Trace.open(TALK), "envplan", Settings(mispredicted_percent=share))
        for share in (0.0, 50.0)
    )
    assert right.energy_j == pytest.approx(wrong.energy_j, rel=0.02)
    half = Rate(begins_s=[0.0, 1740.0], per_kwh=[1.0, 0.0], end_s=3600.0)
    first = right.series.power_w[:29].sum() * 60 / 3.6e6
    assert right.cost_at(half) == pytest.approx(first)


def test_a_fleet_is_sized_for_the_requests_that_it_can_answer_in_time() -> None:
    hour = Trace.open(TALK)
    inputs, outputs = hour.lengths(PROFILE)
    long = np.arange(len(hour)) % 50 == 0
    inputs = np.where(long, 200_000, inputs).astype(np.int32)
    trace = replace(
        hour, input_tokens=inputs, class_index=DEFAULT_CLASSES.classify(inputs, outputs)
    )
    result = simulate(PROFILE, trace)
    assert result.requests_hopeless == long.sum()
    assert result.slo_attainment * len(hour) >= 0.999 * (len(hour) - long.sum())
    assert result.gpus_most <= 100


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
    class_index = data.draw(st.integers(0, len(CLASSES) - 1))
    arrival = np.concatenate([60.0 * k + np.linspace(0, 59, n) for k, n in enumerate(counts)])
    trace = Trace("any", arrival, None, None, np.full(len(arrival), class_index, dtype=np.uint8))
    policy = data.draw(st.sampled_from(list(POLICIES)))
    for curve in profile.curves.values():
        assert min(map(np.min, map(np.diff, (curve.ttft_s, curve.tbt_s)))) >= 0
    try:
        result = simulate(profile, trace, policy, Settings(max_gpus=256, epoch_s=600.0))
    except NoAnswerError:
        return
    assert result.requests == len(trace)
    assert 0 <= result.slo_attainment <= 1
    assert result.energy_j >= 0
