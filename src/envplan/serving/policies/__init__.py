"""Policies over time: which fleet serves a trace, and what comes of it.

What a scaling policy expects is the most of what these stretches needed: the last hour, and the
hours around this one a day or a week ago, times how much the last hour differs from its counterpart
then. In the first two hours there is no past to judge from: the fleet stays as it was sized by the
trace's peak or, with `past_s`, by the trace's first minutes, which are then not replayed.

Between epochs it is looked every minute whether the last ten minutes need more than there is, with
a quarter more for what may come while instances start. So a fleet grows within a minute and shrinks
only with an epoch.
"""

from __future__ import annotations

import math
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Final

import numpy as np
import numpy.typing as npt

from envplan.errors import InputError, NoAnswerError
from envplan.serving.classes import CLASSES
from envplan.serving.plan import check_reachable
from envplan.serving.policies.outlook import POLICIES as POLICIES
from envplan.serving.policies.outlook import Outlook, Policy, Stretch
from envplan.serving.policies.outlook import Settings as Settings
from envplan.serving.profile import ServingProfile
from envplan.serving.simulation import Fleet, Machines, Simulation
from envplan.serving.sizing import Stream
from envplan.serving.trace import SLOT_S, Trace

for _file in pkgutil.iter_modules(__path__):  # every policy registers itself
    import_module(f"{__name__}.{_file.name}")

_HOUR_S: Final = 3600.0
_SEASONS_S: Final = (24 * _HOUR_S, 7 * 24 * _HOUR_S)
_YOUNG_S: Final = 2 * _HOUR_S  # a trace without a past to judge from
_LAST: Final = 1.125  # times the last hour
_RECENT_S: Final = 600.0
_RECENT: Final = 1.25  # times the last ten minutes, while instances start
_MOST: Final = 3.0  # times another day's hours


def stream_of(profile: ServingProfile, trace: Trace, settings: Settings) -> Stream:
    """The requests as policies see them; for settings with the same past, predictor and seed.

    Raises:
        NoAnswerError: a class cannot be served at all.
    """
    past = slice(int(np.searchsorted(trace.arrival, settings.past_s)) or None)
    known = profile.with_lengths(trace.part(past).mean_lengths())
    stream = Stream(trace, known, predicted(trace, settings))
    check_reachable(known, [CLASSES[k] for k in np.unique(trace.known)])
    return stream


