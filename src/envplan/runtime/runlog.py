"""The run log: what operations took, and whatever went wrong, as JSON lines off the hot path.

A line is one object with `event` and `rank`. `start` says which plan is followed; `step` has an
iteration's time (s) and, for each (instruction, chunk, MHz) of it, how many operations there were,
their mean and their least time (s), and after these their config, if they have one. Its `changes`
say of each change of clock for which operation it was made, when it was wanted, when it was asked
for and when the driver had set it. `mismatch` and `clock_error` say what happened; `end` counts
them. Of a run that was killed the next one says in `killed` how many iterations it had. Ranks may
append to one file: each line is whole, on network file systems as well. A rank that has written its
share goes on in a file of its own, NAME.rank3, and when that is full begins it anew and keeps the
one before, NAME.rank3.old.
"""

from __future__ import annotations

import json
import logging
import os
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from queue import Full, Queue
from typing import Annotated, ClassVar, Final, NamedTuple, Protocol

from pydantic import Field, GetCoreSchemaHandler, JsonValue, Strict
from pydantic_core import CoreSchema, core_schema

from envplan._io.documents import Index, Model, refuse_later_version
from envplan._io.files import AnyPath, ReadLimits, append_line, stream
from envplan.enforce.freqplan import OperationKey
from envplan.errors import InputError, shown
from envplan.runtime.step_energy import EnergyTotals

RUN_SCHEMA: Final = "envplan/run/v1"
_LOG_LIMITS: Final = ReadLimits(max_bytes=2**36, longest_line=2**24)

#: Lines that wait for the thread; further ones are dropped.
MAX_WAITING_LINES: Final = 256
#: How long `close` waits for the thread, s.
CLOSE_TIMEOUT_S: Final = 10.0
_OPEN_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC

_logger = logging.getLogger("envplan.runtime")

_Duration = Annotated[float, Field(ge=0, le=1e9)]
# JSON has no tuples, so a list is read.
_WithoutConfig = Annotated[tuple[str, Index, Index, Index, _Duration, _Duration], Strict(False)]
_WithConfig = Annotated[tuple[str, Index, Index, Index, _Duration, _Duration, str], Strict(False)]


