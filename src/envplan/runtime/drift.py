"""Drift: the times of operations in a run, against the profile that its plan was made from.

The profile's times are scaled by what was measured, one factor for each instruction on each stage,
and its energies with them: a GPU that takes longer at the same clock draws about the same power.
The plan is then made anew for the same target.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING, Final, NamedTuple

from envplan._io.words import counted
from envplan.errors import InputError
from envplan.runtime.run_log_reader import LoggedStep
from envplan.units import j_from_10fj, s_from_ns

if TYPE_CHECKING:  # the planner is imported where it is used: nodes that follow need none of it
    from envplan.plan import Plan
    from envplan.profile import Profile

__all__ = ["Drift", "measure_drift", "replan", "rescale"]

#: Iterations of each rank that are not used: memory is first allocated and kernels chosen in them.
WARM_UP_ITERATIONS: Final = 1


@dataclass(frozen=True)
class Drift:
    """The measured times of an instruction on a stage of the profile, against the planned ones.

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


def measure_drift(plan: Plan, profile: Profile, iterations: Iterable[LoggedStep]) -> list[Drift]:
    """Compare a run with the profile its plan was made from.

    Args:
        plan: that the run's frequency plan was made from.
        profile: of that plan.
        iterations: of the run.

    Returns:
        One for each (stage, instruction) that was measured, in order.

    Raises:
        InputError: the iterations do not fit the plan, or hold no times at clocks that were set.
    """
    from envplan.plan import as_referenced

    profile = as_referenced(plan.profile, profile)
    planned_times = _planned_times(plan, profile)
    comparisons: dict[_ProfiledInstruction, _Comparison] = defaultdict(_Comparison)
    for iteration in iterations:
        if iteration.step < WARM_UP_ITERATIONS:
            continue
        for times in iteration.operations:
            kind = _OperationKind(iteration.stage, times.instruction, times.chunk)
            planned = planned_times.get(kind)
            if planned is None:
                raise InputError(
                    f"the run log has {times.instruction} on stage {iteration.stage}, chunk "
                    f"{times.chunk}, which the plan has not; is it another plan's?"
                )
            planned_s = planned.time_s_at(times.frequency_mhz, times.config)
            if times.frequency_mhz and planned_s > 0 and times.mean_s > 0:
                key = _ProfiledInstruction(planned.profile_stage, times.instruction)
                comparisons[key].ratios.append(times.mean_s / planned_s)
                comparisons[key].samples += times.num_operations
    if not comparisons:
        raise InputError(
            "the run log has no measured times after the first "
            f"{counted(WARM_UP_ITERATIONS, 'iteration')}; let the run go on for longer"
        )
    drifts = []
    for key in sorted(comparisons):
        factor, samples = median(comparisons[key].ratios), comparisons[key].samples
        drifts.append(Drift(key.stage, key.instruction, factor, samples))
    return drifts


class _ProfiledInstruction(NamedTuple):
    """An instruction on a stage of the profile, which has one factor."""

    stage: int
    instruction: str


class _OperationKind(NamedTuple):
    """The operations of a stage of the pipeline that do the same work."""

    stage: int
    instruction: str
    chunk: int


@dataclass
class _Comparison:
    """Measured times of an instruction on a stage of the profile against planned ones.

    Attributes:
        ratios: measured over planned, one for each iteration and kind of operation.
        samples: operations that these are the means of.
    """

    ratios: list[float] = field(default_factory=list)
    samples: int = 0


@dataclass(frozen=True)
class _PlannedTimes:
    """The times that the profile has for one kind of operation.

    Attributes:
        profile_stage: the stage of the profile that has them.
        time_s_at: the time, s, by clock (MHz) and config; 0: not known.
    """

    profile_stage: int
    time_s_at: Callable[[int, str], float]


def _planned_times(plan: Plan, profile: Profile) -> dict[_OperationKind, _PlannedTimes]:
    """The planned times of every kind of operation of a plan."""
    planned_times: dict[_OperationKind, _PlannedTimes] = {}
    for operation in plan.job.pipeline().operations:
        kind = _OperationKind(operation.stage, operation.instruction, operation.chunk)
        if kind not in planned_times:
            time_s_at = _time_by_setting(profile, operation.profile_stage, operation.instruction)
            planned_times[kind] = _PlannedTimes(operation.profile_stage, time_s_at)
    return planned_times


