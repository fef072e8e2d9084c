"""From a replayed choice of options to a plan with its bound, and from a plan's file to its replay.

A plan names clocks and configs; its profile has the options that these stand for.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from envplan._io.documents import check_stated
from envplan._io.files import is_file
from envplan.clocks import Rung
from envplan.errors import InputError
from envplan.frontier import Relaxation
from envplan.pipeline import Operation, Pipeline
from envplan.plan.model import (
    PLAN_SCHEMA,
    Baseline,
    Bound,
    Job,
    Plan,
    PlannedOperation,
    Predicted,
    ProfileReference,
    UntilStraggler,
)
from envplan.plan.target import ClockTiming, Target, clock_timing_of
from envplan.profile import Adjustments, Profile, builtin_paths
from envplan.replay import Machine, Problem, Replay
from envplan.request import Request
from envplan.units import (
    FINER_UNITS_TOLERANCE,
    POWER_UNITS_PER_W,
    j_from_10fj,
    ns_from_s_floor,
    s_from_ns,
)

#: How far energies may lie from their recomputation, relatively: files of envplan 0.1 counted them
#: in fJ. Those of single operations may be as small as a mJ.
_ENERGY_TOLERANCE: Final = 1e-14
_OPERATION_TOLERANCE: Final = 1e-11


def build_plan(
    frontier: Relaxation,
    replay: Replay,
    *,
    target: Target,
    request: Request | None = None,
    bound_10fj: int | None = None,
    bound: Bound = "relaxation",
    planner: str = "frontier",
) -> Plan:
    """The plan of a replayed choice of options, set against the lower bound.

    Args:
        frontier: of what the replay is of.
        target: what was asked, and the deadline that was planned for.
        request: the same as a request, for plans of the planner frontier.
        bound_10fj: the least that a replay by the deadline can use for one GPU a stage, 10 fJ;
            default: the relaxed bound, less what the replay's roundings may gain.
        bound: what that follows from.
        planner: what chose the options.
    """
    if bound_10fj is None:
        bound_10fj = frontier.lower_bound_10fj(max(frontier.min_time_ns, target.deadline_ns))
        bound_10fj -= rounding_allowance_10fj(replay)
    bound_10fj = max(0, bound_10fj) * frontier.num_gpus
    clock_timing = ClockTiming() if request is None else clock_timing_of(request)
    job = Job(
        **frontier.pipeline.to_job(),
        gpus_per_stage=frontier.gpus_per_stage,
        replicas=frontier.replicas,
        blocking_power_w=list(frontier.blocking_power_w),
        blocking_power_source=frontier.blocking_power_source,
        **vars(clock_timing),
    )
    return plan_of(
        replay,
        job,
        bound_10fj,
        bound,
        profile=reference_to(frontier.profile),
        target=target,
        planner=planner,
        request=request,
    )


def reference_to(profile: Profile) -> ProfileReference:
    """How a plan refers to its profile."""
    path = profile.path
    is_builtin = path is None or builtin_paths().get(profile.name) == path
    return ProfileReference(
        name=_printable(profile.name),
        path=None if path is None or is_builtin else _printable(path.as_posix()),
        sha256=profile.sha256,
        source=profile.metadata.source,
        adjustments=profile.adjustments or None,
    )


def _printable(name: str) -> str:
    """A name of a file as text: on Linux it is bytes, and need not be any."""
    return name.encode("utf-8", "replace").decode()


def plan_of(
    replay: Replay, job: Job, bound_10fj: int, bound: Bound = "relaxation", **fields: Any
) -> Plan:
    """The plan of a replay, with what it saves on maximum frequency.

    Args:
        bound_10fj: least energy of all GPUs, 10 fJ.
        fields: further ones of the plan: planner, profile, target and request.
    """
    return Plan(
        schema=PLAN_SCHEMA,
        job=job,
        predicted=predict(replay, job.num_gpus, bound_10fj, bound),
        stages=planned_operations(replay),
        **fields,
    )


def predict(
    replay: Replay, num_gpus: int, bound_10fj: int = 0, bound: Bound = "relaxation"
) -> Predicted:
    """The prediction of a replay, beside the same at maximum frequency, under the same noise.

    Args:
        bound_10fj: least energy of all GPUs, 10 fJ.
    """
    problem = replay.problem
    planned = _totals(replay, num_gpus)
    max_frequency = problem.replay(problem.max_frequency_rows, factors=replay.factors)
    baseline = _totals(max_frequency, num_gpus)
    lost_s = planned.iteration_time_s - baseline.iteration_time_s
    saved_j = baseline.energy_j - planned.energy_j
    return Predicted(
        **dict(planned),
        energy_lower_bound_j=j_from_10fj(bound_10fj),
        bound=bound,
        gap=gap_over(planned.energy_j, j_from_10fj(bound_10fj)),
        baseline=baseline,
        savings_percent=percent(saved_j, baseline.energy_j),
        slowdown_percent=percent(lost_s, baseline.iteration_time_s),
    )


def _totals(replay: Replay, num_gpus: int) -> Baseline:
    """Time, energy and average power of an iteration, all GPUs."""
    time_ns, energy_10fj = replay.makespan_ns, replay.energy_10fj * num_gpus
    return Baseline(
        iteration_time_s=s_from_ns(time_ns),
        energy_j=j_from_10fj(energy_10fj),
        average_power_w=energy_10fj / (time_ns * POWER_UNITS_PER_W),
    )


def rounding_allowance_10fj(replay: Replay) -> int:
    """The most by which a replay's roundings may undercut the relaxed bound, 10 fJ.

    Of one GPU a stage.

    The relaxed bound holds for clocks that come late, too: an operation that does a share x of its
    work at one clock and 1 - x at another takes x t_a + (1 - x) t_b and has the effective cost
    x c_a + (1 - x) c_b: a point between two options of its table, so on or above their lower convex
    hull, which is all that the relaxation knows of it. Two roundings are left. At each change of
    clock what is left of the operation becomes a whole number of ns, up to one more than its share:
    at the power of its clock, p, this adds p - P to the effective cost, which is more than -P for
    one ns, while the relaxed curve does not rise with time. And each part's energy is rounded, by
    half a unit at most.
    """
    if replay.machine.latency_ns == 0:
        return 0
    problem = replay.problem
    num_parts = np.bincount(replay.parts.operation, minlength=len(replay.rows))
    waiting_10uw = problem.blocking_power_10uw[problem.stage]
    # 1 ns of waiting for each change of clock, 1 unit of energy for each part.
    allowances_10fj = (num_parts - 1) * waiting_10uw + num_parts
    return int(allowances_10fj[num_parts > 1].sum())


def note_straggler(
    plan: Plan, frontier: Relaxation, replay: Replay, time: float, bound_10fj: int = 0
) -> Plan:
    """The plan, with what it and its waiting for a straggler cost, against the least possible.

    Args:
        replay: of the plan.
        time: when the straggler has finished, s.
        bound_10fj: the least that a replay can use until then for one GPU a stage, 10 fJ; the
            relaxed bound holds as well.
    """
    time_ns = ns_from_s_floor(time)
    target = plan.target.model_copy(update={"straggler_time_s": time})
    until = None
    if time > plan.iteration_time and time_ns >= frontier.min_time_ns:
        relaxed_10fj = frontier.waiting_bound_10fj(time_ns) - rounding_allowance_10fj(replay)
        bound_10fj = max(0, relaxed_10fj, bound_10fj)
        until = until_straggler(plan, time, j_from_10fj(bound_10fj * frontier.num_gpus))
    predicted = plan.predicted.model_copy(update={"until_straggler": until})
    return plan.model_copy(update={"target": target, "predicted": predicted})


def until_straggler(plan: Plan, time: float, lower_bound: float) -> UntilStraggler:
    """Energy of a plan that waits for a straggler of `time` s, against a lower bound in J."""
    max_frequency = plan.predicted.baseline
    planned = plan.until(time, plan.iteration_time, plan.energy)
    baseline = plan.until(time, max_frequency.iteration_time_s, max_frequency.energy_j)
    return UntilStraggler(
        energy_j=planned.energy_j,
        # Both are rounded to floats.
        energy_lower_bound_j=min(lower_bound, planned.energy_j),
        gap=gap_over(planned.energy_j, lower_bound),
        baseline_energy_j=baseline.energy_j,
    )


def gap_over(energy_j: float, bound_j: float) -> float:
    """The fraction by which an energy lies above a lower bound, not below 0."""
    if energy_j <= bound_j:
        return 0.0
    # A profile may say that everything is free, so that the bound is 0.
    return energy_j / max(bound_j, j_from_10fj(1)) - 1


def percent(part: float, whole: float) -> float:
    """A part in percent of a whole; 0 where the whole is 0."""
    return 100 * part / whole if whole else 0.0


def planned_operations(replay: Replay) -> list[list[PlannedOperation]]:
    """For each stage its operations as plan.json lists them, in execution order."""
    problem = replay.problem
    entries = problem.over_all(replay.rows)
    times_ns, energies_10fj = (
        problem.time_ns[entries].tolist(),
        problem.energy_10fj[entries].tolist(),
    )
    starts_ns, options, tables = replay.starts_ns.tolist(), replay.rows.tolist(), problem.table
    planned = []
    for number, operation in enumerate(problem.pipeline.operations):
        table, option = problem.tables[int(tables[number])], options[number]
        planned.append(
            PlannedOperation(
                instruction=operation.instruction,
                microbatch=operation.microbatch,
                chunk=operation.chunk,
                frequency_mhz=int(table.frequency_mhz[option]),
                config=table.config[option],
                start_s=s_from_ns(starts_ns[number]),
                time_s=s_from_ns(times_ns[number]),
                energy_j=j_from_10fj(energies_10fj[number]),
            )
        )
    stage_bounds = pairwise(problem.pipeline.stage_begin.tolist())
    return [planned[first:last] for first, last in stage_bounds]


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
    problem, planned, rung = plan.job.problem(profile), plan.job.machine, plan.as_rung()
    check_operations(plan, problem.pipeline)
    replay = problem.replay(rung_rows("stages", rung, problem), planned)
    check_stated("stages", plan.stages, planned_operations(replay), _OPERATION_TOLERANCE)
    if machine is None or machine == planned:
        return replay
    configs: set[str] = set()
    for replayed_rung in (rung, *rungs):
        configs.update(chain.from_iterable(replayed_rung.configs or ()))
    retimed = plan.job.problem(profile.retimed(configs, machine.latency_ns))
    return retimed.replay(rung_rows("stages", rung, retimed), machine)


class Excess(NamedTuple):
    """Time and energy of a replay above those that a plan states, as fractions of these."""

    time: float
    energy: float


def beyond_raw_rows(plan: Plan, profile: Profile) -> Excess:
    """The excess of a plan on a profile's rows as measured, noise and all, over what it says."""
    planned = replay_plan(plan, profile)
    adjustments = plan.profile.adjustments or Adjustments()
    unsmoothed = adjustments.model_copy(update={"smoothed": False})
    problem = plan.job.problem(profile.with_adjustments(unsmoothed))
    raw = problem.replay(rung_rows("stages", plan.as_rung(), problem), plan.job.machine)
    return Excess(
        time=raw.makespan_ns / planned.makespan_ns - 1,
        energy=raw.energy_10fj / planned.energy_10fj - 1,
    )


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
    path = _path_of_profile(reference, file)
    if path is not None:
        return as_referenced(reference, Profile.read_csv(path))
    raise InputError(
        f"its profile {reference.path or reference.name} is not found, neither from its folder nor "
        "from here nor built in; say where it is with --profile",
        path=file,
    )


