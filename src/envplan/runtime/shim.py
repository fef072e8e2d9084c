"""The shim: inside a training process, it asks for the planned clock before every operation.

    with envplan.runtime.Shim("run.freqplan.json") as shim:
        for batch in batches:
            for instruction, microbatch in my_schedule:
                shim.begin(instruction, microbatch)
                ...
                shim.end(instruction, microbatch)
            shim.step()

Clocks are set by another process, the guard, so the training thread writes a few bytes into a
socket at most, and only when the clock changes. Nothing that goes wrong with clocks or with the
order of operations stops training: it is logged, and the GPU runs at its highest clock instead. An
operation is logged with its clock once the guard has said that it was set, and else with 0 MHz.

An iteration goes through three threads. The training thread follows it (PlanFollower) and requests
its clocks (ClockRequester). The thread of the ClockRequester, or the training thread where there
are no device events, learns which of these clocks were set (IterationAccounting). The thread of the
RunLog waits for the device, measures the iteration and writes it.
"""

from __future__ import annotations

import logging
import os
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from functools import partial
from pathlib import Path
from time import perf_counter_ns
from typing import Any, Final, NamedTuple

from envplan.devices import DEFAULT_BACKEND, Counted, DeviceError, DeviceInfo
from envplan.devices.guard import Guard
from envplan.enforce.freqplan import FrequencyPlan, OperationKey
from envplan.errors import InputError
from envplan.runtime.clock_requester import ClockRequester
from envplan.runtime.iteration_accounting import (
    AccountedIteration,
    FollowedIteration,
    IterationAccounting,
    IterationSpans,
)
from envplan.runtime.iteration_counts import IterationCounts
from envplan.runtime.iteration_energy import IterationEnergyMeter
from envplan.runtime.iteration_times import change_times, measure_iteration, times_by_kind
from envplan.runtime.observer import OperationObserver
from envplan.runtime.operation_clocks import OperationClocks
from envplan.runtime.order_reader import OrderReader
from envplan.runtime.plan_follower import (
    FollowState,
    IterationOutcome,
    PlanFollower,
    outcomes_in_words,
)
from envplan.runtime.rank_schedule import rank_schedules
from envplan.runtime.ranks import RankNumber, number_of_process, number_or_none
from envplan.runtime.run_log_file import log_beside
from envplan.runtime.run_records import (
    ChangeTimes,
    ClockError,
    Mismatch,
    RunEnded,
    RunKilled,
    RunStarted,
    StepRecord,
)
from envplan.runtime.runlog import RunLog
from envplan.runtime.status import StatusFile
from envplan.runtime.stragglers import num_before_reduction
from envplan.runtime.timestamps import DeviceEvent, Timestamp
from envplan.units import ns_from_s

__all__ = ["BESIDE_PLAN", "IterationTime", "Shim"]

_MAX_LOG_BYTES: Final = 64 * 2**20
_MAX_LOGGED_CLOCK_ERRORS: Final = 1000
#: A clock that comes so long after the begin of its operation is still on time, s.
_ON_TIME_S: Final = 1e-3
#: Iterations in a row without any operation, after which that is said.
_MAX_EMPTY_STEPS: Final = 3

_logger = logging.getLogger("envplan.runtime")


class LogPlace(Enum):
    """Where a run log lies, if no path says it."""

    BESIDE_PLAN = "beside the plan"


BESIDE_PLAN: Final = LogPlace.BESIDE_PLAN


class IterationTime(NamedTuple):
    """The times of an iteration, s.

    Attributes:
        planned_s: of the whole iteration, by the plan that it followed.
        measured_s: until other pipelines could hold it up; see num_before_reduction.
    """

    planned_s: float
    measured_s: float


