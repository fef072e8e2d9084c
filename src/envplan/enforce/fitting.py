"""Clocks for a plan's operations that its GPUs have and that last: they only ever rise.

A clock that a GPU lacks is replaced by the next one above, and operations whose clock would change
too soon are raised to a neighbour's. Where the profile knows the higher clock and says that it is
slower after all, as noise may have it, a still higher one is taken. So every operation takes at
most its planned time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from envplan.enforce.clocks import Clocks
from envplan.enforce.freqplan import Dwell, RaisedClock
from envplan.errors import InputError
from envplan.pipeline import Operation, Pipeline
from envplan.plan import Rung
from envplan.profile import Profile, Raised, changes_of
from envplan.replay import Machine, Problem, Replay
from envplan.units import j_from_fj, ns_from_s_ceil

__all__ = ["Choice", "Fitter"]


class Choice(NamedTuple):
    """A clock for every operation.

    Attributes:
        mhz: of each operation, (N); 0 where none is set.
        rows: the row of each operation's table that stands for it, (N): that of its clock, or,
            where the profile does not know that, of the highest clock below.
    """

    mhz: list[int]
    rows: list[int]


class _Hold(NamedTuple):
    """A stretch of a stage at one clock, until the stage asks for another one.

    Iterations follow each other, so positions count on: position k is operation k % n of the
    stage's n operations, and the hold runs from `first` to before `last`.
    """

    first: int
    last: int
    mhz: int


class _Raise(NamedTuple):
    """A way to make a hold longer.

    Attributes:
        clocks: the operations to be raised, and to what.
        enough: whether it then lasts long enough, or as long as its neighbour.
        cost_fj: of one GPU per stage and one replica.
    """

    clocks: dict[int, int]
    enough: bool
    cost_fj: int


class Fitter:
    """Fits clocks of one plan's operations to GPUs.

    Args:
        clocks: of each stage's GPU, (num_stages,).
        num_gpus: GPUs of one stage in all replicas.
        parts: what raise_parts found.
    """

    def __init__(
        self,
        problem: Problem,
        machine: Machine,
        clocks: Sequence[Clocks],
        num_gpus: int,
        parts: Mapping[tuple[int, str, str], Raised],
    ) -> None:
        self.problem = problem
        self.stages = list(pairwise(problem.pipeline.stage_begin.tolist()))
        self.num_gpus = num_gpus
        self._machine = machine
        self._clocks = clocks
        self._parts = parts
        self._table = problem.table.tolist()
        self._row_at = cache(self._find_row_at)

    def replay(self, choice: Choice) -> Replay:
        """What a choice comes to on the plan's machine: all that is said of it follows from it."""
        return self.problem.replay(np.array(choice.rows, np.int32), self._machine)

    def joules(self, energy_fj: int) -> float:
        """Energy over all GPUs, J, from that of one GPU per stage and one replica."""
        return j_from_fj(energy_fj * self.num_gpus)

    def supported(self, planned: Choice) -> Choice:
        """Every clock, or where the GPU lacks it the next one above that is not slower.

        Raises:
            InputError: there is none.
        """
        mhz, standing = [], []
        for op, (asked, row) in enumerate(zip(*planned, strict=True)):
            if own := self._raised_parts(op, row):
                mhz.append(own.knob[0])
                standing.append(self.problem.rows_by_knob[self._table[op]][own.knob])
                continue
            clock = self._fitting([op], planned, asked) if asked else 0
            if clock is None:
                what = self.problem.pipeline.operations[op]
                raise _too_fast(what, self._clocks[what.stage], asked)
            mhz.append(clock)
            standing.append(self._row_at(self._table[op], row, clock) if clock else row)
        return Choice(mhz, standing)

    def configs(self, choice: Choice) -> list[list[str]]:
        """The config of each stage's operations."""
        tables = self.problem.tables
        each = [tables[t].config[row] for t, row in zip(self._table, choice.rows, strict=True)]
        return [each[first:last] for first, last in self.stages]

    def _raised_parts(self, op: int, row: int) -> Raised | None:
        what = self.problem.pipeline.operations[op]
        config = self.problem.tables[self._table[op]].config[row]
        return self._parts.get((what.profile_stage, what.instruction, config))

    def planned(self, rows: NDArray[np.int32]) -> Choice:
        """The clocks of rows, as they are."""
        mhz = self.problem.frequency_mhz[self.problem.over_all(rows)]
        return Choice(mhz.tolist(), rows.tolist())

    def raised(self, planned: Choice, applied: Choice) -> list[RaisedClock]:
        """The clocks that differ, with how many operations of a replica they are for."""
        known = self.planned(np.array(applied.rows, np.int32)).mhz
        counts: Counter[tuple[int, str, int, int, bool]] = Counter()
        for i, op in enumerate(self.problem.pipeline.operations):
            asked, mhz = planned.mhz[i], applied.mhz[i]
            parts = self._raised_parts(i, planned.rows[i])
            pairs = parts.clocks if parts else ((asked, mhz, known[i] == mhz),) * (mhz != asked)
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

    def lasting(self, choice: Choice, min_dwell_s: float) -> tuple[Choice, Dwell]:
        """The choice with operations raised until clocks last, and what that cost.

        Holds that are too short are taken up one by one, each time in the cheapest of four ways:
        raise them to the clock before or after, or raise operations before or after to them, one by
        one. Clocks only rise, so this ends.
        """
        least_ns = ns_from_s_ceil(min_dwell_s)
        before = replay = self.replay(choice)
        first = holds = self._holds(choice)
        current = Choice(list(choice.mhz), list(choice.rows))
        while raises := self._raises(current, replay, holds, least_ns):
            for op, mhz in raises.items():
                current.rows[op] = self._row_at(self._table[op], current.rows[op], mhz)
                current.mhz[op] = mhz
            replay, holds = self.replay(current), self._holds(current)
        return current, Dwell(
            min_dwell_s=min_dwell_s,
            raised_operations=sum(map(int.__ne__, choice.mhz, current.mhz)),
            extra_energy_j=self.joules(replay.energy_fj - before.energy_fj),
            changes_before=sum(map(len, first)),
            changes_after=sum(map(len, holds)),
            changes_too_fast=sum(
                end - begin < least_ns
                for stage, held in enumerate(holds)
                for begin, end in self._spans(stage, held, replay)
            ),
        )

    def _holds(self, choice: Choice) -> list[list[_Hold]]:
        """The holds of each stage by their first operation; none where its clock never changes."""
        stages = []
        for first, last in self.stages:
            mhz = choice.mhz[first:last]
            asking = [k for k, clock in enumerate(mhz) if clock]
            begins = [k for before, k in pairwise([*asking[-1:], *asking]) if mhz[before] != mhz[k]]
            ends = [*begins[1:], *(k + len(mhz) for k in begins[:1])]
            stages.append([_Hold(k, end, mhz[k]) for k, end in zip(begins, ends, strict=True)])
        return stages

    def _spans(self, stage: int, holds: Iterable[_Hold], replay: Replay) -> list[tuple[int, int]]:
        """When each hold begins and ends, ns."""
        start = self._starts(stage, replay)
        return [(start(hold.first), start(hold.last)) for hold in holds]

    def _starts(self, stage: int, replay: Replay) -> _Starts:
        first, last = self.stages[stage]
        return _Starts(replay.starts_ns[first:last].tolist(), replay.makespan_ns)

    def _raises(
        self, choice: Choice, replay: Replay, stages: Sequence[Sequence[_Hold]], least_ns: int
    ) -> dict[int, int]:
        """Clocks to raise next: on each stage the cheapest way for each hold that is too short.

        Ways that overlap wait for the next round. Empty if nothing is too short or can be helped.
        """
        raises: dict[int, int] = {}
        for stage, holds in enumerate(stages):
            first, last = self.stages[stage]
            start = self._starts(stage, replay)
            for k, hold in enumerate(holds):
                begin, end = start(hold.first), start(hold.last)
                if end - begin >= least_ns:
                    continue
                # As far as the hold itself, round the iteration.
                back = range(hold.first - 1, hold.last - (last - first) - 1, -1)
                on = range(hold.last, hold.first + (last - first))
                before = [(first + p % (last - first), end - start(p)) for p in back]
                after = [(first + p % (last - first), start(p + 1) - begin) for p in on]
                neighbours = {holds[k - 1], holds[(k + 1) % len(holds)]}
                ways = [
                    *(self._joined(choice, stage, hold, other) for other in neighbours),
                    self._grown(choice, hold, before, least_ns),
                    self._grown(choice, hold, after, least_ns),
                ]
                ways = [way for way in ways if way.clocks]
                if ways:
                    best = min(ways, key=lambda way: (not way.enough, way.cost_fj))
                    if not best.clocks.keys() & raises.keys():
                        raises.update(best.clocks)
        return raises

    def _joined(self, choice: Choice, stage: int, hold: _Hold, neighbour: _Hold) -> _Raise:
        """A hold and its neighbour at one clock, the lowest that does for both."""
        first, last = self.stages[stage]
        ops = [
            op
            for one in (hold, neighbour)
            for op in (first + p % (last - first) for p in range(one.first, one.last))
            if choice.mhz[op]
        ]
        mhz = self._fitting(ops, choice, max(hold.mhz, neighbour.mhz))
        return self._way(choice, {} if mhz is None else dict.fromkeys(ops, mhz), enough=True)

    def _grown(
        self, choice: Choice, hold: _Hold, ops: Iterable[tuple[int, int]], least_ns: int
    ) -> _Raise:
        """Raise one operation after the other to a hold's clock until it lasts long enough.

        Args:
            ops: the operations, and how long the hold lasts with each and those before it, ns.
        """
        clocks: dict[int, int] = {}
        for op, lasts_ns in ops:
            mhz = choice.mhz[op]
            if mhz == hold.mhz:
                return self._way(choice, clocks, enough=True)
            if mhz > hold.mhz or (mhz and not self._keeps_up(op, choice.rows[op], hold.mhz)):
                break
            if mhz:
                clocks[op] = hold.mhz
            if lasts_ns >= least_ns:
                return self._way(choice, clocks, enough=True)
        return self._way(choice, clocks, enough=False)

    def _way(self, choice: Choice, clocks: dict[int, int], *, enough: bool) -> _Raise:
        """A way and its cost: e - P t of what is raised, after less before."""
        changed = {op: mhz for op, mhz in clocks.items() if mhz != choice.mhz[op]}
        cost_fj = 0
        for op, mhz in changed.items():
            table, old = self.problem.tables[self._table[op]], choice.rows[op]
            new = self._row_at(self._table[op], old, mhz)
            energy_fj = int(table.energy_fj[new]) - int(table.energy_fj[old])
            time_ns = int(table.time_ns[new]) - int(table.time_ns[old])
            waiting_uw = int(self.problem.blocking_power_uw[self.problem.stage[op]])
            cost_fj += energy_fj - waiting_uw * time_ns
        return _Raise(changed, enough, cost_fj)

    def _find_row_at(self, number: int, row: int, mhz: int) -> int:
        """The row of a table that stands for an operation once its clock is raised to mhz.

        That of the highest clock up to mhz: where the profile does not know mhz itself, the
        operation counts as no faster than it is known to be.
        """
        table = self.problem.tables[number]
        rows = (
            (clock, r)
            for r, (clock, config) in enumerate(
                zip(table.frequency_mhz.tolist(), table.config, strict=True)
            )
            if config == table.config[row] and clock <= mhz
        )
        return max(rows)[1]

    def _keeps_up(self, op: int, row: int, mhz: int) -> bool:
        """Whether an operation is not slower at a higher clock than by its row."""
        time = self.problem.tables[self._table[op]].time_ns
        return bool(time[self._row_at(self._table[op], row, mhz)] <= time[row])

    def _fitting(self, ops: Sequence[int], choice: Choice, least_mhz: int) -> int | None:
        """The lowest clock of a GPU from least_mhz up at which no operation gets slower."""
        for mhz in self._clocks[int(self.problem.stage[ops[0]])].mhz:
            if mhz >= least_mhz and all(self._keeps_up(op, choice.rows[op], mhz) for op in ops):
                return mhz
        return None


def raise_parts(
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


class _Starts(NamedTuple):
    """When a stage's operations start, ns, by positions that count on through iterations."""

    starts_ns: list[int]
    makespan_ns: int

    def __call__(self, position: int) -> int:
        lap, k = divmod(position, len(self.starts_ns))
        return self.starts_ns[k] + lap * self.makespan_ns
