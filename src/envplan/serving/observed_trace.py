"""A trace as a policy may know it, and what its requests demand of instances.

Demand is measured on the requests, not assumed. Work is counted in seconds of an instance at its
highest clock. It arrives in bins of a tenth of a second, and N instances do N seconds of it per
second, the nearest deadline first. A request is late if the work that goes before it takes longer
than its SLO leaves. The least N at which no more than the wanted share of requests is late is what
is needed: how bursty the traffic is, which lengths come together and which quantile is asked for
are all in it. Memory is the other limit: the contexts of the requests that are there at once must
fit. csrc/serving/service.hpp counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from envplan._serving import Service
from envplan.serving.classes import (
    ClassIndices,
    FloatArray,
    IntArray,
)
from envplan.serving.performance import Configuration, InstancePerformance
from envplan.serving.plan_request import require_reachable
from envplan.serving.profile import ServingProfile
from envplan.serving.settings import Settings
from envplan.serving.trace import SLOT_S, Trace


class Demand(NamedTuple):
    """Instances of one size that some requests need, as csrc/serving/service.hpp has them.

    Attributes:
        instances: that they need, not rounded.
        busy_instances: instances that prompts keep busy on average.
        decoding_requests: requests that decode at a time, on average.
        hopeless_share: share of requests whose prompts alone take longer than their SLOs.
    """

    instances: float
    busy_instances: float
    decoding_requests: float
    hopeless_share: float


class _EngineSize(NamedTuple):
    """An instance size as the compiled replay takes it, in its order.

    Attributes:
        kv_tokens: tokens of context that fit into an instance's memory.
        chunk_tokens: prompt tokens of one iteration.
        tables: indices of its configurations' tables, clocks ascending.
        link_bytes_s: that an instance can send to others, or receive.
    """

    kv_tokens: float
    chunk_tokens: int
    tables: list[int]
    link_bytes_s: float


class ObservedTrace:
    """A trace as a policy sees it: arrivals with predicted classes, and the demand they cause.

    Args:
        trace: what arrives.
        profile: of the instances, with the SLOs.
        predicted_class: the class index that each request is taken for on arrival, (n,).
        expected_output: tokens that the output of each request is expected to have, (n,); None: the
            mean of those of its class that have finished.
        usual_output: mean tokens of each class's outputs before any has finished; None: the
            profile's.
        chunk_tokens: prompt tokens of an iteration; None: as many as the profile says.
        link_bytes_s: of a GPU's network, over which contexts go from instance to instance.

    Attributes:
        service: the same and the profile's tables for the compiled replay.
        clocks_mhz: of each TP; TPs and clocks ascend, and `service` numbers both in this order.
    """

    def __init__(
        self,
        trace: Trace,
        profile: ServingProfile,
        predicted_class: ClassIndices,
        *,
        expected_output: IntArray | None = None,
        usual_output: Sequence[float] | None = None,
        chunk_tokens: int | None = None,
        link_bytes_s: float = Settings.link_bytes_s,
    ) -> None:
        self.trace, self.profile, self.predicted_class = trace, profile, predicted_class
        self.expected_output = expected_output
        self.chunk_tokens, self.link_bytes_s = chunk_tokens, link_bytes_s
        self.usual_output = usual_output or _usual_output(profile)
        self.clocks_mhz: dict[int, list[int]] = {}
        for tp, clock_mhz in sorted(profile.performance):
            self.clocks_mhz.setdefault(tp, []).append(clock_mhz)
        self.service = self._build_service()
        self._count_demand = cache(self.service.need)  # policies ask for the same again and again

    def _build_service(self) -> Service:
        performance = self.profile.performance
        configurations = sorted(performance)
        tables_of_tp: dict[int, list[int]] = {tp: [] for tp in self.clocks_mhz}
        for number, configuration in enumerate(configurations):
            tables_of_tp[configuration.tp].append(number)
        sizes = []
        for tp, tables in tables_of_tp.items():
            fastest = self.fastest(tp)
            sizes.append(
                _EngineSize(
                    kv_tokens=fastest.kv_tokens,
                    chunk_tokens=self.chunk_tokens or fastest.chunk_tokens,
                    tables=tables,
                    link_bytes_s=self.link_bytes_s * tp,
                )
            )
        slos = []
        for request_class in self.profile.classes.values():
            slo = request_class.slo
            slos.append((slo.ttft_s, slo.tbt_s))
        lengths = self.trace.lengths(self.profile)
        return Service(
            self.trace.arrival_s,
            lengths.input_tokens,
            lengths.output_tokens,
            self.trace.class_index,
            self.predicted_class,
            tables=[performance[configuration].engine_tables for configuration in configurations],
            sizes=sizes,
            slos=slos,
            usual_output=self.usual_output,
            expected=self.expected_output,
            max_context=self.profile.max_context_tokens or np.inf,
        )

    @property
    def tps(self) -> list[int]:
        """The instance sizes, ascending; the engine's numbers are the indices of this list."""
        return list(self.clocks_mhz)

    def max_clock_mhz(self, tp: int) -> int:
        """The highest clock of instances on so many GPUs."""
        return self.clocks_mhz[tp][-1]

    def fastest(self, tp: int) -> InstancePerformance:
        """Performance of instances on so many GPUs at their highest clock."""
        return self.profile.performance[Configuration(tp, self.max_clock_mhz(tp))]

    def from_time(self, begin_s: float) -> ObservedTrace:
        """The same without the requests that come before a time."""
        first_request = int(np.searchsorted(self.trace.arrival_s, begin_s))
        return self._of_trace(
            self.trace.part(slice(first_request, None)), slice(first_request, None)
        )

    def window(self, begin_s: float, end_s: float) -> ObservedTrace:
        """The requests of a window, from its begin on."""
        begin, end = np.searchsorted(self.trace.arrival_s, (begin_s, end_s)).tolist()
        selection = np.arange(begin, end)
        return self.of_requests(
            selection, self.trace.arrival_s[selection] - begin_s, end_s - begin_s
        )

    def of_requests(
        self, selection: npt.NDArray[np.intp], arrival_s: FloatArray, covered_s: float
    ) -> ObservedTrace:
        """Some of the requests at other times.

        Args:
            selection: their indices.
            arrival_s: when they come, ascending.
            covered_s: how long that takes.
        """
        part = replace(self.trace.part(selection), arrival_s=arrival_s, covered_s=covered_s)
        return self._of_trace(part, selection)

    def on_tp(self, tp: int) -> ObservedTrace:
        """The same for instances on so many GPUs only."""
        performance = {
            configuration: instance
            for configuration, instance in self.profile.performance.items()
            if configuration.tp == tp
        }
        of_size = replace(self.profile, performance=performance)
        return self._of_trace(self.trace, slice(None), of_size)

    def of_trace(self, trace: Trace) -> ObservedTrace:
        """The same of another trace, with as many requests of the same classes."""
        return self._of_trace(trace, slice(None))

    def _of_trace(
        self,
        trace: Trace,
        selection: slice | npt.NDArray[np.intp],
        profile: ServingProfile | None = None,
    ) -> ObservedTrace:
        """A trace of selected requests, seen in the same way."""
        expected_output = None
        if self.expected_output is not None:
            expected_output = self.expected_output[selection]
        return ObservedTrace(
            trace,
            profile or self.profile,
            self.predicted_class[selection],
            expected_output=expected_output,
            usual_output=self.usual_output,
            chunk_tokens=self.chunk_tokens,
            link_bytes_s=self.link_bytes_s,
        )

    @cached_property
    def hopeless_requests(self) -> int:
        """Requests whose prompts alone take longer than their SLOs, on any size at any clock."""
        lengths = self.trace.lengths(self.profile)
        max_context = self.profile.max_context_tokens or np.inf
        is_served = lengths.input_tokens + lengths.output_tokens <= max_context
        fastest_sizes = [self.fastest(tp) for tp in self.tps]
        num_hopeless = 0
        for class_number, request_class in enumerate(self.profile.classes.values()):
            is_of_class = self.trace.class_index == class_number
            inputs = lengths.input_tokens[is_of_class & is_served]
            tokens, num_requests = np.unique(inputs, return_counts=True)
            prompts_s = [size.chunked_prompt_s_at(tokens) for size in fastest_sizes]
            shortest_s = np.min(prompts_s, axis=0)
            is_hopeless = shortest_s > request_class.slo.ttft_s
            num_hopeless += int(num_requests[is_hopeless].sum())
        return num_hopeless

    def request_counts(self, begin_s: float, end_s: float) -> dict[str, int]:
        """Requests that arrive in a window, by predicted class; only classes that have any."""
        counts = self.service.counts(begin_s, end_s)
        return {
            name: count for name, count in zip(self.profile.classes, counts, strict=True) if count
        }

    def num_requests(self, begin_s: float, end_s: float) -> int:
        """Requests that arrive in a window."""
        return sum(self.service.counts(begin_s, end_s))

    def demand(
        self, begin_s: float, end_s: float, classes: Iterable[str], tp: int, max_late_share: float
    ) -> Demand:
        """The demand of the requests of some classes in a window.

        Args:
            begin_s: of the window.
            end_s: of the window.
            classes: those that count.
            tp: GPUs of an instance; at its highest clock.
            max_late_share: share of requests that may be late.
        """
        class_bits = 0  # the engine's set of classes: bit k is for the class of index k
        for name in classes:
            class_bits |= 1 << self.profile.classes.index(name)
        size = self.tps.index(tp)
        counted = self._count_demand(begin_s, end_s, class_bits, size, max_late_share)
        return Demand(*counted)


