"""A part of a frontier: walked from where it starts, as far down as somebody has asked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from envplan.errors import InputError

if TYPE_CHECKING:
    from envplan._kernel import Trace

Progress = Callable[[int, int], None]


class Stretch:
    """The frontier from where a trace starts on downwards, in one piece or in several.

    Args:
        trace: that stands where the stretch begins.
        from_flow: as for Trace.run.
        base_cost_fj: what all operations cost at their slowest, fJ.
        waiting_uw: what all waiting GPUs draw together.
        path: of the profile, to name in errors.

    Attributes:
        times_ns: breakpoints so far, ascending, int64 (n,); the ends may be none.
        slopes_uw: -dC/dT of the effective cost on the interval below each, uW, (n,).
        energies_fj: least relaxed energy at each, fJ, (n,).
    """

    def __init__(
        self, trace: Trace, from_flow: int, base_cost_fj: int, waiting_uw: int, path: Path | None
    ) -> None:
        self._traces = [trace]  # the latest first; each stands for what is before its start, too
        self._path = path
        self._base_cost_fj = base_cost_fj
        self._waiting_uw = waiting_uw
        trace.run(from_flow, until=trace.max_time)
        self._read()

    def _read(self) -> None:
        pieces = [trace.breakpoints() for trace in self._traces]
        for k, later in enumerate(pieces[:-1]):
            own = later[0] > pieces[k + 1][0][0]
            pieces[k] = (later[0][own], later[1][own], later[2][: own.sum()])
        times, slopes = (np.concatenate([piece[k] for piece in pieces]) for k in (0, 1))
        costs = [cost for piece in pieces for cost in piece[2]]
        # Where a walk has paused or begun the slope stays as it is.
        bends = np.append(slopes[1:-1] != slopes[:-2], True)
        kept = np.flatnonzero(np.concatenate([[True], bends])[: len(times)])[::-1]
        self.times_ns: NDArray[np.int64] = times[kept]
        self.slopes_uw: list[int] = slopes[kept].tolist()
        self.energies_fj: list[int] = [
            self._base_cost_fj + costs[k] + self._waiting_uw * int(times[k]) for k in kept.tolist()
        ]

    @property
    def first_ns(self) -> int:
        """The earliest time so far, ns."""
        return int(self.times_ns[0])

    @property
    def last_ns(self) -> int:
        """The latest time, ns."""
        return int(self.times_ns[-1])

    def reach(self, time_ns: int, progress: Progress | None = None) -> None:
        """Walk down to a time, or to T_min.

        Raises:
            InputError: a marginal cost outgrows exact 64-bit arithmetic.
        """
        trace = self._traces[-1]
        if self.first_ns > max(time_ns, trace.min_time):
            try:
                trace.go_on(time_ns, progress)
            except OverflowError as error:
                raise InputError(
                    f"{error}; check that times are in seconds and energies in joules",
                    path=self._path,
                ) from error
            self._read()

    def go_on_with(self, earlier: Stretch, progress: Progress | None = None) -> None:
        """Take another stretch for what is before its start, and walk down to there."""
        self.reach(earlier.last_ns, progress)
        self._traces += earlier._traces
        self._read()

    def energy_fj(self, time_ns: int) -> int:
        """Least relaxed energy at a time within, fJ."""
        k = int(np.searchsorted(self.times_ns, time_ns))  # first breakpoint not before time_ns
        before = int(self.times_ns[k]) - time_ns
        return self.energies_fj[k] + (self.slopes_uw[k] - self._waiting_uw) * before

    def below(self, time_ns: int) -> tuple[int, int]:
        """The breakpoint next below a time within, ns, and the slope in between, uW."""
        k = int(np.searchsorted(self.times_ns, time_ns))
        return int(self.times_ns[k - 1]), self.slopes_uw[k]

    def state_at(self, time_ns: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Event times (nodes,), ns, and flows (arcs,), uW, of the optimum at a time within."""
        starts = (trace.time for trace in reversed(self._traces))
        later = next(k for k, start in enumerate(starts) if start >= time_ns)
        return self._traces[-1 - later].state_at(time_ns)
