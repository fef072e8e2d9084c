"""A small process that owns a GPU's clock for a training process and always gives it back.

The owner writes clocks into a pipe and goes on; the guard sets them. The clock goes back to the
driver when the owner says so, closes the pipe, or dies in any way: the kernel closes a dead
process's pipe, and where forked children still hold it open the guard sees its parent change. It
also goes back when the guard is asked to stop (SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGXCPU).

A guard killed by SIGKILL can do nothing. Therefore each locks a file, one per user and GPU, and
keeps its own number in it for as long as it may have set the clock. The kernel unlocks what a dead
process had locked, so a file that is unlocked and not empty means a clock left behind: the next
guard of that GPU, `Guard.close` of the owner and `envplan reset` give it back. Where a scheduler
or a container kills everything at once, guards included, and the files may go with it, run
`envplan reset` afterwards, for example in the epilogue of a Slurm job.

This module also is the guard's program: `python -m envplan.runtime.guard`.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import socket
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from envplan.devices import Device, DeviceError, PermissionDeniedError, backend
from envplan.devices.base import device_at
from envplan.errors import EnvplanError

__all__ = ["GivenBack", "Guard", "LockFile", "give_back", "give_back_all"]

_REQUEST: Final = struct.Struct("<I")  # MHz; or one of:
_RESET: Final = 0
_CLOSE: Final = 2**32 - 1

_START_TIMEOUT_S: Final = 60.0
_CLOSE_TIMEOUT_S: Final = 10.0
_HANDOVER_S: Final = 5.0
_PARENT_CHECK_S: Final = 0.2
_RETRY_S: Final = 0.05
_LAST_TRIES: Final = 40
#: What the kernel keeps for the guard to read, requests and what it needs around them, bytes.
_WAITING_BYTES: Final = 2**20

_STOPPING: Final = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGXCPU,
)
#: What the process itself has done, and its children's end. All others are for the training, such
#: as those that batch systems send to every process of a job to warn it, and are ignored.
_LEFT_ALONE: Final = {
    *(signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT, signal.SIGCHLD, signal.SIGABRT),
    *(signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGTRAP, signal.SIGSYS),
}


class Guard:
    """The owner's end of a guard process. Made by `Guard.start`, usable as a context manager.

    One thread may use it at a time. A forked child inherits it but cannot do anything with it. An
    owner that sets the clock itself may hold one all the same: the clock goes back with the owner.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        requests: socket.socket,
        restore: Callable[[], str | None],
    ) -> None:
        assert process.stdout is not None
        self._process = process
        self._requests = requests
        self._restore = restore
        self._owner = os.getpid()
        self._reports = process.stdout.fileno()
        os.set_blocking(self._reports, False)
        self._unread = b""
        self._problems: list[str] = []
        self._lost = 0
        # What the guard says, and not its exit status: whoever ignores SIGCHLD does not get that.
        self._given_back = False
        self._failing = False
        self._alive = True
        self._closed = False

    @classmethod
    def start(
        cls,
        backend_name: str,
        device_index: int,
        *,
        every_request: bool = False,
        **options: Any,
    ) -> Guard:
        """Start a guard for one GPU and wait until it is ready.

        A clock that a killed guard of the same GPU left set is given back first.

        Args:
            backend_name: "nvml" or "modelled".
            device_index: which GPU, as the driver counts.
            every_request: set every clock asked for, in order, instead of only the newest when
                the driver takes longer than the owner's operations.
            options: for the backend; JSON values.

        Raises:
            DeviceError: there is no such GPU, this user may not set its clock, another guard has
                it, or no process can be started; nothing was changed.
        """
        arguments = {
            "backend": backend_name,
            "index": device_index,
            "options": options,
            "every_request": every_request,
            "owner": os.getpid(),
        }
        process, requests = _start_process(arguments)
        try:
            _await_ready(process)
        except BaseException:
            process.kill()
            _close_ends(process, requests)
            process.wait()
            raise

        def restore() -> str | None:
            source = backend(backend_name, **options)
            try:
                device = source.devices()[device_index]
                return give_back(device, only_left_behind=True).problem
            finally:
                source.close()

        return cls(process, requests, restore)

    @property
    def pid(self) -> int:
        """The guard's process."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the guard was there when last written to or asked for problems."""
        return self._alive and not self._closed

    @property
    def failing(self) -> bool:
        """Whether, when `problems` was last asked, the clock was not what was asked for."""
        return self._failing

    def request(self, mhz: int) -> None:
        """Have the clock set soon; 0 gives it back. Never blocks, never raises; see `problems`."""
        self._send(mhz)

    def reset(self) -> None:
        """Have the clock given back to the driver soon, until the next request."""
        self._send(_RESET)

    def problems(self) -> list[str]:
        """What went wrong since last asked, a line each. Never blocks."""
        if not self._closed and self._alive and self._read_reports():
            self._gone()
        if self._lost:
            self._problems.append(
                f"the clock guard does not keep up: {self._lost} requests were dropped"
            )
            self._lost = 0
        problems, self._problems = self._problems, []
        return problems

    def close(self) -> None:
        """Give the clock back, end the guard and wait for it. Harmless when done before.

        Where the guard was killed, this gives the clock back in its place. Never raises: a clock
        that cannot be given back is among `problems`.
        """
        if self._closed or os.getpid() != self._owner:
            return
        self._finish()
        with suppress(OSError):
            self._read_reports()
        self._closed = True
        _close_ends(self._process, self._requests)
        if self._process.returncode is None:
            self._problems.append("the clock guard hangs in the driver; see dmesg, envplan reset")
        elif not self._given_back:
            self._take_over()

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        # subprocess keeps a process that runs, and so its pipes, when nobody else does.
        _close_ends(self._process, self._requests)

    def _send(self, mhz: int) -> None:
        if self._closed or not self._alive or os.getpid() != self._owner:
            return
        try:
            self._requests.send(_REQUEST.pack(mhz), socket.MSG_NOSIGNAL)
        except BlockingIOError:
            self._lost += 1
        except struct.error:
            self._problems.append(f"{mhz} MHz is not a clock")
        except OSError:
            self._gone()

    def _gone(self) -> None:
        self._alive = False
        self._problems.append(
            "the clock guard is gone; the clock may stay where it is until training ends "
            "or envplan reset"
        )

    def _finish(self) -> None:
        with suppress(OSError):  # it is gone, or has so much to read that the end must do
            self._requests.send(_REQUEST.pack(_CLOSE), socket.MSG_NOSIGNAL)
        self._requests.close()
        try:
            self._process.wait(_CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):  # it hangs in the driver
                self._process.wait(_CLOSE_TIMEOUT_S)

    def _take_over(self) -> None:
        """Give the clock back in the place of a guard that could not."""
        try:
            problem = self._restore()
        except EnvplanError as error:
            problem = str(error)
        if problem is not None:
            self._problems.append(f"the clock may still be set: {problem}; run: envplan reset")

    def _read_reports(self) -> bool:
        """Take in what the guard has said; whether that was the end."""
        ended = False
        with suppress(BlockingIOError):
            while chunk := os.read(self._reports, 65536):
                self._unread += chunk
            ended = True
        *lines, self._unread = self._unread.split(b"\n")
        for said in map(_said, lines):
            if "problem" in said:
                self._problems.append(said["problem"])
                self._failing = True
            elif "recovered" in said:
                self._failing = False
            elif "given_back" in said:
                self._given_back = True
        return ended


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

    def acquire(self) -> bool:
        """Take it; False if another process has it. A dead process has nothing."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    @property
    def holder(self) -> int | None:
        """The guard that marked it, dead or alive; None if it is not marked."""
        text = os.pread(self._descriptor, 64, 0).decode("ascii", "replace").strip()
        return (int(text) if text.isdecimal() else 0) if text else None

    def mark(self) -> None:
        """From here on the clock may be set, by this process."""
        self.clear()
        os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)

    def clear(self) -> None:
        """The clock was given back."""
        os.ftruncate(self._descriptor, 0)

    def close(self) -> None:
        """Let go of it."""
        os.close(self._descriptor)


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
    name: str
    left_behind: bool
    guard: int | None
    problem: str | None


def give_back(device: Device, *, only_left_behind: bool = False) -> GivenBack:
    """Give a GPU's clock back by hand, and forget the guard that left it set.

    Args:
        device: the GPU.
        only_left_behind: do so only where a guard was killed.

    Raises:
        DeviceError: the folder of lock files cannot be used.
    """
    lock = LockFile(device.info.uuid)
    try:
        free = lock.acquire()
        holder = lock.holder
        problem = None
        if not only_left_behind or (free and holder is not None):
            problem = _try_to_reset(device)
        if free and problem is None:
            lock.clear()
    finally:
        lock.close()
    return GivenBack(
        index=device.info.index,
        name=device.info.name,
        left_behind=free and holder is not None,
        guard=None if free else holder,
        problem=problem,
    )


def give_back_all(devices: Sequence[Device]) -> list[GivenBack]:
    """Give every GPU's clock back by hand; one that fails does not stop the others.

    Args:
        devices: all GPUs of a backend, by index.
    """
    outcomes = []
    for index, device in enumerate(devices):
        try:
            outcomes.append(give_back(device))
        except DeviceError as error:
            outcomes.append(GivenBack(index, "", False, None, str(error)))
    return outcomes


def _try_to_reset(device: Device) -> str | None:
    try:
        _insist(device.reset_clock)
    except DeviceError as error:
        return str(error)
    return None


def _await_ready(process: subprocess.Popen[bytes]) -> None:
    """Wait until the guard says that it is ready.

    Raises:
        DeviceError: it says why it cannot start, or says nothing.
    """
    deadline = time.monotonic() + _START_TIMEOUT_S
    while "ready" not in (said := _said(_read_line(process, deadline))):
        if "refused" in said:
            raise DeviceError(said["refused"])


def _read_line(process: subprocess.Popen[bytes], deadline: float) -> bytes:
    """A line and nothing behind it.

    Raises:
        DeviceError: none came in time, or the guard ended.
    """
    assert process.stdout is not None
    line = b""
    while not line.endswith(b"\n"):
        left = max(0.0, deadline - time.monotonic())
        if not select.select([process.stdout], [], [], left)[0]:
            raise DeviceError(f"the clock guard did not start within {_START_TIMEOUT_S:.0f} s")
        byte = os.read(process.stdout.fileno(), 1)
        if not byte:
            raise DeviceError("the clock guard did not start; what it wrote is above")
        line += byte
    return line


def _said(line: bytes) -> dict[str, Any]:
    """What a line of the guard says; nothing, where something else in its process printed it."""
    try:
        said = json.loads(line)
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}


def _open_standard_streams() -> None:
    """Open those of 0, 1 and 2 that are closed, as a daemon's may be, on nothing.

    Else the pipes made next would be them, and what a library prints would be clocks for the guard.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def _start_process(arguments: Mapping[str, Any]) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start the guard's program.

    Returns:
        The process, whose standard output are its reports, and what takes requests for it. A pipe
        for these would end an owner that leaves SIGPIPE at its default, once the guard is gone.

    Raises:
        DeviceError: it cannot be started.
    """
    _open_standard_streams()
    requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    requests.setblocking(False)
    requests.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _WAITING_BYTES)
    # Signals wait until the guard can deal with them.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        # -P: files in the folder that training was started in are no modules of ours. Its own
        # session: what a terminal sends to the training's processes is not for the guard.
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "envplan.runtime.guard", json.dumps(arguments)],
            stdin=theirs,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
    except OSError as error:
        requests.close()
        raise DeviceError(f"the clock guard cannot be started: {error.strerror}") from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
    return process, requests


def _close_ends(process: subprocess.Popen[bytes], requests: socket.socket) -> None:
    for end in (requests, process.stdout):
        if end is not None:
            with suppress(OSError):
                end.close()


def _lock_folder() -> Path:
    """Where this user's lock files are: a folder that nobody else can write to."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK | os.X_OK):
        folder = Path(runtime) / "envplan"
    else:
        folder = Path("/tmp") / f"envplan-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise DeviceError(f"{folder}: {error.strerror}; set XDG_RUNTIME_DIR") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise DeviceError(f"{folder} is not a folder of this user alone; remove it")
    return folder


