"""The run log: what operations took, and whatever went wrong, as JSON lines off the hot path.

What the lines say is in run_records.py, which files they are in in run_log_file.py, how they are
read in run_log_reader.py. This is the thread that makes and writes them.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from queue import Full, Queue
from typing import Final

from envplan.runtime.run_log_file import RunLogFile
from envplan.runtime.run_records import RunEnded, RunEvent, RunRecord, RunStarted

#: Lines that wait for the thread; further ones are dropped.
MAX_WAITING_LINES: Final = 256
#: How long `close` waits for the thread, s.
CLOSE_TIMEOUT_S: Final = 10.0

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
        self.path = None if path is None else Path(path)
        self._file: RunLogFile | None = None
        if self.path is not None:
            self._file = _open_or_warn(self.path, rank=rank, max_bytes=max_bytes)
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
            self._file.close()
            self._file = None

    def _write(self, record: RunRecord) -> None:
        if self._file is None:
            return
        line = json.dumps(record.to_dict()).encode() + b"\n"
        if isinstance(record, RunStarted):
            self._file.append_start(line)
        else:
            self._file.append(line)


def _open_or_warn(path: Path, *, rank: int, max_bytes: int) -> RunLogFile | None:
    try:
        return RunLogFile(path, rank=rank, max_bytes=max_bytes)
    except OSError as error:
        _logger.warning("%s: no run log: %s", path, error.strerror)
        return None
