"""What a policy is asked and what it is told: a fleet for the requests that are to be expected.

A policy is a function from an Outlook to a FleetSpec, with a name and whether it is asked again
as time passes. A new one is a file in this folder with a function under `@policy`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np

from envplan.serving.classes import CLASSES, Slo, serves
from envplan.serving.demand import LEAST_LOAD, check_reachable
from envplan.serving.profile import ServingProfile
from envplan.serving.simulation import FleetSpec, Key, Overheads, PoolSpec
from envplan.serving.sizing import Need, Stream

__all__ = ["POLICIES", "Outlook", "Policy", "Settings", "Stretch", "fleet_of", "policy"]

_WORTH: Final = 0.85  # of its power: what another TP must stay below to be worth a change
_BUSY_BATCH: Final = 16.0  # requests that decode together where instances are filled up


@dataclass(frozen=True)
class Settings:
    """How a simulation is run.

    Attributes:
        gpus: at most.
        epoch_s: between two looks ahead, s; in each minute between, it is only looked whether the
            fleet still suffices.
        late: share of requests that may miss their SLOs, which fleets are sized for.
        headroom: fraction by which what is needed is exceeded.
        mispredicted: share of requests whose output is predicted one length too short or too long.
        seed: of whatever is drawn.
        overheads: how long changes take.
    """

    gpus: int = 1024
    epoch_s: float = 1800.0
    late: float = 0.0005
    headroom: float = 0.05
    mispredicted: float = 0.05
    seed: int = 0
    overheads: Overheads = field(default_factory=Overheads)


class Stretch(NamedTuple):
    """A stretch of the trace that something like is expected, and how many times as much of it."""

    begin_s: float
    end_s: float
    factor: float


@dataclass(frozen=True, eq=False)
class Outlook:
    """What to expect: the most of what some stretches of the trace needed.

    Attributes:
        stream: what arrived.
        settings: of the simulation.
        stretches: whose likes are expected.
        needs: of stretches, kept between outlooks of one simulation.
        present: TP of each pool's instances as it is; kept unless another saves enough.
    """

    stream: Stream
    settings: Settings
    stretches: Sequence[Stretch]
    needs: dict[tuple[float, float, frozenset[str], str, int], Need] = field(default_factory=dict)
    present: Mapping[str, int] = field(default_factory=dict)

    @property
    def profile(self) -> ServingProfile:
        """With the SLOs to be met."""
        return self.stream.profile

    @cached_property
    def classes(self) -> list[str]:
        """Those that come, in the order of CLASSES."""
        found = np.zeros(len(CLASSES), dtype=bool)
        for stretch in self.stretches:
            taken = self.stream.taken[self.stream.between(stretch.begin_s, stretch.end_s)]
            found |= np.bincount(taken, minlength=len(CLASSES)) > 0
        return [name for name, there in zip(CLASSES, found, strict=True) if there]

    def need(self, classes: Iterable[str], pool: str, tp: int) -> Need:
        """What these classes need in a class's pool on instances of a TP, headroom included."""
        names, most = frozenset(classes), Need(0.0, 0.0, 0.0)
        for begin, end, factor in self.stretches:
            key = (begin, end, names, pool, tp)
            if key not in self.needs:
                self.needs[key] = self.stream.need(begin, end, names, pool, tp, self.settings.late)
            here = self.needs[key]
            if here.instances * factor > most.instances:
                most = here.times(factor)
        return replace(most, instances=most.instances * (1 + self.settings.headroom))

    def count(self, classes: Iterable[str], pool: str, tp: int) -> int:
        """Whole instances that these classes need."""
        return max(1, int(np.ceil(self.need(classes, pool, tp).instances)))

    def slo(self, classes: Iterable[str]) -> Slo:
        """The strictest of these classes'."""
        return Slo.strictest(self.profile.classes[name].slo for name in classes)

    def able(self, classes: Sequence[str], pool: str) -> list[int]:
        """TPs on which a pool can meet the SLOs of these classes at all, ascending."""
        degrees = self.profile.degrees(pool)
        return [tp for tp in degrees if all(self._meets(n, pool, tp) for n in classes)] or degrees[
            -1:
        ]

    def _meets(self, name: str, pool: str, tp: int) -> bool:
        """Whether requests of a class, at their own lengths where known, can be in time on a TP."""
        host = name if tp in self.profile.degrees(name) else pool
        curve = self.profile.curves[host, tp, self.profile.frequencies(host, tp)[-1]]
        return curve.capacity(self.profile.classes[name].slo) > 0

    def power(self, classes: Sequence[str], pool: str, tp: int, count: int, packs: bool) -> float:
        """About what so many instances draw, W: idle, prompts, and decoding on top."""
        need = self.need(classes, pool, tp)
        phases = self.profile.phases_of(pool, tp, self.profile.frequencies(pool, tp)[-1])
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

    def thriftiest(self, classes: Sequence[str], pool: str, *, packs: bool) -> int:
        """The TP on which these classes draw the least, by `power`, or nearly so and there."""

        def watts(tp: int) -> float:
            least = self.power(classes, pool, tp, self.count(classes, pool, tp), packs)
            return least * (_WORTH if tp == self.present.get(pool) else 1.0)

        return min(self.able(classes, pool), key=watts)

    def clock(self, pool: str, tp: int) -> int:
        """The clock at which a decode step takes the least energy above idling, MHz."""

        def energy(mhz: int) -> float:
            phases = self.profile.phases_of(pool, tp, mhz)
            return float((phases.step_w[0] - 0.5 * phases.idle_w) * phases.step_s[0])

        return min(self.profile.frequencies(pool, tp), key=energy)

    def pool(
        self, classes: Sequence[str], name: str, tp: int, count: int, *,
        managed: bool = False, packs: bool = False,
    ) -> PoolSpec:  # fmt: skip
        """A pool of alike instances: at the highest clock, or managed from the thriftiest one up."""
        clock = self.clock(name, tp) if managed else self.profile.frequencies(name, tp)[-1]
        return PoolSpec(name, self.slo(classes), {(tp, clock): count}, managed, packs)

    def loads(self) -> dict[str, float]:
        """tokens/s by class that a planner for steady loads must plan for.

        A load of which an instance of the highest TP and clock carries as much as what is needed of
        these instances says: bursts are in it.
        """
        found = {}
        check_reachable(self.profile, self.classes, merge=True)
        for name in self.classes:
            slo = self.profile.classes[name].slo
            able = [curve for curve in self.profile.of(name) if curve.capacity(slo)]
            if able:
                most = max(able, key=lambda curve: (curve.tp, curve.frequency_mhz))
                need = self.need([name], name, most.tp).instances
                found[name] = max(LEAST_LOAD, need * most.capacity(slo))
        return found


