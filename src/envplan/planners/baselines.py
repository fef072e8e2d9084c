"""What there is without planning operation by operation: one clock for all, or one a stage."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np

from envplan.plan import Plan, build_plan
from envplan.plan.model import Target
from envplan.planners.base import (
    ClockRows,
    all_clocks,
    clocks_of_operations,
    no_plan_so_fast,
    refuse_target,
)
from envplan.replay import Replay
from envplan.solve import Frontier
from envplan.units import s_from_ns


class MaxFrequency:
    """Every operation at its highest frequency: what happens without any planning."""

    name: Final = "max_frequency"
    takes_target: Final = False

    def plan(self, frontier: Frontier, target_time_ns: int | None = None) -> Plan:
        """Raises: InputError: a target was given."""
        refuse_target(self.name, target_time_ns)
        return frontier.max_frequency_plan()


class ZeusGlobal:
    """One frequency for all stages: the ZeusGlobal baseline of Perseus (SOSP 2024).

    Perseus scans power limits, we scan clocks: each clock of the profile is one point of this
    planner's own frontier. An operation that lacks a clock runs at the next higher one it has.
    """

    name: Final = "zeus_global"
    takes_target: Final = True

    def candidates(self, frontier: Frontier) -> list[Replay]:
        """This planner's frontier: ascending time, descending energy."""
        clocks = clocks_of_operations(frontier.pipeline, frontier.profile)
        return _frontier_of(frontier, clocks, ([mhz] * len(clocks) for mhz in all_clocks(clocks)))

    def plan(self, frontier: Frontier, target_time_ns: int | None = None) -> Plan:
        """Raises: NoAnswerError: no clock is that fast."""
        return cheapest_in_time(self.name, frontier, self.candidates(frontier), target_time_ns)


class ZeusPerStage:
    """A frequency for each stage that balances forward times: the ZeusPerStage baseline of Perseus
    (SOSP 2024).

    The stage whose fastest forward is the slowest sets the pace: each of its clocks is one point.
    All other stages take their lowest clock at which a forward takes no longer than there.
    Backwards run at their stage's clock; they need not balance, which is why this planner can be
    slower than maximum frequency everywhere.
    """

    name: Final = "zeus_per_stage"
    takes_target: Final = True

    def candidates(self, frontier: Frontier) -> list[Replay]:
        """This planner's frontier: ascending time, descending energy."""
        pipeline = frontier.pipeline
        clocks = clocks_of_operations(pipeline, frontier.profile)
        forwards: list[dict[int, ClockRows]] = [{} for _ in range(pipeline.num_stages)]
        any_work: list[dict[int, ClockRows]] = [{} for _ in range(pipeline.num_stages)]
        for op, one in zip(pipeline.operations, clocks, strict=True):
            any_work[op.stage][id(one)] = one
            if op.instruction == "forward":
                forwards[op.stage][id(one)] = one
        # A stage of a custom DAG may have no forward; then all its work is balanced.
        paces = [
            _paces(list((forward or work).values()))
            for forward, work in zip(forwards, any_work, strict=True)
        ]
        leader = max(paces, key=lambda pace: min(time for _, time in pace))
        assignments = (
            [min((m for m, t in pace if t <= limit), default=pace[-1][0]) for pace in paces]
            for limit in sorted({time for _, time in leader})
        )
        by_operation = (
            [stage_mhz[op.stage] for op in pipeline.operations] for stage_mhz in assignments
        )
        return _frontier_of(frontier, clocks, by_operation)

    def plan(self, frontier: Frontier, target_time_ns: int | None = None) -> Plan:
        """Raises: NoAnswerError: no balanced choice is that fast."""
        return cheapest_in_time(self.name, frontier, self.candidates(frontier), target_time_ns)


def _paces(work: list[ClockRows]) -> list[tuple[int, int]]:
    """(MHz, ns that the operations take together) of each clock, ascending in MHz."""
    return [(mhz, sum(one.time_ns[one.at_least(mhz)] for one in work)) for mhz in all_clocks(work)]


def _frontier_of(
    frontier: Frontier, clocks: list[ClockRows], assignments: Iterable[list[int]]
) -> list[Replay]:
    """The assignments of a clock to each operation that no other one beats, replayed."""
    kept: list[Replay] = []
    replays = (
        frontier.problem.replay(
            np.array(
                [one.row[one.at_least(mhz)] for one, mhz in zip(clocks, assignment, strict=True)],
                np.int32,
            )
        )
        for assignment in assignments
    )
    for replay in sorted(replays, key=lambda one: (one.makespan_ns, one.energy_fj)):
        if not kept or replay.energy_fj < kept[-1].energy_fj:
            kept.append(replay)
    return kept


def cheapest_in_time(
    name: str, frontier: Frontier, replays: list[Replay], target_time_ns: int | None
) -> Plan:
    """The plan of the slowest, which is the cheapest, replay in time; without a target, of the
    fastest."""
    chosen = replays[0]
    deadline_ns = chosen.makespan_ns if target_time_ns is None else target_time_ns
    if chosen.makespan_ns > deadline_ns:
        raise no_plan_so_fast(name, deadline_ns, chosen.makespan_ns)
    if target_time_ns is not None:
        chosen = [one for one in replays if one.makespan_ns <= deadline_ns][-1]
    target = Target(
        kind="planner",
        time_s=None if target_time_ns is None else s_from_ns(deadline_ns),
        deadline_s=s_from_ns(deadline_ns),
    )
    return build_plan(frontier, chosen, target=target, planner=name)
