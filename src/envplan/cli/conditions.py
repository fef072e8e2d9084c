"""Plans for clocks that follow late and times that vary, as options ask for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypedDict

from envplan.cli.options import ClockOptions
from envplan.errors import InputError

if TYPE_CHECKING:
    from envplan.costs import Run
    from envplan.frontier import Frontier
    from envplan.plan import Plan


class Clocks(TypedDict):
    """How slowly clocks change, s."""

    switch_latency: float
    min_dwell: float


def check_conditions(clocks: ClockOptions, planner: str, others: Mapping[str, bool]) -> None:
    """That clock options go together, and with other options.

    Args:
        others: options that none of these goes with, and whether they are given.

    Raises:
        InputError: two do not.
    """
    if clocks.noise is not None and clocks.robust is None:
        raise InputError("--noise goes with --robust PCT")
    given = [
        name
        for name, value in (
            ("--switch-latency", clocks.switch_latency),
            ("--min-dwell", clocks.min_dwell),
            ("--robust", clocks.robust),
        )
        if value is not None
    ]
    if not given:
        return
    if clocks.robust is not None and clocks.min_dwell is not None:
        raise InputError("--min-dwell and --robust exclude each other; give one of them")
    if planner != "frontier":
        raise InputError(f"{given[0]} goes with --planner frontier, not {planner}")
    for other, is_given in others.items():
        if is_given:
            raise InputError(f"{given[0]} and {other} exclude each other; give one of them")


def slowness(clocks: ClockOptions) -> Clocks:
    """How slowly clocks change, as Frontier.plan takes it."""
    return {
        "switch_latency": clocks.switch_latency or 0.0,
        "min_dwell": clocks.min_dwell or 0.0,
    }


def robust_plan(
    clocks: ClockOptions, frontier: Frontier, option: str | None, value: float, *, quiet: bool
) -> Plan:
    """The plan that holds the target that an option gave, though times vary.

    Raises:
        NoAnswerError: there is none.
        InputError: a number is out of range, or the profile does not say how times vary.
    """
    from envplan.cli.output import progress_bar

    assert clocks.robust is not None
    with progress_bar("Replaying with noise", quiet=quiet) as progress:
        return frontier.robust_plan(
            clocks.robust / 100,
            value if option == "--target-time" else None,
            slowdown=value / 100 if option == "--slowdown" else None,
            noise=None if clocks.noise is None else clocks.noise / 100,
            switch_latency=clocks.switch_latency or 0.0,
            progress=progress,
        )


def cheapest_plan(clocks: ClockOptions, frontier: Frontier, run: Run, polish: float) -> Plan:
    """The cheapest plan by a run's deadline, with clocks and times as they are.

    Raises:
        NoAnswerError: there is none.
        InputError: a number is out of range, or a rate ends before the run.
    """
    return run.cheapest_plan(
        frontier,
        polish=polish,
        probability=None if clocks.robust is None else clocks.robust / 100,
        noise=None if clocks.noise is None else clocks.noise / 100,
        **slowness(clocks),
    )


def condition_notes(frontier: Frontier, plan: Plan) -> list[str]:
    """What a plan was made to bear, and what that costs."""
    from envplan.cli.output import exact_seconds, significant

    notes = []
    job, sure = plan.job, plan.predicted.robustness
    if job.switch_latency_s is not None:
        notes.append(
            f"every clock comes {job.switch_latency_s * 1000:g} ms after it is asked for; time and "
            "energy are those of the replay with that"
        )
    if job.min_dwell_s is not None:
        notes.append(f"no stage asks for another clock within {job.min_dwell_s * 1000:g} ms")
    if plan.target.kind == "no-slowdown" and plan.target.deadline_s > frontier.min_time:
        notes.append(
            "T_min needs clocks that change at once; the least time found with these is "
            f"{exact_seconds(plan.target.deadline_s)} s"
        )
    if sure is not None:
        asked = plan.target.deadline_s if plan.target.time_s is None else plan.target.time_s
        noise = "as the profile's time_std" if sure.noise is None else f"of {100 * sure.noise:g}%"
        plain = _for_exact_times(frontier, plan, asked)
        what = (
            f"{sure.held_runs} of {sure.runs} replays end by {exact_seconds(asked)} s"
            if sure.iterations is None
            else f"{sure.iterations} iterations end by the deadline, as {sure.runs} replays show"
        )
        notes += [
            f"with noise {noise} {what}: a probability of at least "
            f"{sure.percent_at_least} ({100 * sure.confidence:g}% confidence)",
        ]
        if plain is not None:
            notes.append(
                f"that costs {significant(plan.energy - plain, 4)} J "
                f"({100 * (plan.energy / plain - 1):.2f}%) more than a plan for exact times"
            )
    return notes


def _for_exact_times(frontier: Frontier, plan: Plan, time: float) -> float | None:
    """J of the plan for the same time and clocks without noise, where one is found."""
    from envplan.frontier.switching import NoPlanInTimeError

    try:
        return frontier.plan(time, switch_latency=plan.job.switch_latency_s or 0.0).energy
    except NoPlanInTimeError:
        return None
