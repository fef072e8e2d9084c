"""Policies over time: the hierarchical managers, the exact plan of every epoch, and baselines.

A policy changes the fleet only if that pays, by DynamoLLM's rule: the energy expected with the
present fleet until the next epoch must be more than that of changing and of the new fleet together.
A fleet that could not carry the expected peak is changed in any case.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt

from envplan.errors import InputError, NoAnswerError
from envplan.serving.classes import CLASSES
from envplan.serving.demand import LEAST_LOAD, check_demand, check_reachable
from envplan.serving.exact import exact_fleet
from envplan.serving.hierarchy import PoolModel, reshard, size_pools
from envplan.serving.plan import Fleet, max_frequency_fleet, needed_for
from envplan.serving.prediction import expect
from envplan.serving.profile import ServingProfile
from envplan.serving.simulation import (
    FleetSpec,
    Key,
    Offered,
    Overheads,
    PoolSpec,
    Simulation,
    Simulator,
    common,
    idle_power,
    missing_instances,
    offer,
    spec_of,
)
from envplan.serving.trace import Trace

__all__ = ["POLICIES", "Settings", "compare_policies", "simulate"]

FloatArray = npt.NDArray[np.float64]

#: What each policy is, in the order they are compared in.
POLICIES: Final[Mapping[str, str]] = {
    "max_frequency": "TP8 at maximum frequency, sized for the trace's peak",
    "static": "the exact plan for the trace's peak, never changed",
    "frequency_only": "TP8 sized for the trace's peak; only clocks follow the load",
    "exact": "the exact plan of each class for each epoch's expected peak, unmerged",
    "hierarchical": "pool, instance and GPU managers",
}

_GRID: Final = 1.02  # loads of the exact policy are rounded up to powers of this, and kept
_GAP: Final = 1e-4
_PATIENCE_S: Final = 60.0  # for the static plan, which must not depend on how fast a machine is


@dataclass(frozen=True)
class Settings:
    """How a simulation is run.

    Attributes:
        gpus: at most.
        epoch_s: between two decisions of the pool manager, s.
        headroom: fraction by which expected peaks are exceeded in sizing.
        mispredicted: share of requests with medium or long outputs that are taken for shorter.
        seed: of whatever is drawn.
        overheads: how long changes take.
        merge: whether the exact policy may merge classes in every epoch. On the shipped weeks that
            took 2% less energy, but one to two minutes instead of seconds.
    """

    gpus: int = 1024
    epoch_s: float = 1800.0
    headroom: float = 0.15
    mispredicted: float = 0.05
    seed: int = 0
    overheads: Overheads = field(default_factory=Overheads)
    merge: bool = False


@dataclass
class _Room:
    """What all policies know: profile, settings, and how to judge fleets."""

    profile: ServingProfile
    offered: Offered
    settings: Settings
    epoch_slots: int

    def __post_init__(self) -> None:
        self._models: dict[Key, PoolModel] = {}

    def model(self, key: Key) -> PoolModel:
        """What a pool's instances can do."""
        if key not in self._models:
            self._models[key] = PoolModel(self.profile, *key)
        return self._models[key]

    def loads(self, tokens: FloatArray) -> dict[str, float]:
        """Loads above 0 by class."""
        return {
            name: max(LEAST_LOAD, float(x))
            for name, x in zip(CLASSES, tokens, strict=True)
            if x > 0
        }

    def sized_peaks(self, peak: FloatArray) -> dict[str, float]:
        """What fleets are sized for, by class."""
        return self.loads(peak * (1 + self.settings.headroom))

    def pool_loads(self, fleet: FleetSpec, loads: Mapping[str, float]) -> dict[Key, float] | None:
        """tokens/s that come to each pool; None if a class has none."""
        brought: dict[Key, float] = dict.fromkeys(fleet.pools, 0.0)
        for name, load in loads.items():
            if name not in fleet.routes:
                return None
            for key, share in fleet.routes[name]:
                brought[key] += share * load * needed_for(self.profile, name, key[0])
        return brought

    def carries(self, fleet: FleetSpec, loads: Mapping[str, float]) -> bool:
        """Whether a fleet can serve these loads at whatever clocks."""
        brought = self.pool_loads(fleet, loads)
        return brought is not None and all(
            load
            <= sum(n * self.model(key).most[tp] for (tp, _), n in fleet.pools[key].groups.items())
            for key, load in brought.items()
        )

    def power(self, fleet: FleetSpec, loads: Mapping[str, float]) -> float:
        """W of a fleet under loads, or under what it can carry of them."""
        brought = self.pool_loads(fleet, loads)
        if brought is None:
            return math.inf
        return sum(self.pool_power(fleet.pools[key], load) for key, load in brought.items())

    def pool_power(self, pool: PoolSpec, load: float) -> float:
        """W of a pool under a load, or under what it can carry of it."""
        model = self.model(pool.key)
        able = {
            (tp, clock): model.most[tp] if clock is None else model.capacity[tp, clock]
            for tp, clock in pool.groups
        }
        carried = sum(n * able[kind] for kind, n in pool.groups.items())
        share = min(1.0, load / carried) if carried else 0.0
        watts = 0.0
        for (tp, clock), n in pool.groups.items():
            each = share * able[tp, clock]
            if clock is None:
                watts += n * model.best(tp, each).power
            else:
                watts += n * self.profile.curves[pool.name, tp, clock].power_at(each)
        return watts

    def worth(self, now: FleetSpec, wanted: FleetSpec, seen: FloatArray) -> FleetSpec:
        """`wanted` if the rule says so, else `now`."""
        epoch = self.epoch_slots
        coming = expect(seen, epoch, epoch, self.offered.step_s)
        mean = self.loads(coming.mean)
        if not self.carries(now, self.loads(coming.peak)):
            return wanted
        seconds = epoch * self.offered.step_s
        missing = missing_instances(now, wanted)
        changing = self.settings.overheads.start if missing else 0.0
        before, after = self.power(now, mean), self.power(wanted, mean)
        energy = changing * (before + idle_power(self.profile, missing))
        energy += max(0.0, seconds - changing) * after
        return wanted if before * seconds > energy else now


