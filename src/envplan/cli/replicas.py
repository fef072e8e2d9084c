"""`envplan solve --replica-profile` and `envplan simulate --replica`: unlike replicas together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from envplan.cli.inputs import check_outputs, refuse_overwriting
from envplan.cli.options import (
    ClockOptions,
    JobOptions,
    OutputOptions,
    PlannerOptions,
    RunOptions,
    TargetOptions,
    open_profile,
)
from envplan.errors import InputError

if TYPE_CHECKING:
    from envplan.plan import Plan
    from envplan.planners import Planner
    from envplan.profile import Profile
    from envplan.replicas import ReplicaPlans
    from envplan.simulation import Conditions
    from envplan.solve import Frontier

REPLICA_PROFILE = "--replica-profile"


def parse_replica(text: str) -> tuple[str, int]:
    """A profile and how many replicas it is for, from PROFILE or PROFILE:COUNT.

    Raises:
        InputError: the count is not a number from 1 up.
    """
    name, colon, count = text.rpartition(":")
    if not colon:
        return text, 1
    if not (count.isascii() and count.isdigit() and len(count) <= 7 and int(count)):
        raise InputError(
            f"{REPLICA_PROFILE} must be PROFILE or PROFILE:COUNT with a COUNT from 1 up, not {text}"
        )
    return name, int(count)


def solve_replicas(
    job: JobOptions,
    others: Sequence[str],
    asked: tuple[TargetOptions, PlannerOptions, ClockOptions, RunOptions],
    output: Path,
    show: OutputOptions,
    planner: Planner | None = None,
) -> None:
    """Plan every kind of replica for a common time, write the plans and say what they do.

    Args:
        others: as given to --replica-profile.
        asked: what is wanted of all together.
        planner: that plans every kind; default: our own.

    Raises:
        InputError: options contradict each other, or a profile does not fit the job.
        NoAnswerError: the slowest kind cannot meet the target, or a limit cannot be kept.
    """
    from envplan.cli.asking import request_of
    from envplan.cli.output import answer, spinner
    from envplan.replicas import plan_replicas

    kinds = [parse_replica(text) for text in others]
    files = [output]
    files += [output.with_suffix(f".replica{k}{output.suffix}") for k in range(1, len(kinds) + 1)]
    check_outputs(*files)
    frontiers = _trace_all(job, kinds, quiet=show.quiet)
    for frontier in frontiers:
        refuse_overwriting(frontier.profile, *files)
    with spinner("planning every kind of replica", quiet=show.quiet):
        planned = plan_replicas(frontiers, request_of(frontiers[0], *asked), planner)
    for plan, file in zip(planned.plans, files, strict=True):
        plan.save(file)
    answer(
        show,
        lambda: {"plans": [str(file) for file in files], **planned.to_dict()},
        lambda: _print_planned(frontiers, planned),
        written=files,
        then=["envplan", "apply", str(output)],
    )


def _trace_all(job: JobOptions, kinds: Sequence[tuple[str, int]], *, quiet: bool) -> list[Frontier]:
    profile, pipeline = job.load()
    instructions = {op.instruction for op in pipeline.operations}
    replicas = [(profile, job.replicas(profile))]
    for name, count in kinds:
        other = open_profile(name)
        by_parts = job.by_parts(other) if other.has_parts else None
        other = other.fitted(instructions, recompute=job.recompute, by_parts=by_parts)
        replicas.append((other, count))
    return [
        job.trace_with(other, pipeline, count, quiet=quiet, full=True) for other, count in replicas
    ]


def _print_planned(frontiers: Sequence[Frontier], planned: ReplicaPlans) -> None:
    from envplan.cli.output import describe_job, say, significant

    for frontier in frontiers:
        say(describe_job(frontier))
    print_replicas(planned)
    least = max(frontier.min_time for frontier in frontiers)
    say(f"T_min of all together {significant(least)} s, that of the slowest")


def print_replicas(planned: ReplicaPlans) -> None:
    """A table of all kinds of replicas, and what they take together."""
    from envplan.cli.output import (
        ITERATION,
        column,
        print_columns,
        say,
        significant,
        titled,
    )

    plans, waits = planned.plans, planned.waiting_energies
    together = [plan.energy + wait for plan, wait in zip(plans, waits, strict=True)]
    columns = {
        "profile": [plan.profile.name for plan in plans],
        "replicas": [str(plan.job.replicas) for plan in plans],
        "time (s)": column([plan.iteration_time for plan in plans]),
        "energy (J)": column([plan.energy for plan in plans]),
        "waiting (J)": column(waits),
        "together (J)": column(together),
    }
    print_columns(titled(ITERATION, *(plan.profile.source for plan in plans)), columns)
    say(
        f"all end at {significant(planned.sync_time)} s and use "
        f"{significant(planned.energy)} J, {planned.savings_percent:.2f}% less than "
        f"{significant(planned.baseline_energy)} J in {significant(planned.baseline_time)} s "
        "at maximum frequency"
    )
    if planned.gap is not None:
        say(f"certified gap of all together {100 * planned.gap:.3f}%")
    if planned.costs is not None and planned.run is not None:
        what = "the run" if planned.run.iterations else "an iteration"
        before, after = planned.costs.max_frequency, planned.costs.plan
        for name, old, new in (
            ("energy (kWh)", before.energy_kwh, after.energy_kwh),
            ("cost", before.money, after.money),
            ("carbon (g CO2)", before.carbon_g, after.carbon_g),
        ):
            if old is not None and new is not None:
                say(f"{name} of {what}: {significant(new)}, before {significant(old)}")


def load_replicas(
    first: tuple[Plan, Profile],
    files: Sequence[Path],
    profiles: Sequence[str],
    *,
    conditions: Conditions,
    force: bool,
) -> ReplicaPlans:
    """The plans of further kinds of replicas, replayed together with the first.

    Args:
        files: plans that there are.
        profiles: as given to --replica-profile; their plans are made here.
        conditions: what all replicas meet.

    Raises:
        InputError: a plan or a profile is not found or does not hold.
    """
    from envplan.plan import Plan, find_profile
    from envplan.replicas import plan_beside, replay_replicas

    replicas = [first]
    for name, count in map(parse_replica, profiles):
        other = open_profile(name)
        replicas.append((plan_beside(first[0], other, count), other))
    for file in files:
        plan = Plan.load(file)
        replicas.append((plan, find_profile(plan.profile, file)))
    return replay_replicas(replicas, conditions=conditions, force=force)
