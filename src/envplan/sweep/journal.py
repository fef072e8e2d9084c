"""What a sweep has done, line by line on the disk, so that nothing is done twice.

A journal is JSON lines: a header, then for each finished point its key and its row. It is only ever
appended to, and every line is on the disk before the next point is reported. A process that is
killed leaves at most a torn last line, which is cut off when the journal is opened again.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Final, NamedTuple

from envplan._files import AnyPath, append_whole, check_writable
from envplan._model import Model
from envplan.errors import InputError
from envplan.sweep.table import Row

__all__ = ["Journal", "open_journal"]

_HEADER: Final = b'{"schema": "envplan/sweep-journal/v1"}\n'


class _Entry(Model):
    """A finished point.

    Attributes:
        final: the same point would end the same way again, so it need not be tried again.
    """

    key: str
    final: bool
    row: Row


class Journal(NamedTuple):
    """An open journal, which no other process can write to at the same time.

    Attributes:
        rows: by key, of all points that need not be done again.
    """

    file: FileIO
    rows: dict[str, Row]

    def append(self, key: str, row: Row, *, final: bool) -> None:
        """Put a finished point on the disk; when this returns, it is there."""
        entry = _Entry(key=key, final=final, row=row)
        self.write(entry.model_dump_json(exclude_none=True).encode() + b"\n")

    def write(self, line: bytes) -> None:
        """Put a line on the disk."""
        try:
            append_whole(self.file.fileno(), line)
        except OSError as error:
            reason = f"cannot be written ({error.strerror})"
            raise InputError(reason, path=self.file.name) from error


@contextmanager
def open_journal(path: AnyPath, *, fresh: bool = False) -> Iterator[Journal]:
    """The journal at a path, which is created where there is none.

    Args:
        fresh: forget what an earlier sweep has done.

    Raises:
        InputError: the file cannot be written, another sweep has it open, or it is no journal
            (names the line).
    """
    check_writable(path)
    with Path(path).open("a+b", buffering=0) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            words = "another sweep is writing to it; wait for it, or choose another output"
            raise InputError(words, path=path) from None
        file.seek(0)
        header, *lines = file.readall().splitlines(keepends=True) or [b""]
        read: list[_Entry] = []
        try:
            if not _HEADER.startswith(header):
                raise ValueError
            for line in lines:
                if line.endswith(b"\n"):
                    read.append(_Entry.model_validate_json(line))
        except ValueError:
            words = "is not a line of a sweep's journal; choose another output, or delete this file"
            number = len(read) + 2 if _HEADER.startswith(header) else 1
            raise InputError(f"{words} to start anew", path=path, line=number) from None
        whole = [] if fresh else [one for one in (header, *lines) if one.endswith(b"\n")]
        file.truncate(sum(map(len, whole)))
        journal = Journal(file, {} if fresh else {one.key: one.row for one in read if one.final})
        if not whole:
            journal.write(_HEADER)
        yield journal
