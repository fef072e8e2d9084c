"""The most energy that an iteration uses (`--energy-budget`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from envplan.quantities import ENERGY
from envplan.request.limits.base import (
    FastestKind,
    Limit,
    LimitContext,
    LimitOption,
    StatedResults,
    SweepKey,
    WholeJob,
)
from envplan.units import in_10fj, j_from_10fj, s_from_ns

if TYPE_CHECKING:
    from envplan.frontier import Relaxation
    from envplan.replay import Replay


class EnergyBudget(Limit):
    """The most energy that an iteration uses over all GPUs; a violation is in 10 fJ of all GPUs."""

    options: ClassVar = (
        LimitOption(
            field="energy_j",
            keyword="energy_budget",
            flag="energy-budget",
            quantity=ENERGY,
            metavar="J",
            help="Shortest iteration of at most J joules over all GPUs.",
            panel="Target",
            sweep=SweepKey(phrase="{:g} J"),
        ),
    )
    stated_as: ClassVar[FastestKind | None] = "energy-budget"
    counts_all_gpus: ClassVar = True

    kind: Literal["energy-budget"] = "energy-budget"
    energy_j: Annotated[float, Field(ge=0, le=1e15)]

    def target_fields(self) -> dict[str, float]:
        return {"energy_j": self.energy_j}

    def violation(self, replay: Replay, context: LimitContext) -> int:
        return max(0, replay.energy_10fj * context.num_gpus - in_10fj(self.energy_j))

    def earliest_ns(self, frontier: Relaxation) -> int:
        budget_10fj = in_10fj(self.energy_j)

        def is_kept(_: int, energy_10fj: int) -> bool:
            return energy_10fj * frontier.num_gpus <= budget_10fj

        # Beyond T_star energy rises again.
        return frontier.earliest_ns(is_kept, frontier.min_energy_time_ns)

    def explain_violation(self, replay: Replay, context: LimitContext) -> str:
        energy_j = j_from_10fj(replay.energy_10fj * context.num_gpus)
        time_s = s_from_ns(replay.makespan_ns)
        return (
            f"{energy_j:.10g} J at {time_s:.9f} s are not within the budget of "
            f"{self.energy_j:.10g} J"
        )

    def explain_refusal(self, replay: Replay, context: LimitContext, frontier: Relaxation) -> str:
        return f"{self.explain_violation(replay, context)}; that is the least found"

    def explain_whole_violation(self, job: WholeJob) -> str | None:
        if job.energy_j <= self.energy_j:
            return None
        return (
            f"no plans were found within {self.energy_j:.10g} J: by {s_from_ns(job.sync_ns):.9f} s "
            f"the least found is {job.energy_j:.10g} J"
        )

    def explain_kept(self, stated: StatedResults, replay: Replay, context: LimitContext) -> str:
        return f"energy_j {stated.energy_j!r} <= {self.energy_j!r}"
