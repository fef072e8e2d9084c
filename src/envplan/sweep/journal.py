"""What a sweep has done, line by line on the disk, so that nothing is done twice.

A journal is JSON lines: a header, then for each finished point its key and its row. It is only ever
appended to, and every line is on the disk before the next point is reported. A process that is
killed leaves at most a torn last line, which is cut off when the journal is opened again.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Final, Self

from envplan._files import append_whole
from envplan._model import Model
from envplan.errors import InputError
from envplan.sweep.table import Row

__all__ = ["Journal"]

_HEADER: Final = b'{"schema": "envplan/sweep-journal/v1"}'


class _Entry(Model):
    """A finished point.

    Attributes:
        final: the same point would end the same way again, so it need not be tried again.
    """

    key: str
    final: bool
    row: Row


class Journal:
    """An open journal, which no other process can write to at the same time.

    Args:
        path: the file; it is created where there is none.
        fresh: forget what an earlier sweep has done.

    Attributes:
        rows: by key, of all points that need not be done again.

    Raises:
        InputError: the file cannot be written, another sweep has it open, or it is no journal
            (names the line).
    """

    def __init__(self, path: str | os.PathLike[str], *, fresh: bool = False) -> None:
        self.path = Path(path)
        self.rows: dict[str, Row] = {}
        try:
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise InputError(f"cannot be written ({reason})", path=path) from None
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._read(fresh)
        except OSError:
            os.close(self._descriptor)
            raise InputError(
                "another sweep is writing to it; wait for it, or choose another output", path=path
            ) from None
        except BaseException:
            os.close(self._descriptor)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        os.close(self._descriptor)

    def append(self, key: str, row: Row, *, final: bool) -> None:
        """Put a finished point on the disk; when this returns, it is there."""
        document = _Entry(key=key, final=final, row=row).model_dump(exclude_none=True)
        self._write(json.dumps(document, allow_nan=False).encode())

    def _read(self, fresh: bool) -> None:
        data = self.path.read_bytes()
        whole = data.rfind(b"\n") + 1
        header, *lines = data[:whole].splitlines() or [data]
        number = 1
        try:
            if header not in (_HEADER, _HEADER[: len(data)]):
                raise ValueError
            for line in lines:
                number += 1
                entry = _Entry.model_validate_json(line)
                if entry.final:
                    self.rows[entry.key] = entry.row
        except ValueError:
            raise InputError(
                "is not a line of a sweep's journal; choose another output, or delete this file to "
                "start anew",
                path=self.path,
                line=number,
            ) from None
        if fresh:
            self.rows.clear()
            whole = 0
        os.ftruncate(self._descriptor, whole)
        if whole == 0:
            self._write(_HEADER)

    def _write(self, line: bytes) -> None:
        try:
            append_whole(self._descriptor, line + b"\n")
        except OSError as error:
            raise InputError(f"cannot be written ({error.strerror})", path=self.path) from error
