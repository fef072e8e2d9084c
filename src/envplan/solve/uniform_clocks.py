"""One clock for each stage, or for all: choices without planning by operation.

They are the baselines that plans are compared with (planners/), and candidates of every search, so
that no plan is worse than one of them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from envplan.profile import OptionTable
from envplan.replay import Problem, Rows


@dataclass(frozen=True, eq=False)
class ClockOptions:
    """One option of a table for each of its clocks, all that a planner of clocks alone needs.

    Where several options share a clock (they differ in config), the fastest stands for it, and of
    equally fast ones the cheapest. Clocks are indexed from the lowest.

    Attributes:
        mhz: the clocks, strictly ascending, (n).
        option: the option index of each, (n).
        time_ns, energy_10fj: of those options, (n), Python ints.
    """

    mhz: tuple[int, ...]
    option: tuple[int, ...]
    time_ns: tuple[int, ...]
    energy_10fj: tuple[int, ...]

    @classmethod
    def of(cls, table: OptionTable) -> ClockOptions:
        """The clocks of a table."""
        one_clock_options = np.flatnonzero(~table.changes_clock)
        # Options are sorted by time, then energy, and unique() reports the first of equals.
        mhz, fastest = np.unique(table.frequency_mhz[one_clock_options], return_index=True)
        option = one_clock_options[fastest]
        return cls(
            mhz=tuple(mhz.tolist()),
            option=tuple(option.tolist()),
            time_ns=tuple(table.time_ns[option].tolist()),
            energy_10fj=tuple(table.energy_10fj[option].tolist()),
        )

    @property
    def top(self) -> int:
        """Index of the highest clock."""
        return len(self.mhz) - 1

    def at_least(self, mhz: int) -> int:
        """Index of the lowest clock that is not below `mhz`; where there is none, the top."""
        return min(bisect_left(self.mhz, mhz), self.top)


class _Kind(NamedTuple):
    """Operations that share a stage and an option table."""

    stage: int
    clocks: ClockOptions
    is_forward: bool


class _Pace(NamedTuple):
    """How long all forwards of a stage take together at a clock."""

    mhz: int
    time_ns: int


class UniformClocks:
    """The choices of a problem that give every stage one clock.

    An operation that lacks its stage's clock runs at the next higher one it has.
    """

    def __init__(self, problem: Problem) -> None:
        clocks = [ClockOptions.of(table) for table in problem.tables]
        stage_and_table = np.stack([problem.stage, problem.table])
        _, examples, kind_of_operation = np.unique(
            stage_and_table, axis=1, return_index=True, return_inverse=True
        )
        operations = problem.pipeline.operations
        self._kinds: list[_Kind] = []
        for example in examples.tolist():  # an operation of each kind
            operation, table = operations[example], problem.table[example]
            is_forward = operation.instruction == "forward"
            self._kinds.append(_Kind(operation.stage, clocks[table], is_forward))
        self._kind_of_operation = kind_of_operation.ravel()
        self._num_stages = problem.pipeline.num_stages

    @property
    def clocks_mhz(self) -> list[int]:
        """Every clock that some operation can be set to, ascending MHz."""
        return all_clocks(kind.clocks for kind in self._kinds)

    def choice_at(self, stage_mhz: Sequence[int]) -> Rows:
        """The option of every operation at its stage's clock, int32 (N,)."""
        options = []
        for kind in self._kinds:
            clock = kind.clocks.at_least(stage_mhz[kind.stage])
            options.append(kind.clocks.option[clock])
        return np.array(options, np.int32)[self._kind_of_operation]

    def one_for_all(self) -> Iterator[Rows]:
        """One clock for all stages: a choice for each that some operation can be set to."""
        for mhz in self.clocks_mhz:
            yield self.choice_at([mhz] * self._num_stages)

    def balanced(self) -> Iterator[Rows]:
        """A clock for each stage at which its forwards keep the pace of the slowest stage.

        The slowest stage is the one whose fastest forwards take longest; each of its clocks gives
        one choice. A stage of a custom DAG may have no forward; then all its work is balanced.
        """
        paces_of_stages = [self._paces(stage) for stage in range(self._num_stages)]
        fastest_ns = [min(pace.time_ns for pace in paces) for paces in paces_of_stages]
        slowest_stage = fastest_ns.index(max(fastest_ns))
        limits_ns = {pace.time_ns for pace in paces_of_stages[slowest_stage]}
        for limit_ns in sorted(limits_ns):
            stage_mhz = [_lowest_mhz(paces, limit_ns) for paces in paces_of_stages]
            yield self.choice_at(stage_mhz)

    def _paces(self, stage: int) -> list[_Pace]:
        """The pace of a stage at each of its clocks, ascending in MHz."""
        kinds = [kind for kind in self._kinds if kind.stage == stage]
        forwards = [kind.clocks for kind in kinds if kind.is_forward]
        work = forwards or [kind.clocks for kind in kinds]
        paces = []
        for mhz in all_clocks(work):
            times_ns = [clocks.time_ns[clocks.at_least(mhz)] for clocks in work]
            paces.append(_Pace(mhz, sum(times_ns)))
        return paces


def _lowest_mhz(paces: Sequence[_Pace], limit_ns: int) -> int:
    """The lowest clock whose pace keeps a limit; the highest where none does."""
    keeping = [pace.mhz for pace in paces if pace.time_ns <= limit_ns]
    return min(keeping, default=paces[-1].mhz)


def all_clocks(tables: Iterable[ClockOptions]) -> list[int]:
    """Every clock that some operation can be set to, ascending MHz; [0] if none is controlled."""
    clocks = {mhz for table in tables for mhz in table.mhz if mhz}
    return sorted(clocks) or [0]
