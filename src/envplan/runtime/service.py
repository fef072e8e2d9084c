"""The service `envplan guard`: gives back the clocks that killed trainings left set.

A guard gives a clock back when its owner dies, and the owner when the guard dies. Where both are
killed together, what remains is a lock file with a mark that nobody has locked. The service looks
for these once a second and gives back what they say, in a process of its own for each user.

Root serves all users. What a user's lock files ask for is done with that user's rights and no
others: whoever writes a lock file by hand gets nothing that he could not have done himself. The
driver is opened only where there is something to give back.
"""

from __future__ import annotations

import fcntl
import os
import pwd
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from functools import partial
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Final, NamedTuple

from envplan.devices import (
    BACKENDS,
    Device,
    DeviceError,
    PermissionDeniedError,
    backend_class,
    call_with_timeout,
    opened,
)
from envplan.devices.locks import (
    HANG_MARGIN_S,
    MARK_BYTES,
    LockFile,
    Mark,
    left_in_words,
    lock_folders,
    retry_driver_call,
)
from envplan.devices.marks import users_with_folders

__all__ = ["Service", "give_back_left_behind", "unit_file"]

#: For how long a GPU is tried, s.
DRIVER_TIMEOUT_S: Final = 10.0
#: How long a clock is left alone that could not be given back, s.
_PAUSE_S: Final = 30.0

_UNIT: Final = """\
# /etc/systemd/system/envplan-guard.service, printed by: envplan guard --unit
[Unit]
Description=Give back the GPU clocks that killed training jobs left set
After=nvidia-persistenced.service zeusd.service
StartLimitIntervalSec=0

[Service]
ExecStart={command} guard
{environment}Restart=always
RestartSec=1s
# It sets clocks as root does, and becomes the users whose lock files it works for.
CapabilityBoundingSet=CAP_SYS_ADMIN CAP_SETUID CAP_SETGID CAP_DAC_OVERRIDE CAP_KILL
NoNewPrivileges=yes
ProtectSystem=full
ProtectHome=read-only
# The lock files are in /run/envplan and in the /tmp that all users see.
PrivateTmp=no

[Install]
WantedBy=multi-user.target

# Where Slurm kills all processes of a job, an epilog is enough (Epilog= in slurm.conf):
#   #!/bin/sh
#   {command} guard --once
"""


def give_back_left_behind(
    files: Sequence[Path], say: Callable[[str], object], timeout_s: float
) -> bool:
    """Give back what dead guards of this user left set, all GPUs at once, each on its own.

    Args:
        files: with their marks; one at least.
        say: is told of each GPU in a line, but for GPUs that are not there any more.
        timeout_s: for how long a GPU that cannot be reached, or fails, is tried.

    Returns:
        Whether all of it could be given back.
    """

    def give_back(file: Path) -> str | None:
        restore = partial(retry_driver_call, partial(_restore_if_left_behind, file), timeout_s)
        return call_with_timeout(timeout_s + HANG_MARGIN_S, restore, file.stem)

    all_given_back = True
    with ThreadPoolExecutor(len(files)) as pool:
        results = {pool.submit(give_back, file): file for file in files}
        for future in as_completed(results):
            try:
                result = future.result()
            except DeviceError as error:
                name = results[future].stem
                result = f"{name}: its clock was left set and cannot be given back: {error}"
                all_given_back = False
            if result is not None:
                say(result)
    return all_given_back


def _restore_if_left_behind(file: Path) -> str | None:
    """Give one GPU's clock back, if its mark is still that of a dead guard.

    Opens and closes the file itself: where the driver hangs, this goes on when nobody waits for it
    any more, and a descriptor that others had closed might be another GPU's file by then.

    Returns:
        What was done, in a line; None: there was nothing to do.
    """
    with LockFile(file.stem, file.parent) as lock:
        mark = lock.mark
        if mark is None or not lock.acquire():
            return None
        return _restore(lock, mark)


def _restore(lock: LockFile, mark: Mark) -> str | None:
    """Give back the clock of a GPU whose lock is ours.

    Raises:
        PermissionDeniedError: the mark cannot be followed, so trying again does not help.
        DeviceError: the GPU cannot be reached, or fails; says at which clock it is left.
    """
    if mark.backend not in BACKENDS:
        raise PermissionDeniedError(f"there is no backend {mark.backend!r}")
    unreachable: DeviceError | None = None
    options = {"path": mark.socket} if mark.socket else {}
    with opened(mark.backend, **options) as source:
        for device in source.devices():
            try:
                info = device.info
            except DeviceError as error:
                unreachable = error
                continue
            if info.uuid == lock.uuid:
                _restore_or_say_where_it_is_left(lock, device)
                result = "given back"
                if mark.previous_mhz:
                    result = f"set to {mark.previous_mhz} MHz as before"
                return f"GPU {info.index} ({info.name}): {result}; a killed training had left it"
    if unreachable is not None:  # it may be this one
        raise DeviceError(f"{unreachable}; it is left at a clock that cannot be read")
    return None  # the GPU is not there any more


