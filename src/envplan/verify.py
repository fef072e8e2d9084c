"""Proving files: a plan, from nothing but itself and its profile."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from envplan.errors import InputError, NoAnswerError
from envplan.pipeline import Pipeline
from envplan.plan import (
    Baseline,
    Job,
    Plan,
    Priced,
    ProfileReference,
    Rung,
    UntilStraggler,
    gap_over,
    max_frequency_baseline,
    option_tables,
    predict,
    price,
    rows_by_knobs,
    until_straggler,
)
from envplan.power import peak_uw
from envplan.profile import Adjustments, Profile, builtin_paths
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

if TYPE_CHECKING:
    from envplan.frontier import Frontier

__all__ = [
    "as_referenced",
    "check_operations",
    "check_reference",
    "chosen_options",
    "find_profile",
    "stated_powers",
    "trace_job",
    "verify_plan",
]

#: How far above its re-traced value a stated lower bound may lie: it was rounded to a float.
_BOUND_TOLERANCE: Final = 1e-9
#: How far derived numbers (percentages, gap, average power) may lie from their recomputation.
_DERIVED_TOLERANCE: Final = 1e-9


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
            if (folder / reference.path).is_file():
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
    wanted = Adjustments() if stated is None else Adjustments(**stated.model_dump())
    if profile.adjustments == wanted:
        return profile
    if profile.adjustments:
        raise InputError(
            f"profile {profile.name} was adjusted ({', '.join(profile.adjustments.in_words())}) "
            "in another way than for the plan; give it as it was measured"
        )
    return profile.adjusted(
        wanted.recompute, wanted.backward_input_share, join_backward=wanted.joined_backward
    )


def verify_plan(
    plan: Plan,
    profile: Profile,
    *,
    force: bool = False,
    progress: Callable[[int, int], None] | None = None,
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
    pipeline = plan.job.pipeline()
    proved.append(check_operations(plan, pipeline))
    options = chosen_options(plan, pipeline, profile)
    count = len(options)
    proved.append(f"all {count} frequencies, times and energies are rows of the profile")
    powers = stated_powers(plan, pipeline)
    priced = _replayed(plan.job, pipeline, profile, options, powers)
    proved += _check_replay(plan, priced) + _proved_of_clocks(plan.job)
    proved += _check_ladder(plan, pipeline, profile, powers)
    proved += _check_derived(plan, pipeline, profile, priced, powers)
    proved += _check_target(plan, priced.makespan_ns)
    proved += _check_peak(plan, pipeline, profile, options, priced, powers)
    if plan.costs is not None:
        from envplan.costs import check_costs

        proved += check_costs(plan)
    if plan.predicted.robustness is not None:
        from envplan.frontier.robust import check_robustness

        proved += check_robustness(plan, pipeline, profile, options)
    frontier = trace_job(plan.job, profile, progress)
    return [*proved, _check_bound(plan, frontier), *_check_until_straggler(plan, frontier)]


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


def chosen_options(plan: Plan, pipeline: Pipeline, profile: Profile) -> NDArray[np.int32]:
    """The row of each operation's option table, (N), once all are seen to be rows of the profile.

    Raises:
        InputError: an operation's frequency, time or energy is no row's.
    """
    chosen = []
    places = [(s, k) for s, stage in enumerate(plan.stages) for k in range(len(stage))]
    tables, knobs = option_tables(pipeline, profile), rows_by_knobs(pipeline, profile)
    for (s, k), table, rows in zip(places, tables, knobs, strict=True):
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


def stated_powers(plan: Plan, pipeline: Pipeline) -> list[int]:
    """The blocking power that a plan states for each stage, (num_stages,), uW.

    Raises:
        InputError: it states too many or too few.
    """
    powers = plan.job.blocking_power_w
    if len(powers) != pipeline.num_stages:
        raise InputError(
            f"job.blocking_power_w has {len(powers)} values for {pipeline.num_stages} stages"
        )
    return [uw_from_w(power) for power in powers]


def _replayed(
    job: Job,
    pipeline: Pipeline,
    profile: Profile,
    options: NDArray[np.int32],
    powers: Sequence[int],
    what: str = "",
) -> Priced:
    """The replay of a choice of options with clocks that follow as late as the job says.

    Args:
        options: for each operation the row of its option table, (N,).
        powers: blocking powers by stage, uW.
        what: what the choice is, for the message.

    Raises:
        InputError: a stage changes its clock sooner than the job allows.
    """
    from envplan.frontier.switching import Switching, clock_that_changes_too_soon
    from envplan.simulation import price_with_latency

    clocks = Switching.from_seconds(job.switch_latency_s or 0.0, job.min_dwell_s or 0.0)
    if not clocks:
        return price(pipeline, profile, options, powers)
    priced = price_with_latency(pipeline, profile, options, powers, clocks.latency_ns)
    if clocks.dwell_ns:
        tables = option_tables(pipeline, profile)
        mhz = [int(t.frequency_mhz[row]) for t, row in zip(tables, options.tolist(), strict=True)]
        too_soon = clock_that_changes_too_soon(
            pipeline,
            mhz,
            priced.starts_ns.tolist(),
            priced.makespan_ns,
            clocks.dwell_ns,
        )
        if too_soon is not None:
            raise InputError(f"{what}{too_soon}, within job.min_dwell_s of {job.min_dwell_s!r} s")
    return priced


def _proved_of_clocks(job: Job) -> list[str]:
    """What the replay has proved of clocks that are slow to change."""
    proved = []
    if job.switch_latency_s is not None:
        proved.append(
            f"so it is though every clock comes {job.switch_latency_s!r} s after it is asked for"
        )
    if job.min_dwell_s is not None:
        proved.append(f"no stage asks for another clock within {job.min_dwell_s!r} s")
    return proved


def _check_replay(plan: Plan, priced: Priced) -> list[str]:
    """Start times, iteration time and energy against the exact replay."""
    places = [(s, k) for s, stage in enumerate(plan.stages) for k in range(len(stage))]
    for (s, k), start_ns in zip(places, priced.starts_ns.tolist(), strict=True):
        stated, true = plan.stages[s][k].start_s, s_from_ns(start_ns)
        if stated != true:
            raise InputError(f"stages[{s}][{k}].start_s is {stated!r}; replayed it is {true!r}")
    time, energy = s_from_ns(priced.makespan_ns), j_from_fj(priced.energy_fj * plan.job.num_gpus)
    for field, stated, true in (
        ("iteration_time_s", plan.iteration_time, time),
        ("energy_j", plan.energy, energy),
    ):
        if stated != true:
            raise InputError(f"predicted.{field} is {stated!r}; recomputed it is {true!r}")
    return [
        f"replayed, the iteration takes {time!r} s and every operation starts when stated",
        f"energy recomputed from the profile is {energy!r} J, as stated",
    ]


def _check_ladder(
    plan: Plan, pipeline: Pipeline, profile: Profile, powers: Sequence[int]
) -> list[str]:
    """Every rung's frequencies, iteration time and energy, by replay."""
    if plan.ladder is None:
        return []
    last = ns_from_s(plan.iteration_time)
    least = plan.job.above_waiting_fj(plan.iteration_time, plan.energy)
    for n, rung in enumerate(plan.ladder):
        options = _rung_options(f"ladder[{n}]", rung, pipeline, profile)
        priced = _replayed(plan.job, pipeline, profile, options, powers, f"ladder[{n}]: ")
        time = s_from_ns(priced.makespan_ns)
        energy = j_from_fj(priced.energy_fj * plan.job.num_gpus)
        for field, stated, true in (
            ("iteration_time_s", rung.iteration_time_s, time),
            ("energy_j", rung.energy_j, energy),
        ):
            if stated != true:
                raise InputError(f"ladder[{n}].{field} is {stated!r}; recomputed it is {true!r}")
        if priced.makespan_ns <= last:
            raise InputError(f"ladder[{n}] is not slower than the plan before it")
        above = plan.job.above_waiting_fj(time, energy)
        if above > least + _DERIVED_TOLERANCE * fj_from_j(energy):
            raise InputError(
                f"ladder[{n}] uses more than the plan before it even where there is time for both"
            )
        _check_peak(plan, pipeline, profile, options, priced, powers, f"ladder[{n}]: ")
        last, least = priced.makespan_ns, above
    proved = [
        f"the ladder's {len(plan.ladder)} slower plans take and use what they state, and each "
        "saves on those before it where there is time"
    ]
    cap, waiting_uw = plan.target.peak_power_w, sum(powers) * plan.job.num_gpus
    if cap is None:
        return proved
    if waiting_uw > uw_from_w(cap):
        raise InputError(
            f"GPUs that wait for a straggler draw {w_from_uw(waiting_uw)!r} W, more than the "
            f"target of {cap!r} W"
        )
    return [*proved, f"none of them ever draws more than the target of {cap!r} W"]


