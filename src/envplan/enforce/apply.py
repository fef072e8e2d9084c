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
from typing import NamedTuple, TypeVar

import numpy as np

from envplan.enforce.clocks import stage_clocks
from envplan.enforce.freqplan import (
    FREQPLAN_SCHEMA,
    MAX_OPERATIONS,
    FrequencyPlan,
    RaisedClock,
    RankPlan,
    StageClocks,
    StageEnergy,
    asked_for,
)
from envplan.enforce.topology import Topology
from envplan.errors import InputError
from envplan.pipeline import Operation
from envplan.plan import Plan, Rung, as_referenced, check_reference, rung_rows
from envplan.plan.build import check_operations
from envplan.profile import Profile
from envplan.replay import Machine, Problem, Replay
from envplan.request.limits import LimitContext
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
    clocks: StageClocks | Sequence[StageClocks] | None = None,
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
    problem = plan.job.problem(profile)
    pipeline = problem.pipeline
    check_operations(plan, pipeline)
    gpus = stage_clocks(profile, pipeline, clocks)
    own = plan.as_rung()
    num_gpus = _num_gpus(plan, topology, len(pipeline.operations))
    fitter = _Fitter(problem, plan.job.machine, gpus)
    planned = fitter.planned("the plan", own)
    fitted = fitter.fit(planned)
    replay = fitter.replay(raised.knob for raised in fitted)
    context = LimitContext(num_gpus, plan.target.deadline_ns, profile, sync_ns=plan.request.sync_ns)
    limits = plan.request.limits
    if not force:
        # Where clocks come late, an operation that is over sooner may make a later one slower.
        for replayed, advice in (
            (fitter.replay(planned), "envplan check says more"),
            (replay, "plan again, from a profile of this GPU"),
        ):
            if replayed.makespan_ns > plan.target.deadline_ns:
                raise InputError(
                    f"replayed, the plan takes {s_from_ns(replayed.makespan_ns)!r} s, more than "
                    f"its deadline of {plan.target.deadline_s!r} s; {advice}"
                )
        for limit in limits:
            if not limit.kept_by_sooner_ends and limit.violation(replay, context):
                raise InputError(
                    "with clocks raised to those the GPU has, "
                    f"{limit.explain_violation(replay, context)}; plan again from a profile of "
                    "clocks that the GPU has"
                )
    rungs = [fitter.rung(fitted, replay, own, num_gpus)]
    with_ladder = ladder and plan.ladder is not None
    last = replay
    for n, slower in enumerate(plan.ladder or () if with_ladder else ()):
        choice = fitter.fit(fitter.planned(f"ladder[{n}]", slower))
        replayed = fitter.replay(raised.knob for raised in choice)
        broken = any(
            limit.is_repairable_by_moves and limit.violation(replayed, context) for limit in limits
        )
        # It uses less until any time after both.
        saves = replayed.energy_until(0) < last.energy_until(0)
        if replayed.makespan_ns > last.makespan_ns and saves and not broken:
            last = replayed
            rungs.append(fitter.rung(choice, replayed, slower, num_gpus))
    alike = all(gpu == gpus[0] for gpu in gpus)
    highest = problem.replay(problem.max_frequency_rows).stage_energies_fj
    return FrequencyPlan(
        schema=FREQPLAN_SCHEMA,
        plan_sha256=plan_sha256 or hashlib.sha256(plan.to_json().encode()).hexdigest(),
        profile_sha256=profile.sha256,
        gpu=gpus[0].gpu if alike else None,
        clocks_source=gpus[0].clocks_source,
        supported_clocks_mhz=sorted({mhz for gpu in gpus for mhz in gpu.supported_clocks_mhz}),
        stage_gpus=None if alike else gpus,
        world_size=topology.world_size,
        layout=topology,
        deadline_s=plan.target.deadline_s,
        iteration_time_s=rungs[0].iteration_time_s,
        energy_j=rungs[0].energy_j,
        stage_energies=[
            StageEnergy(planned_j=j_from_fj(planned_fj), baseline_j=j_from_fj(baseline_fj))
            for planned_fj, baseline_fj in zip(replay.stage_energies_fj, highest, strict=True)
        ],
        raised=fitter.counted(fitted),
        ranks=_ranks(plan, topology, rungs, devices),
        ladder=rungs[1:] if with_ladder else None,
    )


