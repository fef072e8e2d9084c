"""The most power on average over an iteration (`--power-cap`).

Average power falls along the frontier, and beyond T_star up to T_max too: energy rises there, but
by less than the time does. The power of some options is lower still, though waiting instead would
use less energy; they come last.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from envplan.errors import InputError
from envplan.quantities import POWER
from envplan.request.limits.base import (
    FastestKind,
    Limit,
    LimitContext,
    LimitOption,
    StatedResults,
    SweepKey,
    WholeJob,
)
from envplan.units import POWER_UNITS_PER_W, in_10fj, in_10uw, s_from_ns, w_from_10uw

if TYPE_CHECKING:
    from envplan.frontier import Relaxation
    from envplan.replay import Problem, Replay, Rows

#: A GPU that runs or waits draws more than that, W.
_LEAST_GPU_W: Final = 10.0
#: Stated energies were rounded to floats: they may be off by one part in so many.
_ROUNDING: Final = 10**9


class AveragePower(Limit):
    """The most that all GPUs draw together on average over an iteration.

    A violation is in 10 fJ of all GPUs above what the cap allows in the time of the iteration.
    """

    options: ClassVar = (
        LimitOption(
            field="power_w",
            keyword="power_cap",
            flag="power-cap",
            quantity=POWER,
            metavar="W",
            help="Shortest iteration of at most W watts over all GPUs, on average.",
            panel="Target",
            sweep=SweepKey(phrase="{:g} W"),
        ),
    )
    stated_as: ClassVar[FastestKind | None] = "power-cap"
    eases_beyond_t_star: ClassVar = True
    counts_all_gpus: ClassVar = True

    kind: Literal["average-power"] = "average-power"
    power_w: Annotated[float, Field(ge=0, le=1e12)]

    def target_fields(self) -> dict[str, float]:
        return {"power_w": self.power_w}

    def violation(self, replay: Replay, context: LimitContext) -> int:
        allowed_10fj = in_10uw(self.power_w) * replay.makespan_ns
        return max(0, replay.energy_10fj * context.num_gpus - allowed_10fj)

    def earliest_ns(self, frontier: Relaxation) -> int:
        return earliest_ns_under_average(frontier, in_10uw(self.power_w))

    def safest_choice(self, problem: Problem) -> Rows:
        return least_average_choice(problem)

    def explain_violation(self, replay: Replay, context: LimitContext) -> str:
        average_w = replay.energy_10fj * context.num_gpus / (replay.makespan_ns * POWER_UNITS_PER_W)
        return f"{average_w:.10g} W on average is above {self.power_w:.10g} W"

    def explain_refusal(self, replay: Replay, context: LimitContext, frontier: Relaxation) -> str:
        least_w = w_from_10uw(least_average_10uw(frontier) * frontier.num_gpus)
        return (
            f"{self.explain_violation(replay, context)}; no plan draws less than {least_w:.10g} W "
            "on average"
        )

    def explain_whole_violation(self, job: WholeJob) -> str | None:
        time_s = s_from_ns(job.sync_ns)
        average_w = job.energy_j / time_s
        if average_w <= self.power_w:
            return None
        return (
            f"no plans were found within {self.power_w:.10g} W on average: by {time_s:.9f} s the "
            f"least found is {average_w:.10g} W on average"
        )

    def prove(self, stated: StatedResults, replay: Replay, context: LimitContext) -> str:
        if self.violation(replay, context) > in_10fj(stated.energy_j) // _ROUNDING:
            raise InputError(
                f"predicted.average_power_w: {self.explain_violation(replay, context)}"
            )
        return self.explain_kept(stated, replay, context)

    def explain_kept(self, stated: StatedResults, replay: Replay, context: LimitContext) -> str:
        return f"average_power_w {stated.average_power_w!r} <= {self.power_w!r}"

    def doubts(self, all_gpus: int) -> Iterator[str]:
        return doubt_cap(self.power_w, all_gpus)


def doubt_cap(power_w: float, all_gpus: int) -> Iterator[str]:
    """A warning of a cap on all GPUs that is less than GPUs draw at the very least."""
    if power_w < _LEAST_GPU_W * all_gpus:
        yield (
            f"a cap of {power_w:g} W is {power_w / all_gpus:.3g} W for each of {all_gpus} GPUs; "
            "caps are on all GPUs together"
        )


def earliest_ns_under_average(frontier: Relaxation, cap_10uw: int) -> int:
    """The earliest time at which the relaxation draws no more than a cap on average, ns.

    Args:
        frontier: whose average power falls up to T_max.
        cap_10uw: on all GPUs, 10 uW.
    """

    def is_kept(time_ns: int, energy_10fj: int) -> bool:
        return energy_10fj * frontier.num_gpus <= cap_10uw * time_ns

    return frontier.earliest_ns(is_kept, frontier.slowest_time_ns)


def least_average_10uw(frontier: Relaxation) -> int:
    """A power that no plan is below on average, 10 uW, of one GPU a stage.

    Energy is that of waiting all the time and what running costs beyond that. The latter is least
    with each operation's cheapest option, and is spread over no more time than the slowest options
    take.
    """
    problem = frontier.problem
    running_10fj = frontier.network.base_cost_10fj
    slowest_options = np.array([len(table) - 1 for table in problem.tables], np.int32)
    slowest_ns = problem.replay(slowest_options[problem.table]).makespan_ns
    running_10uw = running_10fj // (slowest_ns if running_10fj > 0 else frontier.min_time_ns)
    return max(0, frontier.total_power_10uw + running_10uw)


def least_average_choice(problem: Problem) -> Rows:
    """The options with which every stage draws least on average while it runs, int32 (N,).

    Dinkelbach ("On Nonlinear Fractional Programming", Management Science 13, 1967): take the
    options that are cheapest at the power so far, and their power next, until it falls no more.
    """
    choice = problem.cheapest_rows([0] * problem.pipeline.num_stages)
    powers_10uw = _running_powers_10uw(problem, choice)
    while True:
        cheaper = problem.cheapest_rows(powers_10uw.tolist())
        lower_10uw = _running_powers_10uw(problem, cheaper)
        if lower_10uw.sum() >= powers_10uw.sum():
            return choice
        choice, powers_10uw = cheaper, lower_10uw


def _running_powers_10uw(problem: Problem, choice: Rows) -> NDArray[np.float64]:
    """Average power of each stage while it runs, 10 uW, (num_stages,)."""
    options, num_stages = problem.over_all(choice), problem.pipeline.num_stages
    energy_10fj = np.bincount(problem.stage, problem.energy_10fj[options], num_stages)
    time_ns = np.bincount(problem.stage, problem.time_ns[options], num_stages)
    return energy_10fj / time_ns
