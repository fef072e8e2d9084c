"""The fleet in the compiled replay: makes it what a policy wants, with the time that takes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from envplan._serving import Replay, time_bin_ends
from envplan.serving.classes import FloatArray, Slo
from envplan.serving.fleet import Fleet
from envplan.serving.observed_trace import ObservedTrace
from envplan.serving.settings import Settings
from envplan.serving.trace import SLOT_S
from envplan.serving.transition import (
    InstanceStart,
    SurplusInstance,
    TransitionStep,
    plan_transition,
)

_CLOCK_HOLD_S: Final = 1.0  # before a dynamic clock goes down
_CLOCK_MARGIN: Final = 0.4  # share of the TTFT SLO that a dynamic clock leaves
_CONSOLIDATED_WAIT: Final = 0.3  # share of it that a request may wait where instances are filled up
_NEVER_SQUASHED_S: Final = 1e9
_TIME_BIN_ENDS_S: Final = time_bin_ends()


class RunningInstance(NamedTuple):
    """An instance in the replay, in the engine's order (csrc/_serving.pyx).

    Attributes:
        number: of the instance.
        pool: number of its pool.
        size: number of its size.
        clock: number of its clock, among those of its size.
        is_starting: whether it does not serve yet.
        num_requests: requests that it decodes.
    """

    number: int
    pool: int
    size: int
    clock: int
    is_starting: bool
    num_requests: int


class RequestCounts(NamedTuple):
    """Numbers of requests, in the engine's order (csrc/_serving.pyx).

    Attributes:
        requests: that came.
        first_in_time: those whose first token was in time.
        further_in_time: those whose further tokens were.
        attained: those that met both.
    """

    requests: int
    first_in_time: int
    further_in_time: int
    attained: int

    @classmethod
    def sum(cls, counts: Iterable[RequestCounts]) -> RequestCounts:
        """All of these requests together."""
        total = np.sum([(0, 0, 0, 0), *counts], axis=0)
        return cls(*total.tolist())

    @property
    def attainment(self) -> float:
        """Share of the requests that met both; 1 where none came."""
        return self.attained / self.requests if self.requests else 1.0


@dataclass(frozen=True, eq=False)
class TimeCounts:
    """How often requests took how long.

    Attributes:
        counts: requests in each of the engine's bins, whose ends grow by 1%, (bins,). The last bin
            is for what never came.
    """

    counts: npt.NDArray[np.int64]

    @classmethod
    def none(cls) -> Self:
        """Of no requests."""
        return cls(np.zeros(len(_TIME_BIN_ENDS_S), np.int64))

    def quantile_s(self, share: float) -> float:
        """The time that so large a share of requests does not exceed, s, rounded up by 1% at most.

        Infinite where too many never got there, and 0 where there are no requests.
        """
        total = int(self.counts.sum())
        if not total:
            return 0.0
        ranked = np.cumsum(self.counts)
        return float(_TIME_BIN_ENDS_S[np.searchsorted(ranked, share * total)])


@dataclass(frozen=True, eq=False, kw_only=True)
class EngineResults:
    """Results of a replay.

    Attributes:
        slot_energy_j: energy of all instances, by slot.
        slot_attained: requests that met their SLOs, by the slot of their arrival.
        counts: the figures of RequestCounts of each class, (classes, 4).
        clock_changes: of instances.
        helped: requests that another pool took because they would have been late in their own.
        squashed: requests given up because they waited too long.
        too_long: requests longer than the model takes; they are in no other count.
        unservable: requests longer than the memory of the instances that they came to.
        preempted: how often a request lost its place in memory and began again.
        first_token_times: of all requests.
        token_intervals: mean time between further tokens, of all requests.
    """

    slot_energy_j: FloatArray
    slot_attained: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    clock_changes: int
    helped: int
    squashed: int
    too_long: int
    unservable: int
    preempted: int
    first_token_times: TimeCounts
    token_intervals: TimeCounts

    def counts_of_class(self, class_index: int) -> RequestCounts:
        """Numbers of the requests of a class."""
        return RequestCounts(*self.counts[class_index].tolist())

    @property
    def total_counts(self) -> RequestCounts:
        """Numbers of all requests."""
        return RequestCounts(*self.counts.sum(axis=0).tolist())


def read_results(engine: Replay) -> EngineResults:
    """The results of an engine that has finished."""
    energy_j, attained, counts, clock_changes, helped, squashed = engine.results()
    too_long, unservable, preempted, _, _ = engine.apart()
    first_token_counts, interval_counts = engine.times()
    return EngineResults(
        slot_energy_j=energy_j,
        slot_attained=attained,
        counts=counts,
        clock_changes=clock_changes,
        helped=helped,
        squashed=squashed,
        too_long=too_long,
        unservable=sum(unservable),
        preempted=preempted,
        first_token_times=TimeCounts(first_token_counts.sum(axis=0)),
        token_intervals=TimeCounts(interval_counts.sum(axis=0)),
    )


class FleetController:
    """Starts, moves, re-shards and retires instances as fleets change.

    Args:
        observed: the trace that is replayed.
        settings: GPUs at most, how long changes take, when requests are given up.

    Attributes:
        started: instances started, without those that were there at the beginning.
        resharded: instances made of other instances' GPUs.
        copies_moved: weights sent from GPU to GPU, in whole copies of the model.
    """

    def __init__(self, observed: ObservedTrace, settings: Settings) -> None:
        self.observed, self.settings = observed, settings
        self.started = self.resharded = 0
        self.copies_moved = 0.0
        self._tps = observed.tps  # by the engine's number of the size
        self._pool_numbers: dict[str, int] = {}
        self._pending_steps: list[TransitionStep] = []
        self._num_unstarted = 0
        self._engine = Replay(
            observed.service,
            clock_delay_s=settings.switch_latency_s,
            clock_hold_s=_CLOCK_HOLD_S,
            clock_margin=_CLOCK_MARGIN,
            pack_share=_CONSOLIDATED_WAIT,
            squash_s=min(settings.squash_s, _NEVER_SQUASHED_S),
            slot_s=SLOT_S,
            end_s=observed.trace.duration_s,
            scheduler=settings.scheduler,
        )

    def reconcile(self, fleet: Fleet, now_s: float, *, prewarmed: bool = False) -> None:
        """Move the running fleet towards another: keep, reassign, re-shard, start, retire.

        Args:
            fleet: the fleet that is wanted.
            now_s: when.
            prewarmed: all of it is there at once, as before the first request.
        """
        self._number_pools(fleet)
        self._route(fleet)
        missing = self._instances_of(fleet)
        self._pending_steps.clear()  # what they were to start is in `missing` again
        surplus = self._keep_or_reassign(missing)
        if prewarmed:
            for start in missing:
                self._start(start, now_s)
            return
        transition = plan_transition(
            missing,
            surplus,
            num_free_gpus=self.settings.max_gpus - self.gpus_in_use(),
            now_s=now_s,
            settings=self.settings,
        )
        for start in transition.fresh_starts:
            self._start(start, now_s + self.settings.startup_s)
        self.started += len(transition.fresh_starts)
        self.copies_moved += transition.copies_moved
        self._pending_steps = transition.steps
        self._num_unstarted = transition.num_unstarted
        self.advance(now_s)

    @property
    def lacks_instances(self) -> bool:
        """Whether the last change left instances out for want of GPUs, and is over.

        GPUs become free when instances have finished what they had: then it can be tried again.
        """
        return self._num_unstarted > 0 and not self._pending_steps

    def advance(self, until_s: float) -> None:
        """Serve until a time."""
        while self._pending_steps and self._pending_steps[0].time_s <= until_s:
            step = self._pending_steps.pop(0)
            self._engine.advance(step.time_s)
            for number in step.retire:
                self._engine.retire(number)
            for start in step.start:
                self._start(start, step.time_s + self.settings.reshard_s)
            self.resharded += len(step.start)
        self._engine.advance(until_s)

    def gpus_in_use(self) -> int:
        """GPUs that serve, start or leave."""
        num_instances = self._engine.gpus()
        return sum(self._tps[size] * count for size, count in num_instances.items())

    def counts_so_far(self) -> RequestCounts:
        """Numbers of the requests that are over."""
        return RequestCounts(*self._engine.counts().sum(axis=0).tolist())

    def pool_energy_j(self) -> list[float]:
        """Energy of the instances of each pool, J, by its number."""
        return list(map(float, self._engine.pool_energy()))

    def finish_and_count(self) -> RequestCounts:
        """Serve what is left after the trace; this is quicker than all results."""
        self._engine.finish()
        return self.counts_so_far()

    def finish(self) -> EngineResults:
        """Serve what is left after the trace."""
        self._engine.finish()
        return read_results(self._engine)

    def _start(self, start: InstanceStart, ready_s: float) -> None:
        self._engine.start(start.pool, start.size, start.clock, start.dynamic_clock, ready_s)

    def _number_pools(self, fleet: Fleet) -> None:
        """Give new pools a number, and tell the engine how each pool is filled."""
        next_number = len(set(self._pool_numbers.values()))
        for name, pool in fleet.pools.items():
            whole_pool = pool.part_of or name
            pool_number = self._pool_numbers.setdefault(whole_pool, next_number)
            self._pool_numbers[name] = pool_number
            next_number = max(next_number, pool_number + 1)
            self._engine.set_pack(pool_number, pool.consolidates)

    def _instances_of(self, fleet: Fleet) -> list[InstanceStart]:
        """The instances that a fleet has, pool by pool, all as if they were to be started."""
        instances: list[InstanceStart] = []
        for name, pool in fleet.pools.items():
            start = InstanceStart(
                pool=self._pool_numbers[name],
                size=self._tps.index(pool.tp),
                clock=self.observed.clocks_mhz[pool.tp].index(pool.frequency_mhz),
                dynamic_clock=pool.dynamic_clock,
                gpus=pool.tp,
            )
            instances += [start] * pool.num_instances
        return instances

    def _keep_or_reassign(self, missing: list[InstanceStart]) -> list[SurplusInstance]:
        """Let running instances be what is missing, if they have the size for it.

        Instances that find a match within their own pool stay there; only then are others moved
        from pool to pool.

        Args:
            missing: instances that a fleet has; those that run are removed from the list.

        Returns:
            Running instances that no pool wants; those of one size follow each other.
        """
        running = [RunningInstance(*fields) for fields in self._engine.instances()]
        running.sort(key=_serving_and_fullest_first)
        unmatched = self._match(running, missing, within_pools=True)
        sizes = list(dict.fromkeys(instance.size for instance in unmatched))
        unmatched = self._match(unmatched, missing, within_pools=False)
        unmatched.sort(key=lambda instance: sizes.index(instance.size))
        return [
            SurplusInstance(instance.number, self._tps[instance.size]) for instance in unmatched
        ]

    def _match(
        self,
        running: Sequence[RunningInstance],
        missing: list[InstanceStart],
        *,
        within_pools: bool,
    ) -> list[RunningInstance]:
        """Let each running instance be the first missing one that fits, which is then removed.

        Args:
            running: instances, in the order in which they may choose.
            missing: instances that are wanted; matched ones are removed.
            within_pools: whether an instance must stay in its pool.

        Returns:
            Running instances that fit none.
        """
        unmatched = []
        for instance in running:
            start = _first_fitting(instance, missing, within_pools)
            if start is None:
                unmatched.append(instance)
            else:
                self._engine.move(instance.number, start.pool, start.clock, start.dynamic_clock)
                missing.remove(start)
        return unmatched

    def _route(self, fleet: Fleet) -> None:
        """Send classes where they belong; pools that could serve them help, the best ones first.

        A pool that is given up helps, too, as long as it has instances.
        """
        given_up = [
            number
            for number in sorted(set(self._pool_numbers.values()))
            if number not in {self._pool_numbers[name] for name in fleet.pools}
        ]
        routes = fleet.routes
        for class_number, request_class in enumerate(self.observed.profile.classes):
            ranked = self._ranked_pools(fleet, request_class)
            home = self._pool_numbers[routes.get(request_class, ranked[0])]
            numbers = dict.fromkeys(self._pool_numbers[name] for name in ranked)
            helpers = [number for number in numbers if number != home]
            self._engine.route(class_number, home, helpers + given_up)

    def _ranked_pools(self, fleet: Fleet, request_class: str) -> list[str]:
        """All pools: first those that can serve a class within its SLO, lower ones first."""
        if len(fleet.pools) == 1:
            return list(fleet.pools)
        classes = self.observed.profile.classes
        slo = classes[request_class].slo
        order = [*classes.hosts(request_class), *reversed(classes.names)]

        def rank(name: str) -> tuple[bool, int]:
            pool = fleet.pools[name]
            promised = Slo.strictest(classes[served].slo for served in pool.serves)
            can_serve = promised.covers(slo) and classes.serves(pool.home_class, request_class)
            return not can_serve, order.index(pool.home_class)

        return sorted(fleet.pools, key=rank)


def _serving_and_fullest_first(instance: RunningInstance) -> tuple[bool, int]:
    return instance.is_starting, -instance.num_requests


def _first_fitting(
    instance: RunningInstance, missing: Sequence[InstanceStart], within_pools: bool
) -> InstanceStart | None:
    for start in missing:
        if start.size == instance.size and (not within_pools or start.pool == instance.pool):
            return start
    return None
