"""Proving a plan from nothing but its file and its profile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from envplan._io.documents import check_stated
from envplan.errors import InputError, NoAnswerError
from envplan.frontier import Progress, Relaxation
from envplan.plan import Plan, as_referenced, check_reference, replay_plan, rung_rows
from envplan.plan.build import check_cost, predict, until_straggler
from envplan.plan.costs import check_costs
from envplan.plan.model import told_request
from envplan.profile import Profile
from envplan.replay import Replay
from envplan.replay.noise import NoisyRun
from envplan.request.limits import LimitContext, StatedResults
from envplan.solve import trace_job
from envplan.units import (
    MAX_INTEGER,
    fj_from_j,
    j_from_fj,
    ns_from_s_floor,
    s_from_ns,
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
    if (how := profile.adjustments.by_parts) is not None:
        name, job = "profile.adjustments.by_parts", plan.job
        check_stated(f"{name}.switch_latency_s", how.switch_latency_s, job.switch_latency_s or 0.0)
        check_stated(f"{name}.min_hold_s", how.min_hold_s, job.min_dwell_s or 0.0)
    replay = replay_plan(plan, profile, force=force)
    job, stated, late = plan.job, plan.predicted, list[str]()
    if job.switch_latency_s is not None:
        late = [
            f"so it is though every clock comes {job.switch_latency_s!r} s after it is asked for"
        ]
    check_cost("predicted.", stated, replay, job.num_gpus)
    least = stated.energy_lower_bound_j
    if least > stated.energy_j:
        raise InputError(
            f"predicted.energy_lower_bound_j {least!r} lies above energy_j {stated.energy_j!r}"
        )
    true = predict(replay, job.num_gpus, fj_from_j(least), stated.bound)
    others = {"robustness": stated.robustness, "until_straggler": stated.until_straggler}
    check_stated("predicted", stated, true.model_copy(update=others), _TOLERANCE)
    # A plan's own fields say its limits once more.
    for told in told_request(plan).limits:
        kept = plan.request.limit(type(told))
        if kept != told and (kept is None or told.kind != "probability"):
            raise InputError(f"request.limits differ from the plan's own fields on {told.kind}")
    target, taken = plan.target, s_from_ns(replay.makespan_ns)
    times = [time for time in (target.deadline_s, target.time_s) if time is not None]
    for time in times:
        if replay.makespan_ns > ns_from_s_floor(time):
            raise InputError(
                f"replayed, the iteration takes {taken!r} s, more than the target of {time!r} s"
            )
    # A plan for a straggler is made for a later deadline than the one that it has to hold.
    asked_s = target.deadline_s if target.time_s is None else target.time_s
    context = LimitContext(
        job.num_gpus, ns_from_s_floor(asked_s), profile, sync_ns=plan.request.sync_ns
    )
    proved += [
        f"{len(replay.rows)} operations on {job.stages} stages, in the order of schedule "
        f"{job.schedule}",
        f"all {len(replay.rows)} frequencies, times and energies are rows of the profile",
        f"replayed, the iteration takes {plan.iteration_time!r} s and every operation starts when "
        "stated",
        f"energy recomputed from the profile is {plan.energy!r} J, as stated",
        *late,
        f"lower bound {least!r} J <= energy; gap {100 * stated.gap:.4f}%",
        f"savings {stated.savings_percent:.4f}%, slowdown {stated.slowdown_percent:.4f}% against "
        "maximum frequency everywhere",
        *_of_ladder(plan, replay, profile),
        f"{taken!r} s <= target {min(times)!r} s, to the nanosecond",
        *(limit.prove(_stated_results(plan), replay, context) for limit in plan.request.limits),
        *check_costs(plan),
    ]
    frontier = trace_job(plan.job, profile, progress, whole=False)
    return [*proved, *_of_bounds(plan, frontier)]


def _stated_results(plan: Plan) -> StatedResults:
    """What a plan states of its own results, for its limits to prove."""
    costs, run = plan.costs, None
    if costs is not None and costs.iterations is not None and costs.deadline_s is not None:
        run = NoisyRun(costs.iterations, ns_from_s_floor(costs.deadline_s))
    return StatedResults(plan.energy, plan.average_power, plan.predicted.robustness, run)


def _of_ladder(plan: Plan, replay: Replay, profile: Profile) -> Iterator[str]:
    """Every rung's frequencies, iteration time, energy and local limits, by replay."""
    if plan.ladder is None:
        return
    problem, gpus, before = replay.problem, plan.job.num_gpus, replay
    for n, rung in enumerate(plan.ladder):
        name = f"ladder[{n}]"
        slower = problem.replay(rung_rows(name, rung, problem), replay.machine)
        check_cost(f"{name}.", rung, slower, gpus)
        if slower.makespan_ns <= before.makespan_ns:
            raise InputError(f"{name} is not slower than the plan before it")
        # What each uses above waiting for as long; files have rounded numbers.
        if slower.effective_fj > before.effective_fj + _TOLERANCE * slower.energy_fj:
            raise InputError(
                f"{name} uses more than the plan before it even where there is time for both"
            )
        context = LimitContext(gpus, slower.makespan_ns, profile)
        for limit in plan.request.limits:
            if limit.is_repairable_by_moves and limit.violation(slower, context):
                raise InputError(f"{name}: {limit.explain_violation(slower, context)}")
        before = slower
    yield (
        f"the ladder's {len(plan.ladder)} slower plans take and use what they state, and each "
        "saves on those before it where there is time"
    )
    for limit in plan.request.limits:
        complaint = limit.explain_waiting(plan.job.waiting_uw)
        if complaint is not None:
            raise InputError(complaint)
        sentence = limit.prove_ladder()
        if sentence is not None:
            yield sentence


