"""The exact replay of a pipeline, and the search for the rows of least energy that keeps to limits.

A choice has one row of its option table for each operation. One engine, csrc/replay.hpp, replays
it: integers throughout, clocks that come late, factors for noise, power over time, and how far
apart a stage's clock requests are. The search, csrc/annealing.hpp, replays every move by the same
code, so its times and energies are those of a replay, to the ns and 10 fJ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Final, Literal, NamedTuple, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from envplan import _kernel
from envplan.errors import InputError
from envplan.pipeline import Pipeline
from envplan.profile import OptionTable, Profile
from envplan.units import MAX_INTEGER

__all__ = [
    "Ask",
    "Machine",
    "Parts",
    "Problem",
    "Replay",
    "Rows",
    "Score",
    "Search",
]

Rows = NDArray[np.int32]
Times = NDArray[np.int64]
Answer = TypeVar("Answer")

#: The index of the clock of a row that controls none.
NO_CLOCK: Final = -1
# The row that stands for a row at another clock, where the row controls none.
_NO_ROW: Final = -1
# How the kernel is told that there is no cap on power.
NO_CAP: Final = -1
# How it is told that no energy is allowed for fewer changes of clock.
_NO_ALLOWANCE: Final = -1

_CONSTANT_PASSES: Final = 6  # of the descent to one clock a stage


#: When a clock is asked for: so long before its operation starts that it is there in time, or as
#: the operation starts.
Ask = Literal["ahead", "start"]


@dataclass(frozen=True)
class Machine:
    """How GPUs follow requests for a clock.

    Where clocks are asked for ahead, an operation's is asked for `latency_ns` before it starts, but
    not before the one before it on its stage starts; for a stage's first operation, not before the
    iteration begins.

    Attributes:
        latency_ns: from a request until the clock changes, ns.
        ask: when clocks are asked for.
    """

    latency_ns: int = 0
    ask: Ask = "ahead"

    @classmethod
    def of(cls, latency_ns: int, ask: Ask | None) -> Self:
        """A machine as requests and files describe it; without latency it is always the same.

        Args:
            latency_ns: from a request until the clock changes, ns.
            ask: when clocks are asked for; None: as operations start.
        """
        return cls(latency_ns, ask or "start") if latency_ns else cls()

    @property
    def asks_ahead(self) -> bool:
        """Whether clocks are asked for ahead."""
        return self.ask == "ahead"

    @property
    def ask_in_words(self) -> str:
        """When the clock of an operation is asked for, to end a sentence with."""
        return "ahead" if self.asks_ahead else "as its operation starts"


class _RowClocks(NamedTuple):
    """Clocks of rows over all tables, as indices into Problem.clocks_mhz.

    Attributes:
        requested: int32 (rows,), the clock that each asks for; NO_CLOCK where it controls none.
        left: int32 (rows,), the clock in force as an operation ends by it; NO_CLOCK likewise.
        standing_in: int32 (rows, clocks), the row that stands for each at each clock; _NO_ROW where
            it controls none.
    """

    requested: Rows
    left: Rows
    standing_in: Rows


class _RowSlices(NamedTuple):
    """The power that rows over all tables draw, in slices one after the other.

    Attributes:
        begin: int32 (rows + 1,), the first slice of each row.
        time_ns: int64 (slices,).
        power_10uw: int64 (slices,).
    """

    begin: Rows
    time_ns: Times
    power_10uw: Times


class Problem:
    """A pipeline with an option table for each operation, as arrays.

    A choice has one row of its table for each operation, by its index in that table. "Over all
    tables" rows are numbered through, table after table.

    Args:
        blocking_power_10uw: what a waiting GPU draws on each stage, (num_stages,), 10 uW.

    Raises:
        InputError: the profile lacks an operation.

    Attributes:
        tables: the distinct option tables.
        table: int32 (N,), which of them each operation has.
        first_row: int32 (N,), its first row over all tables.
        stage: int32 (N,), the stage of each operation.
        blocking_power_10uw: int64 (num_stages,).
        time_ns, energy_10fj, power_10uw, frequency_mhz: int64 (rows over all tables,); power is the
            most that a row draws; 0 MHz where a row controls no clock.
        left_mhz: int64 (rows over all tables,), the clock in force as an operation ends by each
            row; 0 MHz where it controls none.
        clocks_mhz: int64, every clock in the tables, ascending.
    """

    def __init__(
        self, pipeline: Pipeline, profile: Profile, blocking_power_10uw: Sequence[int]
    ) -> None:
        self.pipeline = pipeline
        keys = [(op.profile_stage, op.instruction) for op in pipeline.operations]
        number = {key: n for n, key in enumerate(dict.fromkeys(keys))}
        self.tables: tuple[OptionTable, ...] = tuple(profile.table(*key) for key in number)
        self.table: Rows = np.array([number[key] for key in keys], np.int32)
        sizes = [len(table) for table in self.tables]
        self._table_begin = np.cumsum([0, *sizes], dtype=np.int32)
        self.first_row: Rows = self._table_begin[self.table]
        self.stage: Rows = np.repeat(
            np.arange(pipeline.num_stages, dtype=np.int32), np.diff(pipeline.stage_begin)
        )
        self.blocking_power_10uw: Times = np.array(blocking_power_10uw, np.int64)
        self.time_ns: Times = np.concatenate([table.time_ns for table in self.tables])
        self.energy_10fj: Times = np.concatenate([table.energy_10fj for table in self.tables])
        self.power_10uw: Times = np.concatenate([table.peak_10uw for table in self.tables])
        self.frequency_mhz: Times = np.concatenate([table.frequency_mhz for table in self.tables])
        self.left_mhz: Times = np.concatenate([table.end_mhz for table in self.tables])
        clocks = np.concatenate([self.frequency_mhz, self.left_mhz])
        self.clocks_mhz: Times = np.unique(clocks[clocks > 0])
        self._kernel = self._kernel_problem(pipeline.order)

    @cached_property
    def max_frequency_rows(self) -> Rows:
        """The row of each operation's highest frequency, int32 (N,)."""
        row_of_table = np.array([table.max_frequency_option for table in self.tables], np.int32)
        return row_of_table[self.table]

    def cheapest_rows(self, power_10uw: Sequence[float]) -> Rows:
        """The row in which each operation uses least where a ns is worth so much, int32 (N,).

        Args:
            power_10uw: of each stage, (num_stages,), 10 uW.
        """
        table_and_stage = np.stack([self.table, self.stage])
        pairs, pair_of_operation = np.unique(table_and_stage, axis=1, return_inverse=True)
        cheapest_of_pair = [
            _cheapest_row(self.tables[table], power_10uw[stage])
            for table, stage in pairs.T.tolist()
        ]
        return np.array(cheapest_of_pair, np.int32)[pair_of_operation.ravel()]

    @cached_property
    def least_effective_rows(self) -> Rows:
        """The row of each operation's least effective cost, int32 (N,)."""
        return self.cheapest_rows(self.blocking_power_10uw.tolist())

    def rows_at(self, settings: Sequence[tuple[int, str]]) -> Rows:
        """The row of each operation at its setting, (MHz, config), int32 (N,).

        Raises:
            InputError: an operation's table has no such row.
        """
        rows = []
        operations = self.pipeline.operations
        for operation, table, setting in zip(
            operations, self.table.tolist(), settings, strict=True
        ):
            row = self.rows_by_setting[table].get(setting)
            if row is None:
                mhz, config = setting
                with_config = f" with config {config}" if config else ""
                raise InputError(
                    f"the profile has no row for {operation.instruction} on stage "
                    f"{operation.profile_stage} at {mhz} MHz{with_config}, asked for by microbatch "
                    f"{operation.microbatch}"
                )
            rows.append(row)
        return np.array(rows, np.int32)

    def over_all(self, rows: Rows) -> Rows:
        """Rows, (N,), as they are numbered over all tables, int32 (N,)."""
        return self.first_row + rows

    def replay(
        self,
        rows: Rows,
        machine: Machine = Machine(),
        factors: NDArray[np.float64] | None = None,
    ) -> Replay:
        """Replay a choice of rows exactly.

        Args:
            rows: int32 (N,), a row of each operation's table.
            factors: what each operation's time is multiplied by, positive, float64 (N,).

        Raises:
            InputError: the iteration would outlast 2**62 ns, 146 years, or noise makes an
                operation use more than 2**63 units of 10 fJ.
        """
        starts_ns, finishes_ns, energies_10fj, makespan_ns, energy_10fj = _exactly(
            self._kernel.replay, rows, machine.latency_ns, machine.asks_ahead, factors
        )
        return Replay(
            problem=self,
            rows=rows,
            machine=machine,
            factors=factors,
            starts_ns=starts_ns,
            finishes_ns=finishes_ns,
            energies_10fj=energies_10fj,
            makespan_ns=makespan_ns,
            energy_10fj=energy_10fj,
        )

    def makespans(
        self, rows: Rows, machine: Machine, factors: NDArray[np.float64]
    ) -> NDArray[np.int64]:
        """Iteration times in noisy runs, int64 (runs,), ns.

        Args:
            rows: int32 (N,).
            factors: what each operation's time is multiplied by, positive, float64 (runs, N).

        Raises:
            InputError: as for replay.
        """
        return _exactly(
            self._kernel.makespans, rows, machine.latency_ns, machine.asks_ahead, factors
        )

    def _kernel_problem(self, order: Rows) -> _kernel.Problem:
        """This problem for the kernel, with operations numbered in a topological order."""
        pipeline = self.pipeline
        clocks, slices = self._row_clocks, self._row_slices
        return _kernel.Problem(
            order=order,
            stage_begin=pipeline.stage_begin,
            succ_begin=pipeline.succ_begin,
            succ=pipeline.succ,
            succ_lag=pipeline.succ_lag_ns,
            table=self.table,
            table_begin=self._table_begin,
            time=self.time_ns,
            energy=self.energy_10fj,
            clock=clocks.requested,
            leaves=clocks.left,
            nearest=clocks.standing_in,
            waiting=self.blocking_power_10uw,
            slice_begin=slices.begin,
            slice_time=slices.time_ns,
            slice_power=slices.power_10uw,
        )

    @cached_property
    def _row_slices(self) -> _RowSlices:
        segments = [table.segments for table in self.tables]
        counts = np.concatenate([np.diff(of_table.begin) for of_table in segments])
        return _RowSlices(
            begin=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
            time_ns=np.concatenate([of_table.time_ns for of_table in segments]),
            power_10uw=np.concatenate([of_table.power_10uw for of_table in segments]),
        )

    @cached_property
    def _row_clocks(self) -> _RowClocks:
        num_rows, num_clocks = len(self.time_ns), len(self.clocks_mhz)
        standing_in = np.full((num_rows, num_clocks), _NO_ROW, np.int32)
        for table, first_row in zip(self.tables, self._table_begin.tolist(), strict=False):
            self._fill_standing_in(table, first_row, standing_in)
        return _RowClocks(
            requested=self._clock_index(self.frequency_mhz),
            left=self._clock_index(self.left_mhz),
            standing_in=standing_in,
        )

    def _clock_index(self, mhz: Times) -> Rows:
        """Indices into clocks_mhz; NO_CLOCK for 0 MHz."""
        index = np.searchsorted(self.clocks_mhz, mhz)
        return np.where(mhz > 0, index, NO_CLOCK).astype(np.int32)

    def _fill_standing_in(self, table: OptionTable, first_row: int, standing_in: Rows) -> None:
        """Write the rows of a table that stand for its rows at each clock, (rows, clocks).

        It is the row of the nearest clock that the table lists for all of the operation with the
        row's config, or that which its first part has; the higher of two.
        """
        clocks_mhz = self.clocks_mhz[:, None]
        configs = np.array(table.start_config)
        for config in set(configs.tolist()):
            rows = np.flatnonzero((configs == config) & (table.frequency_mhz > 0))
            at_one_clock = rows[~table.changes_clock[rows]]
            if len(at_one_clock) == 0:
                continue
            listed_mhz = table.frequency_mhz[None, at_one_clock]
            # Half a MHz nearer where higher. Of equals argmin takes the first, the fastest.
            distance = 2 * np.abs(listed_mhz - clocks_mhz) - (listed_mhz > clocks_mhz)
            nearest = at_one_clock[np.argmin(distance, axis=1)]
            standing_in[first_row + rows] = first_row + nearest

    @cached_property
    def rows_by_setting(self) -> list[dict[tuple[int, str], int]]:
        """For each table its rows by (MHz, config)."""
        return [_rows_of_table_by_setting(table) for table in self.tables]


