"""From a plan to a frequency plan: clocks that the GPUs have, rank by rank, and the ladder.

A clock that a GPU lacks is replaced by the next one above. Where the profile knows the higher clock
and says that it is slower after all, as noise may have it, a still higher one is taken. So nothing
here makes an operation slower than it was planned. Where clocks come at once, every start and the
iteration are therefore in time as well; the replay that follows confirms it to the nanosecond, and
finds where clocks that come late make it otherwise.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import chain, pairwise, repeat
from typing import TypeVar

import numpy as np

from envplan.enforce.clocks import Clocks, stage_clocks
from envplan.enforce.freqplan import (
    FREQPLAN_SCHEMA,
    MAX_OPERATIONS,
    FrequencyPlan,
    LadderRung,
    RaisedClock,
    RankPlan,
    StageClocks,
    StageEnergy,
    asked_for,
)
from envplan.enforce.topology import Topology
from envplan.errors import InputError
from envplan.limits import HoldsWithProbability, Setting
from envplan.pipeline import Operation, Pipeline
from envplan.plan import Plan, Rung, as_referenced, check_reference, rung_rows
from envplan.plan.replayed import check_operations, machine_of, problem_of
from envplan.profile import Profile, Raised, changes_of
from envplan.replay import Machine, Problem, Replay
from envplan.units import j_from_fj, s_from_ns

__all__ = ["apply_plan"]

T = TypeVar("T")

#: MHz of an operation, 0 where none is set, and its config.
Knob = tuple[int, str]


def apply_plan(
    plan: Plan,
    profile: Profile,
    *,
    topology: Topology,
    clocks: Clocks | Sequence[Clocks] | None = None,
    devices: Sequence[int] = tuple(range(8)),
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
    own = plan.as_rung()
    profile, parts = _raise_parts(profile, pipeline, (own, *(plan.ladder or ())), gpus)
    if parts:
        problem = problem_of(plan.job, profile)
    fitter = _Fitter(problem, machine_of(plan.job), gpus, parts)
    planned = fitter.planned("the plan", own)
    applied = fitter.supported(planned)
    replay = fitter.replay(applied)
    num_gpus = _num_gpus(plan, topology)
    setting = Setting(num_gpus, plan.target.deadline_ns, profile)
    if not force:
        _check_deadline(fitter.replay(planned), plan, "envplan check says more")
        # Where clocks come late, an operation that is over sooner may make a later one slower.
        _check_deadline(replay, plan, "plan again, from a profile of this GPU")
        for limit in plan.request.limits:
            # Where operations end no later, the probability that a plan holds is no less.
            if not isinstance(limit, HoldsWithProbability) and limit.excess(replay, setting):
                raise InputError(
                    f"with clocks raised to those the GPU has, {limit.broken(replay, setting)}; "
                    "plan again from a profile of clocks that the GPU has"
                )
    rungs = [fitter.rung(applied, replay, own, num_gpus)]
    with_ladder = ladder and plan.ladder is not None
    last = replay
    for n, slower in enumerate(plan.ladder or () if with_ladder else ()):
        choice = fitter.supported(fitter.planned(f"ladder[{n}]", slower))
        replayed = fitter.replay(choice)
        # It uses less until any time after both.
        saves = replayed.energy_until(0) < last.energy_until(0)
        if (
            replayed.makespan_ns > last.makespan_ns
            and saves
            and not any(
                limit.is_local and limit.excess(replayed, setting) for limit in plan.request.limits
            )
        ):
            last = replayed
            rungs.append(fitter.rung(choice, replayed, slower, num_gpus))
    alike = len(set(gpus)) == 1
    highest = problem.replay(problem.max_frequency_rows).stage_energies_fj
    return FrequencyPlan(
        schema=FREQPLAN_SCHEMA,
        plan_sha256=plan_sha256 or hashlib.sha256(plan.to_json().encode()).hexdigest(),
        profile_sha256=profile.sha256,
        gpu=gpus[0].gpu if alike else None,
        clocks_source=gpus[0].source,
        supported_clocks_mhz=sorted({mhz for gpu in gpus for mhz in gpu.mhz}),
        stage_gpus=None
        if alike
        else [
            StageClocks(gpu=g.gpu, clocks_source=g.source, supported_clocks_mhz=list(g.mhz))
            for g in gpus
        ],
        world_size=topology.world_size,
        layout=topology,
        deadline_s=plan.target.deadline_s,
        iteration_time_s=rungs[0].iteration_time_s,
        energy_j=rungs[0].energy_j,
        stage_energies=[
            StageEnergy(planned_j=j_from_fj(planned_fj), baseline_j=j_from_fj(baseline_fj))
            for planned_fj, baseline_fj in zip(replay.stage_energies_fj, highest, strict=True)
        ],
        raised=fitter.raised(planned),
        ranks=_ranks(plan, topology, rungs, devices),
        ladder=rungs[1:] if with_ladder else None,
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


def _ranks(
    plan: Plan, topology: Topology, rungs: Sequence[LadderRung], devices: Sequence[int]
) -> list[RankPlan]:
    """Every rank's part, of the plan itself, the first of the rungs."""
    clocks = [
        sorted(set().union(*(asked_for(r.frequencies_mhz[s], r.configs_of(s)) for r in rungs)))
        for s in range(len(plan.stages))
    ]
    operations = [
        [(op.instruction, op.microbatch, op.chunk, mhz) for op, mhz in zip(*both, strict=True)]
        for both in zip(plan.stages, rungs[0].frequencies_mhz, strict=True)
    ]
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


