"""The fleet of least power for steady loads, with prefill and decode apart or together.

A fleet holds if enough requests meet their SLOs when it is replayed (plan_replay.py). One draw of
arrivals shows quickly which fleets may hold; only all draws prove it.

Apart: load curves of each phase (phase_curves.py) say how many instances of each configuration
carry the load, and about what they draw.

1. The pairs of a prefill and a decode configuration that draw the least by these curves, and those
   at the highest clocks, are replayed, with the transfers between.
2. Each pair gets more instances, of the phase where that helps most, until it may hold; then as few
   as still hold.
3. From the pair that draws least, one phase in turn tries other configurations, until none that is
   tried draws less.

All classes share one pair of pools or, where they may not be merged, each has its own.

Together: all classes share one pool of alike instances that run both phases. Step 2 is the same. It
begins from every configuration that might draw less than the best fleet so far. A curve is of one
instance. Several together need fewer than it says, as bursts spread, and whole instances round up
what it says: so the bound of a configuration is for clearly fewer instances.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import pairwise, product
from operator import itemgetter
from typing import ClassVar, Final, NamedTuple

from envplan.errors import InputError, NoAnswerError
from envplan.serving.instances import Instances
from envplan.serving.performance import Configuration
from envplan.serving.phase_curves import (
    PhaseCurve,
    RequestMix,
    both_curves,
    decode_curves,
    prefill_curves,
)
from envplan.serving.plan_replay import PlanDraws, PlanReplay
from envplan.serving.profile import ServingProfile
from envplan.serving.settings import Settings
from envplan.serving.split_fleet import SplitFleet

#: Configurations of each phase that are paired at first.
_CONFIGURATIONS: Final = 4
#: Of these pairs, so many are replayed.
_REPLAYED_PAIRS: Final = 4
#: Other configurations of a phase are tried until so many in a row do not draw less.
_TRIED_IN_VAIN: Final = 4
#: Configurations with which the fleet would draw so many times more, by curves, are not tried.
_HOPELESS: Final = 1.5
#: Curves are for so small a part of the late requests that the SLO quantile allows: in each phase,
_LATE_PART_OF_PHASE: Final = 0.35
#: and on instances that run both.
_LATE_PART: Final = 2 * _LATE_PART_OF_PHASE
#: Instances are added one by one or, where there are many of a phase, this share of them.
_GROWTH: Final = 1 / 8
#: One of so many parts of the instances is taken away at a time; later, parts are smaller.
_FIRST_PARTS: Final = 16
#: Every fleet that holds has at least this share of the instances that its curve says, not rounded
#: up: the least that was seen, of 2 to 40 instances, was 0.80.
_LEAST_COUNT_SHARE: Final = 0.7
#: No fleet draws this many times less than its curve says for as many instances: the most that was
#: seen was 1.07.
_CURVE_MARGIN: Final = 1.1
#: A fleet that draws so many times more than another one in one draw does so in all draws.
_POWER_MARGIN: Final = 1.02


#: The curves of a phase, by configuration.
Curves = Mapping[Configuration, PhaseCurve]


class HeldFleet(NamedTuple):
    """A fleet that holds: a replay shows that enough requests meet their SLOs.

    Attributes:
        fleet: its instances.
        requests_s: requests per second that it serves, by class.
        replay: what all draws showed of it.
        power_w: power of all its instances in the replay.
    """

    fleet: SplitFleet
    requests_s: Mapping[str, float]
    replay: PlanReplay
    power_w: float


def fleets_apart(
    profile: ServingProfile,
    requests_s: Mapping[str, float],
    gpus: int,
    *,
    slo_quantile: float,
    link_bytes_s: float,
    merge: bool = True,
) -> list[HeldFleet]:
    """The fleets whose instances run prompts or decode: one for all classes, or one for each.

    Args:
        profile: with the SLOs to be met, and the size of contexts.
        requests_s: requests per second by class.
        gpus: at most. Where each class has a fleet, those of the first classes choose first.
        slo_quantile: percent of requests that must meet their SLOs.
        link_bytes_s: of a GPU's network, over which contexts go from prefill to decode.
        merge: whether all classes share a fleet.

    Raises:
        InputError: the profile does not say how large contexts are.
        NoAnswerError: none that was found holds within the GPUs.
    """
    if profile.kv_bytes_per_token is None:
        raise InputError(
            "the profile's sidecar does not say in kv_bytes_per_token how large contexts are that "
            "go from prefill to decode",
            path=profile.sidecar,
        )
    requests_of_fleets: list[Mapping[str, float]] = [requests_s]
    if not merge:
        requests_of_fleets = [{name: rate} for name, rate in requests_s.items()]
    fleets: list[HeldFleet] = []
    free_gpus = gpus
    for requests_of_fleet in requests_of_fleets:
        mix = RequestMix(requests_of_fleet, link_bytes_s)
        held = _PairSearch(profile, mix, free_gpus, slo_quantile / 100).best()
        fleets.append(held)
        free_gpus -= held.fleet.gpus
    return fleets


def shared_fleet(
    profile: ServingProfile,
    requests_s: Mapping[str, float],
    gpus: int,
    *,
    slo_quantile: float,
    clocks_mhz: Collection[int] | None = None,
) -> HeldFleet:
    """The fleet of alike instances that run both phases for all classes.

    Args:
        profile: with the SLOs to be met.
        requests_s: requests per second by class.
        gpus: at most.
        slo_quantile: percent of requests that must meet their SLOs.
        clocks_mhz: that they may run at; None: all of the profile.

    Raises:
        NoAnswerError: none that was found holds within the GPUs.
    """
    mix = RequestMix(requests_s, Settings.link_bytes_s)
    return _SharedSearch(profile, mix, gpus, slo_quantile / 100, clocks_mhz).best()


class _Candidate(NamedTuple):
    """Configurations to try, and where the search for the numbers of their instances begins.

    Attributes:
        fleet: as many instances as curves say.
        bound_w: whatever their numbers, a fleet of them that holds is not likely to draw less.
    """

    fleet: SplitFleet
    bound_w: float


@dataclass(frozen=True, eq=False)
class _FleetSearch(ABC):
    """The search for the configurations of a fleet's instances, and their numbers.

    Attributes:
        profile: with the SLOs.
        mix: the requests that come.
        gpus: the most that a fleet may have.
        target: share of requests that must meet their SLOs.
    """

    profile: ServingProfile
    mix: RequestMix
    gpus: int
    target: float

    #: The instances of its fleets, in words for users.
    NAME: ClassVar[str]

    def best(self) -> HeldFleet:
        """The fleet of least power that holds, of those that are tried.

        Raises:
            NoAnswerError: none holds within the GPUs.
        """
        best = self._least_of(self._candidates(), best=None)
        if best is None:
            raise NoAnswerError(
                f"no fleet of {self.NAME} meets the SLOs of {100 * self.target:.4g}% of requests "
                f"within {self.gpus} GPUs"
            )
        return self._refined(best)

    @abstractmethod
    def _candidates(self) -> list[_Candidate]:
        """The configurations to begin with, the most promising first."""

    @abstractmethod
    def _refined(self, best: HeldFleet) -> HeldFleet:
        """The best fleet of a further search, which begins from the best of the candidates."""

    def _least_of(
        self,
        candidates: Iterable[_Candidate],
        best: HeldFleet | None,
        most_in_vain: float = math.inf,
    ) -> HeldFleet | None:
        """The fleet of least power that holds: the best so far, or one of the candidates.

        Args:
            candidates: the most promising first.
            best: the best so far; None: none.
            most_in_vain: after so many in a row that do not draw less, no more are tried.
        """
        in_vain = 0
        for fleet, bound_w in candidates:
            if in_vain >= most_in_vain:
                break
            least_w = math.inf if best is None else best.power_w
            if bound_w >= least_w:
                continue
            held = self._smallest_that_holds(fleet, least_w)
            if held is not None and held.power_w < least_w:
                best, in_vain = held, 0
            else:
                in_vain += 1
        return best

    def _smallest_that_holds(self, estimated: SplitFleet, to_beat_w: float) -> HeldFleet | None:
        """The fewest instances of the same configurations that hold.

        Args:
            estimated: where the search begins.
            to_beat_w: power of another fleet that holds.

        Returns:
            None: none holds within the GPUs, or it would draw more than the other one.
        """
        fleet: SplitFleet | None = estimated
        while fleet is not None:
            if self._may_hold(fleet):
                for smaller in _growing_by_one(self._shrinking(fleet)):
                    # Those that follow have even more GPUs, and draw more.
                    if smaller.gpus > self.gpus:
                        return None
                    if self._power_in_one_draw_w(smaller) > _POWER_MARGIN * to_beat_w:
                        return None
                    held = self._held_or_none(smaller)
                    if held is not None:
                        return held
            fleet = self._better(fleet)
        return None

    def _shrinking(self, fleet: SplitFleet) -> list[SplitFleet]:
        """A fleet that may hold, then ever smaller ones that may, each drawing less than the last.

        The last cannot lose one more instance, hold and draw less.
        """
        fleets = [fleet]
        parts = _FIRST_PARTS
        while True:
            smaller = self._smaller(fleets[-1], parts)
            if smaller is not None:
                fleets.append(smaller)
            elif parts >= fleets[-1].most_of_a_role:
                return fleets
            else:
                parts *= 2

    def _smaller(self, fleet: SplitFleet, parts: int) -> SplitFleet | None:
        """The fleet of least power that may hold with one of so many parts of a phase less.

        None where no such fleet may hold and draws less.
        """
        best: SplitFleet | None = None
        least_w = self._power_in_one_draw_w(fleet)
        for smaller in _shrunk(fleet, parts):
            if self._may_hold(smaller) and self._power_in_one_draw_w(smaller) < least_w:
                best, least_w = smaller, self._power_in_one_draw_w(smaller)
        return best

    def _may_hold(self, fleet: SplitFleet) -> bool:
        """Whether enough requests meet their SLOs in one draw: if not, all draws refuse it, too."""
        return self._one_draw(fleet).meets(self.target)

    def _held_or_none(self, fleet: SplitFleet) -> HeldFleet | None:
        """The fleet with its replay; None where too few requests meet their SLOs in all draws."""
        if not self._may_hold(fleet):
            return None
        replay = self._draws(fleet).replay_unless_below(self.target)
        if not replay.meets(self.target):
            return None
        return HeldFleet(fleet, self.mix.requests_s, replay, _power_w(fleet, replay))

    def _power_in_one_draw_w(self, fleet: SplitFleet) -> float:
        return _power_w(fleet, self._one_draw(fleet))

    def _better(self, fleet: SplitFleet) -> SplitFleet | None:
        """The fleet with more instances of a phase, or of both, with which most SLOs are met.

        None where more instances do not help, or there are no GPUs for them.
        """
        grown = [larger for larger in _grown(fleet) if larger.gpus <= self.gpus]
        best = max(grown, key=self._score, default=None)
        if best is None or self._score(best) <= self._score(fleet):
            return None
        return best

    def _score(self, fleet: SplitFleet) -> tuple[float, float]:
        """The share of SLOs that a fleet keeps in one draw; where equal, its worst class counts."""
        replay = self._one_draw(fleet)
        worst_class = min(replayed.mean for replayed in replay.classes.values())
        return replay.attainment, worst_class

    def _one_draw(self, fleet: SplitFleet) -> PlanReplay:
        return self._draws(fleet).replay(1)

    @cached_property
    def _draws(self) -> Callable[[SplitFleet], PlanDraws]:
        """The draws of a fleet, each of which is replayed once."""

        def draws(fleet: SplitFleet) -> PlanDraws:
            load = self.mix.load(fleet.first, fleet.decode)
            return PlanDraws(self.profile, pools=[[load]])

        return cache(draws)


@dataclass(frozen=True, eq=False)
class _PairSearch(_FleetSearch):
    """The search for a prefill and a decode configuration, and the instances of each."""

    NAME: ClassVar[str] = "instances for prompts and others to decode"

    def _candidates(self) -> list[_Candidate]:
        """The pairs of least power by the curves of their phases, then those at the highest clocks.

        The latter hold where any do. Pairs are made to fit the GPUs: together, fewer instances may
        do than curves of one say.
        """
        prefill_w = self._by_curve(self._prefill_curves)
        decode_w = self._by_curve(self._decode_curves)
        promising = self._pairs(_promising(prefill_w), _promising(decode_w))
        fastest = self._pairs(_at_highest_clocks(prefill_w), _at_highest_clocks(decode_w))
        candidates = [_Candidate(fleet, bound_w=0.0) for fleet in list(promising)[:_REPLAYED_PAIRS]]
        return candidates + [
            _Candidate(fleet, power_w / _HOPELESS) for fleet, power_w in fastest.items()
        ]

    def _by_curve(self, curves: Curves) -> dict[Instances, float]:
        """The instances of each configuration that carry all requests, and their power in W."""
        requests_s = self.mix.total_requests_s
        power_w: dict[Instances, float] = {}
        for curve in curves.values():
            instances = curve.instances_for(requests_s)
            power_w[instances] = curve.total_power_w(instances.count, requests_s)
        return power_w

    def _pairs(
        self, prefill_w: Mapping[Instances, float], decode_w: Mapping[Instances, float]
    ) -> dict[SplitFleet, float]:
        """Pairs within the GPUs and their power by curves in W: first those that fit as they are.

        Of both kinds those of least power come first.
        """
        fitting: list[tuple[bool, float, SplitFleet]] = []
        for prefill, decode in product(prefill_w, decode_w):
            fleet = SplitFleet(prefill, decode)
            fitted = _fitted(fleet, self.gpus)
            if fitted is not None:
                power_w = prefill_w[prefill] + decode_w[decode]
                fitting.append((fitted != fleet, power_w, fitted))
        fitting.sort(key=itemgetter(0, 1))
        return {fleet: power_w for _, power_w, fleet in fitting}

    def _refined(self, best: HeldFleet) -> HeldFleet:
        """The fleet with another configuration of one phase in turn, while that draws less."""
        while True:
            before = best
            best = self._least_of(self._with_other_prefill(best), best, _TRIED_IN_VAIN) or best
            best = self._least_of(self._with_other_decode(best), best, _TRIED_IN_VAIN) or best
            if best is before:
                return best

    def _with_other_prefill(self, held: HeldFleet) -> list[_Candidate]:
        others_w = self._others(held.fleet.first, self._prefill_curves)
        return [
            _Candidate(replace(held.fleet, first=first), (held.power_w + more_w) / _HOPELESS)
            for first, more_w in others_w.items()
        ]

    def _with_other_decode(self, held: HeldFleet) -> list[_Candidate]:
        assert held.fleet.decode is not None
        others_w = self._others(held.fleet.decode, self._decode_curves)
        return [
            _Candidate(replace(held.fleet, decode=decode), (held.power_w + more_w) / _HOPELESS)
            for decode, more_w in others_w.items()
        ]

    def _others(self, instances: Instances, curves: Curves) -> dict[Instances, float]:
        """Instances of other configurations that do as much, and how much more they draw, in W.

        The curve of these instances said how many were needed, and so many held: other curves are
        taken to be as far off. Those that draw least come first.
        """
        requests_s = self.mix.total_requests_s
        curve = curves[instances.configuration]
        needed_share = instances.count / curve.fraction_for(requests_s)
        power_w = curve.total_power_w(instances.count, requests_s)
        more_w: dict[Instances, float] = {}
        for configuration, other in curves.items():
            if configuration == instances.configuration:
                continue
            count = math.ceil(needed_share * other.fraction_for(requests_s))
            other_w = other.total_power_w(count, requests_s)
            more_w[Instances(configuration, count)] = other_w - power_w
        return dict(sorted(more_w.items(), key=itemgetter(1)))

    @cached_property
    def _prefill_curves(self) -> Curves:
        return _by_configuration(prefill_curves(self.profile, self.mix, self._late_share))

    @cached_property
    def _decode_curves(self) -> Curves:
        return _by_configuration(decode_curves(self.profile, self.mix, self._late_share))

    @property
    def _late_share(self) -> float:
        """Share of requests that each phase may make late by its curve."""
        return _LATE_PART_OF_PHASE * (1 - self.target)


@dataclass(frozen=True, eq=False)
class _SharedSearch(_FleetSearch):
    """The search for a configuration of alike instances that run both phases, and their number.

    Attributes:
        clocks_mhz: that they may run at; None: all of the profile.
    """

    clocks_mhz: Collection[int] | None = None

    NAME: ClassVar[str] = "alike instances"

    def _candidates(self) -> list[_Candidate]:
        """All configurations, the one of least power by its curve first."""
        late_share = _LATE_PART * (1 - self.target)
        profile = self.profile
        if self.clocks_mhz is not None:
            profile = profile.at_clocks(self.clocks_mhz)
        power_w: dict[_Candidate, float] = {}  # by its curve
        for curve in both_curves(profile, self.mix, late_share):
            candidate = self._candidate_or_none(curve)
            if candidate is not None:
                count = candidate.fleet.first.count
                power_w[candidate] = curve.total_power_w(count, self.mix.total_requests_s)
        return sorted(power_w, key=power_w.__getitem__)

    def _refined(self, best: HeldFleet) -> HeldFleet:
        """The same: all configurations were candidates."""
        return best

    def _candidate_or_none(self, curve: PhaseCurve) -> _Candidate | None:
        """As many instances as a curve says or, if fewer, as there are GPUs for.

        None where these are fewer than any fleet that holds has.
        """
        requests_s = self.mix.total_requests_s
        least_count = math.ceil(_LEAST_COUNT_SHARE * curve.fraction_for(requests_s))
        instances = curve.instances_for(requests_s)
        most = self.gpus // instances.configuration.tp
        if most < least_count:
            return None
        fleet = SplitFleet(replace(instances, count=min(most, instances.count)))
        bound_w = curve.total_power_w(least_count, requests_s) / _CURVE_MARGIN
        return _Candidate(fleet, bound_w)


def _promising(power_w: Mapping[Instances, float]) -> dict[Instances, float]:
    """The instances of least power, and those on the fewest GPUs, as GPUs may be few."""
    ranked = sorted(power_w, key=power_w.__getitem__)
    chosen = ranked[:_CONFIGURATIONS]
    if ranked:
        chosen.append(min(ranked, key=lambda instances: instances.gpus))
    return {instances: power_w[instances] for instances in chosen}


def _at_highest_clocks(power_w: Mapping[Instances, float]) -> dict[Instances, float]:
    """Of each TP the instances at the highest clock."""
    fastest: dict[int, Instances] = {}
    for instances in power_w:
        tp, clock_mhz = instances.configuration
        if tp not in fastest or clock_mhz > fastest[tp].configuration.frequency_mhz:
            fastest[tp] = instances
    return {instances: power_w[instances] for instances in fastest.values()}


def _by_configuration(curves: Sequence[PhaseCurve]) -> Curves:
    return {curve.configuration: curve for curve in curves}


def _power_w(fleet: SplitFleet, replay: PlanReplay) -> float:
    """Power of all instances of a fleet in a replay of it, W."""
    power_w = 0.0
    for instances, replayed in zip(fleet.by_role, replay.groups[0], strict=True):
        power_w += instances.count * replayed.power_w
    return power_w


def _fitted(fleet: SplitFleet, gpus: int) -> SplitFleet | None:
    """A fleet with as many instances of each role as GPUs allow, in proportion; None: not one."""
    share = min(1.0, gpus / fleet.gpus)
    counts = [max(1, math.floor(share * instances.count)) for instances in fleet.by_role]
    first, *others = map(_with_count, fleet.by_role, counts)
    fitting = SplitFleet(first, *others)
    return fitting if fitting.gpus <= gpus else None


def _with_count(instances: Instances, count: int) -> Instances:
    return replace(instances, count=count)


def _grown(fleet: SplitFleet) -> list[SplitFleet]:
    """The fleets with more instances of one phase, that of fewer GPUs first; then, of both."""
    first = fleet.first.more(math.ceil(_GROWTH * fleet.first.count))
    if fleet.decode is None:
        return [SplitFleet(first)]
    decode = fleet.decode.more(math.ceil(_GROWTH * fleet.decode.count))
    more_of_one = [replace(fleet, first=first), replace(fleet, decode=decode)]
    more_of_one.sort(key=lambda larger: larger.gpus)
    return [*more_of_one, SplitFleet(first, decode)]


def _shrunk(fleet: SplitFleet, parts: int) -> Iterator[SplitFleet]:
    """The fleets with one of so many parts of a phase's instances less: at least one instance.

    No phase loses its only instance.
    """
    first, decode = fleet.first, fleet.decode
    if first.count > 1:
        yield replace(fleet, first=first.more(-max(1, first.count // parts)))
    if decode is not None and decode.count > 1:
        yield replace(fleet, decode=decode.more(-max(1, decode.count // parts)))


def _growing_by_one(shrinking: Sequence[SplitFleet]) -> Iterator[SplitFleet]:
    """The fleets from the last of some to the first, one instance more at a time.

    Args:
        shrinking: each has fewer instances of one phase than the one before, and as many of the
            other.
    """
    for larger, smaller in reversed(list(pairwise(shrinking))):
        yield smaller
        for count in range(smaller.first.count + 1, larger.first.count):
            yield replace(smaller, first=replace(smaller.first, count=count))
        if smaller.decode is None or larger.decode is None:
            continue
        for count in range(smaller.decode.count + 1, larger.decode.count):
            yield replace(smaller, decode=replace(smaller.decode, count=count))
    yield shrinking[0]
