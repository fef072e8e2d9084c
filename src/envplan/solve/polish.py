"""Spending seconds on a plan: more annealing, and CP-SAT from the plan found.

A small pipeline goes to CP-SAT whole, which also proves a bound of its own. (Going through a long
one window by window gained nothing over annealing for as long.) Of a long pipeline CP-SAT chooses
the rounds in the middle (cyclic_schedule.py), which annealing then joins to both ends.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from envplan.frontier import Relaxation
from envplan.profile import CostCurve
from envplan.replay import Replay
from envplan.solve.cp_sat import solve_whole_pipeline
from envplan.solve.cyclic_schedule import ROUND_OPTIONS, CyclicSchedule
from envplan.solve.rounding import TEMPERATURES, Choice, Rounding
from envplan.solve.solution import Polished

#: Up to here CP-SAT gets all operations at once.
_MAX_CP_SAT_OPERATIONS: Final = 128
_ROUNDS_SHARE: Final = 0.6  # of the time, for the rounds of a long pipeline
_ANNEALING_SHARE: Final = 0.5  # of the time, where CP-SAT has the rest
#: Of the annealing that slows down the joints of repeated rounds again.
_JOINT_TEMPERATURES: Final = (0.05, 0.1, 0.05, 0.2, 0.1, 0.05)


def polish(
    frontier: Relaxation,
    incumbent: Replay,
    rounding: Rounding,
    *,
    idle_until_deadline: bool,
    seconds: float,
) -> Polished:
    """Improve a choice for about so many seconds.

    Args:
        frontier: of the pipeline.
        incumbent: the best choice so far.
        rounding: of the deadline's relaxed optimum; its choice is annealed in place.
        idle_until_deadline: everybody waits until the deadline, so what is used above waiting
            counts.
        seconds: to spend.
    """
    begin_s = time.monotonic()
    curves = [frontier.network.cost_curves[k] for k in rounding.curve.tolist()]
    reduced_costs = _reduced_costs(frontier, rounding, curves)
    if len(curves) > _MAX_CP_SAT_OPERATIONS:
        _repeat_best_rounds(frontier, rounding, curves, reduced_costs, begin_s, seconds)
        _anneal_until(rounding, begin_s + seconds)
        polished = frontier.problem.replay(rounding.choice)
        return Polished(min(incumbent, polished, key=_cost_10fj(idle_until_deadline)))
    _anneal_until(rounding, begin_s + seconds * _ANNEALING_SHARE)
    return _polish_by_cp_sat(
        frontier,
        incumbent,
        rounding,
        curves,
        reduced_costs,
        idle_until_deadline=idle_until_deadline,
        end_s=begin_s + seconds,
    )


def _cost_10fj(idle_until_deadline: bool) -> Callable[[Replay], int]:
    """The cost of a replay: its energy, or, where everybody waits, that above waiting."""
    if idle_until_deadline:
        return lambda replay: replay.effective_10fj
    return lambda replay: replay.energy_10fj


def _reduced_costs(
    frontier: Relaxation, rounding: Rounding, curves: Sequence[CostCurve]
) -> list[NDArray[np.int64]]:
    """Costs of each operation's options above its best one, 10 fJ, by rank and Pareto index.

    Each ns is paid at the relaxed optimum's price: the operation's flow, which is what a ns more
    costs it.
    """
    flow_10uw = frontier.state_at(rounding.deadline_ns).flow_10uw
    reduced_costs = []
    for curve, price_10uw in zip(curves, flow_10uw[rounding.order].tolist(), strict=True):
        cost_10fj = curve.cost_10fj + price_10uw * curve.time_ns
        reduced_costs.append(cost_10fj - cost_10fj.min())
    return reduced_costs


def _anneal_until(rounding: Rounding, end_s: float) -> None:
    """Anneal a rounding's choice in place until a time of time.monotonic()."""
    seed = len(TEMPERATURES)
    while time.monotonic() < end_s:
        rounding.improve(TEMPERATURES[seed % len(TEMPERATURES)], seed)
        seed += 1


def _repeat_best_rounds(
    frontier: Relaxation,
    rounding: Rounding,
    curves: Sequence[CostCurve],
    reduced_costs: Sequence[NDArray[np.int64]],
    begin_s: float,
    seconds: float,
) -> None:
    """Repeat the best pattern of a few rounds in a rounding's choice, in place, if that is cheaper.

    Nothing happens where the pipeline has no rounds that repeat.
    """
    cyclic = CyclicSchedule.detect(frontier.pipeline, rounding)
    if cyclic is None:
        return
    likely = [np.argsort(cost, kind="stable")[:ROUND_OPTIONS].tolist() for cost in reduced_costs]
    end_s = begin_s + seconds * _ROUNDS_SHARE
    pattern = cyclic.best_pattern(rounding.pareto_choice, curves, likely, end_s)
    if pattern is None:
        return

    def replayed(pareto_choice: Choice) -> Replay:
        return frontier.problem.replay(rounding.choice_of(pareto_choice))

    original = rounding.pareto_choice.copy()
    least_10fj = math.inf
    for pareto_choice in cyclic.insertions(original, pattern):
        replay = replayed(pareto_choice)
        if replay.effective_10fj < least_10fj and replay.makespan_ns <= rounding.deadline_ns:
            least_10fj = replay.effective_10fj
            rounding.pareto_choice[:] = pareto_choice
    for seed, temperature in enumerate(_JOINT_TEMPERATURES):
        rounding.improve(temperature, seed)
    if replayed(rounding.pareto_choice).effective_10fj >= replayed(original).effective_10fj:
        rounding.pareto_choice[:] = original


def _polish_by_cp_sat(
    frontier: Relaxation,
    incumbent: Replay,
    rounding: Rounding,
    curves: Sequence[CostCurve],
    reduced_costs: Sequence[NDArray[np.int64]],
    *,
    idle_until_deadline: bool,
    end_s: float,
) -> Polished:
    """Choose all options of a small pipeline by CP-SAT, from a rounding's choice on."""
    problem, cost_10fj = frontier.problem, _cost_10fj(idle_until_deadline)
    rounded = problem.replay(rounding.choice)
    bound = frontier.effective_bound_10fj if idle_until_deadline else frontier.lower_bound_10fj
    relaxed_bound_10fj = bound(rounding.deadline_ns)
    # A plan costs at least the relaxed optimum plus each option's own reduced cost, so no better
    # plan has an option whose reduced cost alone is more than the whole of this plan's.
    room_10fj = cost_10fj(rounded) - relaxed_bound_10fj
    allowed = [np.flatnonzero(cost <= room_10fj).tolist() for cost in reduced_costs]
    pareto_choice, proved_10fj = solve_whole_pipeline(
        rounding,
        rounded.starts_ns[rounding.order].tolist(),
        curves,
        allowed,
        saved_10uw=0 if idle_until_deadline else frontier.total_power_10uw,
        end_s=end_s,
    )
    candidates = [incumbent, rounded]
    if pareto_choice is not None:
        candidates.append(problem.replay(rounding.choice_of(pareto_choice)))
    is_better_bound = proved_10fj > relaxed_bound_10fj and not idle_until_deadline
    return Polished(min(candidates, key=cost_10fj), proved_10fj if is_better_bound else None)
