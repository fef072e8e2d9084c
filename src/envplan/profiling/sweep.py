"""The measuring loop: every stage at every clock, from the highest down, on one GPU.

An operation is repeated in blocks, back to back, until the standard errors of its time and energy
meet the target or the time limit (block_statistics.py). A stage's sweep ends once it is below the
clock of the least energy (energy_minimum.py).
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Final, NamedTuple, TypeVar

from envplan.devices import Device, DeviceError, PermissionDeniedError, spaced_clocks
from envplan.errors import EnvplanError, InputError
from envplan.profile import BLOCKING, Profile, ProfileMetadata
from envplan.profile.sidecar import LATENCY_UNKNOWN
from envplan.profiling.block_statistics import Block, summarize
from envplan.profiling.energy_minimum import EnergyMinimum
from envplan.profiling.explaining import explained
from envplan.profiling.stages import SPLIT_BACKWARD, RunnableStages
from envplan.profiling.sweep_file import Measurement, Row, SweepFile
from envplan.profiling.switch_latency import measure_switch_latency
from envplan.profiling.timers import Timer

__all__ = ["Settings", "give_clock_back", "sweep"]

_FORWARD, _BACKWARD = "forward", "backward"
_SPINNING: Final = "of a GPU that spins idly, not of one that waits in a transfer"
_MIN_BLOCKS: Final = 3
_MAX_SPOILED_BLOCKS: Final = 10
_MIN_REPETITION_S: Final = 1e-9
_WARM_UP_ROUNDS: Final = 8  # a warm-up has about so many rounds of repetitions

# A driver that fails is asked again: so many times, with so many seconds between.
_TRIES: Final = 5
_RESET_TRIES: Final = 20
_PAUSE_S: Final = 0.05


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to sweep and how well to measure. All are part of what a continued sweep must share.

    Attributes:
        step: MHz between clocks at least; 0 takes all that the GPU supports.
        split_backward: measure the two parts of a backward apart instead of the whole.
        lock: whether clocks may be touched; otherwise each operation is measured once, at the
            clocks the driver chooses, and all rows go by the one that the first was seen at.
        target_error: relative standard error that time and energy shall meet.
        time_limit: for an operation at a clock, s; what is not good enough by then stays so.
        warm_up: how long an operation runs at a clock before it counts, s; like the next two no
            longer than the time limit allows.
        preheat: how long the first one of a run does, s: a cold GPU draws less.
        block: how long a block of repetitions is, about, s.
        counter_period: how often the driver updates the energy counter, s.
        rises: a stage's sweep ends after this many clocks in a row above its least energy.
    """

    step: int = 0
    split_backward: bool = False
    lock: bool = True
    target_error: float = 0.01
    time_limit: float = 20.0
    warm_up: float = 0.5
    preheat: float = 5.0
    block: float = 0.5
    counter_period: float = 0.1
    rises: int = 5

    @property
    def instructions(self) -> tuple[str, ...]:
        """The operations of each stage that are measured."""
        return (_FORWARD, *SPLIT_BACKWARD) if self.split_backward else (_FORWARD, _BACKWARD)


