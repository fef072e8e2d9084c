"""Fleets that never change, whose instances run prompts and decode, or only one of both.

Prefill and decode apart: instances of a first pool run prompts (prefill) and send each context to
an instance of a second pool, where the request decodes. Each pool has its own TP and clock: prompts
want a high one, decoding a low one (DistServe, OSDI '24; DualScale). The engine says when a context
goes and how long that takes (csrc/serving/transfers.hpp).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from envplan._serving import Replay
from envplan.errors import InputError
from envplan.serving.fleet_controller import EngineResults, RequestCounts, read_results
from envplan.serving.instances import Instances
from envplan.serving.observed_trace import ObservedTrace
from envplan.serving.performance import Configuration
from envplan.serving.settings import Settings
from envplan.serving.trace import SLOT_S

_NEVER_SQUASHED_S: Final = 1e9
_FIRST_POOL: Final = 0
_DECODE_POOL: Final = 1


@dataclass(frozen=True)
class SplitFleet:
    """A fleet.

    Attributes:
        first: instances to which requests come. They run prompts.
        decode: instances where requests decode; None: where their prompts ran.
    """

    first: Instances
    decode: Instances | None = None

    @property
    def gpus(self) -> int:
        """GPUs of all instances."""
        return self.first.gpus + (self.decode.gpus if self.decode else 0)

    @property
    def most_of_a_role(self) -> int:
        """Instances of the role that has the most."""
        return max(instances.count for instances in self.by_role)

    @property
    def by_role(self) -> list[Instances]:
        """The instances that requests come to, then those that only decode, if any do."""
        return [self.first] if self.decode is None else [self.first, self.decode]

    @property
    def configurations(self) -> list[Configuration]:
        """TP and clock of the instances of each role."""
        return [instances.configuration for instances in self.by_role]

    def grown(self, *, decode: bool) -> SplitFleet:
        """The fleet with one more instance that decodes, if any do, or one of the others."""
        if decode and self.decode is not None:
            return replace(self, decode=self.decode.more(1))
        return replace(self, first=self.first.more(1))

    def __str__(self) -> str:
        if self.decode is None:
            return str(self.first)
        return f"{self.first} for prompts, {self.decode} to decode"


class SplitFleetController:
    """Replays a trace on a split fleet that is there from the beginning.

    Args:
        observed: the trace that is replayed.
        settings: its scheduler, and what the network between instances does.
        fleet: the fleet.

    Raises:
        InputError: the profile does not say how large contexts are that go from instance to
            instance.

    Attributes:
        started, resharded, copies_moved: changes of the fleet, of which there are none.
    """

    def __init__(self, observed: ObservedTrace, settings: Settings, fleet: SplitFleet) -> None:
        self.observed, self.fleet = observed, fleet
        self.started = self.resharded = 0
        self.copies_moved = 0.0
        self._engine = Replay(
            observed.service,
            clock_delay_s=0.0,
            clock_hold_s=0.0,
            clock_margin=0.0,
            pack_share=0.0,
            squash_s=min(settings.squash_s, _NEVER_SQUASHED_S),
            slot_s=SLOT_S,
            end_s=observed.trace.duration_s,
            scheduler=settings.scheduler,
            transfer_s=settings.transfer_latency_s,
            kv_bytes_per_token=_kv_bytes_per_token(observed, fleet),
        )
        for class_number in range(len(observed.profile.classes)):
            self._engine.route(class_number, _FIRST_POOL, [])
        self._start(fleet.first, _FIRST_POOL)
        if fleet.decode is not None:
            self._engine.hand_over(_FIRST_POOL, _DECODE_POOL)
            self._start(fleet.decode, _DECODE_POOL)

    def _start(self, instances: Instances, pool: int) -> None:
        tp, clock_mhz = instances.configuration
        size = self.observed.tps.index(tp)
        clock = self.observed.clocks_mhz[tp].index(clock_mhz)
        for _ in range(instances.count):
            self._engine.start(pool, size, clock, False, 0.0)

    def gpus_in_use(self) -> int:
        """GPUs of all instances."""
        return self.fleet.gpus

    def advance(self, until_s: float) -> None:
        """Serve until a time."""
        self._engine.advance(until_s)

    def counts_so_far(self) -> RequestCounts:
        """Numbers of the requests that are over."""
        return RequestCounts(*self._engine.counts().sum(axis=0).tolist())

    def pool_energy_j(self) -> list[float]:
        """Energy of the instances that requests come to, and of those that only decode, J."""
        return list(map(float, self._engine.pool_energy()))

    def finish_and_count(self) -> RequestCounts:
        """Serve the rest of the trace; this is quicker than all results."""
        self._engine.advance(self.observed.trace.duration_s)
        self._engine.finish()
        return self.counts_so_far()

    def finish(self) -> EngineResults:
        """Serve the rest of the trace."""
        self._engine.advance(self.observed.trace.duration_s)
        self._engine.finish()
        return read_results(self._engine)


def _kv_bytes_per_token(observed: ObservedTrace, fleet: SplitFleet) -> float:
    if fleet.decode is None:
        return 0.0
    profile = observed.profile
    if profile.kv_bytes_per_token is None:
        raise InputError(
            "the profile's sidecar does not say in kv_bytes_per_token how large contexts are that "
            "go from prefill to decode",
            path=profile.sidecar,
        )
    return profile.kv_bytes_per_token
