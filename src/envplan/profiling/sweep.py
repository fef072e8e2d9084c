"""The measuring loop: every stage at every clock, from the highest down, on one GPU.

Energy comes from a counter that the driver updates about ten times a second, so operations are run
back to back in blocks and the counter is read between blocks. Over consecutive blocks the
uncertainty of the readings cancels but for the first and the last one: its share of the standard
error falls with the time measured, that of real variation with the square root of the blocks. Both
are counted, and a measurement ends when time and energy meet the target or the time limit.

Below the clock at which a stage needs the least energy, going slower costs time and energy alike.
Each stage's sweep therefore stops after five clocks in a row whose forward + backward energy has
risen above the least so far, and by more than noise: where the power limit holds the clock, energy
is flat over many clocks, and noise alone would rise five times in a row there before long.
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
from typing import Any, Final, NamedTuple, Protocol, TypeVar

import numpy as np

from envplan.devices import Device, DeviceError, PermissionDeniedError, spaced_clocks
from envplan.errors import InputError
from envplan.profile import BLOCKING, Profile, ProfileMetadata
from envplan.profiling.explaining import explained
from envplan.profiling.sweep_file import Measurement, Row, SweepFile

__all__ = [
    "SPLIT",
    "Block",
    "EventTimer",
    "Settings",
    "Timer",
    "Valley",
    "Workload",
    "summarize",
    "sweep",
]

_FORWARD, _BACKWARD = "forward", "backward"

#: The two parts of a split backward: gradients of inputs, and of weights.
SPLIT: Final = ("backward_input", "backward_weight")

_SPINNING: Final = "of a GPU that spins idly, not of one that waits in a transfer"

# A block further from the median than this many standard deviations, as the median deviation
# estimates them, is not of the same distribution (Iglewicz and Hoaglin, 1993).
_OUTLIER: Final = 3.5
_MEDIAN_DEVIATION: Final = 1.4826
_LEAST_BLOCKS: Final = 3

# Two readings, each late by anything up to a period of the counter: a uniform distribution has a
# twelfth of its squared width as variance.
_READINGS_VARIANCE: Final = 2 / 12

# Energies that differ by no more than so many standard errors may be the same.
_NOISE: Final = 2.0

# A driver that fails is asked again: so many times, with so many seconds between.
_TRIES: Final = 5
_RESET_TRIES: Final = 20
_PAUSE: Final = 0.05
_MOST_SPOILED: Final = 10


class Workload(Protocol):
    """The stages to be measured, one microbatch at a time.

    Work may be queued and go on after a call returns; `synchronize` waits for it. Every stage is
    tried once, then they are measured in turn. Calls for one stage follow each other before those
    for the next, and `forward` comes before `backward`. Whatever they raise is said in a line.

    A workload may also have `backward_input(stage)` and `backward_weight(stage)`, the two parts of
    a split backward, each of which may be called again for the same forward; `timer`, a `Timer` for
    its work; and `waiting`, which says in words what `wait` has the GPU do.
    """

    @property
    def description(self) -> str:
        """What it is, for people; also tells sweeps of different workloads apart."""

    @property
    def num_stages(self) -> int:
        """How many stages there are."""

    def forward(self, stage: int) -> None:
        """Run the stage's forward of a microbatch."""

    def backward(self, stage: int) -> None:
        """Run the stage's backward for the last forward; may be called again for the same one."""

    def wait(self, seconds: float) -> None:
        """Have the GPU do for so long what it does while it waits for a neighbour."""

    def synchronize(self) -> None:
        """Return once the GPU has done everything asked for."""


class Timer:
    """Times a block of queued work: by the host's clock, which learns of ends by waiting for them.

    Args:
        now: tells the time, s.

    Attributes:
        name: what tells the time, for people.
    """

    name = "host clock"

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._begin = 0.0

    def start(self) -> None:
        """Call before the first piece of work is queued."""
        self._begin = self._now()

    def stop(self) -> None:
        """Call after the last one is queued."""

    def seconds(self) -> float:
        """From start to stop, s; call once all of it is done."""
        return self._now() - self._begin


