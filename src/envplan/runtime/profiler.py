"""Profiling inside a running job, over its first iterations, as EnvPipe and Perseus do.

    with envplan.runtime.Profiler("profile.csv", num_stages=4) as profiler:
        for batch in batches:
            for instruction, microbatch in my_schedule:
                profiler.begin(instruction, microbatch)
                ...
                profiler.end(instruction, microbatch)
            profiler.step()

Each rank runs a few iterations at each clock, from the highest down, until the energy of its
operations has risen at five clocks in a row; then the clock is the driver's again and training
goes on as ever. Operations are timed one by one; their powers come from the energy counter as
`metering` says, and their energies are power times time. A GPU's power while it waits for its
neighbours is measured along with them: these are real waits in transfers.

Clocks are set by the guard. Nothing here waits for the GPU in the training thread, and nothing that
goes wrong ends training: it is logged, and there is no profile.

Each rank that is done writes its rows to a file of its own beside the profile. Rank 0 merges them
when all are there, in a folder that all ranks see. `merge_parts` does the same by hand.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Final

from envplan._io.files import check_writable
from envplan.devices import (
    DEFAULT_BACKEND,
    Backend,
    Counted,
    Device,
    DeviceError,
    DeviceInfo,
    call_with_timeout,
    choose,
    opened,
    spaced_clocks,
)
from envplan.devices.guard import Guard
from envplan.errors import EnvplanError, InputError
from envplan.profile import ProfileMetadata
from envplan.profiling.energy_minimum import EnergyMinimum
from envplan.runtime.clock_requester import ClockRequester
from envplan.runtime.clock_sweep import ClockSweep, IterationUse, Window
from envplan.runtime.energy_log import EnergyLog
from envplan.runtime.metering import measure_window
from envplan.runtime.observer import OperationObserver
from envplan.runtime.profile_parts import RankProfile, merge_parts, part_path
from envplan.runtime.ranks import RankNumber, number_of_process, number_or_none
from envplan.runtime.timestamps import DeviceEvent, Timestamp
from envplan.runtime.work_timeline import Span, spans_on_host

__all__ = ["Profiler", "merge_parts"]

#: The sweep ends after so many clocks in a row above the least energy.
_MAX_RISES: Final = 5
#: A clock observed at more than this times what was asked for was never set.
_MAX_CLOCK_RATIO: Final = 1.02
#: Standard errors of an iteration's energy above this share of it are said.
_MAX_RELATIVE_ERROR: Final = 0.2
_MERGE_POLL_S: Final = 0.2
#: How long rank 0 waits for the other ranks' files after the job, s.
_MERGE_TIMEOUT_S: Final = 30.0
_WRITE_TIMEOUT_S: Final = 10.0
#: How long the device may be behind the training thread at the end, s; when the job ends, less.
DRAIN_TIMEOUT_S: Final = 30.0
JOB_END_TIMEOUT_S: Final = 1.0
#: How long the driver may take to say what the GPU is, s.
OPEN_TIMEOUT_S: Final = 30.0

#: An operation by the time of the device.
_DeviceSpan = Span[Timestamp]

_logger = logging.getLogger("envplan.runtime")


class Profiler(OperationObserver, AbstractContextManager["Profiler"]):
    """Measures the operations of one rank at one clock after another while it trains.

    It is called as a Shim is, and like one must not be used by several threads at once.

    Args:
        path: of the profile; its sidecar and the ranks' parts lie beside it.
        num_stages: model stages of the job: pipeline ranks times chunks.
        rank: global rank; default: as torch.distributed, torchrun, Slurm or MPI say.
        world_size: number of ranks of the job; default: as they say.
        stages: the model stage of each chunk of this rank; default: its rank, for one chunk and
            one GPU per stage.
        device: this rank's GPU; default: that of $LOCAL_RANK, else of the rank, among those that
            CUDA_VISIBLE_DEVICES leaves.
        counted: by whom, if `device` is given.
        frequencies: clocks to measure at, MHz; default: all that the GPU supports, `step` apart.
        step: MHz between clocks at least.
        iterations_per_frequency: that count at each clock.
        lock: whether clocks may be touched; otherwise the current one alone is measured.
        share: see Guard.start.
        warm_up: iterations at the beginning that do not count: memory is allocated in them.
        metadata: workload, microbatch size, tensor-parallel degree and schedule for the sidecar;
            the rest is measured.
        marker: see Shim.
        parts: names of the modules that are parts of operations with rows of their own, as
            named_modules gives them; "*" stands for text without a dot. See `parts.hook_parts`.

    Attributes:
        done: whether this rank has measured all it is going to.

    Raises:
        InputError: rank, stages or frequencies do not fit, or the folder cannot be written to.
    """

    _consequence = "nothing is profiled"

    def __init__(
        self,
        path: str | os.PathLike[str] = "profile.csv",
        *,
        num_stages: int,
        rank: int | None = None,
        world_size: int | None = None,
        stages: Sequence[int] | None = None,
        device: int | None = None,
        counted: Counted = Counted.BY_DRIVER,
        frequencies: Sequence[int] | None = None,
        step: int = 30,
        iterations_per_frequency: int = 3,
        warm_up: int = 3,
        lock: bool = True,
        share: bool = False,
        metadata: ProfileMetadata | None = None,
        marker: Callable[[], DeviceEvent] | None = None,
        parts: Sequence[str] = (),
    ) -> None:
        self.part_names = frozenset(parts)
        self.rank = number_of_process(rank, RankNumber.RANK)
        world = number_of_process(world_size, RankNumber.WORLD_SIZE)
        self._stages = tuple(stages if stages is not None else [self.rank])
        _check_stages(self.rank, self._stages, num_stages)
        if iterations_per_frequency < 1 or warm_up < 0:
            raise InputError("iterations_per_frequency must be at least 1, warm_up at least 0")
        self.path = Path(path)
        self._profile = RankProfile(rank=self.rank, world_size=world, num_stages=num_stages)
        self._profile_path = part_path(self.path, self.rank)
        check_writable(self._profile_path)
        self._profile_path.unlink(missing_ok=True)  # one that an earlier job left

        # Of the iteration that runs.
        self._spans: list[_DeviceSpan] = []
        self._operation_begin: Timestamp | None = None
        self._is_backward = False
        self._part_begins: list[tuple[str, Timestamp]] = []

        # Only the thread of the ClockRequester counts problems, and only the training thread
        # remembers how many there were when its window began: so none in between is lost.
        self._num_problems = 0
        self._num_problems_before_window = 0
        self._sweep = ClockSweep[list[_DeviceSpan]]([None], iterations_per_frequency, warm_up)
        self._driver = ExitStack()
        self._requester = ClockRequester(None, None)
        self._is_closed = False

        # A thread makes rows of windows, decides when it is enough, and merges on rank 0.
        self._windows: SimpleQueue[Window[list[_DeviceSpan]] | None] = SimpleQueue()
        self._minimum = EnergyMinimum(_MAX_RISES)
        self._has_enough = False
        self._merge_deadline = math.inf
        self._thread: threading.Thread | None = None
        if device is None:
            local_rank = number_or_none(RankNumber.LOCAL_RANK)
            device = self.rank if local_rank is None else local_rank
            counted = Counted.BY_CUDA
        try:
            gpu = self._open_gpu(device, counted)
            clocks_mhz = _clocks_to_measure(gpu.info, frequencies, step)
            guard = self._start_guard(gpu.info.index, share=share) if lock else None
            if guard is not None:
                self._sweep = ClockSweep(clocks_mhz, iterations_per_frequency, warm_up)
            self._requester = ClockRequester(guard, marker)
            self._profile.energy_source = gpu.info.energy_source
            self._profile.metadata = _with_gpu(metadata or ProfileMetadata(), gpu.info)
            self._start_thread(EnergyLog(gpu))
        except DeviceError as error:
            _logger.warning("rank %d: nothing is profiled: %s", self.rank, error)
            self._profile.problem = str(error)
            self._profile.save(self._profile_path)
        except InputError:
            self._driver.close()
            raise
        self.done = self._thread is None

    def _open_gpu(self, device: int, counted: Counted) -> Device:
        """This rank's GPU.

        Raises:
            DeviceError: there is no such GPU, its driver hangs, or its energy is not its own.
        """
        source = self._driver.enter_context(opened(DEFAULT_BACKEND))
        return call_with_timeout(
            OPEN_TIMEOUT_S, lambda: _own_gpu(source, device, counted), "the driver"
        )

    def _start_guard(self, index: int, *, share: bool) -> Guard | None:
        """The guard, without which only the current clock is measured."""
        try:
            return Guard.start(DEFAULT_BACKEND, index, every_request=True, share=share)
        except DeviceError as error:
            _logger.warning("rank %d: profiles at the current clock only: %s", self.rank, error)
            return None

    def _start_thread(self, energy_log: EnergyLog) -> None:
        run = partial(self._run, energy_log)
        self._thread = threading.Thread(target=run, name="envplan-profile", daemon=True)
        self._thread.start()

    def __exit__(self, *raised: object) -> None:
        # Where training failed, the others' parts may never come.
        self.close(0.0 if any(raised) else _MERGE_TIMEOUT_S)

    @property
    def frequency(self) -> int:
        """The clock asked for, MHz; 0 when it is the driver's."""
        return 0 if self.done else self._requester.last_requested_mhz

    @property
    def measured_frequency(self) -> int | None:
        """The clock that iterations are measured at, MHz; None: the current one, or none at all."""
        return None if self.done else self._sweep.frequency_mhz

    @property
    def guard(self) -> Guard | None:
        """The guard that sets this rank's clocks; None where clocks are left alone."""
        return self._requester.guard

    def begin(self, instruction: str, microbatch: int, chunk: int = 0) -> None:
        """An operation begins: ask for the clock that is measured, if that is another than now."""
        if self.done:
            return
        requester = self._requester
        self._operation_begin = begin = requester.record_event()
        self._is_backward = instruction.startswith("backward")
        self._part_begins = []
        mhz = self._sweep.frequency_mhz
        if mhz is not None and mhz != requester.last_requested_mhz:
            requester.pass_on(begin, requester.request(mhz))

    def end(self, instruction: str, microbatch: int, chunk: int = 0) -> None:
        """The operation that began last has ended."""
        begin = self._operation_begin
        if self.done or begin is None:
            return
        end = self._requester.record_event()
        self._spans.append(Span(instruction, chunk, begin, end, tuple(self._part_begins)))
        self._operation_begin = None

    def part(self, name: str, *, backward: bool) -> None:
        """A part of the operation that runs begins."""
        if self._operation_begin is not None and backward == self._is_backward:
            self._part_begins.append((name, self._requester.record_event()))

    def step(self) -> None:
        """An iteration is over: it counts, or the clock has yet to settle, or is passed over."""
        spans, self._spans = self._spans, []
        if self.done or not spans:
            return
        self._requester.call_after_requests(self._read_problems)
        guard = self._requester.guard
        num_problems = self._num_problems
        has_new_problem = num_problems > self._num_problems_before_window
        use = self._sweep.classify(
            has_problem=has_new_problem or (guard is not None and guard.failing),
            is_clock_pending=self._requester.has_unset_requests(),
        )
        window = self._sweep.record(use, spans)
        if window is not None:
            self._windows.put(window)
        if window is not None or use is IterationUse.SPOILED:
            self._num_problems_before_window = num_problems
        is_guard_gone = guard is not None and not guard.alive
        if self._sweep.is_finished or self._has_enough or is_guard_gone:
            self._finish()

    def full_speed(self) -> None:
        """Something else runs now, such as an evaluation: what was being measured starts again."""
        self._spans, self._operation_begin = [], None
        self._sweep.interrupt()

    def close(self, wait: float = _MERGE_TIMEOUT_S) -> None:
        """Give the clock back and write what was measured.

        Args:
            wait: how long rank 0 waits for the others' files at most, s.
        """
        if self._is_closed:
            return
        self._is_closed = True
        drain_timeout_s = DRAIN_TIMEOUT_S if self.done else JOB_END_TIMEOUT_S
        self._finish()
        self._merge_deadline = time.monotonic() + wait
        if self._thread is not None:
            self._thread.join(drain_timeout_s)
            self._give_clock_back()  # though the device may hang
            self._thread.join(wait + _WRITE_TIMEOUT_S)
        self._driver.close()

    def _finish(self) -> None:
        """Measure no more and have the clock given back, without waiting for that."""
        if not self.done:
            self.done = True
            self._spans = []
            self._windows.put(None)

    def _give_clock_back(self) -> None:
        self._requester.close()
        self._read_problems()

    def _read_problems(self) -> None:
        """Take note of what the guard reports.

        Runs in the thread of the ClockRequester, where that has one.
        """
        for problem in self._requester.read_problems():
            self._num_problems += 1
            _logger.warning("rank %d: while profiling: %s", self.rank, problem)

    def _run(self, energy_log: EnergyLog) -> None:
        """Measure windows; at the end write this rank's file, and on rank 0 the profile.

        Runs in a thread of its own.
        """
        try:
            for window in iter(self._windows.get, None):
                if not self._has_enough:
                    self._measure(energy_log, window)
        except Exception as error:  # profiling must not end what it profiles
            self._profile.problem = str(error)
            _logger.warning("rank %d: profiling is given up: %s", self.rank, error)
            self._has_enough = True
        energy_log.close()
        self._give_clock_back()
        try:
            self._profile.save(self._profile_path)
            if self.rank == 0:
                self._merge()
        except EnvplanError as error:
            _logger.warning("no profile is written: %s", error)

    def _measure(self, energy_log: EnergyLog, window: Window[list[_DeviceSpan]]) -> None:
        """Add the rows of a window to this rank's profile, or say why there are none."""
        iterations = spans_on_host(window.iterations)
        observations = energy_log.pop_window(iterations[0][0].begin, iterations[-1][-1].end)
        asked_mhz = window.frequency_mhz
        measured = measure_window(iterations, observations, self._stages, asked_mhz)
        problem = energy_log.problem or "its iterations are too short for the energy counter"
        max_mhz = _MAX_CLOCK_RATIO * asked_mhz if asked_mhz else math.inf
        if measured is not None and observations.clock_mhz > max_mhz:
            measured, problem = None, f"the clock was at {observations.clock_mhz} MHz"
        if measured is None:
            clock = f"{asked_mhz} MHz" if asked_mhz else "the current clock"
            _logger.warning("rank %d: %s was passed over: %s", self.rank, clock, problem)
            return
        mhz = measured.rows[0].frequency
        relative_error = measured.energy_error_j / measured.energy_j
        if relative_error > _MAX_RELATIVE_ERROR:
            _logger.warning(
                "rank %d: at %d MHz the standard error of the energy is %.0f%%; more "
                "iterations_per_frequency make it smaller",
                *(self.rank, mhz, 100 * relative_error),
            )
        self._profile.num_microbatches = measured.num_microbatches
        self._profile.rows += measured.rows
        self._has_enough = self._minimum.is_passed_at(measured.energy_j, measured.energy_error_j)
        _logger.info(
            "rank %d: profiled at %d MHz: %.4g J and %.4g s of work an iteration",
            *(self.rank, mhz, measured.energy_j, measured.busy_s),
        )

    def _merge(self) -> None:
        """Merge once all ranks' files are there; after the job, wait only so long for them.

        Raises:
            InputError: files are missing by then, or make no profile.
        """
        ranks = range(self._profile.world_size)
        while missing := [rank for rank in ranks if not part_path(self.path, rank).exists()]:
            if time.monotonic() > self._merge_deadline:
                raise InputError(
                    f"the parts of ranks {', '.join(map(str, missing))} are not there; once they "
                    f"are, call envplan.runtime.profiler.merge_parts({str(self.path)!r})"
                )
            time.sleep(_MERGE_POLL_S)
        profile = merge_parts(self.path)
        _logger.info("%s: the profile of all ranks", self.path)
        if profile.blocking_power_w is None:
            _logger.warning(
                "%s: the power while waiting cannot be told from that of operations; planning "
                "takes --blocking-power",
                self.path,
            )


