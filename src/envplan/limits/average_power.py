"""The power of all GPUs stays under a cap on average over an iteration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from envplan.errors import InputError
from envplan.limits.base import PowerCap, Setting
from envplan.units import fj_from_j, uw_from_w

if TYPE_CHECKING:
    from envplan.plan import Plan
    from envplan.replay import Replay


class AveragePower(PowerCap):
    """The most that all GPUs draw together on average over an iteration."""

    kind: Literal["average-power"] = "average-power"

    def excess(self, replay: Replay, setting: Setting) -> int:
        """fJ above what the cap allows in the time of the iteration, all GPUs."""
        allowed_fj = uw_from_w(self.power_w) * replay.makespan_ns
        return max(0, replay.energy_fj * setting.num_gpus - allowed_fj)

    def broken(self, replay: Replay, setting: Setting) -> str:
        """As Limit.broken."""
        watts = replay.energy_fj * setting.num_gpus / (replay.makespan_ns * 10**6)
        return f"{watts:.10g} W on average is above {self.power_w:.10g} W"

    def prove(self, plan: Plan, replay: Replay, setting: Setting) -> str:
        """As Limit.prove."""
        if self.excess(replay, setting) > fj_from_j(plan.energy) // 10**9:
            raise InputError(f"predicted.average_power_w: {self.broken(replay, setting)}")
        return f"average_power_w {plan.average_power!r} <= {self.power_w!r}"
