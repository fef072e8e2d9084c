"""The exact replay of a pipeline, and the search for the rows of least energy that keeps to limits.

One engine, csrc/replay.hpp, says what a choice of rows comes to: integers throughout, clocks that
come late, factors for noise, power over time, and how far apart a stage's clock requests are. The
search, csrc/annealing.hpp, replays every move by the same code, so what it finds is what a replay
says of it, to the ns and fJ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from envplan import _kernel
from envplan.errors import InputError
from envplan.pipeline import Pipeline
from envplan.profile import OptionTable, Profile
from envplan.units import MAX_INTEGER

__all__ = [
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

_CONSTANT_PASSES: Final = 6  # of the descent to one clock a stage


@dataclass(frozen=True)
class Machine:
    """How GPUs follow requests for a clock.

    Attributes:
        latency_ns: from a request until the clock changes, ns.
    """

    latency_ns: int = 0


class Problem:
    """A pipeline with an option table for each operation, as arrays.

    Rows of one table are what a choice consists of; "over all tables" they are numbered through.

    Args:
        blocking_power_uw: what a waiting GPU draws on each stage, (num_stages,), uW.

    Raises:
        InputError: the profile lacks an operation.

    Attributes:
        tables: the distinct option tables.
        table: int32 (N,), which of them each operation has.
        first_row: int32 (N,), its first row over all tables.
        stage: int32 (N,), the stage of each operation.
        blocking_power_uw: int64 (num_stages,).
        time_ns, energy_fj, power_uw, frequency_mhz: int64 (rows over all tables,); power is the
            most that a row draws; 0 MHz where a row controls no clock.
        left_mhz: likewise, the clock in force as an operation ends by each row.
        clocks_mhz: int64, every clock in the tables, ascending.
    """

    def __init__(
        self, pipeline: Pipeline, profile: Profile, blocking_power_uw: Sequence[int]
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
        self.blocking_power_uw: Times = np.array(blocking_power_uw, np.int64)
        self.time_ns: Times = np.concatenate([table.time_ns for table in self.tables])
        self.energy_fj: Times = np.concatenate([table.energy_fj for table in self.tables])
        self.power_uw: Times = np.concatenate([table.peak_uw for table in self.tables])
        self.frequency_mhz: Times = np.concatenate([table.frequency_mhz for table in self.tables])
        self.left_mhz: Times = np.concatenate([table.end_mhz for table in self.tables])
        clocks = np.concatenate([self.frequency_mhz, self.left_mhz])
        self.clocks_mhz: Times = np.unique(clocks[clocks > 0])
        self._kernel = self._ordered(pipeline.order)

    @cached_property
    def max_frequency_rows(self) -> Rows:
        """The row of each operation's highest frequency, int32 (N,)."""
        best = np.array([table.max_frequency_option for table in self.tables], np.int32)
        return best[self.table]

    def cheapest_rows(self, power_uw: Sequence[float]) -> Rows:
        """The row in which each operation uses least where a ns is worth so much, int32 (N,).

        Args:
            power_uw: of each stage, (num_stages,), uW.
        """
        table_and_stage = np.stack([self.table, self.stage])
        pairs, pair_of_operation = np.unique(table_and_stage, axis=1, return_inverse=True)
        cheapest_of_pair = [
            _cheapest_row(self.tables[table], power_uw[stage]) for table, stage in pairs.T.tolist()
        ]
        return np.array(cheapest_of_pair, np.int32)[pair_of_operation.ravel()]

    @cached_property
    def thriftiest_rows(self) -> Rows:
        """The row in which each operation uses least above waiting for as long, int32 (N,)."""
        return self.cheapest_rows(self.blocking_power_uw.tolist())

    def rows_at(self, settings: Sequence[tuple[int, str]]) -> Rows:
        """The row of each operation at its setting, (MHz, config), int32 (N,).

        Raises:
            InputError: an operation's table has no such row.
        """
        rows = np.empty(len(self.table), np.int32)
        for i, (table, setting) in enumerate(zip(self.table.tolist(), settings, strict=True)):
            row = self.rows_by_setting[table].get(setting)
            if row is None:
                operation = self.pipeline.operations[i]
                mhz, config = setting
                with_config = f" with config {config}" if config else ""
                raise InputError(
                    f"the profile has no row for {operation.instruction} on stage "
                    f"{operation.profile_stage} at {mhz} MHz{with_config}, asked for by microbatch "
                    f"{operation.microbatch}"
                )
            rows[i] = row
        return rows

    def over_all(self, rows: Rows) -> Rows:
        """Rows, (N,), as they are numbered over all tables, int32 (N,)."""
        return self.first_row + rows

    def replay(
        self,
        rows: Rows,
        machine: Machine = Machine(),
        factors: NDArray[np.float64] | None = None,
    ) -> Replay:
        """What a choice of rows comes to.

        Args:
            rows: int32 (N,), a row of each operation's table.
            factors: what each operation's time is multiplied by, positive, float64 (N,).

        Raises:
            InputError: the iteration would outlast 2**62 ns, 146 years, or noise makes an
                operation take more than 2**63 fJ.
        """
        starts_ns, finishes_ns, energies_fj, makespan_ns, energy_fj = _exactly(
            self._kernel.replay, rows, machine.latency_ns, factors
        )
        return Replay(
            self,
            rows,
            machine,
            factors,
            starts_ns,
            finishes_ns,
            energies_fj,
            makespan_ns,
            energy_fj,
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
        return _exactly(self._kernel.makespans, rows, machine.latency_ns, factors)

    def _ordered(self, order: Rows) -> _kernel.Problem:
        """For the kernel, with operations numbered in a topological order."""
        pipeline = self.pipeline
        return _kernel.Problem(
            order,
            pipeline.stage_begin,
            pipeline.succ_begin,
            pipeline.succ,
            pipeline.succ_lag_ns,
            self.table,
            self._table_begin,
            self.time_ns,
            self.energy_fj,
            *self._clocks_of_rows,
            self.blocking_power_uw,
            *self._slices,
        )

    @cached_property
    def _slices(self) -> tuple[Rows, Times, Times]:
        """The power that rows over all tables draw: first slices, (rows + 1,), ns and uW."""
        segments = [table.segments for table in self.tables]
        counts = np.concatenate([np.diff(of_table.begin) for of_table in segments])
        begin = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        times_ns = np.concatenate([of_table.time_ns for of_table in segments])
        powers_uw = np.concatenate([of_table.power_uw for of_table in segments])
        return begin, times_ns, powers_uw

    @cached_property
    def _clocks_of_rows(self) -> tuple[Rows, Rows, NDArray[np.int32]]:
        """The clocks of rows over all tables, by index, and the rows that stand for them.

        Returns:
            The clock that each row asks for, (rows,); the clock that it leaves, (rows,), both
            NO_CLOCK where it controls none; and the row that stands for it at each clock, (rows,
            clocks), -1 where it controls none.
        """
        requested = self._clock_index(self.frequency_mhz)
        left = self._clock_index(self.left_mhz)
        standing_in = np.full((len(self.time_ns), len(self.clocks_mhz)), -1, np.int32)
        for table, first_row in zip(self.tables, self._table_begin.tolist(), strict=False):
            self._stand_in(table, first_row, standing_in)
        return requested, left, standing_in

    def _clock_index(self, mhz: Times) -> Rows:
        """Indices into clocks_mhz; NO_CLOCK for 0 MHz."""
        index = np.searchsorted(self.clocks_mhz, mhz)
        return np.where(mhz > 0, index, NO_CLOCK).astype(np.int32)

    def _stand_in(self, table: OptionTable, first_row: int, standing_in: NDArray[np.int32]) -> None:
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
        return [
            {
                setting: row
                for row, setting in enumerate(
                    zip(table.frequency_mhz.tolist(), table.config, strict=True)
                )
            }
            for table in self.tables
        ]


def _cheapest_row(table: OptionTable, power_uw: float) -> int:
    """The first row of least energy above that of drawing a power for as long."""
    time_ns, energy_fj = table.time_ns, table.energy_fj
    if isinstance(power_uw, int) and power_uw * int(time_ns.max()) > MAX_INTEGER:
        time_ns, energy_fj = time_ns.astype(object), energy_fj.astype(object)  # beyond 64 bits
    return int(np.argmin(energy_fj - power_uw * time_ns))


def _exactly(replayed: Callable[..., Answer], *arguments: Any) -> Answer:
    """The kernel's result.

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
        energy_fj: int64, of one GPU.
    """

    operation: NDArray[np.int32]
    frequency_mhz: NDArray[np.int64]
    begin_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    energy_fj: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Replay:
    """An exact replay, of one GPU a stage and one replica.

    Attributes:
        rows: the choice, int32 (N,).
        factors: of noise, float64 (N,); None where there is none.
        starts_ns, finishes_ns: of each operation, int64 (N,).
        energies_fj: of each operation, int64 (N,).
        makespan_ns: when the last operation ends.
        energy_fj: of all operations and all waiting until the makespan.
    """

    problem: Problem
    rows: Rows
    machine: Machine
    factors: NDArray[np.float64] | None
    starts_ns: NDArray[np.int64]
    finishes_ns: NDArray[np.int64]
    energies_fj: NDArray[np.int64]
    makespan_ns: int
    energy_fj: int

    @property
    def effective_fj(self) -> int:
        """Energy above that of waiting for as long, fJ."""
        return self.energy_until(0)

    def energy_until(self, sync_ns: int) -> int:
        """Energy if everybody waits until a time, fJ."""
        waiting_uw = int(self.problem.blocking_power_uw.sum())
        return self.energy_fj + waiting_uw * (sync_ns - self.makespan_ns)

    @cached_property
    def busy_ns(self) -> NDArray[np.int64]:
        """How long each stage runs operations, int64 (num_stages,), ns."""
        busy = np.zeros(self.problem.pipeline.num_stages, np.int64)
        np.add.at(busy, self.problem.stage, self.finishes_ns - self.starts_ns)
        return busy

    @cached_property
    def stage_energies_fj(self) -> list[int]:
        """Energy of each stage, its waiting until the makespan included, (num_stages,).

        Python's integers: a stage may use more than the 9.2 kJ that 64 bits hold.
        """
        waiting = zip(self.problem.blocking_power_uw.tolist(), self.busy_ns.tolist(), strict=True)
        bounds = pairwise(self.problem.pipeline.stage_begin.tolist())
        return [
            power_uw * (self.makespan_ns - busy_ns) + sum(self.energies_fj[first:last].tolist())
            for (power_uw, busy_ns), (first, last) in zip(waiting, bounds, strict=True)
        ]

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
        operation = finishes.index(self.makespan_ns)
        path = [operation]
        while starts[operation] > 0:
            binding = [
                predecessor
                for predecessor, lag_ns in predecessors[operation]
                if finishes[predecessor] + lag_ns == starts[operation]
            ]
            same_stage = [i for i in binding if stage[i] == stage[operation]]
            operation = (same_stage or binding)[0]
            path.append(operation)
        return tuple(reversed(path))

    @cached_property
    def parts(self) -> Parts:
        """Every operation, split where its clock changes."""
        operation, _, clock, begin_ns, end_ns, energy_fj = self.problem._kernel.parts(
            self.rows, self.machine.latency_ns, self.factors
        )
        mhz = np.append(self.problem.clocks_mhz, 0)[clock]  # the last entry is that of NO_CLOCK
        return Parts(operation, mhz, begin_ns, end_ns, energy_fj)

    @cached_property
    def power_steps(self) -> tuple[Times, Times]:
        """Power over time, of one GPU a stage together.

        An operation draws the power of the row it runs by, whatever the noise, or that of its
        parts, and a stage between two operations its blocking power.

        Returns:
            When it changes, ascending from 0 to the makespan, ns, int64 (k + 1,); and the power
            between each time and the next, uW, int64 (k,).

        Raises:
            InputError: all stages together draw more than 2**62 uW.
        """
        steps = self.problem._kernel.power_steps
        return _exactly(steps, self.rows, self.machine.latency_ns, self.factors)

    @property
    def peak_uw(self) -> int:
        """The most power at a time, uW."""
        return int(self.power_steps[1].max())

    def requests(self, stage: int) -> tuple[Times, Times]:
        """Requests of a stage for another clock than it has asked for last.

        Returns:
            When an operation makes each as it starts, ns, and for what, MHz, both int64 (k,).
        """
        begin, end = self.problem.pipeline.stage_begin[stage : stage + 2].tolist()
        requesting = begin + np.flatnonzero(self.frequency_mhz[begin:end])
        mhz = self.frequency_mhz[requesting]
        left_mhz = self.problem.left_mhz[self.problem.over_all(self.rows)[requesting]]
        # An iteration begins with the clock that the one before it has left.
        is_change = mhz != np.roll(left_mhz, 1)
        return self.starts_ns[requesting[is_change]], mhz[is_change]

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
    """How good a choice is: the less the better, first by penalty, then by energy.

    Attributes:
        excess_fj: penalty for everything by which limits are broken.
        energy_fj: of one GPU a stage, until the makespan or, where all wait, the deadline.
        late_ns: after the deadline.
        shortage_ns: of what is to lie between two requests for a clock.
        over_fj: energy above the cap on power.
    """

    excess_fj: int
    energy_fj: int
    late_ns: int
    shortage_ns: int
    over_fj: int

    @property
    def holds(self) -> bool:
        """Whether every limit is kept."""
        return self.late_ns == self.shortage_ns == self.over_fj == 0


class Search:
    """Rows of least energy that end by a deadline and keep to local limits.

    Deterministic: the same arguments give the same rows.

    Args:
        starts_ns: about when operations start, int64 (N,), as in any replay or relaxed optimum:
            moves that trade time look at operations that start at about the same time.
        deadline_ns: when the last operation must have ended.
        price_uw: what a ns late, or a ns of shortage, costs at first, not negative.
        min_dwell_ns: least time between two requests of a stage for another clock.
        peak_uw: most power of one GPU a stage together, at any time.
        waits: energy counts until the deadline, for everybody waits until then anyway.

    Raises:
        ValueError: starts_ns contradicts the order of the operations, or the price is negative.
    """

    def __init__(
        self,
        problem: Problem,
        starts_ns: NDArray[np.int64],
        deadline_ns: int,
        *,
        price_uw: int,
        machine: Machine = Machine(),
        min_dwell_ns: int = 0,
        peak_uw: int | None = None,
        waits: bool = False,
    ) -> None:
        position = np.empty(len(starts_ns), np.int32)
        position[problem.pipeline.order] = np.arange(len(starts_ns), dtype=np.int32)
        order = np.lexsort((position, starts_ns)).astype(np.int32)
        self._kernel = _kernel.Search(
            problem._ordered(order),
            machine.latency_ns,
            deadline_ns,
            min_dwell_ns,
            -1 if peak_uw is None else peak_uw,
            waits,
            price_uw,
        )

    def score(self, rows: Rows) -> Score:
        """How good rows, int32 (N,), are."""
        return Score(*self._kernel.score(rows))

    def improve(self, rows: Rows, moves: int, heat: float, seed: int) -> Rows:
        """The best rows seen while annealing from others, int32 (N,); never worse than those.

        Args:
            moves: how many to try.
            heat: first temperature in units of the mean cost between neighbouring rows: 4 forgets
                the start, 0.25 refines, 0 only descends.
        """
        return self._kernel.improve(rows, moves, heat, seed)

    def constant(self) -> Rows:
        """The best rows found with one clock a stage, int32 (N,)."""
        return self._kernel.constant(_CONSTANT_PASSES)
