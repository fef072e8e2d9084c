"""The shim: inside a training process, it asks for the planned clock before every operation.

    with envplan.runtime.Shim("run.freqplan.json") as shim:
        for batch in batches:
            for instruction, microbatch in my_schedule:
                shim.begin(instruction, microbatch)
                ...
                shim.end(instruction, microbatch)
            shim.step()

Clocks are set by another process, the guard, so the training thread writes a few bytes into a pipe
at most, and only when the clock changes. Nothing that goes wrong with clocks or with the order of
operations stops training: it is logged, and the GPU runs at its highest clock instead.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter_ns
from types import TracebackType
from typing import Any, Final, Self

from envplan.devices import DeviceError, DeviceInfo
from envplan.devices import backend as open_backend
from envplan.devices.base import device_at
from envplan.devices.visible import planned_gpu
from envplan.enforce.freqplan import FrequencyPlan, RankPlan
from envplan.runtime.guard import Guard
from envplan.runtime.moments import Follower, environment_number, recorder
from envplan.runtime.runlog import (
    RUN_SCHEMA,
    Iteration,
    Marker,
    Moment,
    RunLog,
    before_reduction,
)

_LOG_LIMIT: Final = 64 * 2**20
_LOGGED_ERRORS: Final = 1000
#: Steps in a row that did not follow the plan's order, after which the plan is not tried again.
_PATIENCE: Final = 3

_Key = tuple[str, int, int]
_logger = logging.getLogger("envplan.runtime")


@dataclass(frozen=True)
class _Rung:
    """One of the plans that a rank may follow, in execution order, and one operation beyond.

    Clock 0: leave it as it is; config "": there is none.
    """

    iteration_s: float
    clocks: tuple[int, ...]
    configs: tuple[str, ...]


class Shim:
    """Follows a frequency plan on one rank. Not for use by several threads at once.

    Args:
        plan: a frequency plan, or the path of one.
        rank: global rank; default: $RANK, as torchrun sets it.
        world_size: number of ranks of the job; default: $WORLD_SIZE, else the plan's.
        device: index of this rank's GPU as the driver counts; default: what the plan says, or the
            only one that CUDA_VISIBLE_DEVICES leaves.
        backend: where clocks are set, "nvml" or "modelled"; options of it may follow by keyword.
        log: file that the run log is appended to (see runlog); default: beside the plan, with
            .jsonl for .freqplan.json. None: no log.
        log_limit: bytes of measured times that this rank logs at most.
        every_request: see Guard.start.
        marker: makes moments in the order of a device's work, for frameworks that queue it:
            `lambda: torch.cuda.Event(enable_timing=True, blocking=True)`. Clocks are then asked for
            when the GPU gets there, by a thread that waits for it (and would spin without
            blocking=True). Default: begin and end are called when the work begins and ends.

    Raises:
        InputError: the plan cannot be read, is of another schema version, for another number of
            ranks or another GPU model, or the rank is not in it.
    """

    def __init__(
        self,
        plan: FrequencyPlan | str | os.PathLike[str],
        *,
        rank: int | None = None,
        world_size: int | None = None,
        device: int | None = None,
        backend: str = "nvml",
        log: str | os.PathLike[str] | None = "",
        log_limit: int = _LOG_LIMIT,
        every_request: bool = False,
        marker: Callable[[], Marker] | None = None,
        **backend_options: Any,
    ) -> None:
        path = None if isinstance(plan, FrequencyPlan) else Path(plan)
        self.plan = plan if isinstance(plan, FrequencyPlan) else FrequencyPlan.load(plan)
        self.rank = environment_number("Shim", "rank", "RANK", rank)
        if world_size is not None or "WORLD_SIZE" in os.environ:
            self.plan.check_world(
                environment_number("Shim", "world_size", "WORLD_SIZE", world_size)
            )
        mine = self.plan.rank_plan(self.rank)
        self.stage = mine.stage
        self.steps = 0
        self.mismatches = 0
        self.last_iteration: tuple[float, float] | None = None

        # One key more, that nothing equals: an operation too many is then a mismatch like any.
        self._keys: list[_Key | None] = [*(operation[:3] for operation in mine.operations), None]
        self._end = len(mine.operations)
        self._alone = before_reduction([key for key in self._keys if key is not None])
        self._rungs = _rungs(self.plan, mine)
        self._rung = self._next_rung = self._rungs[0]
        self._at = 0
        self._asked = 0
        self._begun: Moment | None = None
        self._spans: list[tuple[Moment, Moment]] = []
        self._lost = False
        self._lost_in_a_row = 0

        self.clock_errors = 0
        self._first_error = ""
        self._closed = False
        self._closing: threading.Thread | None = None
        self._mark: Callable[[], Moment] = perf_counter_ns if marker is None else recorder(marker)
        self._max_clock = mine.clocks_mhz[-1] if mine.clocks_mhz else 0
        self._guard: Guard | None = None
        refusal = self._take_clock(backend, mine.device, device, every_request, backend_options)
        self._follower = None if marker is None else Follower(self._send, self._hear)
        self._log = RunLog(
            _log_path(log, path),
            rank=self.rank,
            stage=self.stage,
            limit=log_limit,
            on_time=self._took,
        )
        self._log.event(
            "start",
            schema=RUN_SCHEMA,
            plan_sha256=self.plan.plan_sha256,
            world_size=self.plan.world_size,
            clocks=refusal is None,
        )
        if refusal is not None:
            _logger.warning("rank %d: clocks are left alone: %s", self.rank, refusal)
            self._log.event("clock_error", step=0, message=refusal)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def begin(self, instruction: str, microbatch: int, chunk: int = 0) -> None:
        """An operation begins: ask for its clock, if that is another than now."""
        at = self._at
        if self._keys[at] != (instruction, microbatch, chunk):
            self._stray("begin", (instruction, microbatch, chunk))
            return
        self._begun = begun = self._mark()
        clock = self._rung.clocks[at]
        if clock != self._asked and clock:
            self._ask(clock, begun)

    @property
    def config(self) -> str:
        """The config planned for the operation that runs, or else for the next one.

        "" where the plan has none, where the step is over, and for as long as the order of
        operations is not the plan's: run what is always right.
        """
        return self._rung.configs[self._at]

    def end(self, instruction: str, microbatch: int, chunk: int = 0) -> None:
        """The operation that began last has ended."""
        at = self._at
        if self._begun is None or self._keys[at] != (instruction, microbatch, chunk):
            self._stray("end", (instruction, microbatch, chunk))
            return
        self._spans.append((self._begun, self._mark()))
        self._begun = None
        self._at = at + 1

    def step(self) -> None:
        """An iteration is over; the next one follows the plan that stragglers leave time for."""
        if 0 < self._at < self._end or self._begun is not None:
            self._stray("step", None)
        errors = self.clock_errors
        if self._follower is None:
            self._hear()
        else:
            self._follower.hear()
        if self._lost:
            self._lost_in_a_row += 1
        elif self._spans:
            self._lost_in_a_row = 0
            guard = self._guard
            controlled = guard is not None and guard.alive and not guard.failing
            self._log.iteration(self._iteration(controlled and self.clock_errors == errors))
        self.steps += 1
        self._spans = []
        self._rung = self._next_rung
        self._lost = self._lost_in_a_row >= _PATIENCE
        self._at = self._end if self._lost else 0

    def full_speed(self) -> None:
        """Ask for the highest clock until the next operation begins: to evaluate or to save."""
        if self._asked != self._max_clock:
            self._ask(self._max_clock, self._mark())

    def set_straggler_time(self, seconds: float | None) -> None:
        """From the next step on, follow the slowest plan of the ladder that is still in time.

        Every rank must be told the same at the same step; may be called from any thread.

        Args:
            seconds: when a straggler will end an iteration, s; None: there is none any more.
        """
        rungs = self._rungs
        limit = seconds if seconds is not None and seconds > 0 else 0.0  # not a number: no time
        place = bisect_right(rungs, limit, key=lambda rung: rung.iteration_s)
        self._next_rung = rungs[max(0, place - 1)]

    @property
    def planned_time(self) -> float:
        """Iteration time of the plan itself, without stragglers, s."""
        return self._rungs[0].iteration_s

    @property
    def current_time(self) -> float:
        """Iteration time of the plan that this step follows, s."""
        return self._rung.iteration_s

    @property
    def has_ladder(self) -> bool:
        """Whether there is another plan for when there are stragglers."""
        return len(self._rungs) > 1

    @property
    def pipelines(self) -> list[int]:
        """For each global rank, which of the data-parallel pipelines it belongs to."""
        layout = self.plan.layout
        if layout.dp == 1:
            return [0] * self.plan.world_size
        names, sizes = layout.rank_order.split("-"), layout.sizes
        inner = math.prod(sizes[name] for name in names[: names.index("dp")])
        return [rank // inner % layout.dp for rank in range(self.plan.world_size)]

    def close(self) -> None:
        """Give the clock back, finish the log and say in one line what went wrong, if anything."""
        if self._closed:
            return
        self._closed = True
        if self._follower is not None:
            self._follower.close()
        if self._closing is not None:
            self._closing.join()
        if self._guard is not None:
            self._guard.close()
            self._hear()
        if self.clock_errors:
            _logger.warning(
                "rank %d: %d clock error%s in %d steps, the first: %s",
                self.rank,
                self.clock_errors,
                "s" if self.clock_errors > 1 else "",
                self.steps,
                self._first_error,
            )
        self._log.close(
            steps=self.steps, mismatches=self.mismatches, clock_errors=self.clock_errors
        )

    def _take_clock(
        self,
        name: str,
        planned: int,
        device: int | None,
        every_request: bool,
        options: dict[str, Any],
    ) -> str | None:
        """Start the guard, or say why there is none.

        Raises:
            InputError: the GPU is not what the plan is for.
        """
        try:
            info = _device_info(name, planned, device, options)
            self.plan.check_gpu(info.name, info.supported_clocks, self.stage)
            self._guard = Guard.start(name, info.index, every_request=every_request, **options)
        except DeviceError as error:
            return str(error)
        self._max_clock = info.max_clock
        return None

    def _ask(self, clock: int, moment: Moment) -> None:
        self._asked = clock
        if self._follower is None:
            self._send(clock)
        else:
            self._follower.send(clock, moment)

    def _send(self, clock: int) -> None:
        if self._guard is not None:
            self._guard.request(clock)

    def _hear(self) -> None:
        """Take note of what the guard reports; if it is gone, its clock is given back."""
        guard = self._guard
        if guard is None or (self._closing is not None and self._closing.is_alive()):
            return
        for problem in guard.problems():
            self.clock_errors += 1
            self._first_error = self._first_error or problem
            if self.clock_errors <= _LOGGED_ERRORS:
                self._log.event("clock_error", step=self.steps, message=problem)
        if not guard.alive and self._closing is None and not self._closed:
            self._closing = threading.Thread(target=guard.close, name="envplan-close")
            self._closing.start()

    def _stray(self, where: str, got: _Key | None) -> None:
        """The order is not the plan's: run at the highest clock until the next step."""
        if self._lost:
            return
        expected = self._keys[self._at]
        self._lost = True
        self._at = self._end
        self._begun = None
        self.full_speed()
        self.mismatches += 1
        if self.mismatches > 1:
            return
        _logger.warning(
            "rank %d, step %d: the plan has %s next, but %s came; at the highest clock until the "
            "order is the plan's again",
            self.rank,
            self.steps,
            _shown(expected),
            f"{where} of {_shown(got)}" if got else "the step's end",
        )
        self._log.event("mismatch", step=self.steps, where=where, expected=expected, got=got)

    def _iteration(self, as_planned: bool) -> Iteration:
        """The step that ends now; `as_planned`: its clocks were set, as far as we know."""
        rung = self._rung if as_planned else self._rungs[0]
        clocks = rung.clocks if as_planned else (0,) * self._end
        configs = rung.configs
        done = zip(self._keys, clocks, configs, self._spans, strict=False)
        return Iteration(
            step=self.steps,
            planned_s=rung.iteration_s,
            operations=[
                (key[0], key[2], clock, config) for key, clock, config, _ in done if key is not None
            ],
            spans=self._spans,
            alone=self._alone,
        )

    def _took(self, planned_s: float, measured_s: float) -> None:
        self.last_iteration = (planned_s, measured_s)


