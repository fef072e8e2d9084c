"""Power of a pool of instances under an expected demand, for the choice between pools."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np

from envplan.serving.forecast import DemandForecast
from envplan.serving.observed_trace import ObservedTrace
from envplan.serving.performance import Configuration

#: Requests that decode together where instances are filled up one after another.
_CONSOLIDATED_BATCH: Final = 16.0
#: Share of the idle power that slower decoding does not add: the instance would idle otherwise.
_IDLE_SHARE: Final = 0.5


def pool_power_w(
    forecast: DemandForecast,
    classes: Iterable[str],
    tp: int,
    num_instances: int,
    *,
    consolidates: bool,
) -> float:
    """About what a pool's instances draw at their highest clock: idle, prompts, decoding on top.

    Args:
        forecast: what is expected.
        classes: that the pool serves.
        tp: GPUs of an instance.
        num_instances: how many.
        consolidates: one instance is filled after another.
    """
    demand = forecast.demand(classes, tp)
    performance = forecast.observed.fastest(tp)
    num_decoding = _decoding_instances(demand.decoding_requests, num_instances, consolidates)
    median_prompt_w = float(performance.prompt_w[len(performance.prompt_w) // 2])
    prompt_extra_w = median_prompt_w - performance.idle_w
    step_extra_w = float(performance.step_w[0]) - performance.idle_w
    num_only_decoding = max(0.0, num_decoding - demand.busy_instances)
    return float(
        num_instances * performance.idle_w
        + demand.busy_instances * prompt_extra_w
        + num_only_decoding * step_extra_w
    )


def _decoding_instances(decoding_requests: float, num_instances: int, consolidates: bool) -> float:
    """Instances that have a request to decode, on average; Poisson numbers of requests."""
    if consolidates:
        filled = decoding_requests / _CONSOLIDATED_BATCH
        return max(filled, float(1 - np.exp(-decoding_requests)))
    return float(num_instances * (1 - np.exp(-decoding_requests / num_instances)))


def most_efficient_decode_clock(observed: ObservedTrace, tp: int) -> int:
    """The clock at which a decode step of one request takes the least energy, MHz.

    Half the idle power is not counted: a faster step leaves an instance that idles.
    """

    def energy_j(clock_mhz: int) -> float:
        performance = observed.profile.performance[Configuration(tp, clock_mhz)]
        extra_w = performance.step_w[0] - _IDLE_SHARE * performance.idle_w
        return float(extra_w * performance.step_s[0])

    return min(observed.clocks_mhz[tp], key=energy_j)