def _insist(reset: Callable[[], None]) -> None:
    """Give a clock back though the driver may fail for a while.

    Raises:
        DeviceError: it failed every time.
    """
    for tries_left in reversed(range(_LAST_TRIES)):
        try:
            reset()
        except PermissionDeniedError:
            raise
        except DeviceError:
            if not tries_left:
                raise
            time.sleep(_RETRY_S)
        else:
            return


class _GuardProcess:
    """The guard's own side.

    Args:
        device: the GPU.
        owner: the process it works for, its parent.
        every_request: see `Guard.start`.
    """

    def __init__(self, device: Device, owner: int, every_request: bool) -> None:
        self._device = device
        self._owner = owner
        self._every_request = every_request
        self._wanted = self._set = _RESET
        self._requests = socket.socket(fileno=0)
        self._requests.setblocking(False)
        self._complained: str | None = None

    def run(self, stop: int) -> None:
        """Serve requests until the owner is done or gone, or `stop` becomes readable."""
        poll = select.poll()
        poll.register(0, select.POLLIN)
        poll.register(stop, select.POLLIN)
        while True:
            patience = _PARENT_CHECK_S if self._wanted == self._set else _RETRY_S
            ready = dict(poll.poll(patience * 1e3))
            if stop in ready or os.getppid() != self._owner:
                return
            if 0 in ready:
                for mhz in self._received():
                    if mhz == _CLOSE:
                        return
                    self._wanted = mhz
                    if self._every_request:
                        self._apply()
            self._apply()  # again, where it failed

    def _received(self) -> Iterator[int]:
        """What has come, and the end if the owner is gone."""
        with suppress(BlockingIOError):
            while message := self._requests.recv(_REQUEST.size):
                yield _REQUEST.unpack(message)[0]
            yield _CLOSE

    def _apply(self) -> None:
        if self._wanted == self._set:
            return
        try:
            if self._wanted == _RESET:
                self._device.reset_clock()
            else:
                self._device.lock_clock(self._wanted)
        except DeviceError as error:
            self._complain(str(error))
        else:
            self._set = self._wanted
            if self._complained is not None:
                self._complained = None
                _report(recovered=True)

    def _complain(self, problem: str) -> None:
        # Once for each failure that lasts: it is tried again many times a second.
        if problem != self._complained:
            self._complained = problem
            _report(problem=problem)


