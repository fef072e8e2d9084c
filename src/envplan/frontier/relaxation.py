"""The exact relaxed time-energy frontier of a pipeline: a lower bound on every plan."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from copy import copy
from functools import cached_property
from time import perf_counter
from typing import Any, Final, Literal, Self

import numpy as np
from numpy.typing import NDArray

from envplan._kernel import Optimum
from envplan.errors import InputError, NoAnswerError
from envplan.frontier.cache import TraceCache
from envplan.frontier.network import TimeArray, build_network, network_events
from envplan.frontier.tracer import FrontierTracer, Progress, Segment, naming_units
from envplan.frontier.warm_starts import WarmStarts
from envplan.pipeline import Pipeline
from envplan.profile import DEFAULT_BLOCKING_POWER_W, Profile
from envplan.replay import Problem
from envplan.units import MAX_INTEGER, in_10uw, j_from_10fj, ns_from_s_floor, s_from_ns, w_from_10uw

BlockingPowerSource = Literal["profile", "argument", "default"]

#: The walk from T_max to T_star grows faster with the pipeline than the rest. With more operations
#: than this it begins where a ns saves only this fraction of what it saves at T_star.
MAX_OPERATIONS_FROM_T_MAX: Final = 2048
_SLOPE_FRACTION_PAST_T_STAR: Final = 8  # one part in so many

#: The frontiers that this process traced last, for `Relaxation.trace`.
RECENT_TRACES: Final[TraceCache[Any]] = TraceCache(max_operations=50_000)

_logger = logging.getLogger(__name__)


class _TracerOnDemand:
    """A tracer that is made when it is first asked for; copies of a frontier share it."""

    def __init__(self, make: Callable[[], FrontierTracer]) -> None:
        self._make = make

    @cached_property
    def tracer(self) -> FrontierTracer:
        """The tracer."""
        return self._make()


class Relaxation:
    """The exact relaxed frontier: a lower bound on energy at every iteration time.

    It knows no plan. What has not been traced is traced when somebody asks for it: all of it where
    breakpoints are wanted, for a single time only what is near.

    Energies in J are per iteration over all GPUs, energies in 10 fJ of one GPU a stage. The
    effective cost of an iteration is its energy less that of waiting as long on all stages
    (Perseus, SOSP 2024). The time axis has three parts: from T_min to `max_time_ns` the frontier is
    traced; from there on another trace tells how effective costs fall, in large pipelines for a
    part of the way to T_max; beyond that convexity bounds them.

    Copies of a frontier share what has been traced.

    Args:
        blocking_power, gpus_per_stage, replicas, full: as for `envplan.trace_frontier`, which
            raises as this does.

    Attributes:
        pipeline, profile, gpus_per_stage, replicas: what was traced.
        blocking_power_10uw: 10 uW of a waiting GPU on each stage, (num_stages,).
        blocking_power_source: "argument", "profile" or "default".
        total_power_10uw: the sum of blocking_power_10uw.
        min_time_ns: T_min in whole ns.
        max_time_ns: the last breakpoint: T_star, or T_max where the full frontier was traced.
        slowest_time_ns: T_max, where every operation is at its least effective cost: a straggler
            slower than that leaves no more time worth using. Whole ns.
        network: the activity network that was traced.
        tracer: of the frontier up to max_time_ns.
        trace_seconds: what the trace took, s.
    """

    trace_seconds = 0.0

    def __init__(
        self,
        pipeline: Pipeline,
        profile: Profile,
        *,
        blocking_power: float | None = None,
        gpus_per_stage: int = 1,
        replicas: int = 1,
        full: bool = False,
    ) -> None:
        for name, value in (("gpus_per_stage", gpus_per_stage), ("replicas", replicas)):
            if not 1 <= value <= 10**6:
                raise InputError(f"{name} must be between 1 and 1000000, not {value}")
        if profile.num_stages != pipeline.num_profile_stages:
            raise InputError(
                f"the profile has {profile.num_stages} stages and the pipeline needs "
                f"{pipeline.num_profile_stages} ({pipeline.num_stages} stages x "
                f"{pipeline.num_chunks} chunks)",
                path=profile.path,
            )
        self.pipeline = pipeline
        self.profile = profile
        powers, source = _blocking_powers(pipeline, profile, blocking_power)
        self.blocking_power_10uw = tuple(powers)
        self.blocking_power_source: BlockingPowerSource = source
        self.gpus_per_stage = gpus_per_stage
        self.replicas = replicas
        self.total_power_10uw: int = sum(powers)
        with naming_units(profile.path):
            self.network = build_network(pipeline, profile, powers)
            self._starts = WarmStarts(pipeline, profile, powers, self.network)
        from_flow_10uw = None if full else self.total_power_10uw
        self.tracer = FrontierTracer(self._starts, from_flow_10uw, profile.path)
        self._past_t_star = _TracerOnDemand(self._traced_past_t_star)
        self.min_time_ns = self.tracer.min_time_ns
        self.max_time_ns = self.tracer.max_time_ns
        self.slowest_time_ns = self.tracer.slowest_time_ns

    @classmethod
    def trace(
        cls,
        pipeline: Pipeline,
        profile: Profile,
        *,
        blocking_power: float | None = None,
        gpus_per_stage: int = 1,
        replicas: int = 1,
        full: bool = False,
        whole: bool = True,
        progress: Progress | None = None,
        cache: TraceCache[Any] = RECENT_TRACES,
    ) -> Self:
        """Trace as `envplan.trace_frontier` does, or take what is in the cache."""
        # Whether it is traced whole makes no difference: the rest is traced when it is asked for.
        key = (
            cls,
            profile.sha256,
            profile.path,
            profile.name,
            repr((pipeline.to_job(), profile.metadata, profile.adjustments)),
            blocking_power,
            gpus_per_stage,
            replicas,
            full,
        )
        traced: Self | None = cache.get(key)
        if traced is None:
            begin = perf_counter()
            traced = cls(
                pipeline,
                profile,
                blocking_power=blocking_power,
                gpus_per_stage=gpus_per_stage,
                replicas=replicas,
                full=full,
            )
            if whole or full:
                traced.walk(progress=progress)
            traced.trace_seconds = perf_counter() - begin
            _logger.info(
                "traced %s, %s with %d operations: T_min %.6g s, %s, %.2f s",
                profile.name,
                pipeline.schedule,
                len(pipeline.operations),
                traced.min_time,
                "all of it" if whole or full else "as far as needed so far",
                traced.trace_seconds,
            )
            cache.put(key, traced, len(pipeline.operations))
        return copy(traced)

    def retraced(
        self, pipeline: Pipeline, profile: Profile, *, replicas: int | None = None
    ) -> Self:
        """The frontier of another pipeline or profile, with GPUs and blocking power as here.

        It ends at T_star, also where this one ends at T_max.
        """
        is_argument = self.blocking_power_source == "argument"
        return self.trace(
            pipeline,
            profile,
            blocking_power=self.blocking_power_w[0] if is_argument else None,
            gpus_per_stage=self.gpus_per_stage,
            replicas=self.replicas if replicas is None else replicas,
        )

    @cached_property
    def problem(self) -> Problem:
        """The pipeline with its option tables, as the replay takes it."""
        return Problem(self.pipeline, self.profile, self.blocking_power_10uw)

    @property
    def num_gpus(self) -> int:
        """GPUs that each operation stands for."""
        return self.gpus_per_stage * self.replicas

    @property
    def blocking_power_w(self) -> tuple[float, ...]:
        """W of a waiting GPU on each stage, (num_stages,)."""
        return tuple(w_from_10uw(p) for p in self.blocking_power_10uw)

    def walk(self, time_ns: int | None = None, progress: Progress | None = None) -> Self:
        """Trace around a time, or the whole frontier; what has been traced is not traced again.

        Args:
            time_ns: from T_min on, ns; None: the whole.
            progress: as for trace_frontier.

        Returns:
            This frontier.

        Raises:
            InputError: numbers outgrow exact 64-bit arithmetic.
        """
        if time_ns is None:
            self.tracer.trace_fully(progress)
        else:
            self.tracer.interval_at(min(time_ns, self.max_time_ns), progress)
        return self

    @property
    def times_ns(self) -> NDArray[np.int64]:
        """Breakpoints, whole ns, ascending, int64 (n,)."""
        return self.tracer.trace_fully().times_ns

    @property
    def slopes_10uw(self) -> list[int]:
        """The negative slope of the relaxed effective cost below each breakpoint, 10 uW, (n,).

        It is what the cheapest ns costs that is saved next. Meaningless for the first.
        """
        return self.tracer.trace_fully().slopes_10uw

    @cached_property
    def min_energy_time_ns(self) -> int:
        """T_star in whole ns."""
        traced = self.tracer.main.curve
        if traced.slopes_10uw[-1] > self.total_power_10uw or len(traced.times_ns) == 1:
            return self.max_time_ns
        whole = self.tracer.trace_fully()
        energies_10fj = np.array(whole.energies_10fj, dtype=object)  # beyond 64 bits
        return int(whole.times_ns[np.argmin(energies_10fj)])

    @property
    def min_time(self) -> float:
        """T_min, s: no choice of options finishes earlier."""
        return s_from_ns(self.min_time_ns)

    @property
    def min_energy_time(self) -> float:
        """T_star, s: where the relaxed energy is least; slower costs time and energy."""
        return s_from_ns(self.min_energy_time_ns)

    @property
    def slowest_time(self) -> float:
        """T_max, s: beyond it, a straggler leaves no more time that would be worth using."""
        return s_from_ns(self.slowest_time_ns)

    @cached_property
    def times(self) -> NDArray[np.float64]:
        """Breakpoints, s, ascending from T_min to T_star, (n,)."""
        return np.array([s_from_ns(t) for t in self.times_ns.tolist()])

    @cached_property
    def energies(self) -> NDArray[np.float64]:
        """Least relaxed energy at each breakpoint, J, (n,)."""
        energies_10fj = self.tracer.trace_fully().energies_10fj
        return np.array([j_from_10fj(energy_10fj * self.num_gpus) for energy_10fj in energies_10fj])

    def energy_at(self, time: float) -> float:
        """Least relaxed energy of an iteration that ends by `time` s, in J: no plan can use less.

        Constant beyond T_star, where ending early and waiting for nobody is best.

        Raises:
            NoAnswerError: time is below T_min.
        """
        time_ns = self.checked_ns(ns_from_s_floor(_finite(time, "time")))
        return j_from_10fj(self.lower_bound_10fj(time_ns) * self.num_gpus)

    def lower_bound_10fj(self, time_ns: int) -> int:
        """Least relaxed energy of an iteration that ends by a time, one GPU a stage, in 10 fJ.

        Args:
            time_ns: not below T_min, ns.
        """
        time_ns = min(time_ns, self.min_energy_time_ns)
        return self.tracer.interval_at(time_ns).energy_10fj(time_ns)

    def waiting_bound_10fj(self, time_ns: int) -> int:
        """Least relaxed energy if everybody waits until a time, one GPU a stage, in 10 fJ.

        Args:
            time_ns: not below T_min; beyond T_star, the first call traces further.
        """
        return self.effective_bound_10fj(time_ns) + self.total_power_10uw * time_ns

    def effective_bound_10fj(self, time_ns: int) -> int:
        """Least relaxed effective cost of an iteration that ends by a time, one GPU a stage, 10 fJ.

        Args:
            time_ns: not below T_min, ns. The bound falls up to T_max.
        """
        tracer = self._tracer_for(time_ns)
        traced_ns = min(time_ns, tracer.max_time_ns)
        energy_10fj = tracer.interval_at(traced_ns).energy_10fj(traced_ns)
        effective_10fj = energy_10fj - self.total_power_10uw * traced_ns
        # Effective costs are convex in time: beyond the trace they fall no faster than at its end.
        last_slope_10uw = self.total_power_10uw // _SLOPE_FRACTION_PAST_T_STAR
        effective_10fj -= last_slope_10uw * (time_ns - traced_ns)
        return max(self.network.base_cost_10fj, effective_10fj)  # what they are at T_max

    def slope_10uw(self, time_ns: int) -> int:
        """The power that a ns more saves around a time, 10 uW; all waiting GPUs' from T_star on."""
        if self.min_time_ns == self.max_time_ns:
            return self.total_power_10uw
        time_ns = min(max(self.min_time_ns + 1, time_ns), self.max_time_ns)
        return max(self.tracer.segment_below(time_ns).slope_10uw, self.total_power_10uw)

    def intervals_below(self, time_ns: int) -> Iterator[Segment]:
        """The straight pieces of the frontier below a time, the latest first, down to T_min.

        A piece may come in several, and one begins at T_star.
        """
        star_ns = self.min_energy_time_ns
        while time_ns > self.min_time_ns:
            is_past_star = time_ns > star_ns
            tracer = self.beyond if is_past_star else self.tracer
            segment = tracer.segment_below(time_ns)
            if is_past_star:
                segment = segment._replace(earlier_ns=max(segment.earlier_ns, star_ns))
            yield segment
            time_ns = segment.earlier_ns

    def earliest_ns(self, holds: Callable[[int, int], bool], latest_ns: int) -> int:
        """The earliest time at which something holds; the latest where it does not before.

        Args:
            holds: of a time, ns, and the relaxed energy of one GPU a stage then, 10 fJ; once it
                holds, it holds for later times up to latest_ns.
        """
        too_early_ns, holding_ns = self.min_time_ns - 1, latest_ns
        while holding_ns - too_early_ns > 1:
            middle_ns = (too_early_ns + holding_ns) // 2
            if middle_ns > self.min_energy_time_ns:
                bound_10fj = self.waiting_bound_10fj(middle_ns)
            else:
                bound_10fj = self.lower_bound_10fj(middle_ns)
            if holds(middle_ns, bound_10fj):
                holding_ns = middle_ns
            else:
                too_early_ns = middle_ns
        return holding_ns

    @property
    def beyond(self) -> FrontierTracer:
        """The frontier beyond T_star: up to T_max, or in large pipelines a part of the way."""
        return self._past_t_star.tracer

    def _traced_past_t_star(self) -> FrontierTracer:
        if self.max_time_ns == self.slowest_time_ns:
            return self.tracer
        from_flow_10uw = None
        if len(self.pipeline.operations) > MAX_OPERATIONS_FROM_T_MAX:
            from_flow_10uw = self.total_power_10uw // _SLOPE_FRACTION_PAST_T_STAR
        return FrontierTracer(self._starts, from_flow_10uw, self.profile.path)

    def state_at(self, time_ns: int) -> Optimum:
        """The relaxed optimum at a time.

        Args:
            time_ns: from T_min to T_max, ns.
        """
        tracer = self._tracer_for(time_ns)
        traced_ns, slowest_ns = tracer.max_time_ns, self.slowest_time_ns
        if time_ns <= traced_ns:
            return tracer.interval_at(time_ns).optimum_at(time_ns)
        optimum = tracer.interval_at(traced_ns).optimum_at(traced_ns)
        # Not traced so far. A mean of two optima is in time, and by convexity near the optimum.
        # Rounded down, precedences of whole ns still hold. Products outgrow 64 bits.
        traced_events, slowest_events = optimum.times_ns.astype(object), self._slowest_events
        mean = (
            traced_events * (slowest_ns - time_ns)
            + slowest_events.astype(object) * (time_ns - traced_ns)
        ) // (slowest_ns - traced_ns)
        return Optimum(mean.astype(np.int64), optimum.flow_10uw)

    def optimum_anew(self, time_ns: int) -> Optimum:
        """The relaxed optimum at a time, with the same flow whatever was asked before.

        Args:
            time_ns: from T_min to max_time_ns, ns.
        """
        return self.tracer.optimum_anew(time_ns)

    def _tracer_for(self, time_ns: int) -> FrontierTracer:
        """The tracer that knows a time, or comes nearest to it."""
        return self.tracer if time_ns <= self.max_time_ns else self.beyond

    @cached_property
    def _slowest_events(self) -> TimeArray:
        """Event times at T_max, ns, each as early as can be, (nodes,)."""
        slowest_of_curve = np.array(
            [curve.hull_time_ns[0] for curve in self.network.cost_curves], np.int64
        )
        operation_curve = self.network.curve[: self.network.num_operations]
        time_ns = slowest_of_curve[operation_curve]
        starts_ns, _ = self.pipeline.earliest_starts(time_ns)
        return network_events(starts_ns, starts_ns + time_ns)

    def checked_ns(self, time_ns: int) -> int:
        """A time, if a plan could be that fast.

        Raises:
            NoAnswerError: it is below T_min; says T_min.
        """
        if time_ns < self.min_time_ns:
            raise NoAnswerError(
                f"no plan finishes in {s_from_ns(time_ns):.9f} s; T_min is {self.min_time:.9f} s "
                "(leave the target out for no slowdown)"
            )
        return time_ns


def _blocking_powers(
    pipeline: Pipeline, profile: Profile, argument: float | None
) -> tuple[list[int], BlockingPowerSource]:
    """Power of a waiting GPU on each pipeline stage, 10 uW, and where it comes from."""
    if argument is not None:
        if not 0 <= _finite(argument, "blocking power") <= 1e5:
            raise InputError(f"blocking power must be between 0 and 100000 W, not {argument}")
        return [in_10uw(argument)] * pipeline.num_stages, "argument"
    if profile.blocking_power_w is None:
        return [in_10uw(DEFAULT_BLOCKING_POWER_W)] * pipeline.num_stages, "default"
    # Of a stage that runs several profile stages, its first operation's counts.
    profile_stage = {op.stage: op.profile_stage for op in reversed(pipeline.operations)}
    powers_10uw = [
        in_10uw(profile.blocking_power_w[profile_stage[stage]])
        for stage in range(pipeline.num_stages)
    ]
    return powers_10uw, "profile"


def _finite(value: float, name: str) -> float:
    if not np.isfinite(value) or abs(value) > MAX_INTEGER:
        raise InputError(f"{name} must be a finite number, not {value}")
    return value
