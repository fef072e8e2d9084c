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
from dataclasses import dataclass
from functools import cache
from itertools import chain, pairwise, repeat
from typing import NamedTuple, TypeVar

import numpy as np

from envplan.enforce.freqplan import (
    FREQPLAN_SCHEMA,
    MAX_OPERATIONS,
    ClockedOperation,
    FrequencyPlan,
    RaisedClock,
    RankPlan,
    StageClocks,
    StageEnergy,
    StagePower,
    StageTimes,
    Switching,
    requested_clocks,
)
from envplan.enforce.supported_clocks import stage_clocks
from envplan.enforce.topology import Topology
from envplan.errors import InputError
from envplan.pipeline import Operation
from envplan.plan import Plan, Rung, as_referenced, check_reference, rung_rows
from envplan.plan.build import check_operations
from envplan.profile import Profile
from envplan.replay import Machine, Problem, Replay
from envplan.request.limits import LimitContext
from envplan.units import POWER_UNITS_PER_W, j_from_10fj, s_from_ns

__all__ = ["apply_plan"]

T = TypeVar("T")


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
    """Make the frequency plan of a plan.

    Args:
        plan: the plan to follow.
        profile: the profile it was made from.
        topology: which rank runs which stage.
        clocks: that the GPU supports, or for each stage its own; default: stage_clocks.
        devices: GPU indices of a node; rank r gets number r modulo their count.
        ladder: include the plan's ladder, if it has one.
        force: go on though the profile has changed since, or the plan's deadline or a limit no
            longer holds.
        plan_sha256: of the plan's file; default: of the text that Plan.save writes.

    Raises:
        InputError: profile and plan do not belong together, the plan does not hold, or the GPU has
            no clock that keeps up with it.
    """
    check_reference(plan.profile, profile, force)
    profile = as_referenced(plan.profile, profile)
    problem = plan.job.problem(profile)
    check_operations(plan, problem.pipeline)
    gpus = stage_clocks(profile, problem.pipeline, clocks)
    num_gpus = _gpus_per_operation(plan, topology, len(problem.pipeline.operations))

    fitter = _ClockFitter(problem, plan.job.machine, gpus)
    fitted = fitter.fit("the plan", plan.as_rung())
    context = LimitContext(num_gpus, plan.target.deadline_ns, profile, sync_ns=plan.request.sync_ns)
    if not force:
        # Where clocks come late, an operation that is over sooner may make a later one slower.
        _require_in_time(plan, fitter.replay(fitted.planned), "envplan check says more")
        _require_in_time(plan, fitted.replay, "plan again, from a profile of this GPU")
        _require_limits(plan, fitted.replay, context)
    fitted_plans = [fitted]
    with_ladder = ladder and plan.ladder is not None
    if with_ladder:
        fitted_plans += _fit_ladder(plan, fitter, fitted, context)
    rungs = [fitter.as_rung(fitted_plan, num_gpus) for fitted_plan in fitted_plans]

    all_alike = all(clocks == gpus[0] for clocks in gpus)
    supported_mhz = set(chain.from_iterable(clocks.supported_clocks_mhz for clocks in gpus))
    return FrequencyPlan(
        schema=FREQPLAN_SCHEMA,
        plan_sha256=plan_sha256 or hashlib.sha256(plan.to_json().encode()).hexdigest(),
        profile_sha256=profile.sha256,
        gpu=gpus[0].gpu if all_alike else None,
        clocks_source=gpus[0].clocks_source,
        supported_clocks_mhz=sorted(supported_mhz),
        stage_gpus=None if all_alike else gpus,
        world_size=topology.world_size,
        layout=topology,
        deadline_s=plan.target.deadline_s,
        iteration_time_s=rungs[0].iteration_time_s,
        energy_j=rungs[0].energy_j,
        stage_energies=_stage_energies(problem, fitted.replay),
        stage_power=_stage_power(fitter, fitted, profile),
        raised=fitter.raised_clocks(fitted),
        switching=_switching(plan, profile, [fitted_plan.replay for fitted_plan in fitted_plans]),
        ranks=_rank_plans(plan, topology, rungs, devices),
        ladder=rungs[1:] if with_ladder else None,
    )


