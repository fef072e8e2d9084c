"""The least average power of any plan, and rows that draw little on average.

Beyond T_star energy rises again, but by less than the time does, so that the average power goes on
falling up to T_max, the end of the frontier. The power of some rows is lower still, though waiting
instead would use less energy; they come last.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from envplan.frontier import Relaxation
from envplan.replay import Problem, Rows


def least_average_uw(frontier: Relaxation) -> int:
    """A power that no plan is below on average, uW, of one GPU a stage.

    Energy is that of waiting all the time and what running costs beyond that. The latter is least
    with each operation's cheapest row, and is spread over no more time than the slowest rows take.
    """
    problem = frontier.problem
    cost_fj = frontier.network.base_cost_fj
    slowest = np.array([len(table) - 1 for table in problem.tables], np.int32)[problem.table]
    slowest_ns = problem.replay(slowest).makespan_ns
    spread = cost_fj // (slowest_ns if cost_fj > 0 else frontier.min_time_ns)
    return max(0, frontier.total_power_uw + spread)


def least_average_rows(problem: Problem) -> Rows:
    """For each operation a row, so that every stage draws least on average while it runs, (N,).

    Dinkelbach ("On Nonlinear Fractional Programming", Management Science 13, 1967): take the rows
    that are cheapest at the power so far, and their power next, until it falls no more.
    """

    def powers(rows: Rows) -> NDArray[np.float64]:
        chosen, stages = problem.over_all(rows), problem.pipeline.num_stages
        energy, time = (
            np.bincount(problem.stage, amounts[chosen], stages)
            for amounts in (problem.energy_fj, problem.time_ns)
        )
        return energy / time

    rows = problem.cheapest_rows([0] * problem.pipeline.num_stages)
    drawn = powers(rows)
    while True:
        better = problem.cheapest_rows(drawn.tolist())
        if (less := powers(better)).sum() >= drawn.sum():
            return rows
        rows, drawn = better, less