class EventTimer(Timer):
    """Events in the GPU's own queue: free of what the host takes to queue and to wait.

    Args:
        make: makes an event with `record()` and `elapsed_time(later)` in ms, such as
            `torch.cuda.Event(enable_timing=True)`.
    """

    name = "CUDA events"

    def __init__(self, make: Callable[[], Any]) -> None:
        self._first, self._last = make(), make()

    def start(self) -> None:
        self._first.record()

    def stop(self) -> None:
        self._last.record()

    def seconds(self) -> float:
        return float(self._first.elapsed_time(self._last)) / 1e3


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
        """What is measured of each stage."""
        return (_FORWARD, *(SPLIT if self.split_backward else (_BACKWARD,)))


class Block(NamedTuple):
    """Repetitions of one operation, run back to back and timed together.

    Attributes:
        repetitions: how many.
        seconds: of all of them.
        joules: of all of them, as the counter has it.
    """

    repetitions: int
    seconds: float
    joules: float


def summarize(blocks: Sequence[Block], counter_period: float) -> Measurement:
    """Means and standard errors of consecutive blocks of one operation.

    Args:
        blocks: at least one, in the order they ran in, with no pause between them.
        counter_period: of the energy counter, s.
    """
    count, seconds, joules = np.array(blocks).T
    reading = math.sqrt(_READINGS_VARIANCE) * counter_period * joules.sum() / seconds.sum()
    used = np.ones(len(blocks), dtype=bool)
    for values, noise in ((seconds / count, 0.0), (joules / seconds, reading / seconds.min())):
        middle = np.median(values)
        spread = _MEDIAN_DEVIATION * np.median(np.abs(values - middle))
        used &= np.abs(values - middle) <= _OUTLIER * max(spread, noise + 1e-3 * middle)
    samples, total = int(used.sum()), count[used].sum()
    time_variance, energy_variance = (
        float(np.var((of / count)[used], ddof=1)) if samples > 1 else 0.0
        for of in (seconds, joules)
    )
    # Each stretch of blocks without a gap begins and ends with a reading; variation beyond what
    # the readings explain is the operation's own.
    stretches = 1 + int((np.diff(np.flatnonzero(used)) > 1).sum())
    readings = reading * math.sqrt(stretches) / total
    own = max(0.0, energy_variance - (reading * samples / total) ** 2) / samples
    return Measurement(
        time=float(seconds[used].sum() / total),
        energy=float(joules[used].sum() / total),
        time_std=math.sqrt(time_variance),
        energy_std=math.sqrt((own + readings**2) * samples),
        samples=samples,
    )


def sweep(
    workload: Workload,
    device: Device,
    path: str | os.PathLike[str],
    settings: Settings,
    *,
    metadata: ProfileMetadata | None = None,
    progress: Callable[[float, str], None] = lambda *_: None,
    hold: Callable[[], AbstractContextManager[object]] = nullcontext,
    now: Callable[[], float] = time.monotonic,
) -> Profile:
    """Measure a workload's stages and write the profile, or continue where a sweep was cut off.

    Every stage that has no rows yet runs once before any clock is touched, so that one that fails
    or does not fit says so at once. The clock is given back before this returns or raises.

    Args:
        workload: what to run.
        device: the GPU it runs on.
        path: of the profile CSV.
        settings: how.
        metadata: for the sidecar; GPU, driver, source, workload, date and version are added.
        progress: called before each operation at a clock with the share that is done and where it
            is.
        hold: makes what is held while clocks are set: an `envplan.devices.guard.Guard` gives the
            clock back if this process is killed.
        now: the host's clock, s; tests pass their own. It times the work, too, unless the
            workload has a timer.

    Raises:
        InputError: the backward is to be split and the workload cannot, the file is of something
            else or cannot be written, the step is too wide, or a stage fails.
        DeviceError: the GPU refuses, or its energy counter stands still.
    """
    if settings.split_backward and not all(hasattr(workload, name) for name in SPLIT):
        raise InputError(
            f"{workload.description} cannot split its backward: it lacks the methods "
            f"{' and '.join(SPLIT)}"
        )
    _check_device(device, settings)
    info = device.info
    shared = {
        "gpu": info.name,
        "uuid": info.uuid,
        "driver": info.driver,
        "workload": workload.description,
        "stages": workload.num_stages,
        **asdict(settings),
    }
    known = replace(
        metadata or ProfileMetadata(),
        gpu=info.name,
        driver=info.driver,
        source=info.source,
        workload=workload.description,
    ).made_today()
    timer: Timer = getattr(workload, "timer", None) or Timer(now)
    with SweepFile(path, shared, known) as file:
        for stage in sorted(set(range(workload.num_stages)) - {row.stage for row in file.rows}):
            for instruction in settings.instructions:
                with _tried(instruction, stage):
                    getattr(workload, instruction)(stage)
                    workload.synchronize()
        running = _Sweep(workload, device, file, settings, progress, now, timer)
        with hold():
            try:
                running.run()
            finally:
                if settings.lock:
                    _give_back(device, running.locked)
        late = sum(row.error > settings.target_error for row in file.rows)
        file.finish(
            {
                "energy_source": info.energy_source,
                "rows_throttled": sum(bool(row.throttle) for row in file.rows),
                "rows_over_target_error": late,
                "times": timer.name,
                "blocking_power": getattr(workload, "waiting", None) or _SPINNING,
                **running.findings,
            }
        )
    return Profile.read_csv(path)


