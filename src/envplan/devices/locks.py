"""One guard for a GPU: lock files, and giving back the clocks that guards left set.

Each guard locks a file, one per user and GPU, and keeps a mark in it for as long as it may have set
the clock: its process and its owner's, the clock that another tool had set before, which is put
back, the backend, the socket of the daemon behind it, and the boot that it is of: a driver that
starts anew holds no clock, so a mark of a boot that is over says nothing. The kernel unlocks what a
dead process had locked, so a file that is unlocked and not empty means a clock left behind.

All processes of a user find the same files, whatever their environment says: root in /run/envplan,
where nobody else can put anything, others in /tmp/envplan-UID. Where somebody else has taken that
name, it is /tmp/envplan-UID- with an ending that nobody can foresee. A folder counts only if it
belongs to the user and nobody else may write to it.
"""

from __future__ import annotations

import fcntl
import os
import signal
import stat
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Final, TypeVar
from urllib.parse import quote, unquote

from envplan.devices import (
    DEFAULT_BACKEND,
    Device,
    DeviceError,
    DeviceInfo,
    PermissionDeniedError,
    call_with_timeout,
    opened,
)

T = TypeVar("T")


#: A mark is no longer than this. The path of a socket may have 108 bytes, each three when quoted.
MARK_BYTES: Final = 1024
RETRY_S: Final = 0.05
#: How long a driver that fails is tried before a training starts, s.
START_RETRY_S: Final = 2.0
#: How long a clock is tried to be given back, where a training ends or nobody says how long, s.
GIVE_BACK_TIMEOUT_S: Final = 60.0
#: How long a driver may hang beyond that, s.
HANG_MARGIN_S: Final = 2.0
#: How long a guard is waited for whose owner lives, s.
_LIVING_OWNER_WAIT_S: Final = 1.0
#: How long the service may hold a lock while it looks at it, s.
_SERVICE_LOOK_S: Final = 0.1


_UNKNOWN_BOOT: Final = "-"


@cache
def boot_id() -> str:
    """The number of this boot of the machine, the same in all containers; "" if it is unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


@dataclass(frozen=True)
class Mark:
    """A record that a guard may have set a clock.

    Attributes:
        guard_pid: its process.
        owner_pid: the process that it works for; 0: the file does not say.
        previous_mhz: the clock that somebody else had set before; 0: none.
        backend: through which it sets clocks.
        socket: of the daemon that sets them for it; "" where none does.
        boot: the boot that it was written in, as `boot_id` has it; "": the file does not say.
    """

    guard_pid: int
    owner_pid: int
    previous_mhz: int = 0
    backend: str = DEFAULT_BACKEND
    boot: str = field(default_factory=boot_id)
    socket: str = ""

    @classmethod
    def parse(cls, text: bytes) -> Mark | None:
        """The mark in a file's text; None where there is no text, or that of a boot that is over.

        Files of older versions have fewer words, and what is no number counts as 0.
        """
        words = text.decode("ascii", "replace").split()
        if not words:
            return None
        words += [""] * 6
        guard_pid, owner_pid, previous_mhz, backend, boot, socket, *_ = words
        boot = "" if boot == _UNKNOWN_BOOT else boot
        if boot and boot_id() and boot != boot_id():
            return None
        return cls(
            _number_or_0(guard_pid),
            _number_or_0(owner_pid),
            _number_or_0(previous_mhz),
            backend or DEFAULT_BACKEND,
            boot,
            unquote(socket),
        )

    def to_text(self) -> str:
        """The line in a file."""
        boot, socket = self.boot or _UNKNOWN_BOOT, quote(self.socket)
        words = (self.guard_pid, self.owner_pid, self.previous_mhz, self.backend, boot, socket)
        return " ".join(map(str, words)) + "\n"

    @property
    def parent(self) -> int | None:
        """The parent of the guard's process; None if it does not live."""
        process = Path(f"/proc/{self.guard_pid}")
        try:
            if b"envplan.devices.guard" not in (process / "cmdline").read_bytes():
                return None
            # "PID (NAME) STATE PARENT ...", where a name may hold brackets and blanks.
            _, _, state_and_parent = (process / "stat").read_text().rpartition(") ")
            return int(state_and_parent.split()[1])
        except (OSError, ValueError):
            return None

    @property
    def orphaned(self) -> bool:
        """Whether the guard lives, and the process it works for does not."""
        return self.owner_pid > 0 and self.parent not in (None, self.owner_pid)


