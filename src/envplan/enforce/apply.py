"""From a plan to a frequency plan: clocks that the GPUs have, rank by rank, and the ladder.

Nothing here makes an operation slower than it was planned (see fitting.py). Where clocks come at
once, every start and the iteration are therefore in time as well; the replay that follows confirms
it to the nanosecond, and finds where clocks that come late make it otherwise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from envplan.enforce.clocks import Clocks, stage_clocks
from envplan.enforce.fitting import Choice, Fitter, raise_parts
from envplan.enforce.freqplan import (
    FREQPLAN_SCHEMA,
    MAX_OPERATIONS,
    FrequencyPlan,
    LadderRung,
    RankPlan,
    StageClocks,
    StageEnergy,
    asked_for,
    clocks_within,
)
from envplan.enforce.topology import Topology
from envplan.errors import InputError
from envplan.limits import HoldsWithProbability, Setting
from envplan.pipeline import Pipeline
from envplan.plan import (
    Plan,
    Rung,
    as_referenced,
    check_operations,
    check_reference,
    machine_of,
    problem_of,
)
from envplan.profile import Profile
from envplan.replay import Replay
from envplan.units import j_from_fj, s_from_ns

__all__ = ["apply_plan"]


def apply_plan(
    plan: Plan,
    profile: Profile,
    *,
    topology: Topology,
    clocks: Clocks | Sequence[Clocks] | None = None,
    devices: Sequence[int] = tuple(range(8)),
    min_dwell: float | None = None,
    ladder: bool = True,
    force: bool = False,
    plan_sha256: str | None = None,
) -> FrequencyPlan:
    """The frequency plan of a plan.

    Args:
        plan: what to do.
        profile: the profile it was made from.
        topology: which rank runs which stage.
        clocks: what the GPU can be set to, or for each stage its own; default: stage_clocks.
        devices: GPU indices of a node; rank r gets number r modulo their count.
        min_dwell: s; raise operations until no clock changes sooner than this after the last
            change. None: leave them alone.
        ladder: include the plan's ladder, if it has one.
        force: go on though the profile has changed since.
        plan_sha256: of the plan's file; default: of the text that Plan.save writes.

    Raises:
        InputError: profile and plan do not belong together, the plan does not hold, or the GPU has
            no clock that keeps up with it.
    """
    check_reference(plan.profile, profile, force)
    profile = as_referenced(plan.profile, profile)
    problem = problem_of(plan.job, profile)
    pipeline = problem.pipeline
    check_operations(plan, pipeline)
    _refuse_too_large(topology, pipeline)
    gpus = stage_clocks(profile, pipeline, clocks)
    profile, parts = raise_parts(profile, pipeline, (plan.as_rung(), *(plan.ladder or ())), gpus)
    if parts:
        problem = problem_of(plan.job, profile)
    fitter = Fitter(problem, machine_of(plan.job), gpus, _num_gpus(plan, topology), parts)
    own = plan.as_rung()
    planned = fitter.planned("the plan", own)
    if not force:
        _check_deadline(fitter.replay(planned), plan, "envplan check says more")
    applied = supported = fitter.supported(planned)
    dwell = None
    if min_dwell is not None:
        if any(clocks_within(stage) for stage in own.configs or ()):
            raise InputError(
                "--min-dwell raises whole operations, but parts of these have clocks of their own; "
                "solve with --min-dwell instead"
            )
        applied, dwell = fitter.lasting(supported, min_dwell)
    replay = fitter.replay(applied)
    setting = Setting(fitter.num_gpus, plan.target.deadline_ns, profile)
    if not force:
        # Where clocks come late, an operation that is over sooner may make a later one slower.
        advice = "plan again, from a profile of this GPU and with solve's own --min-dwell"
        _check_deadline(replay, plan, advice)
        if broken := _broken_limit(plan, replay, setting):
            raise InputError(
                f"with clocks raised to those the GPU has, or for --min-dwell, {broken}; plan "
                "again from a profile of clocks that the GPU has"
            )
    first = _rung(fitter, applied, replay, own)
    rungs = _rungs(plan, fitter, min_dwell, replay, setting) if ladder else None
    alike = len(set(gpus)) == 1
    return FrequencyPlan(
        schema=FREQPLAN_SCHEMA,
        plan_sha256=plan_sha256 or hashlib.sha256(plan.to_json().encode()).hexdigest(),
        profile_sha256=profile.sha256,
        gpu=gpus[0].gpu if alike else None,
        clocks_source=gpus[0].source,
        supported_clocks_mhz=sorted({mhz for gpu in gpus for mhz in gpu.mhz}),
        stage_gpus=None if alike else [_stage_gpu(gpu) for gpu in gpus],
        world_size=topology.world_size,
        layout=topology,
        deadline_s=plan.target.deadline_s,
        iteration_time_s=first.iteration_time_s,
        energy_j=first.energy_j,
        stage_energies=[
            StageEnergy(planned_j=j_from_fj(planned_fj), baseline_j=j_from_fj(baseline_fj))
            for planned_fj, baseline_fj in zip(
                replay.stage_energies_fj,
                problem.replay(problem.max_frequency_rows).stage_energies_fj,
                strict=True,
            )
        ],
        raised=fitter.raised(planned, supported),
        dwell=dwell,
        ranks=_ranks(plan, topology, [first, *(rungs or [])], devices),
        ladder=rungs,
    )


def _stage_gpu(clocks: Clocks) -> StageClocks:
    return StageClocks(
        gpu=clocks.gpu, clocks_source=clocks.source, supported_clocks_mhz=list(clocks.mhz)
    )


def _num_gpus(plan: Plan, topology: Topology) -> int:
    """GPUs of one stage in all replicas: what an operation's energy is multiplied by.

    Raises:
        InputError: the plan keeps to joules or watts of another number.
    """
    count, target = topology.world_size // topology.stages, plan.target
    absolute = target.kind in ("energy-budget", "power-cap") or target.peak_power_w is not None
    if count != plan.job.num_gpus and absolute:
        raise InputError(
            f"every stage has {count} GPUs, but the plan's J or W are those of "
            f"{plan.job.num_gpus}; solve again with --tp {topology.tp * topology.cp} "
            f"--dp {topology.dp}"
        )
    return count


def _refuse_too_large(topology: Topology, pipeline: Pipeline) -> None:
    count = topology.world_size // topology.stages * len(pipeline.operations)
    if count > MAX_OPERATIONS:
        raise InputError(
            f"{topology.world_size} ranks have {count} operations together; a frequency plan holds "
            f"at most {MAX_OPERATIONS}"
        )


def _check_deadline(replay: Replay, plan: Plan, advice: str) -> None:
    target = plan.target
    if replay.makespan_ns > target.deadline_ns:
        raise InputError(
            f"replayed, the plan takes {s_from_ns(replay.makespan_ns)!r} s, more than its deadline "
            f"of {target.deadline_s!r} s; {advice}"
        )


def _broken_limit(plan: Plan, replay: Replay, setting: Setting) -> str | None:
    """How a replay breaks one of a plan's limits, in words; None if it keeps all.

    Where operations end no later, the probability that a plan holds is no less.
    """
    for limit in plan.request.limits:
        if not isinstance(limit, HoldsWithProbability) and limit.excess(replay, setting):
            return limit.broken(replay, setting)
    return None


def _rungs(
    plan: Plan, fitter: Fitter, min_dwell: float | None, fastest: Replay, setting: Setting
) -> list[LadderRung] | None:
    """The plan's ladder with clocks the GPU has, without rungs that no longer save anything or
    keep to the plan's limits."""
    if plan.ladder is None:
        return None
    rungs: list[LadderRung] = []
    last = fastest
    for n, rung in enumerate(plan.ladder):
        choice = fitter.supported(fitter.planned(f"ladder[{n}]", rung))
        if min_dwell is not None:
            choice, _ = fitter.lasting(choice, min_dwell)
        replay = fitter.replay(choice)
        # It uses less until any time after both.
        saves = replay.energy_until(0) < last.energy_until(0)
        if replay.makespan_ns <= last.makespan_ns or not saves:
            continue
        if any(limit.is_local and limit.excess(replay, setting) for limit in plan.request.limits):
            continue
        last = replay
        rungs.append(_rung(fitter, choice, replay, rung))
    return rungs


