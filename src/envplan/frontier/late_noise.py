"""Replays under noise with clocks that follow late, many at once.

The same machine as that of `envplan.simulate`: an operation asks for its clock as it starts, the
clock comes later, and until then work is done at the clock that is there. Which requests a stage
makes, and in which order, is the plan's; only when they are made differs from run to run. So a
stage's clock is one sequence for all runs, and each run has its own place in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from envplan.pipeline import Pipeline
from envplan.profile import OptionTable
from envplan.simulation import row_nearest
from envplan.units import MAX_INTEGER

_NEVER = np.iinfo(np.int64).max
_ROUNDING_NS = 1e-6  # of a share of an operation's time, far below a ns


def late_makespans(
    pipeline: Pipeline,
    tables: Sequence[OptionTable],
    options: NDArray[np.int32],
    factors: NDArray[np.float64],
    latency_ns: int,
) -> NDArray[np.int64]:
    """Iteration times, (runs,), ns; a part of an operation may be rounded by a ns.

    Args:
        tables: the option table of each operation, (N,).
        options: for each operation the row of its table, (N,).
        factors: what each operation's time is multiplied by, (runs, N).
        latency_ns: from a request until the clock changes, ns.
    """
    runs = len(factors)
    mhz = [int(t.frequency_mhz[row]) for t, row in zip(tables, options.tolist(), strict=True)]
    bounds = pairwise(pipeline.stage_begin.tolist())
    clocks = [_StageClock(mhz[first:last], runs, latency_ns) for first, last in bounds]
    starts = np.zeros((len(mhz), runs), np.int64)
    begins, after = pipeline.succ_begin.tolist(), pipeline.succ.tolist()
    lags = pipeline.succ_lag_ns.tolist()
    makespan = np.zeros(runs, np.int64)
    for i in pipeline.order.tolist():
        table, row, factor = tables[i], int(options[i]), factors[:, i]
        if mhz[i]:
            clock = clocks[pipeline.operations[i].stage]
            finish = clock.run(table, row, mhz[i], starts[i], factor)
        else:
            finish = starts[i] + _noisy(table.time_ns[row], factor)
        np.maximum(makespan, finish, out=makespan)
        for k in range(begins[i], begins[i + 1]):
            np.maximum(starts[after[k]], finish + lags[k], out=starts[after[k]])
    return makespan


def _noisy(time_ns: NDArray[np.int64], factor: NDArray[np.float64]) -> NDArray[np.int64]:
    return np.clip(np.rint(time_ns * factor), 1, MAX_INTEGER).astype(np.int64)


class _StageClock:
    """One stage's clock in all runs; operations come in execution order.

    Args:
        mhz: the stage's planned clocks in execution order; 0 where none is asked for.
    """

    def __init__(self, mhz: Sequence[int], runs: int, latency_ns: int) -> None:
        asked = [clock for clock in mhz if clock]
        self._latency_ns = latency_ns
        # The clock before any request has come is the last one of the iteration before.
        self._sequence = asked[-1:]
        requests = sum(a != b for a, b in pairwise([*asked[-1:], *asked]))
        # When each request comes; one row more for the request after the last.
        self._comes_ns = np.full((requests + 1, runs), _NEVER, np.int64)
        self._come = np.zeros(runs, np.int64)  # how many have
        self._rows: dict[tuple[int, str, int], int] = {}

    def run(
        self,
        table: OptionTable,
        row: int,
        mhz: int,
        start_ns: NDArray[np.int64],
        factor: NDArray[np.float64],
    ) -> NDArray[np.int64]:
        """When an operation ends that starts then, (runs,), ns."""
        if mhz != self._sequence[-1]:
            self._comes_ns[len(self._sequence) - 1] = start_ns + self._latency_ns
            self._sequence.append(mhz)
        config = table.config[row]
        rows = [row if m == mhz else self._nearest(table, config, m) for m in self._sequence]
        time_ns = table.time_ns[rows]
        now, left = start_ns.copy(), np.ones(len(start_ns))
        active = np.arange(len(start_ns))
        while len(active):
            until_ns = self._next_change(active, now[active])
            whole = _noisy(time_ns[self._come[active]], factor[active])
            needed = np.ceil(left[active] * whole - _ROUNDING_NS).astype(np.int64)
            room = until_ns - now[active]
            cut = room < needed
            spent = np.where(cut, room, np.maximum(needed, 1))
            now[active] += spent
            left[active] -= spent / whole
            active = active[cut]
        return now

    def _nearest(self, table: OptionTable, config: str, mhz: int) -> int:
        key = (id(table), config, mhz)
        if key not in self._rows:
            self._rows[key] = row_nearest(table, config, mhz)
        return self._rows[key]

    def _next_change(self, active: NDArray[np.int64], now: NDArray[np.int64]) -> NDArray[np.int64]:
        """When the clock of each active run changes next, once what has come by now counts, ns."""
        while True:
            until = self._comes_ns[self._come[active], active]
            due = until <= now
            if not due.any():
                return until
            self._come[active[due]] += 1
