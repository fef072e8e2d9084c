"""Proving a plan from nothing but its file and its profile."""

from __future__ import annotations

from typing import Final

from envplan._model import check_stated
from envplan.costs import check_costs
from envplan.errors import InputError, NoAnswerError
from envplan.frontier import Progress, Relaxation
from envplan.limits import Limit, PeakPower, Setting
from envplan.plan import (
    Plan,
    Rung,
    as_referenced,
    check_operations,
    check_reference,
    machine_of,
    replay_plan,
    rung_rows,
)
from envplan.plan.build import baseline, predict, until_straggler
from envplan.plan.model import Predicted, told_request
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

#: How far stated bounds, percentages and averages may lie from their recomputation: they were
#: rounded to floats.
_TOLERANCE: Final = 1e-9


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
    if profile.adjustments.by_parts is not None:
        how = profile.adjustments.by_parts
        name = "profile.adjustments.by_parts"
        check_stated(
            f"{name}.switch_latency_s", how.switch_latency_s, plan.job.switch_latency_s or 0.0
        )
        check_stated(f"{name}.min_hold_s", how.min_hold_s, plan.job.min_dwell_s or 0.0)
    replay = replay_plan(plan, profile, force=force)
    limits = _checked_limits(plan)
    setting = Setting(plan.job.num_gpus, plan.target.deadline_ns, profile)
    proved.append(check_operations(plan, replay.problem.pipeline))
    proved.append(f"all {len(replay.rows)} frequencies, times and energies are rows of the profile")
    proved += _check_replay(plan, replay)
    proved += _check_ladder(plan, replay, profile, limits)
    proved += _check_target(plan, replay.makespan_ns)
    proved += [limit.prove(plan, replay, setting) for limit in limits]
    proved += check_costs(plan)
    frontier = trace_job(plan.job, profile, progress, whole=False)
    return [*proved, _check_bound(plan, frontier), *_check_until_straggler(plan, frontier)]


def _checked_limits(plan: Plan) -> tuple[Limit, ...]:
    """The limits that a plan states.

    Raises:
        InputError: its fields and its request differ on them.
    """
    limits = plan.request.limits
    for told in told_request(plan).limits:
        stated = plan.request.limit(type(told))
        same = stated == told or (stated is not None and told.kind == "probability")
        if not same:
            raise InputError(f"request.limits differ from the plan's own fields on {told.kind}")
    return limits


def _check_replay(plan: Plan, replay: Replay) -> list[str]:
    """Iteration time and energy against the exact replay, and what follows from them."""
    stated, gpus = plan.predicted, plan.job.num_gpus
    _check_cost("predicted", plan.predicted, replay, gpus)
    if stated.energy_lower_bound_j > stated.energy_j:
        raise InputError(
            f"predicted.energy_lower_bound_j {stated.energy_lower_bound_j!r} lies above energy_j "
            f"{stated.energy_j!r}"
        )
    bound_fj = fj_from_j(stated.energy_lower_bound_j)
    true = predict(replay, bound_fj, stated.bound, baseline(replay.problem, gpus), gpus)
    others = {"robustness": stated.robustness, "until_straggler": stated.until_straggler}
    check_stated("predicted", stated, true.model_copy(update=others), _TOLERANCE)
    proved = [
        f"replayed, the iteration takes {plan.iteration_time!r} s and every operation starts when "
        "stated",
        f"energy recomputed from the profile is {plan.energy!r} J, as stated",
    ]
    latency = plan.job.switch_latency_s
    if latency is not None:
        proved.append(f"so it is though every clock comes {latency!r} s after it is asked for")
    return [
        *proved,
        f"lower bound {stated.energy_lower_bound_j!r} J <= energy; gap {100 * stated.gap:.4f}%",
        f"savings {stated.savings_percent:.4f}%, slowdown {stated.slowdown_percent:.4f}% against "
        "maximum frequency everywhere",
    ]


def _check_cost(name: str, stated: Predicted | Rung, replay: Replay, gpus: int) -> None:
    """Iteration time and energy of a plan or a rung, exactly."""
    time_s, energy_j = s_from_ns(replay.makespan_ns), j_from_fj(replay.energy_fj * gpus)
    check_stated(f"{name}.iteration_time_s", stated.iteration_time_s, time_s)
    check_stated(f"{name}.energy_j", stated.energy_j, energy_j)


def _check_ladder(
    plan: Plan, replay: Replay, profile: Profile, limits: tuple[Limit, ...]
) -> list[str]:
    """Every rung's frequencies, iteration time, energy and local limits, by replay."""
    if plan.ladder is None:
        return []
    problem, gpus = replay.problem, plan.job.num_gpus
    before = replay
    for n, rung in enumerate(plan.ladder):
        name = f"ladder[{n}]"
        slower = problem.replay(rung_rows(name, rung, problem), machine_of(plan.job))
        _check_cost(name, rung, slower, gpus)
        if slower.makespan_ns <= before.makespan_ns:
            raise InputError(f"{name} is not slower than the plan before it")
        # What each uses above waiting for as long; files have rounded numbers.
        if slower.energy_until(0) > before.energy_until(0) + _TOLERANCE * slower.energy_fj:
            raise InputError(
                f"{name} uses more than the plan before it even where there is time for both"
            )
        setting = Setting(gpus, slower.makespan_ns, profile)
        for limit in limits:
            if limit.is_local and limit.excess(slower, setting):
                raise InputError(f"{name}: {limit.broken(slower, setting)}")
        before = slower
    proved = [
        f"the ladder's {len(plan.ladder)} slower plans take and use what they state, and each "
        "saves on those before it where there is time"
    ]
    peak = plan.request.limit(PeakPower)
    if peak is None:
        return proved
    waiting_uw = sum(problem.blocking_power_uw.tolist()) * gpus
    if waiting_uw > uw_from_w(peak.power_w):
        raise InputError(
            f"GPUs that wait for a straggler draw {w_from_uw(waiting_uw)!r} W, more than the "
            f"{peak.power_w!r} W allowed"
        )
    return [*proved, f"none of them ever draws more than {peak.power_w!r} W"]


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
    if stated > least * (1 + _TOLERANCE):
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
    if bound > least * (1 + _TOLERANCE):
        raise InputError(
            f"predicted.until_straggler.energy_lower_bound_j is {bound!r}; only {least!r} can be "
            "proved"
        )
    check_stated(
        "predicted.until_straggler", stated, until_straggler(plan, time, bound), _TOLERANCE
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
