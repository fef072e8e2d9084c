"""No stage asks for another clock too soon after it has asked for one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from envplan.limits.base import Limit, Setting
from envplan.units import ns_from_s_ceil, s_from_ns

if TYPE_CHECKING:
    from envplan.plan import Plan
    from envplan.replay import Replay


class MinHold(Limit):
    """Least time between two requests of a stage for another clock.

    From the last request of an iteration to the first of the next, too: iterations follow each
    other.
    """

    kind: Literal["min-hold"] = "min-hold"
    time_s: Annotated[float, Field(gt=0, le=3600)]

    @property
    def hold_ns(self) -> int:
        """ns."""
        return ns_from_s_ceil(self.time_s)

    def prices(self, num_gpus: int) -> dict[str, int]:
        """As Limit.prices."""
        return {"hold_ns": self.hold_ns}

    def excess(self, replay: Replay, setting: Setting) -> int:
        """ns that clocks are held too short, all added up."""
        return sum(self.hold_ns - held for *_, held in replay.short_holds(self.hold_ns))

    def broken(self, replay: Replay, setting: Setting) -> str:
        """As Limit.broken."""
        stage, at, held = next(replay.short_holds(self.hold_ns))
        return (
            f"stage {stage} asks for a clock at {s_from_ns(at)!r} s and for another one "
            f"{s_from_ns(held)!r} s later, within the least time of {self.time_s!r} s"
        )

    def kept(self, plan: Plan, replay: Replay, setting: Setting) -> str:
        """As Limit.kept."""
        return f"no stage asks for another clock within {self.time_s!r} s"
