"""A serving plan replayed: what its groups of instances attain and draw, and each class as a whole.

A group is replayed alone, with its part of the load of each class that its pool serves, in several
draws of Poisson arrivals. Instances for prompts and those that decode for them are replayed
together. What is stated of a group is what other draws keep, too: the mean of the draws less
nine of their standard deviations, or 3.5 times as far below the mean as the worst draw. Near the
highest load one draw in many has a jam that the others have not.

A class that seldom comes has few requests in a draw, of which little can be promised. But over many
draws it has a share of requests in time, and that is known the better the more of them came: so a
class is judged by what its share is in the long run at least, two standard errors below the mean
of all draws; and by that mean where too few of its requests came to tell.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Self

import numpy as np

from envplan.replay.cores import parallel_map
from envplan.serving.classes import FloatArray
from envplan.serving.fleet_controller import RequestCounts
from envplan.serving.profile import ServingProfile
from envplan.serving.steady_replay import SteadyLoad, SteadyReplay, replay_steadily

#: Draws that a plan is replayed with.
NUM_DRAWS: Final = 16
#: Draws that a plan is tried with before it is replayed with all.
_FEW_DRAWS: Final = 3
#: A draw is an hour, but has at least and at most so many requests.
_DRAW_S: Final = 3600.0
_FEWEST_REQUESTS: Final = 4000
_MOST_REQUESTS: Final = 40_000
_DEVIATIONS: Final = 9.0
#: Standard errors by which the share in the long run may lie below the mean of the draws.
_STANDARD_ERRORS: Final = 2.0
#: A class is judged by its share in the long run where so many of its requests may be late; where
#: fewer may, the standard error of a few late ones would decide, and its mean does.
_ENOUGH_LATE: Final = 20.0
_TIMES_WORST_DRAW: Final = 3.5
#: A burst of arrivals makes about so many requests late together.
_LATE_TOGETHER: Final = 4.0
_P99: Final = 0.99
_FIRST_SEED: Final = 1000


@dataclass(frozen=True)
class GroupReplay:
    """A group of alike instances, replayed.

    Attributes:
        attainment: share of its requests that meet their SLOs, at least.
        power_w: mean power of an instance.
        ttft_s: time to first token, 99th percentile.
        tbt_s: mean time between the further tokens of a request, 99th percentile.
    """

    attainment: float
    power_w: float
    ttft_s: float
    tbt_s: float


@dataclass(frozen=True)
class ClassReplay:
    """The requests of a class in all draws, of all groups of instances that serve it.

    Attributes:
        attainment: share that meet their SLOs in any draw, at least.
        num_requests: in all draws together.
        mean: share of these that met their SLOs.
        long_run: share that do in the long run, at least: two standard errors below the mean.
    """

    attainment: float
    num_requests: int
    mean: float
    long_run: float

    @classmethod
    def of(cls, draws: Sequence[RequestCounts]) -> Self:
        """What draws show of a class together."""
        total = RequestCounts.sum(draws)
        deviation = _deviation(draws)
        standard_error = deviation / math.sqrt(len(draws))
        return cls(
            attainment=_kept_share(draws),
            num_requests=int(total.requests),
            mean=total.attainment,
            long_run=max(0.0, total.attainment - _STANDARD_ERRORS * standard_error),
        )

    def judged_share(self, target: float) -> float:
        """The share that is held against a target: in the long run, if enough requests came."""
        may_be_late = (1 - target) * self.num_requests
        return self.long_run if may_be_late >= _ENOUGH_LATE else self.mean


@dataclass(frozen=True)
class PlanReplay:
    """A plan's groups of instances, replayed one by one.

    Attributes:
        groups: of each pool, in the plan's order; instances that decode what others ran the
            prompts of follow these.
        classes: each class that comes, in the profile's order.
        is_whole: whether these are all draws; few say little of the long run.
    """

    groups: Sequence[Sequence[GroupReplay]]
    classes: Mapping[str, ClassReplay]
    is_whole: bool = True

    def missing_classes(self, target: float) -> list[str]:
        """The classes that meet their SLOs too seldom: in the long run or, by few draws, so far."""
        missing = []
        for name, replayed in self.classes.items():
            share = replayed.judged_share(target) if self.is_whole else replayed.mean
            if share < target:
                missing.append(name)
        return missing

    def meets(self, target: float) -> bool:
        """Whether each group and each class meets its SLOs for such a share of requests."""
        return self.attainment >= target and not self.missing_classes(target)

    @property
    def attainment(self) -> float:
        """The lowest share that a group keeps, or that a class had on average."""
        groups = [group.attainment for of_pool in self.groups for group in of_pool]
        return min([*groups, *(replayed.mean for replayed in self.classes.values())])


class PlanDraws:
    """The groups of instances of a plan, replayed with as many draws of arrivals as are asked for.

    Draws are made once.

    Args:
        profile: with the performance of the instances, and the SLOs.
        pools: the groups of each pool, with what comes to them; see ServingPlan.group_loads.
    """

    def __init__(self, profile: ServingProfile, pools: Iterable[Sequence[SteadyLoad]]) -> None:
        self._classes = profile.classes.names
        self._pools = [[_GroupDraws(profile, load) for load in loads] for loads in pools]

    def replay_unless_below(self, share: float) -> PlanReplay:
        """The replay with all draws, or with few, if it attains less than a share of SLOs in these.

        What few draws refuse, more draws would, too.
        """
        replay = self.replay(_FEW_DRAWS)
        return self.replay(NUM_DRAWS) if replay.meets(share) else replay

    def replay(self, num_draws: int) -> PlanReplay:
        """What so many draws show together."""
        groups: list[list[GroupReplay]] = []
        counts_by_class: dict[str, list[list[RequestCounts]]] = {}
        for pool in self._pools:
            groups.append([])
            for group in pool:
                replays = group.first(num_draws)
                groups[-1].append(_summary(replays))
                if group.load.decode is not None:
                    groups[-1].append(_decode_summary(replays))
                for name in group.load.requests_s:
                    none = RequestCounts.sum([])
                    of_class = [replay.counts.get(name, none) for replay in replays]
                    counts_by_class.setdefault(name, []).append(of_class)
        classes: dict[str, ClassReplay] = {}
        for name in self._classes:
            if name in counts_by_class:
                groups_by_draw = zip(*counts_by_class[name], strict=True)
                draws = [RequestCounts.sum(of_draw) for of_draw in groups_by_draw]
                classes[name] = ClassReplay.of(draws)
        return PlanReplay(groups, classes, is_whole=num_draws >= NUM_DRAWS)


class _GroupDraws:
    """The replays of a group, a draw each.

    Args:
        profile: with the performance of the instances, and the SLOs.
        load: the group, and what comes to it.
    """

    def __init__(self, profile: ServingProfile, load: SteadyLoad) -> None:
        self.load = load
        self._profile = profile
        self._replays: list[SteadyReplay] = []
        if not load.requests_s:
            return
        duration_s = max(_DRAW_S, load.duration_for(_FEWEST_REQUESTS))
        self._duration_s = min(duration_s, load.duration_for(_MOST_REQUESTS))

    def first(self, num_draws: int) -> Sequence[SteadyReplay]:
        """The replays of the first draws; where nothing comes, they are all alike."""
        if not self.load.requests_s:
            return [SteadyReplay.idle(self._profile, self.load)] * num_draws
        missing_draws = range(len(self._replays), num_draws)
        self._replays += parallel_map(self._replay, missing_draws)
        return self._replays[:num_draws]

    def _replay(self, draw: int) -> SteadyReplay:
        return replay_steadily(
            self._profile, self.load, duration_s=self._duration_s, seed=_FIRST_SEED + draw
        )


def replay_plan(profile: ServingProfile, pools: Iterable[Sequence[SteadyLoad]]) -> PlanReplay:
    """Replay all groups of instances of a plan, with all draws.

    Args:
        profile: with the performance of the instances, and the SLOs.
        pools: the groups of each pool, with what comes to them; see ServingPlan.group_loads.
    """
    return PlanDraws(profile, pools).replay(NUM_DRAWS)


def replay_group(profile: ServingProfile, load: SteadyLoad) -> GroupReplay:
    """Replay a group of instances with what comes to it."""
    return _summary(_GroupDraws(profile, load).first(NUM_DRAWS))


def _summary(replays: Sequence[SteadyReplay]) -> GroupReplay:
    """What a group's replays show together."""
    return GroupReplay(
        attainment=_kept_share([replay.total_counts for replay in replays]),
        power_w=float(np.mean([replay.power_w for replay in replays])),
        ttft_s=float(np.mean([replay.first_token_times.quantile_s(_P99) for replay in replays])),
        tbt_s=float(np.mean([replay.token_intervals.quantile_s(_P99) for replay in replays])),
    )