def _tried(instruction: str, stage: int) -> AbstractContextManager[None]:
    """Whatever the workload's own code raises in an operation is said in a line."""
    where = f"{instruction}({stage}) of the workload"
    return explained(
        f"{where} fails",
        f"{where} does not fit in the GPU's memory; choose more stages or a smaller microbatch",
    )


def _check_device(device: Device, settings: Settings) -> None:
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
    _patiently(device.energy)  # one that cannot tell it is refused before its clock is touched


T = TypeVar("T")


def _patiently(ask: Callable[[], T], tries: int = _TRIES) -> T:
    """What the driver answers, though it may fail for a while.

    Raises:
        DeviceError: it failed every time.
    """
    for _ in range(tries - 1):
        try:
            return ask()
        except PermissionDeniedError:
            raise
        except DeviceError:
            time.sleep(_PAUSE)
    return ask()


def _give_back(device: Device, locked: int | None) -> None:
    """Reset the clock.

    Raises:
        DeviceError: the driver failed every time, so that the clock may stay where it is.
    """
    try:
        _patiently(device.reset_clock, _RESET_TRIES)
    except DeviceError as error:
        at = "" if locked is None else f" at {locked} MHz"
        raise DeviceError(
            f"the clock could not be given back, so the GPU may stay{at} until `envplan reset`: "
            f"{error}"
        ) from error


@dataclass
class Valley:
    """Decides when a sweep from the highest clock down is below the clock of the least energy.

    Attributes:
        rises: clocks in a row above the least energy, after which it is.
        risen: of those, so far.
        least: the least energy so far, J, and its standard error, J.
    """

    rises: int
    risen: int = 0
    least: tuple[float, float] | None = None

    def passed(self, energy: float, error: float) -> bool:
        """Whether this energy (J, and its standard error) was one rise too many."""
        least = self.least
        rise = least is not None and energy - least[0] > _NOISE * math.hypot(error, least[1])
        self.risen = self.risen + 1 if rise else 0
        if least is None or energy < least[0]:
            self.least = energy, error
        return self.risen >= self.rises


