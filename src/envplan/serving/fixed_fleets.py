"""Fleets that never change: alike instances at one clock, for a whole trace.

They are what a policy must beat. A policy's energy is compared with the best of them that meets as
many SLOs, to one request in ten thousand, found with hindsight of the trace. What the policy saves
has three parts: what another TP than the largest saves, what one lower clock saves, and what
changes over time save.

The search knows three degrees (fixed_fleet_trials.py): by parts of a long trace, a fleet may pass
or is likely to; it passes by a replay of all of it. Parts of the trace rank the configurations, and
few fleets are replayed whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Final

from pydantic import JsonValue

from envplan.serving.fixed_fleet_trials import ESTIMATE_ERROR, FixedFleetTrials
from envplan.serving.instances import Instances
from envplan.serving.observed_trace import ObservedTrace
from envplan.serving.performance import Configuration
from envplan.serving.replayed_sizing import fewest_near, fewest_that_pass
from envplan.serving.savings_split import SavingsSplit
from envplan.serving.settings import Settings
from envplan.serving.simulation import Simulation

#: A fleet meets as many SLOs as a policy if it meets less by no more than this share of requests.
_AS_MANY: Final = 1e-4
#: Lower clocks are tried until so many in a row draw more than the best one so far.
_WORSE_CLOCKS: Final = 2


@dataclass(frozen=True, eq=False)
class Rivals:
    """A policy beside the fleets that never change and meet as many SLOs as it does.

    Each rival is the one of least energy of its kind, within the GPUs there are; None where there
    is none.

    Attributes:
        policy: what the policy did.
        largest_tp: rival on the largest TP, at the highest clock.
        highest_clock: rival on any TP, at the highest clock.
        lower_clock: rival on any TP, at one lower clock.
    """

    policy: Simulation
    largest_tp: Simulation | None
    highest_clock: Simulation | None
    lower_clock: Simulation | None

    @property
    def split(self) -> SavingsSplit | None:
        """What the policy saves, in parts; None where the largest TP has no such fleet."""
        if self.largest_tp is None or self.highest_clock is None or not self.largest_tp.energy_j:
            return None
        return SavingsSplit.of(
            fleet=self.policy.energy_j,
            largest_tp=self.largest_tp.energy_j,
            highest_clock=self.highest_clock.energy_j,
            lower_clock=None if self.lower_clock is None else self.lower_clock.energy_j,
        )

    def to_dict(self) -> dict[str, JsonValue]:
        """The fleets and the parts of the saving, in JSON types."""
        fleets: dict[str, JsonValue] = {
            "largest_tp": self._fleet_to_dict(self.largest_tp),
            "highest_clock": self._fleet_to_dict(self.highest_clock),
            "lower_clock": self._fleet_to_dict(self.lower_clock),
        }
        split: JsonValue = None if self.split is None else dict(self.split._asdict())
        return {"fixed_fleets": fleets, "savings_split": split}

    def _fleet_to_dict(self, rival: Simulation | None) -> JsonValue:
        if rival is None:
            return None
        return {
            "fleet": rival.policy,
            "gpus": rival.gpus_most,
            "energy_j": rival.energy_j,
            "slo_attainment": rival.slo_attainment,
            "saved_percent": self.policy.saved_percent(rival),
        }


class FixedFleets:
    """The best fleets that never change, on one trace.

    Args:
        observed: the trace.
        settings: of the simulation; the past is not replayed.
        on_tried: called after each configuration that was tried.
        replays: replays of the trace on fleets that never change, by the fleets' names; those that
            the search makes are added. One replay answers every policy.
    """

    def __init__(
        self,
        observed: ObservedTrace,
        settings: Settings,
        on_tried: Callable[[], None] = lambda: None,
        replays: MutableMapping[str, Simulation] | None = None,
    ) -> None:
        self._observed, self._settings, self._on_tried = observed, settings, on_tried
        self._trials = FixedFleetTrials(observed, settings, {} if replays is None else replays)
        self._best = cache(self._find_best)

    def beside(self, policy: Simulation) -> Rivals:
        """The fleets that a policy is to be compared with."""
        attainment = policy.slo_attainment - _AS_MANY
        largest_tp, highest_clock, lower_clock = self._candidates
        return Rivals(
            policy=policy,
            largest_tp=self._best(largest_tp, attainment),
            highest_clock=self._best(highest_clock, attainment),
            lower_clock=self._best(lower_clock, attainment),
        )

    @property
    def num_candidates(self) -> int:
        """Configurations that are tried beside a policy, at most."""
        return sum(len(configurations) for configurations in self._candidates)

    @cached_property
    def _candidates(self) -> tuple[tuple[Configuration, ...], ...]:
        """Configurations of each of the three rivals, in the order of Rivals.

        Of each TP, clocks descend.
        """
        tps, clocks_mhz = self._observed.tps, self._observed.clocks_mhz
        highest = tuple(Configuration(tp, clocks_mhz[tp][-1]) for tp in tps)
        lower = tuple(
            Configuration(tp, clock_mhz)
            for tp in tps
            for clock_mhz in reversed(clocks_mhz[tp][:-1])
        )
        return highest[-1:], highest, lower

    def _find_best(
        self, configurations: Sequence[Configuration], attainment: float
    ) -> Simulation | None:
        """The fleet of least energy among some configurations that meets so many SLOs."""
        best: Instances | None = None
        energies_j = self._estimated_energies(configurations, attainment)
        for fleet in sorted(energies_j, key=energies_j.__getitem__):
            if best is None:
                best = self._fewest_that_pass(fleet, attainment)
            else:
                best = self._fewest_that_save(fleet, attainment, best) or best
        return None if best is None else self._trials.replay(best)

    def _estimated_energies(
        self, configurations: Sequence[Configuration], attainment: float
    ) -> dict[Instances, float]:
        """The smallest fleet of each configuration that meets so many SLOs, with its energy in J.

        Of a long trace, both are estimates: on all of it, more or fewer may be needed.

        Args:
            configurations: of each TP, clocks descend.
            attainment: share of requests that must meet their SLOs.
        """
        energies_j: dict[Instances, float] = {}
        for tp in self._observed.tps:
            num_worse, least_j, guess = 0, math.inf, self._trials.instances_needed(tp)
            for configuration in configurations:
                if configuration.tp != tp or num_worse >= _WORSE_CLOCKS:
                    continue
                fleet = self._fewest_likely(configuration, attainment, guess)
                self._on_tried()
                if fleet is None:
                    break  # lower clocks do not, either
                energy_j = self._trials.energy_j(fleet)
                energies_j[fleet] = energy_j
                num_worse = num_worse + 1 if energy_j > least_j else 0
                least_j = min(least_j, energy_j)
                guess = fleet.count
        return energies_j

    def _fewest_likely(
        self, configuration: Configuration, attainment: float, guess: int
    ) -> Instances | None:
        """The fewest instances that are likely to meet so many SLOs; None if no number may.

        Where no number is likely to, the fewest that may.

        Args:
            configuration: of each.
            attainment: share of requests that must meet their SLOs.
            guess: where to begin.
        """
        most = self._settings.max_gpus // configuration.tp
        if not most:
            return None

        def may_pass(count: int) -> bool:
            return self._trials.may_pass(Instances(configuration, count), attainment)

        def is_likely_to_pass(count: int) -> bool:
            return self._trials.is_likely_to_pass(Instances(configuration, count), attainment)

        guess = min(guess, most)
        if not may_pass(guess) and not may_pass(most):
            return None  # asked before the numbers between, of which no one does then
        fewest = fewest_near(may_pass, guess, most)
        if fewest is None:
            return None
        likely = fewest_near(is_likely_to_pass, fewest, most)
        return Instances(configuration, fewest if likely is None else max(fewest, likely))

    def _fewest_that_pass(self, fleet: Instances, attainment: float) -> Instances | None:
        """The fewest such instances that meet so many SLOs on the whole trace; None if none do.

        Args:
            fleet: the configuration, and the number to begin with.
            attainment: share of requests that must meet their SLOs.
        """

        def passes(count: int) -> bool:
            return self._trials.passes(replace(fleet, count=count), attainment)

        most = self._settings.max_gpus // fleet.configuration.tp
        fewest = fewest_near(passes, fleet.count, most)
        return None if fewest is None else replace(fleet, count=fewest)

    def _fewest_that_save(
        self, fleet: Instances, attainment: float, best: Instances
    ) -> Instances | None:
        """The fewest such instances that meet so many SLOs, if they take less energy than the best.

        Few configurations have any: even the most instances that would take less energy meet too
        few SLOs. So these are replayed first.
        """
        affordable = self._affordable(fleet, best)
        if affordable is None or not self._trials.may_pass(affordable, attainment):
            return None
        if not self._trials.passes(affordable, attainment):
            return None

        def passes(count: int) -> bool:
            return self._trials.passes(replace(fleet, count=count), attainment)

        fewest = replace(fleet, count=fewest_that_pass(passes, affordable.count))
        saves = self._trials.replay(fewest).energy_j < self._trials.replay(best).energy_j
        return fewest if saves else None

    def _affordable(self, fleet: Instances, best: Instances) -> Instances | None:
        """The most such instances that, by estimate, may take less energy than the best fleet.

        None if one takes more already.
        """
        most_j = self._trials.energy_j(best) * (1 + ESTIMATE_ERROR)

        def take_more(count: int) -> bool:
            return self._trials.energy_j(replace(fleet, count=count)) >= most_j

        most = self._settings.max_gpus // fleet.configuration.tp
        too_many = fewest_near(take_more, fleet.count, most)
        affordable = most if too_many is None else too_many - 1
        return replace(fleet, count=affordable) if affordable else None


def rivals_of(
    observed: ObservedTrace,
    settings: Settings,
    policies: Sequence[Simulation],
    progress: Callable[[int, int], None] = lambda done, count: None,
) -> list[Rivals]:
    """The fleets that each of some policies is to be compared with.

    Args:
        observed: the trace.
        settings: of the simulation.
        policies: what they did.
        progress: told how many configurations were tried, of how many.
    """
    num_tried = 0

    def count_one() -> None:
        nonlocal num_tried
        num_tried += 1
        progress(num_tried, num_candidates)

    fleets = FixedFleets(observed, settings, on_tried=count_one)
    num_candidates = len(policies) * fleets.num_candidates
    rivals = []
    for number, policy in enumerate(policies, start=1):
        rivals.append(fleets.beside(policy))
        num_tried = number * fleets.num_candidates  # not all had to be tried
        progress(num_tried, num_candidates)
    return rivals
