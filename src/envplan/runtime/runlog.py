"""The run log: what operations took, and whatever went wrong, as JSON lines off the hot path.

What the lines say is in run_records.py, how they are read in run_log_reader.py. Ranks may append to
one file: each line is whole, on network file systems as well. A rank that has written its share
goes on in a file of its own, NAME.rank3, and when that is full begins it anew and keeps the one
before, NAME.rank3.old.
"""

from __future__ import annotations

import json
import logging
import os
import stat
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from queue import Full, Queue
from typing import Final

from envplan._io.files import append_line
from envplan.runtime.run_records import RunEnded, RunEvent, RunRecord, RunStarted

#: Lines that wait for the thread; further ones are dropped.
MAX_WAITING_LINES: Final = 256
#: How long `close` waits for the thread, s.
CLOSE_TIMEOUT_S: Final = 10.0
_OPEN_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC

_logger = logging.getLogger("envplan.runtime")


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
