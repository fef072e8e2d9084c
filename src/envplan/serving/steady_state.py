"""An instance under a steady load of one class: a queueing model, for the planners.

At r requests per second, prompts take r times their work of the instance's time; the rest is decode
steps. A decoding request gets a token with each iteration of either kind, so that, by Little's law,
r (output - 1) tokens per second need a batch of so many requests; that gives the iteration rate.
Each of them has its input and half of its output as context, whose reading makes steps longer.
TTFT is the prompt's own time, half a decode step, and the 99th percentile of the wait in a queue
with Poisson arrivals and constant service (M/D/1). An instance without decoding requests is idle,
for Poisson numbers of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from envplan.serving.classes import FloatArray, RequestClass, Slo
from envplan.serving.performance import Configuration, InstancePerformance

_NUM_RATES: Final = 200  # arrival rates at which the model is solved
_MAX_UTILIZATION: Final = 0.9  # share of an instance's time that prompts may take
_UTILIZATION_LIMIT: Final = 0.999  # keeps the fixed point finite beyond that share
_BATCH_LIMIT: Final = 1e6  # the same for the batch
_FIXED_POINT_ROUNDS: Final = 30
_DAMPING: Final = 0.5
_P99_WAIT_IN_MEANS: Final = float(np.log(100.0))  # waits are exponential
#: Points of a load curve, as shares of the highest load that any clock of a TP carries.
_LOAD_SHARES: Final = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)
_JUST_BELOW: Final = 1 - 1e-9  # of a curve's highest load: nearer points are the same one
_SLO_ROUNDING: Final = 1 + 1e-9  # of an SLO, at the load that just meets it


@dataclass(frozen=True, eq=False)
class SteadyState:
    """Loads of one class that an instance can carry for ever, and what it does at each, (n,).

    Attributes:
        load_tokens_s: ascending from 0.
        power_w: of the instance.
        ttft_s: time to first token, 99th percentile.
        tbt_s: time between tokens.
    """

    load_tokens_s: FloatArray
    power_w: FloatArray
    ttft_s: FloatArray
    tbt_s: FloatArray


class _DecodeBatch(NamedTuple):
    """Solution of the fixed point between batch and iteration rate, at each arrival rate.

    Attributes:
        utilization: share of time that prompts take.
        iterations_s: iterations per second, of either kind.
        batch_size: requests that decode, on average.
    """

    utilization: FloatArray
    iterations_s: FloatArray
    batch_size: FloatArray


def steady_state(performance: InstancePerformance, request: RequestClass) -> SteadyState | None:
    """Power and latencies of an instance over its load; None if a request exceeds its memory."""
    prompt_s = float(performance.chunked_prompt_s_at(request.input_tokens))
    rates = np.linspace(0.0, _MAX_UTILIZATION / prompt_s, _NUM_RATES)
    decode = _decode_batch_fixed_point(performance, request, rates)
    num_stable = _num_stable_rates(performance, request, decode)
    if num_stable < 2:
        return None
    stable = slice(0, num_stable)
    return SteadyState(
        load_tokens_s=rates[stable] * request.tokens,
        power_w=_mean_power(performance, request, decode)[stable],
        ttft_s=_p99_ttft(performance, request, decode)[stable],
        tbt_s=1 / decode.iterations_s[stable],
    )


def _decode_batch_fixed_point(
    performance: InstancePerformance, request: RequestClass, rates: FloatArray
) -> _DecodeBatch:
    """Solve the model at each arrival rate, by damped iteration from an empty batch."""
    prompt_s = float(performance.chunked_prompt_s_at(request.input_tokens))
    chunks = max(1.0, request.input_tokens / performance.chunk_tokens)
    decode_steps = max(0.0, request.output_tokens - 1)  # the prompt gives the first token
    batch_size = np.zeros_like(rates)
    for _ in range(_FIXED_POINT_ROUNDS):
        step_s = _step_s(performance, request, batch_size)
        batch_extra_s = np.maximum(0.0, step_s - performance.step_s[0])
        utilization = np.minimum(rates * (prompt_s + chunks * batch_extra_s), _UTILIZATION_LIMIT)
        prompt_iteration_s = prompt_s / chunks + batch_extra_s
        iterations_s = (1 - utilization) / step_s + utilization / prompt_iteration_s
        by_littles_law = np.minimum(rates * decode_steps / iterations_s, _BATCH_LIMIT)
        batch_size = _DAMPING * (batch_size + by_littles_law)
    return _DecodeBatch(utilization, iterations_s, batch_size)


def _mean_context(request: RequestClass, batch_size: FloatArray) -> FloatArray:
    """Tokens of context of a batch: each request's input and, on average, half its output."""
    return batch_size * (request.input_tokens + request.output_tokens / 2)


