"""The figures of a simulation as people read them, in tables and on pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from envplan.serving.simulation import Simulation
from envplan.units import J_PER_KWH


@dataclass(frozen=True)
class Metric:
    """One figure of a simulation.

    Attributes:
        name: with its unit, as a header.
        text: the figure of a simulation.
        compared: whether it stands in the table that compares policies.
    """

    name: str
    text: Callable[[Simulation], str]
    compared: bool = True


def kwh(joules: float) -> str:
    """An energy in kWh, to a tenth, or to three digits where there is little."""
    energy = joules / J_PER_KWH
    return f"{energy:,.1f}" if energy >= 10 else f"{energy:.3g}"


#: All figures, in the order in which they are shown.
METRICS: Final = (
    Metric("energy (kWh)", lambda result: kwh(result.energy_j)),
    Metric("requests", lambda result: f"{result.requests:,}", compared=False),
    Metric("SLOs met (%)", lambda result: f"{100 * result.slo_attainment:.3f}"),
    Metric(
        "first token in time (%)",
        lambda result: f"{100 * result.first_tokens_in_time:.3f}",
        compared=False,
    ),
    Metric(
        "further tokens in time (%)",
        lambda result: f"{100 * result.further_tokens_in_time:.3f}",
        compared=False,
    ),
    Metric("first token, p50, p90, p99 (s)", lambda result: str(result.ttft_s), compared=False),
    Metric("between tokens, p50, p90, p99 (s)", lambda result: str(result.tbt_s), compared=False),
    Metric("GPUs, mean", lambda result: f"{result.gpus_mean:,.1f}"),
    Metric("GPUs, most", lambda result: f"{result.gpus_most:,.0f}"),
    Metric("GPU hours", lambda result: f"{result.gpu_hours:,.1f}"),
    Metric("started", lambda result: f"{result.instances_started:,}"),
    Metric("re-sharded", lambda result: f"{result.instances_resharded:,}"),
    Metric("clock changes", lambda result: f"{result.clock_changes:,}"),
    Metric(
        "requests that another pool took",
        lambda result: f"{result.requests_helped:,}",
        compared=False,
    ),
    Metric("requests given up", lambda result: f"{result.requests_squashed:,}", compared=False),
    Metric(
        "requests longer than the memory",
        lambda result: f"{result.requests_unservable:,}",
        compared=False,
    ),
    Metric(
        "requests longer than the model takes",
        lambda result: f"{result.requests_too_long:,}",
        compared=False,
    ),
    Metric("requests begun again", lambda result: f"{result.preemptions:,}", compared=False),
)
#: Those that compare policies.
COMPARED: Final = tuple(metric for metric in METRICS if metric.compared)


def saved_percent_text(simulation: Simulation, base: Simulation) -> str:
    """Energy saved against another simulation, in percent; "-" where that used none."""
    percent = simulation.saved_percent(base)
    return "-" if percent is None else f"{percent:.1f}"