class _Static:
    """A fleet that never changes."""

    def __init__(self, name: str, fleet: FleetSpec) -> None:
        self.name = name
        self._fleet = fleet

    def initial(self) -> FleetSpec:
        return self._fleet

    def every_epoch(self, now: FleetSpec, seen: FloatArray) -> FleetSpec:
        return now

    def every_slot(self, now: FleetSpec, seen: FloatArray) -> FleetSpec:
        return now


class _PerEpoch:
    """A planner asked again at every epoch.

    Args:
        name: of the policy.
        room: what it knows.
        plan: makes a fleet for peaks by class.
    """

    def __init__(
        self, name: str, room: _Room, plan: Callable[[Mapping[str, float]], FleetSpec]
    ) -> None:
        self.name = name
        self._room = room
        self._plan = plan

    def initial(self) -> FleetSpec:
        # The fleet is warm when the trace begins: it fits the first epoch.
        first = self._room.offered.rates[: self._room.epoch_slots].max(axis=0)
        return self._plan(self._room.sized_peaks(first))

    def every_epoch(self, now: FleetSpec, seen: FloatArray) -> FleetSpec:
        room = self._room
        coming = expect(seen, room.epoch_slots, room.epoch_slots, room.offered.step_s)
        peaks = room.sized_peaks(coming.peak)
        if not peaks:
            return now
        try:
            return room.worth(now, self._plan(peaks), seen)
        except NoAnswerError:  # more than the GPUs can carry is expected: what runs stays
            return now

    def every_slot(self, now: FleetSpec, seen: FloatArray) -> FleetSpec:
        return now