def predicted(trace: Trace, settings: Settings) -> npt.NDArray[np.uint8]:
    """The classes that requests are taken for: some outputs are predicted one length off."""
    random = np.random.default_rng(settings.seed)
    draw = random.random(len(trace), dtype=np.float32)  # one draw says whether, and which way
    made = (trace.known % 3).astype(np.int8)
    wrong = draw < settings.mispredicted
    short = draw < settings.underestimated * settings.mispredicted
    made[wrong] += np.where(short[wrong], -1, 1).astype(np.int8)
    return (trace.known // 3 * 3 + np.clip(made, 0, 2)).astype(np.uint8)


def _first(stream: Stream, past_s: float) -> list[Stretch]:
    """What the first fleet is sized by: the past or, with hindsight, the trace's peak.

    The peak is the trace or, where it is longer than two hours, those two of it with the most
    tokens.
    """
    if past_s:
        return [Stretch(0.0, past_s, _LAST)]
    duration = stream.trace.duration_s
    if duration <= _YOUNG_S:
        return [Stretch(0.0, duration, 1.0)]
    tokens = stream.trace.counts @ [stream.profile.classes[name].tokens for name in CLASSES]
    found = []
    for minutes in (60, 10):  # the busiest hour, and the hour around the busiest ten minutes
        sums = np.convolve(tokens, np.ones(minutes), mode="valid")
        middle = (int(sums.argmax()) + minutes / 2) * SLOT_S
        begin = min(max(0.0, middle - _HOUR_S / 2), duration - _HOUR_S)
        found.append(Stretch(begin, begin + _HOUR_S, 1.0))
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


def _plan(policy: Policy, outlook: Outlook) -> Fleet:
    fleet = policy.plan(outlook)
    if fleet.gpus > outlook.settings.gpus:
        raise NoAnswerError(
            f"{policy.name} needs {fleet.gpus} GPUs, {fleet.gpus - outlook.settings.gpus} more "
            f"than the {outlook.settings.gpus} there are; compare others, with --policies"
        )
    return fleet


def replay(policy: Policy, stream: Stream, settings: Settings) -> Simulation:
    """Replay a stream under a policy; as simulate, which makes the stream.

    Raises:
        InputError: no request comes after the past.
        NoAnswerError: the policy's fleet is too large.
    """
    past, duration = SLOT_S * math.ceil(settings.past_s / SLOT_S), stream.trace.duration_s
    if not stream.counts(past, duration):
        raise InputError(
            f"no request comes after a past of {past:g} s; the trace is {duration:g} s long"
        )
    if past and not stream.counts(0.0, past):
        raise InputError(f"no request comes in a past of {past:g} s")
    served = stream.since(past) if past else stream
    machines = Machines(served, settings.overheads, settings.gpus, settings.squash_s)
    fleet = _plan(policy, Outlook(stream, settings, _first(stream, past)))
    machines.adopt(fleet, 0.0, warm=True)
    epoch = max(1, round(settings.epoch_s / SLOT_S))
    gpus: list[int] = []
    for slot in range(round(duration / SLOT_S)):
        now = slot * SLOT_S
        if policy.scales and now >= (past or _YOUNG_S):
            wanted = _next(policy, stream, settings, fleet, now, shrinks=slot % epoch == 0)
            if wanted != fleet:
                fleet = wanted
                machines.adopt(fleet, now)
        machines.advance(now + SLOT_S)
        gpus.append(machines.in_use())
    return machines.result(policy.name, gpus, round(past / SLOT_S))


def _next(
    policy: Policy, stream: Stream, settings: Settings, fleet: Fleet, now: float, *, shrinks: bool
) -> Fleet:
    """The fleet from now on; a new one at an epoch, or where the present one falls short."""
    stretches = expected(stream, now, settings.epoch_s + settings.overheads.start + SLOT_S)
    recent = Stretch(max(0.0, now - _RECENT_S), now, _RECENT)
    unusual = _rate(stream, recent) > max(_rate(stream, stretch) for stretch in stretches)
    if not shrinks and not (unusual and _short(fleet, Outlook(stream, settings, [recent]))):
        return fleet
    coming = Outlook(stream, settings, [*stretches, *([recent] if unusual else [])], fleet)
    if not coming.classes:
        return fleet
    try:
        wanted = _plan(policy, coming if shrinks else replace(coming, worth=0.0))
    except NoAnswerError:  # more than the GPUs can carry is expected: what runs stays
        return fleet
    for key, pool in [] if shrinks else list(wanted.items()):  # only more instances of a kind
        there = fleet.get(key)
        if there and (there.tp, there.clock) == (pool.tp, pool.clock):
            wanted[key] = replace(pool, count=max(pool.count, there.count))
    return wanted


def _rate(stream: Stream, stretch: Stretch) -> float:
    """Requests per second of a stretch, times its factor."""
    begin, end, factor = stretch
    return factor * sum(stream.counts(begin, end).values()) / (end - begin)


def _short(fleet: Fleet, recent: Outlook) -> bool:
    """Whether some pool has fewer instances than what it serves needed of late."""
    for pool in fleet.values():
        served = pool.serves.intersection(recent.classes)
        if served and recent.need(served, pool.tp).instances > pool.count:
            return True
    return not fleet.routes.keys() >= set(recent.classes)


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
    policies: Sequence[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Simulation]:
    """Replay a trace under several policies; raises as simulate.

    Args:
        policies: their names; default: all of them.
        progress: told how many are done, of how many.
    """
    names = list(POLICIES) if policies is None else list(policies)
    for name in names:
        if name not in POLICIES:
            raise InputError(f"there is no policy {name!r}; there are: {', '.join(POLICIES)}")
    chosen = settings or Settings()
    stream = stream_of(profile, trace, chosen)
    results = []
    for name in names:
        results.append(replay(POLICIES[name], stream, chosen))
        if progress is not None:
            progress(len(results), len(names))
    return results
