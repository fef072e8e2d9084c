"""How a trace is replayed: the fleet, what policies know of the future, how long changes take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from envplan.errors import InputError
from envplan.serving.classes import MAX_CLASSES

#: Steps of an instance's start that can be prepared, and the seconds that each takes: a machine is
#: booted; it fetches the weights; its processes find each other and the engine starts, or both come
#: from a snapshot. (DynamoLLM, section IV; the middle where a range is stated.)
STARTUP_STEPS_S: Final[Mapping[str, float]] = {"vm": 90.0, "weights": 180.0, "snapshot": 138.0}
#: Schedulers of an instance (csrc/serving/scheduler.hpp): the nearest deadline first, or first
#: come, first served.
SCHEDULERS: Final = ("edf", "fcfs")
#: What is expected of an output when its request arrives: the mean of those of its class that have
#: finished, or its true length, with an error.
LENGTH_PREDICTORS: Final = ("past", "true")
#: Fleets that never change, of alike instances that do both phases, and of some for each phase.
TOGETHER: Final = "together"
DISAGGREGATED: Final = "disaggregated"
SPLIT_FLEETS: Final[Mapping[str, str]] = {
    TOGETHER: "the best alike instances at one clock, as many all the time",
    DISAGGREGATED: "the best instances for prompts and others to decode, as many all the time",
}
_ENGINE_START_S: Final = 18.0  # the part of the last step that the engine itself takes
_INSTALL_S: Final = 15.0  # weights and KV cache are put into the GPUs


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a simulation is run.

    Attributes:
        max_gpus: GPUs of the fleet.
        max_pools: pools of policies that sort classes into pools.
        epoch_s: between two looks ahead. In each minute between, it is only checked whether the
            fleet still suffices.
        slo_quantile_percent: share of requests whose SLOs a fleet is sized for.
        headroom_percent: how much a fleet exceeds what is needed.
        squash_s: a request whose first token is so much too late is given up (squashed).
        past_s: so much of the trace, rounded up to minutes, is a past: the first fleet is sized by
            it, and it is not replayed. 0: that fleet is sized by the trace's peak, with hindsight.
        mispredicted_percent: share of requests whose output is predicted one length too short or
            too long; a short one cannot be too short, nor a long one too long.
        underestimated_percent: share of these that are predicted too short.
        seed: of everything that is drawn.
        scheduler: one of SCHEDULERS: which prompt of an instance runs next.
        chunk_tokens: prompt tokens of an iteration; None: as many as the profile says.
        predicted_lengths: one of LENGTH_PREDICTORS: what admission and routing know of outputs.
        length_error_percent: standard deviation of the predictor "true", as a share of the output.
        link_bytes_s: of a GPU's network, over which contexts go from prefill to decode.
        transfer_latency_s: until a context begins to arrive.
        ready: names in STARTUP_STEPS_S of the steps that are prepared before an instance is needed.
        switch_latency_s: from the request of a clock until it is in force.
    """

    max_gpus: int = 1024
    max_pools: int = MAX_CLASSES
    epoch_s: float = 1800.0
    slo_quantile_percent: float = 99.95
    headroom_percent: float = 10.0
    squash_s: float = 60.0
    past_s: float = 0.0
    mispredicted_percent: float = 5.0
    underestimated_percent: float = 50.0
    seed: int = 0
    scheduler: str = "edf"
    chunk_tokens: int | None = None
    predicted_lengths: str = "past"
    length_error_percent: float = 0.0
    link_bytes_s: float = 50e9
    transfer_latency_s: float = 0.002
    ready: tuple[str, ...] = ()
    switch_latency_s: float = 0.03

    def __post_init__(self) -> None:
        _require_one_of(self.scheduler, SCHEDULERS, "scheduler")
        _require_one_of(self.predicted_lengths, LENGTH_PREDICTORS, "predictor of lengths")
        if self.length_error_percent and self.predicted_lengths != "true":
            raise InputError(
                "an error of predicted lengths goes with true lengths; those of the past have "
                "their own"
            )

    @property
    def max_late_share(self) -> float:
        """Share of requests that may be late."""
        return 1 - self.slo_quantile_percent / 100

    @property
    def startup_s(self) -> float:
        """Seconds until a new instance serves."""
        steps_s = [step_s for name, step_s in STARTUP_STEPS_S.items() if name not in self.ready]
        return _INSTALL_S + sum(steps_s)

    @property
    def reshard_s(self) -> float:
        """Seconds until GPUs that hold the weights already serve as instances of another TP."""
        return min(self.startup_s, _ENGINE_START_S + _INSTALL_S)


def _require_one_of(name: str, names: tuple[str, ...], kind: str) -> None:
    if name not in names:
        raise InputError(f"there is no {kind} {name!r}; there are: {', '.join(names)}")