def _rows_of_table_by_setting(table: OptionTable) -> dict[tuple[int, str], int]:
    settings = zip(table.frequency_mhz.tolist(), table.config, strict=True)
    return {setting: row for row, setting in enumerate(settings)}


def _cheapest_row(table: OptionTable, power_10uw: float) -> int:
    """The first row of least energy above that of drawing a power for as long."""
    time_ns, energy_10fj = table.time_ns, table.energy_10fj
    if isinstance(power_10uw, int) and power_10uw * int(time_ns.max()) > MAX_INTEGER:
        time_ns, energy_10fj = time_ns.astype(object), energy_10fj.astype(object)  # beyond 64 bits
    return int(np.argmin(energy_10fj - power_10uw * time_ns))


def _exactly(replayed: Callable[..., Answer], *arguments: Any) -> Answer:
    """The result of a function of the kernel.

    Raises:
        InputError: numbers outgrow 64 bits.
    """
    try:
        return replayed(*arguments)
    except OverflowError as error:
        raise InputError(str(error)) from None


class ShortDwell(NamedTuple):
    """A request for a clock that the next one of its stage follows too soon.

    Attributes:
        stage: which stage.
        request_ns: when it is made.
        dwell_ns: time until the next.
    """

    stage: int
    request_ns: int
    dwell_ns: int


