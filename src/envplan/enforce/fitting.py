"""Clocks for a plan's operations that its GPUs have and that last: they only ever rise.

A clock that a GPU lacks is replaced by the next one above, and operations whose clock would change
too soon are raised to a neighbour's. Where the profile knows the higher clock and says that it is
slower after all, as noise may have it, a still higher one is taken. So every operation takes at
most its planned time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import chain, pairwise
from typing import NamedTuple, TypeVar

import numpy as np

from envplan.enforce.clocks import Clocks
from envplan.enforce.freqplan import Dwell, RaisedClock
from envplan.errors import InputError
from envplan.pipeline import Operation, Pipeline
from envplan.plan import Rung, rung_rows
from envplan.profile import Profile, Raised, changes_of
from envplan.replay import Machine, Problem, Replay
from envplan.units import j_from_fj, ns_from_s_ceil

__all__ = ["Choice", "Fitter", "raise_parts"]

T = TypeVar("T")

#: MHz of an operation, 0 where none is set, and its config.
Knob = tuple[int, str]
#: One for every operation, (N).
Choice = Sequence[Knob]


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
        short: whether the hold is then still too short, and shorter than to its neighbour.
        cost_fj: of one GPU per stage and one replica.
    """

    clocks: dict[int, int]
    short: bool
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
        self.num_gpus = num_gpus
        self._stages = list(pairwise(problem.pipeline.stage_begin.tolist()))
        self._machine = machine
        self._clocks = clocks
        self._parts = parts
        self._table = problem.table.tolist()
        self._row_of_table = cache(self._find_row)

    def planned(self, name: str, rung: Rung) -> Choice:
        """A plan's own choice.

        Args:
            name: of the rung, for errors.

        Raises:
            InputError: as for rung_rows.
        """
        rows = rung_rows(name, rung, self.problem).tolist()
        tables = [self.problem.tables[number] for number in self._table]
        return [
            (int(table.frequency_mhz[row]), table.config[row])
            for table, row in zip(tables, rows, strict=True)
        ]

    def replay(self, choice: Choice) -> Replay:
        """What a choice comes to on the plan's machine: all that is said of it follows from it."""
        rows = [self._row(op, knob) for op, knob in enumerate(choice)]
        return self.problem.replay(np.array(rows, np.int32), self._machine)

    def joules(self, energy_fj: int) -> float:
        """Energy over all GPUs, J, from that of one GPU per stage and one replica."""
        return j_from_fj(energy_fj * self.num_gpus)

    def by_stage(self, values: Sequence[T]) -> list[list[T]]:
        """Values of all operations by their stage."""
        return [list(values[first:last]) for first, last in self._stages]

    def supported(self, planned: Choice) -> Choice:
        """Every clock, or where the GPU lacks it the next one above that is not slower.

        Raises:
            InputError: there is none.
        """
        choice = []
        for op, knob in enumerate(planned):
            if own := self._raised_parts(op, knob):
                knob = own.knob
            elif knob[0]:
                clock = self._fitting([op], planned, knob[0])
                if clock is None:
                    what = self.problem.pipeline.operations[op]
                    raise _too_fast(what, self._clocks[what.stage], knob[0])
                knob = clock, knob[1]
            choice.append(knob)
        return choice

    def raised(self, planned: Choice, applied: Choice) -> list[RaisedClock]:
        """The clocks that differ, with how many operations of a replica they are for."""
        counts: Counter[tuple[int, str, int, int, bool]] = Counter()
        for i, op in enumerate(self.problem.pipeline.operations):
            (asked, _), (mhz, _) = planned[i], applied[i]
            known = applied[i] in self.problem.rows_by_knob[self._table[i]]
            parts = self._raised_parts(i, planned[i])
            pairs = parts.clocks if parts else ((asked, mhz, known),) * (mhz != asked)
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
        current = list(choice)
        while raises := self._raises(current, replay, holds, least_ns):
            for op, mhz in raises.items():
                current[op] = mhz, current[op][1]
            replay, holds = self.replay(current), self._holds(current)
        starts = [self._starts(stage, replay) for stage in range(len(holds))]
        return current, Dwell(
            min_dwell_s=min_dwell_s,
            raised_operations=sum(old != new for old, new in zip(choice, current, strict=True)),
            extra_energy_j=self.joules(replay.energy_fj - before.energy_fj),
            changes_before=sum(map(len, first)),
            changes_after=sum(map(len, holds)),
            changes_too_fast=sum(
                start(hold.last) - start(hold.first) < least_ns
                for start, held in zip(starts, holds, strict=True)
                for hold in held
            ),
        )

    def _raised_parts(self, op: int, knob: Knob) -> Raised | None:
        what = self.problem.pipeline.operations[op]
        return self._parts.get((what.profile_stage, what.instruction, knob[1]))

    def _holds(self, choice: Choice) -> list[list[_Hold]]:
        """The holds of each stage by their first operation; none where its clock never changes."""
        stages = []
        for mhz in self.by_stage([mhz for mhz, _ in choice]):
            asking = [k for k, clock in enumerate(mhz) if clock]
            begins = [k for before, k in pairwise([*asking[-1:], *asking]) if mhz[before] != mhz[k]]
            ends = [*begins[1:], *(k + len(mhz) for k in begins[:1])]
            stages.append([_Hold(k, end, mhz[k]) for k, end in zip(begins, ends, strict=True)])
        return stages

    def _starts(self, stage: int, replay: Replay) -> Callable[[int], int]:
        """When a stage's operations start, ns, by position."""
        first, last = self._stages[stage]
        starts = replay.starts_ns[first:last].tolist()

        def start(position: int) -> int:
            lap, k = divmod(position, len(starts))
            return int(starts[k] + lap * replay.makespan_ns)

        return start

    def _raises(
        self, choice: Choice, replay: Replay, stages: Sequence[Sequence[_Hold]], least_ns: int
    ) -> dict[int, int]:
        """Clocks to raise next: on each stage the cheapest way for each hold that is too short.

        Ways that overlap wait for the next round. Empty if nothing is too short or can be helped.
        """
        raises: dict[int, int] = {}
        for stage, holds in enumerate(stages):
            first, last = self._stages[stage]
            count, start = last - first, self._starts(stage, replay)
            for k, hold in enumerate(holds):
                begin, end = start(hold.first), start(hold.last)
                if end - begin >= least_ns:
                    continue
                # As far as the hold itself, round the iteration.
                back = range(hold.first - 1, hold.last - count - 1, -1)
                on = range(hold.last, hold.first + count)
                before = [(first + p % count, end - start(p)) for p in back]
                after = [(first + p % count, start(p + 1) - begin) for p in on]
                ways = [
                    *(
                        self._joined(choice, stage, hold, other)
                        for other in {holds[k - 1], holds[(k + 1) % len(holds)]}
                    ),
                    self._grown(choice, hold, before, least_ns),
                    self._grown(choice, hold, after, least_ns),
                ]
                ways = [way for way in ways if way.clocks]
                if ways:
                    best = min(ways, key=lambda way: (way.short, way.cost_fj))
                    if not best.clocks.keys() & raises.keys():
                        raises.update(best.clocks)
        return raises

    def _joined(self, choice: Choice, stage: int, hold: _Hold, neighbour: _Hold) -> _Raise:
        """A hold and its neighbour at one clock, the lowest that does for both."""
        first, last = self._stages[stage]
        positions = chain(range(*hold[:2]), range(*neighbour[:2]))
        ops = [op for p in positions if choice[op := first + p % (last - first)][0]]
        mhz = self._fitting(ops, choice, max(hold.mhz, neighbour.mhz))
        return self._way(choice, {} if mhz is None else dict.fromkeys(ops, mhz), short=False)

    def _grown(
        self, choice: Choice, hold: _Hold, ops: Iterable[tuple[int, int]], least_ns: int
    ) -> _Raise:
        """Raise one operation after the other to a hold's clock until it lasts long enough.

        Args:
            ops: the operations, and how long the hold lasts with each and those before it, ns.
        """
        clocks: dict[int, int] = {}
        short = True
        for op, lasts_ns in ops:
            mhz, _ = knob = choice[op]
            if mhz == hold.mhz:
                short = False
                break
            if mhz > hold.mhz or (mhz and not self._keeps_up(op, knob, hold.mhz)):
                break
            if mhz:
                clocks[op] = hold.mhz
            if lasts_ns >= least_ns:
                short = False
                break
        return self._way(choice, clocks, short=short)

    def _way(self, choice: Choice, clocks: dict[int, int], *, short: bool) -> _Raise:
        """A way and its cost: e - P t of what is raised, after less before."""
        changed = {op: mhz for op, mhz in clocks.items() if mhz != choice[op][0]}
        cost_fj = 0
        for op, mhz in changed.items():
            table = self.problem.tables[self._table[op]]
            waiting_uw = int(self.problem.blocking_power_uw[self.problem.stage[op]])
            for sign, knob in ((1, (mhz, choice[op][1])), (-1, choice[op])):
                row = self._row(op, knob)
                cost_fj += sign * (int(table.energy_fj[row]) - waiting_uw * int(table.time_ns[row]))
        return _Raise(changed, short, cost_fj)

    def _row(self, op: int, knob: Knob) -> int:
        """The row that stands for an operation: that of its clock, or of the highest below.

        Where the profile does not know a clock, the operation counts as no faster than it is known
        to be.
        """
        return self._row_of_table(self._table[op], knob)

    def _find_row(self, number: int, knob: Knob) -> int:
        rows = self.problem.rows_by_knob[number]
        mhz, config = knob
        return rows[max(known for known in rows if known[0] <= mhz and known[1] == config)]

    def _keeps_up(self, op: int, knob: Knob, mhz: int) -> bool:
        """Whether an operation is not slower at a higher clock."""
        time = self.problem.tables[self._table[op]].time_ns
        return bool(time[self._row(op, (mhz, knob[1]))] <= time[self._row(op, knob)])

    def _fitting(self, ops: Sequence[int], choice: Choice, least_mhz: int) -> int | None:
        """The lowest clock of a GPU from least_mhz up at which no operation gets slower."""
        for mhz in self._clocks[int(self.problem.stage[ops[0]])].mhz:
            if mhz >= least_mhz and all(self._keeps_up(op, choice[op], mhz) for op in ops):
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
