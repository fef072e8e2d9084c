"""How many instances a stretch of requests needs: measured on the requests, not assumed.

Work is counted in seconds of an instance at its highest clock. It arrives in bins of a tenth of a
second, and N instances do N seconds of it per second, the nearest deadline first. A request is late
if the work that goes before it takes longer than its SLO leaves. The least N at which no more than
the wanted share of requests is late is what the stretch needs: how bursty the traffic is, which
lengths come together and which quantile is asked for are all in it. Memory is the other limit: the
contexts of the requests that are there at once must fit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from envplan._serving import instances_needed
from envplan.serving.classes import CLASSES, RequestClass
from envplan.serving.phases import Phases
from envplan.serving.profile import ServingProfile
from envplan.serving.trace import IntArray, Trace

__all__ = ["Need", "Stream", "needed"]

FloatArray = npt.NDArray[np.float64]

_HALF_BIN_S: Final = 0.05  # of the bins of instances_needed
_LEAST_SLACK_S: Final = 0.02
_MEMORY_S: Final = 5.0  # over which contexts are averaged
_MEMORY_SHARE: Final = 0.6  # of the memory that can be filled, for contexts come in large pieces
_TBT_SHARE: Final = 0.8  # of the SLO that an iteration with prompts may take, as in the replay
_LONG: Final = 0.99  # quantile of the prompts whose own time a deadline must leave
_LEAST_PIECE: Final = 128


@dataclass(frozen=True)
class Need:
    """What a stretch of requests asks of one instance size.

    Attributes:
        instances: that it needs, not rounded.
        busy: instances that prompts keep busy on average.
        decoding: requests that decode at a time, on average.
    """

    instances: float
    busy: float
    decoding: float

    def times(self, factor: float) -> Need:
        """So many times as much."""
        return Need(factor * self.instances, factor * self.busy, factor * self.decoding)


@dataclass(frozen=True, eq=False)
class Stream:
    """Requests of a trace as a policy may know them: when, how long, which class they look like."""

    trace: Trace
    profile: ServingProfile
    input_tokens: IntArray
    output_tokens: IntArray
    taken: npt.NDArray[np.uint8]

    @classmethod
    def of(cls, trace: Trace, profile: ServingProfile, taken: npt.NDArray[np.uint8]) -> Stream:
        """The stream of a trace; `taken` are the classes that requests look like on arrival."""
        return cls(trace, profile, *trace.lengths(profile), taken)

    def between(self, begin_s: float, end_s: float) -> slice:
        """The requests that arrive in a stretch."""
        first, last = np.searchsorted(self.trace.arrival, (begin_s, end_s))
        return slice(int(first), int(last))

    def need(
        self, begin_s: float, end_s: float, classes: Iterable[str], pool: str, tp: int, late: float
    ) -> Need:
        """What the requests of some classes in a stretch need.

        Args:
            begin_s, end_s: of the stretch.
            classes: those that count.
            pool: class whose configurations serve them.
            tp: GPUs of an instance; at its highest clock.
            late: share of requests that may be late.
        """
        found = self.between(begin_s, end_s)
        wanted = np.zeros(len(CLASSES), dtype=bool)
        wanted[[CLASSES.index(name) for name in classes]] = True
        kept = np.flatnonzero(wanted[self.taken[found]]) + found.start
        clock = self.profile.frequencies(pool, tp)[-1]
        requests = [self.profile.classes[name] for name in CLASSES]
        return needed(
            self.trace.arrival[kept] - begin_s, self.input_tokens[kept], self.output_tokens[kept],
            self.trace.known[kept], end_s - begin_s, requests,
            self.profile.phases_of(pool, tp, clock), late,
        )  # fmt: skip


def _piece(phases: Phases, tbt_s: float) -> int:
    """Prompt tokens of an iteration that keeps decoding requests' tokens apart by no more."""
    tokens = phases.chunk_tokens
    while tokens > _LEAST_PIECE and phases.prompt_time(tokens) > _TBT_SHARE * tbt_s:
        tokens -= _LEAST_PIECE
    return tokens


def needed(
    arrival: FloatArray, input_tokens: IntArray, output_tokens: IntArray,
    known: npt.NDArray[np.uint8], duration_s: float, classes: Sequence[RequestClass],
    phases: Phases, late: float,
) -> Need:  # fmt: skip
    """What requests need of instances with these phases.

    Args:
        arrival: s from the stretch's beginning, ascending.
        input_tokens, output_tokens, known: of each request; `known` is its place in `classes`.
        duration_s: of the stretch.
        classes: with their SLOs.
        phases: of the configuration at its highest clock.
        late: share of requests that may be late.
    """
    if not len(arrival):
        return Need(0.0, 0.0, 0.0)
    tbt = min(classes[k].slo.tbt_s for k in np.unique(known))
    piece = _piece(phases, tbt)
    token_s = float(phases.prompt_time(piece)) / piece
    more_s = (phases.step_s[-1] - phases.step_s[0]) / (phases.batch[-1] - phases.batch[0] or 1.0)
    work = input_tokens * token_s + output_tokens * more_s
    limits = np.array([request.slo.ttft_s for request in classes])
    slos = np.unique(limits[np.unique(known)])
    level = np.searchsorted(slos, limits)[known].astype(np.uint8)
    slack = []
    for k, slo in enumerate(slos):
        longest = float(np.quantile(input_tokens[level == k], _LONG))
        own = max(float(phases.prompt_time(longest)), longest * token_s)
        slack.append(max(_LEAST_SLACK_S, slo - own - float(phases.prompt_time(1)) - _HALF_BIN_S))
    instances = instances_needed(arrival, work, level, slack, duration_s, late)
    stays = work + output_tokens * float(phases.step_time(16))
    memory = _memory(arrival, (input_tokens + output_tokens) * stays, duration_s, late)
    instances = max(instances, memory / (_MEMORY_SHARE * phases.kv_tokens))
    return Need(instances, float(work.sum()) / duration_s, float(stays.sum()) / duration_s)


def _memory(arrival: FloatArray, token_s: Any, duration_s: float, late: float) -> float:
    """Tokens of context that are there at once, but for a share of the time."""
    place = (arrival / _MEMORY_S).astype(np.int64)
    count = max(1, math.ceil(duration_s / _MEMORY_S))
    held = np.bincount(place, weights=token_s, minlength=count) / _MEMORY_S
    return float(np.quantile(held, 1 - late))