def _gpus_per_operation(plan: Plan, topology: Topology, num_operations: int) -> int:
    """GPUs of one stage in all replicas, by which an operation's energy is multiplied.

    Raises:
        InputError: the plan keeps to joules or watts of another number, or all ranks have too
            many operations for a file.
    """
    num_gpus = topology.world_size // topology.stages
    keeps_to_joules_or_watts = any(limit.counts_all_gpus for limit in plan.request.limits)
    if num_gpus != plan.job.num_gpus and keeps_to_joules_or_watts:
        raise InputError(
            f"every stage has {num_gpus} GPUs, but the plan's J or W are those of "
            f"{plan.job.num_gpus}; solve again with --tp {topology.tp * topology.cp} "
            f"--dp {topology.dp}"
        )
    if num_gpus * num_operations > MAX_OPERATIONS:
        raise InputError(
            f"{topology.world_size} ranks have {num_gpus * num_operations} operations together; a "
            f"frequency plan holds at most {MAX_OPERATIONS}"
        )
    return num_gpus


def _require_in_time(plan: Plan, replay: Replay, advice: str) -> None:
    """Raises: InputError: a replay takes longer than the plan's deadline."""
    if replay.makespan_ns > plan.target.deadline_ns:
        raise InputError(
            f"replayed, the plan takes {s_from_ns(replay.makespan_ns)!r} s, more than "
            f"its deadline of {plan.target.deadline_s!r} s; {advice}"
        )


def _require_limits(plan: Plan, replay: Replay, context: LimitContext) -> None:
    """Raises: InputError: a replay with the clocks of the GPUs breaks a limit of the plan."""
    for limit in plan.request.limits:
        if limit.kept_by_sooner_ends:
            continue  # operations end no later than planned
        if limit.violation(replay, context):
            raise InputError(
                "with clocks raised to those the GPU has, "
                f"{limit.explain_violation(replay, context)}; plan again from a profile of clocks "
                "that the GPU has"
            )


def _fit_ladder(
    plan: Plan, fitter: _ClockFitter, fastest: _FittedPlan, context: LimitContext
) -> list[_FittedPlan]:
    """The rungs of a plan's ladder with clocks of the GPUs, by ascending iteration time.

    A rung that raised clocks have made no slower than the one before it, that saves nothing any
    more, or that breaks a limit on single operations, is left out.
    """
    local_limits = [limit for limit in plan.request.limits if limit.is_repairable_by_moves]
    rungs = []
    previous = fastest.replay
    for number, planned in enumerate(plan.ladder or ()):
        fitted = fitter.fit(f"ladder[{number}]", planned)
        replay = fitted.replay
        is_slower = replay.makespan_ns > previous.makespan_ns
        # By any time after both have ended, the difference is the same.
        saves_energy = replay.energy_until(0) < previous.energy_until(0)
        breaks_a_limit = any(limit.violation(replay, context) for limit in local_limits)
        if is_slower and saves_energy and not breaks_a_limit:
            previous = replay
            rungs.append(fitted)
    return rungs


def _stage_energies(problem: Problem, replay: Replay) -> list[StageEnergy]:
    """Energy of one GPU of each stage by a replay, and with every clock at its highest."""
    highest = problem.replay(problem.max_frequency_rows)
    return [
        StageEnergy(planned_j=j_from_10fj(planned_10fj), baseline_j=j_from_10fj(baseline_10fj))
        for planned_10fj, baseline_10fj in zip(
            replay.stage_energies_10fj, highest.stage_energies_10fj, strict=True
        )
    ]


