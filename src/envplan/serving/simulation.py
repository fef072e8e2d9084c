"""A trace replayed under a policy, request by request, with a fleet that changes as it decides.

What a stretch of requests needs is measured on them, not assumed. Work is counted in seconds of an
instance at its highest clock. It arrives in bins of a tenth of a second, and N instances do N
seconds of it per second, the nearest deadline first. A request is late if the work that goes before
it takes longer than its SLO leaves. The least N at which no more than the wanted share of requests
is late is what the stretch needs: how bursty the traffic is, which lengths come together and which
quantile is asked for are all in it. Memory is the other limit: the contexts of the requests that
are there at once must fit.

csrc/serving.hpp counts and replays. Here the fleet that a policy wants becomes instances that
start, move, change their clocks and leave, each with the time that takes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from envplan._serving import Replay, Service
from envplan.costs.model import Overheads
from envplan.costs.rates import Rate
from envplan.serving.apply import transfer_plan
from envplan.serving.classes import CLASSES, Slo, hosts, serves
from envplan.serving.profile import ServingProfile
from envplan.serving.settings import Settings
from envplan.serving.trace import SLOT_S, Trace
from envplan.units import J_PER_KWH

if TYPE_CHECKING:
    from pandas import DataFrame

#: Columns over time: a slot's beginning (s), mean power of the fleet (W), load that arrives
#: (tokens/s), GPUs in use at its end, starting and leaving ones too, requests that arrive, and how
#: many of these meet their SLOs.
SERIES: Final = ("time_s", "power_w", "load_tokens_s", "gpus", "requests", "attained")

_CLOCK_HOLD_S: Final = 1.0  # before a managed clock goes down
_CLOCK_MARGIN: Final = 0.4  # of the TTFT SLO that a managed clock leaves
_PARTS: Final = 8  # in which a fleet is re-sharded, one after another, each at least an instance
_PACK_SHARE: Final = 0.3  # of it that a request may wait at an instance that is filled up


class Need(NamedTuple):
    """What a stretch of requests asks of one instance size.

    Attributes:
        instances: that it needs, not rounded.
        busy: instances that prompts keep busy on average.
        decoding: requests that decode at a time, on average.
        hopeless: share of requests whose prompts alone take longer than their SLOs.
    """

    instances: float
    busy: float
    decoding: float
    hopeless: float


class Stream:
    """Requests of a trace as a policy may know them: when, how long, which class they look like.

    Args:
        trace: what arrives.
        profile: of the instances, with the SLOs.
        taken: uint8, the class that each request looks like on arrival.

    Attributes:
        service: the same and the profile's tables, compiled; sizes are numbered as in `clocks`.
        clocks: of each TP, MHz; both ascend.
    """

    def __init__(self, trace: Trace, profile: ServingProfile, taken: npt.NDArray[np.uint8]) -> None:
        self.trace, self.profile, self.taken = trace, profile, taken
        self.clocks: dict[int, list[int]] = {}
        places: dict[int, list[int]] = {}
        keys = sorted(profile.phases)
        for place, (tp, clock) in enumerate(keys):
            self.clocks.setdefault(tp, []).append(clock)
            places.setdefault(tp, []).append(place)
        fastest = [(tp, profile.phases[tp, clocks[-1]]) for tp, clocks in self.clocks.items()]
        self.service = Service(
            trace.arrival, *trace.lengths(profile), trace.known, taken,
            [profile.phases[key].tables() for key in keys],
            [(best.kv_tokens, best.chunk_tokens, places[tp]) for tp, best in fastest],
            [(c.slo.ttft_s, c.slo.tbt_s) for c in (profile.classes[name] for name in CLASSES)],
        )  # fmt: skip
        self._need = cache(self.service.need)

    def since(self, begin_s: float) -> Stream:
        """The same without the requests that come before a time, s."""
        kept = slice(int(np.searchsorted(self.trace.arrival, begin_s)), None)
        return Stream(self.trace.part(kept), self.profile, self.taken[kept])

    @cached_property
    def hopeless(self) -> int:
        """Requests whose prompts alone take longer than their SLOs, on any size at any clock."""
        trace, found = self.trace, 0
        given, _ = trace.lengths(self.profile)
        fastest = [self.profile.phases[tp, clocks[-1]] for tp, clocks in self.clocks.items()]
        for place, name in enumerate(CLASSES):
            tokens, count = np.unique(given[trace.known == place], return_counts=True)
            best = np.min([phases.whole_prompt_time(tokens) for phases in fastest], axis=0)
            found += count[best > self.profile.classes[name].slo.ttft_s].sum()
        return int(found)

    def counts(self, begin_s: float, end_s: float) -> dict[str, int]:
        """Requests that arrive in a stretch, by the class they look like; none that has none."""
        found = zip(CLASSES, self.service.counts(begin_s, end_s), strict=True)
        return {name: count for name, count in found if count}

    def need(
        self, begin_s: float, end_s: float, classes: Iterable[str], tp: int, late: float
    ) -> Need:
        """What the requests of some classes in a stretch need; counted once.

        Args:
            begin_s, end_s: of the stretch.
            classes: those that count.
            tp: GPUs of an instance; at its highest clock.
            late: share of requests that may be late.
        """
        mask = sum(1 << CLASSES.index(name) for name in set(classes))
        return Need(*self._need(begin_s, end_s, mask, list(self.clocks).index(tp), late))


@dataclass(frozen=True)
class PoolSpec:
    """A pool as a policy wants it: alike instances.

    Attributes:
        name: the longest class that it is for.
        serves: classes that go to it.
        tp: GPUs of an instance.
        clock: MHz.
        count: of instances.
        managed: the clock is where instances are without need; it goes up where prompts would be
            late, and comes down again.
        packs: one instance is filled after another, so that the last ones idle.
    """

    name: str
    serves: frozenset[str]
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
class Simulation:
    """What came of a policy.

    Attributes:
        policy: its name.
        energy_j: of all GPUs in use; GPUs without an instance are given back and draw nothing.
        requests: that arrived.
        attainment: share of them that met their SLOs, TTFT and TBT.
        attainment_by_class: the same of each class that came.
        first_in_time, tokens_in_time: shares whose first and whose further tokens were in time.
        started: instances started, without those that were there at the beginning.
        resharded: instances made of other instances' GPUs.
        moved: weights sent from GPU to GPU to re-shard instances, in whole copies of the model.
        clock_changes: of instances.
        helped: requests that another pool took because they would have been late in their own.
        squashed: requests given up because they waited too long; their SLOs are missed.
        hopeless: requests that no instance could answer in time, whose prompts alone take longer
            than their SLOs; they are missed.
        series: over time, by slot of a minute, a record array with one column for each of SERIES.
    """

    policy: str
    energy_j: float
    requests: int
    attainment: float
    attainment_by_class: Mapping[str, float]
    first_in_time: float
    tokens_in_time: float
    started: int
    resharded: int
    moved: float
    clock_changes: int
    helped: int
    squashed: int
    hopeless: int
    series: Any

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

    @property
    def duration_s(self) -> float:
        """From the first slot to the end of the last, s."""
        return SLOT_S * len(self.series)

    def to_dict(self) -> dict[str, Any]:
        """The results in JSON types, but for what happens over time."""
        return {
            "policy": self.policy,
            "energy_j": self.energy_j,
            "requests": self.requests,
            "slo_attainment": self.attainment,
            "slo_attainment_by_class": self.attainment_by_class,
            "first_tokens_in_time": self.first_in_time,
            "further_tokens_in_time": self.tokens_in_time,
            "instances_started": self.started,
            "instances_resharded": self.resharded,
            "weights_moved_copies": self.moved,
            "clock_changes": self.clock_changes,
            "requests_helped": self.helped,
            "requests_squashed": self.squashed,
            "requests_hopeless": self.hopeless,
            "gpus_mean": self.gpus_mean,
            "gpus_most": self.gpus_most,
            "gpu_hours": self.gpu_hours,
        }

    def to_frame(self) -> DataFrame:
        """What happens over time: a row for each slot, a column for each of SERIES."""
        from pandas import DataFrame

        return DataFrame(self.series)

    def saved_percent(self, base: Simulation) -> float | None:
        """Energy saved against another simulation, of its energy; None where that used none."""
        return 100 * (1 - self.energy_j / base.energy_j) if base.energy_j else None

    def at_rate(self, rate: Rate, site: Overheads | None = None) -> float:
        """What the energy costs at a rate per kWh, money or gCO2.

        Args:
            rate: over time.
            site: PUE and hosts that draw, too; default: none.
        """
        at, site = self.series.time_s, site or Overheads()
        edges = [rate.integral(float(t)) for t in [*at, at[-1] + SLOT_S]]
        watts = site.pue * (self.series.power_w + site.host_power * self.series.gpus)
        return float(np.dot(np.diff(edges), watts)) / J_PER_KWH


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
        settings: GPUs at most, how long changes take, when requests are given up.
    """

    def __init__(self, stream: Stream, settings: Settings) -> None:
        self.stream, self.settings = stream, settings
        self.started = self.resharded = 0
        self.moved = 0.0
        self._tps = list(stream.clocks)
        self._pools: dict[str, int] = {}
        self._steps: list[_Step] = []
        self.replay = Replay(
            stream.service, settings.clock_delay, _CLOCK_HOLD_S, _CLOCK_MARGIN, _PACK_SHARE,
            min(settings.squash, 1e9), SLOT_S, stream.trace.duration_s,
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
        lacking: list[_Start] = []
        for key, pool in fleet.items():
            number = self._pools.setdefault(key, len(self._pools))
            self.replay.set_pack(number, pool.packs)
            size, clock = self._tps.index(pool.tp), self.stream.clocks[pool.tp].index(pool.clock)
            lacking += [_Start(number, size, clock, pool.managed)] * pool.count
        self._route(fleet)
        self._steps.clear()  # of the last change: what was to come of it is in `lacking`
        there = self.replay.instances()
        there.sort(key=lambda i: (i[4], -i[5]))  # those that serve first, the fullest of them
        sizes: dict[int, None] = {}  # of what does not fit, in order
        for move in (False, True):  # what stays in its pool, then what changes to another
            rest = []
            for known in there:
                instance, number, size, *_ = known
                fits = (s for s in lacking if s.size == size and (move or s.pool == number))
                if start := next(fits, None):
                    self.replay.move(instance, start.pool, start.clock, start.managed)
                    lacking.remove(start)
                else:
                    rest.append(known)
                    sizes.setdefault(size)
            there = rest
        left = [(i[0], self._tps[size]) for size in sizes for i in there if i[2] == size]
        if warm:
            for start in lacking:
                self.replay.start(*start, now)
        else:
            self._change(lacking, left, now)

    def _change(self, lacking: list[_Start], left: list[tuple[int, int]], now: float) -> None:
        """Start what is lacking, and let go what is left over when it is not needed any more."""
        sizes = self._tps
        need, have = sum(sizes[s.size] for s in lacking), sum(gpus for _, gpus in left)
        part = 0  # GPUs that are re-sharded at a time
        if lacking and left:
            largest = max(*(sizes[s.size] for s in lacking), *(gpus for _, gpus in left))
            part = max(largest, math.ceil(need / _PARTS))
        fresh = min(max(0, need - have + part), self.settings.gpus - self.in_use())
        first = now
        while lacking and sizes[lacking[0].size] <= fresh:
            fresh -= sizes[lacking[0].size]
            self.started += 1
            first = now + self.settings.startup_s
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
            first += self.settings.reshard_s
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
                self.replay.start(*start, step.at + self.settings.reshard_s)
            self.resharded += len(step.begin)
        self.replay.advance(until)

    def in_use(self) -> int:
        """GPUs that serve, start or leave."""
        return sum(self._tps[size] * n for size, n in self.replay.gpus().items())

    def _route(self, fleet: Fleet) -> None:
        """Send classes where they belong; pools that could serve them help, the best ones first.

        A pool that is given up helps, too, as long as it has instances.
        """
        old = [number for key, number in self._pools.items() if key not in fleet]
        slos = {name: known.slo for name, known in self.stream.profile.classes.items()}
        promised = {key: Slo.strictest(slos[c] for c in pool.serves) for key, pool in fleet.items()}

        def rank(key: str, name: str) -> tuple[bool, int]:
            home = fleet[key].name
            able = promised[key].covers(slos[name]) and serves(home, name)
            return not able, [*hosts(name), *reversed(CLASSES)].index(home)

        for place, name in enumerate(CLASSES):
            ranked = sorted(fleet, key=partial(rank, name=name))
            home = fleet.routes.get(name, ranked[0])
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
        counts, slots = self.stream.trace.counts, len(gpus)
        tokens = np.array([self.stream.profile.classes[name].tokens for name in CLASSES])
        columns = (
            SLOT_S * np.arange(slots), energy[:slots] / SLOT_S, counts @ tokens / SLOT_S,
            np.array(gpus), counts.sum(axis=1), attained[:slots],
        )  # fmt: skip
        series = np.rec.fromarrays(
            [column[first:] for column in columns], dtype=[(name, np.float64) for name in SERIES]
        )
        came, first_in_time, tokens_in_time, met = by_class.sum(axis=0).tolist()
        return Simulation(
            policy=policy,
            energy_j=float(series.power_w.sum()) * SLOT_S,
            requests=came,
            attainment=met / came,
            attainment_by_class={
                name: met / came
                for name, (came, _, _, met) in zip(CLASSES, by_class.tolist(), strict=True)
                if came
            },
            first_in_time=first_in_time / came,
            tokens_in_time=tokens_in_time / came,
            started=self.started,
            resharded=self.resharded,
            moved=self.moved,
            clock_changes=changes,
            helped=helped,
            squashed=squashed,
            hopeless=self.stream.hopeless,
            series=series,
        )
