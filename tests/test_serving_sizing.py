"""Fleets have as many instances as their requests need when they are replayed, and not more."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envplan.serving.classes import CLASSES, DEFAULT_CLASSES
from envplan.serving.fleet import PoolSpec
from envplan.serving.forecast import DemandForecast, ScaledWindow
from envplan.serving.observed_trace import ObservedTrace
from envplan.serving.profile import ServingProfile
from envplan.serving.replay import simulate
from envplan.serving.replayed_sizing import pool_trials, right_sized
from envplan.serving.settings import Settings
from envplan.serving.trace import Trace

PROFILE = ServingProfile.builtin()
TALK = Trace.open("azure-2023-conversation")


def with_inputs(trace: Trace, is_changed: np.ndarray, tokens: int) -> Trace:
    """The trace with inputs of some requests replaced."""
    inputs, outputs = trace.lengths(PROFILE)
    inputs = np.where(is_changed, tokens, inputs).astype(np.int32)
    return replace(
        trace, input_tokens=inputs, class_index=DEFAULT_CLASSES.classify(inputs, outputs)
    )


def some(trace: Trace, share: float) -> np.ndarray:
    return np.random.default_rng(0).random(len(trace)) < share


def test_few_prompts_that_take_nearly_as_long_as_they_may_do_not_multiply_the_fleet() -> None:
    result = simulate(PROFILE, with_inputs(TALK, some(TALK, 0.01), 16_000))
    assert result.gpus_most <= 20
    assert result.slo_attainment > 0.999


def test_one_request_that_nothing_can_answer_takes_one_instance_and_no_more() -> None:
    usual = simulate(PROFILE, TALK)
    is_endless = np.arange(len(TALK)) == len(TALK) // 2
    result = simulate(PROFILE, with_inputs(TALK, is_endless, 999_999))
    assert result.gpus_most <= usual.gpus_most + 4
    assert result.slo_attainment > 0.9999


def test_a_fleet_that_wants_more_gpus_than_there_are_does_what_it_can() -> None:
    result = simulate(PROFILE, TALK, settings=Settings(max_gpus=8))
    assert (result.gpus_wanted, result.gpus_most) == (12, 8)
    assert result.slo_attainment > 0.9995
    code = Trace.open("azure-2023-code")
    pools = simulate(PROFILE, code, "DynamoLLM", Settings(max_gpus=40))
    assert pools.gpus_most <= 40 < pools.gpus_wanted


@pytest.mark.parametrize("past_s", [0.0, 900.0])
def test_an_emergency_counts_work_and_not_requests(past_s: float) -> None:
    """Prompts of 6,000 tokens come, a quarter fewer than the short ones before."""
    surprise_s = 1500.0
    is_late = TALK.arrival_s >= surprise_s
    rarer = TALK.part(~is_late | some(TALK, 0.75))
    trace = with_inputs(rarer, rarer.arrival_s >= surprise_s, 6000)
    calm = simulate(PROFILE, rarer.before(surprise_s), settings=Settings(past_s=past_s))
    if past_s == 0:  # sized with hindsight
        assert simulate(PROFILE, trace).slo_attainment > 0.999
        return
    series = simulate(PROFILE, trace, settings=Settings(past_s=past_s)).series
    is_soon = (series.time_s >= surprise_s + 120) & (series.time_s < surprise_s + 300)
    assert series.gpus[is_soon].max() > calm.gpus_most
    has_grown = series.time_s >= surprise_s + 900
    assert series.attained[has_grown].sum() > 0.99 * series.requests[has_grown].sum()


@settings(max_examples=6, deadline=None)
@given(
    begin_s=st.floats(0, 3000),
    factor=st.floats(1.0, 2.0),
    quantile=st.sampled_from([90.0, 99.0, 99.9]),
    tp=st.sampled_from([2, 4, 8]),
    too_many=st.integers(0, 9),
)
def test_one_instance_fewer_would_not_do(
    begin_s: float, factor: float, quantile: float, tp: int, too_many: int
) -> None:
    """However much too high the estimate was: the oracle counts up from a single instance."""
    observed = ObservedTrace(TALK, PROFILE, TALK.class_index)
    window = ScaledWindow(begin_s, begin_s + 240, factor)
    forecast = DemandForecast(observed, Settings(slo_quantile_percent=quantile), [window])
    clock_mhz = observed.max_clock_mhz(tp)
    pool = PoolSpec("LL", frozenset(CLASSES), tp, clock_mhz, num_instances=1)
    (trial,) = pool_trials(forecast, pool)

    def late_requests(num_instances: int) -> int:
        return trial.late_requests(replace(pool, num_instances=num_instances))

    fewest = 1
    while late_requests(fewest) > trial.allowed_late and fewest < 20:
        fewest += 1
    if fewest < 20:
        estimated = replace(pool, num_instances=fewest + too_many)
        assert right_sized(forecast, estimated).num_instances == fewest
