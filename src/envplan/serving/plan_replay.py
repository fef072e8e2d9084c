"""A serving plan replayed: what its groups of instances attain and draw, and each class as a whole.

A group is replayed alone, with its part of the load of each class that its pool serves, in several
draws of Poisson arrivals. Instances for prompts and those that decode for them are replayed
together. What is stated is what other draws keep, too: the mean of the draws less
nine of their standard deviations, or 3.5 times as far below the mean as the worst draw. Near the
highest load one draw in many has a jam that the others have not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

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
class PlanReplay:
    """A plan's groups of instances, replayed one by one.

    Attributes:
        groups: of each pool, in the plan's order; instances that decode what others ran the
            prompts of follow these.
        attainment_by_class: share of the requests of each class that meet their SLOs, at least.
        mean_by_class: share of them that did in all draws together. Of a class that seldom comes
            little can be promised, though all its requests were in time.
    """

    groups: Sequence[Sequence[GroupReplay]]
    attainment_by_class: Mapping[str, float]
    mean_by_class: Mapping[str, float]

    @property
    def attainment(self) -> float:
        """The lowest share that a group keeps, or that a class had on average."""
        groups = [group.attainment for of_pool in self.groups for group in of_pool]
        return min([*groups, *self.mean_by_class.values()])


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
        return replay if replay.attainment < share else self.replay(NUM_DRAWS)

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
        attainment_by_class: dict[str, float] = {}
        mean_by_class: dict[str, float] = {}
        for name in self._classes:
            if name in counts_by_class:
                groups_by_draw = zip(*counts_by_class[name], strict=True)
                draws = [RequestCounts.sum(of_draw) for of_draw in groups_by_draw]
                attainment_by_class[name] = _kept_share(draws)
                mean_by_class[name] = RequestCounts.sum(draws).attainment
        return PlanReplay(groups, attainment_by_class, mean_by_class)


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
        for draw in range(len(self._replays), num_draws):
            replay = replay_steadily(
                self._profile, self.load, duration_s=self._duration_s, seed=_FIRST_SEED + draw
            )
            self._replays.append(replay)
        return self._replays[:num_draws]


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
    """The share of requests that other draws as long attain, too: almost always, at least.

    The deviation of the draws is at least that of requests that miss their SLOs a few together, of
    which at least one a draw is expected.
    """
    counted = [draw for draw in draws if draw.requests]
    if not counted:
        return 1.0
    shares = np.array([draw.attainment for draw in counted])
    num_requests = float(np.mean([draw.requests for draw in counted]))
    mean = float(shares.mean())
    missed = max(1 - mean, 1 / num_requests)
    least_deviation = math.sqrt(_LATE_TOGETHER * missed * (1 - missed) / num_requests)
    deviation = max(float(shares.std()), least_deviation)
    below_mean = max(_DEVIATIONS * deviation, _TIMES_WORST_DRAW * (mean - float(shares.min())))
    return max(0.0, mean - below_mean)