def _number_or_0(word: str) -> int:
    return int(word) if word.isdecimal() else 0


class LockFile(AbstractContextManager["LockFile"]):
    """The mark that some guard of this user has, or had, a GPU's clock. A context that closes it.

    Args:
        uuid: of the GPU.
        folder: one of `lock_folders`; default: the first, made if need be.

    Raises:
        DeviceError: the folder for such files cannot be used.
    """

    def __init__(self, uuid: str, folder: Path | None = None) -> None:
        self.uuid = uuid
        self.path = (folder or _make_lock_folder()) / f"{uuid}.lock"
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self._folder = os.open(self.path.parent, os.O_DIRECTORY | os.O_CLOEXEC)
            # While this lock is held, systemd does not take the folder for old and delete it.
            fcntl.flock(self._folder, fcntl.LOCK_SH | fcntl.LOCK_NB)
            self._file = os.open(self.path, flags, 0o600)
        except OSError as error:
            raise DeviceError(f"{self.path}: {error.strerror}; remove it") from error

    def acquire(self, wait_s: float = 0.0) -> bool:
        """Lock the file; False if another process has it locked. A dead process has nothing.

        Args:
            wait_s: for a process that is about to let go: a guard whose owner has ended, or one
                that cleans up after a guard that was killed.
        """
        begin_s = time.monotonic()
        while True:
            with suppress(BlockingIOError):
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            mark = self.mark
            if mark and mark.orphaned:
                with suppress(OSError):  # one that was stopped does not see that its owner died
                    os.kill(mark.guard_pid, signal.SIGCONT)
            is_in_use = mark is not None and mark.parent is not None and not mark.orphaned
            max_wait_s = min(wait_s, _LIVING_OWNER_WAIT_S) if is_in_use else wait_s
            if time.monotonic() - begin_s >= max_wait_s:
                return False
            time.sleep(RETRY_S)

    @property
    def mark(self) -> Mark | None:
        """The mark of the guard that has the GPU, or had it; None: the clock was given back."""
        return Mark.parse(os.pread(self._file, MARK_BYTES, 0))

    def set_mark(self, mark: Mark) -> None:
        """From here on the clock may be set.

        Raises:
            DeviceError: it cannot be written; the mark is the one before, or a part of this one.
        """
        text = mark.to_text().encode()
        try:
            os.pwrite(self._file, text, 0)
            os.ftruncate(self._file, len(text))
        except OSError as error:
            raise DeviceError(f"{self.path}: {error.strerror}") from error

    def restore(
        self, device: Device, *, put_back: bool = True, timeout_s: float = START_RETRY_S
    ) -> None:
        """Give the clock back if the mark says that it may be set, and take the mark away.

        Args:
            device: the GPU.
            put_back: set the clock that another tool had set before.
            timeout_s: for how long the driver is tried.

        Raises:
            DeviceError: the driver does not do it.
        """
        mark = self.mark
        if mark is not None:
            mhz = mark.previous_mhz if put_back else 0
            retry_driver_call(partial(device.give_back_clock, mhz), timeout_s)
            self.clear_mark()

    def clear_mark(self) -> None:
        """The clock is given back."""
        os.ftruncate(self._file, 0)

    def close(self) -> None:
        """Let go of it."""
        os.close(self._file)
        os.close(self._folder)

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class GivenBack:
    """The result of giving one GPU's clock back.

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


def give_back_all(devices: Sequence[Device], timeout_s: float) -> list[GivenBack]:
    """Give every GPU's clock back by hand; one that fails or hangs does not stop the others.

    Whatever other tools have set is given back as well.

    Args:
        devices: all GPUs of a backend, by index.
        timeout_s: for how long a GPU is tried.
    """

    def give_back(index: int) -> GivenBack:
        device = devices[index]
        reset = partial(_reset_by_hand, device, timeout_s)
        try:
            return call_with_timeout(timeout_s + HANG_MARGIN_S, reset, f"GPU {index}")
        except DeviceError as error:
            return GivenBack(index, problem=f"{error}; {left_in_words(device, index)}")

    with ThreadPoolExecutor(len(devices)) as pool:
        return list(pool.map(give_back, range(len(devices))))


def _reset_by_hand(device: Device, timeout_s: float) -> GivenBack:
    """Reset a GPU's clock, and then clear the mark of a guard that is dead.

    The clock is reset first: that does not depend on any file, unless it takes the daemon that the
    mark names.
    """
    try:
        retry_driver_call(device.give_back_clock, timeout_s)
    except PermissionDeniedError as error:
        _reset_by_daemon(device.info, timeout_s, error)
    info = device.info
    try:
        lock = LockFile(info.uuid)
    except DeviceError:
        return GivenBack(info.index, info.name)
    with lock:
        mark = lock.mark
        was_left_behind = mark is not None and lock.acquire(_SERVICE_LOOK_S)
        if was_left_behind:  # whatever was set until the lock was ours
            try:
                lock.restore(device, put_back=False, timeout_s=timeout_s)
            except PermissionDeniedError:  # it was the daemon's to reset
                lock.clear_mark()
        living_guard = None if mark is None or was_left_behind else mark.guard_pid
        return GivenBack(info.index, info.name, was_left_behind, living_guard)


def _reset_by_daemon(info: DeviceInfo, timeout_s: float, refusal: PermissionDeniedError) -> None:
    """Reset a clock through the daemon that a guard of this user has set it by.

    Raises:
        PermissionDeniedError: no mark names one, or it does not let this user.
        DeviceError: it does not do it.
    """
    with LockFile(info.uuid) as lock:
        mark = lock.mark
    if mark is None or not mark.socket:
        raise refusal
    with opened(mark.backend, path=mark.socket) as source:
        retry_driver_call(source.devices()[info.index].give_back_clock, timeout_s)


def left_in_words(device: Device, index: int) -> str:
    """At which clock a GPU is left, as far as it can still be asked."""
    try:
        clock = f"{call_with_timeout(HANG_MARGIN_S, device.clock, f'GPU {index}')} MHz"
    except DeviceError:
        clock = "a clock that cannot be read"
    return f"GPU {index} is left at {clock}"


def recover(device: Device, timeout_s: float = START_RETRY_S) -> None:
    """Give a GPU's clock back in the place of a guard that was killed.

    Not if another guard has taken the GPU since, which has then done so.

    Args:
        device: the GPU.
        timeout_s: for how long the driver is tried.

    Raises:
        DeviceError: the driver does not do it.
    """
    with LockFile(device.info.uuid) as lock:
        if lock.acquire(_SERVICE_LOOK_S):
            lock.restore(device, timeout_s=timeout_s)


def retry_driver_call(call: Callable[[], T], timeout_s: float) -> T:
    """Call a driver that may fail for a while.

    Args:
        call: the driver.
        timeout_s: for how long it is tried, once at least.

    Raises:
        PermissionDeniedError: this user may not; it is not tried again.
        DeviceError: it failed every time.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return call()
        except PermissionDeniedError:
            raise
        except DeviceError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(RETRY_S)


