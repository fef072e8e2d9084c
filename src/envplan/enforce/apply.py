"""From a plan to a frequency plan: clocks that the GPUs have, rank by rank, and the ladder.

Nothing here makes an operation slower than it was planned (see fitting.py). Where clocks come at
once, every start and the iteration are therefore in time as well; the replay that follows confirms
it to the nanosecond, and finds where clocks that come late make it otherwise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from envplan.enforce.clocks import Clocks, stage_clocks
from envplan.enforce.fitting import Choice, Fitter
from envplan.enforce.freqplan import (
    FREQPLAN_SCHEMA,
    MAX_OPERATIONS,
    FrequencyPlan,
    LadderRung,
    RankPlan,
    StageClocks,
)
from envplan.enforce.topology import Topology
from envplan.errors import InputError
from envplan.pipeline import Pipeline
from envplan.plan import Plan, as_referenced, check_operations, check_reference
from envplan.profile import Profile
from envplan.replay import Replay
from envplan.units import ns_from_s_floor, s_from_ns

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
    pipeline = plan.job.pipeline()
    check_operations(plan, pipeline)
    _refuse_too_large(topology, pipeline)
    gpus = stage_clocks(profile, pipeline, clocks)
    fitter = Fitter(plan, profile, gpus, _num_gpus(plan, topology))
    configs = [[operation.config for operation in stage] for stage in plan.stages]
    planned = fitter.planned(plan.frequencies, configs, "the plan")
    if not force:
        _check_deadline(fitter.replay(planned), plan, "envplan check says more")
    applied = supported = fitter.supported(planned)
    dwell = None
    if min_dwell is not None:
        applied, dwell = fitter.lasting(supported, min_dwell)
    priced = fitter.replay(applied)
    if not force:
        # Where clocks come late, an operation that is over sooner may make a later one slower.
        advice = "plan again, from a profile of this GPU and with solve's own --min-dwell"
        _check_deadline(priced, plan, advice)
        if broken := fitter.broken_limit(plan, applied, priced):
            raise InputError(
                f"with clocks raised to those the GPU has, or for --min-dwell, {broken}; plan "
                "again from a profile of clocks that the GPU has"
            )
    rungs = _rungs(plan, fitter, min_dwell, priced) if ladder else None
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
        iteration_time_s=s_from_ns(priced.makespan_ns),
        energy_j=fitter.joules(priced.energy_fj),
        raised=fitter.raised(planned, supported),
        dwell=dwell,
        ranks=_ranks(topology, pipeline, applied, configs, rungs or [], devices),
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


def _check_deadline(priced: Replay, plan: Plan, advice: str) -> None:
    deadline_s = plan.target.deadline_s
    if priced.makespan_ns > ns_from_s_floor(deadline_s):
        raise InputError(
            f"replayed, the plan takes {s_from_ns(priced.makespan_ns)!r} s, more than its deadline "
            f"of {deadline_s!r} s; {advice}"
        )


def _rungs(
    plan: Plan, fitter: Fitter, min_dwell: float | None, fastest: Replay
) -> list[LadderRung] | None:
    """The plan's ladder with clocks the GPU has, without rungs that no longer save anything or
    keep to the plan's limits."""
    if plan.ladder is None:
        return None
    rungs: list[LadderRung] = []
    last_ns, least_fj = fastest.makespan_ns, fitter.above_waiting_fj(fastest)
    for n, rung in enumerate(plan.ladder):
        configs = rung.configs or [[""] * len(stage) for stage in rung.frequencies_mhz]
        choice = fitter.supported(fitter.planned(rung.frequencies_mhz, configs, f"ladder[{n}]"))
        if min_dwell is not None:
            choice, _ = fitter.lasting(choice, min_dwell)
        priced = fitter.replay(choice)
        above_fj = fitter.above_waiting_fj(priced)
        if priced.makespan_ns <= last_ns or above_fj >= least_fj:
            continue
        if fitter.broken_limit(plan, choice, priced):
            continue
        last_ns, least_fj = priced.makespan_ns, above_fj
        rungs.append(
            LadderRung(
                iteration_time_s=s_from_ns(last_ns),
                energy_j=fitter.joules(priced.energy_fj),
                frequencies_mhz=[choice.mhz[first:last] for first, last in fitter.stages],
                configs=rung.configs,
            )
        )
    return rungs


def _ranks(
    topology: Topology,
    pipeline: Pipeline,
    applied: Choice,
    configs: Sequence[list[str]],
    rungs: Sequence[LadderRung],
    devices: Sequence[int],
) -> list[RankPlan]:
    operations: list[list[tuple[str, int, int, int]]] = [[] for _ in range(topology.stages)]
    for op, mhz in zip(pipeline.operations, applied.mhz, strict=True):
        operations[op.stage].append((op.instruction, op.microbatch, op.chunk, mhz))
    clocks = [
        {operation[3] for operation in stage}.union(*(r.frequencies_mhz[s] for r in rungs)) - {0}
        for s, stage in enumerate(operations)
    ]
    named = any(any(stage) for stage in configs)
    stages = [topology.stage_of(rank) for rank in range(topology.world_size)]
    return [
        RankPlan(
            rank=rank,
            stage=stage,
            device=devices[rank % len(devices)],
            clocks_mhz=sorted(clocks[stage]),
            operations=operations[stage],
            configs=configs[stage] if named else None,
        )
        for rank, stage in enumerate(stages)
    ]
