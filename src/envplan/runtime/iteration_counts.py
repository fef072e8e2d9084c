"""Counts of iterations that outlive a process which is killed.

Lines of the run log are written when an iteration has been measured, a little after it is over, so
a killed run leaves some out. Each rank also counts its iterations in a few bytes of shared memory:
a file in this user's folder of lock files, removed when the run ends. Where the next run of the
rank, with the same log and on the same node, finds it, the log gets a `killed` line with the
counts. A node that was started anew has no such file, and its log does not say them.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import struct
from contextlib import suppress
from pathlib import Path
from typing import Final

from envplan.devices.locks import lock_folders
from envplan.runtime.plan_follower import IterationOutcome

__all__ = ["IterationCounts"]

#: What the file begins with; then a number of 8 bytes for each outcome.
_MAGIC: Final = b"envplan1"
_NUMBERS: Final = struct.Struct(f"={len(IterationOutcome)}Q")
_SIZE: Final = len(_MAGIC) + _NUMBERS.size


class IterationCounts:
    """How many iterations of a run there were, by their outcome.

    Args:
        path: of the file; None, or a file that another process counts in: nothing outlives this
            one.

    Attributes:
        of_killed_run: the counts that the run before has left, which was killed; None: it was not.
    """

    def __init__(self, path: Path | None) -> None:
        self.of_killed_run: dict[str, int] | None = None
        self._numbers = dict.fromkeys(IterationOutcome, 0)
        self._memory: mmap.mmap | bytearray = bytearray(_SIZE)
        self._path: Path | None = None
        self._descriptor: int | None = None
        if path is not None:
            try:
                self._open(path)
            except (OSError, ValueError):
                self._close_descriptor()

    @classmethod
    def of_rank(cls, log: Path | None, rank: int) -> IterationCounts:
        """The counts of a rank that writes a run log.

        Args:
            log: path of the log; None: there is none, and so nothing outlives a kill.
            rank: global rank.
        """
        folders = lock_folders(os.geteuid())
        if log is None or not folders:
            return cls(None)
        name = hashlib.sha256(f"{rank} {log.absolute()}".encode()).hexdigest()[:16]
        return cls(folders[0] / f"{name}.iterations")

    def add(self, outcome: IterationOutcome) -> None:
        """An iteration is over."""
        self._numbers[outcome] += 1
        _NUMBERS.pack_into(self._memory, len(_MAGIC), *self._numbers.values())

    def by_outcome(self) -> dict[str, int]:
        """How many there were, by their outcome in words; without those that did not occur."""
        return {outcome.value: number for outcome, number in self._numbers.items() if number}

    def close(self) -> None:
        """The run has ended, and its log says the counts."""
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)
            self._path = None
        self._close_descriptor()

    def _open(self, path: Path) -> None:
        """Share the counts through a file, after a look at what is in it.

        Raises:
            OSError: it cannot be used, or another process uses it.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        # It stays open, and so locked, for as long as the run goes on.
        self._descriptor = descriptor = os.open(path, flags, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.of_killed_run = _counts_in(os.pread(descriptor, _SIZE, 0))
        os.posix_fallocate(descriptor, 0, _SIZE)  # memory without a place would be a SIGBUS
        self._memory = mmap.mmap(descriptor, _SIZE)
        self._memory[:] = _MAGIC + bytes(_NUMBERS.size)
        self._path = path

    def _close_descriptor(self) -> None:
        if self._descriptor is not None:
            with suppress(OSError):  # the training may have closed all descriptors
                os.close(self._descriptor)
            self._descriptor = None


def _counts_in(data: bytes) -> dict[str, int] | None:
    """The counts in a file by outcome in words; None where there are none."""
    if len(data) != _SIZE or not data.startswith(_MAGIC):
        return None
    numbers = _NUMBERS.unpack_from(data, len(_MAGIC))
    counts = zip(IterationOutcome, numbers, strict=True)
    return {outcome.value: number for outcome, number in counts if number}