def _path_of_profile(
    reference: ProfileReference, file: str | os.PathLike[str] | None
) -> Path | None:
    """The first of the places of a profile in which there is a file; None: in none of them."""
    if reference.path is not None:
        folder_of_file = Path(file).parent if file else Path()
        for folder in (folder_of_file, Path()):
            path = folder / reference.path
            if is_file(path):
                return path
    return builtin_paths().get(reference.name)


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
    return profile.with_adjustments(wanted)


def check_reference(reference: ProfileReference, profile: Profile, force: bool) -> str:
    """Check that a profile is the one referred to; with `force`, only say whether it is.

    Raises:
        InputError: it has changed.
    """
    if profile.sha256 == reference.sha256:
        return f"the profile, {profile.name}, is unchanged (sha256 {profile.sha256[:12]}...)"
    if force:
        return f"the profile, {profile.name}, HAS CHANGED since; checked as it is now"
    stated_name = Path(reference.path or reference.name).name.removesuffix(".csv")
    if profile.name.removesuffix(".csv") != stated_name:
        raise InputError(
            f"is a plan for profile {reference.name}; {profile.name} is another profile, not a "
            "changed one: plan for it with envplan solve, or replay these clocks on it with --force"
        )
    raise InputError(
        f"profile {profile.path or profile.name} has changed since (sha256 "
        f"{profile.sha256[:12]}... instead of {reference.sha256[:12]}...); plan again, or check "
        "against what it says now with --force"
    )


