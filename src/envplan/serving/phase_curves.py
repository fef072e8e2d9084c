"""Load curves of one phase, or of both, as replays of a single instance show them.

An instance that only runs prompts is replayed with outputs of one token. One that only decodes is
replayed behind instances for prompts, so many that no prompt waits; these count for nothing. What
comes is the mix of classes that the fleet is for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from envplan.replay.cores import parallel_map
from envplan.serving.classes import FloatArray
from envplan.serving.instances import Instances
from envplan.serving.performance import Configuration
from envplan.serving.profile import MeanLengths, ServingProfile
from envplan.serving.replayed_curves import highest_load
from envplan.serving.steady_replay import SteadyLoad, replay_steadily, stays_within

_JUDGED_REQUESTS: Final = 3000
_MEASURED_REQUESTS: Final = 1500
#: Points of a curve, as shares of the highest load.
_LOAD_SHARES: Final = (1 / 32, 1 / 8, 1 / 2, 1.0)
#: Where the search for the highest load begins, requests/s, and the bounds that it stays within.
_BEGIN_REQUESTS_S: Final = 1.0
_LEAST_REQUESTS_S: Final = 1e-4
_MOST_REQUESTS_S: Final = 1e5
#: Share of the time of the instances for prompts that these take, so that none waits.
_SOURCE_UTILIZATION: Final = 0.2
_SEED: Final = 1


@dataclass(frozen=True, eq=False)
class PhaseCurve:
    """Loads that one instance carries in a phase, and what it draws at each.

    Attributes:
        configuration: of the instance.
        requests_s: of all classes together, ascending from 0 to the highest, (points,).
        power_w: at each of these, (points,).
    """

    configuration: Configuration
    requests_s: FloatArray
    power_w: FloatArray

    def instances_for(self, requests_s: float) -> Instances:
        """As many instances as carry so many requests per second."""
        return Instances(self.configuration, math.ceil(self.fraction_for(requests_s)))

    def fraction_for(self, requests_s: float) -> float:
        """The same, not rounded up to whole instances."""
        return requests_s / float(self.requests_s[-1])

    def total_power_w(self, count: int, requests_s: float) -> float:
        """Power of so many instances that share so many requests per second."""
        return count * float(np.interp(requests_s / count, self.requests_s, self.power_w))


@dataclass(frozen=True)
class RequestMix:
    """Requests of some classes that come together.

    Attributes:
        requests_s: by class, above 0.
        link_bytes_s: of a GPU's network, over which contexts go from prefill to decode.
    """

    requests_s: Mapping[str, float]
    link_bytes_s: float

    @property
    def total_requests_s(self) -> float:
        """Requests of all classes per second."""
        return sum(self.requests_s.values())

    def at_rate(self, total_requests_s: float) -> Mapping[str, float]:
        """The same mix with so many requests per second in all."""
        times = total_requests_s / self.total_requests_s
        return {name: times * requests_s for name, requests_s in self.requests_s.items()}

    def load(self, first: Instances, decode: Instances | None) -> SteadyLoad:
        """The mix on instances that run prompts and others that decode, or that do both."""
        return SteadyLoad(
            configuration=first.configuration,
            num_instances=first.count,
            requests_s=self.requests_s,
            decode=decode,
            link_bytes_s=self.link_bytes_s,
        )


def both_curves(
    profile: ServingProfile, mix: RequestMix, late_share: float
) -> Sequence[PhaseCurve]:
    """The curves of instances that run both phases, of the configurations that are in time.

    Args:
        profile: with the performance of instances, and the SLOs.
        mix: of the classes that come.
        late_share: share of requests that may miss their SLOs.
    """

    def load_on(configuration: Configuration, requests_s: float) -> SteadyLoad:
        return SteadyLoad(
            configuration=configuration, num_instances=1, requests_s=mix.at_rate(requests_s)
        )

    return _curves(profile, load_on, late_share)


def prefill_curves(
    profile: ServingProfile, mix: RequestMix, late_share: float
) -> Sequence[PhaseCurve]:
    """The curves of instances that only run prompts, of the configurations that are in time.

    Args:
        profile: with the performance of instances, and the SLOs.
        mix: of the classes that come.
        late_share: share of requests whose first token may be late.
    """
    one_token = {
        name: MeanLengths(profile.classes[name].input_tokens, 1.0) for name in mix.requests_s
    }
    return both_curves(profile.with_lengths(one_token), mix, late_share)


def decode_curves(
    profile: ServingProfile, mix: RequestMix, late_share: float
) -> Sequence[PhaseCurve]:
    """The curves of instances that only decode, of the configurations that are in time.

    Args:
        profile: with the performance of instances, and the SLOs.
        mix: of the classes that come.
        late_share: share of requests whose tokens may be late.
    """
    source, prompt_s = _fastest_prompts(profile, mix)

    def load_on(configuration: Configuration, requests_s: float) -> SteadyLoad:
        num_sources = 2 + math.ceil(requests_s * prompt_s / _SOURCE_UTILIZATION)
        return SteadyLoad(
            configuration=source,
            num_instances=num_sources,
            requests_s=mix.at_rate(requests_s),
            decode=Instances(configuration, 1),
            link_bytes_s=mix.link_bytes_s,
        )

    return _curves(profile, load_on, late_share)


def _fastest_prompts(profile: ServingProfile, mix: RequestMix) -> tuple[Configuration, float]:
    """The configuration on which prompts take least, and the mean time of one there, s."""
    shares = mix.at_rate(1.0)
    inputs = np.array([profile.classes[name].input_tokens for name in shares])
    weights = np.array(list(shares.values()))
    mean_s: dict[Configuration, float] = {}
    for configuration, performance in profile.performance.items():
        mean_s[configuration] = float(performance.chunked_prompt_s_at(inputs) @ weights)
    fastest = min(mean_s, key=mean_s.__getitem__)
    return fastest, mean_s[fastest]


def _curves(
    profile: ServingProfile,
    load_on: Callable[[Configuration, float], SteadyLoad],
    late_share: float,
) -> Sequence[PhaseCurve]:
    """The curve of each configuration that carries any load."""

    def curve_of(configuration: Configuration) -> PhaseCurve | None:
        return _curve(profile, configuration, load_on, late_share)

    curves = parallel_map(curve_of, profile.performance)
    return [curve for curve in curves if curve is not None]


def _curve(
    profile: ServingProfile,
    configuration: Configuration,
    load_on: Callable[[Configuration, float], SteadyLoad],
    late_share: float,
) -> PhaseCurve | None:
    """The curve of a configuration; None if it is in time under no load."""

    def is_met(requests_s: float) -> bool:
        load = load_on(configuration, requests_s)
        duration_s = load.duration_for(_JUDGED_REQUESTS)
        return stays_within(profile, load, late_share, duration_s=duration_s, seed=_SEED)

    most = highest_load(
        is_met, begin=_BEGIN_REQUESTS_S, least=_LEAST_REQUESTS_S, most=_MOST_REQUESTS_S
    )
    if not most:
        return None
    requests_s = [0.0]
    power_w = [profile.performance[configuration].idle_w]
    for share in _LOAD_SHARES:
        load = load_on(configuration, share * most)
        duration_s = load.duration_for(_MEASURED_REQUESTS)
        replay = replay_steadily(profile, load, duration_s=duration_s, seed=_SEED)
        requests_s.append(share * most)
        power_w.append(replay.power_w if load.decode is None else replay.decode_power_w)
    return PhaseCurve(configuration, np.array(requests_s), np.array(power_w))
