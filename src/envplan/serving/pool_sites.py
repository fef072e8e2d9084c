"""The pools that a fleet might have, for the exact planner.

A class may go to the pool of a class that is longer in no respect; its requests then count as that
class's own. A pool promises one SLO to all it serves, so there is a pool for each class and each
SLO that makes a difference. SLOs are kept by cutting load curves to the loads that meet them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product
from typing import NamedTuple

from envplan.serving.classes import Slo
from envplan.serving.plan_request import PlanRequest
from envplan.serving.profile import ServingProfile
from envplan.serving.replayed_curves import Promise
from envplan.serving.steady_state import LoadCurve, Segment


class CurveSegment(NamedTuple):
    """A configuration on a segment of its load curve."""

    curve: LoadCurve
    segment: Segment


class PoolSite(NamedTuple):
    """A pool that a fleet might have: a class's configurations, cut to an SLO.

    Attributes:
        request_class: the class whose configurations it runs.
        served_classes: the classes that may be sent there.
        segments: of its configurations, where they meet the SLO.
    """

    request_class: str
    served_classes: list[str]
    segments: list[CurveSegment]


def pool_sites(profile: ServingProfile, request: PlanRequest) -> Iterator[PoolSite]:
    """The pools that a fleet might have: for each class and each SLO that makes a difference."""
    segments_of_class: dict[str, list[list[CurveSegment]]] = {}
    for promise in possible_promises(profile, request):
        earlier_segments = segments_of_class.setdefault(promise.request_class, [])
        segments = _segments_within(profile, promise.request_class, promise.slo)
        # A looser SLO that leaves no more loads adds nothing.
        if segments and segments not in earlier_segments:
            earlier_segments.append(segments)
            yield PoolSite(promise.request_class, _guests(promise, request), segments)


def possible_promises(profile: ServingProfile, request: PlanRequest) -> Iterator[Promise]:
    """The SLOs that pools of a fleet might promise, by class, the strictest first."""
    pool_classes = _useful_pool_classes(profile, request) if request.merge else list(request.slos)
    for pool_class in pool_classes:
        slos = _slos_of_guests(pool_class, request)
        for slo in _strictest_of_some(slos.values()):
            promise = Promise(pool_class, slo)
            if _guests(promise, request):
                yield promise


def _useful_pool_classes(profile: ServingProfile, request: PlanRequest) -> list[str]:
    """The classes whose pools a fleet may need.

    A pool counts its guests as requests of its own class. So where the pool of a shorter class
    takes the same guests, that of a longer one would only draw more.
    """
    guests = {name: _slos_of_guests(name, request) for name in request.all_classes}
    useful = []
    for name, slos in guests.items():
        shorter = (
            other
            for other, other_slos in guests.items()
            if other != name and other_slos == slos and _is_shorter(profile, other, name)
        )
        if slos and next(shorter, None) is None:
            useful.append(name)
    return useful


def _is_shorter(profile: ServingProfile, name: str, other: str) -> bool:
    """Whether a class is longer in no respect than another, and runs wherever that does."""
    shorter, longer = profile.classes[name], profile.classes[other]
    configurations = {(curve.tp, curve.frequency_mhz) for curve in profile.curves_of(name)}
    return (
        profile.classes.serves(other, name)
        and shorter.input_tokens <= longer.input_tokens
        and shorter.output_tokens <= longer.output_tokens
        and configurations.issuperset(
            (curve.tp, curve.frequency_mhz) for curve in profile.curves_of(other)
        )
    )


def _guests(promise: Promise, request: PlanRequest) -> list[str]:
    """The requested classes that may be sent to a class's pool that promises an SLO."""
    slos = _slos_of_guests(promise.request_class, request)
    return [name for name, slo in slos.items() if promise.slo.covers(slo)]


def _slos_of_guests(pool_class: str, request: PlanRequest) -> dict[str, Slo]:
    """The SLOs of the requested classes that may be sent to a class's pool, by class."""
    return {
        name: slo
        for name, slo in request.slos.items()
        if pool_class in request.all_classes.hosts(name, merge=request.merge)
    }


def _strictest_of_some(slos: Iterable[Slo]) -> list[Slo]:
    """Every SLO that is the strictest of some of these, the strictest of all first."""
    objectives = list(slos)
    ttfts_s = {slo.ttft_s for slo in objectives}
    tbts_s = {slo.tbt_s for slo in objectives}
    return [Slo(ttft_s, tbt_s) for ttft_s, tbt_s in product(sorted(ttfts_s), sorted(tbts_s))]


def _segments_within(profile: ServingProfile, pool_class: str, slo: Slo) -> list[CurveSegment]:
    return [
        CurveSegment(curve, segment)
        for curve in profile.curves_of(pool_class)
        for segment in curve.segments(slo)
    ]


def is_dominated(candidate: CurveSegment, segments: Iterable[CurveSegment]) -> bool:
    """Whether one segment of another clock, same TP, covers this one and never draws more."""
    return any(_dominates(rival, candidate) for rival in segments)


def _dominates(rival: CurveSegment, candidate: CurveSegment) -> bool:
    """Whether a segment makes another one needless; of two that draw the same, the slower does."""
    curve, segment = candidate
    covers = (
        rival.curve.tp == curve.tp
        and rival.segment.low_tokens_s <= segment.low_tokens_s
        and segment.high_tokens_s <= rival.segment.high_tokens_s
    )
    if not covers:
        return False
    # Both powers are straight lines over the candidate's loads, so their ends decide.
    rival_low_w = rival.curve.power_at(segment.low_tokens_s)
    rival_high_w = rival.curve.power_at(segment.high_tokens_s)
    if rival_low_w > segment.power_low_w or rival_high_w > segment.power_high_w:
        return False
    draws_the_same = rival_low_w == segment.power_low_w and rival_high_w == segment.power_high_w
    return not draws_the_same or rival.curve.frequency_mhz < curve.frequency_mhz