def past_end_s(settings: Settings) -> float:
    """When the past ends and the replay begins: the past is rounded up to whole slots."""
    return SLOT_S * math.ceil(settings.past_s / SLOT_S)


def observe_trace(profile: ServingProfile, trace: Trace, settings: Settings) -> ObservedTrace:
    """The trace as policies see it; the same for settings with the same past, predictor and seed.

    Classes have the mean lengths of the past or, where no request comes in it, of the whole trace.

    Raises:
        InputError: the trace gives classes that are not the profile's.
        NoAnswerError: a class cannot be served at all.
    """
    trace = trace.in_classes(profile.classes)
    past = trace.before(past_end_s(settings))
    typical = past if len(past) else trace
    fitted = profile.with_lengths(typical.mean_lengths())
    observed = ObservedTrace(
        trace,
        fitted,
        predict_classes(trace, settings),
        expected_output=expect_outputs(trace, profile, settings),
        usual_output=_usual_output(profile),
        chunk_tokens=settings.chunk_tokens,
        link_bytes_s=settings.link_bytes_s,
    )
    require_reachable(
        fitted, [fitted.classes.names[index] for index in np.unique(trace.class_index)]
    )
    return observed


def expect_outputs(trace: Trace, profile: ServingProfile, settings: Settings) -> IntArray | None:
    """Tokens that each output is expected to have; None where they follow from the past."""
    if settings.predicted_lengths == "past":
        return None
    output_tokens = trace.lengths(profile).output_tokens
    random = np.random.default_rng((settings.seed, 2))
    error = settings.length_error_percent / 100 * random.standard_normal(len(trace))
    expected: IntArray = np.maximum(1, np.rint(output_tokens * (1 + error))).astype(np.int32)
    return expected


def predict_classes(trace: Trace, settings: Settings) -> ClassIndices:
    """The class index that each request is taken for: some outputs are predicted one length off."""
    random = np.random.default_rng(settings.seed)
    # One number a request, even in [0, 1), says whether its prediction is wrong, and which way.
    draw = random.random(len(trace), dtype=np.float32)
    wrong_share = settings.mispredicted_percent / 100
    too_short_share = settings.underestimated_percent / 100 * wrong_share
    is_wrong = draw < wrong_share
    is_too_short = draw < too_short_share
    predicted = trace.class_index.copy()
    for step, is_off in ((-1, is_too_short), (1, is_wrong & ~is_too_short)):
        predicted[is_off] = trace.classes.one_length_off(step)[trace.class_index[is_off]]
    return predicted


def _usual_output(profile: ServingProfile) -> list[float]:
    """Mean tokens of the outputs of each class."""
    return [request_class.output_tokens for request_class in profile.classes.values()]
