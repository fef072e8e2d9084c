"""A trace replayed under a policy, request by request, with a fleet that changes as it decides.

The replay itself is csrc/serving.hpp. Here the fleet that a policy wants becomes instances that
start, move, change their clocks and leave, each with the time that takes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from envplan._files import atomic_write
from envplan._serving import Replay
from envplan.costs.model import Overheads as Beside
from envplan.costs.rates import Rate
from envplan.serving.classes import CLASSES, Slo, hosts, serves
from envplan.serving.phases import FloatArray
from envplan.serving.reshard import transfer_plan
from envplan.serving.sizing import Stream
from envplan.serving.trace import SLOT_S
from envplan.units import J_PER_KWH

_CLOCK_HOLD_S: Final = 1.0  # before a managed clock goes down
_CLOCK_MARGIN: Final = 0.4  # of the TTFT SLO that a managed clock leaves
_PARTS: Final = 8  # in which a fleet is re-sharded, one after another, each at least an instance
_PACK_SHARE: Final = 0.3  # of it that a request may wait at an instance that is filled up


#: How long the steps of a start take, s, by what saves them: a machine is booted; it fetches the
#: weights; its processes find each other and the engine starts, or both come from a snapshot.
#: (DynamoLLM, section IV; the middle where a range is stated.)
READY: Final[Mapping[str, float]] = {"vm": 90.0, "weights": 180.0, "snapshot": 138.0}
_ENGINE_S: Final = 18.0  # of the last: the engine alone starts
_INSTALL_S: Final = 15.0  # weights and KV cache are put into the GPUs


@dataclass(frozen=True)
class Overheads:
    """How long changes take.

    Attributes:
        clock: until a clock that was asked for is in force, s.
        ready: of READY, what is ready before an instance is needed.
    """

    clock: float = 0.03
    ready: frozenset[str] = frozenset()

    @property
    def start(self) -> float:
        """Until a new instance serves, s."""
        return _INSTALL_S + sum(step for name, step in READY.items() if name not in self.ready)

    @property
    def reshard(self) -> float:
        """Until GPUs that already hold the weights serve as instances of another TP, s."""
        return min(self.start, _ENGINE_S + _INSTALL_S)


@dataclass(frozen=True)
class PoolSpec:
    """A pool as a policy wants it: alike instances.

    Attributes:
        name: the longest class that it is for.
        serves: classes that go to it.
        slo: what it promises.
        tp: GPUs of an instance.
        clock: MHz.
        count: of instances.
        managed: the clock is where instances are without need; it goes up where prompts would be
            late, and comes down again.
        packs: one instance is filled after another, so that the last ones idle.
    """

    name: str
    serves: frozenset[str]
    slo: Slo
    tp: int
    clock: int
    count: int
    managed: bool = False
    packs: bool = False


class Fleet(dict[str, PoolSpec]):
    """All pools by a name of their own; classes that no pool serves go to one that can."""

    @property
    def gpus(self) -> int:
        """GPUs of all instances."""
        return sum(pool.tp * pool.count for pool in self.values())

    @property
    def routes(self) -> dict[str, str]:
        """The name of the pool that each class goes to."""
        return {name: key for key, pool in self.items() for name in pool.serves}


@dataclass(frozen=True, eq=False)
class Series:
    """What happens over time, by slot of a minute; arrays of one length.

    Attributes:
        time_s: beginning of each slot, s.
        power_w: of the fleet, on average.
        load_tokens_s: that arrives.
        gpus: in use at the slot's end, starting and leaving ones too.
        requests: that arrive.
        attained: of these, those that meet their SLOs.
    """

    time_s: FloatArray
    power_w: FloatArray
    load_tokens_s: FloatArray
    gpus: FloatArray
    requests: FloatArray
    attained: FloatArray

    def save_csv(self, path: Path) -> None:
        """Write them as a CSV table, a line for each slot.

        Raises:
            InputError: it cannot be written.
        """
        import pandas as pd

        table = pd.DataFrame(vars(self)).to_csv(index=False, float_format="%.10g")
        atomic_write(path, table)


@dataclass(frozen=True, eq=False)
class Simulation:
    """What came of a policy.

    Attributes:
        policy: its name.
        by_class: int64 (9, 4): requests, first token in time, tokens in time, both.
        started: instances started, without those that were there at the beginning.
        resharded: instances made of other instances' GPUs.
        clock_changes: of instances.
        helped: requests that another pool took because they would have been late in their own.
        squashed: requests given up because they waited too long; their SLOs are missed.
        moved: weights sent from GPU to GPU to re-shard instances, in whole copies of the model.
        series: over time.
    """

    policy: str
    by_class: npt.NDArray[np.int64]
    started: int
    resharded: int
    clock_changes: int
    helped: int
    squashed: int
    moved: float
    series: Series

    @property
    def energy_j(self) -> float:
        """Of all GPUs in use, J; GPUs without an instance are given back and draw nothing."""
        return float(self.series.power_w.sum()) * SLOT_S

    @property
    def requests(self) -> int:
        """That arrived."""
        return int(self.by_class[:, 0].sum())

    @property
    def attained(self) -> int:
        """Of these, those that met TTFT and TBT."""
        return int(self.by_class[:, 3].sum())

    @property
    def attainment(self) -> float:
        """Share of requests that met their SLOs."""
        return self.attained / self.requests

    @property
    def attainment_by_class(self) -> dict[str, float]:
        """The same of each class that came."""
        by_class = zip(CLASSES, self.by_class.tolist(), strict=True)
        return {name: met / came for name, (came, _, _, met) in by_class if came}

    @property
    def first_in_time(self) -> float:
        """Share of requests whose first token was in time."""
        return int(self.by_class[:, 1].sum()) / self.requests

    @property
    def tokens_in_time(self) -> float:
        """Share of requests whose further tokens were in time."""
        return int(self.by_class[:, 2].sum()) / self.requests

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
        return float(self.series.gpus.sum()) * SLOT_S / 3600

    def saved_percent(self, base: Simulation) -> float | None:
        """Energy saved against another simulation, of its energy; None where that used none."""
        return 100 * (1 - self.energy_j / base.energy_j) if base.energy_j else None

    def at_rate(self, rate: Rate, beside: Beside | None = None) -> float:
        """What the energy costs at a rate per kWh, money or gCO2.

        Args:
            rate: over time.
            beside: PUE and hosts that draw, too; default: none.
        """
        at = self.series.time_s
        edges = [rate.integral(float(t)) for t in [*at, at[-1] + SLOT_S]]
        site = beside or Beside()
        watts = site.pue * (self.series.power_w + site.host_power * self.series.gpus)
        return float(np.dot(np.diff(edges), watts)) / J_PER_KWH

    @property
    def duration_s(self) -> float:
        """From the first slot to the end of the last, s."""
        return SLOT_S * len(self.series.time_s)


class _Start(NamedTuple):
    """An instance that is to be started."""

    pool: int
    size: int
    clock: int
    managed: bool


class _Step(NamedTuple):
    """A part of a change still to come: when (s), who leaves, and what their GPUs become."""

    at: float
    leave: list[int]
    begin: list[_Start]


class Machines:
    """The fleet in the replay: makes it what a policy wants.

    Args:
        stream: what arrives.
        overheads: of changes.
        gpus: at most.
        squash_s: a request that is so much later than its SLO allows is given up.
    """

    def __init__(
        self, stream: Stream, overheads: Overheads, gpus: int, squash_s: float = math.inf
    ) -> None:
        self.stream, self.overheads, self.gpus = stream, overheads, gpus
        self.started = self.resharded = 0
        self.moved = 0.0
        self._pools: dict[str, int] = {}
        self._steps: list[_Step] = []
        self.replay = Replay(
            stream.service, overheads.clock, _CLOCK_HOLD_S, _CLOCK_MARGIN, _PACK_SHARE,
            min(squash_s, 1e9), SLOT_S, stream.trace.duration_s,
        )  # fmt: skip

    def adopt(self, fleet: Fleet, now: float, *, warm: bool = False) -> None:
        """Go over to a fleet: keep what fits, move it between pools, re-shard or start the rest.

        A change never takes away what serves. What is too much leaves at once if nothing else
        changes. Otherwise GPUs are re-sharded in place, part after part: as many GPUs as are
        re-sharded at a time are started beforehand, unless there are more than enough, and serve
        meanwhile. Where too few GPUs are free for that, a part leaves without a substitute.

        Args:
            warm: all of it is there at once, as before the first request.
        """
        wanted: dict[tuple[int, int], list[_Start]] = {}  # by pool and size
        for key, pool in fleet.items():
            number = self._pools.setdefault(key, len(self._pools))
            self.replay.set_pack(number, pool.packs)
            size, clocks = self.stream.sizes[pool.tp], self.stream.clocks[pool.tp]
            start = _Start(number, size, clocks.index(pool.clock), pool.managed)
            wanted[number, size] = [start] * pool.count
        self._route(fleet)
        self._steps.clear()  # of the last change: what was to come of it is in `wanted`
        there = self.replay.instances()
        there.sort(key=lambda i: (i[4], -i[5]))  # those that serve first, the fullest of them
        moves: list[tuple[int, _Start]] = []
        spare: dict[int, list[int]] = {}
        for instance, number, size, *_ in there:
            if slots := wanted.get((number, size)):
                moves.append((instance, slots.pop(0)))
            else:
                spare.setdefault(size, []).append(instance)
        for (_, size), slots in wanted.items():
            while slots and spare.get(size):
                moves.append((spare[size].pop(0), slots.pop(0)))
        for instance, start in moves:
            self.replay.move(instance, start.pool, start.clock, start.managed)
        lacking = [start for slots in wanted.values() for start in slots]
        left = [
            (instance, self.stream.gpus[size]) for size, ids in spare.items() for instance in ids
        ]
        if warm:
            for start in lacking:
                self.replay.start(*start, now)
        else:
            self._change(lacking, left, now)

    def _change(self, lacking: list[_Start], left: list[tuple[int, int]], now: float) -> None:
        """Start what is lacking, and let go what is left over when it is not needed any more."""
        sizes = self.stream.gpus
        need, have = sum(sizes[s.size] for s in lacking), sum(gpus for _, gpus in left)
        part = 0  # GPUs that are re-sharded at a time
        if lacking and left:
            largest = max(*(sizes[s.size] for s in lacking), *(gpus for _, gpus in left))
            part = max(largest, math.ceil(need / _PARTS))
        fresh = min(max(0, need - have + part), self.gpus - self.in_use())
        first = now
        while lacking and sizes[lacking[0].size] <= fresh:
            fresh -= sizes[lacking[0].size]
            self.started += 1
            first = now + self.overheads.start
            self.replay.start(*lacking.pop(0), first)
        while lacking:
            step = _Step(first, [], [])
            free, wanted, before = 0, part or sizes[lacking[0].size], list[int]()
            while left and free < wanted:
                instance, gpus = left.pop(0)
                step.leave.append(instance)
                before.append(gpus)
                free += gpus
            while lacking and sizes[lacking[0].size] <= free:
                free -= sizes[lacking[0].size]
                step.begin.append(lacking.pop(0))
            if not step.begin:
                break  # no GPUs are left to make an instance of
            after = sorted((sizes[start.size] for start in step.begin), reverse=True)
            self.moved += transfer_plan(tuple(sorted(before, reverse=True)), tuple(after)).moved
            self._steps.append(step)
            first += self.overheads.reshard
        self._steps.append(_Step(first, [instance for instance, _ in left], []))
        self.advance(now)

    def advance(self, until: float) -> None:
        """Serve until a time, s."""
        while self._steps and self._steps[0].at <= until:
            step = self._steps.pop(0)
            self.replay.advance(step.at)
            for instance in step.leave:
                self.replay.retire(instance)
            for start in step.begin:
                self.replay.start(*start, step.at + self.overheads.reshard)
            self.resharded += len(step.begin)
        self.replay.advance(until)

    def in_use(self) -> int:
        """GPUs that serve, start or leave."""
        return sum(self.stream.gpus[size] * n for size, n in self.replay.gpus().items())

    def _route(self, fleet: Fleet) -> None:
        """Send classes where they belong; pools that could serve them help, the best ones first.

        A pool that is given up helps, too, as long as it has instances.
        """
        old = [number for key, number in self._pools.items() if key not in fleet]
        routes = fleet.routes
        for place, name in enumerate(CLASSES):
            slo = self.stream.profile.classes[name].slo
            order = [*hosts(name), *reversed(CLASSES)]

            def rank(key: str) -> tuple[bool, int]:
                pool = fleet[key]
                able = pool.slo.covers(slo) and serves(pool.name, name)  # noqa: B023
                return not able, order.index(pool.name)  # noqa: B023

            ranked = sorted(fleet, key=rank)
            home = routes.get(name, ranked[0])
            helpers = [self._pools[key] for key in ranked if key != home]
            self.replay.route(place, self._pools[home], helpers + old)

    def result(self, policy: str, gpus: list[int], first: int = 0) -> Simulation:
        """What came of it, once the trace is over.

        Args:
            policy: its name.
            gpus: in use, of each slot.
            first: slot that counts first; before it, no request came.
        """
        self.replay.finish()
        energy, attained, by_class, changes, helped, squashed = self.replay.results()
        trace, slots = self.stream.trace, len(gpus)
        tokens = np.array([self.stream.profile.classes[name].tokens for name in CLASSES])
        series = Series(
            time_s=SLOT_S * np.arange(first, slots, dtype=np.float64),
            power_w=energy[first:slots] / SLOT_S,
            load_tokens_s=(trace.counts @ tokens / SLOT_S)[first:],
            gpus=np.array(gpus[first:], dtype=np.float64),
            requests=trace.counts.sum(axis=1)[first:].astype(np.float64),
            attained=attained[first:slots].astype(np.float64),
        )
        return Simulation(
            policy, by_class, self.started, self.resharded, changes, helped, squashed,
            self.moved, series,
        )  # fmt: skip
