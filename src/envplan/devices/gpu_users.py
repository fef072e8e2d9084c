"""Others who use a GPU, and whether one of them may have set its clock.

Trainings of one user that see the same lock files exclude each other by these (see `locks`).
Others cannot be excluded: those of other users, and those of containers, which have lock files of
their own. They are found as processes that compute on the GPU. The driver lists these by the
numbers that the caller's PID namespace gives them. Some drivers list the host's numbers instead,
and some list nothing in a container, so:

- A process that cannot be found by its number counts as somebody else's.
- Whether nobody else is there is known outside of containers only.

A clock that a GPU is held at is an administrator's only where no guard of envplan can have set it;
`may_be_set_by_a_guard` says whether one can.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from envplan.devices import Device, DeviceError
from envplan.devices.locks import RETRY_S
from envplan.devices.marks import find_marks, hidden_lock_folders, user_name

__all__ = [
    "may_be_set_by_a_guard",
    "others_computing",
    "process_in_words",
    "wait_until_alone",
]

#: The inode of the PID namespace that a machine starts with, PROC_PID_INIT_INO in Linux.
_FIRST_PID_NAMESPACE: Final = "pid:[4026531836]"


def others_computing(device: Device) -> list[str]:
    """The processes of others that compute on a GPU, each in words.

    Those of this user that see the same lock files do not count. Empty also where the driver does
    not tell.
    """
    processes = device.compute_processes() or ()
    return [process_in_words(pid) for pid in processes if not _shares_our_locks(pid)]


def wait_until_alone(device: Device, timeout_s: float) -> list[str]:
    """Wait for others' processes to end, as those of a job that is ending do.

    Returns:
        Those that are still there after the timeout, as `others_computing` has them.
    """
    deadline = time.monotonic() + timeout_s
    while others := others_computing(device):
        if time.monotonic() >= deadline:
            break
        time.sleep(RETRY_S)
    return others


def may_be_set_by_a_guard(device: Device) -> bool:
    """Whether another guard of envplan may have set the clock that a GPU is held at.

    This user's own guards are not meant: their marks have been seen to before. It may be another's
    where other processes compute on the GPU, where marks of other users say so, and where any of
    this is hidden: in a container, by the driver, or in folders that this user may not read.
    """
    try:
        processes = device.compute_processes()
    except DeviceError:
        return True
    if processes is None or any(not _shares_our_locks(pid) for pid in processes):
        return True
    if not _sees_whole_machine() or hidden_lock_folders():
        return True
    return any(found.user != os.geteuid() for found in find_marks(device.info.uuid))


def process_in_words(pid: int) -> str:
    """A process and whose it is, as far as that can be found out."""
    with suppress(OSError):
        return f"process {pid} of {user_name(Path(f'/proc/{pid}').stat().st_uid)}"
    return f"process {pid}"


def _sees_whole_machine() -> bool:
    """Whether this process sees all processes of the machine and, as far as it can tell, its files.

    Only root may ask which files process 1 sees.
    """
    if _namespace("self", "pid") != _FIRST_PID_NAMESPACE:
        return False
    return _namespace("1", "mnt") in ("", _namespace("self", "mnt"))


def _namespace(process: str, kind: str) -> str:
    """The namespace of a process; "" where this user cannot see it."""
    with suppress(OSError):
        return str(Path(f"/proc/{process}/ns/{kind}").readlink())
    return ""


def _shares_our_locks(pid: int) -> bool:
    """Whether a process is of this user and sees the same lock files and processes."""
    with suppress(OSError):
        if Path(f"/proc/{pid}").stat().st_uid == os.geteuid():
            return all(
                _namespace(str(pid), kind) == _namespace("self", kind) for kind in ("pid", "mnt")
            )
    return False
