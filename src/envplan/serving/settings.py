"""How a trace is replayed: the fleet, what policies know of the future, how long changes take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

#: How long the steps of a start take, s, by what saves them: a machine is booted; it fetches the
#: weights; its processes find each other and the engine starts, or both come from a snapshot.
#: (DynamoLLM, section IV; the middle where a range is stated.)
READY: Final[Mapping[str, float]] = {"vm": 90.0, "weights": 180.0, "snapshot": 138.0}
_ENGINE_S: Final = 18.0  # of the last: the engine alone starts
_INSTALL_S: Final = 15.0  # weights and KV cache are put into the GPUs


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a simulation is run.

    Attributes:
        gpus: at most.
        pools: at most, for policies that sort classes into pools.
        epoch: between two looks ahead, s; in each minute between, it is only looked whether the
            fleet still suffices.
        slo_quantile: percent of SLOs that fleets are sized for.
        headroom: percent by which what is needed is exceeded.
        squash: a request whose first token is so much too late is given up, s.
        past: so much of the trace, s, rounded up to minutes, is a past: the first fleet is sized by
            it, and it is not replayed. 0: that fleet is sized by the trace's peak, with hindsight.
        mispredicted: percent of requests whose output is predicted one length too short or too
            long; a short one cannot be too short, nor a long one too long.
        underestimated: percent of these that are predicted too short.
        seed: of whatever is drawn.
        ready: names in READY of what is ready before an instance is needed.
        clock_delay: until a clock that was asked for is in force, s.
    """

    gpus: int = 1024
    pools: int = 9
    epoch: float = 1800.0
    slo_quantile: float = 99.95
    headroom: float = 10.0
    squash: float = 60.0
    past: float = 0.0
    mispredicted: float = 5.0
    underestimated: float = 50.0
    seed: int = 0
    ready: tuple[str, ...] = ()
    clock_delay: float = 0.03

    @property
    def startup_s(self) -> float:
        """Until a new instance serves, s."""
        return _INSTALL_S + sum(step for name, step in READY.items() if name not in self.ready)

    @property
    def reshard_s(self) -> float:
        """Until GPUs that already hold the weights serve as instances of another TP, s."""
        return min(self.startup_s, _ENGINE_S + _INSTALL_S)
