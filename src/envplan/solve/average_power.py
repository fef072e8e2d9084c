"""Average power: the least that any plan can have, and the choice that comes near it.

Average power falls along the frontier, and beyond T_star up to T_max too: energy rises there, but
by less than the time does. The power of some options is lower still, though waiting instead would
use less energy; they come last.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from envplan.frontier import Relaxation
from envplan.replay import Problem, Rows


def least_average_uw(frontier: Relaxation) -> int:
    """A power that no plan is below on average, uW, of one GPU a stage.

    Energy is that of waiting all the time and what running costs beyond that. The latter is least
    with each operation's cheapest option, and is spread over no more time than the slowest options
    take.
    """
    problem = frontier.problem
    running_fj = frontier.network.base_cost_fj
    slowest_options = np.array([len(table) - 1 for table in problem.tables], np.int32)
    slowest_ns = problem.replay(slowest_options[problem.table]).makespan_ns
    running_uw = running_fj // (slowest_ns if running_fj > 0 else frontier.min_time_ns)
    return max(0, frontier.total_power_uw + running_uw)


def least_average_choice(problem: Problem) -> Rows:
    """The options with which every stage draws least on average while it runs, int32 (N,).

    Dinkelbach ("On Nonlinear Fractional Programming", Management Science 13, 1967): take the
    options that are cheapest at the power so far, and their power next, until it falls no more.
    """
    choice = problem.cheapest_rows([0] * problem.pipeline.num_stages)
    powers_uw = _running_powers_uw(problem, choice)
    while True:
        cheaper = problem.cheapest_rows(powers_uw.tolist())
        lower_uw = _running_powers_uw(problem, cheaper)
        if lower_uw.sum() >= powers_uw.sum():
            return choice
        choice, powers_uw = cheaper, lower_uw


def _running_powers_uw(problem: Problem, choice: Rows) -> NDArray[np.float64]:
    """Average power of each stage while it runs, uW, (num_stages,)."""
    options, num_stages = problem.over_all(choice), problem.pipeline.num_stages
    energy_fj = np.bincount(problem.stage, problem.energy_fj[options], num_stages)
    time_ns = np.bincount(problem.stage, problem.time_ns[options], num_stages)
    return energy_fj / time_ns