class OperationTimes(NamedTuple):
    """The times of a step's operations of one kind at one clock; in the log a list of these.

    Attributes:
        instruction: of the operations.
        chunk: of the operations.
        frequency_mhz: the clock in force; 0 where the planned one was not set.
        num_operations: that there were.
        mean_s: their mean time.
        min_s: their least time.
        config: "" where they have none; the list then ends before it.
    """

    instruction: str
    chunk: int
    frequency_mhz: int
    num_operations: int
    mean_s: float
    min_s: float
    config: str = ""

    def to_list(self) -> list[JsonValue]:
        """The list in the log."""
        return list(self if self.config else self[:-1])

    @classmethod
    def __get_pydantic_core_schema__(
        cls, _source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        lists = _WithoutConfig | _WithConfig
        return core_schema.no_info_after_validator_function(
            lambda fields: cls(*fields), handler.generate_schema(lists)
        )


class ChangeTimes(NamedTuple):
    """The times of a change of clock, from the begin of its step; in the log a list of these.

    Attributes:
        position: of the operation that it was made for, in execution order.
        frequency_mhz: the clock.
        wanted_s: when the operation began, s.
        asked_s: when the clock was asked for.
        seen_s: when the driver had set it; None: a newer one overtook it, or it was not set.
    """

    position: int
    frequency_mhz: int
    wanted_s: float
    asked_s: float
    seen_s: float | None


# Lines as they are written


class RunRecord(Protocol):
    """A line of the log before it is written."""

    def to_dict(self) -> dict[str, JsonValue]:
        """Its JSON object."""


@dataclass(frozen=True, kw_only=True)
class RunEvent:
    """Something that happened in a run.

    Attributes:
        rank: that it happened to.
        time: when, s since 1970.
    """

    event: ClassVar[str]

    rank: int
    time: float = field(default_factory=time.time)

    def to_dict(self) -> dict[str, JsonValue]:
        """Its JSON object."""
        return {"event": self.event, **asdict(self)}


@dataclass(frozen=True, kw_only=True)
class RunStarted(RunEvent):
    """A rank begins to follow a plan.

    Attributes:
        plan_sha256: of the plan.json.
        world_size: of the plan.
        clocks: whether clocks can be set.
    """

    event: ClassVar[str] = "start"

    schema: str = RUN_SCHEMA
    plan_sha256: str
    world_size: int
    clocks: bool


@dataclass(frozen=True, kw_only=True)
class RunKilled(RunEvent):
    """The run before this one was killed, without a line about its end.

    Attributes:
        iterations: that it had, by their outcome; the last ones have no lines of their own.
    """

    event: ClassVar[str] = "killed"

    iterations: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class ClockError(RunEvent):
    """A clock could not be set, or the guard is gone.

    Attributes:
        step: when that was noticed, from 0.
        message: a line for people.
    """

    event: ClassVar[str] = "clock_error"

    step: int
    message: str


@dataclass(frozen=True, kw_only=True)
class Mismatch(RunEvent):
    """A step has left the order of the plan.

    Attributes:
        step: which, from 0.
        where: "begin" or "end" of an operation, or "step" for the step's end.
        expected: the operation that the plan has there; None: none.
        got: the operation that came; None: none.
    """

    event: ClassVar[str] = "mismatch"

    step: int
    where: str
    expected: OperationKey | None
    got: OperationKey | None


@dataclass(frozen=True, kw_only=True)
class RunEnded(RunEvent):
    """A rank follows the plan no longer.

    Attributes:
        steps: of the run.
        mismatches: steps that left the order of the plan.
        clock_errors: that were noticed.
        energy: of the steps that followed the plan itself, and not a slower one of its ladder.
        dropped: lines that were not written: the log was far behind, or they could not be made.
        iterations: how many followed the plan, and how many did not, by the reason.
    """

    event: ClassVar[str] = "end"

    steps: int
    mismatches: int
    clock_errors: int
    energy: EnergyTotals
    dropped: int = 0
    iterations: Mapping[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, JsonValue]:
        """Its JSON object."""
        return {
            "event": self.event,
            "rank": self.rank,
            "time": self.time,
            "steps": self.steps,
            "mismatches": self.mismatches,
            "clock_errors": self.clock_errors,
            **self.energy.to_dict(),
            "dropped": self.dropped,
            "iterations": dict(self.iterations),
        }


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """A step that followed the plan, measured.

    Attributes:
        rank: global rank.
        stage: that the rank runs.
        step: its number, from 0.
        planned_s: iteration time of the plan that the clocks in force belong to.
        iteration_s: from the begin of the first operation to the end of the last.
        num_requested: operations with a planned clock.
        num_in_force: operations that had it.
        max_lag_s: the longest time until a requested clock was set.
        mismatches: steps so far whose order was not the plan's.
        energy: of the steps so far that followed the plan itself.
        operations: times by kind of operation and clock.
        changes: of clocks, in execution order.
    """

    rank: int
    stage: int
    step: int
    planned_s: float
    iteration_s: float
    num_requested: int
    num_in_force: int
    max_lag_s: float
    mismatches: int
    energy: EnergyTotals
    operations: list[OperationTimes]
    changes: list[ChangeTimes] = field(default_factory=list)

    def to_dict(self) -> dict[str, JsonValue]:
        """Its JSON object."""
        return {
            "event": "step",
            "rank": self.rank,
            "stage": self.stage,
            "step": self.step,
            "planned_s": self.planned_s,
            "iteration_s": self.iteration_s,
            "asked": self.num_requested,
            "in_force": self.num_in_force,
            "lag_s": self.max_lag_s,
            "mismatches": self.mismatches,
            **self.energy.to_dict(),
            "operations": [times.to_list() for times in self.operations],
            "changes": [list(change) for change in self.changes],
        }


class RunLog:
    """Writes the log of one rank from a thread of its own; its callers never wait.

    Args:
        path: file to append to; None: nothing is written.
        rank: global rank, on every line.
        max_bytes: after which a rank goes on in another file.
        listener: is told of each line in the thread, whether it is written or not.

    Attributes:
        path: the same.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        *,
        rank: int,
        max_bytes: int,
        listener: Callable[[RunRecord], None] | None = None,
    ) -> None:
        self._listener = listener
        self._num_dropped_by_callers = 0  # counted by the callers
        self._num_unmade = 0  # counted by the thread
        self._rank = rank
        self._max_bytes = self._bytes_left = max_bytes
        self._start_line = b""
        self.path = None if path is None else Path(path)
        self._file = None if self.path is None else _open_or_warn(self.path)
        self._queue: Queue[Callable[[], RunRecord] | None] = Queue(MAX_WAITING_LINES)
        self._thread = threading.Thread(target=self._run, name="envplan-log", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Lines that were not written: the thread was far behind, or they could not be made."""
        return self._num_dropped_by_callers + self._num_unmade

    def write(self, event: RunEvent) -> None:
        """Log that something happened."""
        self.write_later(lambda: event)

    def write_later(self, make_record: Callable[[], RunRecord]) -> None:
        """Log a line that is made in the thread; dropped and counted if that is far behind."""
        try:
            self._queue.put_nowait(make_record)
        except Full:
            self._num_dropped_by_callers += 1

    def is_idle(self) -> bool:
        """Whether the thread has begun with all lines."""
        return self._queue.empty()

    def close(self, end: RunEnded) -> None:
        """Log the end and write what is waiting, for ten seconds at most."""
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        with suppress(Full):
            for item in (lambda: replace(end, dropped=self.dropped), None):
                self._queue.put(item, timeout=max(0.0, deadline - time.monotonic()))
            self._thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        for make_record in iter(self._queue.get, None):
            record = self._make(make_record)
            if record is None:
                self._num_unmade += 1
                continue
            try:
                self._write(record)
            except Exception as error:  # a log must not end what it is a log of
                self._give_up(error)
        self._close_file()

    def _make(self, make_record: Callable[[], RunRecord]) -> RunRecord | None:
        """The record; None if it cannot be made, as where the device fails. That is said once."""
        try:
            record = make_record()
            if self._listener is not None:
                self._listener(record)
        except Exception as error:  # a log must not end what it is a log of
            if not self._num_unmade:
                _logger.warning("lines of the run log cannot be made: %s", error)
            return None
        return record

    def _give_up(self, error: Exception) -> None:
        _logger.warning("the run log is given up: %s", error)
        self._close_file()

    def _close_file(self) -> None:
        if self._file is not None:
            with suppress(OSError):  # the training may have closed all descriptors
                os.close(self._file)
            self._file = None

    def _write(self, record: RunRecord) -> None:
        if self._file is None:
            return
        data = json.dumps(record.to_dict()).encode() + b"\n"
        if isinstance(record, RunStarted):
            self._start_line = data
        elif self._bytes_left <= 0:
            self._rotate()
        self._bytes_left -= len(data)
        append_line(self._file, data)

    def _rotate(self) -> None:
        """Go on in a file of this rank's own, which begins with the `start` line, too."""
        assert self.path is not None
        assert self._file is not None
        own_path = self.path.with_name(f"{self.path.name}.rank{self._rank}")
        with suppress(FileNotFoundError):
            own_path.replace(f"{own_path}.old")
        full_file, self._file = self._file, os.open(own_path, _OPEN_FLAGS, 0o666)
        os.close(full_file)
        self._bytes_left = self._max_bytes
        append_line(self._file, self._start_line)


def log_beside(freqplan: Path) -> Path:
    """Where the run log of a frequency plan's file is, if nobody says it."""
    stem = freqplan.name.removesuffix(".json").removesuffix(".freqplan")
    return freqplan.with_name(f"{stem}.jsonl")


def _open_or_warn(path: Path) -> int | None:
    try:
        descriptor = os.open(path, _OPEN_FLAGS, 0o666)
    except OSError as error:
        _logger.warning("%s: no run log: %s", path, error.strerror)
        return None
    if stat.S_ISFIFO(os.fstat(descriptor).st_mode):  # it would fill up, and nobody reads lines back
        os.close(descriptor)
        _logger.warning("%s: no run log: it is a pipe", path)
        return None
    return descriptor


# Lines as they are read


class LoggedLine(Model, extra="ignore"):
    """A line as it is read.

    Attributes:
        event: what happened.
        rank: global rank.
        plan_sha256: of a `start` line, the plan.json that is followed from then on.
        schema_id: of a `start` line, the version of the lines from then on.
        iterations: of an `end` line, and of a `killed` one for the run before, how many followed
            the plan, and how many did not, by the reason; absent in logs of older versions.
    """

    event: str
    rank: int
    plan_sha256: object = None
    schema_id: object = Field(None, alias="schema")
    iterations: dict[str, Index] | None = None


class LoggedStep(LoggedLine):
    """A `step` line as it is read.

    Attributes:
        stage: that the rank runs.
        step: its number, from 0.
        operations: times by kind of operation and clock.
    """

    stage: Index
    step: Index
    operations: list[OperationTimes]


def read_run_log(paths: Iterable[str | os.PathLike[str]]) -> Iterator[LoggedLine]:
    """Read the lines of run logs, one log after the other; `step` lines are LoggedSteps.

    A last line that was cut short, as a killed job leaves it, is passed over.

    Raises:
        InputError: a file cannot be read, or a line is not as RunLog writes it; says the line.
    """
    for path in paths:
        with stream(path, _LOG_LIMITS) as log:
            for number, text in enumerate(log, 1):
                if not text.endswith(b"\n"):
                    break
                try:
                    line = parse_line(json.loads(text))
                except (ValueError, RecursionError):
                    raise InputError(
                        "is not a line of a run log as the shim writes them", path=path, line=number
                    ) from None
                if line.event == RunStarted.event:
                    _refuse_unknown_version(line, path, number)
                yield line


def _refuse_unknown_version(start: LoggedLine, path: AnyPath, number: int) -> None:
    """Refuse a log whose lines may mean something else than is known here.

    Raises:
        InputError: it is of a later version, or of one that is not known; says the line.
    """
    refuse_later_version(start.schema_id, RUN_SCHEMA, path)
    if start.schema_id not in (None, RUN_SCHEMA):
        stated = shown(start.schema_id)
        problem = f"begins a run log of schema {stated}, not {shown(RUN_SCHEMA)}"
        raise InputError(problem, path=path, line=number)


def parse_line(document: object) -> LoggedLine:
    """A line of a run log from its JSON value.

    Raises:
        ValueError: it is none.
    """
    is_step = isinstance(document, dict) and document.get("event") == "step"
    model = LoggedStep if is_step else LoggedLine
    return model.model_validate(document)


def steps_of_plan(lines: Iterable[LoggedLine], sha256: str) -> Iterator[LoggedStep]:
    """The steps of runs that followed one plan; files may hold other runs too.

    Args:
        lines: of run logs, those of each rank in order.
        sha256: of the plan.json.
    """
    follows_plan: dict[int, bool] = {}
    for line in lines:
        if line.event == "start":
            follows_plan[line.rank] = line.plan_sha256 == sha256
        elif isinstance(line, LoggedStep) and follows_plan.get(line.rank, False):
            yield line


def iterations_of_plan(lines: Iterable[LoggedLine], sha256: str) -> dict[str, int]:
    """The iterations of runs that followed one plan, by their outcome; of the first rank.

    A run that was killed counts once the next one has said of it how many it had.

    Args:
        lines: of run logs, those of each rank in order.
        sha256: of the plan.json.
    """
    follows_plan: dict[int, bool] = {}
    iterations: dict[int, Counter[str]] = {}  # by rank
    for line in lines:
        if line.event == "start":
            follows_plan[line.rank] = line.plan_sha256 == sha256
        elif line.iterations is not None and follows_plan.get(line.rank, False):
            iterations.setdefault(line.rank, Counter()).update(line.iterations)
    return dict(iterations[min(iterations)]) if iterations else {}