def _of_bounds(plan: Plan, frontier: Relaxation) -> Iterator[str]:
    """The lower bounds, on the plan and on its waiting for a straggler, against the frontier traced
    again, and what is used until that straggler has finished."""
    _check_kind(plan, frontier)
    deadline, straggler_s = plan.target.deadline_s, plan.target.straggler_time_s
    stated, until = plan.energy_lower_bound, plan.predicted.until_straggler
    if plan.predicted.bound == "cp-sat":
        yield f"lower bound {stated!r} J is CP-SAT's; it was not proved again"
    else:
        try:
            # Slopes are rounded down, which may bring the bound of what costs nothing below zero.
            least = max(0.0, frontier.energy_at(deadline))
        except NoAnswerError as error:
            raise InputError(f"target.deadline_s: {error}") from None
        _check_provable("predicted", stated, least)
        yield f"lower bound proved: no plan by {deadline!r} s uses less than {least!r} J"
    if until is None:
        return
    name, stated = "predicted.until_straggler", until.energy_lower_bound_j
    if straggler_s is None or not plan.iteration_time < straggler_s <= MAX_INTEGER:
        raise InputError(f"{name} goes with a target.straggler_time_s to wait for")
    bound_fj = max(0, frontier.waiting_bound_fj(ns_from_s_floor(straggler_s)))
    least = j_from_fj(bound_fj * plan.job.num_gpus)
    _check_provable(name, stated, least)
    check_stated(name, until, until_straggler(plan, straggler_s, stated), _TOLERANCE)
    yield (
        f"until the straggler has finished at {straggler_s!r} s, {until.energy_j!r} J are used; no "
        f"plan in time for it uses less than {least!r} J"
    )


def _check_provable(name: str, stated: float, least: float) -> None:
    if stated > least * (1 + _TOLERANCE):
        raise InputError(f"{name}.energy_lower_bound_j is {stated!r}; only {least!r} can be proved")


def _check_kind(plan: Plan, frontier: Relaxation) -> None:
    """That the deadline is the one which the kind of target means."""
    target, least, star = plan.target, frontier.min_time_ns, frontier.min_energy_time_ns
    is_limited = bool(plan.request.limits or plan.job.switch_latency_s)
    kind, asked_s = target.kind, plan.iteration_time if target.time_s is None else target.time_s
    if kind == "no-slowdown":  # T_min may be out of reach: the least time found then
        meant = max(least, target.deadline_ns) if is_limited else least
    elif kind == "slowdown":
        meant = least + int(least * (target.slowdown or 0.0))
    elif kind in ("time", "sync-time", "planner"):
        meant = ns_from_s_floor(asked_s)
    elif kind == "min-energy" and not is_limited:
        meant = star
    else:
        return
    # Nothing uses less later than T_star, unless it is kept from using that little by then.
    if kind in ("slowdown", "time") and not (is_limited and target.deadline_ns == meant):
        meant = min(meant, star)
    if target.straggler_time_s is not None:
        # The time that a straggler leaves may be used.
        meant = max(meant, min(ns_from_s_floor(target.straggler_time_s), target.deadline_ns))
    if target.deadline_s != s_from_ns(meant):
        raise InputError(
            f"target.deadline_s is {target.deadline_s!r}; {kind} means {s_from_ns(meant)!r}"
        )
