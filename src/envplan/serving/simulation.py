"""A trace replayed under a policy, request by request, with a fleet that changes as it decides.

The replay itself is csrc/serving.hpp. Here the fleet that a policy wants becomes instances that
start, move, change their clocks and leave, each with the time that takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from envplan._serving import Replay
from envplan.rates import Rate
from envplan.serving.classes import CLASSES, Slo, serves
from envplan.serving.demand import hosts
from envplan.serving.plan import Fleet
from envplan.serving.sizing import Stream
from envplan.serving.trace import SLOT_S
from envplan.units import J_PER_KWH

__all__ = [
    "FleetSpec",
    "Key",
    "Machines",
    "Overheads",
    "PoolSpec",
    "Series",
    "Simulation",
    "spec_of",
]

FloatArray = npt.NDArray[np.float64]
Key = tuple[str, Slo]

_CLOCK_HOLD_S: Final = 1.0  # before a managed clock goes down
_CLOCK_MARGIN: Final = 0.4  # of the TTFT SLO that a managed clock leaves
_PACK_SHARE: Final = 0.4  # of it that a request may wait at an instance that is filled up


@dataclass(frozen=True)
class Overheads:
    """How long changes take, s (DynamoLLM): the middle where a range is stated.

    Attributes:
        new_vm: a machine is booted.
        distributed_setup: its processes find each other.
        download: it fetches the weights.
        engine_setup: the engine starts.
        install: weights and KV cache are put into the GPUs.
        clock: until a clock that was asked for is in force.
        prepared: machines are kept booted, with the weights and a snapshot of the engine on their
            disks, so that only the engine and the weights remain.
    """

    new_vm: float = 90.0
    distributed_setup: float = 120.0
    download: float = 180.0
    engine_setup: float = 18.0
    install: float = 15.0
    clock: float = 0.03
    prepared: bool = False

    @property
    def start(self) -> float:
        """Until a new instance serves, s."""
        cold = 0.0 if self.prepared else self.new_vm + self.distributed_setup + self.download
        return cold + self.reshard

    @property
    def reshard(self) -> float:
        """Until GPUs that already hold the weights serve as instances of another TP, s."""
        return self.engine_setup + self.install


@dataclass(frozen=True)
class PoolSpec:
    """A pool as a policy wants it.

    Attributes:
        name: its class.
        slo: what it promises.
        groups: instances by TP and clock, MHz.
        managed: the clock is where instances are without need; it goes up where prompts would be
            late, and comes down again.
        packs: one instance is filled after another, so that the last ones idle.
    """

    name: str
    slo: Slo
    groups: Mapping[tuple[int, int], int]
    managed: bool = False
    packs: bool = False

    @property
    def key(self) -> Key:
        """What tells pools apart."""
        return self.name, self.slo

    @property
    def gpus(self) -> int:
        """GPUs of its instances."""
        return sum(tp * n for (tp, _), n in self.groups.items())


@dataclass(frozen=True)
class FleetSpec:
    """All pools, and what share of a class goes to which of them."""

    pools: Mapping[Key, PoolSpec]
    routes: Mapping[str, tuple[tuple[Key, float], ...]]

    @property
    def gpus(self) -> int:
        """GPUs of all instances."""
        return sum(pool.gpus for pool in self.pools.values())


def spec_of(fleet: Fleet, *, managed: bool) -> FleetSpec:
    """What a planner decided, for the replay; `managed` clocks may rise where requests are late."""
    pools: dict[Key, PoolSpec] = {}
    routes: dict[str, list[tuple[Key, float]]] = {}
    for pool in fleet.pools:
        key = (pool.request_class, pool.slo.slo())
        groups = dict(pools[key].groups) if key in pools else {}
        for group in pool.groups:
            kind = (group.tp, group.frequency_mhz)
            groups[kind] = groups.get(kind, 0) + group.instances
        pools[key] = PoolSpec(*key, groups, managed)
        for served in pool.serves:
            routes.setdefault(served.request_class, []).append((key, served.load_tokens_s))
    totals = {name: sum(load for _, load in shares) for name, shares in routes.items()}
    return FleetSpec(
        pools,
        {
            name: tuple((key, load / totals[name]) for key, load in shares)
            for name, shares in routes.items()
        },
    )


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
        series: over time.
    """

    policy: str
    by_class: npt.NDArray[np.int64]
    started: int
    resharded: int
    clock_changes: int
    helped: int
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
    def gpu_hours(self) -> float:
        """Hours of GPUs in use, all together."""
        return float(self.series.gpus.sum()) * SLOT_S / 3600

    def saved_percent(self, base: Simulation) -> float | None:
        """Energy saved against another simulation, of its energy; None where that used none."""
        return 100 * (1 - self.energy_j / base.energy_j) if base.energy_j else None

    def at_rate(self, rate: Rate) -> float:
        """What the energy costs at a rate per kWh, money or gCO2."""
        steps = rate.steps()
        edges = [steps.integral(float(t)) for t in [*self.series.time_s, self.duration_s]]
        return float(np.dot(np.diff(edges), self.series.power_w)) / J_PER_KWH

    @property
    def duration_s(self) -> float:
        """From the first slot to the end of the last, s."""
        return SLOT_S * len(self.series.time_s)