@dataclass
class _Sweep:
    """A sweep that is under way.

    Attributes:
        locked: the clock that was set last, MHz.
        cold: whether nothing has run yet.
        findings: what the sidecar shall say beside the rows.
    """

    workload: Any
    device: Device
    file: SweepFile
    settings: Settings
    progress: Callable[[float, str], None]
    now: Callable[[], float]
    timer: Timer
    locked: int | None = None
    cold: bool = True
    findings: dict[str, Any] = field(default_factory=dict)

    def run(self) -> None:
        """Measure what the file lacks: each operation at each clock, None where none is set."""
        lock, operations = self.settings.lock, self.settings.instructions
        clocks: list[int | None] = [None]
        if lock:
            supported = self.device.info.supported_clocks
            clocks = list(spaced_clocks(supported, self.settings.step))
        known = {
            (row.stage, row.instruction, row.frequency if lock else None): row
            for row in self.file.rows
        }
        stages, done = self.workload.num_stages, 0
        total = len(clocks) * (len(operations) * stages + 1)
        for stage in range(stages):
            valley = Valley(self.settings.rises)
            names = [*operations, BLOCKING] if stage == 0 else operations  # any stage waits alike
            for position, clock in enumerate(clocks):
                rows = []
                for name in names:
                    if (row := known.get((stage, name, clock))) is None:
                        at = "current clocks" if clock is None else f"{clock} MHz"
                        self.progress(done / total, f"stage {stage} of {stages}, {at}")
                        with _tried(name, stage):
                            row = self._measure(stage, name, clock)
                        self.file.append(row)
                    rows.append(row)
                    done += 1
                del rows[len(operations) :]
                energy = math.fsum(row.energy for row in rows)
                if valley.passed(energy, math.hypot(*(row.energy_error for row in rows))):
                    done += (len(clocks) - position - 1) * len(names)
                    break

    def _measure(self, stage: int, instruction: str, clock: int | None) -> Row:
        settings = self.settings
        if clock is not None and clock != self.locked:
            _patiently(partial(self.device.lock_clock, clock))
            self.locked = clock
        run = self._operation(stage, instruction)
        warm_up = min(settings.preheat if self.cold else settings.warm_up, settings.time_limit)
        block = min(settings.block, settings.time_limit / _LEAST_BLOCKS)
        count = max(1, math.ceil(block / self._warm_up(run, warm_up)))
        self.cold = False
        begin, spoiled = self.now(), 0
        blocks: list[Block] = []
        seen: list[int] = []
        reasons: set[str] = set()
        energy = _patiently(self.device.energy)
        while True:
            self.timer.start()
            for _ in range(count):
                run()
            self.timer.stop()
            with suppress(DeviceError):  # while there is still work queued
                seen.append(self.device.clock())
            try:
                reasons.update(self.device.throttle_reasons())
            except DeviceError as error:  # no figure depends on it
                self.findings["throttle_untold"] = str(error)
            self.workload.synchronize()
            before, late = energy, False
            try:
                energy = self.device.energy()
            except DeviceError:
                energy, late = _patiently(self.device.energy), True
            spent = self.now() - begin
            if late or energy < before:
                # Blocks count only where one reading follows the other: begin anew.
                blocks.clear()
                if not late:
                    self.findings["counter_resets"] = self.findings.get("counter_resets", 0) + 1
                spoiled += 1
                if spoiled > _MOST_SPOILED:
                    raise self._counter(f"fell or could not be read {spoiled} times in a row")
                continue
            spoiled = 0
            blocks.append(Block(count, self.timer.seconds(), (energy - before) / 1e3))
            found = summarize(blocks, settings.counter_period)
            enough = found.samples >= _LEAST_BLOCKS and found.error <= settings.target_error
            if enough or spent >= settings.time_limit:
                break
        if found.energy <= 0:
            raise self._counter(f"stood still for {spent:.1f} s of work")
        observed = round(statistics.median(seen)) if seen else clock or 0
        # Without locks all rows go by the clock that the first one was seen at.
        named = self.file.rows[0].frequency if self.file.rows else observed
        return Row(
            stage=stage,
            instruction=instruction,
            frequency=named if clock is None else clock,
            clock=observed,
            throttle="+".join(sorted(reasons)),
            **asdict(found),
        )

    def _counter(self, what: str) -> DeviceError:
        name = self.device.info.name
        return DeviceError(
            f"the energy counter of the {name} {what}; nothing can be measured on it"
        )

    def _operation(self, stage: int, instruction: str) -> Callable[[], None]:
        if instruction == BLOCKING:
            period = min(self.settings.block, self.settings.counter_period)
            return partial(self.workload.wait, period)
        if instruction != _FORWARD:
            self.workload.forward(stage)
        return partial(getattr(self.workload, instruction), stage)

    def _warm_up(self, run: Callable[[], None], seconds: float) -> float:
        """Run for so long at least; returns the time of one repetition in the end, s."""
        begin = self.now()
        count = 1
        while True:
            at = self.now()
            for _ in range(count):
                run()
            self.workload.synchronize()
            after = self.now()
            if after - begin >= seconds:
                return max((after - at) / count, 1e-9)
            count = count * 2 if after - at < seconds / 8 else count
