"""Time and energy of what runs between iterations, such as an optimizer, at two choices of clocks.

A schedule may have optimizer, all-reduce and loading among its operations. Where it does not, they
run between iterations: at the clock of each stage's last operation, or at the highest one, to which
the shim goes after an iteration (see runtime/operation_clocks.py).

Where the profile has rows for them, time and energy are those of the rows. Else they are modelled:
what takes a given time at the highest clocks scales with the clock as its stage's last operation
does. An optimizer or an all-reduce is held up by memory or network more than that operation is, so
it loses less time at a low clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from envplan.clocks import MIN_PAUSE_NS
from envplan.costs.model import TimeAndEnergy
from envplan.errors import InputError
from envplan.pipeline import Pipeline
from envplan.pipeline.operations import EXTRAS
from envplan.profile import Profile
from envplan.profile.options import Option, OptionTable
from envplan.simulation.iteration import Timeline
from envplan.units import j_from_10fj, ns_from_s, s_from_ns, w_from_10uw

__all__ = ["BetweenIterations", "between_iterations", "extras_outside"]


@dataclass(frozen=True)
class BetweenIterations:
    """What runs between iterations, over all GPUs, until every stage has finished it.

    Attributes:
        source: "profile" where its rows say what it costs, "modelled" where it scales as the
            stages' last operations do.
        instructions: that run, by their names in the profile; none where they are modelled.
        last_clocks_mhz: of the last operation of each stage; 0 where none controls a clock.
        at_last_clocks: time and energy at these clocks.
        at_highest_clocks: time and energy at the highest clocks.
        gets_own_clocks: whether it takes long enough for the shim to set the highest clocks.
    """

    source: Literal["profile", "modelled"]
    instructions: tuple[str, ...]
    last_clocks_mhz: tuple[int, ...]
    at_last_clocks: TimeAndEnergy
    at_highest_clocks: TimeAndEnergy
    gets_own_clocks: bool

    @property
    def time_saved_s(self) -> float:
        """The time that the highest clocks save in each iteration, s."""
        return self.at_last_clocks.time_s - self.at_highest_clocks.time_s

    @property
    def extra_energy_j(self) -> float:
        """The energy that the highest clocks cost in each iteration, J; negative: they save it."""
        return self.at_highest_clocks.energy_j - self.at_last_clocks.energy_j

    def to_dict(self) -> dict[str, object]:
        """All of it in JSON types."""
        return {
            "source": self.source,
            "instructions": list(self.instructions),
            "last_clocks_mhz": list(self.last_clocks_mhz),
            "at_last_clocks": self.at_last_clocks._asdict(),
            "at_highest_clocks": self.at_highest_clocks._asdict(),
            "time_saved_s": self.time_saved_s,
            "extra_energy_j": self.extra_energy_j,
            "gets_own_clocks": self.gets_own_clocks,
        }


class _StageWork(NamedTuple):
    """What a stage does between iterations, on one GPU: s and J."""

    time_s: float
    energy_j: float


def between_iterations(
    timeline: Timeline, profile: Profile, time_s: float | None = None
) -> BetweenIterations | None:
    """What runs between the iterations of a plan, at the last operations' clocks and the highest.

    Args:
        timeline: of the plan.
        profile: that it was made from.
        time_s: s that it takes at the highest clocks, up to an hour; None: as the profile says.

    Returns:
        None where neither the profile nor the caller says anything of it.

    Raises:
        InputError: the profile has rows for it, and the caller gives a time nevertheless.
    """
    instructions = extras_outside(timeline.pipeline, profile)
    if instructions and time_s is not None:
        raise InputError(
            f"the profile has rows for {' and '.join(instructions)}, which run between "
            "iterations, so no time is to be given for that"
        )
    if not instructions and time_s is None:
        return None
    last_clocks_mhz = []
    at_last_clocks, at_highest_clocks = [], []
    for stage in timeline.stages:
        mhz = stage.clock_changes[-1].frequency_mhz
        last_clocks_mhz.append(mhz)
        if time_s is None:
            tables = extra_tables(timeline.pipeline, profile, stage.stage, instructions)
            at_last_clocks.append(_work_of_rows(tables, mhz))
            at_highest_clocks.append(_work_of_rows(tables, None))
        else:
            table = _table_of_last_operation(timeline, stage.stage)
            at_last_clocks.append(_modelled_work(table, mhz, time_s))
            at_highest_clocks.append(_modelled_work(table, None, time_s))
    whole_at_highest = _until_all_have_finished(timeline, at_highest_clocks)
    shortest_ns = max(MIN_PAUSE_NS, timeline.replay.machine.latency_ns)
    return BetweenIterations(
        source="profile" if instructions else "modelled",
        instructions=instructions,
        last_clocks_mhz=tuple(last_clocks_mhz),
        at_last_clocks=_until_all_have_finished(timeline, at_last_clocks),
        at_highest_clocks=whole_at_highest,
        gets_own_clocks=ns_from_s(whole_at_highest.time_s) >= shortest_ns,
    )


def extras_outside(pipeline: Pipeline, profile: Profile) -> tuple[str, ...]:
    """The instructions that a profile has rows for, and that run outside of an iteration.

    Args:
        pipeline: the operations of the iteration.
        profile: with rows for these and others.
    """
    scheduled = {operation.instruction for operation in pipeline.operations}
    return tuple(name for name in EXTRAS if name in profile.instructions and name not in scheduled)


def extra_tables(
    pipeline: Pipeline, profile: Profile, stage: int, instructions: Sequence[str]
) -> list[OptionTable]:
    """The rows of instructions that run once for each model stage that a pipeline stage has."""
    model_stages = {op.profile_stage for op in pipeline.operations if op.stage == stage}
    return [
        profile.table(model_stage, name)
        for model_stage in sorted(model_stages)
        for name in instructions
        if profile.has(model_stage, name)
    ]


def _work_of_rows(tables: Sequence[OptionTable], mhz: int | None) -> _StageWork:
    """Instructions one after the other, at a clock; None: at the highest."""
    options = [_option_at(table, mhz) for table in tables]
    time_ns = sum(option.time_ns for option in options)
    energy_10fj = sum(option.energy_10fj for option in options)
    return _StageWork(s_from_ns(time_ns), j_from_10fj(energy_10fj))


def _modelled_work(table: OptionTable, mhz: int | None, time_s: float) -> _StageWork:
    """What takes time_s at the highest clock, at another: it scales as the rows of a table do."""
    option = _option_at(table, mhz)
    highest = _option_at(table, None)
    own_time_s = time_s * option.time_ns / highest.time_ns
    power_w = j_from_10fj(option.energy_10fj) / s_from_ns(option.time_ns)
    return _StageWork(own_time_s, power_w * own_time_s)


def _option_at(table: OptionTable, mhz: int | None) -> Option:
    """The option at a clock, or at the next higher one that the profile has; None: the highest."""
    options = table.options()
    highest = options[table.max_frequency_option]
    if mhz is None:
        return highest
    whole = [
        option
        for option, changes_clock in zip(options, table.changes_clock.tolist(), strict=True)
        if option.frequency_mhz >= mhz and not changes_clock
    ]
    return min(whole, key=lambda option: (option.frequency_mhz, option.time_ns), default=highest)


def _table_of_last_operation(timeline: Timeline, stage: int) -> OptionTable:
    """The options of a stage's last operation that has a clock, or else of its last one."""
    problem = timeline.replay.problem
    begin, end = timeline.pipeline.stage_begin[stage : stage + 2].tolist()
    last = end - 1
    for index in range(begin, end):
        if timeline.operations[index].frequency_mhz:
            last = index
    table: OptionTable = problem.tables[problem.table[last]]
    return table


def _until_all_have_finished(timeline: Timeline, works: Sequence[_StageWork]) -> TimeAndEnergy:
    """Time until the slowest stage has finished, and energy of all GPUs, waiting included."""
    time_s = max(work.time_s for work in works)
    blocking_10uw = timeline.replay.problem.blocking_power_10uw.tolist()
    energy_j = 0.0
    for work, power_10uw in zip(works, blocking_10uw, strict=True):
        energy_j += work.energy_j + w_from_10uw(power_10uw) * (time_s - work.time_s)
    return TimeAndEnergy(time_s, energy_j * timeline.num_gpus)
