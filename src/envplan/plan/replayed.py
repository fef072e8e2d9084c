"""Replaying a plan from its file: what it says is looked up in its profile again."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from envplan._files import is_file
from envplan._model import check_stated
from envplan.errors import InputError
from envplan.pipeline import Operation, Pipeline
from envplan.plan.build import planned_operations
from envplan.plan.model import Job, Plan, PlannedOperation, ProfileReference, Rung
from envplan.profile import Adjustments, Profile, builtin_paths
from envplan.replay import Machine, Problem, Replay
from envplan.units import j_from_fj, ns_from_s, s_from_ns, uw_from_w


def replay_plan(
    plan: Plan,
    profile: Profile,
    *,
    force: bool = False,
    machine: Machine | None = None,
    rungs: Sequence[Rung] = (),
) -> Replay:
    """The replay of what a plan says, on clocks that follow as late as its job says.

    Args:
        profile: what the plan was made from.
        force: go on though the profile has changed since.
        machine: instead of the job's.
        rungs: further plans of the job that will be replayed on it.

    Raises:
        InputError: the profile has changed, or the plan does not fit it or its own job.
    """
    check_reference(plan.profile, profile, force)
    profile = as_referenced(plan.profile, profile)
    problem, planned = problem_of(plan.job, profile), machine_of(plan.job)
    check_operations(plan, problem.pipeline)
    rung = plan.as_rung()
    replay = problem.replay(rung_rows("stages", rung, problem), planned)
    check_stated("stages", plan.stages, planned_operations(replay))
    if machine is None or machine == planned:
        return replay
    configs = {config for one in (rung, *rungs) for config in chain(*(one.configs or ()))}
    retimed = problem_of(plan.job, profile.retimed(configs, machine.latency_ns))
    return retimed.replay(rung_rows("stages", rung, retimed), machine)


def beyond_raw_rows(plan: Plan, profile: Profile) -> tuple[float, float]:
    """What a plan takes more on a profile's rows as measured, noise and all, than it says.

    Returns:
        Time and energy, as fractions of what the plan says.
    """
    said, stated = replay_plan(plan, profile), plan.profile.adjustments or Adjustments()
    measured = profile.derived(stated, smoothed=False)
    problem = problem_of(plan.job, measured)
    taken = problem.replay(rung_rows("stages", plan.as_rung(), problem), machine_of(plan.job))
    return taken.makespan_ns / said.makespan_ns - 1, taken.energy_fj / said.energy_fj - 1


def problem_of(job: Job, profile: Profile) -> Problem:
    """A job's pipeline with the option tables of a profile.

    Raises:
        InputError: the profile lacks an operation, or powers are missing.
    """
    pipeline, powers = job.pipeline(), job.blocking_power_w
    if len(powers) != pipeline.num_stages:
        raise InputError(
            f"job.blocking_power_w has {len(powers)} values for {pipeline.num_stages} stages"
        )
    return Problem(pipeline, profile, [uw_from_w(power) for power in powers])


def machine_of(job: Job) -> Machine:
    """How late clocks follow, as a job says."""
    return Machine(ns_from_s(job.switch_latency_s or 0.0))


def find_profile(
    reference: ProfileReference,
    file: str | os.PathLike[str] | None = None,
    given: str | None = None,
) -> Profile:
    """The profile that a file refers to, changed since or not.

    Looked for at the reference's path from the file's folder, then from the working directory, then
    among the built-in profiles by name.

    Args:
        reference: such as a plan's `profile`.
        file: where the reference stands.
        given: instead, its path or name, as it has moved.

    Raises:
        InputError: it is in none of these places, or not a valid profile.
    """
    if given is not None:
        return as_referenced(reference, Profile.open(given))
    folders = (Path(file).parent if file else Path(), Path())
    near = [folder / reference.path for folder in folders] if reference.path is not None else []
    if found := next(filter(is_file, near), builtin_paths().get(reference.name)):
        return as_referenced(reference, Profile.read_csv(found))
    raise InputError(
        f"its profile {reference.path or reference.name} is not found, neither from its folder nor "
        "from here nor built in; say where it is with --profile",
        path=file,
    )


def as_referenced(reference: ProfileReference, profile: Profile) -> Profile:
    """A profile with those adjustments that a file says it was used with.

    Raises:
        InputError: it has others already, or they cannot be made.
    """
    stated = reference.adjustments
    wanted = stated or Adjustments()
    if profile.adjustments == wanted:
        return profile
    if profile.adjustments.makes_operations:
        raise InputError(
            f"profile {profile.name} was adjusted ({', '.join(profile.adjustments.in_words())}) "
            "in another way than for the plan; give it as it was measured"
        )
    return profile.derived(wanted)


def check_reference(reference: ProfileReference, profile: Profile, force: bool) -> str:
    """That a profile is the one referred to; with `force`, only whether it is.

    Raises:
        InputError: it has changed.
    """
    if profile.sha256 == reference.sha256:
        return f"the profile, {profile.name}, is unchanged (sha256 {profile.sha256[:12]}...)"
    if force:
        return f"the profile, {profile.name}, HAS CHANGED since; checked as it is now"
    raise InputError(
        f"profile {profile.path or profile.name} has changed since (sha256 "
        f"{profile.sha256[:12]}... instead of {reference.sha256[:12]}...); plan again, or check "
        "against what it says now with --force"
    )


def check_operations(plan: Plan, pipeline: Pipeline) -> str:
    """That a plan has the operations of its pipeline, in the same order.

    Raises:
        InputError: the first that differs.
    """

    def in_words(stage: Iterable[Operation | PlannedOperation]) -> list[str]:
        return [f"{o.instruction} of microbatch {o.microbatch}, chunk {o.chunk}" for o in stage]

    bounds = pairwise(pipeline.stage_begin.tolist())
    due = [in_words(pipeline.operations[first:last]) for first, last in bounds]
    check_stated("stages", [in_words(stage) for stage in plan.stages], due)
    return (
        f"{len(pipeline.operations)} operations on {pipeline.num_stages} stages, in the order of "
        f"schedule {pipeline.schedule}"
    )


def check_cost(name: str, stated: Any, replay: Replay, gpus: int) -> None:
    """That a plan takes and uses what it states, to the last ns and fJ.

    Args:
        name: what stands before its fields' names in an error.
        stated: what has iteration_time_s and energy_j.
        gpus: that each operation stands for.

    Raises:
        InputError: it does not.
    """
    time_s, energy_j = s_from_ns(replay.makespan_ns), j_from_fj(replay.energy_fj * gpus)
    check_stated(f"{name}energy_j", stated.energy_j, energy_j)
    check_stated(f"{name}iteration_time_s", stated.iteration_time_s, time_s)


def rung_rows(name: str, rung: Rung, problem: Problem) -> NDArray[np.int32]:
    """The rows that a rung of a plan's ladder stands for, (N,).

    Args:
        name: what to call the rung in an error.

    Raises:
        InputError: it does not fit the job, or names a clock that the profile lacks.
    """
    lengths = np.diff(problem.pipeline.stage_begin).tolist()
    configs = rung.configs or [[""] * length for length in lengths]
    for field, lists in (("frequencies_mhz", rung.frequencies_mhz), ("configs", configs)):
        if [len(stage) for stage in lists] != lengths:
            raise InputError(f"{name}.{field} does not have one entry for every operation")
    try:
        return problem.rows_at(
            list(zip(chain(*rung.frequencies_mhz), chain(*configs), strict=True))
        )
    except InputError as error:
        raise InputError(f"{name}: {error.message}") from None
