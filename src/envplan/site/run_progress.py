"""How far a running job is, and which orders its ranks follow, by the end of its run log."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from envplan._io.files import open_regular
from envplan.errors import InputError
from envplan.runtime.order_reader import OrderFollowed
from envplan.runtime.run_records import RunStarted

__all__ = ["Acknowledgement", "RunProgress"]

#: Bytes at the end of a log that are read where nothing was read before.
_TAIL_BYTES: Final = 256 * 2**10
#: Bytes of a log that are read at a time.
_MOST_BYTES: Final = 64 * 2**20


class Acknowledgement(NamedTuple):
    """A rank says that it follows an order.

    Attributes:
        sequence: of the order.
        late: iterations since the one that the order names.
        time: when the rank began to follow it, s since 1970.
    """

    sequence: int
    late: int
    time: float


class RunProgress:
    """The latest run of a job, as far as its ranks have logged it; `update` reads on.

    A rank goes on in a file of its own, NAME.rank3, once its share of the log is full. Such a file
    begins with the line that says when the run began, which counts in the log alone.

    Args:
        log: of the run; it need not exist yet.

    Attributes:
        last_iteration: that a rank has logged, from 0; -1: none.
        iteration_time_s: of that iteration.
        acknowledged: the latest acknowledgement of each rank.
    """

    def __init__(self, log: Path) -> None:
        self.last_iteration = -1
        self.iteration_time_s = 0.0
        self.acknowledged: dict[int, Acknowledgement] = {}
        self._log = log
        #: How far each file was read, bytes.
        self._read_to: dict[Path, int] = {}

    def update(self) -> None:
        """Take into account what was logged since; of a log that is new here, only its end."""
        modified_ns = _modified_ns(self._log)
        for line in self._new_lines(self._log):
            self._note(line)
        for own_log in sorted(self._log.parent.glob(f"{self._log.name}.rank*")):
            if own_log.suffix == ".old" or _modified_ns(own_log) < modified_ns:
                continue  # full, or of an earlier run
            for line in self._new_lines(own_log):
                if line.get("event") != RunStarted.event:
                    self._note(line)

    def _note(self, line: dict[str, Any]) -> None:
        """Take a line of the log into account; one that no shim writes is passed over."""
        try:
            rank = int(line["rank"])
            match line["event"]:
                case RunStarted.event:
                    self.last_iteration = -1
                    self.acknowledged.pop(rank, None)
                case OrderFollowed.event:
                    self.acknowledged[rank] = Acknowledgement(
                        int(line["sequence"]),
                        int(line["late"]),
                        float(line["time"]),
                    )
                case "step" if int(line["step"]) >= self.last_iteration:
                    self.last_iteration = int(line["step"])
                    self.iteration_time_s = float(line["iteration_s"])
        except (KeyError, TypeError, ValueError):
            return

    def _new_lines(self, path: Path) -> Iterator[dict[str, Any]]:
        """The whole lines of a file that are new and JSON objects; none if it cannot be read."""
        try:
            with open_regular(path) as file:
                size = file.seek(0, 2)
                begin = self._read_to.get(path, max(0, size - _TAIL_BYTES))
                if begin > size:
                    begin = 0  # it was begun anew
                file.seek(begin)
                data = file.read(_MOST_BYTES)
        except (OSError, InputError):
            return
        whole_lines, end, _cut_line = data.rpartition(b"\n")
        self._read_to[path] = begin + len(whole_lines) + len(end)
        for text in whole_lines.split(b"\n"):
            try:
                line = json.loads(text)
            except (ValueError, RecursionError):
                continue  # such as the first one of an end
            if isinstance(line, dict):
                yield line


def _modified_ns(path: Path) -> int:
    """When a file was modified, ns since 1970; 0 where there is none."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
