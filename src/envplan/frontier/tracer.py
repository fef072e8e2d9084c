"""Tracing of a frontier on demand: whole, or around the times that somebody asks for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, pairwise
from threading import RLock
from time import perf_counter
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from envplan._kernel import Breakpoints, Optimum
from envplan.errors import InputError
from envplan.frontier.extended_trace import ExtendedTrace
from envplan.frontier.warm_starts import FrontierHalf, WarmStarts
from envplan.replay.cores import parallel_map

if TYPE_CHECKING:
    from pathlib import Path

    from envplan._kernel import FrontierTrace, ParametricFlow

_logger = logging.getLogger(__name__)

#: Called now and then with what is left to do and where that ends; the former falls to the latter.
Progress = Callable[[int, int], None]

# Where single times are asked for, so many intervals are traced before the whole frontier is, each
# by this part of the way from T_star to T_min at a time.
_MAX_PARTIAL_INTERVALS: Final = 2
_STEP_FRACTION: Final = 1 / 256
# The frontier of a long pipeline is traced in pieces, one for so many operations. Of optima that
# are alike, which one is found depends on where its piece began. So the pieces are always the same,
# and plans do not depend on the number of cores.
OPERATIONS_PER_PIECE: Final = 4096
_MAX_PIECES: Final = 4
_WORK_DENSITY: Final = 1.75  # work lies denser towards T_min: this power of the way evens it out


@contextmanager
def naming_units(path: Path | None) -> Iterator[None]:
    """Raise what outgrows exact 64-bit arithmetic as an InputError about a profile at a path."""
    try:
        yield
    except (ValueError, OverflowError) as error:
        raise InputError(
            f"{error}; check that times are in seconds, energies in joules and powers in watts",
            path=path,
        ) from error


class Segment(NamedTuple):
    """A straight piece of the frontier.

    Attributes:
        earlier_ns, later_ns: from where to where.
        slope_10uw: what a ns more saves.
    """

    earlier_ns: int
    later_ns: int
    slope_10uw: int


class FrontierCurve(NamedTuple):
    """The breakpoints of a frontier or of an interval of it, whose ends may be no breakpoints.

    Attributes:
        times_ns: ascending, int64 (n,).
        slopes_10uw: -dC/dT on the segment below each, (n,); meaningless for the first.
        energies_10fj: least relaxed energy at each, one GPU a stage, (n,).
    """

    times_ns: NDArray[np.int64]
    slopes_10uw: list[int]
    energies_10fj: list[int]

    def first_breakpoint_from(self, time_ns: int) -> int:
        """Index of the earliest breakpoint that is not before a time within."""
        return int(np.searchsorted(self.times_ns, time_ns))


class TracedInterval:
    """An interval of a frontier, which can be extended downwards.

    It consists of traces, each of which goes on where the one before ends or a little above. A lock
    lets threads read it while another extends it.

    Attributes:
        traces: the latest first.
    """

    def __init__(self, trace: FrontierTrace | ExtendedTrace, starts: WarmStarts) -> None:
        self.traces = [trace]
        self._starts = starts
        self._curve: FrontierCurve | None = None
        self._lock = RLock()

    @property
    def curve(self) -> FrontierCurve:
        """The part of the curve traced so far."""
        with self._lock:
            if self._curve is None:
                self._curve = self._joined_curve()
            return self._curve

    @property
    def earliest_ns(self) -> int:
        """The earliest time traced so far."""
        return int(self.curve.times_ns[0])

    @property
    def latest_ns(self) -> int:
        """The latest time."""
        return int(self.curve.times_ns[-1])

    def extend_to(self, time_ns: int, progress: Progress | None = None) -> None:
        """Trace down to a time, or to T_min."""
        with self._lock:
            if self.earliest_ns <= time_ns:
                return
            trace = self.traces[-1]
            if isinstance(trace, ExtendedTrace):
                trace = trace.solver_near_end().trace()
                self.traces.append(trace)
                self._curve = None
            if self.earliest_ns > max(time_ns, trace.min_time):
                trace.extend(time_ns, progress)
                self._curve = None

    def attach(self, earlier: TracedInterval, progress: Progress | None = None) -> None:
        """Trace down to where another interval begins, and take that in.

        One that begins above the last trace of this is ignored.
        """
        with self._lock:
            if earlier.latest_ns > self.traces[-1].start_time:
                return
            self.extend_to(earlier.latest_ns, progress)
            self.traces += earlier.traces
            self._curve = None

    def energy_10fj(self, time_ns: int) -> int:
        """Least relaxed energy at a time within, one GPU a stage, 10 fJ."""
        curve = self.curve
        k = curve.first_breakpoint_from(time_ns)
        before_ns = int(curve.times_ns[k]) - time_ns
        # The slope is that of effective costs, without the power of waiting GPUs.
        falls_10uw = curve.slopes_10uw[k] - self._starts.waiting_10uw
        return curve.energies_10fj[k] + falls_10uw * before_ns

    def segment_below(self, time_ns: int) -> Segment:
        """The straight piece that ends at a time within, after the earliest."""
        curve = self.curve
        k = curve.first_breakpoint_from(time_ns)
        earlier_ns = int(curve.times_ns[k - 1])
        return Segment(earlier_ns, time_ns, curve.slopes_10uw[k])

    def optimum_at(self, time_ns: int) -> Optimum:
        """The optimum at a time within."""
        with self._lock:
            for trace in reversed(self.traces):
                if trace.start_time >= time_ns:
                    return trace.optimum_at(time_ns)
        raise ValueError("the interval ends before this time")

    def _joined_curve(self) -> FrontierCurve:
        """The breakpoints of all traces, in ascending order."""
        breakpoints = self._joined_breakpoints()
        ascending = _corners(breakpoints.slopes_10uw)[::-1]
        times_ns = breakpoints.times_ns[ascending]
        base_10fj, waiting_10uw = self._starts.network.base_cost_10fj, self._starts.waiting_10uw
        energies_10fj = [
            base_10fj + breakpoints.costs_10fj[k] + waiting_10uw * time_ns
            for k, time_ns in zip(ascending.tolist(), times_ns.tolist(), strict=True)
        ]
        return FrontierCurve(times_ns, breakpoints.slopes_10uw[ascending].tolist(), energies_10fj)

    def _joined_breakpoints(self) -> Breakpoints:
        """The breakpoints of all traces, the latest first."""
        records = [trace.breakpoints() for trace in self.traces]
        # Where two traces overlap, the earlier one counts.
        records[:-1] = [
            _breakpoints_after(record, int(earlier_record.times_ns[0]))
            for record, earlier_record in pairwise(records)
        ]
        return Breakpoints(
            np.concatenate([record.times_ns for record in records]),
            np.concatenate([record.slopes_10uw for record in records]),
            list(chain.from_iterable(record.costs_10fj for record in records)),
        )


def _breakpoints_after(record: Breakpoints, time_ns: int) -> Breakpoints:
    """Those of some breakpoints, the latest first, that are after a time."""
    num_after = int((record.times_ns > time_ns).sum())
    return Breakpoints(
        record.times_ns[:num_after], record.slopes_10uw[:num_after], record.costs_10fj[:num_after]
    )


def _corners(slopes_10uw: NDArray[np.int64]) -> NDArray[np.int64]:
    """Indices of the first point, the last one, and those between where the slope changes.

    Where a walk has paused or begun, a point is recorded and the slope stays as it is.

    Args:
        slopes_10uw: below each point, times descending, (n,).
    """
    is_corner = np.ones(len(slopes_10uw), bool)
    is_corner[1:-1] = slopes_10uw[1:-1] != slopes_10uw[:-2]
    return np.flatnonzero(is_corner)


class _Piece(NamedTuple):
    """An interval to trace.

    Attributes:
        latest_ns: where it begins; None: where the main interval ends, which is extended.
        earliest_ns: where it ends.
    """

    latest_ns: int | None
    earliest_ns: int


class FrontierTracer:
    """A frontier from a flow value down to T_min, traced as far as somebody asks.

    A lock lets threads share one.

    Args:
        starts: where walks of the network begin.
        from_flow_10uw: what a ns saves where the frontier begins; None: it begins at T_max.
        path: of the profile, to name in errors.

    Attributes:
        main: what has been traced from the last breakpoint on.
        min_time_ns, slowest_time_ns: T_min and T_max, ns.
        max_time_ns: the last breakpoint, ns.
    """

    def __init__(self, starts: WarmStarts, from_flow_10uw: int | None, path: Path | None) -> None:
        self._starts = starts
        self._path = path
        self._begins_at_t_star = from_flow_10uw == starts.waiting_10uw
        with naming_units(path):
            if from_flow_10uw is None:
                trace = starts.network.solver().trace()
            else:
                trace = starts.solver_at_flow(from_flow_10uw).trace(from_flow_10uw)
            self.main = TracedInterval(trace, starts)
        self._partial: list[TracedInterval] = []
        self._anew: dict[int, Optimum] = {}
        self._lock = RLock()
        self.min_time_ns: int = trace.min_time
        self.slowest_time_ns: int = trace.max_time
        self.max_time_ns = self.main.latest_ns

    @property
    def times_ns(self) -> NDArray[np.int64]:
        """Every breakpoint, ns, ascending, int64 (n,)."""
        return self.trace_fully().times_ns

    def trace_fully(self, progress: Progress | None = None) -> FrontierCurve:
        """Every breakpoint; what is missing is traced in parallel where the pipeline is long.

        Args:
            progress: called with (time now, T_min), ns.
        """
        with self._lock:
            if self.main.earliest_ns > self.min_time_ns:
                begin_s = perf_counter()
                with naming_units(self._path):
                    self._trace_rest(progress)
                num_breakpoints = len(self.main.curve.times_ns)
                seconds = perf_counter() - begin_s
                _logger.info("traced all %d breakpoints in %.2f s", num_breakpoints, seconds)
            return self.main.curve

    def interval_at(self, time_ns: int, progress: Progress | None = None) -> TracedInterval:
        """An interval that contains a time from T_min to max_time_ns."""
        with self._lock:
            return self._interval_with(time_ns, time_ns, time_ns, progress)

    def optimum_anew(self, time_ns: int) -> Optimum:
        """The optimum at a time from T_min to max_time_ns, whatever was asked before.

        Of flows that are alike, which one is found depends on where a walk began. So this walk
        always begins at the time, or where none does quickly at the last breakpoint.
        """
        with self._lock:
            if time_ns not in self._anew:
                with naming_units(self._path):
                    interval = self._started_at(time_ns) or self.main
                    interval.extend_to(time_ns)
                self._anew[time_ns] = interval.optimum_at(time_ns)
            return self._anew[time_ns]

    def segment_below(self, time_ns: int) -> Segment:
        """The straight piece of the frontier that ends at a time after T_min.

        Beyond what is traced, where no walk begins there quickly, the last piece goes on.
        """
        just_below_ns = time_ns - 1
        with self._lock:
            interval = self._interval_with(just_below_ns, time_ns, just_below_ns - self._step_ns)
            segment = interval.segment_below(min(time_ns, interval.latest_ns))
            return segment._replace(later_ns=time_ns)

    @property
    def _step_ns(self) -> int:
        """How far an interval is traced at a time."""
        return max(1, int((self.max_time_ns - self.min_time_ns) * _STEP_FRACTION))

    def _interval_with(
        self, earlier_ns: int, later_ns: int, goal_ns: int, progress: Progress | None = None
    ) -> TracedInterval:
        """An interval with two times; where it is traced for them, it is traced to the goal."""
        with naming_units(self._path):
            interval = self._nearby_interval(earlier_ns, later_ns)
            if interval is not None:
                if interval.earliest_ns > earlier_ns:
                    interval.extend_to(goal_ns, progress)
                return interval
            if len(self._partial) < _MAX_PARTIAL_INTERVALS:
                interval = self._started_at(later_ns)
                if interval is None:
                    interval = self.main
                else:
                    self._partial.append(interval)
                interval.extend_to(goal_ns, progress)
                return interval
        self.trace_fully(progress)
        return self.main

    def _nearby_interval(self, earlier_ns: int, later_ns: int) -> TracedInterval | None:
        """An interval that contains the later time, and the earlier one or nearly so."""
        for interval in (self.main, *self._partial):
            is_near = interval.earliest_ns - self._step_ns <= earlier_ns
            if is_near and later_ns <= interval.latest_ns:
                return interval
        return None

    def _trace_rest(self, progress: Progress | None) -> None:
        """Complete the main interval."""

        def extended_half(half: FrontierHalf) -> TracedInterval | None:
            return self._extended_half(half, progress)

        def traced_piece(piece: _Piece) -> TracedInterval | None:
            # All pieces are about as much work, so the last one tells how far they are.
            is_last = piece.earliest_ns == self.min_time_ns
            return self._traced_piece(piece, progress if is_last else None)

        if self._begins_at_t_star:
            self._attach(parallel_map(extended_half, FrontierHalf))
        self._attach(parallel_map(traced_piece, self._missing_pieces()))
        self.main.extend_to(self.min_time_ns, progress)

    def _attach(self, intervals: Iterable[TracedInterval | None]) -> None:
        """Take intervals into the main one, the latest first."""
        for interval in intervals:
            if interval is not None and interval is not self.main:
                self.main.attach(interval)

    def _extended_half(
        self, half: FrontierHalf, progress: Progress | None
    ) -> TracedInterval | None:
        """A half of the frontier, proved by a much shorter pipeline, and what lies between."""
        joined = self.main if half is FrontierHalf.LATER else None
        for trace in self._starts.extended_traces(half):
            interval = TracedInterval(trace, self._starts)
            if joined is None:
                joined = interval
            else:
                joined.attach(interval)
        if half is FrontierHalf.EARLIER and joined is not None:
            joined.extend_to(self.min_time_ns, progress)
        return joined

    def _missing_pieces(self) -> list[_Piece]:
        """The rest to trace, in pieces of about the same work, the latest first."""
        pieces: list[_Piece] = []
        latest_ns: int | None = None
        for boundary_ns in self._piece_boundaries_ns():
            if boundary_ns < self.main.earliest_ns:
                pieces.append(_Piece(latest_ns, boundary_ns))
                latest_ns = boundary_ns
        pieces.append(_Piece(latest_ns, self.min_time_ns))
        return pieces

    def _piece_boundaries_ns(self) -> list[int]:
        """Times, descending, that part the whole frontier into pieces of about the same work."""
        if self._starts.coarsening is None:
            return []
        num_operations = len(self._starts.pipeline.operations)
        num_pieces = min(_MAX_PIECES, num_operations // OPERATIONS_PER_PIECE)
        span_ns = self.max_time_ns - self.min_time_ns
        boundaries_ns = []
        for k in range(num_pieces - 1, 0, -1):
            way_up = (k / num_pieces) ** _WORK_DENSITY
            boundaries_ns.append(self.min_time_ns + int(way_up * span_ns))
        return boundaries_ns

    def _traced_piece(self, piece: _Piece, progress: Progress | None) -> TracedInterval | None:
        """The interval of a piece, traced to its end; None where none begins there quickly."""
        interval = self.main if piece.latest_ns is None else self._started_at(piece.latest_ns)
        if interval is not None:
            interval.extend_to(piece.earliest_ns, progress)
        return interval

    def _started_at(self, time_ns: int) -> TracedInterval | None:
        """An interval that begins at a time or a little later; None where none does quickly."""
        solver: ParametricFlow | None = self._starts.solver_at_time(time_ns)
        return None if solver is None else TracedInterval(solver.trace(), self._starts)