class _Hierarchical(_PerEpoch):
    """The pool manager every epoch, the instance manager every slot between."""

    def every_slot(self, now: FleetSpec, seen: FloatArray) -> FleetSpec:
        room = self._room
        coming = expect(seen, 1, 1, room.offered.step_s)
        left = room.epoch_slots - len(seen) % room.epoch_slots
        rest = expect(seen, left, 1, room.offered.step_s)
        mean = room.pool_loads(now, room.loads(rest.mean))
        peak = room.pool_loads(now, room.sized_peaks(rest.peak))
        soon = room.pool_loads(now, room.loads(coming.peak))
        if mean is None or peak is None or soon is None:
            return now
        wanted = now
        for key, pool in now.pools.items():
            seconds = left * room.offered.step_s
            changed = self._resharded(pool, mean[key], peak[key], soon[key], seconds)
            if changed is not None:
                wanted = wanted.with_pool(changed)
        return wanted

    def _resharded(
        self, pool: PoolSpec, load: float, peak: float, soon: float, seconds: float
    ) -> PoolSpec | None:
        """The pool with its GPUs in other instances, if that pays and what stays can carry on."""
        room = self._room
        model = room.model(pool.key)
        counts = reshard(model, pool.gpus, load, peak)
        if counts is None or counts == pool.by_degree():
            return None
        for step in _steps(pool, counts):
            wanted = PoolSpec(pool.name, pool.slo, {(tp, None): n for tp, n in step.items()})
            stays = common(FleetSpec({pool.key: pool}, {}), FleetSpec({pool.key: wanted}, {}))
            rest = stays.pools[pool.key]
            if soon > sum(n * model.most[tp] for (tp, _), n in rest.groups.items()):
                continue
            missing = {tp: n - rest.by_degree().get(tp, 0) for tp, n in step.items()}
            changing = room.settings.overheads.reshard if any(missing.values()) else 0.0
            energy = changing * (room.pool_power(rest, load) + idle_power(room.profile, missing))
            energy += (seconds - changing) * room.pool_power(wanted, load)
            return wanted if room.pool_power(pool, load) * seconds > energy else None
        return None


def _steps(pool: PoolSpec, counts: Mapping[int, int]) -> Iterator[dict[int, int]]:
    """The instances wanted, by TP; then these and some of the present ones, which carry on."""
    yield dict(counts)
    for tp, present in sorted(pool.by_degree().items()):
        for kept in range(counts.get(tp, 0) + 1, present):
            step = {**counts, tp: kept}
            if sum(degree * n for degree, n in step.items()) <= pool.gpus:
                yield step


def _exact_planner(room: _Room) -> Callable[[Mapping[str, float]], FleetSpec]:
    """Exact plans: unless merging, class by class while GPUs suffice, then all together."""
    profile, gpus = room.profile, room.settings.gpus

    @cache
    def alone(name: str, power: int) -> Fleet:
        return exact_fleet(
            profile, {name: _GRID**power}, gpus, merge=False, gap=_GAP, at_any_load=True
        )

    def apart(peaks: Mapping[str, float]) -> Fleet | None:
        powers = {name: math.ceil(math.log(x, _GRID)) for name, x in peaks.items()}
        try:
            pools = [pool for name, p in powers.items() for pool in alone(name, p).pools]
        except NoAnswerError:  # a class needs a higher one's pool
            return None
        return Fleet("exact", tuple(pools))

    def plan(peaks: Mapping[str, float]) -> FleetSpec:
        fleet = None if room.settings.merge else apart(peaks)
        if fleet is None or fleet.gpus > gpus:
            fleet = exact_fleet(profile, peaks, gpus, time_limit=20.0, gap=1e-3, at_any_load=True)
        return spec_of(fleet, managed=False)

    return plan


def _hierarchical_planner(room: _Room) -> Callable[[Mapping[str, float]], FleetSpec]:
    """The pool manager's sizes, each re-sharded for the load that its peak was expected with."""

    def plan(peaks: Mapping[str, float]) -> FleetSpec:
        pools: dict[Key, PoolSpec] = {}
        routes: dict[str, tuple[tuple[Key, float], ...]] = {}
        for sized in size_pools(room.profile, peaks, room.settings.gpus):
            key = (sized.model.name, sized.model.slo)
            usual = sized.load / (1 + room.settings.headroom)
            counts = reshard(sized.model, sized.gpus, usual, sized.load)
            counts = counts or {sized.tp: sized.instances}
            pools[key] = PoolSpec(*key, {(tp, None): n for tp, n in counts.items()})
            routes |= dict.fromkeys(sized.served, ((key, 1.0),))
        return FleetSpec(pools, routes)

    return plan