def longest_of(classes: Iterable[str]) -> str:
    """The shortest class that is longer in no respect than its pool can be: it serves them all."""
    names = list(classes)
    return next(host for host in CLASSES if all(serves(host, name) for name in names))


def fleet_of(pools: Mapping[str, tuple[PoolSpec, Sequence[str]]]) -> FleetSpec:
    """A fleet of pools by class, each with the classes it serves."""
    routes: dict[str, tuple[tuple[Key, float], ...]] = {}
    for pool, classes in pools.values():
        routes |= dict.fromkeys(classes, ((pool.key, 1.0),))
    return FleetSpec({pool.key: pool for pool, _ in pools.values()}, routes)


@dataclass(frozen=True)
class Policy:
    """A policy.

    Attributes:
        name: as on the command line.
        about: what it does, in a line.
        scales: it is asked again as time passes; otherwise once, with hindsight of the whole trace.
        plan: makes the fleet.
    """

    name: str
    about: str
    scales: bool
    plan: Callable[[Outlook], FleetSpec]


#: All policies, in the order they are compared in.
POLICIES: dict[str, Policy] = {}


def policy(
    name: str, about: str, *, scales: bool
) -> Callable[[Callable[[Outlook], FleetSpec]], Callable[[Outlook], FleetSpec]]:
    """Register a function as a policy."""

    def register(plan: Callable[[Outlook], FleetSpec]) -> Callable[[Outlook], FleetSpec]:
        POLICIES[name] = Policy(name, about, scales, plan)
        return plan

    return register