@dataclass
class Machines:
    """The fleet in the replay: makes it what a policy wants.

    Args:
        stream: what arrives.
        overheads: of changes.
        gpus: at most.
    """

    stream: Stream
    overheads: Overheads
    gpus: int
    started: int = 0
    resharded: int = 0
    _pools: dict[Key, int] = field(default_factory=dict)
    _leaving: list[tuple[float, list[int]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        stream, profile = self.stream, self.stream.profile
        tables, self._sizes, self._clocks = [], {}, {}
        sizes: list[Any] = []
        for name in CLASSES if not profile.phases else CLASSES[-1:]:
            for tp in profile.degrees(name):
                clocks = sorted({f for n, t, f in profile.curves if n == name and t == tp})
                phases = [profile.phases_of(name, tp, clock) for clock in clocks]
                places = list(range(len(tables), len(tables) + len(clocks)))
                tables += [each.tables() for each in phases]
                self._sizes[name, tp] = len(sizes)
                self._clocks[len(sizes)] = clocks
                sizes.append((tp, phases[-1].kv_tokens, phases[-1].chunk_tokens, places))
        self._gpus_of = [size[0] for size in sizes]
        slos = [profile.classes[name].slo for name in CLASSES]
        trace = stream.trace
        self.replay = Replay(
            trace.arrival, stream.input_tokens, stream.output_tokens, trace.known, stream.taken,
            tables, sizes, [(slo.ttft_s, slo.tbt_s) for slo in slos],
            self.overheads.clock, _CLOCK_HOLD_S, _CLOCK_MARGIN, _PACK_SHARE,
            SLOT_S, trace.duration_s,
        )  # fmt: skip

    def size(self, pool: str, tp: int) -> int:
        """The replay's number of an instance size."""
        return self._sizes[CLASSES[-1] if self.stream.profile.phases else pool, tp]

    def adopt(self, fleet: FleetSpec, now: float, *, warm: bool = False) -> None:
        """Go over to a fleet: keep what fits, move it between pools, start the rest.

        What is too much leaves as soon as what starts is ready, so that a change never takes away
        what serves. Where the GPUs do not suffice for both, it leaves at once, and its GPUs serve
        again after the time that re-sharding takes.
        """
        wanted: dict[tuple[int, int], list[tuple[int, bool]]] = {}  # by pool and size: clocks
        for key, pool in fleet.pools.items():
            number = self._pools.setdefault(key, len(self._pools))
            self.replay.set_pack(number, pool.packs)
            for (tp, mhz), count in sorted(pool.groups.items()):
                size = self.size(pool.name, tp)
                clock = self._clocks[size].index(mhz)
                wanted.setdefault((number, size), []).extend([(clock, pool.managed)] * count)
        self._route(fleet)
        going = {instance for _, some in self._leaving for instance in some}
        there = [i for i in self.replay.instances() if i[0] not in going]
        there.sort(key=lambda i: (i[4], -i[5]))  # those that serve first, the fullest of them
        spare: dict[int, list[int]] = {}
        for instance, pool_number, size, *_ in there:
            slots = wanted.get((pool_number, size))
            if slots:
                self.replay.move(instance, pool_number, *slots.pop(0))
            else:
                spare.setdefault(size, []).append(instance)
        for (pool_number, size), slots in wanted.items():
            while slots and spare.get(size):
                self.replay.move(spare[size].pop(0), pool_number, *slots.pop(0))
        lacking = [(k, clock) for k, slots in wanted.items() for clock in slots]
        left = [instance for some in spare.values() for instance in some]
        if not lacking:
            for instance in left:
                self.replay.retire(instance)
            return
        more = sum(self._gpus_of[size] for (_, size), _ in lacking)
        in_place = self.in_use() + more > self.gpus
        delay = 0.0 if warm else self.overheads.reshard if in_place else self.overheads.start
        for (pool_number, size), (clock, managed) in lacking:
            self.replay.start(pool_number, size, clock, managed, now + delay)
        self.resharded += len(lacking) * (in_place and not warm)
        self.started += len(lacking) * (not in_place and not warm)
        if in_place:
            for instance in left:
                self.replay.retire(instance)
        elif left:
            self._leaving.append((now + delay, left))

    def advance(self, until: float) -> None:
        """Serve until a time, s."""
        for at, some in [entry for entry in self._leaving if entry[0] <= until]:
            self.replay.advance(at)
            for instance in some:
                self.replay.retire(instance)
            self._leaving.remove((at, some))
        self.replay.advance(until)

    def in_use(self) -> int:
        """GPUs that serve, start or leave."""
        return sum(self._gpus_of[size] * n for size, n in self.replay.gpus().items())

    def _route(self, fleet: FleetSpec) -> None:
        for place, name in enumerate(CLASSES):
            slo = self.stream.profile.classes[name].slo
            able = [
                key
                for host in [*hosts(name, merge=True), *reversed(CLASSES)]
                for key in fleet.pools
                if key[0] == host
            ]
            able = sorted(
                dict.fromkeys(able),
                key=lambda key: not (key[1].covers(slo) and serves(key[0], name)),
            )
            shares = fleet.routes.get(name) or tuple((key, 1.0) for key in able[:1])
            mine = {key for key, _ in shares}
            helpers = [self._pools[key] for key in able if key not in mine]
            self.replay.route(place, [(self._pools[k], s) for k, s in shares if s > 0], helpers)

    def result(self, policy: str, gpus: list[int]) -> Simulation:
        """What came of it, once the trace is over."""
        self.replay.finish()
        energy, attained, by_class, changes, helped = self.replay.results()
        trace, slots = self.stream.trace, len(gpus)
        place = (trace.arrival / SLOT_S).astype(np.int64)
        tokens = self.stream.input_tokens + self.stream.output_tokens
        series = Series(
            time_s=SLOT_S * np.arange(slots, dtype=np.float64),
            power_w=energy[:slots] / SLOT_S,
            load_tokens_s=np.bincount(place, weights=tokens, minlength=slots) / SLOT_S,
            gpus=np.array(gpus, dtype=np.float64),
            requests=np.bincount(place, minlength=slots).astype(np.float64),
            attained=attained[:slots].astype(np.float64),
        )
        return Simulation(policy, by_class, self.started, self.resharded, changes, helped, series)