def _decode_summary(replays: Sequence[SteadyReplay]) -> GroupReplay:
    """The same of the instances that only decode; attainment and times are of both groups."""
    power_w = float(np.mean([replay.decode_power_w for replay in replays]))
    return replace(_summary(replays), power_w=power_w)


def _kept_share(draws: Sequence[RequestCounts]) -> float:
    """The share of requests that other draws as long attain, too: almost always, at least."""
    shares = _shares(draws)
    if not len(shares):
        return 1.0
    mean = float(shares.mean())
    worst_draw = float(shares.min())
    below_mean = max(_DEVIATIONS * _deviation(draws), _TIMES_WORST_DRAW * (mean - worst_draw))
    return max(0.0, mean - below_mean)


def _deviation(draws: Sequence[RequestCounts]) -> float:
    """Standard deviation of the share of requests that draws attain; 0 where none came.

    It is at least that of requests that miss their SLOs a few together, of which at least one a
    draw is expected.
    """
    shares = _shares(draws)
    if not len(shares):
        return 0.0
    num_requests = float(np.mean([draw.requests for draw in draws if draw.requests]))
    missed = max(1 - float(shares.mean()), 1 / num_requests)
    least_deviation = math.sqrt(_LATE_TOGETHER * missed * (1 - missed) / num_requests)
    return max(float(shares.std()), least_deviation)


def _shares(draws: Sequence[RequestCounts]) -> FloatArray:
    """The share of requests that each draw attains in which some came."""
    return np.array([draw.attainment for draw in draws if draw.requests])
