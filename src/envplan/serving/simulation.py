"""Results of a policy's replay: energy, attainment, changes of the fleet, and series over time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, Self

import numpy as np
from pydantic import JsonValue

from envplan.costs.model import Overheads
from envplan.costs.rates import Rate
from envplan.serving.classes import FloatArray
from envplan.serving.fleet_controller import TimeCounts
from envplan.serving.trace import SLOT_S
from envplan.units import J_PER_KWH

if TYPE_CHECKING:
    from pandas import DataFrame

_HOUR_S: Final = 3600.0

#: Names of a simulation's figures, as its attributes and in JSON.
FIGURES: Final = (
    "policy",
    "fleet",
    "energy_j",
    "requests",
    "slo_attainment",
    "slo_attainment_by_class",
    "first_tokens_in_time",
    "further_tokens_in_time",
    "instances_started",
    "instances_resharded",
    "weights_moved_copies",
    "clock_changes",
    "requests_helped",
    "requests_squashed",
    "requests_hopeless",
    "requests_too_long",
    "requests_unservable",
    "preemptions",
    "gpus_mean",
    "gpus_most",
    "gpu_hours",
    "gpus_wanted",
    "ttft_s",
    "tbt_s",
)


class TimeQuantiles(NamedTuple):
    """Times that half of all requests, nine in ten, and 99 in a hundred do not exceed, s.

    They are rounded up by 1% at most, and infinite where too many requests never got there.
    """

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, times: TimeCounts) -> Self:
        """The quantiles of counted times."""
        return cls(*(times.quantile_s(share) for share in (0.5, 0.9, 0.99)))

    def to_dict(self) -> dict[str, JsonValue]:
        """The same in JSON types; None for what is infinite."""
        return {
            name: time_s if math.isfinite(time_s) else None
            for name, time_s in self._asdict().items()
        }

    def __str__(self) -> str:
        return ", ".join(f"{time_s:.3g}" for time_s in self)


@dataclass(frozen=True, eq=False)
class TimeSeries:
    """Quantities over time: a value for each slot of a minute, (n,) each.

    Attributes:
        time_s: the slot's begin.
        power_w: mean power of the fleet.
        load_tokens_s: load that arrives.
        gpus: in use at its end, starting and leaving ones too.
        requests: that arrive.
        attained: how many of these meet their SLOs.
    """

    time_s: FloatArray
    power_w: FloatArray
    load_tokens_s: FloatArray
    gpus: FloatArray
    requests: FloatArray
    attained: FloatArray

    def __len__(self) -> int:
        return len(self.time_s)

    @property
    def end_s(self) -> float:
        """The end of the last slot."""
        return float(self.time_s[-1]) + SLOT_S

    def to_frame(self) -> DataFrame:
        """A row for each slot, a column for each quantity."""
        from pandas import DataFrame

        return DataFrame(vars(self))


@dataclass(frozen=True, eq=False, kw_only=True)
class Simulation:
    """Results of a policy on a trace.

    Attributes:
        policy: its name.
        energy_j: of all GPUs in use; GPUs without an instance are given back and draw nothing.
        requests: that arrived.
        slo_attainment: share of them that met their SLOs, TTFT and TBT.
        slo_attainment_by_class: the same of each class that came.
        first_tokens_in_time: share of requests whose first token was in time.
        further_tokens_in_time: share of requests whose further tokens were in time.
        instances_started: without those that were there at the beginning.
        instances_resharded: instances made of other instances' GPUs.
        weights_moved_copies: weights sent from GPU to GPU to re-shard instances, in whole copies of
            the model.
        clock_changes: of instances.
        requests_helped: requests that another pool took because they would have been late in their
            own.
        requests_squashed: requests given up because they waited too long; their SLOs are missed.
        requests_hopeless: requests that no instance could answer in time, whose prompts alone take
            longer than their SLOs; they are missed.
        requests_too_long: requests longer than the model takes; they are not among `requests`.
        requests_unservable: requests longer than the memory of the instances that they came to;
            their SLOs are missed.
        preemptions: how often contexts outgrew an instance's memory, so that a request lost its
            place and began again.
        series: over time.
        gpus_wanted: GPUs that the policy would have had at most, where there were too few;
            otherwise 0.
        ttft_s: times to the first token.
        tbt_s: mean times between the further tokens of a request.
        fleet: the fleet in words, if it never changes.
    """

    policy: str
    energy_j: float
    requests: int
    slo_attainment: float
    slo_attainment_by_class: Mapping[str, float]
    first_tokens_in_time: float
    further_tokens_in_time: float
    instances_started: int
    instances_resharded: int
    weights_moved_copies: float
    clock_changes: int
    requests_helped: int
    requests_squashed: int
    requests_hopeless: int
    requests_too_long: int
    requests_unservable: int
    preemptions: int
    series: TimeSeries
    gpus_wanted: int = 0
    ttft_s: TimeQuantiles
    tbt_s: TimeQuantiles
    fleet: str | None = None

    @property
    def gpus_mean(self) -> float:
        """GPUs in use, on average."""
        return float(self.series.gpus.mean())

    @property
    def gpus_most(self) -> float:
        """GPUs in use, at most."""
        return float(self.series.gpus.max())

    @property
    def gpu_hours(self) -> float:
        """Hours of GPUs in use, all together."""
        return float(self.series.gpus.sum()) * SLOT_S / _HOUR_S

    @property
    def duration_s(self) -> float:
        """From the first slot to the end of the last."""
        return SLOT_S * len(self.series)

    def to_dict(self) -> dict[str, JsonValue]:
        """The results in JSON types, but for the series; the keys are FIGURES."""
        figures = {name: getattr(self, name) for name in FIGURES}
        return figures | {"ttft_s": self.ttft_s.to_dict(), "tbt_s": self.tbt_s.to_dict()}

    def to_frame(self) -> DataFrame:
        """The series: a row for each slot, a column for each quantity."""
        return self.series.to_frame()

    def saved_percent(self, baseline: Simulation) -> float | None:
        """Energy saved against another simulation, of its energy; None where that used none."""
        if not baseline.energy_j:
            return None
        return 100 * (1 - self.energy_j / baseline.energy_j)

    def cost_at(self, rate: Rate, overheads: Overheads | None = None) -> float:
        """Cost of the energy at a rate per kWh, in money or gCO2.

        Args:
            rate: over time.
            overheads: PUE and hosts that draw, too; default: none.
        """
        overheads = overheads or Overheads()
        slot_edges_s = [*self.series.time_s, self.series.end_s]
        rate_integrals = [rate.integral(float(time_s)) for time_s in slot_edges_s]
        hosts_w = overheads.host_power * self.series.gpus
        power_w = overheads.pue * (self.series.power_w + hosts_w)
        return float(np.dot(np.diff(rate_integrals), power_w)) / J_PER_KWH
