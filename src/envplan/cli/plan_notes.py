"""What a user should know about a plan, in sentences."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import chain

import envplan
from envplan._io.words import exact_seconds, significant
from envplan.cli.describe import describe_configs
from envplan.errors import NoAnswerError
from envplan.units import duration_text

#: A gap from which on a plan says how large it is and why.
_LARGE_GAP = 0.02


def plan_notes(frontier: envplan.Frontier, plan: envplan.Plan) -> list[str]:
    """How the target was met, what the plan was made to bear, and what that costs."""
    about = (_raw_rows, _given_clocks, _target, _conditions, _noise)
    notes = chain.from_iterable(notes(frontier, plan) for notes in about)
    return [*describe_configs(plan), *notes]


def _raw_rows(frontier: envplan.Frontier, plan: envplan.Plan) -> Iterator[str]:
    """What taking out noise does to the plan: its clocks on the rows as they were measured."""
    profile = frontier.profile
    noisy = "the measured rows are noisy (time rises or cost jumps with the clock against physics)"
    if profile.noisy and not profile.adjustments.smoothed:
        yield f"{noisy}: plans and their bound hang on rows that are too fast by chance"
    elif profile.noisy:
        from envplan.plan.build import beyond_raw_rows

        late, dearer = beyond_raw_rows(plan, profile)
        fast = " and ".join(f"{name} up to {mhz} MHz" for name, mhz in profile.jumps.items())
        yield (
            f"{noisy}, so this plan is made on smooth ones; on the rows as measured its clocks "
            f"take {100 * late:+.2f}% time and {100 * dearer:+.2f}% energy (--raw plans on those"
            + (f", and counts on {fast} being faster than right above)" if fast else ")")
        )


def _given_clocks(frontier: envplan.Frontier, plan: envplan.Plan) -> Iterator[str]:
    if plan.planner != "clocks":
        return
    saved = plan.energy - frontier.plan(plan.iteration_time).energy
    if saved <= 0:
        yield "no plan of ours uses less than these clocks in the same time"
    else:
        yield (
            f"these clocks use {significant(saved)} J ({100 * saved / plan.energy:.2f}%) more "
            f"than ours do in the same time; leave --clocks out and give --target-time "
            f"{exact_seconds(plan.iteration_time)} for that plan"
        )


def _target(frontier: envplan.Frontier, plan: envplan.Plan) -> Iterator[str]:
    target, star = plan.target, frontier.min_energy_time
    asked = target.time_s if target.kind == "time" and target.peak_power_w is None else None
    if asked is not None and asked > star:
        yield (
            f"{exact_seconds(asked)} s is beyond T_star, {significant(star)} s: going "
            "slower than that would cost energy as well as time, so this is the T_star plan"
        )
    if target.kind == "power-cap" and target.deadline_s > star:
        yield (
            f"this is slower than T_star, {significant(star)} s, where energy is least: faster "
            "plans found draw more than the cap"
        )
    explains_gap = target.peak_power_w is not None or target.kind == "sync-time"
    if plan.gap > _LARGE_GAP and plan.planner == "frontier" and not explains_gap:
        yield (
            f"the certified gap of {100 * plan.gap:.2f}% is large: the lower bound knows clocks "
            "that come at once and in any step, and no limits; a later target, or --polish, "
            "brings a plan closer to it"
        )


def _conditions(frontier: envplan.Frontier, plan: envplan.Plan) -> Iterator[str]:
    job, straggler, star = plan.job, plan.target.straggler_time_s, frontier.min_energy_time
    if straggler is not None and straggler <= plan.iteration_time:
        yield "the straggler is not slower than this plan, so it leaves no time to use"
    elif straggler is not None:
        yield (
            f"waiting for the straggler until {significant(straggler)} s takes another "
            f"{significant(plan.waiting_energy(straggler))} J"
        )
        if plan.iteration_time > star:
            yield (
                f"without the straggler, T_star's plan of {significant(star)} s would use less; "
                "while everyone waits anyway, slower clocks do"
            )
    if job.switch_latency_s is not None:
        yield (
            f"every clock comes {job.switch_latency_s * 1000:g} ms after it is asked for; time and "
            "energy are those of the replay with that"
        )
    yield from _limits(frontier, plan)
    if plan.target.kind == "no-slowdown" and plan.target.deadline_s > frontier.min_time:
        yield (
            "T_min needs clocks that change at once, and no limits; the least time found with "
            f"these is {significant(plan.target.deadline_s)} s"
        )
    if plan.costs is not None and plan.predicted.until_straggler is not None:
        yield "costs are those of iterations that last until the straggler has finished"
    elif plan.costs is not None and plan.costs.deadline_s is not None:
        yield (
            f"least {plan.costs.minimized} of the plans whose run is over within "
            f"{duration_text(plan.costs.deadline_s)}"
        )


def _limits(frontier: envplan.Frontier, plan: envplan.Plan) -> Iterator[str]:
    """What the plan's limits say of it."""
    if not plan.request.limits:
        return
    from envplan.plan import replay_plan
    from envplan.request.limits import LimitContext

    replay = replay_plan(plan, frontier.profile)
    context = LimitContext(
        plan.job.num_gpus,
        plan.target.deadline_ns,
        frontier.profile,
        sync_ns=plan.request.sync_ns,
    )
    for limit in plan.request.limits:
        yield from limit.notes(replay, context)


def _noise(frontier: envplan.Frontier, plan: envplan.Plan) -> Iterator[str]:
    sure = plan.predicted.robustness
    if sure is None:
        return
    asked = plan.target.deadline_s if plan.target.time_s is None else plan.target.time_s
    noise = "as the profile's time_std" if sure.noise is None else f"of {100 * sure.noise:g}%"
    what = (
        f"{sure.held_runs} of {sure.runs} replays end by {exact_seconds(asked)} s"
        if sure.iterations is None
        else f"{sure.iterations} iterations end by the deadline, as {sure.runs} replays show"
    )
    yield (
        f"with noise {noise} {what}: a probability of at least {sure.percent_at_least} "
        f"({100 * sure.confidence:g}% confidence)"
    )
    limits = tuple(limit for limit in plan.request.limits if limit.kind != "probability")
    exact = plan.request.model_copy(update={"limits": limits, "run": None})
    if exact.objective != "energy":
        return
    with suppress(NoAnswerError):
        plain = frontier.solve(exact).energy
        yield (
            f"that costs {significant(plan.energy - plain)} J "
            f"({100 * (plan.energy / plain - 1):.2f}%) more than a plan for exact times"
        )