def _step_s(
    performance: InstancePerformance, request: RequestClass, batch_size: FloatArray
) -> FloatArray:
    """Time of a decode step with so many requests of mean contexts, s."""
    context_s = performance.context_s_at(_mean_context(request, batch_size))
    return performance.step_s_at(batch_size) + context_s


def _num_stable_rates(
    performance: InstancePerformance, request: RequestClass, decode: _DecodeBatch
) -> int:
    """How many rates, from 0 up without a gap, leave room for prompts and memory for the batch."""
    max_batch = min(performance.max_batch, performance.kv_tokens / max(request.tokens, 1.0))
    is_stable = (decode.utilization <= _MAX_UTILIZATION) & (decode.batch_size <= max_batch)
    unstable = np.flatnonzero(~is_stable)  # never rate 0: nothing comes then
    return int(unstable[0]) if len(unstable) else len(is_stable)


def _p99_ttft(
    performance: InstancePerformance, request: RequestClass, decode: _DecodeBatch
) -> FloatArray:
    """The 99th percentile of the time to first token, s, from the M/D/1 queue's mean wait."""
    prompt_s = float(performance.chunked_prompt_s_at(request.input_tokens))
    utilization = decode.utilization
    wait_s = _P99_WAIT_IN_MEANS * utilization * prompt_s / (2 * (1 - utilization))
    is_decoding = 1 - np.exp(-decode.batch_size)
    half_step_s = 0.5 * is_decoding * _step_s(performance, request, decode.batch_size)
    ttft_s: FloatArray = prompt_s + wait_s + half_step_s
    return ttft_s


def _mean_power(
    performance: InstancePerformance, request: RequestClass, decode: _DecodeBatch
) -> FloatArray:
    """Mean power, W, at each arrival rate; an iteration draws what its more thirsty part does."""
    utilization = decode.utilization
    is_decoding = 1 - np.exp(-decode.batch_size)  # the probability, for Poisson numbers
    prompt_w = float(performance.prompt_w_at(request.input_tokens))
    context_tokens = _mean_context(request, decode.batch_size)
    decode_w = is_decoding * performance.step_power_beside(decode.batch_size, context_tokens)
    without_prompts_w = decode_w + (1 - is_decoding) * performance.idle_w
    power_w: FloatArray = (
        utilization * np.maximum(prompt_w, decode_w) + (1 - utilization) * without_prompts_w
    )
    return power_w


class Segment(NamedTuple):
    """A range of load on which an instance's power is a straight line.

    Attributes:
        low_tokens_s: where it begins.
        high_tokens_s: where it ends.
        power_low_w: power at its begin.
        power_high_w: power at its end.
    """

    low_tokens_s: float
    high_tokens_s: float
    power_low_w: float
    power_high_w: float

    @property
    def slope_j(self) -> float:
        """Energy of one further token, J."""
        return (self.power_high_w - self.power_low_w) / (self.high_tokens_s - self.low_tokens_s)


class Latencies(NamedTuple):
    """Times to the first token and between tokens, s."""

    ttft_s: float
    tbt_s: float


class CurveKey(NamedTuple):
    """The class and the configuration that a load curve is about."""

    request_class: str
    tp: int
    frequency_mhz: int