def sweep(
    stages: RunnableStages,
    device: Device,
    path: str | os.PathLike[str],
    settings: Settings,
    *,
    metadata: ProfileMetadata | None = None,
    progress: Callable[[float, str], None] = lambda *_: None,
    hold: Callable[[], AbstractContextManager[object]] = nullcontext,
    now: Callable[[], float] = time.monotonic,
) -> Profile:
    """Measure stages and write the profile, or continue where a sweep was cut off.

    Every stage that has no rows yet runs once before any clock is touched, so that one that fails
    or does not fit says so at once. In the end it is measured how late clocks come, where the
    stages have slices of work. The clock is given back before this returns or raises.

    Args:
        stages: to run.
        device: the GPU they run on.
        path: of the profile CSV.
        settings: of the sweep.
        metadata: for the sidecar; GPU, driver, source, workload, date and version are added.
        progress: called before each operation at a clock with the share that is done and where it
            is.
        hold: makes what is held while clocks are set: an `envplan.devices.guard.Guard` gives the
            clock back if this process is killed.
        now: the host's clock, s; tests pass their own. It times the work, too, unless the stages
            have a timer.

    Raises:
        InputError: the backward is to be split and the stages cannot, the file is of something
            else or cannot be written, the step is too wide, or a stage fails.
        DeviceError: the GPU refuses, or its energy counter stands still.
    """
    _require_split_backward(stages, settings)
    _require_measurable(device, settings)
    info = device.info
    parameters = {
        "gpu": info.name,
        "uuid": info.uuid,
        "driver": info.driver,
        "workload": stages.description,
        "stages": stages.num_stages,
        **asdict(settings),
    }
    sidecar = replace(
        metadata or ProfileMetadata(),
        gpu=info.name,
        driver=info.driver,
        source=info.source,
        workload=stages.description,
    ).made_today()
    timer: Timer = getattr(stages, "timer", None) or Timer(now)
    sidecar = sidecar.with_power_limit(info.power_limit)
    with SweepFile(path, parameters, sidecar) as file:
        _try_once(stages, settings, measured={row.stage for row in file.rows})
        running = _Sweep(stages, device, file, settings, progress, now, timer)
        with hold():
            try:
                running.run()
                running.measure_switch_latency()
            finally:
                if settings.lock:
                    give_clock_back(device, running.locked_mhz)
        num_late = sum(row.error > settings.target_error for row in file.rows)
        file.finish(
            {
                "energy_source": info.energy_source,
                "rows_throttled": sum(bool(row.throttle) for row in file.rows),
                "rows_over_target_error": num_late,
                "times": timer.name,
                "blocking_power": getattr(stages, "waiting", None) or _SPINNING,
                **running.findings.to_dict(),
            }
        )
    return Profile.read_csv(path)


def _require_split_backward(stages: RunnableStages, settings: Settings) -> None:
    if settings.split_backward and not all(hasattr(stages, name) for name in SPLIT_BACKWARD):
        raise InputError(
            f"{stages.description} cannot split its backward: it lacks the methods "
            f"{' and '.join(SPLIT_BACKWARD)}"
        )


def _require_measurable(device: Device, settings: Settings) -> None:
    """Refuse a GPU on which nothing can be measured so.

    Raises:
        InputError: the step is too wide.
        DeviceError: the GPU is split, its clock may not be set, or it does not tell its energy.
    """
    info = device.info
    if settings.step > info.max_clock - info.supported_clocks[0] > 0:
        raise InputError(
            f"--step {settings.step} is wider than the clocks of the {info.name} are apart"
        )
    if info.mig:
        raise DeviceError(
            f"the {info.name} is split by MIG, so its energy counter and clock are shared by all "
            f"parts; turn it off as root with: nvidia-smi -i {info.index} -mig 0"
        )
    if settings.lock and (refusal := device.lock_refusal(probe=True)):
        raise DeviceError(f"{refusal}; or measure at the current clocks only: --no-lock")
    _retry(device.energy)  # one that cannot tell it is refused before its clock is touched


def _try_once(stages: RunnableStages, settings: Settings, measured: set[int]) -> None:
    """Run every operation of each stage that has not been measured."""
    for stage in range(stages.num_stages):
        if stage in measured:
            continue
        for instruction in settings.instructions:
            with _explained_failure(instruction, stage):
                getattr(stages, instruction)(stage)
                stages.synchronize()


def _explained_failure(instruction: str, stage: int) -> AbstractContextManager[None]:
    """Whatever a stage's own code raises in an operation becomes an error of one line."""
    operation = f"{instruction}({stage}) of the workload"
    return explained(
        f"{operation} fails",
        f"{operation} does not fit in the GPU's memory; choose more stages or a smaller microbatch",
    )


T = TypeVar("T")