def _rung_options(name: str, rung: Rung, pipeline: Pipeline, profile: Profile) -> NDArray[np.int32]:
    lengths = [last - first for first, last in pairwise(pipeline.stage_begin.tolist())]
    configs = rung.configs
    if configs is None:
        configs = [[""] * length for length in lengths]
    for field, lists in (("frequencies_mhz", rung.frequencies_mhz), ("configs", configs)):
        if [len(stage) for stage in lists] != lengths:
            raise InputError(f"{name}.{field} does not have one entry for every operation")
    knobs = zip(chain(*rung.frequencies_mhz), chain(*configs), strict=True)
    chosen = []
    for op, knob, rows in zip(
        pipeline.operations, knobs, rows_by_knobs(pipeline, profile), strict=True
    ):
        if knob not in rows:
            raise InputError(
                f"{name}: {knob[0]} MHz for {op.instruction} {op.microbatch} of stage {op.stage} "
                f"is not a row of profile {profile.name}"
            )
        chosen.append(rows[knob])
    return np.array(chosen, np.int32)


def _check_derived(
    plan: Plan, pipeline: Pipeline, profile: Profile, priced: Priced, powers: Sequence[int]
) -> list[str]:
    """Baseline, savings, gap and averages against their recomputation."""
    stated = plan.predicted
    if stated.energy_lower_bound_j > stated.energy_j:
        raise InputError(
            f"predicted.energy_lower_bound_j {stated.energy_lower_bound_j!r} lies above energy_j "
            f"{stated.energy_j!r}"
        )
    true = predict(
        priced.makespan_ns,
        priced.energy_fj * plan.job.num_gpus,
        0,
        stated.bound,
        max_frequency_baseline(
            pipeline,
            profile,
            blocking_power_uw=powers,
            gpus_per_stage=plan.job.gpus_per_stage,
            replicas=plan.job.replicas,
        ),
    )
    gap = gap_over(stated.energy_j, stated.energy_lower_bound_j)
    for field, found, right in (
        ("average_power_w", stated.average_power_w, true.average_power_w),
        ("gap", stated.gap, gap),
        ("savings_percent", stated.savings_percent, true.savings_percent),
        ("slowdown_percent", stated.slowdown_percent, true.slowdown_percent),
        *(
            (f"baseline.{name}", getattr(stated.baseline, name), getattr(true.baseline, name))
            for name in Baseline.model_fields
        ),
    ):
        if not math.isclose(found, right, rel_tol=_DERIVED_TOLERANCE, abs_tol=_DERIVED_TOLERANCE):
            raise InputError(f"predicted.{field} is {found!r}; recomputed it is {right!r}")
    return [
        f"lower bound {stated.energy_lower_bound_j!r} J <= energy; gap {100 * gap:.4f}%",
        f"savings {stated.savings_percent:.4f}%, slowdown {stated.slowdown_percent:.4f}% against "
        "maximum frequency everywhere",
    ]