def _num_gpus(plan: Plan, topology: Topology, operations: int) -> int:
    """GPUs of one stage in all replicas: what an operation's energy is multiplied by.

    Raises:
        InputError: the plan keeps to joules or watts of another number, or they have too many
            operations for a file.
    """
    count = topology.world_size // topology.stages
    counts_all_gpus = any(limit.counts_all_gpus for limit in plan.request.limits)
    if count != plan.job.num_gpus and counts_all_gpus:
        raise InputError(
            f"every stage has {count} GPUs, but the plan's J or W are those of "
            f"{plan.job.num_gpus}; solve again with --tp {topology.tp * topology.cp} "
            f"--dp {topology.dp}"
        )
    if count * operations > MAX_OPERATIONS:
        raise InputError(
            f"{topology.world_size} ranks have {count * operations} operations together; a "
            f"frequency plan holds at most {MAX_OPERATIONS}"
        )
    return count


def _ranks(
    plan: Plan, topology: Topology, rungs: Sequence[Rung], devices: Sequence[int]
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


class _Raised(NamedTuple):
    """What becomes of an operation's clocks on a GPU.

    Attributes:
        knob: its MHz and config.
        clocks: (MHz before, MHz now, whether the profile knows the latter) of those that differ.
    """

    knob: Knob
    clocks: list[tuple[int, int, bool]]


class _Fitter:
    """Fits clocks of one plan's operations to GPUs. A choice is a knob for every operation, (N,).

    Args:
        clocks: of each stage's GPU, (num_stages,).
    """

    def __init__(self, problem: Problem, machine: Machine, clocks: Sequence[StageClocks]) -> None:
        self._problem = problem
        self._machine = machine
        self._clocks = clocks
        self._table = problem.table.tolist()
        self._row = cache(self._find_row)

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

    def fit(self, planned: Sequence[Knob]) -> list[_Raised]:
        """Every clock, or where the GPU lacks it the next one above that is not slower.

        Raises:
            InputError: there is none.
        """
        return [self._raised(op, knob) for op, knob in enumerate(planned)]

    def replay(self, choice: Iterable[Knob]) -> Replay:
        """What a choice comes to on the plan's machine: all that is said of it follows from it."""
        rows = map(self._row, self._table, choice)
        return self._problem.replay(np.fromiter(rows, np.int32), self._machine)

    def counted(self, fitted: Sequence[_Raised]) -> list[RaisedClock]:
        """The clocks that differ, with how many operations of a replica they are for."""
        operations = self._problem.pipeline.operations
        counts = Counter(
            (op.stage, op.instruction, *clocks)
            for op, raised in zip(operations, fitted, strict=True)
            for clocks in raised.clocks
        )
        names = ("stage", "instruction", "planned_mhz", "applied_mhz", "profiled")
        return [
            RaisedClock.of(**dict(zip(names, found, strict=True)), operations=count)
            for found, count in sorted(counts.items())
        ]

    def rung(self, fitted: Sequence[_Raised], replay: Replay, planned: Rung, num_gpus: int) -> Rung:
        """What a rung of a plan has become."""
        clocks, configs = zip(*(raised.knob for raised in fitted), strict=True)
        return Rung(
            iteration_time_s=s_from_ns(replay.makespan_ns),
            energy_j=j_from_fj(replay.energy_fj * num_gpus),
            frequencies_mhz=self._by_stage(clocks),
            configs=planned.configs and self._by_stage(configs),
        )

    def _by_stage(self, values: Sequence[T]) -> list[list[T]]:
        bounds = pairwise(self._problem.pipeline.stage_begin.tolist())
        return [list(values[first:last]) for first, last in bounds]

    def _raised(self, op: int, knob: Knob) -> _Raised:
        """What becomes of an operation's planned clocks.

        Where the GPU lacks the clock of a part, all parts get one.

        Raises:
            InputError: the GPU has none that is as fast.
        """
        what, number = self._problem.pipeline.operations[op], self._table[op]
        gpu, table = self._clocks[what.stage], self._problem.tables[number]
        row = self._row(number, knob)
        lacking = sorted(asked_for([knob[0]], [knob[1]]).difference(gpu.supported_clocks_mhz))
        if not lacking:
            return _Raised(knob, [])
        for mhz in gpu.supported_clocks_mhz:
            new = mhz, table.first_config[row]
            if mhz > lacking[-1] and table.time_ns[self._row(number, new)] <= table.time_ns[row]:
                known = new in self._problem.rows_by_knob[number]
                return _Raised(new, [(planned, mhz, known) for planned in lacking])
        raise _too_fast(what, gpu, lacking[-1])

    def _find_row(self, table: int, knob: Knob) -> int:
        """The row that stands for an operation: that of its clock, or of the highest below.

        Where the profile does not know a clock, the operation counts as no faster than it is known
        to be.
        """
        rows, (mhz, config) = self._problem.rows_by_knob[table], knob
        return rows[max(known for known in rows if known[0] <= mhz and known[1] == config)]


def _too_fast(what: Operation, clocks: StageClocks, mhz: int) -> InputError:
    name, highest = clocks.gpu or "the GPU", clocks.supported_clocks_mhz[-1]
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
