"""The least average power of any plan, and rows that draw little on average.

Beyond T_star energy rises again, but by less than the time does, so that the average power goes on
falling up to T_max, the end of the frontier. The power of some rows is lower still, though waiting
instead would use less energy; they come last.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from envplan.frontier import Relaxation
from envplan.profile import OptionTable
from envplan.replay import Problem


def least_average_uw(frontier: Relaxation) -> int:
    """A power that no plan is below on average, uW, of one GPU a stage.

    Energy is that of waiting all the time and what running costs beyond that. The latter is least
    with each operation's cheapest row, and is spread over no more time than the slowest rows take.
    """
    problem = frontier.problem
    waiting = problem.blocking_power_uw[problem.stage].tolist()
    least: dict[tuple[int, int], int] = {}
    cost_fj = 0
    for key in zip(problem.table.tolist(), waiting, strict=True):
        if key not in least:
            table = problem.tables[key[0]]
            least[key] = int((table.energy_fj - key[1] * table.time_ns).min())
        cost_fj += least[key]
    slowest = np.array([len(table) - 1 for table in problem.tables], np.int32)[problem.table]
    slowest_ns = problem.replay(slowest).makespan_ns
    spread = cost_fj // (slowest_ns if cost_fj > 0 else frontier.min_time_ns)
    return max(0, frontier.total_power_uw + spread)


def thriftiest_rows(problem: Problem) -> NDArray[np.int32]:
    """For each operation a row, so that every stage draws least on average while it runs, (N,)."""
    bounds = pairwise(problem.pipeline.stage_begin.tolist())
    tables = [problem.tables[number] for number in problem.table.tolist()]
    rows = [row for begin, end in bounds for row in _least_ratio(tables[begin:end])]
    return np.array(rows, np.int32)


def _least_ratio(tables: Sequence[OptionTable]) -> list[int]:
    """The row of each table with which energy over time, of all together, is least.

    Dinkelbach ("On Nonlinear Fractional Programming", Management Science 13, 1967): take the rows
    that are cheapest at the power so far, and their power next, until it falls no more.
    """
    distinct = {id(table): table for table in tables}
    first = {key: int((-(-t.energy_fj // t.time_ns)).argmin()) for key, t in distinct.items()}
    rows = [first[id(table)] for table in tables]
    while True:
        energy, time = _sums(tables, rows)
        cheapest = {key: _cheapest(table, energy, time) for key, table in distinct.items()}
        better = [cheapest[id(table)] for table in tables]
        least, longer = _sums(tables, better)
        if least * time >= energy * longer:
            return rows
        rows = better


def _cheapest(table: OptionTable, energy_fj: int, time_ns: int) -> int:
    """The row of least cost where time costs energy_fj / time_ns."""
    costs = [
        time_ns * e - energy_fj * t
        for e, t in zip(table.energy_fj.tolist(), table.time_ns.tolist(), strict=True)
    ]
    return costs.index(min(costs))


def _sums(tables: Sequence[OptionTable], rows: Sequence[int]) -> tuple[int, int]:
    """Energy in fJ and time in ns of the rows together."""
    pairs = list(zip(tables, rows, strict=True))
    return (
        sum(int(table.energy_fj[row]) for table, row in pairs),
        sum(int(table.time_ns[row]) for table, row in pairs),
    )
