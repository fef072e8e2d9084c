"""The exact planner: the fleet of least power by an integer program (fleet_program.py).

It solves DynamoLLM's problem, min sum_i N_i x Energy_i,f(L_i) subject to GPUs, loads and SLOs, over
pools of all classes at once, with two liberties that only make it better: instances of a pool may
carry different loads and, unless `one_frequency`, run at different clocks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Final

from envplan.errors import NoAnswerError
from envplan.serving.build_plan import build_plan
from envplan.serving.fleet_program import FleetProgram, MilpSolution
from envplan.serving.hierarchical_planner import hierarchical_pools
from envplan.serving.plan import Pool, ServingPlan
from envplan.serving.plan_request import PlanRequest, too_few_gpus
from envplan.serving.profile import ServingProfile

#: Seconds that the solver has on a usual core.
TIME_LIMIT_S: Final = 6.0

_GPU_ROUNDING: Final = 1e-6  # a bound on GPUs may lie so much above a whole number


def exact_plan(
    profile: ServingProfile,
    loads: Mapping[str, float],
    gpus: int,
    *,
    merge: bool = True,
    one_frequency: bool = False,
    time_limit: float = TIME_LIMIT_S,
) -> ServingPlan:
    """The plan with the least power, or the best one found and its gap.

    Args:
        profile: with the SLOs to be met.
        loads: tokens/s by class.
        gpus: at most.
        merge: whether classes may be served by higher ones' pools.
        one_frequency: all instances of a pool with the same TP run at one clock.
        time_limit: s, for the solver, on a usual core; see fleet_program.py.

    Raises:
        InputError: no load, no GPU, or an unknown class.
        NoAnswerError: the loads cannot be served; says which class and by how much.
    """
    request = PlanRequest.create(profile, loads, gpus, merge=merge, one_frequency=one_frequency)
    program = FleetProgram(profile, request)
    solution = program.minimize_power(gpus, time_limit)
    fleets = [solution.pools] if solution.pools else []
    with suppress(NoAnswerError):  # what the solver finds in time may be worse than the managers'
        fleets.append(hierarchical_pools(profile, request))
    if not fleets:
        fleets.append(_smallest_fleet(program, gpus, time_limit))
    pools = min(fleets, key=_power_w)
    bound_w = _proved_bound_w(solution, _power_w(pools))
    return build_plan("exact", profile, request, pools, bound_w)


def power_bound_w(profile: ServingProfile, request: PlanRequest) -> float:
    """Power below which no plan lies, W; infinite if there is none within the GPUs.

    It is that of fractions of instances, and much quicker to find than a plan.
    """
    try:
        program = FleetProgram(profile, request)
    except NoAnswerError:
        return math.inf
    return program.relaxed_power_w(request.gpus)


def _power_w(pools: Iterable[Pool]) -> float:
    return sum(pool.power_w for pool in pools)


def _proved_bound_w(solution: MilpSolution, power_w: float) -> float | None:
    """A lower bound on the power of all plans, W; None if nothing was proved.

    Args:
        solution: of the program that minimizes power.
        power_w: of the best plan, which the solver's tolerance must not put below the bound.
    """
    if solution.lower_bound is not None:
        return min(solution.lower_bound, power_w)
    return 0.0 if power_w == 0 else None


def _smallest_fleet(program: FleetProgram, gpus: int, time_limit: float) -> list[Pool]:
    """A fleet of the fewest GPUs, once no fleet within the GPUs was found.

    Raises:
        NoAnswerError: the loads need more GPUs, or no plan was found in time.
    """
    solution = program.minimize_gpus(time_limit)
    fewest_gpus = math.ceil((solution.lower_bound or 0.0) - _GPU_ROUNDING)
    if fewest_gpus > gpus:
        gpus_by_class = Counter[str]()
        for pool in solution.pools:
            gpus_by_class[pool.request_class] += pool.gpus
        raise too_few_gpus("the loads need", fewest_gpus, gpus, gpus_by_class)
    if not solution.pools or sum(pool.gpus for pool in solution.pools) > gpus:
        raise NoAnswerError(
            f"no plan was found within {time_limit:g} s; give it more with --time-limit"
        )
    return solution.pools