class _Fitter:
    """Fits clocks of one plan's operations to GPUs. A choice is a knob for every operation, (N,).

    Args:
        clocks: of each stage's GPU, (num_stages,).
        parts: what _raise_parts found.
    """

    def __init__(
        self,
        problem: Problem,
        machine: Machine,
        clocks: Sequence[Clocks],
        parts: dict[tuple[int, str, str], Raised],
    ) -> None:
        self._problem = problem
        self._machine = machine
        self._clocks = clocks
        self._parts = parts
        self._table = problem.table.tolist()
        self._row_of_table = cache(self._find_row)

    def planned(self, name: str, rung: Rung) -> list[Knob]:
        """A plan's own choice.

        Args:
            name: of the rung, for errors.

        Raises:
            InputError: as for rung_rows.
        """
        rung_rows(name, rung, self._problem)
        configs = chain(*rung.configs) if rung.configs else repeat("")
        return list(zip(chain(*rung.frequencies_mhz), configs, strict=False))

    def replay(self, choice: Sequence[Knob]) -> Replay:
        """What a choice comes to on the plan's machine: all that is said of it follows from it."""
        rows = [self._row(op, knob) for op, knob in enumerate(choice)]
        return self._problem.replay(np.array(rows, np.int32), self._machine)

    def supported(self, planned: Sequence[Knob]) -> list[Knob]:
        """Every clock, or where the GPU lacks it the next one above that is not slower.

        Raises:
            InputError: there is none.
        """
        return [self._raised(op, knob).knob for op, knob in enumerate(planned)]

    def raised(self, planned: Sequence[Knob]) -> list[RaisedClock]:
        """The clocks that differ, with how many operations of a replica they are for."""
        counts: Counter[tuple[int, str, int, int, bool]] = Counter()
        for i, op in enumerate(self._problem.pipeline.operations):
            pairs = self._raised(i, planned[i]).clocks
            counts.update((op.stage, op.instruction, *pair) for pair in pairs)
        return [
            RaisedClock(
                stage=stage,
                instruction=instruction,
                planned_mhz=asked,
                applied_mhz=mhz,
                operations=count,
                profiled=profiled,
            )
            for (stage, instruction, asked, mhz, profiled), count in sorted(counts.items())
        ]

    def rung(
        self, choice: Sequence[Knob], replay: Replay, planned: Rung, num_gpus: int
    ) -> LadderRung:
        """What a rung of a plan has become."""
        clocks, configs = zip(*choice, strict=True)
        return LadderRung(
            iteration_time_s=s_from_ns(replay.makespan_ns),
            energy_j=j_from_fj(replay.energy_fj * num_gpus),
            frequencies_mhz=self._by_stage(clocks),
            configs=planned.configs and self._by_stage(configs),
        )

    def _by_stage(self, values: Sequence[T]) -> list[list[T]]:
        bounds = pairwise(self._problem.pipeline.stage_begin.tolist())
        return [list(values[first:last]) for first, last in bounds]

    def _raised(self, op: int, knob: Knob) -> Raised:
        """What becomes of an operation's planned clock.

        Raises:
            InputError: the GPU has none that is as fast.
        """
        what, (planned, config) = self._problem.pipeline.operations[op], knob
        if own := self._parts.get((what.profile_stage, what.instruction, config)):
            return own
        gpu, times = self._clocks[what.stage], self._problem.tables[self._table[op]].time_ns
        if not planned or planned in gpu.mhz:
            return Raised(knob, ())
        for mhz in gpu.mhz:
            new = mhz, config
            if mhz > planned and times[self._row(op, new)] <= times[self._row(op, knob)]:
                known = new in self._problem.rows_by_knob[self._table[op]]
                return Raised(new, ((planned, mhz, known),))
        raise _too_fast(what, gpu, planned)

    def _row(self, op: int, knob: Knob) -> int:
        """The row that stands for an operation: that of its clock, or of the highest below.

        Where the profile does not know a clock, the operation counts as no faster than it is known
        to be.
        """
        return self._row_of_table(self._table[op], knob)

    def _find_row(self, number: int, knob: Knob) -> int:
        rows = self._problem.rows_by_knob[number]
        mhz, config = knob
        return rows[max(known for known in rows if known[0] <= mhz and known[1] == config)]


def _raise_parts(
    profile: Profile, pipeline: Pipeline, rungs: Iterable[Rung], clocks: Sequence[Clocks]
) -> tuple[Profile, dict[tuple[int, str, str], Raised]]:
    """Options for operations whose parts ask for clocks that their GPU lacks.

    Args:
        rungs: the plan and its ladder.
        clocks: of each stage's GPU, (num_stages,).

    Returns:
        The profile with these options, and each by the profile's stage, the instruction and the
        config it stands for.

    Raises:
        InputError: no clock of the GPU is as fast.
    """
    found: dict[tuple[int, str, str], Raised] = {}
    for rung in rungs:
        for op, config in zip(pipeline.operations, chain(*(rung.configs or ())), strict=False):
            key, gpu = (op.profile_stage, op.instruction, config), clocks[op.stage]
            lacking = {change.frequency_mhz for change in changes_of(config)}.difference(gpu.mhz)
            if not lacking or key in found:
                continue
            made = profile.raised(*key, gpu.mhz)
            if made is None:
                raise _too_fast(op, gpu, max(lacking))
            profile, found[key] = made
    return profile, found


def _too_fast(what: Operation, clocks: Clocks, mhz: int) -> InputError:
    name, highest = clocks.gpu or "the GPU", clocks.mhz[-1]
    reason = (
        f"the highest clock of {name} is {highest} MHz"
        if mhz > highest
        else f"that is no clock of {name}, and by the profile none above it is as fast"
    )
    return InputError(
        f"the plan asks for {mhz} MHz for {what.instruction} {what.microbatch} of stage "
        f"{what.stage}, but {reason}; plan again from a profile of this GPU, or say which GPU "
        "it is with --gpu or --clocks"
    )
