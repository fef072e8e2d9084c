"""Notes for a user about a plan, in sentences."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Final

import envplan
from envplan._io.words import exact_seconds, significant
from envplan.cli.describe import describe_configs, describe_machine
from envplan.cli.late_clocks import late_clocks
from envplan.errors import NoAnswerError
from envplan.units import duration_text

#: A gap from which on a plan says how large it is and why.
_LARGE_GAP: Final = 0.02


def plan_notes(frontier: envplan.Frontier, plan: envplan.Plan) -> list[str]:
    """How the target was met, what the plan was made to bear, and what that costs."""
    return [
        *describe_configs(plan),
        *_model_error(frontier, plan),
        *_noisy_rows(frontier, plan),
        *_given_clocks(frontier, plan),
        *_target(frontier, plan),
        *_straggler(frontier, plan),
        *_conditions(frontier, plan),
        *late_clocks(frontier.profile, plan),
        *_costs(plan),
        *_probability(frontier, plan),
    ]


def _model_error(frontier: envplan.Frontier, plan: envplan.Plan) -> Iterator[str]:
    """The range of the savings, where the model behind the profile says how far it is off."""
    from envplan.plan.model_error import savings_by_model_error

    savings = savings_by_model_error(plan, frontier.profile)
    if savings is None:
        return
    yield (
        f"{plan.predicted.savings_percent:.1f}% saved ({savings.low_percent:.0f} to "
        f"{savings.high_percent:.0f} by the model's error, one standard deviation)"
    )


def _noisy_rows(frontier: envplan.Frontier, plan: envplan.Plan) -> Iterator[str]:
    """Time and energy of the plan's clocks on the rows as they were measured, with their noise."""
    profile = frontier.profile
    if not profile.noisy:
        return
    noisy = "the measured rows are noisy (time rises or cost jumps with the clock against physics)"
    if not profile.adjustments.smoothed:
        yield f"{noisy}: plans and their bound hang on rows that are too fast by chance"
        return
    from envplan.plan.build import beyond_raw_rows

    extra_time, extra_energy = beyond_raw_rows(plan, profile)
    jumps = " and ".join(f"{name} up to {mhz} MHz" for name, mhz in profile.jumps.items())
    counted_on = f", and counts on {jumps} being faster than right above" if jumps else ""
    yield (
        f"{noisy}, so this plan is made on smooth ones; on the rows as measured its clocks "
        f"take {100 * extra_time:+.2f}% time and {100 * extra_energy:+.2f}% energy (--raw plans on "
        f"those{counted_on})"
    )


def _given_clocks(frontier: envplan.Frontier, plan: envplan.Plan) -> Iterator[str]:
    """The savings of our own plan, where the clocks come from a file."""
    if plan.planner != "clocks":
        return
    excess_j = plan.energy - frontier.plan(plan.iteration_time, switch_latency=0.0).energy
    if excess_j <= 0:
        yield "no plan of ours uses less than these clocks in the same time"
    else:
        yield (
            f"these clocks use {significant(excess_j)} J ({100 * excess_j / plan.energy:.2f}%) "
            f"more than ours do in the same time; leave --clocks out and give --target-time "
            f"{exact_seconds(plan.iteration_time)} for that plan"
        )


def _target(frontier: envplan.Frontier, plan: envplan.Plan) -> Iterator[str]:
    """Why the plan is slower or faster than the target, and why its gap is large."""
    target, t_star_s = plan.target, frontier.min_energy_time
    is_time = target.kind == "time" and target.peak_power_w is None
    if is_time and target.time_s is not None and target.time_s > t_star_s:
        yield (
            f"{exact_seconds(target.time_s)} s is beyond T_star, {significant(t_star_s)} s: going "
            "slower than that would cost energy as well as time, so this is the T_star plan"
        )
    if target.kind == "power-cap" and target.deadline_s > t_star_s:
        yield (
            f"this is slower than T_star, {significant(t_star_s)} s, where energy is least: faster "
            "plans found draw more than the cap"
        )
    explains_gap = target.peak_power_w is not None or target.kind == "sync-time"
    if plan.gap > _LARGE_GAP and plan.planner == "frontier" and not explains_gap:
        knows_late_clocks = plan.predicted.bound == "late-clocks"
        known = "no limits but on clocks" if knows_late_clocks else "clocks that come at once"
        yield (
            f"the certified gap of {100 * plan.gap:.2f}% is large: the lower bound knows {known} "
            "and mixes of steps; a later target, or --polish, brings a plan closer to it"
        )


