"""Warm starts: optima of a network wherever a walk is to begin, from guesses that are repaired.

At a point of the frontier the flow value is its slope; at T_star it is the power of all waiting
GPUs. The kernel repairs any guess to the exact optimum; a good guess only makes it quick. So an
optimum is found on a hierarchy of ever coarser networks (multilevel), from the coarsest on:

- a long pipeline from one of few microbatches, whose middle is repeated (`periodic.py`);
- cost curves of many levels from curves of few (Ahuja, Magnanti and Orlin 1993, section 14.5, on
  convex costs by scaling);
- the coarsest at T_star from each stage's blocking power along its own chain of operations, which
  would be optimal if no stage ever waited for another.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from envplan._kernel import Optimum
from envplan.frontier.extended_trace import ExtendedTrace
from envplan.frontier.network import (
    FlowArray,
    Network,
    TimeArray,
    build_network,
    operation_of_node,
)
from envplan.frontier.periodic import PeriodicPipeline, PipelineSplit, short_pipeline
from envplan.pipeline import Pipeline
from envplan.profile import Profile

if TYPE_CHECKING:
    from envplan._kernel import FrontierTrace, ParametricFlow

#: Networks of no more operations are not made coarser by levels.
FEW_OPERATIONS: Final = 256
# Of a coarser network's cost curves this many-th level is left, and of the longest as many as this.
_LEVEL_STRIDE: Final = 4
MIN_LEVELS: Final = 5
# A solver is close enough to a time at this part of it, and on each coarser network at so many
# times as much.
_TIME_TOLERANCE: Final = 5e-4
_COARSER_TOLERANCE: Final = 2
#: Pipelines of so many times as many operations take their frontier from the short one's trace, in
#: intervals of at least this part of its breakpoints.
MUCH_LONGER: Final = 4
MIN_INTERVAL_FRACTION: Final = 0.05
# Half of the work of a walk from T_star lies below this part of the way up from T_min.
_HALF_WORK_FRACTION: Final = 0.15
# What a solver jumps too far, so that one jump is enough to be late.
_OVERSHOOT: Final = 1.1


class FrontierHalf(Enum):
    """A half of the frontier below T_star, of about the same work as the other.

    Halves are always the same, so that nothing depends on the number of cores.
    """

    LATER = "later"
    EARLIER = "earlier"


class _TraceOfHalf(NamedTuple):
    """A trace that begins where a half of the frontier does, with where that half ends, ns."""

    trace: FrontierTrace
    end_ns: int


class _Guess(NamedTuple):
    """A guess of an optimum: flows, and event times where these are of use."""

    flow_10uw: FlowArray
    times_ns: TimeArray | None


class Coarsening(ABC):
    """A coarser network, whose optima are guesses for those of a finer one.

    Attributes:
        coarse: warm starts of the coarser network.
        guesses_times: whether it guesses event times, too.
    """

    def __init__(self, coarse: WarmStarts, *, guesses_times: bool) -> None:
        self.coarse = coarse
        self.guesses_times = guesses_times

    @abstractmethod
    def prolong(self, optimum: Optimum, split: PipelineSplit | None = None) -> _Guess:
        """The guess that an optimum of the coarser network means for the finer one."""


class FewerLevels(Coarsening):
    """The same pipeline with fewer levels on each cost curve: same events, same arcs."""

    def __init__(self, coarse: WarmStarts) -> None:
        super().__init__(coarse, guesses_times=True)

    def prolong(self, optimum: Optimum, split: PipelineSplit | None = None) -> _Guess:
        """The optimum itself."""
        return _Guess(optimum.flow_10uw, optimum.times_ns)


class FewerMicrobatches(Coarsening):
    """The pipeline of fewer microbatches that stands for a long one."""

    def __init__(self, coarse: WarmStarts, long: Pipeline, long_network: Network) -> None:
        # Where kinds of operations do not take turns, no one moment splits the pipeline.
        super().__init__(coarse, guesses_times=not coarse.periodic.in_phases)
        self._long = long
        self._long_network = long_network

    def prolong(self, optimum: Optimum, split: PipelineSplit | None = None) -> _Guess:
        """The optimum with rounds put in at a split; None: where it repeats best."""
        extended = self.coarse.periodic.extended_optimum(
            optimum, self._long, self._long_network, split
        )
        return _Guess(extended.flow_10uw, extended.times_ns if self.guesses_times else None)


class WarmStarts:
    """Exact optima of one network, wherever a walk is to begin.

    Attributes:
        pipeline, network: what is solved.
        waiting_10uw: what all waiting GPUs draw together, the flow value at T_star.
        coarsening: where guesses come from; None for the coarsest network.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        profile: Profile,
        blocking_power_10uw: Sequence[int],
        network: Network,
    ) -> None:
        self.pipeline = pipeline
        self.network = network
        self.waiting_10uw = sum(blocking_power_10uw)
        self._blocking_power_10uw = blocking_power_10uw
        self.coarsening = self._coarsened(profile)

    def _coarsened(self, profile: Profile) -> Coarsening | None:
        """The next coarser network, if one is worth it."""
        powers = self._blocking_power_10uw
        short = short_pipeline(self.pipeline)
        if short is not None:
            network = build_network(short, profile, powers)
            coarse = WarmStarts(short, profile, powers, network)
            return FewerMicrobatches(coarse, self.pipeline, self.network)
        if len(self.pipeline.operations) <= FEW_OPERATIONS:
            return None
        thinned = self.network.with_fewer_levels(_LEVEL_STRIDE, MIN_LEVELS)
        if thinned is None:
            return None
        return FewerLevels(WarmStarts(self.pipeline, profile, powers, thinned))

    def solver_at_flow(self, flow_10uw: int) -> ParametricFlow:
        """A solver that stands where a ns is worth so much."""
        if self.coarsening is None:
            solver = self.network.solver()
            star = self._optimum_at_t_star
            solver.solve_at_flow(star.flow_10uw, star.times_ns, flow_10uw)
            return solver
        coarse = self.coarsening.coarse
        if flow_10uw == self.waiting_10uw:
            optimum = coarse._optimum_at_t_star
        else:
            optimum = coarse.solver_at_flow(flow_10uw).optimum()
        return self._solver_from(optimum, flow_10uw=flow_10uw)

    def solver_at_time(self, time_ns: int) -> ParametricFlow | None:
        """A solver that stands at a time from T_min to T_star, or a little later.

        Returns:
            None where walking there is quicker: nothing is coarser, or what is coarser does not
            say when events are.
        """
        if self.coarsening is None or not self.coarsening.guesses_times:
            return None
        tolerance_ns = int(_TIME_TOLERANCE * time_ns)
        solver = self._jump(time_ns, self.pipeline.num_microbatches, tolerance_ns)
        if not 0 <= solver.time - time_ns <= tolerance_ns:
            optimum = solver.optimum()
            solver.solve_at_time(optimum.flow_10uw, optimum.times_ns, time_ns)
        return solver

    def extended_traces(self, half: FrontierHalf) -> list[ExtendedTrace]:
        """The parts of a half that the trace of a much shorter pipeline proves, latest first."""
        coarsening = self.coarsening
        if not isinstance(coarsening, FewerMicrobatches) or not coarsening.guesses_times:
            return []
        coarse = coarsening.coarse
        periodic = coarse.periodic
        if len(self.pipeline.operations) < MUCH_LONGER * len(coarse.pipeline.operations):
            return []
        trace_of_half = coarse._trace_of_half(half)
        if trace_of_half is None:
            return []
        trace, end_ns = trace_of_half
        intervals = list(periodic.periodic_intervals(trace, end_ns))
        min_breakpoints = MIN_INTERVAL_FRACTION * len(trace.periods())
        num_inserted = periodic.num_inserted_rounds(self.pipeline.num_microbatches)
        extended_traces = []
        for interval in intervals:
            is_long = len(interval.periods_ns) > min_breakpoints
            if is_long and periodic.extends_to(self.pipeline, self.network, interval.split):
                extended_traces.append(
                    ExtendedTrace(trace, interval, num_inserted, self._solver_from)
                )
        return extended_traces

    @cached_property
    def periodic(self) -> PeriodicPipeline:
        """This pipeline as one that stands for longer ones."""
        return PeriodicPipeline(self.pipeline, self.network)

    def _trace_of_half(self, half: FrontierHalf) -> _TraceOfHalf | None:
        """The trace of a half; None where no start is found quickly."""
        trace = self.solver_at_flow(self.waiting_10uw).trace(self.waiting_10uw)
        t_min_ns, t_star_ns = trace.min_time, trace.end_time
        middle_ns = t_min_ns + int((t_star_ns - t_min_ns) * _HALF_WORK_FRACTION)
        if half is FrontierHalf.LATER:
            return _TraceOfHalf(trace, middle_ns)
        solver = self.solver_at_time(middle_ns)
        if solver is None:
            return None
        return _TraceOfHalf(solver.trace(), t_min_ns)

    def _solver_from(
        self,
        optimum: Optimum,
        split: PipelineSplit | None = None,
        *,
        flow_10uw: int | None = None,
        time_ns: int | None = None,
    ) -> ParametricFlow:
        """A solver that jumps from a coarser optimum to a flow value, or to a time."""
        assert self.coarsening is not None
        guess = self.coarsening.prolong(optimum, split)
        solver = self.network.solver()
        if flow_10uw is not None:
            solver.solve_at_flow(guess.flow_10uw, guess.times_ns, flow_10uw)
        else:
            assert guess.times_ns is not None
            assert time_ns is not None
            solver.solve_at_time(guess.flow_10uw, guess.times_ns, time_ns)
        return solver

    def _jump(self, target_ns: int, num_microbatches: int, tolerance_ns: int) -> ParametricFlow:
        """A solver that jumps to where so many microbatches would take about the target."""
        assert self.coarsening is not None
        coarse = self.coarsening.coarse
        optimum = coarse._optimum_near(target_ns, num_microbatches, tolerance_ns)
        time_ns = coarse.periodic.extended_time_ns(optimum, self.pipeline.num_microbatches)
        return self._solver_from(optimum, time_ns=time_ns)

    def _optimum_near(self, target_ns: int, num_microbatches: int, tolerance_ns: int) -> Optimum:
        """The optimum where so many microbatches would take about the target.

        Jumps until that is not too early, then walks down by the secant method, with what lies
        between kept in a bracket.
        """
        if self.coarsening is None:
            solver = self.solver_at_flow(self.waiting_10uw)
        else:
            solver = self._jump(target_ns, num_microbatches, _COARSER_TOLERANCE * tolerance_ns)

        def lateness_ns(optimum: Optimum) -> int:
            return self.periodic.extended_time_ns(optimum, num_microbatches) - target_ns

        optimum = solver.optimum()
        late_ns = lateness_ns(optimum)
        growth = num_microbatches / self.pipeline.num_microbatches  # of lateness with the time
        while late_ns < -tolerance_ns and solver.time < solver.max_time:
            later_ns = solver.time + 1 - int(_OVERSHOOT * late_ns / growth)
            solver.solve_at_time(optimum.flow_10uw, optimum.times_ns, later_ns)
            optimum = solver.optimum()
            late_ns = lateness_ns(optimum)

        low_ns, high_ns = solver.min_time - 1, solver.time  # too early; not too early
        trace = solver.trace()
        while abs(late_ns) > tolerance_ns and high_ns > low_ns + 1:
            middle_ns = min(max(high_ns - int(late_ns / growth), low_ns + 1), high_ns - 1)
            trace.extend(middle_ns)
            middle = trace.optimum_at(middle_ns)
            middle_late_ns = lateness_ns(middle)
            growth = max(1.0, (late_ns - middle_late_ns) / (high_ns - middle_ns))
            if middle_late_ns >= -tolerance_ns:
                high_ns, late_ns, optimum = middle_ns, middle_late_ns, middle
            else:
                low_ns = middle_ns
        return optimum

    @cached_property
    def _optimum_at_t_star(self) -> Optimum:
        if self.coarsening is not None:
            return self.solver_at_flow(self.waiting_10uw).optimum()
        solver = self.network.solver()
        flow_10uw = self._chain_flow()
        solver.solve_at_flow(flow_10uw, None, self.waiting_10uw, is_rough=True)
        return solver.optimum()

    def _chain_flow(self) -> FlowArray:
        """The flow if no stage ever waited for another: its power along its own chain, (arcs,)."""
        operations_of_stage = np.diff(self.pipeline.stage_begin)
        stage = np.repeat(np.arange(self.pipeline.num_stages), operations_of_stage)  # (N,)
        power_10uw = np.array(self._blocking_power_10uw, np.int64)[stage]  # (N,)
        arcs = self.network.precedence_arcs
        predecessor = operation_of_node(self.network.tail[arcs])
        successor = operation_of_node(self.network.head[arcs])
        is_next_of_stage = (stage[predecessor] == stage[successor]) & (successor == predecessor + 1)
        flow_10uw = np.zeros(len(self.network.tail), np.int64)
        flow_10uw[: len(stage)] = power_10uw
        flow_10uw[arcs] = np.where(is_next_of_stage, power_10uw[predecessor], 0)
        return flow_10uw