@dataclass(frozen=True, eq=False)
class LoadCurve:
    """An instance under steady loads of one class; between its points lie straight lines.

    Attributes:
        request_class: the class.
        tp: GPUs of the instance.
        frequency_mhz: SM clock.
        load_tokens_s: ascending from 0, (n,) with n >= 2.
        power_w: power of the instance at these loads, (n,).
        ttft_s: time to first token, (n,); never falls.
        tbt_s: time between tokens, (n,); never falls.
        max_load_by_slo: the highest load at which it meets an SLO, where a replay showed it; for
            other SLOs it follows from ttft_s and tbt_s.
    """

    request_class: str
    tp: int
    frequency_mhz: int
    load_tokens_s: FloatArray
    power_w: FloatArray
    ttft_s: FloatArray
    tbt_s: FloatArray
    max_load_by_slo: Mapping[Slo, float] = field(default_factory=dict)

    @property
    def max_load(self) -> float:
        """The highest load it can carry, tokens/s."""
        return float(self.load_tokens_s[-1])

    def power_at(self, load_tokens_s: float) -> float:
        """Power at a load up to the highest, W."""
        return float(np.interp(load_tokens_s, self.load_tokens_s, self.power_w))

    def latencies_at(self, load_tokens_s: float) -> Latencies:
        """Latencies at a load up to the highest."""
        return Latencies(
            ttft_s=float(np.interp(load_tokens_s, self.load_tokens_s, self.ttft_s)),
            tbt_s=float(np.interp(load_tokens_s, self.load_tokens_s, self.tbt_s)),
        )

    def meets(self, slo: Slo, load_tokens_s: float) -> bool:
        """Whether it carries a load within the SLO."""
        if slo in self.max_load_by_slo:
            return load_tokens_s <= self.max_load_by_slo[slo] * _SLO_ROUNDING
        latencies = self.latencies_at(load_tokens_s)
        return (
            load_tokens_s <= self.max_load
            and latencies.ttft_s <= slo.ttft_s * _SLO_ROUNDING
            and latencies.tbt_s <= slo.tbt_s * _SLO_ROUNDING
        )

    def capacity(self, slo: Slo) -> float:
        """The highest load at which it meets the SLO, tokens/s; 0 if at none."""
        if slo in self.max_load_by_slo:
            return self.max_load_by_slo[slo]
        return min(
            self._max_load_within(self.ttft_s, slo.ttft_s),
            self._max_load_within(self.tbt_s, slo.tbt_s),
        )

    def _max_load_within(self, latency_s: FloatArray, limit_s: float) -> float:
        num_within = int(np.searchsorted(latency_s, limit_s, side="right"))
        if num_within == 0:
            return 0.0
        if num_within == len(latency_s):
            return self.max_load
        crossing = slice(num_within - 1, num_within + 1)
        return float(np.interp(limit_s, latency_s[crossing], self.load_tokens_s[crossing]))

    def segments(self, slo: Slo) -> list[Segment]:
        """All loads at which it meets the SLO, as straight segments in ascending order."""
        capacity = self.capacity(slo)
        bounds = [*self.load_tokens_s[self.load_tokens_s < capacity], capacity]
        return [
            Segment(low, high, self.power_at(low), self.power_at(high))
            for low, high in pairwise(bounds)
        ]


def load_curves(
    performance: Mapping[Configuration, InstancePerformance], classes: Mapping[str, RequestClass]
) -> dict[CurveKey, LoadCurve]:
    """The load curve of every class in every configuration that has memory for its requests.

    Points lie at shares of a load that all clocks of a TP have in common, and at the highest load.
    """
    curves: dict[CurveKey, LoadCurve] = {}
    for name, request in classes.items():
        states: dict[Configuration, SteadyState] = {}
        max_loads: dict[int, float] = {}  # by TP, at any clock
        for configuration, instance in performance.items():
            state = steady_state(instance, request)
            if state is None:
                continue
            states[configuration] = state
            max_load_of_tp = max_loads.get(configuration.tp, 0.0)
            max_load = float(state.load_tokens_s[-1])
            max_loads[configuration.tp] = max(max_load_of_tp, max_load)
        for configuration, state in states.items():
            curve = _load_curve(name, configuration, state, max_loads[configuration.tp])
            curves[CurveKey(name, *configuration)] = curve
    return curves


def _load_curve(
    name: str, configuration: Configuration, state: SteadyState, common_load: float
) -> LoadCurve:
    max_load = state.load_tokens_s[-1]
    common_loads = common_load * np.array(_LOAD_SHARES)
    loads = np.append(common_loads[common_loads < max_load * _JUST_BELOW], max_load)
    ttft_s = np.interp(loads, state.load_tokens_s, state.ttft_s)
    tbt_s = np.interp(loads, state.load_tokens_s, state.tbt_s)
    return LoadCurve(
        request_class=name,
        tp=configuration.tp,
        frequency_mhz=configuration.frequency_mhz,
        load_tokens_s=loads,
        power_w=np.interp(loads, state.load_tokens_s, state.power_w),
        ttft_s=np.maximum.accumulate(ttft_s),  # tables may be noisy
        tbt_s=np.maximum.accumulate(tbt_s),
    )
