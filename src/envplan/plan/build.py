"""From a replayed choice of options to a plan: its numbers, exactly, and its bound."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from envplan.frontier import Relaxation
from envplan.limits import AveragePower, EnergyBudget, MinHold, PeakPower
from envplan.plan.model import (
    PLAN_SCHEMA,
    Baseline,
    Bound,
    Job,
    Plan,
    PlannedOperation,
    Predicted,
    ProfileReference,
    Target,
    TargetKind,
    UntilStraggler,
)
from envplan.profile import Profile, builtin_paths
from envplan.replay import Problem, Replay
from envplan.request import Request
from envplan.units import UW_PER_W, j_from_fj, ns_from_s_floor, s_from_ns


def build_plan(
    frontier: Relaxation,
    replay: Replay,
    *,
    target: Target,
    request: Request | None = None,
    bound_fj: int | None = None,
    bound: Bound = "relaxation",
    planner: str = "frontier",
) -> Plan:
    """The plan of a replayed choice of options, set against the lower bound.

    Args:
        frontier: of what the replay is of.
        target: what was asked, and the deadline that was planned for.
        request: the same as a request, for plans of the planner frontier.
        bound_fj: least energy possible by the deadline for one GPU a stage, fJ; default: the
            relaxed.
        bound: what that follows from.
        planner: what chose the options.
    """
    if bound_fj is None:
        bound_fj = frontier.lower_bound_fj(max(frontier.min_time_ns, target.deadline_ns))
    gpus = frontier.num_gpus
    bound_fj = max(0, bound_fj - rounding_allowance_fj(replay)) * gpus
    hold = None if request is None else request.limit(MinHold)
    latency_ns = replay.machine.latency_ns
    job = Job(
        **frontier.pipeline.to_job(),
        gpus_per_stage=frontier.gpus_per_stage,
        replicas=frontier.replicas,
        blocking_power_w=list(frontier.blocking_power_w),
        blocking_power_source=frontier.blocking_power_source,
        switch_latency_s=s_from_ns(latency_ns) if latency_ns else None,
        min_dwell_s=None if hold is None else hold.time_s,
    )
    return plan_of(
        replay,
        job,
        bound_fj,
        bound,
        profile=_reference(frontier.profile),
        target=target,
        planner=planner,
        request=request,
    )


def plan_of(
    replay: Replay, job: Job, bound_fj: int, bound: Bound = "relaxation", **said: Any
) -> Plan:
    """The plan of a replay, with what it saves on maximum frequency.

    Args:
        bound_fj: least energy of all GPUs, fJ.
        said: further fields of the plan: planner, profile, target and request.
    """
    before = baseline(replay.problem, job.num_gpus)
    return Plan(
        schema=PLAN_SCHEMA,
        job=job,
        predicted=predict(replay, bound_fj, bound, before, job.num_gpus),
        stages=planned_operations(replay),
        **said,
    )


def target_of(request: Request, deadline_ns: int, *, least_ns: int = 0) -> Target:
    """What plan.json says was asked for.

    Args:
        deadline_ns: the time that the plan and its bound are for, ns.
        least_ns: T_min, ns, for the time that a slowdown means.
    """
    deadline = request.deadline
    peak, average = request.limit(PeakPower), request.limit(AveragePower)
    budget = request.limit(EnergyBudget)
    time_s = deadline.time_s
    kind: TargetKind = "time" if deadline.kind == "any" else deadline.kind
    if request.objective == "time":
        kind = "energy-budget" if budget else "power-cap" if average else "peak-power-cap"
    if kind == "slowdown":
        time_s = s_from_ns(deadline.asked_ns(least_ns) or 0)
    elif kind in ("no-slowdown", "min-energy") or request.objective == "cost":
        time_s = s_from_ns(deadline_ns)
    return Target(
        kind=kind,
        time_s=time_s,
        slowdown=deadline.slowdown,
        energy_j=None if budget is None else budget.energy_j,
        power_w=None if average is None else average.power_w,
        peak_power_w=None if peak is None else peak.power_w,
        straggler_time_s=request.straggler_time_s,
        deadline_s=s_from_ns(deadline_ns),
    )


def baseline(
    problem: Problem, num_gpus: int, factors: NDArray[np.float64] | None = None
) -> Baseline:
    """What the pipeline takes with every operation at its highest frequency, all GPUs.

    Args:
        factors: what each operation's time is multiplied by, (N,).
    """
    replay = problem.replay(problem.max_frequency_rows, factors=factors)
    energy_fj = replay.energy_fj * num_gpus
    return Baseline(
        iteration_time_s=s_from_ns(replay.makespan_ns),
        energy_j=j_from_fj(energy_fj),
        average_power_w=average_power_w(energy_fj, replay.makespan_ns),
    )


def predict(
    replay: Replay, bound_fj: int, bound: Bound, before: Baseline, num_gpus: int
) -> Predicted:
    """What one iteration will take.

    Args:
        bound_fj: least energy of all GPUs, fJ.
        before: the same at maximum frequency.
    """
    time_ns, energy_fj = replay.makespan_ns, replay.energy_fj * num_gpus
    time, energy, least = s_from_ns(time_ns), j_from_fj(energy_fj), j_from_fj(bound_fj)
    return Predicted(
        iteration_time_s=time,
        energy_j=energy,
        average_power_w=average_power_w(energy_fj, time_ns),
        energy_lower_bound_j=least,
        bound=bound,
        gap=gap_over(energy, least),
        baseline=before,
        savings_percent=percent(before.energy_j - energy, before.energy_j),
        slowdown_percent=percent(time - before.iteration_time_s, before.iteration_time_s),
    )


def rounding_allowance_fj(replay: Replay) -> int:
    """What the roundings of a replay may take off the relaxed bound, one GPU a stage, fJ.

    The relaxed bound holds for clocks that come late, too: an operation that does a share x of its
    work at one clock and 1 - x at another takes x t_a + (1 - x) t_b and has the effective cost
    x c_a + (1 - x) c_b: a point between two options of its table, so on or above their lower convex
    hull, which is all that the relaxation knows of it. Two roundings are left. At each change of
    clock what is left of the operation becomes a whole number of ns, up to one more than its share:
    at the power of its clock, p, this adds p - P to the effective cost, which is more than -P for
    one ns, while the relaxed curve does not rise with time. And each part's energy is rounded, by
    half a fJ at most.
    """
    if replay.machine.latency_ns == 0:
        return 0
    problem = replay.problem
    counts = np.bincount(replay.parts.operation, minlength=len(replay.rows))
    waiting_uw = problem.blocking_power_uw[problem.stage]
    return int(((counts - 1) * waiting_uw + counts)[counts > 1].sum())


def note_straggler(plan: Plan, frontier: Relaxation, replay: Replay, time: float) -> Plan:
    """The plan, with what it and its waiting for a straggler cost, against the least possible.

    Args:
        replay: of the plan.
        time: when the straggler has finished, s.
    """
    time_ns = ns_from_s_floor(time)
    target = plan.target.model_copy(update={"straggler_time_s": time})
    until = None
    if time > plan.iteration_time and time_ns >= frontier.min_time_ns:
        bound_fj = max(0, frontier.waiting_bound_fj(time_ns) - rounding_allowance_fj(replay))
        until = until_straggler(plan, time, j_from_fj(bound_fj * frontier.num_gpus))
    predicted = plan.predicted.model_copy(update={"until_straggler": until})
    return plan.model_copy(update={"target": target, "predicted": predicted})


def until_straggler(plan: Plan, time: float, lower_bound: float) -> UntilStraggler:
    """What a plan and its waiting for a straggler of `time` s cost, against a lower bound in J."""
    before = plan.predicted.baseline
    _, energy = plan.until(time, plan.iteration_time, plan.energy)
    _, usual = plan.until(time, before.iteration_time_s, before.energy_j)
    return UntilStraggler(
        energy_j=energy,
        # Both are rounded to floats.
        energy_lower_bound_j=min(lower_bound, energy),
        gap=gap_over(energy, lower_bound),
        baseline_energy_j=usual,
    )


def gap_over(energy_j: float, bound_j: float) -> float:
    """energy / bound - 1, not below 0."""
    # A profile may say that everything is free; then nothing is lost either.
    return energy_j / max(bound_j, j_from_fj(1)) - 1 if energy_j > bound_j else 0.0


def percent(part: float, whole: float) -> float:
    """100 part / whole; 0 of nothing."""
    return 100 * part / whole if whole else 0.0


def average_power_w(energy_fj: int, time_ns: int) -> float:
    """W."""
    return energy_fj / (time_ns * UW_PER_W)


def planned_operations(replay: Replay) -> list[list[PlannedOperation]]:
    """For each stage its operations as plan.json lists them."""
    problem = replay.problem
    stages: list[list[PlannedOperation]] = [[] for _ in range(problem.pipeline.num_stages)]
    for op, number, row, start in zip(
        problem.pipeline.operations,
        problem.table.tolist(),
        replay.rows.tolist(),
        replay.starts_ns.tolist(),
        strict=True,
    ):
        table = problem.tables[number]
        stages[op.stage].append(
            PlannedOperation(
                instruction=op.instruction,
                microbatch=op.microbatch,
                chunk=op.chunk,
                frequency_mhz=int(table.frequency_mhz[row]),
                config=table.config[row],
                start_s=s_from_ns(start),
                time_s=s_from_ns(table.time_ns[row]),
                energy_j=j_from_fj(table.energy_fj[row]),
            )
        )
    return stages


def _reference(profile: Profile) -> ProfileReference:
    def text(name: str) -> str:  # file names on Linux are bytes, and need not be text
        return name.encode("utf-8", "replace").decode("utf-8")

    path = profile.path
    is_named = path is None or builtin_paths().get(profile.name) == path
    return ProfileReference(
        name=text(profile.name),
        path=None if path is None or is_named else text(path.as_posix()),
        sha256=profile.sha256,
        source=profile.metadata.source,
        adjustments=profile.adjustments or None,
    )
