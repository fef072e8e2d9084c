"""Load curves as replays show them.

The queueing model of steady_state.py is quick, and wrong where memory, chunks of prompts or late
requests matter. So the curves that a plan is made from are taken from replays of one instance: how
much it carries within an SLO, and what it draws. The model only says where to look first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import groupby
from os import cpu_count
from typing import Final, NamedTuple

import numpy as np

from envplan.serving.classes import Slo
from envplan.serving.performance import Configuration
from envplan.serving.profile import ServingProfile
from envplan.serving.steady_replay import (
    SteadyLoad,
    SteadyReplay,
    replay_steadily,
    stays_within,
)
from envplan.serving.steady_state import CurveKey, LoadCurve

#: Requests of a replay that asks whether an SLO is met, and of one that measures power.
_JUDGED_REQUESTS: Final = 4000
_MEASURED_REQUESTS: Final = 1500
#: Points of a curve, as shares of the highest load. Power rises steeply at low loads: an instance
#: that decodes a few requests draws hardly less than one that decodes many.
_LOAD_SHARES: Final = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 1.0)
#: The search for the highest load begins with this ratio, which is squared with each step, and ends
#: with this precision.
_FIRST_RATIO: Final = 1.05
_PRECISION: Final = 1.01
_LEAST_SHARE: Final = 0.02  # of the load where the search begins
#: Of the requests that may be late, so many more are left to chance.
_SPARE_LATE_SHARE: Final = 0.3
_P99: Final = 0.99
_SEED: Final = 1


class Promise(NamedTuple):
    """A class's configurations, and an SLO that its pool may promise."""

    request_class: str
    slo: Slo


def replay_curves(
    profile: ServingProfile,
    promises: Iterable[Promise],
    max_late_share: float,
    progress: Callable[[int, int], None] = lambda done, count: None,
) -> ServingProfile:
    """The profile with curves that replays show, for all configurations of some promises.

    Args:
        profile: with the performance of instances.
        promises: that pools may make.
        max_late_share: share of requests that may miss their SLOs.
        progress: told how many curves are done, of how many.
    """
    by_class = groupby(sorted(promises, key=_by_class), key=_by_class)
    slos = {name: [promise.slo for promise in of_class] for name, of_class in by_class}
    models = [curve for name in slos for curve in profile.curves_of(name)]

    def replay_curve(model: LoadCurve) -> LoadCurve:
        measured = _MeasuredInstance(profile, model, max_late_share)
        return measured.curve(slos[model.request_class])

    curves = dict(profile.curves)
    with ThreadPoolExecutor(cpu_count()) as pool:  # the replays themselves run side by side
        for done, curve in enumerate(pool.map(replay_curve, models), start=1):
            curves[CurveKey(curve.request_class, curve.tp, curve.frequency_mhz)] = curve
            progress(done, len(models))
    return replace(profile, curves=curves)


def _by_class(promise: Promise) -> str:
    return promise.request_class


