"""Clocks for a plan's operations that its GPUs have and that last: they only ever rise.

A clock that a GPU lacks is replaced by the next one above, and operations whose clock would change
too soon are raised to a neighbour's. Where the profile knows the higher clock and says that it is
slower after all, as noise may have it, a still higher one is taken. So every operation takes at
most its planned time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from envplan.enforce.clocks import Clocks
from envplan.enforce.freqplan import Dwell, RaisedClock
from envplan.errors import InputError
from envplan.plan import Plan, machine_of, problem_of
from envplan.profile import OptionTable, Profile
from envplan.replay import Replay
from envplan.units import j_from_fj, ns_from_s_ceil, s_from_ns, w_from_uw

__all__ = ["Choice", "Fitter", "Hold"]


class Choice(NamedTuple):
    """A clock for every operation.

    Attributes:
        mhz: of each operation; 0 where none is set.
        row: the row of each operation's table that stands for it: that of its clock, or, where the
            profile does not know that, of the highest clock below.
    """

    mhz: list[int]
    row: list[int]


class Hold(NamedTuple):
    """Operations first .. last - 1 of a stage, which run at one clock.

    Attributes:
        begin_ns: when the first one asks for the clock.
        lasts_ns: until another clock is asked for, be it in the next iteration.
    """

    first: int
    last: int
    mhz: int
    begin_ns: int
    lasts_ns: int


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
    """

    def __init__(
        self,
        plan: Plan,
        profile: Profile,
        clocks: Sequence[Clocks],
        num_gpus: int,
    ) -> None:
        self._problem = problem = problem_of(plan.job, profile)
        self.pipeline = problem.pipeline
        self.stages = list(pairwise(self.pipeline.stage_begin.tolist()))
        self._profile = profile
        self._clocks = clocks
        self._tables = [problem.tables[number] for number in problem.table.tolist()]
        self._knobs = [problem.rows_by_knob[number] for number in problem.table.tolist()]
        self._powers_uw: list[int] = problem.blocking_power_uw.tolist()
        self._num_gpus = num_gpus
        self._machine = machine_of(plan.job)
        self._rows: dict[tuple[int, str], list[tuple[int, int]]] = {}
        self._known: dict[tuple[int, int, int], int] = {}

    # The replay of a choice, on the plan's machine: all that is proved of it follows from these.

    def replay(self, choice: Choice) -> Replay:
        """When operations start, when the iteration ends, and its energy."""
        return self._problem.replay(np.array(choice.row, np.int32), self._machine)

    def peak_w(self, replay: Replay) -> float:
        """The most that all GPUs draw at a time, W."""
        return w_from_uw(replay.peak_uw * self._num_gpus)

    def holds(self, choice: Choice, priced: Replay) -> list[list[Hold]]:
        """For each stage how long it keeps its clocks; an operation without one keeps that before.

        One that lasts over the end of the iteration is two holds, each as long as both.
        """
        starts = priced.starts_ns.tolist()
        stages = []
        for first, last in self.stages:
            asking = [op for op in range(first, last) if choice.mhz[op]]
            before = [0, *(choice.mhz[op] for op in asking)]
            begins = [op for op, mhz in zip(asking, before, strict=False) if choice.mhz[op] != mhz]
            ends = [starts[op] for op in begins[1:]]
            ends += [priced.makespan_ns + starts[op] for op in begins[:1]]
            holds = [
                Hold(op, following, choice.mhz[op], starts[op], end - starts[op])
                for op, following, end in zip(begins, [*begins[1:], last], ends, strict=False)
            ]
            if len(holds) > 1 and holds[0].mhz == holds[-1].mhz:
                lasts_ns = holds[0].lasts_ns + holds[-1].lasts_ns
                holds[0] = holds[0]._replace(lasts_ns=lasts_ns)
                holds[-1] = holds[-1]._replace(lasts_ns=lasts_ns)
            stages.append(holds)
        return stages

    def broken_limit(self, plan: Plan, choice: Choice, priced: Replay) -> str | None:
        """The first of a plan's limits that a choice does not keep to, in words."""
        dwell_s, cap_w = plan.job.min_dwell_s, plan.target.peak_power_w
        least_ns = 0 if dwell_s is None else ns_from_s_ceil(dwell_s)
        for stage, holds in enumerate(self.holds(choice, priced)):
            for k in _short(holds, least_ns):
                return (
                    f"stage {stage} asks for a clock at {s_from_ns(holds[k].begin_ns)!r} s and for "
                    f"another one {s_from_ns(holds[k].lasts_ns)!r} s later, within the "
                    f"{dwell_s!r} s that the plan keeps"
                )
        if cap_w is not None and (peak_w := self.peak_w(priced)) > cap_w:
            return (
                f"the GPUs draw {peak_w!r} W at the peak, more than the plan's cap of {cap_w!r} W"
            )
        return None

    def above_waiting_fj(self, priced: Replay) -> int:
        """What one GPU a stage uses above waiting for as long, fJ: see Job.above_waiting_fj."""
        return priced.energy_fj - sum(self._powers_uw) * priced.makespan_ns

    def joules(self, energy_fj: int) -> float:
        """Energy over all GPUs, J, from that of one GPU per stage and one replica."""
        return j_from_fj(energy_fj * self._num_gpus)

    def planned(
        self, frequencies: Sequence[Sequence[int]], configs: Sequence[Sequence[str]], where: str
    ) -> Choice:
        """The choice that a plan or a rung states, stage by stage.

        Args:
            where: what error messages begin with.

        Raises:
            InputError: a frequency is not in the profile, or there is not one for each operation.
        """
        lengths = [last - first for first, last in self.stages]
        if not [*map(len, frequencies)] == [*map(len, configs)] == lengths:
            raise InputError(f"{where} does not have one clock for every operation")
        mhz, rows = _flat(frequencies), []
        for op, known, asked, config in zip(
            self.pipeline.operations, self._knobs, mhz, _flat(configs), strict=True
        ):
            if (asked, config) not in known:
                raise InputError(
                    f"{where}: {asked} MHz for {op.instruction} {op.microbatch} of stage "
                    f"{op.stage} is not a row of profile {self._profile.name}"
                )
            rows.append(known[asked, config])
        return Choice(mhz, rows)

    def supported(self, planned: Choice) -> Choice:
        """Every clock, or where the GPU lacks it the next one above that is not slower.

        Raises:
            InputError: there is none.
        """
        mhz, rows = [], []
        for op, (asked, row) in enumerate(zip(planned.mhz, planned.row, strict=True)):
            clock = self._fitting([op], planned, asked) if asked else 0
            if clock is None:
                raise self._too_fast(op, asked)
            mhz.append(clock)
            rows.append(self._row_at(op, row, clock) if clock else row)
        return Choice(mhz, rows)

    def raised(self, planned: Choice, applied: Choice) -> list[RaisedClock]:
        """The clocks that differ, with how many operations of a replica they are for."""
        counts: Counter[tuple[str, int, int, int, bool]] = Counter()
        operations = zip(self.pipeline.operations, self._tables, applied.row, strict=True)
        for (op, table, row), asked, mhz in zip(operations, planned.mhz, applied.mhz, strict=True):
            if mhz != asked:
                known = int(table.frequency_mhz[row]) == mhz
                counts[op.instruction, op.stage, asked, mhz, known] += 1
        return [
            RaisedClock(
                stage=stage,
                instruction=instruction,
                planned_mhz=asked,
                applied_mhz=mhz,
                operations=counts[instruction, stage, asked, mhz, known],
                profiled=known,
            )
            for instruction, stage, asked, mhz, known in sorted(
                counts, key=lambda key: (key[1], key[0], *key[2:])
            )
        ]

    def lasting(self, choice: Choice, min_dwell_s: float) -> tuple[Choice, Dwell]:
        """The choice with operations raised until clocks last, and what that cost.

        Holds that are too short are taken up one by one, each time in the cheapest of four ways:
        raise them to the clock before or after, or raise operations before or after to them, one by
        one. Clocks only rise, so this ends.
        """
        least_ns = ns_from_s_ceil(min_dwell_s)
        before = priced = self.replay(choice)
        first = holds = self.holds(choice, priced)
        current = Choice(list(choice.mhz), list(choice.row))
        while raises := self._raises(current, priced, holds, least_ns):
            for op, mhz in raises.items():
                current.row[op] = self._row_at(op, current.row[op], mhz)
                current.mhz[op] = mhz
            priced = self.replay(current)
            holds = self.holds(current, priced)
        return current, Dwell(
            min_dwell_s=min_dwell_s,
            raised_operations=sum(map(int.__ne__, choice.mhz, current.mhz)),
            extra_energy_j=self.joules(priced.energy_fj - before.energy_fj),
            changes_before=sum(map(_changes, first)),
            changes_after=sum(map(_changes, holds)),
            changes_too_fast=sum(
                hold.lasts_ns < least_ns for stage in holds for hold in stage[: _changes(stage)]
            ),
        )

    def _by_clock(self, table: OptionTable, config: str) -> list[tuple[int, int]]:
        """(MHz, row) of a table's options with this config, ascending."""
        key = (id(table), config)
        if key not in self._rows:
            clocks = zip(table.frequency_mhz.tolist(), table.config, strict=True)
            self._rows[key] = sorted(
                (mhz, row) for row, (mhz, label) in enumerate(clocks) if label == config
            )
        return self._rows[key]

    def _row_at(self, op: int, row: int, mhz: int) -> int:
        """The row that stands for an operation once its clock is raised from its row's to mhz.

        That of the highest clock up to mhz: where the profile does not know mhz itself, the
        operation counts as no faster than it is known to be.
        """
        table = self._tables[op]
        key = (id(table), row, mhz)
        if key not in self._known:
            rows = [r for m, r in self._by_clock(table, table.config[row]) if m <= mhz]
            self._known[key] = rows[-1]
        return self._known[key]

    def _keeps_up(self, op: int, row: int, mhz: int) -> bool:
        """Whether an operation is not slower at a higher clock than by its row."""
        time = self._tables[op].time_ns
        return bool(time[self._row_at(op, row, mhz)] <= time[row])

    def _fitting(self, ops: Sequence[int], choice: Choice, least_mhz: int) -> int | None:
        """The lowest clock of a GPU from least_mhz up at which no operation gets slower."""
        clocks = self._clocks[self.pipeline.operations[ops[0]].stage]
        for mhz in clocks.mhz:
            if mhz >= least_mhz and all(self._keeps_up(op, choice.row[op], mhz) for op in ops):
                return mhz
        return None

    def _too_fast(self, op: int, mhz: int) -> InputError:
        what = self.pipeline.operations[op]
        clocks = self._clocks[what.stage]
        name, highest = clocks.gpu or "the GPU", clocks.mhz[-1]
        reason = (
            f"the highest clock of {name} is {highest} MHz"
            if mhz > highest
            else f"by the profile no clock that {name} has from there up is as fast"
        )
        return InputError(
            f"the plan asks for {mhz} MHz for {what.instruction} {what.microbatch} of stage "
            f"{what.stage}, but {reason}; plan again from a profile of this GPU, or say which GPU "
            "it is with --gpu or --clocks"
        )

    def _raises(
        self, choice: Choice, priced: Replay, stages: Sequence[Sequence[Hold]], least_ns: int
    ) -> dict[int, int]:
        """Clocks to raise next: on each stage the cheapest way for each hold that is too short.

        Ways that overlap wait for the next round. Empty if nothing is too short or can be helped.
        """
        starts = priced.starts_ns.tolist()
        raises: dict[int, int] = {}
        for stage, (first, last) in zip(stages, self.stages, strict=True):
            ends = [*starts[first + 1 : last], priced.makespan_ns + starts[first]]
            taken = -1
            for k in _short(stage, least_ns):
                hold = stage[k]
                end = ends[hold.last - 1 - first]
                before = [(op, end - starts[op]) for op in range(first, hold.first)]
                after = [(op, ends[op - first] - hold.begin_ns) for op in range(hold.last, last)]
                ways = [
                    *self._joined(choice, stage, k),
                    self._grown(choice, hold, before[::-1], least_ns),
                    self._grown(choice, hold, after, least_ns),
                ]
                ways = [way for way in ways if way.clocks]
                if not ways:
                    continue
                best = min(ways, key=lambda way: (not way.enough, way.cost_fj))
                if min(best.clocks) > taken:
                    raises.update(best.clocks)
                    taken = max(best.clocks)
        return raises

    def _joined(self, choice: Choice, stage: Sequence[Hold], k: int) -> Iterable[_Raise]:
        """The k-th hold of a stage and a neighbour at one clock, the lowest that does for both."""
        for neighbour in [*stage[max(0, k - 1) : k], *stage[k + 1 : k + 2]]:
            spans = (range(hold.first, hold.last) for hold in (stage[k], neighbour))
            ops = [op for span in spans for op in span if choice.mhz[op]]
            mhz = self._fitting(ops, choice, max(stage[k].mhz, neighbour.mhz))
            if mhz is not None:
                yield self._way(choice, dict.fromkeys(ops, mhz), enough=True)

    def _grown(
        self, choice: Choice, hold: Hold, ops: Iterable[tuple[int, int]], least_ns: int
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
            if mhz > hold.mhz or (mhz and not self._keeps_up(op, choice.row[op], hold.mhz)):
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
            table, old = self._tables[op], choice.row[op]
            new = self._row_at(op, old, mhz)
            energy_fj = int(table.energy_fj[new]) - int(table.energy_fj[old])
            time_ns = int(table.time_ns[new]) - int(table.time_ns[old])
            cost_fj += energy_fj - self._powers_uw[self.pipeline.operations[op].stage] * time_ns
        return _Raise(changed, enough, cost_fj)


def _flat(stages: Iterable[Iterable[Any]]) -> list[Any]:
    return [value for stage in stages for value in stage]


def _changes(holds: Sequence[Hold]) -> int:
    """How often the clock changes on a stage from one iteration's start to the next one's."""
    return 0 if len(holds) < 2 else len(holds) - (holds[0].mhz == holds[-1].mhz)


def _short(holds: Sequence[Hold], least_ns: int) -> list[int]:
    """Which holds of a stage are too short; none if there is but one."""
    return [k for k, hold in enumerate(holds) if len(holds) > 1 and hold.lasts_ns < least_ns]
