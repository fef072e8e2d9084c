"""Policies over time: which fleet serves a trace, and what comes of it.

What a scaling policy expects is the most of what these stretches needed:

- the last hour, an eighth more;
- where the trace is a day or a week old, the hours around this one a day or a week ago, times how
  much the last hour differs from its counterpart back then;
- where it is not even two hours old, the whole trace: the fleet that the service was given for its
  peak stays until there is a past to judge from.

Between epochs it is looked every minute whether the last ten minutes need more than there is, with
a quarter more for what may come while instances start. So a fleet grows within a minute and shrinks
only with an epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt

from envplan.errors import InputError, NoAnswerError
from envplan.serving.classes import CLASSES
from envplan.serving.demand import check_reachable
from envplan.serving.policies import dynamo, packing, planned
from envplan.serving.policies.outlook import POLICIES, Outlook, Policy, Settings, Stretch
from envplan.serving.profile import ServingProfile
from envplan.serving.simulation import FleetSpec, Machines, Simulation
from envplan.serving.sizing import Stream
from envplan.serving.trace import SLOT_S, Trace

__all__ = ["POLICIES", "Settings", "compare_policies", "dynamo", "packing", "planned", "simulate"]

_HOUR_S: Final = 3600.0
_SEASONS_S: Final = (24 * _HOUR_S, 7 * 24 * _HOUR_S)
_YOUNG_S: Final = 2 * _HOUR_S  # a trace without a past to judge from
_LAST: Final = 1.125  # times the last hour
_RECENT_S: Final = 600.0
_RECENT: Final = 1.25  # times the last ten minutes, while instances start
_MOST: Final = 3.0  # times another day's hours


def _stream(profile: ServingProfile, trace: Trace, settings: Settings) -> Stream:
    known = profile.with_lengths(trace.mean_lengths())
    check_reachable(known, [CLASSES[k] for k in np.unique(trace.known)], merge=True)
    return Stream.of(trace, known, _taken(trace, settings))


def _taken(trace: Trace, settings: Settings) -> npt.NDArray[np.uint8]:
    """The classes that requests are taken for: some outputs are predicted one length off."""
    random = np.random.default_rng(settings.seed)
    wrong = random.random(len(trace)) < settings.mispredicted
    shift = np.where(random.random(len(trace)) < 0.5, -1, 1)
    given, made = trace.known // 3, (trace.known % 3).astype(np.int8)
    made = np.where(wrong, np.clip(made + shift, 0, 2), made)
    return (given * 3 + made).astype(np.uint8)


def expected(stream: Stream, now: float, ahead: float) -> list[Stretch]:
    """The stretches whose likes are expected until `ahead` seconds from now."""
    duration = stream.trace.duration_s
    if now < _YOUNG_S:
        return [Stretch(0.0, duration, 1.0)]
    found = [Stretch(now - _HOUR_S, now, _LAST)]
    for season in _SEASONS_S:
        then = now - season
        if then - _HOUR_S >= 0:
            last, before = (
                (span := stream.between(at - _HOUR_S, at)).stop - span.start for at in (now, then)
            )
            factor = min(_MOST, last / before) if before else 1.0
            found.append(Stretch(then, min(now, then + ahead), factor))
    return found


def _plan(policy: Policy, outlook: Outlook) -> FleetSpec:
    fleet = policy.plan(outlook)
    if fleet.gpus > outlook.settings.gpus:
        raise NoAnswerError(
            f"{policy.name} needs {fleet.gpus} GPUs, {fleet.gpus - outlook.settings.gpus} more than "
            f"the {outlook.settings.gpus} there are"
        )
    return fleet


def _run(policy: Policy, stream: Stream, settings: Settings) -> Simulation:
    duration = stream.trace.duration_s
    machines = Machines(stream, settings.overheads, settings.gpus)
    outlook = Outlook(stream, settings, [Stretch(0.0, duration, 1.0)])
    fleet = _plan(policy, outlook)
    machines.adopt(fleet, 0.0, warm=True)
    epoch = max(1, round(settings.epoch_s / SLOT_S))
    gpus: list[int] = []
    for slot in range(round(duration / SLOT_S)):
        now = slot * SLOT_S
        if policy.scales and now >= _YOUNG_S:
            fleet = _next(policy, outlook, fleet, now, slot % epoch == 0, machines)
        machines.advance(now + SLOT_S)
        gpus.append(machines.in_use())
    return machines.result(policy.name, gpus)


def _next(
    policy: Policy, first: Outlook, fleet: FleetSpec, now: float, look: bool, machines: Machines
) -> FleetSpec:
    """The fleet from now on; a new one at an epoch, or where the present one falls short."""
    settings = first.settings
    ahead = settings.epoch_s + settings.overheads.start + SLOT_S
    stretches = expected(first.stream, now, ahead)
    if not look:
        recent = Stretch(now - _RECENT_S, now, _RECENT)
        if not _short(fleet, Outlook(first.stream, settings, [recent])):
            return fleet
        stretches.append(recent)
    present = {pool.name: tp for pool in fleet.pools.values() for tp, _ in pool.groups}
    coming = Outlook(first.stream, settings, stretches, first.needs, present)
    if not coming.classes:
        return fleet
    try:
        wanted = _plan(policy, coming)
    except NoAnswerError:  # more than the GPUs can carry is expected: what runs stays
        return fleet
    if not look:
        wanted = _at_least(wanted, fleet)
    if wanted == fleet:
        return fleet
    machines.adopt(wanted, now)
    return wanted


def _at_least(wanted: FleetSpec, fleet: FleetSpec) -> FleetSpec:
    """`wanted`, where no pool has fewer instances of a kind than it has: between epochs, only more."""
    pools = {}
    for key, pool in wanted.pools.items():
        there = fleet.pools[key].groups if key in fleet.pools else {}
        groups = {kind: max(n, there.get(kind, 0)) for kind, n in pool.groups.items()}
        pools[key] = replace(pool, groups=groups)
    return replace(wanted, pools=pools)


def _short(fleet: FleetSpec, recent: Outlook) -> bool:
    """Whether some pool has fewer instances than what it serves needed of late."""
    served: dict[object, list[str]] = {}
    for name in recent.classes:
        for key, _ in fleet.routes.get(name, ())[:1]:
            served.setdefault(key, []).append(name)
    for key, pool in fleet.pools.items():
        if classes := served.get(key):
            there = sum(
                n / max(1e-9, recent.need(classes, pool.name, tp).instances)
                for (tp, _), n in pool.groups.items()
            )
            if there < 1:
                return True
    return any(name not in fleet.routes for name in recent.classes)


def simulate(
    profile: ServingProfile,
    trace: Trace,
    policy: str = "envplan",
    settings: Settings | None = None,
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
    stream = _stream(profile, trace, chosen)
    results = []
    for name in names:
        try:
            results.append(_run(POLICIES[name], stream, chosen))
        except NoAnswerError as error:
            raise NoAnswerError(f"{error}; compare others, with --policies") from None
        if progress is not None:
            progress(len(results), len(names))
    return results
