"""The parts of a request that plan.json repeats: the target, and how clocks come and last.

The request is the truth. What is here is derived from it when a plan is made, and `envplan check`
derives it again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from envplan._io.documents import Joules, Model, Seconds, Watts
from envplan.replay import Ask
from envplan.request import Request
from envplan.request.limits import MinDwell
from envplan.units import ns_from_s_floor, s_from_ns

TargetKind = Literal[
    "no-slowdown",
    "time",
    "slowdown",
    "min-energy",
    "energy-budget",
    "power-cap",
    "peak-power-cap",
    "fastest",
    "sync-time",
    "max-frequency",
    "planner",
]


class Target(Model):
    """The target that was asked for, and the deadline that planning came to meet for it."""

    kind: TargetKind
    time_s: Seconds | None = None
    slowdown: Annotated[float, Field(ge=0)] | None = Field(None, description="fraction of T_min")
    energy_j: Joules | None = None
    power_w: Watts | None = None
    peak_power_w: Watts | None = Field(
        None, description="W over all GPUs at any moment of the replay"
    )
    straggler_time_s: Seconds | None = None
    deadline_s: Seconds = Field(description="the time the plan and its lower bound are for")

    @property
    def deadline_ns(self) -> int:
        """deadline_s in whole ns."""
        return ns_from_s_floor(self.deadline_s)


@dataclass(frozen=True)
class ClockTiming:
    """How late the clocks of a job come, and how long they last.

    Attributes:
        switch_latency_s: from a clock request until the clock changes, s; None: at once.
        ask: when clocks are asked for; None: as operations start.
        min_dwell_s: least time between two clock changes of a stage, s; None: none.
    """

    switch_latency_s: float | None = None
    ask: Ask | None = None
    min_dwell_s: float | None = None


def clock_timing_of(request: Request) -> ClockTiming:
    """The timing of clocks that a request asks for."""
    dwell = request.limit(MinDwell)
    return ClockTiming(
        switch_latency_s=s_from_ns(request.latency_ns) if request.latency_ns else None,
        ask=request.ask if request.latency_ns else None,
        min_dwell_s=None if dwell is None else dwell.time_s,
    )


def target_of(request: Request, deadline_ns: int, *, least_ns: int = 0) -> Target:
    """The target that plan.json states for a request.

    Args:
        request: as it was answered.
        deadline_ns: the time that the plan and its bound are for, ns.
        least_ns: T_min, ns, for the time that a slowdown means.
    """
    deadline = request.deadline
    time_s = deadline.time_s
    kind: TargetKind = "time" if deadline.kind == "any" else deadline.kind
    if request.objective == "time":
        kind = fastest_kind(request)
    if kind == "slowdown":
        time_s = s_from_ns(deadline.resolve_ns(least_ns) or 0)
    elif kind in ("no-slowdown", "min-energy") or request.objective == "cost":
        time_s = s_from_ns(deadline_ns)
    limit_fields: dict[str, float] = {}
    for limit in request.limits:
        limit_fields |= limit.target_fields()
    return Target(
        kind=kind,
        time_s=time_s,
        slowdown=deadline.slowdown,
        straggler_time_s=request.straggler_time_s,
        deadline_s=s_from_ns(deadline_ns),
        **limit_fields,
    )


def fastest_kind(request: Request) -> TargetKind:
    """The kind of a target that asks for the fastest plan under limits: that of the last limit."""
    kinds = [limit.stated_as for limit in request.limits if limit.stated_as is not None]
    return kinds[-1] if kinds else "fastest"
