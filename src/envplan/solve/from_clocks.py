"""A plan of clocks that somebody else has chosen."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from envplan.errors import InputError
from envplan.pipeline import Operation, Pipeline
from envplan.plan import Plan, build_plan
from envplan.plan.target import Target
from envplan.profile import OptionTable, Profile
from envplan.replay import Problem, Rows
from envplan.solve.frontier import Frontier, trace_frontier
from envplan.units import s_from_ns

#: MHz, or MHz and a config.
Clock = int | tuple[int, str]


def plan_from_clocks(
    pipeline: Pipeline,
    profile: Profile,
    clocks: Sequence[Sequence[Clock]],
    *,
    frontier: Frontier | None = None,
    planner: str = "clocks",
    **options: Any,
) -> Plan:
    """The plan that runs given clocks: what they cost, and how far they are from the best.

    Everything that works on plans works on it: simulate, timeline, report, compare.

    Args:
        pipeline: what runs.
        profile: what operations cost.
        clocks: MHz of each stage's operations in execution order; any for an operation that
            controls no clock, or none for all such; or (MHz, config). 0 is for an operation that
            no clock is given for. Of rows that differ in config alone, the fastest is taken.
        frontier: of the pipeline and profile, where it is known already.
        planner: what to call what chose them.
        options: further arguments of trace_frontier.

    Raises:
        InputError: too few or too many operations, or a clock that the profile lacks.
    """
    frontier = frontier or trace_frontier(pipeline, profile, **options)
    problem = frontier.problem
    replay = problem.replay(_choice_at_clocks(problem, profile, clocks))
    target = Target(kind="planner", deadline_s=s_from_ns(replay.makespan_ns))
    return build_plan(frontier, replay, target=target, planner=planner)


def _choice_at_clocks(
    problem: Problem, profile: Profile, clocks: Sequence[Sequence[Clock]]
) -> Rows:
    """For each operation its fastest option at a clock, int32 (N,)."""
    stage_bounds = list(pairwise(problem.pipeline.stage_begin.tolist()))
    if len(clocks) != len(stage_bounds):
        raise InputError(
            f"the clocks are of {len(clocks)} stages; the pipeline has {len(stage_bounds)}"
        )
    choice: list[int] = []
    for stage, (begin, end) in enumerate(stage_bounds):
        operations = problem.pipeline.operations[begin:end]
        tables = [problem.tables[number] for number in problem.table[begin:end].tolist()]
        stage_clocks = _clock_of_every_operation(stage, tables, clocks[stage])
        for op, table, clock in zip(operations, tables, stage_clocks, strict=True):
            choice.append(_fastest_option_at(op, table, clock, profile))
    return np.array(choice, np.int32)


def _clock_of_every_operation(
    stage: int, tables: Sequence[OptionTable], clocks: Sequence[Clock]
) -> list[Clock]:
    """A stage's clocks, one for each operation: those of constant time may be left out."""
    is_controlled = [bool(table.frequency_mhz.any()) for table in tables]
    num_controlled = sum(is_controlled)
    if len(clocks) == num_controlled:
        controlled_clocks = iter(clocks)
        return [next(controlled_clocks) if controlled else 0 for controlled in is_controlled]
    if len(clocks) != len(tables):
        raise InputError(
            f"stage {stage} has {len(clocks)} clocks for {len(tables)} operations, of which "
            f"{num_controlled} control a clock"
        )
    return list(clocks)


def _fastest_option_at(op: Operation, table: OptionTable, clock: Clock, profile: Profile) -> int:
    """The fastest option of an operation at a clock, an option index."""
    mhz, config = clock if isinstance(clock, tuple) else (clock, None)
    if not table.frequency_mhz.any():
        mhz = 0  # lists that need a clock everywhere name one here, too
    # Options are sorted by time, the fastest first.
    at_clock = np.flatnonzero(table.frequency_mhz == mhz).tolist()
    for option in at_clock:
        if config is None or config == table.config[option]:
            return int(option)
    name = f"{op.instruction} {op.microbatch} of stage {op.stage}"
    if mhz == 0:
        raise InputError(f"no clock is given for {name}")
    with_config = f" with config {config}" if config and at_clock else ""
    raise InputError(
        f"{mhz} MHz{with_config} for {name} is not a clock of profile {profile.name} there"
    )
