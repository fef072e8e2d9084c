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
from envplan.runtime.metering import EnergyLog, Span, measure_window, spans_on_host
from envplan.runtime.observer import OperationObserver
from envplan.runtime.profile_parts import Part, merge_parts, part_path
from envplan.runtime.ranks import number_or_environment
from envplan.runtime.timestamps import DeviceEvent, Timestamp

__all__ = ["Profiler", "merge_parts"]

#: Iterations at one clock that clock errors may spoil before the clock is passed over.
_TRIES: Final = 3
#: Iterations after a change of clock that do not count, from when it is in force.
_SETTLE: Final = 1
#: The sweep ends after so many clocks in a row above the least energy.
_RISES: Final = 5
#: A clock seen at more than this times what was asked for was never set.
_IN_FORCE: Final = 1.02
#: Standard errors of an iteration's energy above this part of it are said.
_SURE: Final = 0.2
_MERGE_PAUSE_S: Final = 0.2
_MERGE_WAIT_S: Final = 30.0
_WRITE_S: Final = 10.0
#: How long the device may be behind the training thread at the end, s; when the job ends, less.
_DRAIN_S: Final = 30.0
_CLOSE_S: Final = 1.0
#: How long the driver may take to say what the GPU is, s.
_OPEN_S: Final = 30.0

_logger = logging.getLogger("envplan.runtime")