def _switching(plan: Plan, profile: Profile, replays: Sequence[Replay]) -> Switching | None:
    """What the shim must know of clocks that come late; None: the plan's come at once.

    Where the plan is made for the latency that was measured, each clock is asked for by its own
    95th percentile: to the median, half of them would be late.

    Args:
        plan: the plan.
        profile: that it was made from.
        replays: of the plan itself and of its rungs.
    """
    machine = plan.job.machine
    if not machine.latency_ns:
        return None
    times = [_stage_times(replay) for replay in replays] if machine.asks_ahead else None
    latency_s = s_from_ns(machine.latency_ns)
    source = "given"
    latency_by_mhz = None
    measured = profile.switch_latency
    if measured is not None and profile.measured_latency_s == latency_s:
        source = measured.source
        latency_by_mhz = {
            str(mhz): latency.p95_s for mhz, latency in sorted(measured.by_mhz.items())
        }
    return Switching(
        ask=machine.ask,
        latency_s=latency_s,
        latency_by_mhz=latency_by_mhz,
        source=source,
        times=times,
    )


def _stage_times(replay: Replay) -> list[StageTimes]:
    """The times of each stage's operations in a replay."""
    stages = []
    for begin, end in pairwise(replay.problem.pipeline.stage_begin.tolist()):
        starts_ns = replay.starts_ns[begin:end].tolist()
        finishes_ns = replay.finishes_ns[begin:end].tolist()
        waits_s = []
        durations_s = []
        previous_ns = 0
        for start_ns, finish_ns in zip(starts_ns, finishes_ns, strict=True):
            waits_s.append(s_from_ns(start_ns - previous_ns))
            durations_s.append(s_from_ns(finish_ns - start_ns))
            previous_ns = finish_ns
        stages.append(StageTimes(waits_s=waits_s, durations_s=durations_s))
    return stages


def _stage_power(fitter: _ClockFitter, fitted: _FittedPlan, profile: Profile) -> list[StagePower]:
    """The highest power of one GPU of each stage, beside the limit that the profile states."""
    limit_w = profile.metadata.power_limit_w
    return [
        StagePower(highest_w=power_10uw / POWER_UNITS_PER_W, profile_limit_w=limit_w)
        for power_10uw in fitter.highest_powers_10uw(fitted)
    ]


def _rank_plans(
    plan: Plan, topology: Topology, rungs: Sequence[Rung], devices: Sequence[int]
) -> list[RankPlan]:
    """The part of every rank.

    Args:
        plan: the plan.
        topology: which rank runs which stage.
        rungs: the plan itself, with clocks of the GPUs, and its ladder.
        devices: GPU indices of a node.
    """
    fastest = rungs[0]
    requested_mhz: list[set[int]] = []
    operations: list[list[ClockedOperation]] = []
    for stage, stage_operations in enumerate(plan.stages):
        stage_mhz = set[int]()
        for rung in rungs:
            stage_mhz |= requested_clocks(rung.frequencies_mhz[stage], rung.configs_of(stage))
        requested_mhz.append(stage_mhz)
        operations.append(
            [
                ClockedOperation(operation.instruction, operation.microbatch, operation.chunk, mhz)
                for operation, mhz in zip(
                    stage_operations, fastest.frequencies_mhz[stage], strict=True
                )
            ]
        )
    ranks = []
    for rank in range(topology.world_size):
        stage = topology.stage_of(rank)
        ranks.append(
            RankPlan(
                rank=rank,
                stage=stage,
                device=devices[rank % len(devices)],
                clocks_mhz=sorted(requested_mhz[stage]),
                operations=operations[stage],
                configs=fastest.configs_of(stage),
            )
        )
    return ranks


class _ClockSetting(NamedTuple):
    """The clock and the config of an operation; 0 MHz sets none, "" is no config."""

    frequency_mhz: int
    config: str


class _RaisedClock(NamedTuple):
    """A planned clock that the GPU does not have, and the one it gets instead.

    Attributes:
        planned_mhz: the clock of the plan.
        applied_mhz: the clock of the GPU.
        profiled: whether the profile knows the latter.
    """

    planned_mhz: int
    applied_mhz: int
    profiled: bool


class _FittedOperation(NamedTuple):
    """An operation's setting on a GPU, and the clocks that had to be raised for it."""

    setting: _ClockSetting
    raised: tuple[_RaisedClock, ...]