def _straggler(frontier: envplan.Frontier, plan: envplan.Plan) -> Iterator[str]:
    """The cost of waiting for a straggler."""
    straggler_s, t_star_s = plan.target.straggler_time_s, frontier.min_energy_time
    if straggler_s is None:
        return
    if straggler_s <= plan.iteration_time:
        yield "the straggler is not slower than this plan, so it leaves no time to use"
        return
    yield (
        f"waiting for the straggler until {significant(straggler_s)} s takes another "
        f"{significant(plan.waiting_energy(straggler_s))} J"
    )
    if plan.iteration_time > t_star_s:
        yield (
            f"without the straggler, T_star's plan of {significant(t_star_s)} s would use less; "
            "while everyone waits anyway, slower clocks do"
        )


def _conditions(frontier: envplan.Frontier, plan: envplan.Plan) -> Iterator[str]:
    """The effect of late clocks and limits on the plan."""
    machine = plan.job.machine
    if machine.latency_ns:
        yield f"{describe_machine(machine)}; time and energy are those of the replay with that"
    yield from _limits(frontier, plan)
    if plan.target.kind == "no-slowdown" and plan.target.deadline_s > frontier.min_time:
        yield (
            "T_min needs clocks that change at once, and no limits; the least time found with "
            f"these is {significant(plan.target.deadline_s)} s"
        )


def _costs(plan: envplan.Plan) -> Iterator[str]:
    """The work that is priced, and the objective that the plan was chosen for."""
    if plan.costs is None:
        return
    if plan.predicted.until_straggler is not None:
        yield "costs are those of iterations that last until the straggler has finished"
    elif plan.costs.deadline_s is not None:
        yield (
            f"least {plan.costs.minimized} of the plans whose run is over within "
            f"{duration_text(plan.costs.deadline_s)}"
        )


def _limits(frontier: envplan.Frontier, plan: envplan.Plan) -> Iterator[str]:
    """Notes of the plan's limits."""
    if not plan.request.limits:
        return
    from envplan.plan import replay_plan
    from envplan.profile import Adjustments
    from envplan.request.limits import LimitContext

    # Late or held clocks may leave other options by parts than the frontier has.
    profile = frontier.profile.with_adjustments(plan.profile.adjustments or Adjustments())
    replay = replay_plan(plan, profile)
    context = LimitContext(
        plan.job.num_gpus,
        plan.target.deadline_ns,
        profile,
        sync_ns=plan.request.sync_ns,
    )
    for limit in plan.request.limits:
        yield from limit.notes(replay, context)


def _probability(frontier: envplan.Frontier, plan: envplan.Plan) -> Iterator[str]:
    """With which probability the deadline is held under noise, and what that costs."""
    robustness = plan.predicted.robustness
    if robustness is None:
        return
    if robustness.noise is None:
        noise = "as the profile's time_std"
    else:
        noise = f"of {100 * robustness.noise:g}%"
    if robustness.iterations is None:
        target = plan.target
        deadline_s = target.deadline_s if target.time_s is None else target.time_s
        evidence = (
            f"{robustness.held_runs} of {robustness.runs} replays end by "
            f"{exact_seconds(deadline_s)} s"
        )
    else:
        evidence = (
            f"{robustness.iterations} iterations end by the deadline, as {robustness.runs} replays "
            "show"
        )
    yield (
        f"with noise {noise} {evidence}: a probability of at least {robustness.percent_at_least} "
        f"({100 * robustness.confidence:g}% confidence)"
    )
    yield from _price_of_probability(frontier, plan)


def _price_of_probability(frontier: envplan.Frontier, plan: envplan.Plan) -> Iterator[str]:
    """How much more energy the plan uses than one for exact times, where there is one."""
    limits = tuple(limit for limit in plan.request.limits if limit.kind != "probability")
    request = plan.request.model_copy(update={"limits": limits, "run": None})
    if request.objective != "energy":
        return
    with suppress(NoAnswerError):
        exact_j = frontier.solve(request).energy
        yield (
            f"that costs {significant(plan.energy - exact_j)} J "
            f"({100 * (plan.energy / exact_j - 1):.2f}%) more than a plan for exact times"
        )
