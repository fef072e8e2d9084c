"""The file of a run log, to which all ranks append lines.

Each line is whole, on network file systems as well. A rank that has written its share goes on in a
file of its own, NAME.rank3, and when that is full begins it anew and keeps the one before,
NAME.rank3.old.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

from envplan._io.files import append_line

__all__ = ["RunLogFile", "log_beside"]

_OPEN_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC


class RunLogFile:
    """Where one rank appends its lines: first the common file, then files of its own.

    Args:
        path: of the common file.
        rank: global rank.
        max_bytes: of this rank's lines in the common file, and in each of its own.

    Raises:
        OSError: the file cannot be opened, or is a pipe.
    """

    def __init__(self, path: Path, *, rank: int, max_bytes: int) -> None:
        self._path = path
        self._rank = rank
        self._max_bytes = max_bytes
        self._num_bytes_left = max_bytes
        self._start_line = b""
        self._descriptor = _open(path)
        if stat.S_ISFIFO(os.fstat(self._descriptor).st_mode):
            self.close()  # it would fill up, and nobody reads lines back
            raise OSError(errno.ESPIPE, "it is a pipe")

    def append_start(self, line: bytes) -> None:
        """Append the line that every further file of this rank begins with.

        Raises:
            OSError: the disk is full or fails.
        """
        self._start_line = line
        self._append(line)

    def append(self, line: bytes) -> None:
        """Append a line, in the next file if this one is full.

        Raises:
            OSError: the disk is full or fails.
        """
        if self._num_bytes_left <= 0:
            self._rotate()
        self._append(line)

    def close(self) -> None:
        """Close the file; nothing can be appended after that."""
        with suppress(OSError):  # the training may have closed all descriptors
            os.close(self._descriptor)

    def _append(self, line: bytes) -> None:
        self._num_bytes_left -= len(line)
        append_line(self._descriptor, line)

    def _rotate(self) -> None:
        """Go on in a file of this rank's own, and keep the one before."""
        own_path = self._path.with_name(f"{self._path.name}.rank{self._rank}")
        with suppress(FileNotFoundError):
            own_path.replace(f"{own_path}.old")
        full_file, self._descriptor = self._descriptor, _open(own_path)
        os.close(full_file)
        self._num_bytes_left = self._max_bytes
        append_line(self._descriptor, self._start_line)


def log_beside(freqplan: Path) -> Path:
    """Where the run log of a frequency plan's file is, if nobody says it."""
    stem = freqplan.name.removesuffix(".json").removesuffix(".freqplan")
    return freqplan.with_name(f"{stem}.jsonl")


def _open(path: Path) -> int:
    """A descriptor for reading and appending.

    Raises:
        OSError: the file cannot be opened.
    """
    return os.open(path, _OPEN_FLAGS, 0o666)
