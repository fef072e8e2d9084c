"""Replaying a plan from its file: what it says is looked up in its profile again."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from envplan._files import is_file
from envplan.errors import InputError
from envplan.frontier import BlockingPowerSource
from envplan.pipeline import Pipeline
from envplan.plan.model import Job, Plan, ProfileReference, Rung
from envplan.profile import Adjustments, Profile, builtin_paths
from envplan.replay import Machine, Problem, Replay
from envplan.units import j_from_fj, ns_from_s, s_from_ns, uw_from_w

__all__ = [
    "as_referenced",
    "beyond_raw_rows",
    "check_operations",
    "check_reference",
    "find_profile",
    "machine_of",
    "problem_of",
    "replay_plan",
    "rung_rows",
    "stated_rows",
]


def replay_plan(
    plan: Plan,
    profile: Profile,
    *,
    force: bool = False,
    machine: Machine | None = None,
) -> Replay:
    """The replay of what a plan says, on clocks that follow as late as its job says.

    Args:
        profile: what the plan was made from.
        force: go on though the profile has changed since.
        machine: instead of the job's.

    Raises:
        InputError: the profile has changed, or the plan does not fit it or its own job.
    """
    check_reference(plan.profile, profile, force)
    profile = as_referenced(plan.profile, profile)
    problem, planned = problem_of(plan.job, profile), machine_of(plan.job)
    check_operations(plan, problem.pipeline)
    rows = stated_rows(plan, problem, profile)
    if machine is None or machine == planned:
        return problem.replay(rows, planned)
    knobs = [(op.frequency_mhz, op.config) for stage in plan.stages for op in stage]
    configs = {config for _, config in knobs}
    retimed = problem_of(plan.job, profile.retimed(configs, machine.latency_ns))
    return retimed.replay(retimed.rows_at(knobs), machine)


def beyond_raw_rows(plan: Plan, profile: Profile) -> tuple[float, float]:
    """What a plan takes more on a profile's rows as measured, noise and all, than it says.

    Returns:
        Time and energy, as fractions of what the plan says.
    """
    said, stated = replay_plan(plan, profile), plan.profile.adjustments
    raw = None if stated is None else stated.model_copy(update={"smoothed": False})
    measured = as_referenced(plan.profile.model_copy(update={"adjustments": raw}), profile)
    problem = problem_of(plan.job, measured)
    knobs = [(op.frequency_mhz, op.config) for op in chain(*plan.stages)]
    taken = problem.replay(problem.rows_at(knobs), machine_of(plan.job))
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


@dataclass(frozen=True)
class JobSetup:
    """What a job runs by a profile, as build_plan takes it; a traced frontier is another one."""

    job: Job
    profile: Profile

    @cached_property
    def problem(self) -> Problem:
        """The job's pipeline with the profile's option tables."""
        return problem_of(self.job, self.profile)

    @property
    def pipeline(self) -> Pipeline:
        return self.problem.pipeline

    @property
    def gpus_per_stage(self) -> int:
        return self.job.gpus_per_stage

    @property
    def replicas(self) -> int:
        return self.job.replicas

    @property
    def num_gpus(self) -> int:
        return self.job.num_gpus

    @property
    def blocking_power_w(self) -> tuple[float, ...]:
        return tuple(self.job.blocking_power_w)

    @property
    def blocking_power_source(self) -> BlockingPowerSource:
        return self.job.blocking_power_source


def machine_of(job: Job) -> Machine:
    """How late clocks follow, as a job says."""
    return Machine(ns_from_s(job.switch_latency_s or 0.0))


def find_profile(
    reference: ProfileReference, file: str | os.PathLike[str] | None = None
) -> Profile:
    """The profile that a file refers to, changed since or not.

    Looked for at the reference's path from the file's folder, then from the working directory, then
    among the built-in profiles by name.

    Args:
        reference: such as a plan's `profile`.
        file: where the reference stands.

    Raises:
        InputError: it is in none of these places, or not a valid profile.
    """
    if reference.path is not None:
        for folder in (Path(file).parent if file else Path(), Path()):
            if is_file(folder / reference.path):
                return as_referenced(reference, Profile.read_csv(folder / reference.path))
    if reference.name in builtin_paths():
        return as_referenced(reference, Profile.builtin(reference.name))
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
    if len(plan.stages) != pipeline.num_stages:
        raise InputError(
            f"stages has {len(plan.stages)} entries, but the job has {pipeline.num_stages} stages"
        )
    for stage, (first, last) in enumerate(pairwise(pipeline.stage_begin.tolist())):
        planned = plan.stages[stage]
        for k, op in enumerate(pipeline.operations[first:last]):
            due = f"{op.instruction} of microbatch {op.microbatch}, chunk {op.chunk}"
            if k >= len(planned):
                raise InputError(f"stages[{stage}] ends after {k} operations; next comes {due}")
            found = planned[k]
            if (found.instruction, found.microbatch, found.chunk) != (
                op.instruction,
                op.microbatch,
                op.chunk,
            ):
                raise InputError(
                    f"stages[{stage}][{k}] is {found.instruction} of microbatch "
                    f"{found.microbatch}, chunk {found.chunk}, but the schedule has {due} there"
                )
        if len(planned) > last - first:
            raise InputError(
                f"stages[{stage}] has {len(planned)} operations, the schedule {last - first}"
            )
    return (
        f"{len(pipeline.operations)} operations on {pipeline.num_stages} stages, in the order of "
        f"schedule {pipeline.schedule}"
    )


def stated_rows(plan: Plan, problem: Problem, profile: Profile) -> NDArray[np.int32]:
    """The row of each operation's option table, (N), once all are seen to be rows of the profile.

    Raises:
        InputError: an operation's frequency, time or energy is no row's.
    """
    chosen = []
    places = [(s, k) for s, stage in enumerate(plan.stages) for k in range(len(stage))]
    for (s, k), number in zip(places, problem.table.tolist(), strict=True):
        table, rows = problem.tables[number], problem.rows_by_knob[number]
        op = plan.stages[s][k]
        row = rows.get((op.frequency_mhz, op.config))
        at = f"{op.frequency_mhz} MHz" + (f" config {op.config}" if op.config else "")
        what = f"stages[{s}][{k}], {op.instruction} at {at},"
        if row is None:
            raise InputError(f"{what} is not a row of profile {profile.name}")
        for field, stated, true in (
            ("time_s", op.time_s, s_from_ns(table.time_ns[row])),
            ("energy_j", op.energy_j, j_from_fj(table.energy_fj[row])),
        ):
            if stated != true:
                raise InputError(f"{what} has {field} {stated!r}; the profile says {true!r}")
        chosen.append(row)
    return np.array(chosen, np.int32)


def rung_rows(name: str, rung: Rung, problem: Problem, profile: Profile) -> NDArray[np.int32]:
    """The rows that a rung of a plan's ladder stands for, (N,).

    Args:
        name: what to call the rung in an error.

    Raises:
        InputError: it does not fit the job, or names a clock that the profile lacks.
    """
    pipeline = problem.pipeline
    lengths = [last - first for first, last in pairwise(pipeline.stage_begin.tolist())]
    configs = rung.configs
    if configs is None:
        configs = [[""] * length for length in lengths]
    for field, lists in (("frequencies_mhz", rung.frequencies_mhz), ("configs", configs)):
        if [len(stage) for stage in lists] != lengths:
            raise InputError(f"{name}.{field} does not have one entry for every operation")
    knobs = zip(chain(*rung.frequencies_mhz), chain(*configs), strict=True)
    chosen = []
    for op, knob, number in zip(pipeline.operations, knobs, problem.table.tolist(), strict=True):
        rows = problem.rows_by_knob[number]
        if knob not in rows:
            raise InputError(
                f"{name}: {knob[0]} MHz for {op.instruction} {op.microbatch} of stage {op.stage} "
                f"is not a row of profile {profile.name}"
            )
        chosen.append(rows[knob])
    return np.array(chosen, np.int32)