def _restore_or_say_where_it_is_left(lock: LockFile, device: Device) -> None:
    try:
        lock.restore(device)
    except PermissionDeniedError as error:
        left = left_in_words(device, device.info.index)
        raise PermissionDeniedError(
            f"{error}; {left}; an administrator must run: envplan reset"
        ) from error
    except DeviceError as error:
        raise DeviceError(f"{error}; {left_in_words(device, device.info.index)}") from error


class _LeftBehind(NamedTuple):
    """A clock that a dead guard left set.

    Attributes:
        file: with its mark.
        marked_ns: when the mark was written, ns since 1970.
    """

    file: Path
    marked_ns: int


class Service:
    """Looks after the lock files of this user; for root, of all users.

    For each user with clocks to give back there is a child process, which becomes that user.

    Args:
        say: is told of each GPU in a line, in a child process.
        timeout_s: for how long a GPU is tried before that is told.
    """

    def __init__(self, say: Callable[[str], object], timeout_s: float = DRIVER_TIMEOUT_S) -> None:
        for name in BACKENDS:  # now, as those that it becomes may not be able to read these files
            backend_class(name)
        self._say = say
        self._timeout_s = timeout_s
        self._children: dict[int, BaseProcess] = {}  # by user
        self._try_again_at: dict[_LeftBehind, float] = {}

    def look(self) -> None:
        """See to the users that have clocks to give back, without waiting for it."""
        for user in self._users():
            child = self._children.get(user)
            if child is not None and child.is_alive():
                continue
            files = self._files_to_try(user)
            if files:
                child = get_context("fork").Process(target=self._serve, args=(user, files))
                child.start()
                self._children[user] = child

    @staticmethod
    def _users() -> set[int]:
        """This user, and for root all others that may have a folder for locks."""
        user = os.geteuid()
        return {user} if user else users_with_folders()

    def finish(self, seconds: float) -> bool:
        """Wait until all has been given back; whether it has."""
        deadline = time.monotonic() + seconds
        for child in self._children.values():
            child.join(max(0.0, deadline - time.monotonic()))
        return all(child.exitcode == 0 for child in self._children.values())

    def _files_to_try(self, user: int) -> list[Path]:
        """The files of clocks that a user's guards left set, but for those tried just now."""
        now = time.monotonic()
        for left_behind, time_s in list(self._try_again_at.items()):
            if now >= time_s:
                del self._try_again_at[left_behind]
        files = []
        for left_behind in _find_left_behind(user):
            if left_behind not in self._try_again_at:
                self._try_again_at[left_behind] = now + _PAUSE_S
                files.append(left_behind.file)
        return files

    def _serve(self, user: int, files: Sequence[Path]) -> None:
        """Give a user's clocks back with his rights. Runs in a child process."""
        try:
            _become(user)
            all_given_back = give_back_left_behind(files, self._say, self._timeout_s)
        except OSError as error:
            self._say(f"the clocks of user {user} cannot be given back: {error}")
            all_given_back = False
        sys.exit(0 if all_given_back else 1)


def _find_left_behind(user: int) -> Iterator[_LeftBehind]:
    """Find marks of guards that are dead, or stopped and without their owner. Changes nothing."""
    for folder in lock_folders(user):
        for file in sorted(folder.glob("*.lock")):
            with suppress(OSError):
                marked_ns = _left_behind_since(file)
                if marked_ns is not None:
                    yield _LeftBehind(file, marked_ns)


def _left_behind_since(file: Path) -> int | None:
    """When the mark in a lock file was written, ns since 1970; None: there is none.

    Raises:
        OSError: it cannot be read, or a guard that works has it locked.
    """
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mark = Mark.parse(os.read(descriptor, MARK_BYTES))
        if mark is None:
            return None
        if not mark.orphaned:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return os.fstat(descriptor).st_mtime_ns
    finally:
        os.close(descriptor)


def _become(user: int) -> None:
    """Go on with a user's rights and no others."""
    if user == os.geteuid():
        return
    try:
        entry = pwd.getpwuid(user)
        os.initgroups(entry.pw_name, entry.pw_gid)
        os.setgid(entry.pw_gid)
    except KeyError:  # of a container, for example
        os.setgroups([])
        os.setgid(user)
    os.setuid(user)


def unit_file() -> str:
    """A systemd unit that runs the service with this installation, and a Slurm epilog."""
    command = Path(sys.executable).with_name("envplan")
    socket = os.environ.get("ZEUSD_SOCK_PATH")
    environment = f"Environment=ZEUSD_SOCK_PATH={socket}\n" if socket else ""
    return _UNIT.format(command=command, environment=environment)