def _retry(driver_call: Callable[[], T], tries: int = _TRIES) -> T:
    """The result of a driver call, which may fail for a while.

    Raises:
        DeviceError: it failed every time.
    """
    for _ in range(tries - 1):
        try:
            return driver_call()
        except PermissionDeniedError:
            raise
        except DeviceError:
            time.sleep(_PAUSE_S)
    return driver_call()


def give_clock_back(device: Device, locked_mhz: int | None) -> None:
    """Reset the clock.

    Raises:
        DeviceError: the driver failed every time, so that the clock may stay where it is.
    """
    try:
        _retry(device.reset_clock, _RESET_TRIES)
    except DeviceError as error:
        clock = "" if locked_mhz is None else f" at {locked_mhz} MHz"
        raise DeviceError(
            f"the clock could not be given back, so the GPU may stay{clock} until `envplan reset`: "
            f"{error}"
        ) from error


class _OperationAtClock(NamedTuple):
    """A row that is measured; the clock is None where none is set."""

    stage: int
    instruction: str
    clock_mhz: int | None


@dataclass
class _Findings:
    """Findings that the sidecar states beside the rows.

    Attributes:
        counter_resets: how often the energy counter fell.
        throttle_unknown: why the driver does not tell what holds the clock back; "": it does.
        latency_unknown: why it was not measured how late clocks come; "": it was, or no clock was
            set.
    """

    counter_resets: int = 0
    throttle_unknown: str = ""
    latency_unknown: str = ""

    def to_dict(self) -> dict[str, int | str]:
        """The sidecar's fields, as far as there is something to say."""
        fields: dict[str, int | str] = {}
        if self.throttle_unknown:
            fields["throttle_untold"] = self.throttle_unknown
        if self.latency_unknown:
            fields[LATENCY_UNKNOWN] = self.latency_unknown
        if self.counter_resets:
            fields["counter_resets"] = self.counter_resets
        return fields


@dataclass
class _Observations:
    """Clocks and throttling of the GPU while an operation ran.

    Attributes:
        clocks_mhz: at the end of blocks.
        throttle_reasons: that held the clock back at any time.
    """

    clocks_mhz: list[int] = field(default_factory=list)
    throttle_reasons: set[str] = field(default_factory=set)


@dataclass
class _BlockSeries:
    """Blocks that follow each other without a gap in the energy readings.

    Attributes:
        energy_mj: the counter's last reading.
        blocks: since the last gap.
        spoiled: blocks in a row that were lost to a gap.
    """

    energy_mj: int
    blocks: list[Block] = field(default_factory=list)
    spoiled: int = 0

    def add(self, repetitions: int, time_s: float, energy_mj: int) -> None:
        """Add a block that ended with a reading."""
        self.blocks.append(Block(repetitions, time_s, (energy_mj - self.energy_mj) / 1e3))
        self.energy_mj = energy_mj
        self.spoiled = 0

    def restart(self, energy_mj: int) -> None:
        """Begin anew: blocks count only where one reading follows the other."""
        self.blocks.clear()
        self.energy_mj = energy_mj
        self.spoiled += 1