def check_operations(plan: Plan, pipeline: Pipeline) -> None:
    """Check that a plan has the operations of its pipeline, in the same order.

    Raises:
        InputError: the first that differs.
    """
    stated = [[_operation_words(operation) for operation in stage] for stage in plan.stages]
    expected = []
    for begin, end in pairwise(pipeline.stage_begin.tolist()):
        operations = pipeline.operations[begin:end]
        expected.append([_operation_words(operation) for operation in operations])
    check_stated("stages", stated, expected)


def _operation_words(operation: Operation | PlannedOperation) -> str:
    """An operation of a stage in words, the same for a pipeline's and a plan's."""
    return f"{operation.instruction} of microbatch {operation.microbatch}, chunk {operation.chunk}"


def check_cost(name: str, stated: Any, replay: Replay, job: Job) -> None:
    """Check that a plan takes and uses what it states, to the last ns and the last digits of J.

    Args:
        name: what stands before its fields' names in an error.
        stated: what has iteration_time_s and energy_j.
        job: of the plan.

    Raises:
        InputError: it does not.
    """
    time_s, energy_j = s_from_ns(replay.makespan_ns), j_from_10fj(replay.energy_10fj * job.num_gpus)
    tolerance = _ENERGY_TOLERANCE if job.is_in_whole_units else FINER_UNITS_TOLERANCE
    check_stated(f"{name}energy_j", stated.energy_j, energy_j, tolerance)
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