@dataclass(frozen=True)
class _MeasuredInstance:
    """An instance that is replayed under loads of one class.

    Attributes:
        profile: with its performance.
        model: its curve by the queueing model.
        max_late_share: share of requests that may miss their SLOs.
    """

    profile: ServingProfile
    model: LoadCurve
    max_late_share: float

    def curve(self, slos: Iterable[Slo]) -> LoadCurve:
        """Its curve, with the highest load within each of some SLOs."""
        max_load_by_slo = self._max_loads_within(slos)
        max_load = max(max_load_by_slo.values())
        if max_load == 0:
            return replace(self.model, max_load_by_slo=max_load_by_slo)
        return self._measured_curve(max_load, max_load_by_slo)

    def _max_loads_within(self, slos: Iterable[Slo]) -> dict[Slo, float]:
        """The highest load within each of some SLOs; it never falls where an SLO is looser."""
        max_load_by_slo: dict[Slo, float] = {}
        for slo in slos:
            max_load_by_slo[slo] = self._max_load_within(slo)
        for stricter, max_load in list(max_load_by_slo.items()):
            for slo in max_load_by_slo:
                if stricter.covers(slo):
                    max_load_by_slo[slo] = max(max_load_by_slo[slo], max_load)
        return max_load_by_slo

    def _measured_curve(self, max_load: float, max_load_by_slo: Mapping[Slo, float]) -> LoadCurve:
        """The curve up to the highest load, from a replay at each of its points."""
        loads = max_load * np.array(_LOAD_SHARES)
        replays = [self._measured(load) for load in loads.tolist()]
        first_token_s = [replay.first_token_times.quantile_s(_P99) for replay in replays]
        interval_s = [replay.token_intervals.quantile_s(_P99) for replay in replays]
        return replace(
            self.model,
            load_tokens_s=np.array([0.0, *loads]),
            power_w=np.array([self._idle_w, *(replay.power_w for replay in replays)]),
            ttft_s=np.maximum.accumulate([self.model.ttft_s[0], *first_token_s]),
            tbt_s=np.maximum.accumulate([self.model.tbt_s[0], *interval_s]),
            max_load_by_slo=max_load_by_slo,
        )

    @property
    def _configuration(self) -> Configuration:
        return Configuration(self.model.tp, self.model.frequency_mhz)

    @property
    def _idle_w(self) -> float:
        return self.profile.performance[self._configuration].idle_w

    def _max_load_within(self, slo: Slo) -> float:
        """The highest load at which enough requests meet an SLO, tokens/s; 0 if at none."""
        begin = self.model.capacity(slo)
        if begin == 0:
            return 0.0
        return highest_load(
            lambda load: self._meets(load, slo),
            begin=begin,
            least=_LEAST_SHARE * begin,
            most=self.model.max_load,
        )

    def _meets(self, load_tokens_s: float, slo: Slo) -> bool:
        late_share = (1 - _SPARE_LATE_SHARE) * self.max_late_share
        load = self._load(load_tokens_s, slo)
        duration_s = load.duration_for(_JUDGED_REQUESTS)
        return stays_within(self.profile, load, late_share, duration_s=duration_s, seed=_SEED)

    def _measured(self, load_tokens_s: float) -> SteadyReplay:
        load = self._load(load_tokens_s)
        duration_s = load.duration_for(_MEASURED_REQUESTS)
        return replay_steadily(self.profile, load, duration_s=duration_s, seed=_SEED)

    def _load(self, load_tokens_s: float, slo: Slo | None = None) -> SteadyLoad:
        name = self.model.request_class
        return SteadyLoad(
            configuration=self._configuration,
            num_instances=1,
            requests_s={name: load_tokens_s / self.profile.classes[name].tokens},
            slo=slo,
        )


def highest_load(
    is_met: Callable[[float], bool], *, begin: float, least: float, most: float
) -> float:
    """About the highest load at which something holds that holds below some load; 0 if at none.

    The load is bracketed by steps that grow, and the bracket is halved until it is narrow.

    Args:
        is_met: whether it holds at a load.
        begin: where to look first.
        least: below this load it counts as never met.
        most: it is not asked above this load.
    """
    ratio = _FIRST_RATIO
    if is_met(begin):
        met = begin
        while met < most:
            higher = min(most, met * ratio)
            if not is_met(higher):
                return _bisected(is_met, met, higher)
            met = higher
            ratio *= ratio
        return met
    missed = begin
    while missed > least:
        lower = missed / ratio
        if is_met(lower):
            return _bisected(is_met, lower, missed)
        missed = lower
        ratio *= ratio
    return 0.0


def _bisected(is_met: Callable[[float], bool], met: float, missed: float) -> float:
    """The highest load between one at which it is met and one at which it is not."""
    while missed > met * _PRECISION:
        middle = (met + missed) / 2
        if is_met(middle):
            met = middle
        else:
            missed = middle
    return met
