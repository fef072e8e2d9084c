"""Policies over time: which fleet serves a trace.

A policy is a row of POLICIES: how it sorts classes into pools (pool_assignment.py), and what it may
choose for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from envplan.serving.fleet import Fleet, PoolSpec
from envplan.serving.forecast import DemandForecast
from envplan.serving.pool_assignment import (
    PoolAssignment,
    by_class,
    least_power_unless_close,
    merged,
    one_pool,
)
from envplan.serving.power_model import most_efficient_decode_clock, pool_power_w
from envplan.serving.replayed_sizing import fewest_late, right_sized

#: Share of the present TP's power that another TP must stay below to be worth a change.
RESHARD_POWER_RATIO: Final = 0.85
#: The same where instances are needed soon: the TPs stay.
NEVER_RESHARD: Final = 0.0


@dataclass(frozen=True, eq=False)
class Situation:
    """The expected demand and the present fleet, by which a policy decides.

    Attributes:
        forecast: the demand that is expected.
        present: the fleet that runs.
        reshard_power_ratio: share of what the present TPs draw that others must stay below to be
            worth a change.
        is_first: the first fleet is sized, for which there is time to replay all there is.
    """

    forecast: DemandForecast
    present: Fleet = field(default_factory=Fleet)
    reshard_power_ratio: float = RESHARD_POWER_RATIO
    is_first: bool = False

    @property
    def max_gpus(self) -> int:
        """GPUs of a fleet."""
        return self.forecast.settings.max_gpus


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A policy.

    Attributes:
        about: what it does, in a line.
        assign: the pools it wants; None: those that draw the least.
        autoscales: it is asked again as time passes; otherwise once, with hindsight of the whole
            trace.
        chooses_tp: pools have the TP that draws least, or nearly so and is there; otherwise the
            largest one.
        keeps_gpus: with any TP, a pool has the GPUs that it needs with the largest.
        dynamic_clock: clocks follow the load from the most efficient up; otherwise they are the
            highest.
        consolidates: one instance is filled after another, so that the last ones idle.
    """

    about: str
    assign: Callable[[DemandForecast], PoolAssignment] | None
    autoscales: bool = False
    chooses_tp: bool = False
    keeps_gpus: bool = False
    dynamic_clock: bool = False
    consolidates: bool = False

    def plan(self, situation: Situation) -> Fleet:
        """The fleet for what is expected, or what does best on the GPUs there are.

        It is still too large if not even one instance of each pool fits on them.
        """
        return self._within_gpus(situation, self._wanted(situation))

    def _wanted(self, situation: Situation) -> Fleet:
        """The fleet for what is expected, however many GPUs there are."""
        if self.assign is None:
            return self._plan_least_power(situation)
        forecast = situation.forecast
        pools = {}
        for name, classes in self.assign(forecast).items():
            pools[name] = self._pool(situation, name, classes, forecast.feasible_tps(classes))
        return Fleet(pools)

    def _plan_least_power(self, situation: Situation) -> Fleet:
        """A pool for each TP that the assignment of least power has."""
        forecast = situation.forecast
        classes_by_tp = least_power_unless_close(
            forecast, situation.present, situation.reshard_power_ratio
        )
        home = forecast.lowest_host(forecast.classes)
        return Fleet(
            {
                f"{home} on TP{tp}": self._pool(situation, home, classes, [tp])
                for tp, classes in classes_by_tp.items()
            }
        )

    def _pool(
        self, situation: Situation, home: str, classes: Sequence[str], tps: Sequence[int]
    ) -> PoolSpec:
        """A pool with the TP among these, which ascend, that draws the least by the estimate."""
        forecast = situation.forecast
        present_tps = set[int]()
        for pool in situation.present.pools.values():
            if pool.home_class == home:
                present_tps.add(pool.tp)

        def comparable_power_w(pool: PoolSpec) -> float:
            """The power of a pool; one whose TP is there may draw more than others."""
            power_w = pool_power_w(
                forecast, classes, pool.tp, pool.num_instances, consolidates=self.consolidates
            )
            return power_w * situation.reshard_power_ratio if pool.tp in present_tps else power_w

        estimated = self._estimated_pools(situation, home, classes, tps)
        best = min(estimated, key=comparable_power_w)
        return best if self.keeps_gpus else _right_sized(situation, best)

    def _estimated_pools(
        self, situation: Situation, home: str, classes: Sequence[str], tps: Sequence[int]
    ) -> list[PoolSpec]:
        """The pool on each TP that it may have, with as many instances as are estimated."""
        forecast = situation.forecast
        possible_tps = tps[-1:]
        if self.chooses_tp:
            possible_tps = forecast.responsive_tps(classes, tps)
        pools = []
        for tp in possible_tps:
            num_instances = forecast.instances_needed(classes, tp)
            pools.append(self._pool_on(situation, home, classes, tp, num_instances))
        if not self.keeps_gpus:
            return pools
        *smaller, largest = pools
        largest = _right_sized(situation, largest)
        refilled = [
            replace(pool, num_instances=largest.gpus // pool.tp)
            for pool in smaller
            if largest.gpus // pool.tp >= pool.num_instances
        ]
        return [*refilled, largest]

    def _pool_on(
        self,
        situation: Situation,
        home: str,
        classes: Sequence[str],
        tp: int,
        num_instances: int,
    ) -> PoolSpec:
        """The pool with so many instances on a TP."""
        observed = situation.forecast.observed
        clock_mhz = observed.max_clock_mhz(tp)
        if self.dynamic_clock:
            clock_mhz = most_efficient_decode_clock(observed, tp)
        return PoolSpec(
            home_class=home,
            serves=frozenset(classes),
            tp=tp,
            frequency_mhz=clock_mhz,
            num_instances=num_instances,
            dynamic_clock=self.dynamic_clock,
            consolidates=self.consolidates,
        )

    def _within_gpus(self, situation: Situation, wanted: Fleet) -> Fleet:
        """The fleet that does best on the GPUs there are, where the wanted one needs more.

        It is still too large if its pools do not fit with one instance each.
        """
        if wanted.gpus <= situation.max_gpus:
            return wanted
        pools = dict(wanted.pools)
        if len(pools) == 1:
            ((name, pool),) = pools.items()
            pools[name] = self._pool_within_gpus(situation, pool)
        while Fleet(pools).gpus > situation.max_gpus:
            shrinkable = [name for name, pool in pools.items() if pool.num_instances > 1]
            if not shrinkable:
                break
            largest = max(shrinkable, key=lambda name: pools[name].gpus)
            pools[largest] = replace(pools[largest], num_instances=pools[largest].num_instances - 1)
        return Fleet(pools, gpus_wanted=wanted.gpus)

    def _pool_within_gpus(self, situation: Situation, wanted: PoolSpec) -> PoolSpec:
        """The pool on all GPUs there are, with the TP on which the fewest requests are late."""
        forecast = situation.forecast
        classes = [name for name in forecast.classes if name in wanted.serves]
        tps = forecast.feasible_tps(classes) if self.chooses_tp else [wanted.tp]
        pools = []
        for tp in tps:
            num_instances = situation.max_gpus // tp
            if num_instances:
                pool = self._pool_on(situation, wanted.home_class, classes, tp, num_instances)
                pools.append(pool)
        return fewest_late(forecast, pools, always=situation.is_first) if pools else wanted


def _right_sized(situation: Situation, pool: PoolSpec) -> PoolSpec:
    """The pool with as many instances as replays show to be enough."""
    return right_sized(situation.forecast, pool, always=situation.is_first)


#: All policies, in the order they are compared in. The first six are DynamoLLM's.
POLICIES: Final[Mapping[str, Policy]] = {
    "SinglePool": Policy(
        about="one pool on TP8 at the highest clock, sized for the peak",
        assign=one_pool,
    ),
    "MultiPool": Policy(
        about="a pool for each class, otherwise the same",
        assign=by_class,
    ),
    "ScaleInst": Policy(
        about="MultiPool, and the number of instances follows the load",
        assign=by_class,
        autoscales=True,
    ),
    "ScaleShard": Policy(
        about="MultiPool, and each pool's GPUs have the thriftiest TP",
        assign=by_class,
        chooses_tp=True,
        keeps_gpus=True,
    ),
    "ScaleFreq": Policy(
        about="MultiPool, and clocks follow the load",
        assign=by_class,
        dynamic_clock=True,
    ),
    "DynamoLLM": Policy(
        about="all three, and small pools are merged into higher ones",
        assign=merged,
        autoscales=True,
        chooses_tp=True,
        dynamic_clock=True,
    ),
    "static": Policy(
        about="the best pools for the peak; only their clocks change",
        assign=None,
        chooses_tp=True,
        dynamic_clock=True,
        consolidates=True,
    ),
    "exact": Policy(
        about="the best pools for what each epoch needs",
        assign=None,
        autoscales=True,
        chooses_tp=True,
        dynamic_clock=True,
        consolidates=True,
    ),
    # One pool, because bursts of different classes even each other out. Prompts with near deadlines
    # go first in every instance, so short requests do not wait for long ones.
    "envplan": Policy(
        about="one pool, filled up instance by instance; number, TP, clocks follow the load",
        assign=one_pool,
        autoscales=True,
        chooses_tp=True,
        dynamic_clock=True,
        consolidates=True,
    ),
}