def _check_target(plan: Plan, makespan_ns: int) -> list[str]:
    """The deadline and whatever else was asked for, exactly."""
    target = plan.target
    limits = [target.deadline_s]
    if target.time_s is not None:
        limits.append(target.time_s)
    for limit in limits:
        if makespan_ns > ns_from_s_floor(limit):
            raise InputError(
                f"replayed, the iteration takes {s_from_ns(makespan_ns)!r} s, more than the "
                f"target of {limit!r} s"
            )
    proved = [f"{s_from_ns(makespan_ns)!r} s <= target {min(limits)!r} s, to the nanosecond"]
    for what, value, most in (
        ("energy_j", plan.energy, target.energy_j),
        ("average_power_w", plan.average_power, target.power_w),
    ):
        if most is not None:
            if value > most:
                raise InputError(f"predicted.{what} {value!r} is above the target of {most!r}")
            proved.append(f"{what} {value!r} <= target {most!r}")
    return proved


def _check_peak(
    plan: Plan,
    pipeline: Pipeline,
    profile: Profile,
    options: NDArray[np.int32],
    priced: Priced,
    powers: Sequence[int],
    what: str = "",
) -> list[str]:
    """The power of all GPUs at every moment of the replay, where there is a cap on it."""
    cap = plan.target.peak_power_w
    if cap is None:
        return []
    tables = option_tables(pipeline, profile)
    peak = peak_uw(pipeline, tables, options, priced.starts_ns, powers) * plan.job.num_gpus
    if peak > uw_from_w(cap):
        raise InputError(
            f"{what}replayed, the GPUs draw {w_from_uw(peak)!r} W at the peak, more than the "
            f"target of {cap!r} W"
        )
    return [f"{w_from_uw(peak)!r} W at the peak of the replay <= target {cap!r} W"]


