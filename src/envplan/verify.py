"""Proving a plan from nothing but its file and its profile."""

from __future__ import annotations

import math
from typing import Final

from envplan.costs import check_costs
from envplan.errors import InputError, NoAnswerError
from envplan.frontier import Progress, Relaxation
from envplan.limits import Limit, PeakPower, Setting
from envplan.plan import (
    Baseline,
    Plan,
    UntilStraggler,
    as_referenced,
    check_operations,
    check_reference,
    gap_over,
    machine_of,
    replay_plan,
    rung_rows,
)
from envplan.plan.build import baseline, predict, until_straggler
from envplan.plan.model import told_limits
from envplan.profile import Profile
from envplan.replay import Replay
from envplan.solve import trace_job
from envplan.units import (
    MAX_INTEGER,
    fj_from_j,
    j_from_fj,
    ns_from_s,
    ns_from_s_floor,
    s_from_ns,
    uw_from_w,
    w_from_uw,
)

__all__ = ["verify_plan"]

#: How far above its re-traced value a stated lower bound may lie: it was rounded to a float.
_BOUND_TOLERANCE: Final = 1e-9
#: How far derived numbers (percentages, gap, average power) may lie from their recomputation.
_DERIVED_TOLERANCE: Final = 1e-9


def verify_plan(
    plan: Plan,
    profile: Profile,
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> list[str]:
    """Prove a plan from nothing but itself and its profile.

    Args:
        force: go on though the profile has changed since the plan was made.
        progress: as for trace_frontier, which is run again to prove the lower bound.

    Returns:
        A sentence for everything that was proved, in order.

    Raises:
        InputError: the first thing that is not so.
    """
    proved = [check_reference(plan.profile, profile, force)]
    profile = as_referenced(plan.profile, profile)
    proved += [f"derived from the profile: {line}" for line in profile.adjustments.in_words()]
    _check_by_parts(plan)
    replay = replay_plan(plan, profile, force=force)
    limits = _checked_limits(plan)
    setting = Setting(plan.job.num_gpus, plan.target.deadline_ns, profile)
    proved.append(check_operations(plan, replay.problem.pipeline))
    proved.append(f"all {len(replay.rows)} frequencies, times and energies are rows of the profile")
    proved += _check_replay(plan, replay)
    proved += _check_ladder(plan, replay, profile, limits)
    proved += _check_derived(plan, replay)
    proved += _check_target(plan, replay.makespan_ns)
    proved += [limit.prove(plan, replay, setting) for limit in limits]
    proved += check_costs(plan)
    frontier = trace_job(plan.job, profile, progress, whole=False)
    return [*proved, _check_bound(plan, frontier), *_check_until_straggler(plan, frontier)]


def _check_by_parts(plan: Plan) -> None:
    """That clocks by part come as late, and are held as long, as the job says.

    Raises:
        InputError: they do not.
    """
    adjustments, job = plan.profile.adjustments, plan.job
    how = None if adjustments is None else adjustments.by_parts
    if how is None:
        return
    for name, stated, due in (
        ("switch_latency_s", how.switch_latency_s, job.switch_latency_s),
        ("min_hold_s", how.min_hold_s, job.min_dwell_s),
    ):
        if stated != (due or 0.0):
            raise InputError(
                f"profile.adjustments.by_parts.{name} is {stated!r}; the job says {due or 0.0!r}"
            )


def _checked_limits(plan: Plan) -> tuple[Limit, ...]:
    """The limits that a plan states.

    Raises:
        InputError: its fields and its request differ on them.
    """
    limits = plan.request.limits
    for told in told_limits(plan):
        stated = plan.request.limit(type(told))
        same = stated == told or (stated is not None and told.kind == "probability")
        if not same:
            raise InputError(f"request.limits differ from the plan's own fields on {told.kind}")
    return limits


def _check_replay(plan: Plan, replay: Replay) -> list[str]:
    """Start times, iteration time and energy against the exact replay."""
    places = [(s, k) for s, stage in enumerate(plan.stages) for k in range(len(stage))]
    for (s, k), start_ns in zip(places, replay.starts_ns.tolist(), strict=True):
        stated, true = plan.stages[s][k].start_s, s_from_ns(start_ns)
        if stated != true:
            raise InputError(f"stages[{s}][{k}].start_s is {stated!r}; replayed it is {true!r}")
    time, energy = s_from_ns(replay.makespan_ns), j_from_fj(replay.energy_fj * plan.job.num_gpus)
    for field, stated, true in (
        ("iteration_time_s", plan.iteration_time, time),
        ("energy_j", plan.energy, energy),
    ):
        if stated != true:
            raise InputError(f"predicted.{field} is {stated!r}; recomputed it is {true!r}")
    proved = [
        f"replayed, the iteration takes {time!r} s and every operation starts when stated",
        f"energy recomputed from the profile is {energy!r} J, as stated",
    ]
    latency = plan.job.switch_latency_s
    if latency is not None:
        proved.append(f"so it is though every clock comes {latency!r} s after it is asked for")
    return proved


def _check_ladder(
    plan: Plan, replay: Replay, profile: Profile, limits: tuple[Limit, ...]
) -> list[str]:
    """Every rung's frequencies, iteration time, energy and local limits, by replay."""
    if plan.ladder is None:
        return []
    problem, machine = replay.problem, machine_of(plan.job)
    last = ns_from_s(plan.iteration_time)
    least = plan.job.above_waiting_fj(plan.iteration_time, plan.energy)
    for n, rung in enumerate(plan.ladder):
        name = f"ladder[{n}]"
        slower = problem.replay(rung_rows(name, rung, problem, profile), machine)
        time = s_from_ns(slower.makespan_ns)
        energy = j_from_fj(slower.energy_fj * plan.job.num_gpus)
        for field, stated, true in (
            ("iteration_time_s", rung.iteration_time_s, time),
            ("energy_j", rung.energy_j, energy),
        ):
            if stated != true:
                raise InputError(f"{name}.{field} is {stated!r}; recomputed it is {true!r}")
        if slower.makespan_ns <= last:
            raise InputError(f"{name} is not slower than the plan before it")
        above = plan.job.above_waiting_fj(time, energy)
        if above > least + _DERIVED_TOLERANCE * fj_from_j(energy):
            raise InputError(
                f"{name} uses more than the plan before it even where there is time for both"
            )
        setting = Setting(plan.job.num_gpus, slower.makespan_ns, profile)
        for limit in limits:
            if limit.is_local and limit.excess(slower, setting):
                raise InputError(f"{name}: {limit.broken(slower, setting)}")
        last, least = slower.makespan_ns, above
    proved = [
        f"the ladder's {len(plan.ladder)} slower plans take and use what they state, and each "
        "saves on those before it where there is time"
    ]
    peak = plan.request.limit(PeakPower)
    if peak is None:
        return proved
    waiting_uw = sum(replay.problem.blocking_power_uw.tolist()) * plan.job.num_gpus
    if waiting_uw > uw_from_w(peak.power_w):
        raise InputError(
            f"GPUs that wait for a straggler draw {w_from_uw(waiting_uw)!r} W, more than the "
            f"{peak.power_w!r} W allowed"
        )
    return [*proved, f"none of them ever draws more than {peak.power_w!r} W"]


def _check_derived(plan: Plan, replay: Replay) -> list[str]:
    """Baseline, savings, gap and averages against their recomputation."""
    stated = plan.predicted
    if stated.energy_lower_bound_j > stated.energy_j:
        raise InputError(
            f"predicted.energy_lower_bound_j {stated.energy_lower_bound_j!r} lies above energy_j "
            f"{stated.energy_j!r}"
        )
    gpus = plan.job.num_gpus
    true = predict(replay, 0, stated.bound, baseline(replay.problem, gpus), gpus)
    gap = gap_over(stated.energy_j, stated.energy_lower_bound_j)
    for field, found, right in (
        ("average_power_w", stated.average_power_w, true.average_power_w),
        ("gap", stated.gap, gap),
        ("savings_percent", stated.savings_percent, true.savings_percent),
        ("slowdown_percent", stated.slowdown_percent, true.slowdown_percent),
        *(
            (f"baseline.{name}", getattr(stated.baseline, name), getattr(true.baseline, name))
            for name in Baseline.model_fields
        ),
    ):
        if not _close(found, right):
            raise InputError(f"predicted.{field} is {found!r}; recomputed it is {right!r}")
    return [
        f"lower bound {stated.energy_lower_bound_j!r} J <= energy; gap {100 * gap:.4f}%",
        f"savings {stated.savings_percent:.4f}%, slowdown {stated.slowdown_percent:.4f}% against "
        "maximum frequency everywhere",
    ]


def _check_target(plan: Plan, makespan_ns: int) -> list[str]:
    """The deadline, exactly."""
    target = plan.target
    times = [time for time in (target.deadline_s, target.time_s) if time is not None]
    for limit in times:
        if makespan_ns > ns_from_s_floor(limit):
            raise InputError(
                f"replayed, the iteration takes {s_from_ns(makespan_ns)!r} s, more than the "
                f"target of {limit!r} s"
            )
    return [f"{s_from_ns(makespan_ns)!r} s <= target {min(times)!r} s, to the nanosecond"]


def _check_bound(plan: Plan, frontier: Relaxation) -> str:
    """The lower bound against that of the frontier, traced again."""
    _check_kind(plan, frontier)
    stated, deadline = plan.energy_lower_bound, plan.target.deadline_s
    if plan.predicted.bound == "cp-sat":
        return f"lower bound {stated!r} J is CP-SAT's; it was not proved again"
    try:
        # Slopes are rounded down, which may bring the bound of what costs nothing below zero.
        least = max(0.0, frontier.energy_at(deadline))
    except NoAnswerError as error:
        raise InputError(f"target.deadline_s: {error}") from None
    if stated > least * (1 + _BOUND_TOLERANCE):
        raise InputError(
            f"predicted.energy_lower_bound_j is {stated!r}; only {least!r} can be proved"
        )
    return f"lower bound proved: no plan by {deadline!r} s uses less than {least!r} J"


def _check_until_straggler(plan: Plan, frontier: Relaxation) -> list[str]:
    """What is used until a straggler has finished, and the lower bound on it."""
    stated, time = plan.predicted.until_straggler, plan.target.straggler_time_s
    if stated is None:
        return []
    if time is None or not plan.iteration_time < time <= MAX_INTEGER:
        raise InputError(
            "predicted.until_straggler goes with a target.straggler_time_s to wait for"
        )
    bound_fj = max(0, frontier.waiting_bound_fj(ns_from_s_floor(time))) * plan.job.num_gpus
    least, bound = j_from_fj(bound_fj), stated.energy_lower_bound_j
    if bound > least * (1 + _BOUND_TOLERANCE):
        raise InputError(
            f"predicted.until_straggler.energy_lower_bound_j is {bound!r}; only {least!r} can be "
            "proved"
        )
    true = until_straggler(plan, time, bound)
    for field in UntilStraggler.model_fields:
        found, right = getattr(stated, field), getattr(true, field)
        if not _close(found, right):
            raise InputError(
                f"predicted.until_straggler.{field} is {found!r}; recomputed it is {right!r}"
            )
    return [
        f"until the straggler has finished at {time!r} s, {stated.energy_j!r} J are used; no plan "
        f"in time for it uses less than {least!r} J"
    ]


def _check_kind(plan: Plan, frontier: Relaxation) -> None:
    """That the deadline is the one which the kind of target means."""
    target, least, star = plan.target, frontier.min_time_ns, frontier.min_energy_time_ns
    is_limited = bool(plan.request.limits or plan.job.switch_latency_s)
    match target.kind:
        case "no-slowdown" if is_limited:
            # T_min may be out of reach: the least time found then.
            meant = max(least, ns_from_s(target.deadline_s))
        case "no-slowdown":
            meant = least
        case "slowdown":
            meant = least + int(least * (target.slowdown or 0.0))
        case "time" | "sync-time":
            meant = ns_from_s_floor(target.time_s or 0.0)
        case "min-energy" if not is_limited:
            meant = star
        case "planner":
            asked = plan.iteration_time if target.time_s is None else target.time_s
            meant = ns_from_s_floor(asked)
        case _:
            return
    # Nothing uses less later than T_star, unless it is kept from using that little by then.
    if target.kind in ("slowdown", "time") and not (is_limited and target.deadline_ns == meant):
        meant = min(meant, star)
    if target.straggler_time_s is not None:
        # The time that a straggler leaves may be used.
        meant = max(meant, min(ns_from_s_floor(target.straggler_time_s), target.deadline_ns))
    if target.deadline_s != s_from_ns(meant):
        raise InputError(
            f"target.deadline_s is {target.deadline_s!r}; {target.kind} means {s_from_ns(meant)!r}"
        )


def _close(found: float, right: float) -> bool:
    return math.isclose(found, right, rel_tol=_DERIVED_TOLERANCE, abs_tol=_DERIVED_TOLERANCE)
