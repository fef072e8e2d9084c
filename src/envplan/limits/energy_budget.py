"""An iteration uses at most so much energy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from envplan.limits.base import Limit, Setting
from envplan.units import fj_from_j, j_from_fj, s_from_ns

if TYPE_CHECKING:
    from envplan.frontier import Relaxation
    from envplan.plan import Plan
    from envplan.replay import Replay


class EnergyBudget(Limit):
    """The most energy that an iteration uses over all GPUs."""

    kind: Literal["energy-budget"] = "energy-budget"
    energy_j: Annotated[float, Field(ge=0, le=1e15)]

    def excess(self, replay: Replay, setting: Setting) -> int:
        """fJ above the budget, all GPUs."""
        return max(0, replay.energy_fj * setting.num_gpus - fj_from_j(self.energy_j))

    def earliest_ns(self, frontier: Relaxation) -> int:
        """As Limit.earliest_ns."""
        budget_fj = fj_from_j(self.energy_j) // frontier.num_gpus
        # Beyond T_star energy rises again.
        return frontier.earliest_ns(lambda _, fj: fj <= budget_fj, frontier.min_energy_time_ns)

    def broken(self, replay: Replay, setting: Setting) -> str:
        """As Limit.broken."""
        used = j_from_fj(replay.energy_fj * setting.num_gpus)
        at_s = s_from_ns(replay.makespan_ns)
        return f"{used:.10g} J at {at_s:.9f} s are not within the budget of {self.energy_j:.10g} J"

    def kept(self, plan: Plan, replay: Replay, setting: Setting) -> str:
        """As Limit.kept."""
        return f"energy_j {plan.energy!r} <= {self.energy_j!r}"
