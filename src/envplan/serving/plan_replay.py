"""A serving plan replayed: what its groups of instances attain and draw, and each class as a whole.

A group is replayed alone, with its part of the load of each class that its pool serves, in several
draws of Poisson arrivals. What is stated is what other draws keep, too: the mean of the draws less
eight of their standard deviations, or three times as far below the mean as the worst draw. Near the
highest load one draw in many has a jam that the others have not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from envplan.serving.classes import CLASSES
from envplan.serving.performance import Configuration
from envplan.serving.steady_replay import Share, SteadyLoad, SteadyReplay, replay_steadily

if TYPE_CHECKING:
    from envplan.serving.plan import Group, Pool
    from envplan.serving.profile import ServingProfile

#: Draws that a plan is replayed with.
NUM_DRAWS: Final = 16
#: A draw is an hour, but has at least and at most so many requests.
_DRAW_S: Final = 3600.0
_FEWEST_REQUESTS: Final = 4000
_MOST_REQUESTS: Final = 40_000
_DEVIATIONS: Final = 8.0
_TIMES_WORST_DRAW: Final = 3.0
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
        groups: of each pool, in the plan's order.
        attainment_by_class: share of the requests of each class that meet their SLOs, at least.
    """

    groups: Sequence[Sequence[GroupReplay]]
    attainment_by_class: Mapping[str, float]

    @property
    def attainment(self) -> float:
        """The lowest of any group or class."""
        groups = [group.attainment for of_pool in self.groups for group in of_pool]
        return min([*groups, *self.attainment_by_class.values()])


def replay_plan(profile: ServingProfile, pools: Sequence[Pool]) -> PlanReplay:
    """Replay all groups of some pools.

    Args:
        profile: with the performance of their instances, and their SLOs.
        pools: of a plan.
    """
    groups: list[list[GroupReplay]] = []
    shares_by_class: dict[str, list[list[Share]]] = {}
    for pool in pools:
        groups.append([])
        for group in pool.groups:
            replays = list(_replay_group(profile, pool, group))
            groups[-1].append(_summary(replays))
            for name in pool.classes:
                of_class = [replay.shares.get(name, Share(0, 0)) for replay in replays]
                shares_by_class.setdefault(name, []).append(of_class)
    attainment_by_class = {}
    for name in CLASSES:
        if name in shares_by_class:
            attainment_by_class[name] = _kept_share(_sum_by_draw(shares_by_class[name]))
    return PlanReplay(groups, attainment_by_class)


def group_load(profile: ServingProfile, pool: Pool, group: Group) -> SteadyLoad:
    """The instances of a group, and its part of what comes to its pool."""
    carried_tokens_s = sum(other.instances * other.load_tokens_s for other in pool.groups)
    part = 0.0
    if carried_tokens_s:
        part = group.instances * group.load_tokens_s / carried_tokens_s
    requests_s = {}
    for served in pool.serves:
        rate = part * served.load_tokens_s / profile.classes[served.request_class].tokens
        if rate:
            requests_s[served.request_class] = rate
    return SteadyLoad(
        configuration=Configuration(group.tp, group.frequency_mhz),
        num_instances=group.instances,
        requests_s=requests_s,
    )


def _replay_group(profile: ServingProfile, pool: Pool, group: Group) -> Iterator[SteadyReplay]:
    """The replays of a group, one for each draw."""
    load = group_load(profile, pool, group)
    if not load.requests_s:
        yield SteadyReplay.idle(profile, load)
        return
    duration_s = max(_DRAW_S, load.duration_for(_FEWEST_REQUESTS))
    duration_s = min(duration_s, load.duration_for(_MOST_REQUESTS))
    for draw in range(NUM_DRAWS):
        yield replay_steadily(profile, load, duration_s=duration_s, seed=_FIRST_SEED + draw)


def _summary(replays: Sequence[SteadyReplay]) -> GroupReplay:
    """What a group's replays show together."""
    totals = []
    for replay in replays:
        attained = sum(share.attained for share in replay.shares.values())
        totals.append(Share(attained, sum(share.requests for share in replay.shares.values())))
    return GroupReplay(
        attainment=_kept_share(totals),
        power_w=float(np.mean([replay.power_w for replay in replays])),
        ttft_s=float(np.mean([replay.first_token_times.quantile_s(_P99) for replay in replays])),
        tbt_s=float(np.mean([replay.token_intervals.quantile_s(_P99) for replay in replays])),
    )


def _sum_by_draw(groups: Sequence[Sequence[Share]]) -> list[Share]:
    """The requests of several groups in each draw."""
    sums = []
    for of_draw in zip(*groups, strict=True):
        attained = sum(share.attained for share in of_draw)
        sums.append(Share(attained, sum(share.requests for share in of_draw)))
    return sums


def _kept_share(draws: Sequence[Share]) -> float:
    """The share of requests that other draws as long attain, too: almost always, at least.

    The deviation of the draws is at least that of requests that miss their SLOs independently of
    each other, of which at least one a draw is expected.
    """
    counted = [draw for draw in draws if draw.requests]
    if not counted:
        return 1.0
    shares = np.array([draw.attained / draw.requests for draw in counted])
    num_requests = float(np.mean([draw.requests for draw in counted]))
    mean = float(shares.mean())
    missed = max(1 - mean, 1 / num_requests)
    least_deviation = math.sqrt(missed * (1 - missed) / num_requests)
    deviation = max(float(shares.std()), least_deviation)
    below_mean = max(_DEVIATIONS * deviation, _TIMES_WORST_DRAW * (mean - float(shares.min())))
    return max(0.0, mean - below_mean)
