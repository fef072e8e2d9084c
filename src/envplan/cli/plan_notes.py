"""What a user should know about a plan, in sentences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from envplan.cli.output import describe_configs, exact_seconds, significant
from envplan.errors import NoAnswerError

if TYPE_CHECKING:
    from envplan.plan import Plan
    from envplan.solve import Frontier

#: A gap from which on a plan says how large it is and why.
_LARGE_GAP = 0.02


def plan_notes(frontier: Frontier, plan: Plan) -> list[str]:
    """How the target was met, what the plan was made to bear, and what that costs."""
    return [
        *describe_configs(plan),
        *_about_raw_rows(frontier, plan),
        *_about_given_clocks(frontier, plan),
        *_about_target(frontier, plan),
        *_about_straggler(frontier, plan),
        *_about_clocks(frontier, plan),
        *_about_noise(frontier, plan),
        *_about_costs(plan),
    ]


def _about_raw_rows(frontier: Frontier, plan: Plan) -> list[str]:
    """What taking out noise does to the plan: its clocks on the rows as they were measured."""
    from envplan.plan import beyond_raw_rows

    if not frontier.profile.noisy:
        return []
    noisy = "the measured rows are noisy (time rises or cost jumps with the clock against physics)"
    if not frontier.profile.adjustments.smoothed:
        return [f"{noisy}: plans and their bound hang on rows that are too fast by chance"]
    late, dearer = beyond_raw_rows(plan, frontier.profile)
    fast = " and ".join(f"{name} up to {mhz} MHz" for name, mhz in frontier.profile.jumps.items())
    return [
        f"{noisy}, so this plan is made on smooth ones; on the rows as measured its clocks take "
        f"{100 * late:+.2f}% time and {100 * dearer:+.2f}% energy (--raw plans on those"
        + (f", and counts on {fast} being faster than right above)" if fast else ")")
    ]


def _about_given_clocks(frontier: Frontier, plan: Plan) -> list[str]:
    if plan.planner != "clocks":
        return []
    ours = frontier.plan(plan.iteration_time)
    saved = plan.energy - ours.energy
    if saved <= 0:
        return ["no plan of ours uses less than these clocks in the same time"]
    return [
        f"these clocks use {significant(saved, 4)} J ({100 * saved / plan.energy:.2f}%) more than "
        f"ours do in the same time; leave --clocks out and give --target-time "
        f"{exact_seconds(plan.iteration_time)} for that plan"
    ]


def _about_target(frontier: Frontier, plan: Plan) -> list[str]:
    target, star = plan.target, frontier.min_energy_time
    notes = []
    asked = target.time_s if target.kind == "time" and target.peak_power_w is None else None
    if asked is not None and asked > star:
        notes.append(
            f"{exact_seconds(asked)} s is beyond T_star, {significant(star)} s: going "
            "slower than that would cost energy as well as time, so this is the T_star plan"
        )
    if target.kind == "power-cap" and target.deadline_s > star:
        notes.append(
            f"this is slower than T_star, {significant(star)} s, where energy is least: faster "
            "plans found draw more than the cap"
        )
    if target.peak_power_w is not None:
        from envplan.plan import replay_plan
        from envplan.units import w_from_uw

        peak = w_from_uw(replay_plan(plan, frontier.profile).peak_uw * plan.job.num_gpus)
        notes.append(
            f"at its peak it draws {significant(peak)} W, of {target.peak_power_w:g} W allowed; "
            "the gap is to a lower bound without that cap"
        )
    elif plan.gap > _LARGE_GAP and plan.planner == "frontier" and target.kind != "sync-time":
        notes.append(
            f"the certified gap of {100 * plan.gap:.2f}% is large: the lower bound knows clocks "
            "that come at once and in any step, and no limits; a later target, or --polish, "
            "brings a plan closer to it"
        )
    return notes


def _about_straggler(frontier: Frontier, plan: Plan) -> list[str]:
    straggler, star = plan.target.straggler_time_s, frontier.min_energy_time
    if straggler is None:
        return []
    if straggler <= plan.iteration_time:
        return ["the straggler is not slower than this plan, so it leaves no time to use"]
    notes = [
        f"waiting for the straggler until {significant(straggler)} s takes another "
        f"{significant(plan.waiting_energy(straggler))} J"
    ]
    if plan.iteration_time > star:
        notes.append(
            f"without the straggler, T_star's plan of {significant(star)} s would use less; "
            "while everyone waits anyway, slower clocks do"
        )
    return notes


def _about_clocks(frontier: Frontier, plan: Plan) -> list[str]:
    job, notes = plan.job, []
    if job.switch_latency_s is not None:
        notes.append(
            f"every clock comes {job.switch_latency_s * 1000:g} ms after it is asked for; time and "
            "energy are those of the replay with that"
        )
    if job.min_dwell_s is not None:
        notes.append(f"no stage asks for another clock within {job.min_dwell_s * 1000:g} ms")
    if plan.target.kind == "no-slowdown" and plan.target.deadline_s > frontier.min_time:
        notes.append(
            "T_min needs clocks that change at once, and no limits; the least time found with "
            f"these is {significant(plan.target.deadline_s)} s"
        )
    return notes


def _about_noise(frontier: Frontier, plan: Plan) -> list[str]:
    sure = plan.predicted.robustness
    if sure is None:
        return []
    asked = plan.target.deadline_s if plan.target.time_s is None else plan.target.time_s
    noise = "as the profile's time_std" if sure.noise is None else f"of {100 * sure.noise:g}%"
    what = (
        f"{sure.held_runs} of {sure.runs} replays end by {exact_seconds(asked)} s"
        if sure.iterations is None
        else f"{sure.iterations} iterations end by the deadline, as {sure.runs} replays show"
    )
    notes = [
        f"with noise {noise} {what}: a probability of at least {sure.percent_at_least} "
        f"({100 * sure.confidence:g}% confidence)"
    ]
    limits = tuple(limit for limit in plan.request.limits if limit.kind != "probability")
    exact = plan.request.model_copy(update={"limits": limits, "run": None})
    if exact.objective != "energy":
        return notes
    try:
        plain = frontier.solve(exact).energy
    except NoAnswerError:
        return notes
    return [
        *notes,
        f"that costs {significant(plan.energy - plain, 4)} J "
        f"({100 * (plan.energy / plain - 1):.2f}%) more than a plan for exact times",
    ]


def _about_costs(plan: Plan) -> list[str]:
    costs = plan.costs
    if costs is not None and plan.predicted.until_straggler is not None:
        return ["costs are those of iterations that last until the straggler has finished"]
    if costs is None or costs.deadline_s is None:
        return []
    from envplan.units import duration_text

    return [
        f"least {costs.minimized} of the plans whose run is over within "
        f"{duration_text(costs.deadline_s)}"
    ]
