"""An excerpt of a simulation replayed request by request, with the bursts that flows do not have.

The simulation lets requests arrive evenly within a slot. Here each one comes at a moment of its
own, drawn within its slot, into the fleet that the simulation had by then, and one instance serves
it.

What an instance does with n requests at once is what its profile says of the load at which n are
there. By Little's law that load x is where n tokens = x (TTFT(x) + (output - 1) TBT(x)), for mean
lengths of the pool's class: the instance draws and answers as at x, and all its requests get on at
the same pace. It has places for as many as are there at its capacity, rounded down, so the SLO
between tokens is kept. A request goes to the instance of its pool that is least full. If all are
full, one goes to its clock of highest capacity for as long as it must; then the request goes to a
higher pool with a free place; then it waits for one, the nearest deadline first, those that are
late anyway last. Instances that are given back finish what they have.

A profile's latencies already grow with load as bursts make them, and here bursts come on top. So
SLOs look worse here than they are, as they look better in the flows.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate, count
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from envplan.errors import InputError
from envplan.serving.classes import CLASSES, RequestClass, Slo, shorter_output
from envplan.serving.demand import hosts
from envplan.serving.hierarchy import PoolModel
from envplan.serving.plan import needed_for
from envplan.serving.profile import Curve, ServingProfile
from envplan.serving.simulation import FleetSpec, Key, PoolSpec, Simulation, routes_of

__all__ = ["Excerpt", "replay_requests"]

FloatArray = npt.NDArray[np.float64]
_WARM_S: Final = 600.0  # before the excerpt, for instances to fill
_GRID: Final = 2000  # loads at which an instance's requests are counted
_WHOLE: Final = 1e-9  # what a number of requests may lie below a whole one for rounding


@dataclass(frozen=True)
class Excerpt:
    """A part of a simulation, request by request, and the same part as flows.

    Attributes:
        policy: of the simulation.
        begin_s: from when on, s since the trace's beginning.
        duration_s: how long, s.
        requests: that arrived.
        attained: of these, those that met their SLOs.
        waited: of these, those that found no place at once.
        raised: times an instance went to the clock of its highest capacity.
        spilled: requests that went to a higher pool for want of a place.
        energy_j: of all GPUs, J.
        flow_attainment: share of requests that met their SLOs as flows.
        flow_energy_j: as flows, J.
    """

    policy: str
    begin_s: float
    duration_s: float
    requests: int
    attained: int
    waited: int
    raised: int
    spilled: int
    energy_j: float
    flow_attainment: float
    flow_energy_j: float

    @property
    def attainment(self) -> float:
        """Share of requests that met their SLOs."""
        return self.attained / self.requests if self.requests else 1.0


def replay_requests(
    simulation: Simulation,
    profile: ServingProfile,
    *,
    begin_s: float,
    duration_s: float = 3600.0,
    seed: int = 0,
) -> Excerpt:
    """Replay a part of a simulation request by request.

    Args:
        simulation: of this profile.
        profile: with the SLOs to be met.
        begin_s: from when on, s since the trace's beginning; from the slot on that this lies in.
        duration_s: how long, s, rounded to whole slots; less where the trace ends before.
        seed: of the moments at which requests come.

    Raises:
        InputError: nothing of the trace lies there.
    """
    step, slots = simulation.offered.step_s, len(simulation.offered.requests)
    first = int(begin_s // step)
    if begin_s < 0 or first >= slots:
        raise InputError(f"the trace has nothing at {begin_s:g} s; it lasts {step * slots:g} s")
    end = min(slots, first + max(1, round(duration_s / step)))
    replay = _Replay(simulation, profile, first * step, end * step, seed)
    replay.run()
    series, part = simulation.series, slice(first, end)
    arrived = float(series.requests[part].sum())
    in_time = min(arrived, float(series.attained[part].sum()))  # some may have come before
    return Excerpt(
        policy=simulation.policy,
        begin_s=first * step,
        duration_s=(end - first) * step,
        requests=replay.requests,
        attained=replay.attained,
        waited=replay.waited,
        raised=replay.raised,
        spilled=replay.spilled,
        energy_j=replay.joules,
        flow_attainment=in_time / arrived if arrived else 1.0,
        flow_energy_j=float(series.power_w[part].sum()) * step,
    )


class _Pace(NamedTuple):
    """What an instance does with 0, 1, 2, ... requests: how long one stays, W, TTFT."""

    stay_s: list[float]
    power_w: list[float]
    ttft_s: list[float]

    @property
    def places(self) -> int:
        """For how many requests there is a place."""
        return len(self.stay_s) - 1


def _pace(curve: Curve, request: RequestClass, slo: Slo) -> _Pace:
    most = curve.capacity(slo)
    loads = np.union1d(np.linspace(0.0, most, _GRID), [x for x in curve.load if x < most])
    ttft, tbt = (np.interp(loads, curve.load, values) for values in (curve.ttft_s, curve.tbt_s))
    there = loads * (ttft + max(0.0, request.output_tokens - 1) * tbt) / request.tokens
    there = np.maximum.accumulate(there)  # a profile's latencies may fall with load
    numbers = np.arange(1.0, max(1.0, np.floor(there[-1] + _WHOLE)) + 1)
    at = [0.0, *(min(most, float(x)) for x in np.interp(numbers, there, loads))]
    stays = [n * request.tokens / x for n, x in zip(numbers, at[1:], strict=True)]
    return _Pace(
        [1.0, *(float(x) for x in stays)],
        [curve.power_at(x) for x in at],
        [curve.ttft_at(x) for x in at],
    )


@dataclass(eq=False)
class _Request:
    """One request.

    Attributes:
        at: when it came, s.
        name: the class it is taken for.
        work: its tokens, of those of a mean request of its class.
        deadline: when it must be taken up, s, but for its first token's own time.
        counts: whether it is of the excerpt and not moved there from another pool.
        later: class and work that it turns out to have when it is through; None: those it has.
    """

    at: float
    name: str
    work: float
    deadline: float
    counts: bool
    later: tuple[str, float] | None = None


@dataclass(eq=False)
class _Instance:
    """One instance, and the requests in it by the progress at which they leave."""

    tp: int
    usual: _Pace
    fastest: _Pace
    pace: _Pace
    since: float
    progress: float = 0.0
    inside: list[tuple[float, int, _Request]] = field(default_factory=list)
    version: int = 0

    def slow_down(self) -> None:
        """To its usual clock, if what is inside has places there; else to the fastest."""
        fits = len(self.inside) <= self.usual.places
        self.pace = self.usual if fits else self.fastest

    def leaves_at(self) -> float:
        """When the next request leaves if nothing happens before, s."""
        return self.since + (self.inside[0][0] - self.progress) * self.pace.stay_s[len(self.inside)]


@dataclass(eq=False)
class _Pool:
    """Instances, and who waits for a place in one of them."""

    key: Key
    instances: list[_Instance]
    waiting: list[tuple[float, int, _Request]] = field(default_factory=list)
    late: deque[_Request] = field(default_factory=deque)


class _Replay:
    """One excerpt.

    Args:
        simulation: whose part it is.
        profile: with the SLOs to be met.
        begin: of the excerpt, s.
        end: of the excerpt, s.
        seed: of the moments at which requests come.
    """

    def __init__(
        self, simulation: Simulation, profile: ServingProfile, begin: float, end: float, seed: int
    ) -> None:
        self._simulation = simulation
        self._offered = simulation.offered
        self._profile = profile
        self._begin, self._end = begin, end
        self._random = np.random.default_rng(seed)
        self._order = count()
        self._now = max(0.0, begin - _WARM_S)
        self._models: dict[Key, PoolModel] = {}
        self._paces: dict[tuple[Key, int, int], _Pace] = {}
        self._fleet: FleetSpec = simulation.stages[0].fleet
        self._pools: dict[Key, _Pool] = {}
        self._events: list[tuple[float, int, _Instance, _Pool, int]] = []
        self.requests = self.attained = self.waited = self.raised = self.spilled = 0
        self.joules = 0.0

    def run(self) -> None:
        """Let it all happen."""
        coming = self._arrivals()
        following = next(coming, None)
        for time, fleet in self._changes():
            while following is not None and following.at < time:
                self._leave_until(following.at)
                self.requests += following.counts
                self._arrive(following)
                following = next(coming, None)
            self._leave_until(time)
            self._adopt(fleet, int(time // self._offered.step_s))
        self._pass_all()
        for _, _, instance, _, version in self._events:  # what was given back and still serves
            if version == instance.version:
                self._pass(instance)
        self.joules += sum(self._starting_joules())

    def _changes(self) -> Iterator[tuple[float, FleetSpec]]:
        """When the fleet, or what the GPU manager sees, becomes another; the end at last."""
        step, stages = self._offered.step_s, self._simulation.stages
        times = {k * step for k in range(int(self._now // step), round(self._end / step) + 1)}
        times |= {stage.begin_s for stage in stages}
        at = 0
        for time in sorted({self._now, *(t for t in times if self._now < t <= self._end)}):
            while at + 1 < len(stages) and stages[at + 1].begin_s <= time:
                at += 1
            yield time, stages[at].fleet

    def _starting_joules(self) -> Iterator[float]:
        """What instances draw while they start, J, stage by stage."""
        stages = self._simulation.stages
        ends = [*(stage.begin_s for stage in stages[1:]), self._end]
        for stage, until in zip(stages, ends, strict=True):
            shared = min(until, self._end) - max(stage.begin_s, self._begin)
            yield stage.starting_w * max(0.0, shared)

    def _arrivals(self) -> Iterator[_Request]:
        """What comes, in order of time."""
        step = self._offered.step_s
        for slot in range(int(self._now // step), round(self._end / step)):
            found = [r for place in range(len(CLASSES)) for r in self._of_class(slot, place)]
            yield from sorted(
                (r for r in found if self._now <= r.at < self._end), key=lambda r: r.at
            )

    def _of_class(self, slot: int, place: int) -> list[_Request]:
        """The requests of a slot that are taken for a class, those with longer outputs first."""
        offered, name = self._offered, CLASSES[place]
        number = float(offered.requests[slot, place])
        if number == 0:
            return []
        known = self._profile.classes[name]
        work = float(offered.tokens[slot, place]) / (number * known.tokens)
        number = int(number + self._random.random())
        later = self._later(slot, name)
        times = (slot + self._random.random(number)) * offered.step_s
        return [
            _Request(
                at,
                name,
                work,
                at + known.slo.ttft_s,
                at >= self._begin,
                later[k] if k < len(later) else None,
            )
            for k, at in enumerate(times.tolist())
        ]

    def _later(self, slot: int, name: str) -> list[tuple[str, float]]:
        """Class and work of requests that are taken for a class with shorter outputs."""
        for place, longer in enumerate(CLASSES):
            number = round(float(self._offered.wrong[slot, place]))
            if number and shorter_output(longer) == name:
                tokens = float(self._offered.moved[slot, place]) / number
                return [(longer, tokens / self._profile.classes[longer].tokens)] * number
        return []

    def _leave_until(self, time: float) -> None:
        """Let requests leave that are finished by then."""
        while self._events and self._events[0][0] <= time:
            at, _, instance, pool, version = heapq.heappop(self._events)
            if version == instance.version:
                self._now = at
                self._leave(instance, pool)
        self._now = time

    def _pass(self, instance: _Instance) -> None:
        """Let time pass for an instance."""
        present = len(instance.inside)
        shared = min(self._now, self._end) - max(instance.since, self._begin)
        self.joules += max(0.0, shared) * instance.pace.power_w[present]
        if present:
            instance.progress += (self._now - instance.since) / instance.pace.stay_s[present]
        instance.since = self._now

    def _expect(self, instance: _Instance, pool: _Pool) -> None:
        """Note when its next request leaves, after anything has changed."""
        instance.version += 1
        if instance.inside:
            event = (instance.leaves_at(), next(self._order), instance, pool, instance.version)
            heapq.heappush(self._events, event)

    def _leave(self, instance: _Instance, pool: _Pool) -> None:
        self._pass(instance)
        _, _, request = heapq.heappop(instance.inside)
        instance.slow_down()
        self._expect(instance, pool)
        self._call(pool)
        if request.later is not None:
            name, work = request.later
            deadline = self._now + self._profile.classes[name].slo.ttft_s
            self._arrive(_Request(self._now, name, work, deadline, counts=False))

    def _call(self, pool: _Pool) -> None:
        """Let those who wait in, as long as there are places."""
        if pool.waiting:
            first_s = min((i.fastest.ttft_s[-1] for i in pool.instances), default=0.0)
            while pool.waiting and pool.waiting[0][0] - first_s < self._now:
                pool.late.append(heapq.heappop(pool.waiting)[2])
        while (pool.waiting or pool.late) and (instance := self._place(pool)) is not None:
            if pool.waiting:
                self._enter(heapq.heappop(pool.waiting)[2], instance, pool)
            else:
                self._enter(pool.late.popleft(), instance, pool)

    def _place(self, pool: _Pool) -> _Instance | None:
        """The instance to take a request: the emptiest at its clock, or else at its fastest."""
        best, least = None, 1.0
        for instance in pool.instances:
            taken = len(instance.inside) / instance.pace.places
            if taken < least:
                best, least = instance, taken
        if best is None:
            for instance in pool.instances:
                taken = len(instance.inside) / instance.fastest.places
                if taken < least:
                    best, least = instance, taken
        return best

    def _arrive(self, request: _Request) -> None:
        key = self._choose(request.name)
        if key is None:
            return
        pool = self._pools[key]
        waits = pool.waiting or pool.late
        instance = None if waits else self._place(pool)
        if instance is None:
            instance, pool = self._higher(request.name, pool)
            self.spilled += instance is not None and request.counts
        if instance is not None:
            self._enter(request, instance, pool)
            return
        self.waited += request.counts
        heapq.heappush(pool.waiting, (request.deadline, next(self._order), request))

    def _choose(self, name: str) -> Key | None:
        """The pool of a request; None if there is none for its class."""
        shares = routes_of(self._fleet, self._profile, name)
        if len(shares) < 2:
            return shares[0][0] if shares else None
        drawn = self._random.random()
        edges = accumulate(share for _, share in shares)
        reached = (key for (key, _), edge in zip(shares, edges, strict=True) if drawn < edge)
        return next(reached, shares[-1][0])

    def _higher(self, name: str, pool: _Pool) -> tuple[_Instance | None, _Pool]:
        """A place in a higher pool, if there is one; else the pool itself."""
        slo = self._profile.classes[name].slo
        for host in hosts(pool.key[0], merge=True)[1:]:
            for other in self._pools.values():
                if other.key[0] == host and other.key[1].covers(slo) and not other.waiting:
                    instance = self._place(other)
                    if instance is not None:
                        return instance, other
        return None, pool

    def _enter(self, request: _Request, instance: _Instance, pool: _Pool) -> None:
        self._pass(instance)
        leaves = instance.progress + request.work
        heapq.heappush(instance.inside, (leaves, next(self._order), request))
        present = len(instance.inside)
        if present > instance.pace.places:
            instance.pace = instance.fastest
            self.raised += 1
        self._expect(instance, pool)
        slo = self._profile.classes[request.name].slo
        waited = self._now - request.at
        in_time = waited + instance.pace.ttft_s[present] <= slo.ttft_s
        self.attained += request.counts and in_time and pool.key[1].covers(slo)

    def _adopt(self, fleet: FleetSpec, slot: int) -> None:
        """Go over to a fleet, and to the clocks for a slot's load."""
        self._pass_all()
        loads = self._loads(fleet, min(slot, len(self._offered.requests) - 1))
        before, self._fleet, self._pools = self._pools, fleet, {}
        for key, spec in fleet.pools.items():
            pool = self._pools[key] = before.pop(key) if key in before else _Pool(key, [])
            pool.instances = self._instances(pool, spec, loads.get(key, 0.0))
            for instance in pool.instances:
                self._expect(instance, pool)
        for pool in self._pools.values():
            self._call(pool)
        for gone in before.values():
            for request in [*(entry[2] for entry in sorted(gone.waiting)), *gone.late]:
                self._arrive(request)

    def _pass_all(self) -> None:
        for pool in self._pools.values():
            for instance in pool.instances:
                self._pass(instance)

    def _loads(self, fleet: FleetSpec, slot: int) -> dict[Key, float]:
        """tokens/s that come to each pool on average."""
        loads: dict[Key, float] = {}
        for name, rate in zip(CLASSES, self._offered.rates[slot].tolist(), strict=True):
            for key, share in routes_of(fleet, self._profile, name) if rate else ():
                more = rate * share * needed_for(self._profile, name, key[0])
                loads[key] = loads.get(key, 0.0) + more
        return loads

    def _instances(self, pool: _Pool, spec: PoolSpec, load: float) -> list[_Instance]:
        """Those of a pool, of those that it has as far as they go, at their clocks for a load."""
        model, kept = self._model(pool.key), list(pool.instances)
        most = sum(n * model.most[tp] for tp, n in spec.by_degree().items())
        share = min(1.0, load / most) if most else 0.0
        instances = []
        for (tp, clock), number in spec.groups.items():
            managed = model.best(tp, share * model.most[tp]).curve.frequency_mhz
            usual = self._pace(pool.key, tp, clock or managed)
            for _ in range(number):
                alike = [known for known in kept if known.tp == tp]
                if alike:
                    chosen = max(alike, key=lambda i: (i.usual is usual, len(i.inside)))
                    kept.remove(chosen)
                else:
                    chosen = _Instance(tp, usual, self._fastest(pool.key, tp), usual, self._now)
                chosen.usual = usual
                chosen.slow_down()
                instances.append(chosen)
        return instances

    def _fastest(self, key: Key, tp: int) -> _Pace:
        clocks = {clock: most for (n, clock), most in self._model(key).capacity.items() if n == tp}
        return self._pace(key, tp, max(clocks, key=lambda clock: clocks[clock]))

    def _pace(self, key: Key, tp: int, clock: int) -> _Pace:
        if (key, tp, clock) not in self._paces:
            curve = self._profile.curves[key[0], tp, clock]
            self._paces[key, tp, clock] = _pace(curve, self._profile.classes[key[0]], key[1])
        return self._paces[key, tp, clock]

    def _model(self, key: Key) -> PoolModel:
        if key not in self._models:
            self._models[key] = PoolModel(self._profile, *key)
        return self._models[key]