def _policy(name: str, room: _Room) -> _Static | _PerEpoch:
    peaks = room.sized_peaks(room.offered.rates.max(axis=0))
    if name in ("max_frequency", "frequency_only"):
        fleet = max_frequency_fleet(room.profile, peaks)
        if fleet is None:
            lacking = next(k for k in peaks if max_frequency_fleet(room.profile, {k: 1.0}) is None)
            raise NoAnswerError(
                f"{name}: class {lacking} has no configuration that keeps its SLO at maximum "
                "frequency"
            )
        return _Static(name, spec_of(fleet, managed=name == "frequency_only"))
    if name == "static":
        fleet = exact_fleet(
            room.profile,
            peaks,
            room.settings.gpus,
            gap=_GAP,
            at_any_load=True,
            time_limit=_PATIENCE_S,
        )
        return _Static(name, spec_of(fleet, managed=False))
    if name == "exact":
        return _PerEpoch(name, room, _exact_planner(room))
    if name == "hierarchical":
        return _Hierarchical(name, room, _hierarchical_planner(room))
    raise InputError(f"there is no policy {name!r}; there are: {', '.join(POLICIES)}")


def _room(profile: ServingProfile, trace: Trace, settings: Settings) -> _Room:
    if not trace.requests.any():
        raise InputError(f"trace {trace.name} has no requests")
    offered = offer(
        trace.requests,
        trace.tokens(profile),
        trace.step_s,
        profile,
        mispredicted=settings.mispredicted,
        seed=settings.seed,
    )
    room = _Room(profile, offered, settings, max(1, round(settings.epoch_s / trace.step_s)))
    rates = offered.rates
    check_demand(room.loads(rates.max(axis=0)), settings.gpus)
    check_reachable(profile, room.loads(rates.max(axis=0)), merge=True)
    _check_fleet(profile, room.loads(rates[rates.sum(axis=1).argmax()]), settings.gpus)
    return room


def _check_fleet(profile: ServingProfile, loads: Mapping[str, float], gpus: int) -> None:
    """Raises: NoAnswerError: the trace's highest load is more than the GPUs can carry."""
    try:
        size_pools(profile, loads, gpus)
    except NoAnswerError:  # but the exact planner may know a way
        try:
            exact_fleet(profile, loads, gpus, gap=1e-2, at_any_load=True)
        except NoAnswerError as error:
            raise NoAnswerError(f"at the trace's highest load, {error}") from None


def simulate(
    profile: ServingProfile,
    trace: Trace,
    policy: str = "hierarchical",
    settings: Settings | None = None,
) -> Simulation:
    """Replay a trace under a policy.

    Args:
        profile: with the SLOs to be met.
        trace: what arrives when.
        policy: one of POLICIES.
        settings: default: Settings().

    Raises:
        InputError: no such policy, no GPUs, or a trace without requests.
        NoAnswerError: a class cannot be served at all, or the policy's fleet is too large.
    """
    room = _room(profile, trace, settings or Settings())
    return _run(policy, room)


def compare_policies(
    profile: ServingProfile,
    trace: Trace,
    settings: Settings | None = None,
    *,
    policies: tuple[str, ...] = tuple(POLICIES),
    progress: Callable[[int, int], None] | None = None,
) -> list[Simulation]:
    """Replay a trace under several policies; raises as simulate.

    Args:
        progress: told how many are done, of how many.
    """
    room = _room(profile, trace, settings or Settings())
    results = []
    for name in policies:
        try:
            results.append(_run(name, room))
        except NoAnswerError as error:
            raise NoAnswerError(f"{error}; compare others, with --policies") from None
        if progress is not None:
            progress(len(results), len(policies))
    return results


def _run(name: str, room: _Room) -> Simulation:
    simulator = Simulator(
        room.profile,
        room.offered,
        _policy(name, room),
        gpus=room.settings.gpus,
        epoch_slots=room.epoch_slots,
        overheads=room.settings.overheads,
    )
    return simulator.run()