def _report(**line: Any) -> None:
    """A line to the owner, unless it is gone or has left the pipe full."""
    with suppress(OSError):
        os.write(1, json.dumps(line).encode() + b"\n")


def _main(arguments: Sequence[str]) -> int:
    """The guard's program.

    Returns:
        0 if the clock was given back, 1 if not, 2 if the guard could not start.
    """
    wanted = json.loads(arguments[0])
    stop = _stop_signals()
    try:
        source = backend(wanted["backend"], **wanted["options"])
        device, lock = _prepare(source.devices(), wanted["index"])
    except EnvplanError as error:
        _report(refused=str(error))
        return 2
    os.set_blocking(1, False)
    _report(ready=os.getpid())
    try:
        _GuardProcess(device, wanted["owner"], wanted["every_request"]).run(stop)
    finally:
        # Also if nothing was asked for: an owner may set clocks itself and have this for its death.
        restored = _restore(device)
    if restored:
        if lock is not None:
            lock.clear()
        _report(given_back=True)
    return 0 if restored else 1


def _restore(device: Device) -> bool:
    try:
        _insist(device.reset_clock)
    except DeviceError as error:
        _report(problem=f"the clock may still be set: {error}; run: envplan reset")
        return False
    return True


def _stop_signals() -> int:
    """Have the signals that ask to stop make a descriptor readable, and do nothing else."""
    readable, writable = os.pipe()
    os.set_blocking(writable, False)
    signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    for number in _STOPPING:
        signal.signal(number, lambda *_: None)
    for number in signal.valid_signals() - _LEFT_ALONE - set(_STOPPING):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # whatever the owner had blocked
    return readable


def _prepare(devices: Sequence[Device], index: int) -> tuple[Device, LockFile | None]:
    """The GPU, checked, its clock free and marked as ours.

    Raises:
        DeviceError: there is no such GPU, its clock may not be set, or another guard has it.
    """
    device = device_at(devices, index)
    refusal = device.can_lock(probe=True)
    if refusal is not None:
        raise DeviceError(refusal)
    if device.info.source != "measured":
        return device, None
    lock = LockFile(device.info.uuid)
    if not _acquire_soon(lock):
        raise DeviceError(
            f"GPU {index}: another training process of this user sets its clock "
            f"(its guard is process {lock.holder})"
        )
    if lock.holder is not None:
        _insist(device.reset_clock)
    lock.mark()
    return device, lock


def _acquire_soon(lock: LockFile) -> bool:
    """Take it, also from a guard that is about to end because its owner did.

    That one may go on trying to give the clock back for a while: see `_insist`.
    """
    deadline = time.monotonic() + _HANDOVER_S
    while not lock.acquire():
        if time.monotonic() > deadline:
            return False
        time.sleep(_RETRY_S)
    return True


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
