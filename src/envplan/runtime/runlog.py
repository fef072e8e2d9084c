"""The run log: what operations took, and whatever went wrong, as JSON lines off the hot path.

A line is one object with `event` and `rank`. `start` says which plan is followed; `step` has an
iteration's time (s) and, for each (instruction, chunk, MHz) of it, how many operations there were,
their mean and their least time (s), and after these their config, if they have one; `mismatch` and
`clock_error` say what happened; `end` counts them. Ranks may append to one file: each line is
whole, on network file systems as well. A rank that has written its share goes on in a file of its
own, NAME.rank3, and when that is full begins it anew and keeps the one before, NAME.rank3.old.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from queue import Full, Queue
from typing import Annotated, Any, Final

from pydantic import Field, Strict

from envplan._io.documents import Index, Model
from envplan._io.files import append_line, read_bounded
from envplan.errors import InputError

RUN_SCHEMA: Final = "envplan/run/v1"
MAX_LOG_BYTES: Final = 2**30

_WAITING_STEPS: Final = 256
_CLOSE_S: Final = 10.0
_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC

_logger = logging.getLogger("envplan.runtime")

_Seconds = Annotated[float, Field(ge=0, le=1e9)]


class _Line(Model, extra="ignore"):
    """What is read of every line."""

    event: str
    rank: int


class _StepLine(_Line):
    """What is read of a `step` line."""

    stage: Index
    step: Index
    operations: list[
        Annotated[tuple[str, Index, Index, Index, _Seconds, _Seconds], Strict(False)]
        | Annotated[tuple[str, Index, Index, Index, _Seconds, _Seconds, str], Strict(False)]
    ]


class RunLog:
    """Writes the log of one rank from a thread of its own; its callers never wait.

    Args:
        path: file to append to; None: nothing is written.
        rank: global rank, on every line.
        limit: bytes after which a rank goes on in another file.
    """

    def __init__(self, path: str | os.PathLike[str] | None, *, rank: int, limit: int) -> None:
        self._rank = rank
        self._limit = self._left = limit
        self._start = b""
        self._path = None if path is None else Path(path)
        self.dropped = 0
        self._file = None if path is None else _open(Path(path))
        self._queue: Queue[Callable[[], dict[str, Any]] | None] = Queue(_WAITING_STEPS)
        self._thread = threading.Thread(target=self._run, name="envplan-log", daemon=True)
        self._thread.start()

    def event(self, name: str, **facts: object) -> None:
        """Log that something happened."""
        line = {"event": name, "rank": self._rank, "time": time.time(), **facts}
        self.later(lambda: line)

    def later(self, make: Callable[[], dict[str, Any]]) -> None:
        """Log a line that is made in the thread; dropped and counted if that is far behind."""
        try:
            self._queue.put_nowait(make)
        except Full:
            self.dropped += 1

    def close(self, **facts: object) -> None:
        """Log the end and write what is waiting, for ten seconds at most."""
        end = {"event": "end", "rank": self._rank, "time": time.time(), **facts}
        with suppress(Full):
            self._queue.put(lambda: {**end, "dropped": self.dropped}, timeout=_CLOSE_S)
            self._queue.put(None, timeout=_CLOSE_S)
            self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        for make in iter(self._queue.get, None):
            try:
                self._write(make())
            except Exception as error:  # a log must not end what it is a log of
                if self._file is not None:
                    _logger.warning("the run log is given up: %s", error)
                    os.close(self._file)
                    self._file = None
        if self._file is not None:
            os.close(self._file)

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is None:
            return
        data = json.dumps(line).encode() + b"\n"
        if line["event"] == "start":
            self._start = data
        elif self._left <= 0:
            self._rotate()
        self._left -= len(data)
        append_line(self._file, data)

    def _rotate(self) -> None:
        """Go on in a file of this rank's own, which begins with the `start` line, too."""
        assert self._path is not None
        assert self._file is not None
        own = self._path.with_name(f"{self._path.name}.rank{self._rank}")
        with suppress(FileNotFoundError):
            own.replace(f"{own}.old")
        full, self._file = self._file, os.open(own, _FLAGS, 0o666)
        os.close(full)
        self._left = self._limit
        append_line(self._file, self._start)


def _open(path: Path) -> int | None:
    try:
        return os.open(path, _FLAGS, 0o666)
    except OSError as error:
        _logger.warning("%s: no run log: %s", path, error.strerror)
        return None


def read_run_log(paths: Iterable[str | os.PathLike[str]]) -> Iterator[dict[str, Any]]:
    """The lines of run logs, one after the other.

    A last line that was cut short, as a killed job leaves it, is passed over.

    Raises:
        InputError: a file cannot be read, or a line is not as RunLog writes it; says the line.
    """
    for path in paths:
        data = read_bounded(path, MAX_LOG_BYTES)
        whole, _, _cut = data.rpartition(b"\n")
        for number, text in enumerate(whole.splitlines(), 1):
            try:
                line = json.loads(text)
                is_step = isinstance(line, dict) and line.get("event") == "step"
                (_StepLine if is_step else _Line).model_validate(line)
            except (ValueError, RecursionError):
                raise InputError(
                    "is not a line of a run log as the shim writes them", path=path, line=number
                ) from None
            yield line


def steps_of_plan(lines: Iterable[Mapping[str, Any]], sha256: str) -> Iterator[Mapping[str, Any]]:
    """The `step` lines of runs that followed one plan; files may hold other runs too.

    Args:
        lines: of run logs, those of each rank in order.
        sha256: of the plan.json.
    """
    following: dict[int, bool] = {}
    for line in lines:
        if line["event"] == "start":
            following[line["rank"]] = line.get("plan_sha256") == sha256
        elif line["event"] == "step" and following.get(line["rank"], False):
            yield line