@dataclass(frozen=True)
class _FittedPlan:
    """A plan, or a rung of its ladder, with clocks of the GPUs.

    Attributes:
        planned: the settings of the plan, (N,).
        operations: what the GPUs can do of that, (N,).
        replay: of the operations on the plan's machine; the times and energies stated follow
            from it.
        has_configs: whether the plan names configs.
    """

    planned: list[_ClockSetting]
    operations: list[_FittedOperation]
    replay: Replay
    has_configs: bool


class _ClockFitter:
    """Fits the clocks of one plan's operations to those that GPUs support.

    Args:
        problem: the plan's pipeline and profile.
        machine: that replays run on.
        clocks: of each stage's GPU, (num_stages,).
    """

    def __init__(self, problem: Problem, machine: Machine, clocks: Sequence[StageClocks]) -> None:
        self._problem = problem
        self._machine = machine
        self._clocks = clocks
        self._table_of = problem.table.tolist()
        self._find_option = cache(self._find_option_uncached)

    def fit(self, name: str, rung: Rung) -> _FittedPlan:
        """Keep every clock that the GPU supports; raise others to the next one not slower.

        Args:
            name: to call the rung in errors.
            rung: a plan, or a rung of its ladder.

        Raises:
            InputError: as for rung_rows; or the GPU has no clock that is as fast.
        """
        rung_rows(name, rung, self._problem)  # raises where the profile lacks what is planned
        frequencies = chain.from_iterable(rung.frequencies_mhz)
        configs = chain.from_iterable(rung.configs) if rung.configs else repeat("")
        planned = list(map(_ClockSetting, frequencies, configs))
        operations = [
            self._fit_operation(number, setting) for number, setting in enumerate(planned)
        ]
        return _FittedPlan(
            planned=planned,
            operations=operations,
            replay=self.replay(operation.setting for operation in operations),
            has_configs=rung.configs is not None,
        )

    def replay(self, settings: Iterable[_ClockSetting]) -> Replay:
        """Replay a setting for every operation on the plan's machine."""
        options = map(self._option_at, self._table_of, settings)
        return self._problem.replay(np.fromiter(options, np.int32), self._machine)

    def raised_clocks(self, fitted: _FittedPlan) -> list[RaisedClock]:
        """The clocks that were raised, each with the number of its operations in a replica."""
        counts: Counter[tuple[int, str, _RaisedClock]] = Counter()
        pipeline_operations = self._problem.pipeline.operations
        for operation, fit in zip(pipeline_operations, fitted.operations, strict=True):
            for raised in fit.raised:
                counts[operation.stage, operation.instruction, raised] += 1
        return [
            RaisedClock(
                stage=stage,
                instruction=instruction,
                planned_mhz=raised.planned_mhz,
                applied_mhz=raised.applied_mhz,
                operations=count,
                profiled=raised.profiled,
            )
            for (stage, instruction, raised), count in sorted(counts.items())
        ]

    def highest_powers_10uw(self, fitted: _FittedPlan) -> list[int]:
        """The largest power of an operation, or of a part of one, of each stage, 10 uW."""
        powers_10uw = [0] * self._problem.pipeline.num_stages
        pipeline_operations = self._problem.pipeline.operations
        for number, (operation, fit) in enumerate(
            zip(pipeline_operations, fitted.operations, strict=True)
        ):
            table_number = self._table_of[number]
            option = self._option_at(table_number, fit.setting)
            power_10uw = int(self._problem.tables[table_number].peak_10uw[option])
            powers_10uw[operation.stage] = max(powers_10uw[operation.stage], power_10uw)
        return powers_10uw

    def as_rung(self, fitted: _FittedPlan, num_gpus: int) -> Rung:
        """A fitted plan as it stands in a ladder.

        Args:
            fitted: the plan.
            num_gpus: that each operation stands for.
        """
        settings = [operation.setting for operation in fitted.operations]
        frequencies = [setting.frequency_mhz for setting in settings]
        configs = [setting.config for setting in settings]
        return Rung(
            iteration_time_s=s_from_ns(fitted.replay.makespan_ns),
            energy_j=j_from_10fj(fitted.replay.energy_10fj * num_gpus),
            frequencies_mhz=self._by_stage(frequencies),
            configs=self._by_stage(configs) if fitted.has_configs else None,
        )

    def _by_stage(self, values: Sequence[T]) -> list[list[T]]:
        bounds = pairwise(self._problem.pipeline.stage_begin.tolist())
        return [list(values[begin:end]) for begin, end in bounds]

    def _fit_operation(self, number: int, planned: _ClockSetting) -> _FittedOperation:
        """The setting of an operation on its GPU.

        Where the GPU lacks the clock of a part, all parts get one clock.

        Args:
            number: of the operation.
            planned: its setting in the plan.

        Raises:
            InputError: the GPU has no clock that is as fast.
        """
        operation = self._problem.pipeline.operations[number]
        table_number = self._table_of[number]
        clocks = self._clocks[operation.stage]
        requested_mhz = requested_clocks([planned.frequency_mhz], [planned.config])
        unsupported_mhz = sorted(requested_mhz.difference(clocks.supported_clocks_mhz))
        if not unsupported_mhz:
            return _FittedOperation(planned, ())
        highest_mhz = unsupported_mhz[-1]
        higher_clocks_mhz = [mhz for mhz in clocks.supported_clocks_mhz if mhz > highest_mhz]
        setting = self._first_as_fast(table_number, planned, higher_clocks_mhz)
        if setting is None:
            raise _no_clock_as_fast(operation, clocks, highest_mhz)
        applied_mhz = setting.frequency_mhz
        is_profiled = setting in self._problem.rows_by_setting[table_number]
        raised = [
            _RaisedClock(planned_mhz, applied_mhz, is_profiled) for planned_mhz in unsupported_mhz
        ]
        return _FittedOperation(setting, tuple(raised))

    def _first_as_fast(
        self, table_number: int, planned: _ClockSetting, clocks_mhz: Iterable[int]
    ) -> _ClockSetting | None:
        """The first of some clocks at which an operation takes no longer than planned, or None.

        Args:
            table_number: of the operation's options.
            planned: its setting in the plan.
            clocks_mhz: that are tried, in order; with the config that the planned one starts with.
        """
        table = self._problem.tables[table_number]
        planned_option = self._option_at(table_number, planned)
        start_config = table.start_config[planned_option]
        for mhz in clocks_mhz:
            setting = _ClockSetting(mhz, start_config)
            option = self._find_option(table_number, setting)
            if option is not None and table.time_ns[option] <= table.time_ns[planned_option]:
                return setting
        return None

    def _option_at(self, table_number: int, setting: _ClockSetting) -> int:
        """The index of the option that a setting of the plan, or a fitted one, counts as."""
        option = self._find_option(table_number, setting)
        assert option is not None
        return option

    def _find_option_uncached(self, table_number: int, setting: _ClockSetting) -> int | None:
        """The index of the option that a setting counts as: its own, or the highest clock below.

        Where the profile does not know a clock, the operation counts as no faster than it is known
        to be. None: the profile knows the config at higher clocks only.
        """
        options = self._problem.rows_by_setting[table_number]
        profiled_at_or_below = [
            (mhz, config)
            for mhz, config in options
            if mhz <= setting.frequency_mhz and config == setting.config
        ]
        return options[max(profiled_at_or_below)] if profiled_at_or_below else None


def _no_clock_as_fast(operation: Operation, clocks: StageClocks, planned_mhz: int) -> InputError:
    """The error that a GPU has no clock that is as fast as a planned one."""
    name, highest_mhz = clocks.gpu or "the GPU", clocks.supported_clocks_mhz[-1]
    if planned_mhz > highest_mhz:
        reason = f"the highest clock of {name} is {highest_mhz} MHz"
    else:
        reason = f"that is no clock of {name}, and by the profile none above it is as fast"
    return InputError(
        f"the plan asks for {planned_mhz} MHz for {operation.instruction} {operation.microbatch} "
        f"of stage {operation.stage}, but {reason}; plan again from a profile of this GPU, or say "
        "which GPU it is with --gpu or --clocks"
    )
