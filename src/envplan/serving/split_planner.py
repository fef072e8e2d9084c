"""The split fleet of least energy, phase by phase, by replay.

First the instances for prompts: with outputs of one token, the fewest of each configuration that
have enough first tokens in time; of these, those of least energy. Then, with them, the instances
that decode: the fewest of each configuration with which enough requests meet their SLOs; of these
fleets, the one of least energy. Requests that no instance could answer in time are not asked for.

A long trace is searched on its busiest part. The best fleets found there are replayed on all of it,
and get an instance more, of the phase that is late, until they hold: a queue before the instances
that decode may grow so slowly that a part does not show it.

The same search for instances that do both gives the fleet to compare with. Clocks are those of the
profile.
What is left out: configurations of prefill that draw more alone and less together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Final

import numpy as np

from envplan.errors import NoAnswerError
from envplan.serving.fleet_controller import EngineResults
from envplan.serving.instances import Instances
from envplan.serving.observed_trace import ObservedTrace
from envplan.serving.performance import Configuration
from envplan.serving.replayed_sizing import fewest_between
from envplan.serving.settings import Settings
from envplan.serving.split_fleet import SplitFleet, SplitFleetController

#: A trace with more requests is searched on its busiest part, which has so many.
MOST_REQUESTS: Final = 20_000
_REPLAYED_FLEETS: Final = 3


@dataclass(frozen=True, eq=False)
class SplitPlanner:
    """Plans for the requests of a trace.

    Attributes:
        observed: the trace that fleets are sized for.
        settings: GPUs at most, and the share of requests that must meet their SLOs.
    """

    observed: ObservedTrace
    settings: Settings

    def together(self) -> SplitFleet:
        """The fleet of least energy whose instances do both.

        Raises:
            NoAnswerError: there is none within the GPUs.
        """
        fleets = self._by_energy(SplitFleet, self._busiest, attained_share)
        return self._best_that_holds(fleets)

    def apart(self) -> SplitFleet:
        """The fleet of least energy whose instances run prompts or decode.

        Raises:
            InputError: the profile does not say how large contexts are.
            NoAnswerError: there is none within the GPUs.
        """
        prompts_only = with_outputs(self._busiest, 1)
        prefill = self._by_energy(SplitFleet, prompts_only, first_in_time_share)[0].first
        fleets = self._by_energy(
            lambda decode: SplitFleet(prefill, decode), self._busiest, attained_share
        )
        return self._best_that_holds(fleets)

    @cached_property
    def _busiest(self) -> ObservedTrace:
        return busiest_part(self.observed)

    def _best_that_holds(self, fleets: Sequence[SplitFleet]) -> SplitFleet:
        """The fleet of least energy on the whole trace, of the first ones, grown to hold."""
        energy_j: dict[SplitFleet, float] = {}
        for fleet in fleets[:_REPLAYED_FLEETS]:
            grown = fleet
            while grown.gpus <= self.settings.max_gpus:
                results = SplitFleetController(self.observed, self.settings, grown).finish()
                if attained_share(results) >= self.target:
                    energy_j[grown] = float(results.slot_energy_j.sum())
                    break
                grown = grown.grown(decode=first_in_time_share(results) >= self.target)
        if not energy_j:
            raise self._none_holds()
        return min(energy_j, key=energy_j.__getitem__)

    def _by_energy(
        self,
        fleet_with: Callable[[Instances], SplitFleet],
        observed: ObservedTrace,
        share_met: Callable[[EngineResults], float],
    ) -> list[SplitFleet]:
        """The fleets with the fewest instances of each configuration, those of least energy first.

        Raises:
            NoAnswerError: there is none.
        """
        energy_j: dict[SplitFleet, float] = {}
        for configuration in self._configurations():
            others = fleet_with(Instances(configuration, 0)).gpus
            most = (self.settings.max_gpus - others) // configuration.tp
            replay = _Replays(observed, self.settings, configuration, fleet_with)

            def are_enough(count: int, replay: _Replays = replay) -> bool:
                return share_met(replay.results(count)) >= self.target

            fewest = fewest_instances(are_enough, most)
            if fewest is not None:
                fleet = fleet_with(Instances(configuration, fewest))
                energy_j[fleet] = float(replay.results(fewest).slot_energy_j.sum())
        if not energy_j:
            raise self._none_holds()
        return sorted(energy_j, key=energy_j.__getitem__)

    def _none_holds(self) -> NoAnswerError:
        return NoAnswerError(
            f"no fleet of alike instances meets the SLOs of {100 * self.target:.4g}% of the "
            f"requests within {self.settings.max_gpus} GPUs; give more with --gpus, or ask for "
            "less with --slo-quantile"
        )

    def _configurations(self) -> Iterator[Configuration]:
        for tp in self.observed.tps:
            for clock_mhz in self.observed.clocks_mhz[tp]:
                yield Configuration(tp, clock_mhz)

    @cached_property
    def target(self) -> float:
        """Share of requests that must meet their SLOs."""
        hopeless_share = self.observed.hopeless_requests / len(self.observed.trace)
        return self.settings.slo_quantile_percent / 100 * (1 - hopeless_share)


class _Replays:
    """Replays of fleets with some number of instances of a configuration, each made once."""

    def __init__(
        self,
        observed: ObservedTrace,
        settings: Settings,
        configuration: Configuration,
        fleet_with: Callable[[Instances], SplitFleet],
    ) -> None:
        self._observed, self._settings = observed, settings
        self._configuration, self._fleet_with = configuration, fleet_with
        self.results = cache(self._replay)

    def _replay(self, count: int) -> EngineResults:
        fleet = self._fleet_with(Instances(self._configuration, count))
        return SplitFleetController(self._observed, self._settings, fleet).finish()


def attained_share(results: EngineResults) -> float:
    """Share of requests that met their SLOs."""
    return results.total_counts.attainment


def first_in_time_share(results: EngineResults) -> float:
    """Share of requests whose first token was in time."""
    total = results.total_counts
    return total.first_in_time / total.requests if total.requests else 1.0


def fewest_instances(are_enough: Callable[[int], bool], most: int) -> int | None:
    """The fewest instances that are enough, by doubling and halving; None if `most` are not.

    More instances than enough are taken to be enough.
    """
    too_few, count = 0, 1
    while count < most and not are_enough(count):
        too_few, count = count, 2 * count
    enough = min(count, most)
    if enough < 1 or (enough == most and not are_enough(enough)):
        return None
    return fewest_between(are_enough, too_few, enough)


def busiest_part(observed: ObservedTrace) -> ObservedTrace:
    """The trace or, if it has more requests than MOST_REQUESTS, so many that come fastest."""
    arrival_s = observed.trace.arrival_s
    if len(arrival_s) <= MOST_REQUESTS:
        return observed
    span_s = arrival_s[MOST_REQUESTS:] - arrival_s[:-MOST_REQUESTS]
    first = int(np.argmin(span_s))
    return observed.window(float(arrival_s[first]), float(arrival_s[first + MOST_REQUESTS]))


def with_outputs(observed: ObservedTrace, tokens: int) -> ObservedTrace:
    """The same requests with outputs of so many tokens."""
    lengths = observed.trace.lengths(observed.profile)
    outputs = np.full_like(lengths.output_tokens, tokens)
    trace = replace(observed.trace, input_tokens=lengths.input_tokens, output_tokens=outputs)
    return observed.of_trace(trace)
