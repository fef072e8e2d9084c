"""Choices of one clock for each stage, or for all: what there is without planning by operation.

They are the baselines that plans are compared with (planners/), and candidates of every
search, so that no plan is worse than one of them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from envplan.profile import OptionTable
from envplan.replay import Problem, Rows


@dataclass(frozen=True, eq=False)
class ClockRows:
    """One row of an option table for each of its frequencies: what a planner of clocks alone sees.

    Where several rows share a frequency (they differ in config), the fastest stands for it, and of
    equally fast ones the cheapest.

    Attributes:
        mhz: the frequencies, strictly ascending, (n).
        row: the row of the option table for each, (n).
        time_ns, energy_fj: of those rows, (n), Python ints.
    """

    mhz: tuple[int, ...]
    row: tuple[int, ...]
    time_ns: tuple[int, ...]
    energy_fj: tuple[int, ...]

    @classmethod
    def of(cls, table: OptionTable) -> ClockRows:
        """The clocks of a table."""
        # Rows are sorted by time and energy, and unique() reports the first of equals.
        steady = np.flatnonzero(~table.changes_clock)
        mhz, first = np.unique(table.frequency_mhz[steady], return_index=True)
        rows = steady[first]
        return cls(
            tuple(mhz.tolist()),
            tuple(rows.tolist()),
            tuple(table.time_ns[rows].tolist()),
            tuple(table.energy_fj[rows].tolist()),
        )

    @property
    def top(self) -> int:
        """Index of the highest frequency."""
        return len(self.mhz) - 1

    def at_least(self, mhz: int) -> int:
        """Index of the lowest frequency that is not below `mhz`; where there is none, the top."""
        return min(bisect_left(self.mhz, mhz), self.top)


class StageClocks:
    """The clocks that the stages of a problem can run at.

    An operation that lacks its stage's clock runs at the next higher one it has.
    """

    def __init__(self, problem: Problem) -> None:
        tables = [ClockRows.of(table) for table in problem.tables]
        kinds, first, self._kind = np.unique(
            np.stack([problem.stage, problem.table]), axis=1, return_index=True, return_inverse=True
        )
        self._kinds = [(stage, tables[table]) for stage, table in kinds.T.tolist()]
        operations = problem.pipeline.operations
        self._is_forward = [operations[i].instruction == "forward" for i in first.tolist()]
        self._num_stages = problem.pipeline.num_stages

    def rows(self, stage_mhz: Sequence[int]) -> Rows:
        """The row of each operation with a clock for each stage, int32 (N,)."""
        rows = [clocks.row[clocks.at_least(stage_mhz[stage])] for stage, clocks in self._kinds]
        return np.array(rows, np.int32)[self._kind.ravel()]

    def one_for_all(self) -> Iterator[Rows]:
        """One clock for all stages: each that some operation can be set to."""
        for mhz in all_clocks(one for _, one in self._kinds):
            yield self.rows([mhz] * self._num_stages)

    def balanced(self) -> Iterator[Rows]:
        """A clock for each stage at which its forwards take no longer than those of the stage whose
        fastest is the slowest; one choice for each clock of that stage.

        A stage of a custom DAG may have no forward; then all its work is balanced.
        """
        paces = [self._paces(stage) for stage in range(self._num_stages)]
        leader = max(paces, key=lambda pace: min(time for _, time in pace))
        for limit in sorted({time for _, time in leader}):
            yield self.rows(
                [min((m for m, t in pace if t <= limit), default=pace[-1][0]) for pace in paces]
            )

    def _paces(self, stage: int) -> list[tuple[int, int]]:
        """(MHz, ns that the stage's forwards take together) of each clock, ascending in MHz."""
        of_stage = [
            (clocks, forward)
            for (own, clocks), forward in zip(self._kinds, self._is_forward, strict=True)
            if own == stage
        ]
        work = [one for one, forward in of_stage if forward] or [one for one, _ in of_stage]
        clocks = all_clocks(work)
        return [(mhz, sum(one.time_ns[one.at_least(mhz)] for one in work)) for mhz in clocks]


def all_clocks(tables: Iterable[ClockRows]) -> list[int]:
    """Every frequency that some operation can be set to, ascending; [0] if none is controlled."""
    return sorted({mhz for one in tables for mhz in one.mhz if mhz}) or [0]