def trace_job(
    job: Job,
    profile: Profile,
    progress: Callable[[int, int], None] | None = None,
    *,
    full: bool = False,
) -> Frontier:
    """The frontier of a job, traced anew.

    Args:
        progress, full: as for trace_frontier.

    Raises:
        InputError: the job or its blocking power does not fit the profile.
    """
    from envplan.frontier import trace_frontier

    given = job.blocking_power_source == "argument" and job.blocking_power_w
    frontier = trace_frontier(
        job.pipeline(),
        profile,
        blocking_power=job.blocking_power_w[0] if given else None,
        gpus_per_stage=job.gpus_per_stage,
        replicas=job.replicas,
        full=full,
        progress=progress,
    )
    if list(frontier.blocking_power_w) != job.blocking_power_w:
        raise InputError(
            f"job.blocking_power_w is not what its source, {job.blocking_power_source}, gives"
        )
    return frontier


def _check_bound(plan: Plan, frontier: Frontier) -> str:
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
    if stated > least * (1 + _BOUND_TOLERANCE):
        raise InputError(
            f"predicted.energy_lower_bound_j is {stated!r}; only {least!r} can be proved"
        )
    return f"lower bound proved: no plan by {deadline!r} s uses less than {least!r} J"


def _check_until_straggler(plan: Plan, frontier: Frontier) -> list[str]:
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
    if bound > least * (1 + _BOUND_TOLERANCE):
        raise InputError(
            f"predicted.until_straggler.energy_lower_bound_j is {bound!r}; only {least!r} can be "
            "proved"
        )
    true = until_straggler(plan, time, bound)
    for field in UntilStraggler.model_fields:
        found, right = getattr(stated, field), getattr(true, field)
        if not math.isclose(found, right, rel_tol=_DERIVED_TOLERANCE, abs_tol=_DERIVED_TOLERANCE):
            raise InputError(
                f"predicted.until_straggler.{field} is {found!r}; recomputed it is {right!r}"
            )
    return [
        f"until the straggler has finished at {time!r} s, {stated.energy_j!r} J are used; no plan "
        f"in time for it uses less than {least!r} J"
    ]


def _check_kind(plan: Plan, frontier: Frontier) -> None:
    """That the deadline is the one which the kind of target means."""
    target, least, star = plan.target, frontier.min_time_ns, frontier.min_energy_time_ns
    if target.peak_power_w is not None:
        # Under a cap, going slower than T_star may save energy.
        star = MAX_INTEGER
    match target.kind:
        case "no-slowdown" if plan.job.switch_latency_s or plan.job.min_dwell_s:
            # T_min may need clocks that cannot change so fast: the least time found without them.
            meant = max(least, ns_from_s(target.deadline_s))
        case "no-slowdown":
            meant = least
        case "slowdown":
            meant = min(least + int(least * (target.slowdown or 0.0)), star)
        case "time":
            meant = min(ns_from_s_floor(target.time_s or 0.0), star)
        case "sync-time":
            meant = ns_from_s_floor(target.time_s or 0.0)
        case "min-energy" if target.peak_power_w is not None:
            meant = ns_from_s(plan.iteration_time)
        case "min-energy":
            meant = star
        case "planner":
            asked = plan.iteration_time if target.time_s is None else target.time_s
            meant = ns_from_s_floor(asked)
        case _:
            return
    if target.deadline_s != s_from_ns(meant):
        raise InputError(
            f"target.deadline_s is {target.deadline_s!r}; {target.kind} means {s_from_ns(meant)!r}"
        )
