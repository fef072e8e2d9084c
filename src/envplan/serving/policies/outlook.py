"""What a policy is asked and what it is told: a fleet for the requests that are to be expected.

A policy is a function from an Outlook to a Fleet, with a name and whether it is asked again
as time passes. A new one is a file in this folder with a function under `@policy`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, NamedTuple, TypeVar

import numpy as np

from envplan.serving.classes import CLASSES, Slo, serves
from envplan.serving.simulation import Fleet, Overheads, PoolSpec
from envplan.serving.sizing import Need, Stream

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
        mispredicted: share of requests whose output is predicted one length too short or too long;
            a short one cannot be too short, nor a long one too long.
        underestimated: share of these that are predicted too short.
        pools: at most, for policies that sort classes into pools.
        squash_s: a request whose first token is so much too late is given up.
        past_s: so much of the trace, rounded up to minutes, is a past: the first fleet is sized by
            it, and it is not replayed. 0: that fleet is sized by the trace's peak, with hindsight.
        seed: of whatever is drawn.
        overheads: how long changes take.
    """

    gpus: int = 1024
    epoch_s: float = 1800.0
    late: float = 0.0005
    headroom: float = 0.1
    mispredicted: float = 0.05
    underestimated: float = 0.5
    pools: int = len(CLASSES)
    squash_s: float = 60.0
    past_s: float = 0.0
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
        present: the fleet that runs; None: none yet.
        worth: share of what the present TPs draw that others must stay below to be worth a change;
            0: none is, because instances are needed soon.
    """

    stream: Stream
    settings: Settings
    stretches: Sequence[Stretch]
    present: Fleet | None = None
    worth: float = _WORTH

    @cached_property
    def classes(self) -> list[str]:
        """Those that come, in the order of CLASSES."""
        found = [self.stream.counts(begin, end) for begin, end, _ in self.stretches]
        return [name for name in CLASSES if any(name in counts for counts in found)]

    def need(self, classes: Iterable[str], tp: int) -> Need:
        """What these classes need in one pool of instances of a TP, headroom included."""
        names, late = frozenset(classes), self.settings.late
        needs = [
            Need(*(factor * each for each in self.stream.need(begin, end, names, tp, late)))
            for begin, end, factor in self.stretches
        ]
        most = max(needs, key=lambda need: need.instances)
        return most._replace(instances=most.instances * (1 + self.settings.headroom))

    def count(self, classes: Iterable[str], tp: int) -> int:
        """Whole instances that these classes need."""
        return max(1, int(np.ceil(self.need(classes, tp).instances)))

    def able(self, classes: Iterable[str]) -> list[int]:
        """TPs on which the SLOs of these classes can be met at all, ascending, or the largest."""
        found = [tp for tp in self.stream.gpus if all(self._meets(name, tp) for name in classes)]
        return found or self.stream.gpus[-1:]

    def _meets(self, name: str, tp: int) -> bool:
        curve = self.stream.profile.curves.get((name, tp, self.stream.clocks[tp][-1]))
        return curve is not None and curve.capacity(self.stream.profile.classes[name].slo) > 0

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

    def thriftiest(self, classes: Sequence[str], name: str, *, packs: bool) -> int:
        """The TP on which these classes draw the least, by `power`, or nearly so and there.

        Args:
            name: of the pool, as in PoolSpec.
        """
        present = [pool.tp for pool in (self.present or {}).values() if pool.name == name]

        def watts(tp: int) -> float:
            least = self.power(classes, tp, self.count(classes, tp), packs=packs)
            return least * (self.worth if tp in present else 1.0)

        return min(self.able(classes), key=watts)

    def clock(self, tp: int) -> int:
        """The clock at which a decode step takes the least energy above idling, MHz."""

        def energy(mhz: int) -> float:
            phases = self.stream.profile.phases[tp, mhz]
            return float((phases.step_w[0] - 0.5 * phases.idle_w) * phases.step_s[0])

        return min(self.stream.clocks[tp], key=energy)

    def pool(
        self, classes: Iterable[str], tp: int, count: int | None = None, *,
        name: str | None = None, managed: bool = False, packs: bool = False,
    ) -> PoolSpec:  # fmt: skip
        """A pool of alike instances: at the highest clock, or managed from the thriftiest up.

        Args:
            count: default: as many as these classes need.
            name: the class that it is for; default: the lowest that is shorter than none of these.
        """
        served = frozenset(classes)
        return PoolSpec(
            name=name or home(served),
            serves=served,
            slo=Slo.strictest(self.stream.profile.classes[each].slo for each in served),
            tp=tp,
            clock=self.clock(tp) if managed else self.stream.clocks[tp][-1],
            count=self.count(served, tp) if count is None else count,
            managed=managed,
            packs=packs,
        )


def home(classes: Iterable[str]) -> str:
    """The lowest class that is shorter than none of these."""
    names = list(classes)
    return next(host for host in CLASSES if all(serves(host, name) for name in names))


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
    plan: Callable[[Outlook], Fleet]


Plan = TypeVar("Plan", bound=Callable[..., Fleet])

#: All policies, in the order they are compared in.
POLICIES: dict[str, Policy] = {}


def policy(name: str, about: str, *, scales: bool) -> Callable[[Plan], Plan]:
    """Register a function as a policy; it may be several."""

    def register(plan: Plan) -> Plan:
        POLICIES[name] = Policy(name, about, scales, plan)
        return plan

    return register