class Parts(NamedTuple):
    """The parts of operations, at one clock each, by operation and in time order; all (parts,).

    Attributes:
        operation: int32, which.
        frequency_mhz: int64, the clock in force; 0 for an operation that controls none.
        begin_ns, end_ns: int64, when.
        energy_10fj: int64, of one GPU.
    """

    operation: NDArray[np.int32]
    frequency_mhz: NDArray[np.int64]
    begin_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    energy_10fj: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Replay:
    """An exact replay, of one GPU a stage and one replica.

    Attributes:
        rows: the choice, int32 (N,).
        factors: of noise, float64 (N,); None where there is none.
        starts_ns, finishes_ns: of each operation, int64 (N,).
        energies_10fj: of each operation, int64 (N,).
        makespan_ns: when the last operation ends.
        energy_10fj: of all operations and all waiting until the makespan.
    """

    problem: Problem
    rows: Rows
    machine: Machine
    factors: NDArray[np.float64] | None
    starts_ns: NDArray[np.int64]
    finishes_ns: NDArray[np.int64]
    energies_10fj: NDArray[np.int64]
    makespan_ns: int
    energy_10fj: int

    @property
    def effective_10fj(self) -> int:
        """Energy above that of waiting for as long, 10 fJ."""
        return self.energy_until(0)

    def energy_until(self, sync_ns: int) -> int:
        """Energy if everybody waits until a time, 10 fJ."""
        waiting_10uw = int(self.problem.blocking_power_10uw.sum())
        return self.energy_10fj + waiting_10uw * (sync_ns - self.makespan_ns)

    @cached_property
    def busy_ns(self) -> NDArray[np.int64]:
        """How long each stage runs operations, int64 (num_stages,), ns."""
        busy = np.zeros(self.problem.pipeline.num_stages, np.int64)
        np.add.at(busy, self.problem.stage, self.finishes_ns - self.starts_ns)
        return busy

    @cached_property
    def stage_energies_10fj(self) -> list[int]:
        """Energy of each stage, its waiting until the makespan included, (num_stages,).

        Python's integers: a stage may use more than the 9.2 kJ that 64 bits hold.
        """
        operations_of_stage = pairwise(self.problem.pipeline.stage_begin.tolist())
        waiting_ns = self.makespan_ns - self.busy_ns
        energies_10fj = []
        for power_10uw, stage_waiting_ns, (begin, end) in zip(
            self.problem.blocking_power_10uw.tolist(),
            waiting_ns.tolist(),
            operations_of_stage,
            strict=True,
        ):
            operations_10fj = sum(self.energies_10fj[begin:end].tolist())
            energies_10fj.append(operations_10fj + power_10uw * stage_waiting_ns)
        return energies_10fj

    @cached_property
    def frequency_mhz(self) -> NDArray[np.int64]:
        """The clock that each operation asks for, int64 (N,), MHz; 0: none."""
        return self.problem.frequency_mhz[self.problem.over_all(self.rows)]

    @cached_property
    def critical_path(self) -> tuple[int, ...]:
        """The critical path: operations in time order, each as soon as its predecessor allows.

        The last is the first of those that end last. Of several predecessors that it could have
        waited for, an operation's is the one on the same stage.
        """
        starts, finishes = self.starts_ns.tolist(), self.finishes_ns.tolist()
        stage = self.problem.stage.tolist()
        predecessors = self.problem.pipeline.predecessors

        def awaited_by(operation: int) -> int:
            """The predecessor whose end lets an operation start."""
            binding = [
                predecessor
                for predecessor, lag_ns in predecessors[operation]
                if finishes[predecessor] + lag_ns == starts[operation]
            ]
            for predecessor in binding:
                if stage[predecessor] == stage[operation]:
                    return predecessor
            return binding[0]

        operation = finishes.index(self.makespan_ns)
        path = [operation]
        while starts[operation] > 0:
            operation = awaited_by(operation)
            path.append(operation)
        return tuple(reversed(path))

    @cached_property
    def parts(self) -> Parts:
        """Every operation, split where its clock changes."""
        operation, _, clock, begin_ns, end_ns, energy_10fj = self.problem._kernel.parts(
            self.rows, self.machine.latency_ns, self.machine.asks_ahead, self.factors
        )
        mhz = np.append(self.problem.clocks_mhz, 0)[clock]  # the last entry is that of NO_CLOCK
        return Parts(operation, mhz, begin_ns, end_ns, energy_10fj)

    @cached_property
    def power_steps(self) -> tuple[Times, Times]:
        """Power over time, of one GPU a stage together.

        An operation draws the power of the row it runs by, whatever the noise, or that of its
        parts, and a stage between two operations its blocking power.

        Returns:
            When it changes, ascending from 0 to the makespan, ns, int64 (k + 1,); and the power
            between each time and the next, 10 uW, int64 (k,).

        Raises:
            InputError: all stages together draw more than 2**62 units of 10 uW.
        """
        steps = self.problem._kernel.power_steps
        machine = self.machine
        return _exactly(steps, self.rows, machine.latency_ns, machine.asks_ahead, self.factors)

    @property
    def peak_10uw(self) -> int:
        """The most power at a time, 10 uW."""
        return int(self.power_steps[1].max())

    @cached_property
    def requests_ns(self) -> Times:
        """When each operation's clock is asked for, int64 (N,), ns.

        -1 where it is not: its stage has asked for that clock last, or it has none.
        """
        machine = self.machine
        # Without latency clocks are asked for as operations start, and the kernel notes no times.
        if machine.latency_ns == 0:
            return np.where(self._is_request, self.starts_ns, -1)
        return self.problem._kernel.requests(
            self.rows, machine.latency_ns, machine.asks_ahead, self.factors
        )

    @property
    def num_late_requests(self) -> int:
        """How many requests give an operation its clock only after it has started."""
        lands_ns = self.requests_ns + self.machine.latency_ns
        return int(((self.requests_ns >= 0) & (lands_ns > self.starts_ns)).sum())

    @cached_property
    def _is_request(self) -> NDArray[np.bool_]:
        """Whether each operation asks for another clock than its stage has last, bool (N,)."""
        is_request = np.zeros(len(self.rows), np.bool_)
        left_mhz = self.problem.left_mhz[self.problem.over_all(self.rows)]
        for begin, end in pairwise(self.problem.pipeline.stage_begin.tolist()):
            controlling = begin + np.flatnonzero(self.frequency_mhz[begin:end])
            # An iteration begins with the clock that the one before it has left.
            found_mhz = np.roll(left_mhz[controlling], 1)
            is_request[controlling] = self.frequency_mhz[controlling] != found_mhz
        return is_request

    def requests(self, stage: int) -> tuple[Times, Times]:
        """Requests of a stage for another clock than it has asked for last.

        Returns:
            When each is made, ns, and for what, MHz, both int64 (k,).
        """
        begin, end = self.problem.pipeline.stage_begin[stage : stage + 2].tolist()
        requests_ns = self.requests_ns[begin:end]
        is_request = requests_ns >= 0
        return requests_ns[is_request], self.frequency_mhz[begin:end][is_request]

    @cached_property
    def num_changes(self) -> int:
        """Requests of all stages for another clock than asked for last, in an iteration."""
        num_stages = self.problem.pipeline.num_stages
        return sum(len(self.requests(stage)[0]) for stage in range(num_stages))

    def short_dwells(self, min_dwell_ns: int) -> Iterator[ShortDwell]:
        """Requests that the next one follows sooner than allowed, by stage and time.

        After the last of an iteration comes the first of the next.
        """
        for stage in range(self.problem.pipeline.num_stages):
            request_ns, _ = self.requests(stage)
            next_request_ns = np.concatenate([request_ns[1:], request_ns[:1] + self.makespan_ns])
            dwell_ns = next_request_ns - request_ns
            for k in np.flatnonzero(dwell_ns < min_dwell_ns).tolist():
                yield ShortDwell(stage, int(request_ns[k]), int(dwell_ns[k]))


