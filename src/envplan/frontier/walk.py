"""The walk along a frontier: whole, or as far as somebody has asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from envplan.errors import InputError
from envplan.frontier.repeat import Lifted
from envplan.frontier.start import HALVES, Start
from envplan.replay.cores import side_by_side

if TYPE_CHECKING:
    from pathlib import Path

    from envplan._kernel import Trace

#: Called now and then with what is left to do and where that ends; the former falls to the latter.
Progress = Callable[[int, int], None]

# Where single times are asked for, at most so many stretches are walked instead of the whole
# frontier, each as far at a time as this part of the way from T_star to T_min.
_FEW_STRETCHES: Final = 2
_AT_A_TIME: Final = 1 / 256
# The whole frontier of a long pipeline is walked in pieces, one for so many operations. Of optima
# that are alike, which one is found depends on where its piece began. So the pieces are always the
# same, and plans do not depend on the number of cores.
_OF_A_PIECE: Final = 4096
_DENSITY: Final = 1.75  # work lies denser towards T_min
_MOST_PIECES: Final = 4


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


class _Record(NamedTuple):
    """Breakpoints, ascending: ns; -dC/dT on the interval below each, uW; energy, fJ; all (n,)."""

    times_ns: NDArray[np.int64]
    slopes_uw: list[int]
    energies_fj: list[int]


class _Stretch:
    """The frontier from where a trace starts on downwards, in one piece or in several."""

    def __init__(self, trace: Trace | Lifted, start: Start) -> None:
        self._traces = [trace]  # the latest first; each stands for what is before its start, too
        self._start = start

    @cached_property
    def record(self) -> _Record:
        """What has been walked so far; its ends may be no breakpoints."""
        pieces = [trace.breakpoints() for trace in self._traces]
        for k, later in enumerate(pieces[:-1]):
            own = later[0] > pieces[k + 1][0][0]
            pieces[k] = (later[0][own], later[1][own], later[2][: own.sum()])
        times, slopes = (np.concatenate([piece[k] for piece in pieces]) for k in (0, 1))
        costs = [cost for piece in pieces for cost in piece[2]]
        # Where a walk has paused or begun the slope stays as it is.
        bends = np.append(slopes[1:-1] != slopes[:-2], True)
        kept = np.flatnonzero(np.concatenate([[True], bends])[: len(times)])[::-1]
        base_fj, waiting_uw = self._start.network.base_cost_fj, self._start.waiting_uw
        energies = [base_fj + costs[k] + waiting_uw * int(times[k]) for k in kept.tolist()]
        return _Record(times[kept], slopes[kept].tolist(), energies)

    @property
    def first_ns(self) -> int:
        """The earliest time walked so far."""
        return int(self.record.times_ns[0])

    @property
    def last_ns(self) -> int:
        """The latest time."""
        return int(self.record.times_ns[-1])

    def reach(self, time_ns: int, progress: Progress | None = None) -> None:
        """Walk down to a time, or to T_min."""
        trace = self._traces[-1]
        if isinstance(trace, Lifted):
            if self.first_ns <= time_ns:
                return
            trace = trace.next()
            trace.run(until=trace.max_time)
            self._traces.append(trace)
        if self.first_ns > max(time_ns, trace.min_time):
            trace.go_on(time_ns, progress)
            del self.record

    def go_on_with(self, earlier: _Stretch, progress: Progress | None = None) -> None:
        """Take another stretch for what is before its start, and walk down to there. One that
        starts later than the last that was taken is left out."""
        if earlier.last_ns > self._traces[-1].time:
            return
        self.reach(earlier.last_ns, progress)
        self._traces += earlier._traces
        self.__dict__.pop("record", None)

    def energy_fj(self, time_ns: int) -> int:
        """Least relaxed energy at a time within, fJ."""
        times_ns, slopes_uw, energies_fj = self.record
        k = int(np.searchsorted(times_ns, time_ns))  # first breakpoint not before time_ns
        before = int(times_ns[k]) - time_ns
        return energies_fj[k] + (slopes_uw[k] - self._start.waiting_uw) * before

    def state_at(self, time_ns: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Event times (nodes,), ns, and flows (arcs,), uW, of the optimum at a time within."""
        return next(t for t in reversed(self._traces) if t.time >= time_ns).state_at(time_ns)


