"""Drift: what operations took in a run, against the profile that its plan was made from.

The profile's times are scaled by what was measured, one factor for each instruction on each stage,
and its energies with them: a GPU that takes longer at the same clock draws about the same power.
The plan is then made anew for the same target.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Final

import numpy as np

from envplan.errors import InputError
from envplan.plan import Plan, as_referenced
from envplan.profile import BLOCKING, INCLUDES_RECOMPUTATION, Profile
from envplan.request import Deadline
from envplan.request.limits import MinDwell
from envplan.solve import solve, trace_job
from envplan.units import MAX_INTEGER, j_from_fj, s_from_ns

__all__ = ["Drift", "measure_drift", "replan", "rescale"]

#: Steps of each rank that are not used: memory is first allocated and kernels chosen in them.
WARM_UP_STEPS: Final = 1

_TableKey = tuple[int, str]


@dataclass(frozen=True)
class Drift:
    """How an instruction on a stage of the profile did.

    Attributes:
        stage: of the profile.
        instruction: its name.
        factor: median of measured over planned time.
        samples: operations measured.
    """

    stage: int
    instruction: str
    factor: float
    samples: int


def measure_drift(plan: Plan, profile: Profile, lines: Iterable[Mapping[str, Any]]) -> list[Drift]:
    """Compare a run with the profile its plan was made from.

    Args:
        plan: what the run's frequency plan was made from.
        profile: of that plan.
        lines: of run logs, as read_run_log gives them.

    Returns:
        One for each (stage, instruction) that was measured, in order.

    Raises:
        InputError: the lines do not fit the plan, or hold no times at clocks that were set.
    """
    profile = as_referenced(plan.profile, profile)
    planned = {
        (op.stage, op.instruction, op.chunk): (op.profile_stage, op.instruction)
        for op in plan.job.pipeline().operations
    }
    time_at = {key: _time_at(profile, *key) for key in set(planned.values())}
    factors: dict[_TableKey, list[float]] = defaultdict(list)
    samples: dict[_TableKey, int] = defaultdict(int)
    for line in lines:
        if line["event"] != "step" or line["step"] < WARM_UP_STEPS:
            continue
        stage = line["stage"]
        for instruction, chunk, mhz, count, mean, _least, *config in line["operations"]:
            if (stage, instruction, chunk) not in planned:
                raise InputError(
                    f"the run log has {instruction} on stage {stage}, chunk {chunk}, which the "
                    "plan has not; is it another plan's?"
                )
            key = planned[stage, instruction, chunk]
            expected = time_at[key](mhz, *config)
            if mhz and expected > 0 and mean > 0:
                factors[key].append(mean / expected)
                samples[key] += count
    if not factors:
        raise InputError(
            f"the run log has no measured times after the first {WARM_UP_STEPS} steps; let the run "
            "go on for longer"
        )
    return [Drift(*key, median(factors[key]), samples[key]) for key in sorted(factors)]


def rescale(profile: Profile, drifts: Iterable[Drift]) -> Profile:
    """The profile with the times and energies that the drifts make of them.

    What was derived from the profile's rows is written out, and is measured from now on.

    Raises:
        InputError: a time or energy becomes too large for a profile.
    """
    factors = {(drift.stage, drift.instruction): drift.factor for drift in drifts}
    rows: list[tuple[object, ...]] = []
    for stage in range(profile.num_stages):
        for table in profile.tables(stage):
            factor = factors.get((stage, table.instruction), 1.0)
            for mhz, config, time, energy in table.rows():
                scaled = s_from_ns(round(time * factor)), j_from_fj(round(energy * factor))
                rows.append((stage, table.instruction, mhz, *scaled, config))
        if profile.blocking_power_w is not None:
            rows.append((stage, BLOCKING, 0, 1.0, profile.blocking_power_w[stage], ""))
    known = profile.metadata
    extra = {
        **known.extra,
        "refined_from_sha256": profile.sha256,
        "refined_factors": [[*key, factor] for key, factor in sorted(factors.items())],
    }
    if profile.adjustments.recompute:
        extra[INCLUDES_RECOMPUTATION] = True
    return Profile.from_rows(
        rows, name=f"{profile.name}.refined", metadata=replace(known, extra=extra)
    )


def replan(
    plan: Plan,
    profile: Profile,
    progress: Callable[[int, int], None] | None = None,
    *,
    min_dwell: float = 0.0,
) -> Plan:
    """A plan for the same job and target from another profile, or with clocks that last.

    Args:
        min_dwell: least s between two requests of a stage for another clock; 0: as before.

    Raises:
        InputError: the plan was not chosen from the frontier, and no hold is asked for.
        NoAnswerError: the target cannot be met any more; says what can.
    """
    request = plan.request
    if plan.planner != "frontier":  # its time is all that is known of what was wanted
        if not min_dwell:
            raise InputError(
                f"only plans of the planner frontier are refined, not of {plan.planner}"
            )
        deadline = Deadline(kind="time", time_s=plan.target.deadline_s)
        request = request.model_copy(update={"deadline": deadline})
    if min_dwell:
        others = [limit for limit in request.limits if not isinstance(limit, MinDwell)]
        limits = (*others, MinDwell.of(time_s=min_dwell))
        request = request.model_copy(update={"limits": limits})
    return solve(trace_job(plan.job, profile, progress), request)


def _time_at(profile: Profile, stage: int, instruction: str) -> Callable[..., float]:
    """Time (s) by clock (MHz) and config, between the profile's clocks linear in 1 / f; 0: unknown.

    A config that the profile does not have, or "" among several, is taken for the fastest one.
    """
    fastest: dict[str | None, dict[int, int]] = defaultdict(dict)
    for mhz, config, time_ns, _ in profile.table(stage, instruction).rows():
        for key in (config, None) if mhz else ():
            fastest[key][mhz] = min(time_ns, fastest[key].get(mhz, MAX_INTEGER))

    def at(mhz: int, config: str = "") -> float:
        times = sorted(fastest.get(config, fastest[None]).items(), reverse=True)
        if not mhz or not times:
            return 0.0
        periods = [1 / clock for clock, _ in times]
        return float(np.interp(1 / mhz, periods, [s_from_ns(time_ns) for _, time_ns in times]))

    return at
