"""The marks of guards, as others see them: which GPUs are in use, and which were left set."""

from __future__ import annotations

import fcntl
import os
import pwd
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from envplan.devices.locks import MARK_BYTES, Mark, lock_folders

__all__ = ["FoundMark", "find_marks", "hidden_lock_folders", "user_name", "users_with_folders"]


@dataclass(frozen=True)
class FoundMark:
    """A mark that a guard has, or had, on a GPU.

    Attributes:
        user: of the guard.
        mark: the mark.
        is_held: whether its guard still has the file locked.
    """

    user: int
    mark: Mark
    is_held: bool


def find_marks(uuid: str) -> Iterator[FoundMark]:
    """The marks on a GPU of this user's guards, and of others' whose files he may read."""
    for user in sorted(users_with_folders()):
        for folder in lock_folders(user):
            with suppress(OSError):
                found = _read_mark(folder / f"{uuid}.lock", user)
                if found is not None:
                    yield found


def _read_mark(path: Path, user: int) -> FoundMark | None:
    """The mark in a lock file; None: there is none.

    Raises:
        OSError: there is no such file, or this user may not read it.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mark = Mark.parse(os.read(descriptor, MARK_BYTES))
        if mark is None:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return FoundMark(user, mark, is_held=True)
        return FoundMark(user, mark, is_held=False)
    finally:
        os.close(descriptor)


def users_with_folders() -> set[int]:
    """This user, root, and all others that may have a folder for lock files."""
    users = {os.geteuid(), 0}
    for folder in Path("/tmp").glob("envplan-*"):
        with suppress(OSError):
            users.add(folder.lstat().st_uid)
    return users


def hidden_lock_folders() -> list[Path]:
    """The folders with lock files of other users that this user may not read."""
    folders = [folder for user in users_with_folders() for folder in lock_folders(user)]
    return [folder for folder in folders if not os.access(folder, os.R_OK | os.X_OK)]


def user_name(user: int) -> str:
    """The name of a user, or the number of one that has none here."""
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return f"user {user}"