@dataclass
class _Sweep:
    """A sweep that is under way.

    Attributes:
        stages: to run.
        device: the GPU.
        file: where rows go.
        settings: of the sweep.
        progress: told the share that is done and where the sweep is.
        now: the host's clock, s.
        timer: times blocks.
        locked_mhz: the clock that was set last.
        is_cold: whether nothing has run yet.
        findings: for the sidecar.
    """

    stages: RunnableStages
    device: Device
    file: SweepFile
    settings: Settings
    progress: Callable[[float, str], None]
    now: Callable[[], float]
    timer: Timer
    locked_mhz: int | None = None
    is_cold: bool = True
    findings: _Findings = field(default_factory=_Findings)

    def run(self) -> None:
        """Measure what the file lacks: each operation at each clock."""
        clocks_mhz = self._clocks()
        measured = {self._key_of(row): row for row in self.file.rows}
        operations = self.settings.instructions
        num_rows = len(clocks_mhz) * (len(operations) * self.stages.num_stages + 1)
        num_done = 0
        for stage in range(self.stages.num_stages):
            minimum = EnergyMinimum(self.settings.rises)
            # Any stage waits alike.
            instructions = [*operations, BLOCKING] if stage == 0 else list(operations)
            for position, clock_mhz in enumerate(clocks_mhz):
                rows = []
                for instruction in instructions:
                    operation = _OperationAtClock(stage, instruction, clock_mhz)
                    row = measured.get(operation)
                    if row is None:
                        self._report(operation, num_done / num_rows)
                        row = self._measure_and_save(operation)
                    rows.append(row)
                    num_done += 1
                if _is_passed(minimum, rows[: len(operations)]):
                    num_done += (len(clocks_mhz) - position - 1) * len(instructions)
                    break

    def measure_switch_latency(self) -> None:
        """Measure how late clocks come, between those of the rows, unless that is known.

        A profile is complete without it, so that failures are noted and raised no further.
        """
        if not self.settings.lock or self.file.switch_latency is not None:
            return
        clocks_mhz = {row.frequency for row in self.file.rows}
        if len(clocks_mhz) < 2:
            self.findings.latency_unknown = "there is one clock only"
            return
        try:
            slices = getattr(self.stages, "slices", None)
            if slices is None:
                self.findings.latency_unknown = "the stages have no slices of work"
                return
            with explained("the slices of work fail"):
                latency = measure_switch_latency(
                    self.device,
                    slices,
                    sorted(clocks_mhz),
                    progress=lambda _, where: self.progress(1.0, f"switch latency, {where}"),
                )
        except EnvplanError as error:
            self.findings.latency_unknown = str(error)
        else:
            self.file.add_switch_latency(latency)

    def _clocks(self) -> list[int | None]:
        """The clocks of the sweep, from the highest down; None: those that the driver chooses."""
        if not self.settings.lock:
            return [None]
        return list(spaced_clocks(self.device.info.supported_clocks, self.settings.step))

    def _key_of(self, row: Row) -> _OperationAtClock:
        clock_mhz = row.frequency if self.settings.lock else None
        return _OperationAtClock(row.stage, row.instruction, clock_mhz)

    def _report(self, operation: _OperationAtClock, share_done: float) -> None:
        clock = "current clocks" if operation.clock_mhz is None else f"{operation.clock_mhz} MHz"
        stage = f"stage {operation.stage} of {self.stages.num_stages}"
        self.progress(share_done, f"{stage}, {clock}")

    def _measure_and_save(self, operation: _OperationAtClock) -> Row:
        with _explained_failure(operation.instruction, operation.stage):
            row = self._measure(operation)
        self.file.append(row)
        return row

    def _measure(self, operation: _OperationAtClock) -> Row:
        """Blocks until the standard error is small enough or the time is up."""
        self._lock_clock(operation.clock_mhz)
        run = self._runner(operation.stage, operation.instruction)
        repetitions = self._repetitions_of_a_block(run)
        observations = _Observations()
        begin_s = self.now()
        series = _BlockSeries(_retry(self.device.energy))
        while True:
            self._run_block(run, repetitions, observations)
            self._end_block(series, repetitions)
            spent_s = self.now() - begin_s
            if not series.blocks:
                continue
            measurement = summarize(series.blocks, self.settings.counter_period)
            is_precise = measurement.error <= self.settings.target_error
            if measurement.samples >= _MIN_BLOCKS and is_precise:
                break
            if spent_s >= self.settings.time_limit:
                break
        if measurement.energy <= 0:
            raise self._counter_error(f"stood still for {spent_s:.1f} s of work")
        return self._row(operation, measurement, observations)

    def _lock_clock(self, clock_mhz: int | None) -> None:
        if clock_mhz is not None and clock_mhz != self.locked_mhz:
            _retry(partial(self.device.lock_clock, clock_mhz))
            self.locked_mhz = clock_mhz

    def _runner(self, stage: int, instruction: str) -> Callable[[], None]:
        """A function that runs an operation once; a backward's forward has run before."""
        if instruction == BLOCKING:
            period_s = min(self.settings.block, self.settings.counter_period)
            return partial(self.stages.wait, period_s)
        if instruction != _FORWARD:
            self.stages.forward(stage)
        return partial(getattr(self.stages, instruction), stage)

    def _repetitions_of_a_block(self, run: Callable[[], None]) -> int:
        """How often an operation runs in a block, found while it warms up."""
        settings = self.settings
        warm_up_s = settings.preheat if self.is_cold else settings.warm_up
        repetition_s = self._warm_up(run, min(warm_up_s, settings.time_limit))
        self.is_cold = False
        block_s = min(settings.block, settings.time_limit / _MIN_BLOCKS)
        return max(1, math.ceil(block_s / repetition_s))

    def _warm_up(self, run: Callable[[], None], seconds: float) -> float:
        """Run for so long at least; returns the time of one repetition in the end, s."""
        begin_s = self.now()
        repetitions = 1
        while True:
            start_s = self.now()
            for _ in range(repetitions):
                run()
            self.stages.synchronize()
            end_s = self.now()
            if end_s - begin_s >= seconds:
                return max((end_s - start_s) / repetitions, _MIN_REPETITION_S)
            is_short = end_s - start_s < seconds / _WARM_UP_ROUNDS
            if is_short:
                repetitions *= 2

    def _run_block(
        self, run: Callable[[], None], repetitions: int, observations: _Observations
    ) -> None:
        """Run a block, and look at the GPU while there is still work queued."""
        self.timer.start()
        for _ in range(repetitions):
            run()
        self.timer.stop()
        with suppress(DeviceError):
            observations.clocks_mhz.append(self.device.clock())
        try:
            observations.throttle_reasons.update(self.device.throttle_reasons())
        except DeviceError as error:  # no figure depends on it
            self.findings.throttle_unknown = str(error)
        self.stages.synchronize()

    def _end_block(self, series: _BlockSeries, repetitions: int) -> None:
        """Read energy and time of a block; begin anew if the counter fell or could not be read.

        Raises:
            DeviceError: the counter did so too many times in a row.
        """
        try:
            energy_mj = self.device.energy()
            was_read = True
        except DeviceError:
            energy_mj = _retry(self.device.energy)
            was_read = False
        if was_read and energy_mj >= series.energy_mj:
            series.add(repetitions, self.timer.seconds(), energy_mj)
            return
        if was_read:
            self.findings.counter_resets += 1
        series.restart(energy_mj)
        if series.spoiled > _MAX_SPOILED_BLOCKS:
            raise self._counter_error(f"fell or could not be read {series.spoiled} times in a row")

    def _counter_error(self, complaint: str) -> DeviceError:
        name = self.device.info.name
        return DeviceError(
            f"the energy counter of the {name} {complaint}; nothing can be measured on it"
        )

    def _row(
        self, operation: _OperationAtClock, measurement: Measurement, observations: _Observations
    ) -> Row:
        observed_mhz = operation.clock_mhz or 0
        if observations.clocks_mhz:
            observed_mhz = round(statistics.median(observations.clocks_mhz))
        frequency_mhz = operation.clock_mhz
        if frequency_mhz is None:
            # Without locks all rows go by the clock that the first one was seen at.
            frequency_mhz = self.file.rows[0].frequency if self.file.rows else observed_mhz
        return Row(
            stage=operation.stage,
            instruction=operation.instruction,
            frequency=frequency_mhz,
            clock=observed_mhz,
            throttle="+".join(sorted(observations.throttle_reasons)),
            **asdict(measurement),
        )


def _is_passed(minimum: EnergyMinimum, rows: Sequence[Row]) -> bool:
    """Whether a stage's operations at a clock are too far below the clock of the least energy."""
    energy_j = math.fsum(row.energy for row in rows)
    error_j = math.hypot(*(row.energy_error for row in rows))
    return minimum.is_passed_at(energy_j, error_j)
