"""One guard for a GPU: lock files, and giving back the clocks that guards left set.

Each guard locks a file, one per user and GPU, and keeps its own number in it for as long as it may
have set the clock. The kernel unlocks what a dead process had locked, so a file that is unlocked
and not empty means a clock left behind.

All processes of a user find the same files, whatever their environment says: root in /run/envplan,
where nobody else can put anything, others in /tmp/envplan-UID, which must be theirs alone.
"""

from __future__ import annotations

import fcntl
import os
import signal
import stat
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from envplan.devices import Device, DeviceError, PermissionDeniedError, within

__all__ = ["GivenBack", "LockFile", "give_back", "give_back_all", "insist", "recover"]

RETRY_S: Final = 0.05
_LAST_TRIES: Final = 40
_PATIENCE_S: Final = 10.0
#: How long a guard is waited for whose owner lives, s.
_LIVING_S: Final = 1.0


class LockFile:
    """The mark that some guard of this user has, or had, a GPU's clock.

    Args:
        uuid: of the GPU.

    Raises:
        DeviceError: the folder for such files cannot be used.
    """

    def __init__(self, uuid: str) -> None:
        self.path = _lock_folder() / f"{uuid}.lock"
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self._descriptor = os.open(self.path, flags, 0o600)
        except OSError as error:
            raise DeviceError(f"{self.path}: {error.strerror}; remove it") from error

    def acquire(self, wait: float = 0.0) -> bool:
        """Take it; False if another process has it. A dead process has nothing.

        Args:
            wait: for a guard that is about to end because its owner did, s.
        """
        begun = time.monotonic()
        while True:
            with suppress(BlockingIOError):
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            holder, orphaned = self.holder, self.orphaned
            if holder and orphaned:
                # One that was stopped does not see that its owner has died.
                with suppress(OSError):
                    os.kill(holder, signal.SIGCONT)
            ending = orphaned or holder is None
            if time.monotonic() - begun >= (wait if ending else min(wait, _LIVING_S)):
                return False
            time.sleep(RETRY_S)

    @property
    def holder(self) -> int | None:
        """The guard that marked it, dead or alive; None if it is not marked."""
        return self._marks()[0]

    @property
    def orphaned(self) -> bool:
        """Whether the guard that marked it lives, and the process it works for does not."""
        guard, owner = self._marks()
        return bool(guard and owner) and _parent(guard or 0) not in (None, owner)

    def mark(self, owner: int) -> None:
        """From here on the clock may be set, by this process, for its owner."""
        self.clear()
        os.pwrite(self._descriptor, f"{os.getpid()} {owner}\n".encode(), 0)

    def clear(self) -> None:
        """The clock was given back."""
        os.ftruncate(self._descriptor, 0)

    def close(self) -> None:
        """Let go of it."""
        os.close(self._descriptor)

    def _marks(self) -> tuple[int | None, int]:
        """The guard and its owner; of what else may be there, 0."""
        words = os.pread(self._descriptor, 64, 0).decode("ascii", "replace").split()
        guard, owner, *_ = [*(int(word) if word.isdecimal() else 0 for word in words), 0, 0]
        return (guard if words else None), owner


@dataclass(frozen=True)
class GivenBack:
    """What became of one GPU's clock.

    Attributes:
        index: of the GPU.
        name: of the GPU; empty where the driver does not say.
        left_behind: whether a guard that was killed had left it set.
        guard: a guard that lives and will set it again, or None.
        problem: why it could not be given back, or None.
    """

    index: int
    name: str = ""
    left_behind: bool = False
    guard: int | None = None
    problem: str | None = None


def give_back_all(devices: Sequence[Device]) -> list[GivenBack]:
    """Give every GPU's clock back by hand; one that fails or hangs does not stop the others.

    Args:
        devices: all GPUs of a backend, by index.
    """
    return [_give_back_soon(index, device) for index, device in enumerate(devices)]


def give_back(device: Device) -> GivenBack:
    """Give a GPU's clock back by hand, and forget the guard that left it set.

    It is given back first: that does not depend on any file.

    Raises:
        DeviceError: the driver does not do it.
    """
    insist(device.reset_clock)
    info = device.info
    try:
        lock = LockFile(info.uuid)
    except DeviceError:
        return GivenBack(info.index, info.name)
    try:
        free, holder = lock.acquire(), lock.holder
        if free and holder is not None:
            insist(device.reset_clock)  # whatever was set until the lock was ours
            lock.clear()
        return GivenBack(
            index=info.index,
            name=info.name,
            left_behind=free and holder is not None,
            guard=None if free else holder,
        )
    finally:
        lock.close()


def recover(device: Device) -> None:
    """Give a GPU's clock back in the place of a guard that was killed.

    Not if another guard has taken the GPU since, which has then done so.

    Raises:
        DeviceError: the driver does not do it.
    """
    lock = LockFile(device.info.uuid)
    try:
        if lock.acquire() and lock.holder is not None:
            insist(device.reset_clock)
            lock.clear()
    finally:
        lock.close()


def insist(reset: Callable[[], None]) -> None:
    """Give a clock back though the driver may fail for a while.

    Raises:
        DeviceError: it failed every time.
    """
    for tries_left in reversed(range(_LAST_TRIES)):
        try:
            return reset()
        except PermissionDeniedError:
            raise
        except DeviceError:
            if not tries_left:
                raise
            time.sleep(RETRY_S)
    return None


def _give_back_soon(index: int, device: Device) -> GivenBack:
    try:
        return within(_PATIENCE_S, lambda: give_back(device), f"GPU {index}")
    except DeviceError as error:
        return GivenBack(index, problem=str(error))


def _lock_folder() -> Path:
    """Where this user's lock files are: a folder that nobody else can write to.

    Raises:
        DeviceError: there is none.
    """
    user = os.geteuid()
    problem = ""
    for folder in _lock_folders(user):
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            found = folder.lstat()
        except OSError as error:
            problem = f"{folder}: {error.strerror}"
            continue
        if stat.S_ISDIR(found.st_mode) and found.st_uid == user and not found.st_mode & 0o022:
            return folder
        problem = f"{folder} is not a folder of this user alone; remove it"
    raise DeviceError(f"there is no place for the locks of GPUs: {problem}")


def _lock_folders(user: int) -> list[Path]:
    """By preference. The second is for a root without a /run to write to."""
    return [*([Path("/run/envplan")] if user == 0 else []), Path(f"/tmp/envplan-{user}")]


def _parent(pid: int) -> int | None:
    """The parent of a guard; None if there is no such guard."""
    process = Path(f"/proc/{pid}")
    try:
        if b"envplan.runtime.guard" not in (process / "cmdline").read_bytes():
            return None
        return int((process / "stat").read_text().rpartition(") ")[2].split()[1])
    except (OSError, ValueError):
        return None