def _rungs(plan: FrequencyPlan, mine: RankPlan) -> list[_Rung]:
    """The plan and its ladder, by ascending iteration time, for one rank."""
    rungs = [_rung(plan.iteration_time_s, mine.frequencies, mine.configs)]
    for rung in plan.ladder or []:
        configs = None if rung.configs is None else rung.configs[mine.stage]
        clocks = rung.frequencies_mhz[mine.stage]
        rungs.append(_rung(rung.iteration_time_s, clocks, configs))
    return rungs


def _rung(iteration_s: float, clocks: Sequence[int], configs: Sequence[str] | None) -> _Rung:
    return _Rung(iteration_s, (*clocks, 0), (*(configs or [""] * len(clocks)), ""))


def _device_info(
    name: str, planned: int, device: int | None, options: dict[str, Any]
) -> DeviceInfo:
    """What this rank's GPU is: the one given, or else the planned one.

    Raises:
        DeviceError: there is none.
    """
    source = open_backend(name, **options)
    try:
        devices = source.devices()
        if device is None:
            device = planned_gpu(devices, planned) if name == "nvml" else planned
        return device_at(devices, device).info
    finally:
        source.close()


def _log_path(
    log: str | os.PathLike[str] | None, plan: Path | None
) -> str | os.PathLike[str] | None:
    if log != "":
        return log
    if plan is None:
        return None
    return plan.with_name(plan.name.removesuffix(".json").removesuffix(".freqplan") + ".jsonl")


def _shown(key: _Key | None) -> str:
    if key is None:
        return "nothing"
    instruction, microbatch, chunk = key
    return f"{instruction} {microbatch}" + (f" of chunk {chunk}" if chunk else "")