def lock_folders(user: int) -> list[Path]:
    """The folders with a user's lock files, the one to use first; none if there is none yet.

    Args:
        user: its number.
    """
    safe_folders = []
    for default in default_lock_folders(user):
        stand_ins = sorted(default.parent.glob(f"{default.name}-*"))
        for folder in (default, *stand_ins):
            with suppress(OSError):
                status = folder.lstat()
                is_safe = status.st_uid == user and not status.st_mode & 0o022
                if is_safe and stat.S_ISDIR(status.st_mode):
                    safe_folders.append(folder)
    return safe_folders


def _make_lock_folder() -> Path:
    """The folder for this user's lock files, made if need be.

    Raises:
        DeviceError: it cannot be made.
    """
    user = os.geteuid()
    problem = ""
    for default in default_lock_folders(user):
        try:
            with suppress(FileExistsError):
                default.mkdir(mode=0o700)
            if not lock_folders(user):
                tempfile.mkdtemp(prefix=f"{default.name}-", dir=default.parent)
                time.sleep(RETRY_S)  # others of this user may be doing the same
        except OSError as error:
            problem = f"{default.parent}: {error.strerror}"
        if safe_folders := lock_folders(user):
            return safe_folders[0]
    raise DeviceError(f"there is no place for the locks of GPUs: {problem}")


def default_lock_folders(user: int) -> list[Path]:
    """The folders that a user's lock files are in unless somebody else has taken their names.

    The second is for a root without a /run.

    Args:
        user: its number.
    """
    folders = [Path(f"/tmp/envplan-{user}")]
    if user == 0:
        folders.insert(0, Path("/run/envplan"))
    return folders