class Score(NamedTuple):
    """A choice's rank: the less the better, first by penalty, then by cost.

    Attributes:
        excess_10fj: penalty for everything by which limits are broken.
        cost_10fj: energy, with the price of changes of clock; within an allowance only those count.
        energy_10fj: of one GPU a stage, until the makespan or, where all wait, the deadline.
        late_ns: after the deadline.
        shortage_ns: of what is to lie between two requests for a clock.
        over_10fj: energy above the cap on power.
        changes: requests for another clock than the stage has asked for last.
    """

    excess_10fj: int
    cost_10fj: int
    energy_10fj: int
    late_ns: int
    shortage_ns: int
    over_10fj: int
    changes: int

    @property
    def holds(self) -> bool:
        """Whether every limit is kept."""
        return self.late_ns == self.shortage_ns == self.over_10fj == 0


class Search:
    """Rows of least energy that end by a deadline and keep to local limits.

    Deterministic: the same arguments give the same rows.

    Args:
        starts_ns: about when operations start, int64 (N,), as in any replay or relaxed optimum:
            moves that trade time look at operations that start at about the same time.
        deadline_ns: when the last operation must have ended.
        price_10uw: what a ns late, or a ns of shortage, costs at first, not negative.
        min_dwell_ns: least time between two requests of a stage for another clock.
        peak_10uw: most power of one GPU a stage together, at any time.
        waits: energy counts until the deadline, for everybody waits until then anyway.
        change_price_10fj: cost of a request for another clock, at first where there is an
            allowance.
        allowance_10fj: choices of no more energy are the better the fewer such requests they make;
            None: energy and the price of requests count together.

    Raises:
        ValueError: starts_ns contradicts the order of the operations, or the price is negative.
    """

    def __init__(
        self,
        problem: Problem,
        starts_ns: NDArray[np.int64],
        deadline_ns: int,
        *,
        price_10uw: int,
        machine: Machine = Machine(),
        min_dwell_ns: int = 0,
        peak_10uw: int | None = None,
        waits: bool = False,
        change_price_10fj: int = 0,
        allowance_10fj: int | None = None,
    ) -> None:
        # By start time; operations that start together stay in topological order.
        position = np.empty(len(starts_ns), np.int32)
        position[problem.pipeline.order] = np.arange(len(starts_ns), dtype=np.int32)
        order = np.lexsort((position, starts_ns)).astype(np.int32)
        self._kernel = _kernel.Search(
            problem._kernel_problem(order),
            machine.latency_ns,
            machine.asks_ahead,
            deadline_ns,
            min_dwell_ns,
            NO_CAP if peak_10uw is None else peak_10uw,
            waits,
            price_10uw,
            change_price_10fj,
            _NO_ALLOWANCE if allowance_10fj is None else allowance_10fj,
        )

    @classmethod
    def on_kernel(cls, kernel: _kernel.Search) -> Self:
        """The same of the kernel's own search."""
        search = object.__new__(cls)
        search._kernel = kernel
        return search

    def score(self, rows: Rows) -> Score:
        """The score of rows, int32 (N,)."""
        return Score(*self._kernel.score(rows))

    def improve(
        self, rows: Rows, moves: int, heat: float, seed: int, *, strict_allowance: bool = False
    ) -> Rows:
        """The best rows seen while annealing from others, int32 (N,); never worse than those.

        Args:
            moves: how many to try.
            heat: first temperature in units of the mean cost between neighbouring rows: 4 forgets
                the start, 0.25 refines, 0 only descends.
            strict_allowance: the search seldom goes above the allowance. Else it does so freely,
                which finds better rows, or none that are within.
        """
        return self._kernel.improve(rows, moves, heat, seed, strict_allowance)

    def constant(self) -> Rows:
        """The best rows found with one clock a stage, int32 (N,)."""
        return self._kernel.constant(_CONSTANT_PASSES)
