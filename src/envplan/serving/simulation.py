"""A fleet replayed along a trace: a discrete-event simulation of flows.

Events are the slots of the trace, the epochs of the managers and the ends of changes. Between two
events requests arrive evenly, and as long as a pool can carry what arrives, nothing waits and what
its instances draw and how fast they answer is what the profile says. Where a pool cannot, it is
followed second by second: the requests of each second wait in a queue, the one with the nearest
deadline that can still be met first, those that are late anyway last.

What happens in an emergency, in this order: the pool's clocks go to where it can carry most; what
is still too much goes to higher pools with room, loosest SLO first; the rest queues. A request
whose output was predicted too short runs in the lower pool as far as that class's outputs go, then
moves to the next higher one and starts anew there.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from envplan.errors import NoAnswerError
from envplan.serving.classes import CLASSES, Slo, serves, shorter_output
from envplan.serving.demand import hosts
from envplan.serving.hierarchy import PoolModel
from envplan.serving.plan import Fleet, needed_for
from envplan.serving.profile import ServingProfile

__all__ = [
    "FleetSpec",
    "Key",
    "Offered",
    "Overheads",
    "Policy",
    "PoolSpec",
    "Series",
    "Simulation",
    "Simulator",
    "Stage",
    "offer",
    "routes_of",
    "spec_of",
]

FloatArray = npt.NDArray[np.float64]
Key = tuple[str, Slo]
_STEP_S: Final = 1.0  # by which an overloaded pool is followed
_ROOM: Final = 1 + 1e-9


@dataclass(frozen=True)
class Overheads:
    """How long changes take, s (DynamoLLM): the middle where a range is stated.

    Attributes:
        new_vm: a machine is booted.
        distributed_setup: its processes find each other.
        download: it fetches the weights.
        engine_setup: the engine starts.
        install: weights and KV cache are put into the GPUs.
    """

    new_vm: float = 90.0
    distributed_setup: float = 120.0
    download: float = 180.0
    engine_setup: float = 18.0
    install: float = 15.0

    @property
    def start(self) -> float:
        """Until a new instance serves, s."""
        return self.new_vm + self.distributed_setup + self.download + self.reshard

    @property
    def reshard(self) -> float:
        """Until GPUs that already hold the weights serve as instances of another TP, s."""
        return self.engine_setup + self.install


@dataclass(frozen=True)
class PoolSpec:
    """A pool as the simulator runs it.

    Attributes:
        name: its class.
        slo: what it promises.
        groups: instances by TP and clock, MHz; clock None: the GPU manager picks it.
    """

    name: str
    slo: Slo
    groups: Mapping[tuple[int, int | None], int]

    @property
    def key(self) -> Key:
        """What tells pools apart."""
        return self.name, self.slo

    @property
    def gpus(self) -> int:
        """GPUs of its instances."""
        return sum(tp * n for (tp, _), n in self.groups.items())

    def by_degree(self) -> dict[int, int]:
        """Instances by TP."""
        counts: dict[int, int] = {}
        for (tp, _), n in self.groups.items():
            counts[tp] = counts.get(tp, 0) + n
        return counts


@dataclass(frozen=True)
class FleetSpec:
    """All pools, and what share of a class goes to which of them."""

    pools: Mapping[Key, PoolSpec]
    routes: Mapping[str, tuple[tuple[Key, float], ...]]

    @property
    def gpus(self) -> int:
        """GPUs of all instances."""
        return sum(pool.gpus for pool in self.pools.values())

    def by_degree(self) -> dict[int, int]:
        """Instances by TP."""
        counts: dict[int, int] = {}
        for pool in self.pools.values():
            for tp, n in pool.by_degree().items():
                counts[tp] = counts.get(tp, 0) + n
        return counts

    def with_pool(self, pool: PoolSpec) -> FleetSpec:
        """The same with one pool replaced."""
        return FleetSpec({**self.pools, pool.key: pool}, self.routes)


def spec_of(fleet: Fleet, *, managed: bool) -> FleetSpec:
    """What a planner decided, for the simulator.

    Args:
        managed: leave clocks to the GPU manager.
    """
    pools: dict[Key, PoolSpec] = {}
    routes: dict[str, list[tuple[Key, float]]] = {}
    for pool in fleet.pools:
        key = (pool.request_class, pool.slo.slo())
        groups = dict(pools[key].groups) if key in pools else {}
        for group in pool.groups:
            kind = (group.tp, None if managed else group.frequency_mhz)
            groups[kind] = groups.get(kind, 0) + group.instances
        pools[key] = PoolSpec(*key, groups)
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


class Policy(Protocol):
    """What decides about the fleet."""

    name: str

    def initial(self) -> FleetSpec:
        """The fleet at the beginning."""

    def every_epoch(self, now: FleetSpec, seen: FloatArray) -> FleetSpec:
        """The fleet for the next epoch of the pool manager; `now` itself for no change.

        Args:
            now: the fleet.
            seen: tokens/s by slot and class so far.
        """

    def every_slot(self, now: FleetSpec, seen: FloatArray) -> FleetSpec:
        """The same for the instance manager, which may only re-shard pools."""


class Offered(NamedTuple):
    """What arrives at the pools, by slot and class, after predictions of output lengths.

    Attributes:
        step_s: length of a slot, s.
        requests: that arrive, by the class they are taken for.
        tokens: that these bring to that class's pool.
        moved: tokens that come to it with requests from a lower pool.
        wrong: requests of the class that are first taken for one with shorter outputs.
    """

    step_s: float
    requests: FloatArray
    tokens: FloatArray
    moved: FloatArray
    wrong: FloatArray

    @property
    def moves(self) -> int:
        """Requests that move to a higher pool, in all."""
        return round(float(self.wrong.sum()))

    @property
    def rates(self) -> FloatArray:
        """tokens/s by slot and class, of both kinds."""
        return (self.tokens + self.moved) / self.step_s


def offer(
    requests: FloatArray,
    tokens: FloatArray,
    step_s: float,
    profile: ServingProfile,
    *,
    mispredicted: float,
    seed: int,
) -> Offered:
    """What arrives where, if the output of some requests is predicted one length too short.

    Args:
        requests: by slot and class.
        tokens: of these.
        step_s: length of a slot, s.
        profile: says how long a class's requests are.
        mispredicted: the share of requests of medium and long outputs that are taken for shorter.
        seed: of the draws.
    """
    random = np.random.default_rng(seed)
    arriving, brought, moved = requests.copy(), tokens.copy(), np.zeros_like(tokens)
    longer = np.zeros_like(requests)
    for place, name in enumerate(CLASSES):
        lower = shorter_output(name)
        if lower is None or mispredicted == 0:
            continue
        wrong = random.binomial(np.rint(requests[:, place]).astype(np.int64), mispredicted)
        share = np.divide(
            wrong, requests[:, place], out=np.zeros(len(wrong)), where=requests[:, place] > 0
        ).clip(0, 1)
        taken = CLASSES.index(lower)
        arriving[:, place] -= share * requests[:, place]
        arriving[:, taken] += share * requests[:, place]
        brought[:, place] -= share * tokens[:, place]
        brought[:, taken] += share * requests[:, place] * profile.classes[lower].tokens
        moved[:, place] += share * tokens[:, place]
        longer[:, place] = wrong
    return Offered(step_s, arriving, brought, moved, longer)


@dataclass(frozen=True, eq=False)
class Series:
    """What a simulation shows over time, by slot; arrays of one length.

    Attributes:
        time_s: beginning of each slot, s.
        power_w: of the fleet, on average.
        load_tokens_s: that arrives.
        gpus: in use at the slot's end, starting ones too.
        requests: that arrive.
        attained: of these, how many in the end met their SLOs, counted when that is certain.
    """

    time_s: FloatArray
    power_w: FloatArray
    load_tokens_s: FloatArray
    gpus: FloatArray
    requests: FloatArray
    attained: FloatArray


class Stage(NamedTuple):
    """What runs from some time on: a fleet, and what starting instances draw beside it, W."""

    begin_s: float
    fleet: FleetSpec
    starting_w: float


@dataclass(frozen=True, eq=False)
class Simulation:
    """What came of a policy.

    Attributes:
        policy: its name.
        energy_j: of all GPUs in use, J; GPUs without an instance are given back and draw nothing.
        requests: that arrived.
        attained: of these, those that met TTFT and TBT.
        started: instances started.
        resharded: instances made of other instances' GPUs.
        clock_changes: of instances, from slot to slot.
        raised: times a pool with planned clocks went to those of its highest capacity in an
            emergency; the GPU manager's clocks go there as the load does.
        spilled: requests that went to a higher pool for want of room.
        moved: requests that moved because their output was longer than predicted.
        series: over time.
        offered: what arrived.
        stages: what ran, in order of time.
    """

    policy: str
    energy_j: float
    requests: float
    attained: float
    started: int
    resharded: int
    clock_changes: int
    raised: int
    spilled: float
    moved: int
    series: Series
    offered: Offered
    stages: tuple[Stage, ...]

    @property
    def attainment(self) -> float:
        """Share of requests that met their SLOs."""
        return self.attained / self.requests if self.requests else 1.0

    def saved_percent(self, base: Simulation) -> float | None:
        """Energy saved against another simulation, of its energy; None where that used none."""
        return 100 * (1 - self.energy_j / base.energy_j) if base.energy_j else None

    @property
    def switches(self) -> int:
        """Instances started or re-sharded."""
        return self.started + self.resharded


@dataclass
class _Queue:
    """What waits in a pool.

    Attributes:
        waiting: by class, [when it must be taken up, s; requests; tokens of the pool], oldest
            first.
        late: tokens of the pool whose requests have missed their deadline.
    """

    waiting: dict[str, deque[list[float]]] = field(default_factory=dict)
    late: float = 0.0

    def __bool__(self) -> bool:
        return self.late > 1e-6 or any(self.waiting.values())


class _Flow(NamedTuple):
    """What arrives at a pool per second.

    Attributes:
        name: the class.
        requests: those that the pool's SLO is good enough for.
        tokens: of all requests, in terms of the pool.
    """

    name: str
    requests: float
    tokens: float


@dataclass(frozen=True)
class _Change:
    """A change under way: the fleet afterwards, and what starting instances draw until then."""

    fleet: FleetSpec
    starting_w: float
    starting_gpus: int


_READY, _SLOT, _EPOCH, _RESHARD = range(4)  # order of events at one time


class Simulator:
    """One policy, one trace.

    Args:
        profile: with the SLOs to be met.
        offered: what arrives.
        policy: decides about the fleet.
        gpus: at most.
        epoch_slots: slots of an epoch of the pool manager.
        overheads: of changes.
    """

    def __init__(
        self,
        profile: ServingProfile,
        offered: Offered,
        policy: Policy,
        *,
        gpus: int,
        epoch_slots: int,
        overheads: Overheads,
    ) -> None:
        self._profile = profile
        self._offered = offered
        self._policy = policy
        self._gpus = gpus
        self._epoch_slots = epoch_slots
        self._overheads = overheads
        self._rates = offered.rates
        self._models: dict[Key, PoolModel] = {}
        self._fleet = policy.initial()
        if self._fleet.gpus > gpus:
            raise NoAnswerError(
                f"{policy.name} needs {self._fleet.gpus} GPUs, {self._fleet.gpus - gpus} more than "
                f"the {gpus} there are"
            )
        self._change: _Change | None = None
        self._stages = [Stage(0.0, self._fleet, 0.0)]
        self._queues: dict[Key, _Queue] = {}
        self._clocks: dict[tuple[Key, int], int] = {}
        self._in_emergency: set[Key] = set()
        self._started = self._resharded = self._clock_changes = self._raised = 0
        self._spilled = 0.0
        slots = len(self._rates)
        self._energy = np.zeros(slots)
        self._attained = np.zeros(slots)
        self._gpus_used = np.zeros(slots)

    def run(self) -> Simulation:
        """Replay the whole trace."""
        slots, step = len(self._rates), self._offered.step_s
        order = count()
        events: list[tuple[float, int, int, int]] = []
        for slot in range(slots):
            heapq.heappush(events, (slot * step, _SLOT, next(order), slot))
            if slot:
                kind = _RESHARD if slot % self._epoch_slots else _EPOCH
                heapq.heappush(events, (slot * step, kind, next(order), slot))
        heapq.heappush(events, (slots * step, _SLOT, next(order), slots))
        now, slot = 0.0, 0
        while events:
            time, kind, _, which = heapq.heappop(events)
            if time > now:
                self._serve(slot, now, time - now)
            now = time
            if kind == _SLOT:
                slot = which
                if slot == slots:
                    break
            elif kind == _READY:
                self._finish_change()
            else:
                ready = self._decide(kind, slot)
                if ready is not None:
                    heapq.heappush(events, (now + ready, _READY, next(order), slot))
            self._note_stage(now)
        return self._result()

    def _note_stage(self, now: float) -> None:
        starting = 0.0 if self._change is None else self._change.starting_w
        if self._stages[-1][1:] != (self._fleet, starting):
            self._stages.append(Stage(now, self._fleet, starting))

    def _decide(self, kind: int, slot: int) -> float | None:
        """Ask the policy; the time until a change is ready, None where there is none."""
        if self._change is not None:
            return None
        seen = self._rates[:slot]
        if kind == _EPOCH:
            wanted = self._policy.every_epoch(self._fleet, seen)
            return None if wanted is self._fleet else self._begin(wanted)
        wanted = self._policy.every_slot(self._fleet, seen)
        return None if wanted is self._fleet else self._begin_reshard(wanted)

    def _begin(self, wanted: FleetSpec) -> float | None:
        """Start what is missing beside what runs, if there is room, else in its place."""
        missing = missing_instances(self._fleet, wanted)
        if not missing:
            self._adopt(wanted)
            return None
        gpus = sum(tp * n for tp, n in missing.items())
        self._started += sum(missing.values())
        idle = idle_power(self._profile, missing)
        if self._fleet.gpus + gpus > self._gpus:
            self._adopt(common(self._fleet, wanted))
        self._change = _Change(wanted, idle, gpus)
        return self._overheads.start

    def _begin_reshard(self, wanted: FleetSpec) -> float | None:
        """GPUs that change hands serve nothing until they are ready."""
        missing: dict[int, int] = {}
        for key, pool in wanted.pools.items():
            before = self._fleet.pools[key].by_degree()
            for tp, n in pool.by_degree().items():
                more = max(0, n - before.get(tp, 0))
                missing[tp] = missing.get(tp, 0) + more
        self._resharded += sum(missing.values())
        if not any(missing.values()):
            self._adopt(wanted)
            return None
        gpus = sum(tp * n for tp, n in missing.items())
        self._adopt(common(self._fleet, wanted))
        self._change = _Change(wanted, idle_power(self._profile, missing), gpus)
        return self._overheads.reshard

    def _finish_change(self) -> None:
        assert self._change is not None
        wanted, self._change = self._change.fleet, None
        self._adopt(wanted)

    def _adopt(self, fleet: FleetSpec) -> None:
        """From now on this fleet serves; queues of pools that are gone go where others serve."""
        for key in [key for key in self._queues if key not in fleet.pools]:
            queue = self._queues.pop(key)
            home = self._home(key, fleet)
            if home is None:
                continue
            factor = needed_for(self._profile, key[0], home[0])
            target = self._queues.setdefault(home, _Queue())
            target.late += queue.late * factor
            for name, entries in queue.waiting.items():
                met = serves(home[0], name) and home[1].covers(self._profile.classes[name].slo)
                moved = [[at, met * requests, tokens * factor] for at, requests, tokens in entries]
                joined = sorted([*target.waiting.get(name, ()), *moved])
                target.waiting[name] = deque(joined)
        self._fleet = fleet

    @staticmethod
    def _home(key: Key, fleet: FleetSpec) -> Key | None:
        """Where the queue of a pool that is gone goes: as strict a pool if there is one."""
        able = [k for host in hosts(key[0], merge=True) for k in fleet.pools if k[0] == host]
        able.sort(key=lambda other: not other[1].covers(key[1]))
        return next(iter([*able, *reversed(list(fleet.pools))]), None)

    def _model(self, key: Key) -> PoolModel:
        model = self._models.get(key)
        if model is None:
            model = self._models[key] = PoolModel(self._profile, *key)
        return model

    def _serve(self, slot: int, now: float, duration: float) -> None:
        """Let time pass with constant arrivals."""
        pools = sorted(self._fleet.pools.values(), key=lambda pool: CLASSES.index(pool.name))
        flows = self._arrivals(slot)
        rooms = {pool.key: self._room(pool, flows.get(pool.key, ())) for pool in pools}
        watts = 0.0 if self._change is None else self._change.starting_w
        for pool in pools:
            mine = flows.get(pool.key, [])
            if rooms[pool.key] < 0 and not self._carries(pool, mine):
                mine = self._spill(pool, mine, -rooms[pool.key], rooms, flows, duration)
            watts += self._run_pool(pool, mine, slot, now, duration)
        self._energy[slot] += watts * duration
        starting = 0 if self._change is None else self._change.starting_gpus
        self._gpus_used[slot] = self._fleet.gpus + starting

    def _arrivals(self, slot: int) -> dict[Key, list[_Flow]]:
        """What comes to each pool in a second of a slot; a class without a pool goes upward."""
        offered = self._offered
        flows: dict[Key, list[_Flow]] = {}
        for place, name in enumerate(CLASSES):
            tokens = float(self._rates[slot, place])
            if tokens == 0:
                continue
            requests = float(offered.requests[slot, place]) / offered.step_s
            slo = self._profile.classes[name].slo
            for key, share in routes_of(self._fleet, self._profile, name):
                factor = needed_for(self._profile, name, key[0])
                met = share if key[1].covers(slo) else 0.0
                flow = _Flow(name, requests * met, tokens * share * factor)
                flows.setdefault(key, []).append(flow)
        return flows

    def _capacity(self, pool: PoolSpec, *, raised: bool) -> float:
        model = self._model(pool.key)
        return sum(
            n * (model.most[tp] if raised or clock is None else model.capacity[tp, clock])
            for (tp, clock), n in pool.groups.items()
        )

    def _room(self, pool: PoolSpec, flows: Sequence[_Flow]) -> float:
        """tokens/s that it could still take at its best clocks; below 0 what is too much."""
        room = self._capacity(pool, raised=True) - sum(flow.tokens for flow in flows)
        return min(room, 0.0) if self._queues.get(pool.key) else room

    def _carries(self, pool: PoolSpec, flows: Sequence[_Flow]) -> bool:
        load = sum(flow.tokens for flow in flows)
        return load <= self._capacity(pool, raised=True) * _ROOM

    def _spill(
        self,
        pool: PoolSpec,
        flows: list[_Flow],
        excess: float,
        rooms: dict[Key, float],
        flows_of: dict[Key, list[_Flow]],
        duration: float,
    ) -> list[_Flow]:
        """Move what is too much to higher pools with room; what stays.

        Args:
            excess: tokens/s of the pool that are too much.
            rooms: tokens/s that each pool could still take; what is moved is taken from it.
            flows_of: what arrives at each pool; what is moved is added to it.
        """
        stays = []
        for flow in sorted(flows, key=lambda f: -self._profile.classes[f.name].slo.ttft_s):
            slo = self._profile.classes[flow.name].slo
            for host in hosts(pool.name, merge=True)[1:]:
                for key, room in rooms.items():
                    if key[0] != host or room <= 0 or excess <= 0 or not key[1].covers(slo):
                        continue
                    if flow.tokens <= 0:
                        break
                    factor = needed_for(self._profile, pool.name, host)
                    tokens = min(excess, flow.tokens, room / factor)
                    share = tokens / flow.tokens
                    part = _Flow(flow.name, share * flow.requests, tokens * factor)
                    flows_of.setdefault(key, []).append(part)
                    rooms[key] -= tokens * factor
                    excess -= tokens
                    self._spilled += part.requests * duration
                    flow = _Flow(flow.name, (1 - share) * flow.requests, flow.tokens - tokens)
            stays.append(flow)
        return stays

    def _run_pool(
        self, pool: PoolSpec, flows: Sequence[_Flow], slot: int, now: float, duration: float
    ) -> float:
        """Serve a pool for a while; what its instances draw on average, W."""
        load = sum(flow.tokens for flow in flows)
        queue = self._queues.setdefault(pool.key, _Queue())
        able = self._capacity(pool, raised=False)
        emergency = bool(queue) or load > able * _ROOM
        if emergency:
            able = self._capacity(pool, raised=True)
        if emergency and pool.key not in self._in_emergency:
            self._raised += any(clock is not None for _, clock in pool.groups)
        (self._in_emergency.add if emergency else self._in_emergency.discard)(pool.key)
        if not queue and load <= able * _ROOM:
            self._attained[slot] += duration * sum(flow.requests for flow in flows)
            return self._power(pool, min(1.0, load / able), raised=emergency) if able else 0.0
        tokens, after = self._run_queue(pool, flows, able, slot, now, duration)
        if able == 0:
            return 0.0
        busy = min(duration, tokens / able)
        joules = busy * self._power(pool, 1.0, raised=True)
        if busy < duration:
            share = min(1.0, after / (duration - busy) / able)
            joules += (duration - busy) * self._power(pool, share, raised=True)
        return joules / duration

    def _run_queue(
        self,
        pool: PoolSpec,
        flows: Sequence[_Flow],
        able: float,
        slot: int,
        now: float,
        duration: float,
    ) -> tuple[float, float]:
        """Second by second while there is a queue; tokens served meanwhile, and afterwards."""
        queue, first_s = self._queues[pool.key], self._first_token_s(pool)
        load = sum(flow.tokens for flow in flows)
        served = passed = 0.0
        while passed < duration - 1e-9:
            step = min(_STEP_S, duration - passed)
            if not queue and load <= able * _ROOM:
                step = duration - passed
                self._attained[slot] += step * sum(flow.requests for flow in flows)
                return served, step * load
            passed += step
            for flow in flows:
                may_wait = max(0.0, self._profile.classes[flow.name].slo.ttft_s - first_s)
                deadline = now + passed + may_wait
                line = queue.waiting.setdefault(flow.name, deque())
                line.append([deadline, flow.requests * step, flow.tokens * step])
            _expire(queue, now + passed)
            tokens, attained = _take(queue, able * step)
            served += tokens
            self._attained[slot] += attained
        return served, 0.0

    def _first_token_s(self, pool: PoolSpec) -> float:
        """TTFT of its slowest instances at their highest loads, s, without any waiting."""
        model = self._model(pool.key)
        return max(
            (
                model.best(tp, model.most[tp]).curve.ttft_at(model.most[tp])
                for tp in pool.by_degree()
            ),
            default=0.0,
        )

    def _power(self, pool: PoolSpec, share: float, *, raised: bool) -> float:
        """W of a pool whose instances carry this share of what they can."""
        model = self._model(pool.key)
        watts = 0.0
        for (tp, clock), n in pool.groups.items():
            if clock is not None and not raised:
                curve = self._profile.curves[pool.name, tp, clock]
                power = curve.power_at(min(curve.max_load, share * model.capacity[tp, clock]))
            else:
                curve, power = model.best(tp, share * model.most[tp])
                self._note_clock((pool.key, tp), curve.frequency_mhz, n)
            watts += n * power
        return watts

    def _note_clock(self, where: tuple[Key, int], clock: int, instances: int) -> None:
        if self._clocks.get(where, clock) != clock:
            self._clock_changes += instances
        self._clocks[where] = clock

    def _result(self) -> Simulation:
        step = self._offered.step_s
        requests = self._offered.requests.sum(axis=1)
        series = Series(
            time_s=step * np.arange(len(self._rates), dtype=np.float64),
            power_w=self._energy / step,
            load_tokens_s=self._rates.sum(axis=1),
            gpus=self._gpus_used,
            requests=requests,
            attained=self._attained,
        )
        return Simulation(
            policy=self._policy.name,
            energy_j=float(self._energy.sum()),
            requests=float(requests.sum()),
            attained=min(float(requests.sum()), float(self._attained.sum())),
            started=self._started,
            resharded=self._resharded,
            clock_changes=self._clock_changes,
            raised=self._raised,
            spilled=self._spilled,
            moved=self._offered.moves,
            series=series,
            offered=self._offered,
            stages=tuple(self._stages),
        )


def _expire(queue: _Queue, now: float) -> None:
    """Requests whose deadline has passed go behind those that can still make it."""
    for line in queue.waiting.values():
        while line and line[0][0] < now:
            queue.late += line.popleft()[2]


def _take(queue: _Queue, most: float) -> tuple[float, float]:
    """Serve up to so many tokens, nearest deadline first: tokens served, requests in time."""
    left, attained = most, 0.0
    while left > 0:
        lines = [line for line in queue.waiting.values() if line]
        if not lines:
            break
        line = min(lines, key=lambda entries: entries[0][0])
        _, requests, tokens = line[0]
        if tokens <= left:
            line.popleft()
            left -= tokens
            attained += requests
        else:
            share = left / tokens
            line[0][1:] = [requests * (1 - share), tokens - left]
            attained += share * requests
            left = 0.0
    late = min(left, queue.late)
    queue.late -= late
    return most - left + late, attained


def routes_of(fleet: FleetSpec, profile: ServingProfile, name: str) -> Sequence[tuple[Key, float]]:
    """Where a class goes, and what share: as planned, or to the lowest pool that may serve it."""
    planned = fleet.routes.get(name)
    if planned and all(fleet.pools[key].groups for key, _ in planned):
        return planned
    able = [
        key
        for host in hosts(name, merge=True)
        for key, pool in fleet.pools.items()
        if key[0] == host and pool.groups
    ]
    slo = profile.classes[name].slo
    able.sort(key=lambda key: not key[1].covers(slo))  # those that keep the SLO first
    return tuple((key, 1.0) for key in able[:1])


def missing_instances(now: FleetSpec, wanted: FleetSpec) -> dict[int, int]:
    """Instances by TP that must be started: one serves any class, so only their number counts."""
    have = now.by_degree()
    return {tp: n - have.get(tp, 0) for tp, n in wanted.by_degree().items() if n > have.get(tp, 0)}


def idle_power(profile: ServingProfile, instances: Mapping[int, int]) -> float:
    """W that instances draw while they start: what the profile says of them without load."""
    watts = 0.0
    for tp, n in instances.items():
        watts += n * min(
            c.power_w[0] for (_, degree, _), c in profile.curves.items() if degree == tp
        )
    return watts


def common(now: FleetSpec, wanted: FleetSpec) -> FleetSpec:
    """What of a fleet stays on the way to another."""
    pools = {}
    for key, pool in now.pools.items():
        after = wanted.pools[key].by_degree() if key in wanted.pools else {}
        groups: dict[tuple[int, int | None], int] = {}
        for (tp, clock), n in pool.groups.items():
            stays = min(n, after.get(tp, 0))
            after[tp] = after.get(tp, 0) - stays
            if stays:
                groups[tp, clock] = stays
        pools[key] = PoolSpec(pool.name, pool.slo, groups)
    return FleetSpec(pools, now.routes)