class Shim(OperationObserver, AbstractContextManager["Shim"]):
    """Follows a frequency plan on one rank. Not for use by several threads at once.

    Making one waits until the guard is ready, for two minutes at most. Where the guard is refused,
    training goes on without clocks, and one line says why.

    Args:
        plan: a frequency plan, or the path of one.
        rank: global rank; default: as torch.distributed, torchrun, Slurm or MPI say.
        world_size: number of ranks of the job; default: as they say, else the plan's.
        device: this rank's GPU; default: what the plan says, or the only one that
            CUDA_VISIBLE_DEVICES leaves.
        counted: by whom, if `device` is given.
        backend: where clocks are set, "nvml", "zeusd", "amdsmi" or "modelled"; options of it may
            follow by keyword.
        log: file that the run log is appended to (see run_records); default: beside the plan, with
            .jsonl for .freqplan.json. None: no log.
        log_limit: bytes that this rank logs before it goes on in a file of its own, of which
            there are two at most, each as long.
        every_request: see Guard.start.
        orders: file of orders that say which plan of the ladder is followed from which iteration
            on, as `envplan site --orders` writes it; it need not exist yet. See docs/site.md.
        on_step: is called for each iteration that followed the plan, with its record, in the thread
            that writes the run log: where it is slow, lines of the log are dropped. See
            docs/runtime.md.
        marker: makes moments in the order of a device's work, for frameworks that queue it:
            `lambda: torch.cuda.Event(enable_timing=True, blocking=True)`. Clocks are then asked for
            when the GPU gets there, by a thread that waits for it (and would spin without
            blocking=True). Default: begin and end are called when the work begins and ends.
        options: for the guard, such as `share` (see Guard.start), and for the backend.

    Attributes:
        plan: the frequency plan.
        rank: global rank.
        stage: that this rank runs.
        operations: of this rank in execution order.
        part_names: of the parts of operations that have clocks of their own.
        planned_time: iteration time of the plan itself, without stragglers, s.
        has_ladder: whether there is another plan for when there are stragglers.
        last_iteration: the times of the last iteration that was measured; None before the first.
        steps: that are over.
        mismatches: iterations that left the order of the plan.
        clock_errors: that the guard has told of.
        orders: the reader of the file of orders; None where there is none.

    Raises:
        InputError: the plan cannot be read, is of another schema version, for another number of
            ranks or another GPU model, or the rank is not in it.
    """

    _consequence = "the plan is not followed"

    def __init__(
        self,
        plan: FrequencyPlan | str | os.PathLike[str],
        *,
        rank: int | None = None,
        world_size: int | None = None,
        device: int | None = None,
        counted: Counted = Counted.BY_DRIVER,
        backend: str = DEFAULT_BACKEND,
        log: str | os.PathLike[str] | LogPlace | None = BESIDE_PLAN,
        log_limit: int = _MAX_LOG_BYTES,
        every_request: bool = False,
        orders: str | os.PathLike[str] | None = None,
        on_step: Callable[[StepRecord], None] | None = None,
        marker: Callable[[], DeviceEvent] | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(plan, FrequencyPlan | str | os.PathLike):
            raise InputError(
                "the first argument must be a frequency plan as envplan apply writes it, or its "
                f"path, and not a {type(plan).__name__}"
            )
        self.plan = plan if isinstance(plan, FrequencyPlan) else FrequencyPlan.load(plan)
        self.rank = number_of_process(rank, RankNumber.RANK)
        # A rank that the caller names need not be of the job that a launcher's variables tell of.
        if world_size is None and (rank is None or "WORLD_SIZE" in os.environ):
            world_size = number_or_none(RankNumber.WORLD_SIZE)
        if world_size is not None:
            self.plan.check_world(world_size)
        rank_plan = self.plan.rank_plan(self.rank)
        self.stage = rank_plan.stage
        self.steps = self.mismatches = self.clock_errors = 0
        self.last_iteration: IterationTime | None = None

        self._schedules = rank_schedules(self.plan, rank_plan)
        self.operations = tuple(operation.key for operation in self._schedules[0].operations)
        self.part_names = frozenset().union(*(schedule.part_names for schedule in self._schedules))
        self.planned_time = self._schedules[0].iteration_time_s
        self.has_ladder = len(self._schedules) > 1
        self._num_before_reduction = num_before_reduction(self.operations)

        # Of the iteration that runs.
        self._iteration_begin_ns = 0
        self._operation_begin: Timestamp = 0
        self._spans = IterationSpans()
        self._config = ""

        self._last_request_id_of_iteration = 0
        self._is_closed = False
        self._first_clock_error = ""
        self._on_step = on_step
        self._max_clock_mhz = rank_plan.clocks_mhz[-1] if rank_plan.clocks_mhz else 0
        if device is None:
            device, counted = rank_plan.device, Counted.BY_PLAN
        guard, refusal = self._start_guard(
            backend, device, counted=counted, every_request=every_request, **options
        )
        if guard is not None:
            self._max_clock_mhz = guard.info.max_clock
        self._requester = ClockRequester(guard, marker)
        switching = self.plan.switching
        self._clocks = OperationClocks(
            self._requester,
            max_clock_mhz=self._max_clock_mhz,
            latency_ns=0 if switching is None else ns_from_s(switching.latency_s),
        )
        energies = self.plan.stage_energies
        self._energy = IterationEnergyMeter(energies[self.stage] if energies else None)
        self._accounting = IterationAccounting(self._requester, self._schedules[0], self._energy)
        log_path = log if log is not BESIDE_PLAN else _log_beside(plan)
        self._status = StatusFile.of_rank(self.plan, rank_plan, self._requester)
        self._log = RunLog(
            log_path, rank=self.rank, max_bytes=log_limit, listener=self._status.record
        )
        self._iterations = IterationCounts.of_rank(self._log.path, self.rank)
        self._log_start(refusal)
        self._straggler_rung = 0
        self.orders: OrderReader | None = None
        if orders is not None:
            self.orders = OrderReader(orders, self.plan, rank=self.rank, log=self._log.write)
        self._follower = PlanFollower(self._schedules[self._rung_for(0)])

    def _start_guard(
        self, backend: str, device: int, **arguments: Any
    ) -> tuple[Guard, None] | tuple[None, str]:
        """Start the guard of this rank's GPU: it, or else why there is none.

        Raises:
            InputError: the GPU is not one that the plan is for.
        """

        def check_gpu(gpu: DeviceInfo) -> None:
            self.plan.check_gpu(gpu.name, gpu.supported_clocks, self.stage)

        try:
            guard = Guard.start(backend, device, meter=True, check=check_gpu, **arguments)
        except DeviceError as error:
            return None, str(error)
        return guard, None

    def _log_start(self, refusal: str | None) -> None:
        """Log how the run before ended, if it was killed, and that this one begins.

        Args:
            refusal: why the guard was refused; None: it was not.
        """
        if self._iterations.of_killed_run is not None:
            self._log.write(RunKilled(rank=self.rank, iterations=self._iterations.of_killed_run))
        self._log.write(
            RunStarted(
                rank=self.rank,
                plan_sha256=self.plan.plan_sha256,
                world_size=self.plan.world_size,
                clocks=refusal is None,
            )
        )
        if refusal is not None:
            _logger.warning("rank %d: clocks are left alone: %s", self.rank, refusal)
            self._log.write(ClockError(rank=self.rank, step=0, message=refusal))

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def guard(self) -> Guard | None:
        """The guard that sets this rank's clocks; None where it was refused."""
        return self._requester.guard

    @property
    def requested_mhz(self) -> int:
        """The clock requested last, which need not be in force yet; 0: none was requested."""
        return self._requester.last_requested_mhz

    @property
    def followed_time(self) -> float:
        """Iteration time of the plan or the rung that this iteration follows, s."""
        return self._follower.schedule.iteration_time_s

    @property
    def config(self) -> str:
        """The config planned for the operation or part that runs, or else for the next operation.

        "" where the plan has none, where the iteration is over, and for as long as the order of
        operations is not the plan's: run what is always right.
        """
        operation = self._follower.current
        if operation is None:
            return ""
        return self._config if self._follower.is_running else operation.first_config

    def has_unset_requests(self) -> bool:
        """Whether a requested clock is not reported as set, as far as reports have been read."""
        return self._requester.has_unset_requests()

    def log_is_idle(self) -> bool:
        """Whether the thread of the run log has begun with all lines."""
        return self._log.is_idle()

    @property
    def dropped_lines(self) -> int:
        """Lines that were not written to the run log, as its thread was far behind."""
        return self._log.dropped

    @property
    def num_undecided_steps(self) -> int:
        """Iterations that are over, and wait for the guard to say which clocks were set."""
        return self._accounting.num_undecided

    def begin(self, instruction: str, microbatch: int, chunk: int = 0) -> None:
        """An operation begins: ask for its clock, if that is another than now."""
        follower = self._follower
        key = (instruction, microbatch, chunk)
        if key != follower.expected and follower.position and follower.is_first(key):
            self.step()  # the iteration before was cut short, as by an exception
        operation = follower.begin(key)
        if operation is None:
            self._run_unplanned(key)
            return
        if not self._spans.begins:
            self._iteration_begin_ns = perf_counter_ns()
        self._operation_begin = begin = self._requester.record_event()
        self._config = operation.first_config
        self._clocks.begin(
            follower.schedule, follower.position, begin, is_regular=follower.is_regular
        )

    def part(self, name: str, *, backward: bool) -> None:
        """A part of the operation that runs begins: ask for the clocks due then or soon after."""
        operation = self._follower.current
        if operation is None or not self._follower.is_running:
            return
        if backward != operation.is_backward:
            return
        for request in operation.part_requests.get(name, ()):
            self._config = request.config
            self._clocks.request_for_part(request)

    def end(self, instruction: str, microbatch: int, chunk: int = 0) -> None:
        """The operation that began last has ended."""
        follower = self._follower
        key = (instruction, microbatch, chunk)
        position = follower.position
        if not follower.end(key):
            if not follower.is_extra(key):
                self._leave_plan("end", OperationKey(*key))
            return
        end = self._requester.record_event()
        request = self._clocks.end(follower.schedule, position, end, is_regular=follower.is_regular)
        self._spans.add(self._operation_begin, end, request)

    def iteration_begins(self) -> None:
        """A training iteration begins: ask for the clock of its first operation.

        Where nobody told of the operations of the one before, it may be so again.
        """
        if self._follower.has_begun():
            self.step()  # the iteration before was cut short, as by an exception
        if self._follower.num_empty:
            return
        self._clocks.iteration_begins(self._follower.schedule, self._requester.record_event())

    def step(self) -> None:
        """An iteration is over; the next one follows the plan that stragglers leave time for."""
        schedule = self._follower.schedule
        self._follower.next_schedule = self._schedules[self._rung_for(self.steps + 1)]
        expected = self._follower.expected
        outcome = self._follower.finish_iteration()
        self._iterations.add(outcome)
        if self._spans.begins:
            last_request_id = self._spans.last_request_id
            request_ids = range(self._last_request_id_of_iteration + 1, last_request_id + 1)
            self._last_request_id_of_iteration = last_request_id
        followed = None
        if outcome is IterationOutcome.FOLLOWED:
            followed = FollowedIteration(
                number=self.steps,
                schedule=schedule,
                spans=self._spans,
                begin_ns=self._iteration_begin_ns,
                end_ns=perf_counter_ns(),
                request_ids=request_ids,
            )
        else:
            self.full_speed()
        if outcome not in (IterationOutcome.FOLLOWED, IterationOutcome.EMPTY):
            self._status.count_unfollowed(outcome.value)
        if outcome is IterationOutcome.CUT_SHORT:
            self._note_mismatch("step", expected, None)
        if self._follower.num_empty == _MAX_EMPTY_STEPS and not self._missed_reason:
            self._warn_on_rank_0(self._why_not_followed())
        self._requester.call_after_requests(
            partial(self._process_reports, self.steps, followed, self._requester.last_request_id)
        )
        self.steps += 1
        self._spans = IterationSpans()

    def full_speed(self) -> None:
        """Something else runs until the next operation begins: ask for the highest clock."""
        self._clocks.full_speed(self._requester.record_event())

    def set_straggler_time(self, seconds: float | None) -> None:
        """From the next iteration on, follow the slowest plan of the ladder that is still in time.

        Every rank must be told the same at the same iteration; may be called from any thread.

        Args:
            seconds: when a straggler will end an iteration, s; None: there is none any more.
        """
        # What is not a number leaves no time.
        time_s = seconds if seconds is not None and seconds > 0 else 0.0
        num_in_time = bisect_right(
            self._schedules, time_s, key=lambda schedule: schedule.iteration_time_s
        )
        self._straggler_rung = max(0, num_in_time - 1)

    def _rung_for(self, iteration: int) -> int:
        """The rung that an iteration follows: the slower of the ordered and the stragglers' one."""
        ordered_rung = 0 if self.orders is None else self.orders.rung_for(iteration)
        return max(ordered_rung, self._straggler_rung)

    def close(self) -> None:
        """Give the clock back, finish the log and say in one line what went wrong, if anything.

        Where device, driver and disk all hang, this takes 35 s: 1 for the thread of requests, 22
        for the guard, 10 for the log, 2 for the status.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._requester.close()
        self._process_reports(self.steps, None, self._requester.last_request_id)
        if self._missed_reason or self._was_never_used():
            self._warn_on_rank_0(self._why_not_followed())
        if self.clock_errors:
            _logger.warning(
                "rank %d: %d clock error%s in %d steps, the first: %s",
                *(self.rank, self.clock_errors, "s" if self.clock_errors > 1 else ""),
                *(self.steps, self._first_clock_error),
            )
        if outcomes := outcomes_in_words(self._iterations.by_outcome()):
            self._warn_on_rank_0(outcomes)
        if summary := self._energy.summary(self.planned_time):
            self._warn_on_rank_0(summary)
        self._log.close(
            RunEnded(
                rank=self.rank,
                steps=self.steps,
                mismatches=self.mismatches,
                clock_errors=self.clock_errors,
                energy=self._energy.totals,
                iterations=self._iterations.by_outcome(),
            )
        )
        self._iterations.close()
        self._status.close()

    def _was_never_used(self) -> bool:
        """Whether no operation was seen, at all or in the last iterations."""
        follower = self._follower
        all_steps_empty = follower.num_empty == self.steps
        # An operation outside of the plan's order would have left the plan.
        nothing_since = not self._spans.begins and follower.state is FollowState.ON_PLAN
        nothing_at_all = all_steps_empty and nothing_since
        return nothing_at_all or follower.num_empty >= _MAX_EMPTY_STEPS

    def _why_not_followed(self) -> str:
        if self._missed_reason:
            return f"the plan was not followed: {self._missed_reason}"
        num_empty = self._follower.num_empty
        where = f"in {num_empty} steps" if num_empty else "at all"
        return (
            f"no operation was seen {where}, so the plan is not followed; enter follow around the "
            "loop that trains, before the framework's functions are taken"
        )

    def _run_unplanned(self, key: tuple[str, int, int]) -> None:
        """An operation begins that the plan does not have here: run it at the highest clock."""
        if self._follower.is_extra(key):
            self.full_speed()
        else:
            self._leave_plan("begin", OperationKey(*key))

    def _leave_plan(self, where: str, got: OperationKey) -> None:
        """The order is not the plan's: run at the highest clock until the next iteration.

        Args:
            where: "begin" or "end".
            got: the operation that came.
        """
        if self._follower.state is not FollowState.ON_PLAN:
            return
        expected = self._follower.expected
        self._follower.leave_plan()
        self.full_speed()
        self._note_mismatch(where, expected, got)

    def _note_mismatch(
        self, where: str, expected: OperationKey | None, got: OperationKey | None
    ) -> None:
        """Count an iteration that has left the plan; the first one is said and logged.

        Args:
            where: "begin", "end" or "step".
            expected: the operation that the plan has there; None: none.
            got: the operation that came; None: the iteration's end.
        """
        self.mismatches += 1
        if self.mismatches > 1:
            return
        _logger.warning(
            "rank %d, step %d: the plan has %s next, but %s came; at the highest clock until the "
            "order is the plan's again",
            *(self.rank, self.steps, expected or "nothing"),
            f"{where} of {got}" if got else "the step's end",
        )
        self._log.write(
            Mismatch(rank=self.rank, step=self.steps, where=where, expected=expected, got=got)
        )

    def _process_reports(
        self, step: int, followed: FollowedIteration | None, last_request_id: int
    ) -> None:
        """Take note of what the guard reports, and log the iterations that are decided by it.

        Runs in the thread of the ClockRequester, where that has one.

        Args:
            step: the number of the step that is over for the device.
            followed: the same, if it followed its schedule.
            last_request_id: that was made until the iteration's end.
        """
        if followed is not None:
            self._accounting.add(followed)
        else:
            self._accounting.pass_over(last_request_id)
        for problem in self._accounting.read_reports():
            self.clock_errors += 1
            self._first_clock_error = self._first_clock_error or problem
            if self.clock_errors <= _MAX_LOGGED_CLOCK_ERRORS:
                self._log.write(ClockError(rank=self.rank, step=step, message=problem))
        for accounted in self._accounting.decided_iterations():
            self._log.write_later(partial(self._measure, accounted, self.mismatches))

    def _measure(self, accounted: AccountedIteration, mismatches: int) -> StepRecord:
        """The record of an iteration. Runs in the RunLog's thread, for it waits for the device.

        Args:
            accounted: the iteration.
            mismatches: of the run until then.
        """
        iteration, schedule = accounted.iteration, accounted.iteration.schedule
        times = measure_iteration(iteration.spans)
        if schedule.timer_table is not None:
            schedule.timer_table.add_iteration(times.waits_ns(), times.durations_ns)
        changes = change_times(accounted, times)
        record = StepRecord(
            rank=self.rank,
            stage=self.stage,
            step=iteration.number,
            planned_s=accounted.planned_s,
            iteration_s=times.end_s(-1),
            num_requested=schedule.num_clocked,
            num_in_force=sum(mhz > 0 for mhz in accounted.clocks_mhz),
            max_lag_s=accounted.max_lag_s,
            mismatches=mismatches,
            energy=accounted.energy,
            operations=times_by_kind(accounted, times, self._late_positions(changes)),
            changes=changes,
        )
        own_time_s = times.end_s(self._num_before_reduction - 1)
        self.last_iteration = IterationTime(accounted.planned_s, own_time_s)
        if self._on_step is not None:
            try:
                self._on_step(record)
            except Exception:  # it is not ours, and must not end training or its log
                _logger.exception("on_step is not called again")
                self._on_step = None
        return record

    def _late_positions(self, changes: Sequence[ChangeTimes]) -> list[int]:
        """The operations whose clock came clearly after their begin, though asked for ahead."""
        switching = self.plan.switching
        if switching is None or switching.ask != "ahead":
            return []
        late = []
        for change in changes:
            asked_after_s = change.asked_s - change.wanted_s
            if asked_after_s + switching.latency_to(change.frequency_mhz) > _ON_TIME_S:
                late.append(change.position)
        return late


def _log_beside(plan: FrequencyPlan | str | os.PathLike[str]) -> Path | None:
    """The path of the run log beside the file of a plan; None: the plan has no file."""
    if isinstance(plan, FrequencyPlan):
        return None
    return log_beside(Path(plan))
