"""Policies over time: which fleet serves a trace, and what comes of it.

A policy is a row of POLICIES: how it sorts classes into pools, and which knobs it may turn. A new
way to sort is a function from an Outlook to Choices.

What a scaling policy expects is the most of what these stretches needed: the last hour, and the
hours around this one a day or a week ago, times how much the last hour differs from its counterpart
then. In the first two hours there is no past to judge from: the fleet stays as it was sized by the
trace's peak or, with a past, by the trace's first minutes, which are then not replayed.

Between epochs it is looked every minute whether the last ten minutes need more than there is, with
a quarter more for what may come while instances start. So a fleet grows within a minute and shrinks
only with an epoch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import itemgetter
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from envplan.errors import InputError, NoAnswerError
from envplan.serving.classes import CLASSES, hosts, serves
from envplan.serving.plan import check_reachable
from envplan.serving.profile import ServingProfile
from envplan.serving.settings import Settings
from envplan.serving.simulation import Fleet, Machines, Need, PoolSpec, Simulation, Stream
from envplan.serving.trace import SLOT_S, Trace

_HOUR_S: Final = 3600.0
_SEASONS_S: Final = (24 * _HOUR_S, 7 * 24 * _HOUR_S)
_YOUNG_S: Final = 2 * _HOUR_S  # a trace without a past to judge from
_LAST: Final = 1.125  # times the last hour
_RECENT_S: Final = 600.0
_RECENT: Final = 1.25  # times the last ten minutes, while instances start
_MOST: Final = 3.0  # times another day's hours
_WORTH: Final = 0.85  # of its power: what another TP must stay below to be worth a change
_BUSY_BATCH: Final = 16.0  # requests that decode together where instances are filled up
_SMALL: Final = 1.0  # instances: a pool that needs less is merged into a higher one


class Stretch(NamedTuple):
    """A stretch of the trace that something like is expected, and how many times as much of it."""

    begin_s: float
    end_s: float
    factor: float = 1.0


@dataclass(frozen=True, eq=False)
class Outlook:
    """What to expect: the most of what some stretches of the trace needed.

    Attributes:
        stream: what arrived.
        settings: of the simulation.
        stretches: whose likes are expected.
        present: the fleet that runs.
        worth: share of what the present TPs draw that others must stay below to be worth a change;
            0: none is, because instances are needed soon.
    """

    stream: Stream
    settings: Settings
    stretches: Sequence[Stretch]
    present: Fleet = field(default_factory=Fleet)
    worth: float = _WORTH

    @cached_property
    def classes(self) -> list[str]:
        """Those that come, in the order of CLASSES."""
        found = [self.stream.counts(begin, end) for begin, end, _ in self.stretches]
        return [name for name in CLASSES if any(name in counts for counts in found)]

    @property
    def late(self) -> float:
        """Share of requests that may be late."""
        return 1 - self.settings.slo_quantile / 100

    def rate(self, stretch: Stretch) -> float:
        """Requests per second, times its factor."""
        begin, end, factor = stretch
        return factor * sum(self.stream.counts(begin, end).values()) / (end - begin)

    @cached_property
    def busiest(self) -> Stretch:
        """The stretch with the highest rate."""
        return max(self.stretches, key=self.rate)

    def need(self, classes: Iterable[str], tp: int) -> Need:
        """What these classes need in one pool of instances of a TP, headroom included.

        Instances are the most of all stretches. Their work is that of the busiest stretch whatever
        the classes and the TP are, so that the powers of different pools can be compared.
        """
        names = frozenset(classes)

        def of(stretch: Stretch) -> Need:
            begin, end, factor = stretch
            instances, busy, decoding, hopeless = self.stream.need(begin, end, names, tp, self.late)
            return Need(factor * instances, factor * busy, factor * decoding, hopeless)

        work, most = of(self.busiest), max(map(of, self.stretches), key=itemgetter(0))
        room = 1 + self.settings.headroom / 100
        return work._replace(instances=most.instances * room, hopeless=most.hopeless)

    def count(self, classes: Iterable[str], tp: int) -> int:
        """Whole instances that these classes need."""
        return max(1, math.ceil(self.need(classes, tp).instances))

    def able(self, classes: Iterable[str]) -> list[int]:
        """TPs on which the SLOs of these classes can be met at all, ascending, or the largest."""
        known, clocks = self.stream.profile, self.stream.clocks

        def meets(name: str, tp: int) -> bool:
            curve = known.curves.get((name, tp, clocks[tp][-1]))
            return curve is not None and curve.capacity(known.classes[name].slo) > 0

        return [tp for tp in clocks if all(meets(name, tp) for name in classes)] or [max(clocks)]

    def quick(self, classes: Sequence[str], tps: Sequence[int]) -> list[int]:
        """The TPs among these on which hardly more requests are hopeless than on the best one."""
        hopeless = {tp: self.need(classes, tp).hopeless for tp in tps}
        most = min(hopeless.values()) + self.late
        return [tp for tp, share in hopeless.items() if share <= most]

    def power(self, classes: Iterable[str], tp: int, count: int, *, packs: bool) -> float:
        """About what so many instances draw, W: idle, prompts, and decoding on top."""
        need = self.need(classes, tp)
        phases = self.stream.profile.phases[tp, self.stream.clocks[tp][-1]]
        decoding = (
            max(need.decoding / _BUSY_BATCH, 1 - np.exp(-need.decoding))
            if packs
            else count * (1 - np.exp(-need.decoding / count))
        )
        prompt_w = float(phases.prompt_w[len(phases.prompt_w) // 2]) - phases.idle_w
        step_w = float(phases.step_w[0]) - phases.idle_w
        return float(
            count * phases.idle_w + need.busy * prompt_w + max(0.0, decoding - need.busy) * step_w
        )

    def thrifty_clock(self, tp: int) -> int:
        """The clock at which a decode step takes the least energy above idling, MHz."""

        def energy(mhz: int) -> float:
            phases = self.stream.profile.phases[tp, mhz]
            return float((phases.step_w[0] - 0.5 * phases.idle_w) * phases.step_s[0])

        return min(self.stream.clocks[tp], key=energy)


Sorted = Mapping[str, Sequence[str]]  # the classes of each pool, by the lowest that can serve them


def one_pool(outlook: Outlook) -> Sorted:
    """One for everything."""
    return {_home(outlook.classes): outlook.classes}


def by_class(outlook: Outlook) -> Sorted:
    """One for each class."""
    return {name: [name] for name in outlook.classes}


def merged(outlook: Outlook) -> Sorted:
    """One for each class, those that need little put into higher ones, as many as there may be."""
    served: dict[str, Sequence[str]] = {name: [name] for name in outlook.classes}

    def need(name: str) -> float:
        return outlook.need(served[name], outlook.able(served[name])[-1]).instances

    while True:
        several = len(served) > outlook.settings.pools
        for name in [n for n in sorted(served, key=need) if several or need(n) < _SMALL]:
            others = [other for other in served if other != name]
            if higher := [host for host in hosts(name) if host in others]:
                served[higher[0]] = [*served.pop(name), *served[higher[0]]]
                break
            if several:
                both = [*served.pop(name), *served.pop(others[0])]
                served[_home([name, others[0]])] = both
                break
        else:
            return served


def best_split(outlook: Outlook) -> Mapping[int, Sequence[str]]:
    """Classes by TP as least_power has them, or as they are where others draw hardly less."""
    drawn, split = least_power(outlook)
    pools = [
        (p.tp, [c for c in outlook.classes if c in p.serves]) for p in outlook.present.values()
    ]
    present = {tp: names for tp, names in pools if names}
    served = {name for names in present.values() for name in names}
    stays = len(served) == len(outlook.classes)
    return present if stays and outlook.worth * _power(outlook, present) <= drawn else split


def least_power(outlook: Outlook) -> tuple[float, Mapping[int, Sequence[str]]]:
    """The least power, W, of all ways to sort classes into pools, and the classes of each TP then.

    Branch and bound, class by class. Pools have what the bursts of their classes together need, so
    two pools of one TP are never better than one: a class chooses a TP. A pool that serves more
    classes draws no less, so a part of a split bounds the whole from below.
    """
    tps = {name: outlook.quick([name], outlook.able([name])) for name in outlook.classes}
    order = sorted(tps, key=lambda name: -_power(outlook, {tps[name][0]: [name]}))
    best: tuple[float, Mapping[int, Sequence[str]]] = (math.inf, {})
    left = [(0.0, dict[int, Sequence[str]](), 0)]  # power, split, and how many classes it has
    while left:
        power, split, done = left.pop()
        if power < best[0] and done == len(order):
            best = (power, split)
        elif power < best[0]:
            name = order[done]
            grown = [{**split, tp: [*split.get(tp, ()), name]} for tp in tps[name]]
            drawn = [(_power(outlook, each), each, done + 1) for each in grown]
            left += sorted(drawn, key=itemgetter(0), reverse=True)
    return best


def _power(outlook: Outlook, split: Mapping[int, Sequence[str]]) -> float:
    """What the pools of a split draw, W, by Outlook.power."""
    return sum(
        outlook.power(classes, tp, outlook.count(classes, tp), packs=True)
        for tp, classes in split.items()
    )


def _home(classes: Sequence[str]) -> str:
    """The lowest class that is shorter than none of these."""
    return next(host for host in CLASSES if all(serves(host, name) for name in classes))


@dataclass(frozen=True)
class Policy:
    """A policy.

    Attributes:
        about: what it does, in a line.
        sort: the pools it wants; None: those of best_split.
        scales: it is asked again as time passes; otherwise once, with hindsight of the whole trace.
        shards: pools have the TP that draws least, or nearly so and is there; otherwise the largest
            one.
        same_gpus: with any TP, a pool has the GPUs that it needs with the largest.
        managed: clocks follow the load from the thriftiest up; otherwise they are the highest.
        packs: one instance is filled after another, so that the last ones idle.
    """

    about: str
    sort: Callable[[Outlook], Sorted] | None
    scales: bool = False
    shards: bool = False
    same_gpus: bool = False
    managed: bool = False
    packs: bool = False

    def plan(self, outlook: Outlook) -> Fleet:
        """The fleet for what is expected."""
        if self.sort is not None:
            wanted = self.sort(outlook).items()
            return Fleet({name: self._pool(outlook, name, each) for name, each in wanted})
        split, home = best_split(outlook).items(), _home(outlook.classes)
        return Fleet(
            {f"{home} on TP{tp}": self._pool(outlook, home, each, tp) for tp, each in split}
        )

    def _pool(
        self, outlook: Outlook, name: str, classes: Sequence[str], only: int | None = None
    ) -> PoolSpec:
        tps = [only] if only else outlook.able(classes)
        tps = outlook.quick(classes, tps) if self.shards else tps[-1:]
        counts = {tp: outlook.count(classes, tp) for tp in tps}
        if self.same_gpus:
            gpus = tps[-1] * counts[tps[-1]]
            counts = {tp: gpus // tp for tp, count in counts.items() if gpus // tp >= count}
        present = [pool.tp for pool in outlook.present.values() if pool.name == name]

        def watts(tp: int) -> float:
            drawn = outlook.power(classes, tp, counts[tp], packs=self.packs)
            return drawn * (outlook.worth if tp in present else 1.0)

        tp = min(counts, key=watts)
        clock = outlook.thrifty_clock(tp) if self.managed else outlook.stream.clocks[tp][-1]
        return PoolSpec(name, frozenset(classes), tp, clock, counts[tp], self.managed, self.packs)


_OURS: Final = {"shards": True, "managed": True, "packs": True}

#: All policies, in the order they are compared in. The first six are DynamoLLM's.
POLICIES: Final[Mapping[str, Policy]] = {
    "SinglePool": Policy("one pool on TP8 at the highest clock, sized for the peak", one_pool),
    "MultiPool": Policy("a pool for each class, otherwise the same", by_class),
    "ScaleInst": Policy(
        "MultiPool, and the number of instances follows the load", by_class, scales=True
    ),
    "ScaleShard": Policy(
        "MultiPool, and each pool's GPUs have the thriftiest TP", by_class, shards=True,
        same_gpus=True,
    ),
    "ScaleFreq": Policy("MultiPool, and clocks follow the load", by_class, managed=True),
    "DynamoLLM": Policy(
        "all three, and small pools are merged into higher ones", merged, scales=True, shards=True,
        managed=True,
    ),
    "static": Policy("the best pools for the peak, never changed", None, **_OURS),
    "exact": Policy("the best pools for what each epoch needs", None, scales=True, **_OURS),
    # One pool, because bursts of different classes even each other out. Prompts with near deadlines
    # go first in every instance, so short requests do not wait for long ones.
    "envplan": Policy(
        "one pool, filled up instance by instance; number, TP, clocks follow the load", one_pool,
        scales=True, **_OURS,
    ),
}  # fmt: skip


def stream_of(profile: ServingProfile, trace: Trace, settings: Settings) -> Stream:
    """The requests as policies see them; for settings with the same past, predictor and seed.

    Raises:
        NoAnswerError: a class cannot be served at all.
    """
    past = slice(int(np.searchsorted(trace.arrival, settings.past)) or None)
    known = profile.with_lengths(trace.part(past).mean_lengths())
    stream = Stream(trace, known, predicted(trace, settings))
    check_reachable(known, [CLASSES[k] for k in np.unique(trace.known)])
    return stream


def predicted(trace: Trace, settings: Settings) -> npt.NDArray[np.uint8]:
    """The classes that requests are taken for: some outputs are predicted one length off."""
    random = np.random.default_rng(settings.seed)
    draw = random.random(len(trace), dtype=np.float32)  # one draw says whether, and which way
    made, share = (trace.known % 3).astype(np.int8), settings.mispredicted / 100
    wrong, short = draw < share, draw < settings.underestimated / 100 * share
    made[wrong] += np.where(short[wrong], -1, 1).astype(np.int8)
    return (trace.known // 3 * 3 + np.clip(made, 0, 2)).astype(np.uint8)


def _first(stream: Stream, past_s: float) -> list[Stretch]:
    """What the first fleet is sized by: the past or, with hindsight, the trace's peak.

    The peak is the trace or, where it is longer than two hours, those two of it with the most
    tokens.
    """
    duration = stream.trace.duration_s
    if past_s or duration <= _YOUNG_S:
        return [Stretch(0.0, past_s or duration, _LAST if past_s else 1.0)]
    tokens = stream.trace.counts @ [stream.profile.classes[name].tokens for name in CLASSES]
    found = []
    for minutes in (60, 10):  # the busiest hour, and the hour around the busiest ten minutes
        sums = np.convolve(tokens, np.ones(minutes), mode="valid")
        middle = (int(sums.argmax()) + minutes / 2) * SLOT_S
        begin = min(max(0.0, middle - _HOUR_S / 2), duration - _HOUR_S)
        found.append(Stretch(begin, begin + _HOUR_S))
    return found


def expected(stream: Stream, now: float, ahead: float) -> list[Stretch]:
    """The stretches whose likes are expected until `ahead` seconds from now."""
    found = [Stretch(max(0.0, now - _HOUR_S), now, _LAST)]
    for season in _SEASONS_S:
        then = now - season
        if then - _HOUR_S >= 0:
            last, before = (sum(stream.counts(at - _HOUR_S, at).values()) for at in (now, then))
            factor = min(_MOST, last / before) if before else 1.0
            found.append(Stretch(then, min(now, then + ahead), factor))
    return found


def replay(name: str, stream: Stream, settings: Settings) -> Simulation:
    """Replay a stream under a policy; as simulate, which makes the stream.

    Raises:
        InputError: there is no such policy, or no request comes after the past.
        NoAnswerError: the policy's fleet is too large.
    """
    if name not in POLICIES:
        raise InputError(f"there is no policy {name!r}; there are: {', '.join(POLICIES)}")
    past, duration = SLOT_S * math.ceil(settings.past / SLOT_S), stream.trace.duration_s
    for where, begin, end in (("in", 0.0, past), ("after", past, duration)):
        if (past or where == "after") and not stream.counts(begin, end):
            raise InputError(f"no request comes {where} a past of {past:g} s of {duration:g} s")
    machines = Machines(stream.since(past) if past else stream, settings)
    fleet = _plan(name, Outlook(stream, settings, _first(stream, past)))
    machines.adopt(fleet, 0.0, warm=True)
    epoch = max(1, round(settings.epoch / SLOT_S))
    gpus: list[int] = []
    for slot in range(round(duration / SLOT_S)):
        now = slot * SLOT_S
        if POLICIES[name].scales and now >= (past or _YOUNG_S):
            outlook = Outlook(stream, settings, [], fleet)
            wanted = _next(name, outlook, now, shrinks=slot % epoch == 0)
            if wanted != fleet:
                fleet = wanted
                machines.adopt(fleet, now)
        machines.advance(now + SLOT_S)
        gpus.append(machines.in_use())
    return machines.result(name, gpus, round(past / SLOT_S))


def _plan(name: str, outlook: Outlook) -> Fleet:
    fleet = POLICIES[name].plan(outlook)
    if fleet.gpus > outlook.settings.gpus:
        raise NoAnswerError(
            f"{name} needs {fleet.gpus} GPUs, {fleet.gpus - outlook.settings.gpus} more than the "
            f"{outlook.settings.gpus} there are (--gpus)"
        )
    return fleet


def _next(name: str, outlook: Outlook, now: float, *, shrinks: bool) -> Fleet:
    """The fleet from now on; a new one at an epoch, or where the present one falls short.

    Args:
        outlook: what runs; what is expected is found here.
    """
    stream, fleet, settings = outlook.stream, outlook.present, outlook.settings

    def short(recent: Outlook) -> bool:
        """Whether some pool has fewer instances than what it serves needed of late."""
        served = [(pool, pool.serves.intersection(recent.classes)) for pool in fleet.values()]
        return not fleet.routes.keys() >= set(recent.classes) or any(
            names and recent.need(names, pool.tp).instances > pool.count for pool, names in served
        )

    stretches = expected(stream, now, settings.epoch + settings.startup_s + SLOT_S)
    recent = Stretch(max(0.0, now - _RECENT_S), now, _RECENT)
    unusual = outlook.rate(recent) > max(map(outlook.rate, stretches))
    if not shrinks and not (unusual and short(replace(outlook, stretches=[recent]))):
        return fleet
    stretches += [recent] if unusual else []
    coming = replace(outlook, stretches=stretches, worth=_WORTH if shrinks else 0.0)
    if not coming.classes:
        return fleet
    try:
        wanted = _plan(name, coming)
    except NoAnswerError:  # more than the GPUs can carry is expected: what runs stays
        return fleet
    for key, pool in [] if shrinks else list(wanted.items()):  # only more instances of a kind
        there = fleet.get(key)
        if there and (there.tp, there.clock) == (pool.tp, pool.clock):
            wanted[key] = replace(pool, count=max(pool.count, there.count))
    return wanted


def simulate(
    profile: ServingProfile, trace: Trace, policy: str = "envplan", settings: Settings | None = None
) -> Simulation:
    """Replay a trace under a policy.

    Args:
        profile: with the SLOs to be met.
        trace: what arrives when.
        policy: one of POLICIES.
        settings: default: Settings().

    Raises:
        InputError: no such policy.
        NoAnswerError: a class cannot be served at all, or the policy's fleet is too large.
    """
    return compare_policies(profile, trace, settings, policies=(policy,))[0]


def compare_policies(
    profile: ServingProfile,
    trace: Trace,
    settings: Settings | None = None,
    *,
    policies: Sequence[str] = tuple(POLICIES),
    progress: Callable[[int, int], None] = lambda done, count: None,
    left_out: Callable[[str], None] | None = None,
) -> list[Simulation]:
    """Replay a trace under several policies; raises as simulate.

    Args:
        policies: their names.
        progress: told how many are done, of how many.
        left_out: told of each policy whose fleet is too large, which is left out then; without it,
            or where none is left, NoAnswerError is raised.
    """
    chosen = settings or Settings()
    stream = stream_of(profile, trace, chosen)
    results = []
    for done, name in enumerate(policies, start=1):
        try:
            results.append(replay(name, stream, chosen))
        except NoAnswerError as error:
            if left_out is None or (done == len(policies) and not results):
                raise
            left_out(f"{error}; it is left out")
        progress(done, len(policies))
    return results