def _check_stages(rank: int, stages: Sequence[int], num_stages: int) -> None:
    """Raises: InputError: a rank has a stage that the model has not."""
    if not all(0 <= stage < num_stages for stage in stages):
        raise InputError(
            f"rank {rank} has stage {max(stages)} of {num_stages}; give Profiler stages=, the "
            "model stage of each chunk of this rank"
        )


def _own_gpu(source: Backend, device: int, counted: Counted) -> Device:
    """The GPU of a number, its properties read.

    Raises:
        DeviceError: there is no such GPU, or its energy is not its own.
    """
    gpu = choose(source, device, counted)
    if gpu.info.mig:
        raise DeviceError(
            f"GPU {gpu.info.index}: MIG is on, so its energy is that of all parts together"
        )
    return gpu


def _with_gpu(metadata: ProfileMetadata, gpu: DeviceInfo) -> ProfileMetadata:
    """What a job says of itself, with the GPU that it is measured on today."""
    described = replace(metadata, gpu=gpu.name, driver=gpu.driver, source=gpu.source)
    return described.with_power_limit(gpu.power_limit).made_today()


def _clocks_to_measure(info: DeviceInfo, frequencies: Sequence[int] | None, step: int) -> list[int]:
    """Clocks to measure at, from the highest down, MHz.

    Raises:
        InputError: the GPU does not have one of those asked for.
    """
    if not frequencies:
        return spaced_clocks(info.supported_clocks, step)
    unsupported_mhz = set(frequencies).difference(info.supported_clocks)
    if unsupported_mhz:
        raise InputError(
            f"frequencies has {min(unsupported_mhz)} MHz, which the {info.name} does not support"
        )
    return sorted(set(frequencies), reverse=True)