class Walk:
    """The frontier from a flow value down to T_min. What has not been walked is walked when
    somebody asks for it: for a single time only what is near.

    Args:
        start: where walks of the network start.
        from_flow: what a ns saves where the frontier begins, uW; -1: at T_max.
        path: of the profile, to name in errors.

    Attributes:
        main: what has been walked from the last breakpoint on.
        min_time_ns, slowest_time_ns: T_min and T_max, ns.
        max_time_ns: the last breakpoint, ns.
    """

    def __init__(self, start: Start, from_flow: int, path: Path | None) -> None:
        self._start = start
        self._path = path
        self._from_flow = from_flow
        with naming_units(path):
            trace = start.network.trace() if from_flow < 0 else start.at_flow(from_flow)
            trace.run(from_flow, until=trace.max_time)
            self.main = _Stretch(trace, start)
        self._others: list[_Stretch] = []
        self.min_time_ns: int = trace.min_time
        self.slowest_time_ns: int = trace.max_time
        self.max_time_ns = self.main.last_ns

    @property
    def times_ns(self) -> NDArray[np.int64]:
        """Every breakpoint, ns, ascending, int64 (n,)."""
        return self.whole().times_ns

    def whole(self, progress: Progress | None = None) -> _Record:
        """Every breakpoint; what is missing is walked, side by side in pieces where it is long.

        Args:
            progress: called with (time now, T_min), ns.
        """
        main, least = self.main, self.min_time_ns
        if main.first_ns <= least:
            return main.record

        def proved(half: int) -> _Stretch | None:
            """What a shorter pipeline proves of the half, and what is between."""
            own = [_Stretch(part, self._start) for part in self._start.proved(half)]
            stretches = own if half > 0 else [main, *own]
            for earlier in stretches[1:]:
                stretches[0].go_on_with(earlier)
            if stretches and half == HALVES - 1:
                stretches[0].reach(least, progress)
            return stretches[0] if stretches else None

        def walked(k: int) -> _Stretch | None:
            stretch = self._started(ends[k - 1]) if k > 0 else main
            if stretch is not None:
                # All are about as much work, so the last one tells how far they are.
                stretch.reach(ends[k], progress if ends[k] == least else None)
            return stretch

        def join(pieces: list[_Stretch | None]) -> None:
            for earlier in pieces:
                if earlier is not None and earlier is not main:
                    main.go_on_with(earlier)

        with naming_units(self._path):
            if self._from_flow == self._start.waiting_uw:
                join(side_by_side(proved, range(HALVES)))
            ends = [*(t for t in self._times_between() if t < main.first_ns), least]
            join(side_by_side(walked, range(len(ends))))
            main.reach(least, progress)
        return main.record

    def near(
        self, time_ns: int, progress: Progress | None = None, *, further: bool = False
    ) -> _Stretch:
        """A stretch that has a time from T_min to max_time_ns, and maybe what lies next below."""
        step = max(1, int((self.max_time_ns - self.min_time_ns) * _AT_A_TIME))
        until = time_ns - further * step
        with naming_units(self._path):
            for known in (self.main, *self._others):
                if known.first_ns - step <= time_ns < known.last_ns or time_ns == known.last_ns:
                    if known.first_ns > time_ns:
                        known.reach(until, progress)
                    return known
            if len(self._others) < _FEW_STRETCHES:
                stretch = self._started(time_ns)
                self._others += [] if stretch is None else [stretch]
                stretch = stretch or self.main
                stretch.reach(until, progress)
                return stretch
        self.whole(progress)
        return self.main

    def below(self, time_ns: int) -> tuple[int, int]:
        """The breakpoint, or another point of a straight piece, next below a time after T_min, ns,
        and the slope in between, uW."""
        stretch = self.near(time_ns - 1, further=True)
        # The next stretch may end right here.
        times_ns, slopes_uw, _ = stretch.record
        k = int(np.searchsorted(times_ns, min(time_ns, stretch.last_ns)))
        return int(times_ns[k - 1]), slopes_uw[k]

    def _times_between(self) -> list[int]:
        """The times, ns, descending, that part the walk into pieces of about the same work."""
        if self._start.coarser is None:
            return []
        pieces = min(_MOST_PIECES, len(self._start.pipeline.operations) // _OF_A_PIECE)
        span = self.max_time_ns - self.min_time_ns
        parts = ((k / pieces) ** _DENSITY for k in range(pieces - 1, 0, -1))
        return [self.min_time_ns + int(part * span) for part in parts]

    def _started(self, time_ns: int) -> _Stretch | None:
        """A stretch from a little after a time on; None where none is found quickly."""
        trace = self._start.at_time(time_ns)
        if trace is None:
            return None
        trace.run(until=trace.max_time)
        return _Stretch(trace, self._start)
