"""The power of all GPUs stays under a cap at every moment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from envplan.limits.base import PowerCap, Setting
from envplan.units import uw_from_w, w_from_uw

if TYPE_CHECKING:
    from envplan.plan import Plan
    from envplan.replay import Replay


class PeakPower(PowerCap):
    """The most that all GPUs draw together at any moment of the replay."""

    kind: Literal["peak-power"] = "peak-power"

    def cap_uw(self, num_gpus: int) -> int:
        """The cap on one GPU a stage together, uW."""
        return uw_from_w(self.power_w) // num_gpus

    def prices(self, num_gpus: int) -> dict[str, int]:
        """As Limit.prices."""
        return {"peak_uw": self.cap_uw(num_gpus)}

    def excess(self, replay: Replay, setting: Setting) -> int:
        """uW above the cap at the peak, of one GPU a stage together."""
        return max(0, replay.peak_uw - self.cap_uw(setting.num_gpus))

    def broken(self, replay: Replay, setting: Setting) -> str:
        """As Limit.broken."""
        return (
            f"the GPUs draw {w_from_uw(replay.peak_uw * setting.num_gpus)!r} W at the peak, more "
            f"than the {self.power_w!r} W allowed"
        )

    def kept(self, plan: Plan, replay: Replay, setting: Setting) -> str:
        """As Limit.kept."""
        peak_w = w_from_uw(replay.peak_uw * setting.num_gpus)
        return f"{peak_w!r} W at the peak of the replay <= {self.power_w!r} W"