def _time_by_setting(profile: Profile, stage: int, instruction: str) -> Callable[[int, str], float]:
    """Time (s) by clock (MHz) and config, between the profile's clocks linear in 1 / f; 0: unknown.

    A config that the profile does not have, or "" among several, is taken for the fastest one.
    """
    import numpy as np

    times_by_config: dict[str, dict[int, int]] = defaultdict(dict)  # ns by clock
    fastest_times: dict[int, int] = {}  # of any config
    for mhz, config, time_ns, _energy_10fj in profile.table(stage, instruction).options():
        if mhz:
            _keep_shortest(times_by_config[config], mhz, time_ns)
            _keep_shortest(fastest_times, mhz, time_ns)

    def time_s_at(mhz: int, config: str) -> float:
        times_ns = times_by_config.get(config, fastest_times)
        if not mhz or not times_ns:
            return 0.0
        clocks_mhz = sorted(times_ns, reverse=True)
        periods = [1 / clock_mhz for clock_mhz in clocks_mhz]
        times_s = [s_from_ns(times_ns[clock_mhz]) for clock_mhz in clocks_mhz]
        return float(np.interp(1 / mhz, periods, times_s))

    return time_s_at


def _keep_shortest(times_ns: dict[int, int], mhz: int, time_ns: int) -> None:
    """Enter a time, ns by clock, unless there is a shorter one."""
    times_ns[mhz] = min(time_ns, times_ns.get(mhz, time_ns))


def rescale(profile: Profile, drifts: Iterable[Drift]) -> Profile:
    """The profile with the times and energies that the drifts make of them.

    What was derived from the profile's rows is written out, and is measured from now on.

    Raises:
        InputError: a time or energy becomes too large for a profile.
    """
    from envplan.profile import BLOCKING, INCLUDES_RECOMPUTATION, Profile

    factors = {(drift.stage, drift.instruction): drift.factor for drift in drifts}
    rows: list[tuple[object, ...]] = []
    for stage in range(profile.num_stages):
        for table in profile.tables(stage):
            factor = factors.get((stage, table.instruction), 1.0)
            for mhz, config, time_ns, energy_10fj in table.options():
                time_s = s_from_ns(round(time_ns * factor))
                energy_j = j_from_10fj(round(energy_10fj * factor))
                rows.append((stage, table.instruction, mhz, time_s, energy_j, config))
        if profile.blocking_power_w is not None:
            rows.append((stage, BLOCKING, 0, 1.0, profile.blocking_power_w[stage], ""))
    metadata = profile.metadata
    extra = {
        **metadata.extra,
        "refined_from_sha256": profile.sha256,
        "refined_factors": [[*key, factor] for key, factor in sorted(factors.items())],
    }
    if profile.adjustments.recompute:
        extra[INCLUDES_RECOMPUTATION] = True
    return Profile.from_rows(
        rows, name=f"{profile.name}.refined", metadata=replace(metadata, extra=extra)
    )


def replan(
    plan: Plan,
    profile: Profile,
    progress: Callable[[int, int], None] | None = None,
    *,
    min_dwell: float = 0.0,
) -> Plan:
    """Plan again for the same job and target, from another profile or with clocks that last.

    Args:
        plan: the plan so far.
        profile: the other profile.
        progress: see trace_job.
        min_dwell: least s between two requests of a stage for another clock; 0: as before.

    Raises:
        InputError: the plan was not chosen from the frontier, and no dwell is asked for.
        NoAnswerError: the target cannot be met any more; says what can.
    """
    from envplan.request import Deadline
    from envplan.request.limits import MinDwell
    from envplan.solve import trace_job

    request = plan.request
    if plan.planner != "frontier":  # its time is all that is known of what was wanted
        if not min_dwell:
            raise InputError(
                f"only plans of the planner frontier are refined, not of {plan.planner}"
            )
        deadline = Deadline(kind="time", time_s=plan.target.deadline_s)
        request = request.model_copy(update={"deadline": deadline})
    if min_dwell:
        other_limits = [limit for limit in request.limits if not isinstance(limit, MinDwell)]
        limits = (*other_limits, MinDwell.of(time_s=min_dwell))
        request = request.model_copy(update={"limits": limits})
    return trace_job(plan.job, profile, progress).solve(request, doubts=False)
