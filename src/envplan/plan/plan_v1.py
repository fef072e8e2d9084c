"""Plans of early versions, and of other planners: their files state no request.

Their other fields tell it. Nothing else reads a request from those.
"""

from __future__ import annotations

from typing import Any, Final

from envplan.costs.model import Run
from envplan.plan.target import Target
from envplan.replay import Ask
from envplan.request import Request
from envplan.request.limits import Robustness

#: Rungs that such plans asked for, if they have a ladder at all.
_LADDER: Final = 32


def request_of_v1(
    target: Target,
    *,
    switch_latency_s: float,
    ask: Ask | None,
    min_dwell_s: float,
    robustness: Robustness | None,
    run: Run | None,
    num_rungs: int | None,
) -> Request:
    """The request that the fields of a plan tell.

    Args:
        target: the plan's.
        switch_latency_s: of its job, s.
        ask: of its job.
        min_dwell_s: of its job, s; 0: none.
        robustness: how sure it holds its target; None where times are exact.
        run: the run whose costs it states.
        num_rungs: of its ladder; None: it has none.
    """
    request = Request.from_options(
        **_deadline_options(target, run),
        straggler_time=target.straggler_time_s,
        energy_budget=target.energy_j,
        power_cap=target.power_w,
        peak_power_cap=target.peak_power_w,
        probability=None if robustness is None else robustness.probability,
        noise=None if robustness is None else robustness.noise,
        switch_latency=switch_latency_s,
        min_dwell=min_dwell_s,
        ladder=0 if num_rungs is None else max(_LADDER, num_rungs),
    )
    return request.model_copy(update={"run": run, "ask": ask})


def _deadline_options(target: Target, run: Run | None) -> dict[str, Any]:
    """The deadline of a target, as keyword arguments of `Request.from_options`."""
    match target.kind:
        case "time" if run is not None and run.deadline_s is not None:
            return {"run": run}
        case "time" | "planner":
            return {"target_time": target.time_s}
        case "slowdown":
            return {"slowdown": target.slowdown}
        case "min-energy":
            return {"min_energy": True}
        case "sync-time":
            return {"sync_time": target.time_s}
        case _:
            return {}