def _rung(fitter: Fitter, choice: Choice, replay: Replay, rung: Rung) -> LadderRung:
    """What a rung of a plan has become."""
    return LadderRung(
        iteration_time_s=s_from_ns(replay.makespan_ns),
        energy_j=fitter.joules(replay.energy_fj),
        frequencies_mhz=fitter.by_stage([mhz for mhz, _ in choice]),
        configs=rung.configs and fitter.by_stage([config for _, config in choice]),
    )


def _ranks(
    plan: Plan, topology: Topology, rungs: Sequence[LadderRung], devices: Sequence[int]
) -> list[RankPlan]:
    """Every rank's part, of the plan itself, the first of the rungs."""
    operations, clocks = [], []
    for s, stage in enumerate(plan.stages):
        asked = [asked_for(r.frequencies_mhz[s], r.configs_of(s)) for r in rungs]
        clocks.append(sorted(set().union(*asked)))
        frequencies = rungs[0].frequencies_mhz[s]
        operations.append(
            [
                (op.instruction, op.microbatch, op.chunk, mhz)
                for op, mhz in zip(stage, frequencies, strict=True)
            ]
        )
    return [
        RankPlan(
            rank=rank,
            stage=stage,
            device=devices[rank % len(devices)],
            clocks_mhz=clocks[stage],
            operations=operations[stage],
            configs=rungs[0].configs_of(stage),
        )
        for rank, stage in enumerate(map(topology.stage_of, range(topology.world_size)))
    ]