class Profiler(OperationObserver, AbstractContextManager["Profiler"]):
    """Measures the operations of one rank at one clock after another while it trains.

    It is called as a Shim is, and like one must not be used by several threads at once.

    Args:
        path: of the profile; its sidecar and the ranks' parts lie beside it.
        num_stages: model stages of the job: pipeline ranks times chunks.
        rank: global rank; default: $RANK, as torchrun sets it.
        world_size: number of ranks of the job; default: $WORLD_SIZE.
        stages: the model stage of each chunk of this rank; default: its rank, for one chunk and
            one GPU per stage.
        device: this rank's GPU; default: that of $LOCAL_RANK, else of the rank, among those that
            CUDA_VISIBLE_DEVICES leaves.
        counted: by whom, if `device` is given.
        frequencies: clocks to measure at, MHz; default: all that the GPU supports, `step` apart.
        step: MHz between clocks at least.
        iterations_per_frequency: that count at each clock.
        lock: whether clocks may be touched; otherwise the current one alone is measured.
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
        metadata: ProfileMetadata | None = None,
        marker: Callable[[], DeviceEvent] | None = None,
        parts: Sequence[str] = (),
    ) -> None:
        self.part_names = frozenset(parts)
        self.rank = number_or_environment(rank, "RANK")
        world = number_or_environment(world_size, "WORLD_SIZE")
        self._stages = tuple(stages if stages is not None else [self.rank])
        if not all(0 <= stage < num_stages for stage in self._stages):
            raise InputError(
                f"rank {self.rank} has stage {max(self._stages)} of {num_stages}; give Profiler "
                "stages=, the model stage of each chunk of this rank"
            )
        if iterations_per_frequency < 1 or warm_up < 0:
            raise InputError("iterations_per_frequency must be at least 1, warm_up at least 0")
        self._iterations, self._skip = iterations_per_frequency, warm_up
        self.path = Path(path)
        self._part = Part(rank=self.rank, world_size=world, num_stages=num_stages)
        self._part_path = part_path(self.path, self.rank)
        check_writable(self._part_path)
        self._part_path.unlink(missing_ok=True)  # one that an earlier job left

        self._spans: list[Span[Timestamp]] = []
        self._begun: Timestamp | None = None
        self._is_backward = False
        self._begins: list[tuple[str, Timestamp]] = []
        self._window: list[list[Span[Timestamp]]] = []
        self._at = self._tries = self._problems = 0
        self._frequencies: list[int | None] = [None]
        self._driver = ExitStack()
        self._clocks = ClockRequester(None, None)
        self._closed = False

        # A thread makes rows of windows, decides when it is enough, and merges on rank 0.
        self._windows: SimpleQueue[tuple[int | None, list[list[Span[Timestamp]]]] | None]
        self._windows = SimpleQueue()
        self._minimum = EnergyMinimum(_RISES)
        self._enough = False
        self._deadline = math.inf
        self._thread: threading.Thread | None = None
        if device is None:
            local_rank = self.rank if "LOCAL_RANK" not in os.environ else None
            device = number_or_environment(local_rank, "LOCAL_RANK")
            counted = Counted.BY_CUDA
        try:
            source = self._driver.enter_context(opened(DEFAULT_BACKEND))
            found = call_with_timeout(
                _OPEN_S, lambda: _own_gpu(source, device, counted), "the driver"
            )
            info = found.info
            wanted = _frequencies(info, frequencies, step)
            guard = self._start_guard(info.index, wanted) if lock else None
            self._clocks = ClockRequester(guard, marker)
            self._part.metadata = replace(
                metadata or ProfileMetadata(),
                gpu=info.name,
                driver=info.driver,
                source=info.source,
            ).made_today()
            self._part.energy_source = info.energy_source
            run = partial(self._run, EnergyLog(found))
            self._thread = threading.Thread(target=run, name="envplan-profile", daemon=True)
            self._thread.start()
        except DeviceError as error:
            _logger.warning("rank %d: nothing is profiled: %s", self.rank, error)
            self._part.problem = str(error)
            self._part.save(self._part_path)
        except InputError:
            self._driver.close()
            raise
        self.done = self._thread is None

    def __exit__(self, *raised: object) -> None:
        # Where training failed, the others' parts may never come.
        self.close(0.0 if any(raised) else _MERGE_WAIT_S)

    @property
    def frequency(self) -> int:
        """The clock asked for, MHz; 0 when it is the driver's."""
        return 0 if self.done else self._clocks.last_requested_mhz

    @property
    def measured_frequency(self) -> int | None:
        """The clock that iterations are measured at, MHz; None: the current one, or none at all."""
        return None if self.done else self._frequencies[self._at]

    @property
    def guard(self) -> Guard | None:
        """The guard that sets this rank's clocks; None where clocks are left alone."""
        return self._clocks.guard

    def begin(self, instruction: str, microbatch: int, chunk: int = 0) -> None:
        if self.done:
            return
        self._begun = begun = self._clocks.record_event()
        self._is_backward, self._begins = instruction.startswith("backward"), []
        frequency = self._frequencies[self._at]
        if frequency is not None and frequency != self._clocks.last_requested_mhz:
            self._clocks.request(frequency, begun)

    def end(self, instruction: str, microbatch: int, chunk: int = 0) -> None:
        if self.done or self._begun is None:
            return
        begins = tuple(self._begins)
        self._spans.append(
            Span(instruction, chunk, self._begun, self._clocks.record_event(), begins)
        )
        self._begun = None

    def part(self, name: str, *, backward: bool) -> None:
        if self._begun is not None and backward == self._is_backward:
            self._begins.append((name, self._clocks.record_event()))

    def step(self) -> None:
        spans, self._spans = self._spans, []
        if self.done or not spans:
            return
        self._clocks.call_after_requests(self._listen)
        guard = self._clocks.guard
        if self._problems or (guard is not None and guard.failing):
            # Measure again, or pass the clock over.
            self._tries += 1
            self._next_window(passed=self._tries == _TRIES)
        elif self._clocks.has_unset_requests():
            # The clock is on its way: it may come within the next iteration, which is none either.
            self._skip = max(self._skip, _SETTLE)
        elif self._skip:
            self._skip -= 1
        else:
            self._window.append(spans)
            if len(self._window) == self._iterations:
                self._windows.put((self._frequencies[self._at], self._window))
                self._next_window(passed=True)
        if self._enough or (guard is not None and not guard.alive):
            self._finish()

    def full_speed(self) -> None:
        """Something else runs now, such as an evaluation: what was being measured starts again."""
        self._spans, self._window, self._begun = [], [], None
        self._skip = max(self._skip, _SETTLE)

    def close(self, wait: float = _MERGE_WAIT_S) -> None:
        """Give the clock back and write what was measured.

        Args:
            wait: how long rank 0 waits for the others' parts at most, s.
        """
        if self._closed:
            return
        self._closed = True
        patience = _DRAIN_S if self.done else _CLOSE_S
        self._finish()
        self._deadline = time.monotonic() + wait
        if self._thread is not None:
            self._thread.join(patience)
            self._give_back()  # though the device may hang
            self._thread.join(wait + _WRITE_S)
        self._driver.close()

    def _start_guard(self, index: int, frequencies: Sequence[int]) -> Guard | None:
        """The guard, without which only the current clock is measured."""
        try:
            guard = Guard.start(DEFAULT_BACKEND, index, every_request=True)
        except DeviceError as error:
            _logger.warning("rank %d: profiles at the current clock only: %s", self.rank, error)
            return None
        self._frequencies = list(frequencies)
        return guard

    def _next_window(self, *, passed: bool) -> None:
        """Begin to measure anew; passed: at the next clock."""
        self._window, self._problems, self._skip = [], 0, _SETTLE
        if passed:
            self._tries = 0
            self._at += 1
            if self._at == len(self._frequencies):
                self._finish()

    def _finish(self) -> None:
        """Measure no more and have the clock given back, without waiting for that."""
        if not self.done:
            self.done = True
            self._spans, self._window = [], []
            self._windows.put(None)

    def _give_back(self) -> None:
        self._clocks.close()
        self._listen()

    def _listen(self) -> None:
        """Take note of what the guard reports."""
        for problem in self._clocks.read_problems():
            self._problems += 1
            _logger.warning("rank %d: while profiling: %s", self.rank, problem)

    def _run(self, energy: EnergyLog) -> None:
        """The thread: it ends with the part of this rank written, and on rank 0 the profile."""
        try:
            for clock, window in iter(self._windows.get, None):
                if not self._enough:
                    self._measure(energy, clock, window)
        except Exception as error:  # profiling must not end what it profiles
            self._part.problem = str(error)
            _logger.warning("rank %d: profiling is given up: %s", self.rank, error)
            self._enough = True
        energy.close()
        self._give_back()
        try:
            self._part.save(self._part_path)
            if self.rank == 0:
                self._merge()
        except EnvplanError as error:
            _logger.warning("no profile is written: %s", error)

    def _measure(
        self, energy: EnergyLog, clock: int | None, window: list[list[Span[Timestamp]]]
    ) -> None:
        """Rows of iterations at one clock; None: at whatever the driver chooses."""
        iterations = spans_on_host(window)
        seen = energy.pop_window(iterations[0][0].begin, iterations[-1][-1].end)
        measured = measure_window(iterations, seen, self._stages, clock)
        why = energy.problem or "its iterations are too short for the energy counter"
        if measured is not None and clock and seen.clock_mhz > _IN_FORCE * clock:
            measured, why = None, f"the clock was at {seen.clock_mhz} MHz"
        if measured is None:
            which = f"{clock} MHz" if clock else "the current clock"
            _logger.warning("rank %d: %s was passed over: %s", self.rank, which, why)
            return
        mhz, unsure = measured.rows[0].frequency, measured.energy_error_j / measured.energy_j
        if unsure > _SURE:
            _logger.warning(
                "rank %d: at %d MHz the standard error of the energy is %.0f%%; more "
                "iterations_per_frequency make it smaller",
                *(self.rank, mhz, 100 * unsure),
            )
        self._part.num_microbatches = measured.num_microbatches
        self._part.rows += measured.rows
        self._enough = self._minimum.is_passed_at(measured.energy_j, measured.energy_error_j)
        _logger.info(
            "rank %d: profiled at %d MHz: %.4g J and %.4g s of work an iteration",
            *(self.rank, mhz, measured.energy_j, measured.busy_s),
        )

    def _merge(self) -> None:
        """Merge once all parts are there; after the job has ended, wait only so long for them."""
        ranks = range(self._part.world_size)
        while missing := [rank for rank in ranks if not part_path(self.path, rank).exists()]:
            if time.monotonic() > self._deadline:
                raise InputError(
                    f"the parts of ranks {', '.join(map(str, missing))} are not there; once they "
                    f"are, call envplan.runtime.profiler.merge_parts({str(self.path)!r})"
                )
            time.sleep(_MERGE_PAUSE_S)
        profile = merge_parts(self.path)
        _logger.info("%s: the profile of all ranks", self.path)
        if profile.blocking_power_w is None:
            _logger.warning(
                "%s: the power while waiting cannot be told from that of operations; planning "
                "takes --blocking-power",
                self.path,
            )


def _own_gpu(source: Backend, device: int, counted: Counted) -> Device:
    """The GPU, its facts read.

    Raises:
        DeviceError: there is no such GPU, or its energy is not its own.
    """
    found = choose(source, device, counted)
    if found.info.mig:
        raise DeviceError(
            f"GPU {found.info.index}: MIG is on, so its energy is that of all parts together"
        )
    return found


def _frequencies(info: DeviceInfo, frequencies: Sequence[int] | None, step: int) -> list[int]:
    """Clocks to measure at, from the highest down, MHz.

    Raises:
        InputError: the GPU does not have one of those asked for.
    """
    if not frequencies:
        return spaced_clocks(info.supported_clocks, step)
    for lacking in sorted(set(frequencies) - set(info.supported_clocks)):
        raise InputError(f"frequencies has {lacking} MHz, which the {info.name} does not support")
    return sorted(set(frequencies), reverse=True)
