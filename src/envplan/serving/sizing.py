"""How many instances a stretch of requests needs: measured on the requests, not assumed.

Work is counted in seconds of an instance at its highest clock. It arrives in bins of a tenth of a
second, and N instances do N seconds of it per second, the nearest deadline first. A request is late
if the work that goes before it takes longer than its SLO leaves. The least N at which no more than
the wanted share of requests is late is what the stretch needs: how bursty the traffic is, which
lengths come together and which quantile is asked for are all in it. Memory is the other limit: the
contexts of the requests that are there at once must fit. csrc/serving.hpp counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from envplan._serving import Service
from envplan.serving.classes import CLASSES
from envplan.serving.profile import ServingProfile
from envplan.serving.trace import Trace


class Need(NamedTuple):
    """What a stretch of requests asks of one instance size.

    Attributes:
        instances: that it needs, not rounded.
        busy: instances that prompts keep busy on average.
        decoding: requests that decode at a time, on average.
        hopeless: share of requests whose prompts alone take longer than their SLOs.
    """

    instances: float
    busy: float
    decoding: float
    hopeless: float


class Stream:
    """Requests of a trace as a policy may know them: when, how long, which class they look like.

    Args:
        trace: what arrives.
        profile: of the instances, with the SLOs.
        taken: uint8, the class that each request looks like on arrival.

    Attributes:
        service: the same and the profile's tables, compiled; sizes are numbered as in `clocks`.
        clocks: of each TP, MHz; both ascend.
    """

    def __init__(self, trace: Trace, profile: ServingProfile, taken: npt.NDArray[np.uint8]) -> None:
        self.trace, self.profile, self.taken = trace, profile, taken
        self.clocks: dict[int, list[int]] = {}
        places: dict[int, list[int]] = {}
        keys = sorted(profile.phases)
        for place, (tp, clock) in enumerate(keys):
            self.clocks.setdefault(tp, []).append(clock)
            places.setdefault(tp, []).append(place)
        fastest = [(tp, profile.phases[tp, clocks[-1]]) for tp, clocks in self.clocks.items()]
        self.service = Service(
            trace.arrival, *trace.lengths(profile), trace.known, taken,
            [profile.phases[key].tables() for key in keys],
            [(tp, best.kv_tokens, best.chunk_tokens, places[tp]) for tp, best in fastest],
            [(c.slo.ttft_s, c.slo.tbt_s) for c in (profile.classes[name] for name in CLASSES)],
        )  # fmt: skip
        self._need = cache(self.service.need)

    def since(self, begin_s: float) -> Stream:
        """The same without the requests that come before a time, s."""
        kept = slice(int(np.searchsorted(self.trace.arrival, begin_s)), None)
        return Stream(self.trace.part(kept), self.profile, self.taken[kept])

    @cached_property
    def hopeless(self) -> int:
        """Requests whose prompts alone take longer than their SLOs, on any size at any clock."""
        trace, found = self.trace, 0
        given, _ = trace.lengths(self.profile)
        fastest = [self.profile.phases[tp, clocks[-1]] for tp, clocks in self.clocks.items()]
        for place, name in enumerate(CLASSES):
            tokens, count = np.unique(given[trace.known == place], return_counts=True)
            best = np.min([phases.whole_prompt_time(tokens) for phases in fastest], axis=0)
            found += count[best > self.profile.classes[name].slo.ttft_s].sum()
        return int(found)

    def counts(self, begin_s: float, end_s: float) -> dict[str, int]:
        """Requests that arrive in a stretch, by the class they look like; none that has none."""
        found = zip(CLASSES, self.service.counts(begin_s, end_s), strict=True)
        return {name: count for name, count in found if count}

    def need(
        self, begin_s: float, end_s: float, classes: Iterable[str], tp: int, late: float
    ) -> Need:
        """What the requests of some classes in a stretch need; counted once.

        Args:
            begin_s, end_s: of the stretch.
            classes: those that count.
            tp: GPUs of an instance; at its highest clock.
            late: share of requests that may be late.
        """
        mask = sum(1 << CLASSES.index(name) for name in set(classes))
        return Need(*self._need(begin_s, end_s, mask, list(self.clocks).index(tp), late))
