"""A small process that owns a GPU's clock for a training process and always gives it back.

The owner writes clocks into a socket and goes on; the guard sets them and says when it has. Only
the guard calls the driver. What may happen, and what then does:

- The owner closes the guard, ends or dies in any way: the kernel closes a dead process's socket,
  and where forked children still hold it open the guard sees its parent change. The guard gives the
  clock back. It also does when asked to stop (SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGXCPU); other
  signals do not end it.
- The guard is killed: its owner, which waits for that in a thread, starts a process that gives the
  clock back, and trains on without clocks.
- The driver hangs, or the guard is stopped: requests are not acknowledged, and `Guard.failing` says
  so. Neither start nor close wait for a driver without a limit. A guard that hangs when it is
  closed is left behind, and gives the clock back once the driver answers. One that is stopped goes
  on when it is closed, or when the next guard finds that its owner has died.
- Guard and owner are killed together: nobody is left to do anything. Each guard marks a lock file
  for as long as it may have set the clock (see `locks`), and the service `envplan guard` (see
  `service`), the next guard of that GPU and `envplan reset` give it back. So they do where the
  training is process 1 of a container: its end kills all others there. Start it with --init.
- Somebody else had set the clock before: that clock is put back, as far as the driver tells it.

This module also is the guard's program: `python -m envplan.devices.guard`.
"""

from __future__ import annotations

import json
import logging
import math
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Final, NamedTuple

from envplan.devices import Counted, Device, DeviceError, DeviceInfo, backend, choose
from envplan.devices.locks import RETRY_S, LockFile, Mark, give_back, insist, recover
from envplan.errors import EnvplanError

__all__ = ["CounterReading", "Guard"]

_REQUEST: Final = struct.Struct("<QQI")  # its number, from 1, when, ns, and MHz, or one of:
_RESET: Final = 0
_CLOSE: Final = 2**32 - 1

_START_TIMEOUT_S: Final = 60.0
_CLOSE_TIMEOUT_S: Final = 10.0
_KILL_TIMEOUT_S: Final = 1.0
_HANDOVER_S: Final = 5.0
_PARENT_CHECK_S: Final = 0.2
_READ_ENERGY_S: Final = 1.0
#: How long a GPU may take to leave a clock that it is no longer held at.
_LET_GO_S: Final = 1.0
#: A request that is not acknowledged for so long counts as failing.
_IN_TIME_S: Final = 1.0
#: What the kernel keeps for the guard to read, requests and what it needs around them, bytes.
_WAITING_BYTES: Final = 2**20

_STOPPING: Final = [signal.Signals[f"SIG{name}"] for name in ["TERM", "INT", "HUP", "QUIT", "XCPU"]]
#: What the process itself has done, and its children's end. All others are for the training, such
#: as those that batch systems send to every process of a job to warn it, and are ignored.
_LEFT_ALONE: Final = [
    signal.Signals[f"SIG{name}"]
    for name in ["KILL", "STOP", "CONT", "CHLD", "ABRT", "SEGV", "BUS", "ILL", "FPE", "TRAP", "SYS"]
]

_logger = logging.getLogger("envplan.runtime")


class CounterReading(NamedTuple):
    """A GPU's energy counter, mJ, at a moment of perf_counter_ns."""

    time_ns: int
    energy_mj: int


class Guard(AbstractContextManager["Guard"]):
    """The owner's end of a guard process. Made by `Guard.start`, usable as a context manager.

    One thread may use it at a time. A forked child inherits it but cannot do anything with it. An
    owner that sets the clock itself may hold one all the same: the clock goes back with the owner.

    Attributes:
        info: of the GPU.
        done: the number of the last request that was carried out, of those that `problems` saw.
        lost: whether it ended without having been closed.
        reports_closed: whether it has said its last.
        lags: how long each request took to be carried out, ns, by its number, counted from 1; not
            of one that a newer one overtook. `problems` fills it; whoever reads it empties it.
        readings: of the energy counter. `problems` fills them, and whoever reads them empties them.
    """

    def __init__(self, process: _Program, info: DeviceInfo, arguments: Mapping[str, Any]) -> None:
        self.info = info
        self.lost = self.reports_closed = False
        self.lags: dict[int, int] = {}
        self.readings: list[CounterReading] = []
        self._process = process
        self._arguments = arguments
        self._owner = os.getpid()
        self._closed = False
        self._ending = threading.Lock()
        self._lock = threading.Lock()  # what is below, but for the numbers of requests

        self._requested = self.done = 0
        self._waiting_since = 0
        self._unsent: bytes | None = None
        self._dropped = 0
        self._problems: list[str] = []
        self._complained = self._overdue = False
        # What the guard says, and not its exit status: whoever ignores SIGCHLD does not get that.
        self._ended: dict[str, str | None] = {}

        watched = os.dup(process.reports)
        threading.Thread(
            target=_watch, args=(weakref.ref(self), watched), name="envplan-guard", daemon=True
        ).start()

    @classmethod
    def start(
        cls,
        backend_name: str,
        device: int,
        *,
        counted: Counted = Counted.BY_DRIVER,
        every_request: bool = False,
        meter: bool = False,
        check: Callable[[DeviceInfo], None] | None = None,
        **options: Any,
    ) -> Guard:
        """Start a guard for one GPU and wait until it is ready.

        A clock that a killed guard of the same GPU left set is given back first.

        Args:
            backend_name: one of envplan.devices.BACKENDS.
            device: which GPU.
            counted: by whom.
            every_request: set every clock asked for, in order, instead of only the newest when
                the driver takes longer than the owner's operations.
            meter: read the energy counter, too, about once a second, into `readings`.
            check: is told of the GPU before it is touched, and raises what shall keep it so.
            options: for the backend; JSON values.

        Raises:
            DeviceError: there is no such GPU, this user may not set its clock, another guard has
                it, the driver hangs, or no process can be started; nothing was changed.
        """
        arguments = {
            "backend": backend_name,
            "device": device,
            "counted": counted,
            "options": options,
            "every_request": every_request,
            "meter": meter,
            "owner": os.getpid(),
            "handover": _HANDOVER_S,
        }
        process = _Program(arguments)
        try:
            fields = process.says("info", _START_TIMEOUT_S)
            clocks = tuple(fields["supported_clocks"])
            info = DeviceInfo(**{**fields, "supported_clocks": clocks})
            if check is not None:
                check(info)
            process.requests.send(_REQUEST.pack(0, 0, _RESET), socket.MSG_NOSIGNAL)
            process.says("ready", _START_TIMEOUT_S)
        except BaseException as error:
            process.kill()
            process.leave()
            if isinstance(error, OSError):
                raise DeviceError("the clock guard did not start; it was killed") from error
            raise
        if os.getpid() == 1:
            _logger.warning(
                "training is process 1 of its container, whose end kills the clock guard as well: "
                "start the container with --init, or run envplan reset afterwards"
            )
        return cls(process, info, {**arguments, "device": info.index})

    @property
    def pid(self) -> int:
        """The guard's process."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the guard is there, as far as is known."""
        return not self._closed

    @property
    def failing(self) -> bool:
        """Whether, when `problems` was last asked, the clock was not what was asked for."""
        return self._complained or self._overdue

    def request(self, mhz: int, request_id: int | None = None) -> None:
        """Have the clock set soon. Never blocks, never raises; see `problems`.

        Args:
            mhz: the clock; 0 gives it back.
            request_id: by which it is reported, higher than that of any request before; default:
                the next number, from 1.
        """
        if self._closed or os.getpid() != self._owner:
            return
        now = time.perf_counter_ns()
        if self.done == self._requested:
            self._waiting_since = now
        self._requested = self._requested + 1 if request_id is None else request_id
        self._write(_REQUEST.pack(self._requested, now, mhz))

    def problems(self) -> list[str]:
        """What went wrong since last asked, a line each. Never blocks."""
        with self._lock:
            if not self._closed and os.getpid() == self._owner:
                self._read_reports()
                if self._unsent is not None:
                    self._write(self._unsent)
                # Requests that have not been acknowledged for too long.
                late = (time.perf_counter_ns() - self._waiting_since) / 1e9
                overdue = self.done != self._requested and late > _IN_TIME_S
                if overdue and not self._overdue:
                    self._problems.append(
                        f"GPU {self.info.index}: the clock asked for {late:.1f} s ago is not set "
                        "yet; the driver hangs (see dmesg), or the clock guard was stopped"
                    )
                self._overdue = overdue
            if self._dropped:
                self._problems.append(
                    f"the clock guard does not keep up: {self._dropped} requests were dropped"
                )
                self._dropped = 0
            problems, self._problems = self._problems, []
        return problems

    def close(self) -> None:
        """Give the clock back, end the guard and wait for it. Harmless when done before.

        Where the guard was killed, this gives the clock back in its place. Never raises, and does
        not wait for a driver that hangs: a clock that is not given back is among `problems`.
        """
        if os.getpid() == self._owner:
            self._end(asked=True)
            # Not by `_watch`: a request on its way would go to whatever gets its number next.
            self._process.requests.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # subprocess keeps a process that runs, and so its pipes, when nobody else does.
        self._process.let_go()

    def _write(self, request: bytes) -> None:
        self._unsent = None
        try:
            self._process.requests.send(request, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            self._dropped += 1
            self._unsent = request
        except OSError:
            pass  # it is gone, and `_watch` deals with that

    def _end(self, *, asked: bool) -> None:
        """Make sure that the guard ends and the clock is given back; asked: by the owner."""
        with self._ending:
            if self._closed:
                return
            self._closed, self.lost = True, not asked
            if asked:
                with suppress(OSError):  # it has so much to read that the end must do
                    self._process.requests.send(_REQUEST.pack(0, 0, _CLOSE), socket.MSG_NOSIGNAL)
                self._process.requests.close()
                self._process.send_signal(signal.SIGCONT)  # it may be stopped
            try:
                self._process.wait(_CLOSE_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.terminate()  # for one that has much to read yet
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(_KILL_TIMEOUT_S)
            with self._lock:
                self._read_reports()
                assert self._process.stdout is not None
                self._process.stdout.close()
                self.reports_closed = True
            if self._process.returncode is None:
                problem: str | None = "the clock guard hangs and will do it once the driver answers"
            else:
                problem = self._ended["problem"] if self._ended else _recover(self._arguments)
            if problem is not None:
                problem = f"the clock may still be set: {problem}; run: envplan reset"
            if not asked:
                problem = f"the clock guard is gone; {problem or 'its clock was given back'}"
            if problem is not None:
                with self._lock:
                    self._problems.append(problem)

    def _read_reports(self) -> None:
        """Take in what the guard has said."""
        for said in self._process.heard():
            match said:
                case {"set": number, "lag": lag}:
                    self.done, self.lags[number] = number, lag
                    self._waiting_since = time.perf_counter_ns()
                    self._complained = False
                case {"problem": problem, "again": again}:
                    if not again:  # once for each failure that lasts
                        self._problems.append(problem)
                    self._complained = True
                case {"energy": energy, "at": at}:
                    self.readings.append(CounterReading(at, energy))
                case {"ended": problem}:
                    self._ended = {"problem": problem}


def _watch(guard: weakref.ref[Guard], reports: int) -> None:
    """Wait until a guard is gone, and see to it that its clock is given back."""
    end = select.poll()
    end.register(reports, 0)  # no interest in what it says
    end.poll()
    os.close(reports)
    owner = guard()
    if owner is not None and os.getpid() == owner._owner:
        owner._end(asked=False)


def _recover(arguments: Mapping[str, Any]) -> str | None:
    """Have another process give the clock back in the place of a guard; why not, or None.

    It is not waited for without a limit, and goes on.
    """
    try:
        process = _Program({**arguments, "counted": Counted.BY_DRIVER, "recover": True})
        try:
            process.says("recovered", _CLOSE_TIMEOUT_S)
        finally:
            process.leave()
    except DeviceError as error:
        return str(error)
    return None


class _Program(subprocess.Popen[bytes]):
    """The guard's program, as its owner sees it. Its standard output are its reports.

    Attributes:
        requests: what takes requests for it. A pipe for these would end an owner that leaves
            SIGPIPE at its default, once the guard is gone.
        reports: the descriptor of its reports.

    Raises:
        DeviceError: it cannot be started.
    """

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        _open_standard_streams()
        self.requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.requests.setblocking(False)
        self.requests.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _WAITING_BYTES)
        self._unread = b""
        self._lines: deque[bytes] = deque()
        self._over = False
        # Signals wait until the guard can deal with them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            # -P: files in the folder that training was started in are no modules of ours. Its own
            # session: what a terminal sends to the training's processes is not for the guard.
            super().__init__(
                [sys.executable, "-P", "-m", "envplan.devices.guard", json.dumps(arguments)],
                stdin=theirs.fileno(),
                stdout=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
            )
        except OSError as error:
            self.requests.close()
            raise DeviceError(f"the clock guard cannot be started: {error.strerror}") from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
        assert self.stdout is not None
        self.reports = self.stdout.fileno()
        os.set_blocking(self.reports, False)

    def heard(self) -> Iterator[dict[str, Any]]:
        """What it has said and nobody has heard; nothing that something else in it printed."""
        with suppress(OSError):  # there is nothing, for now
            while chunk := os.read(self.reports, 65536):
                self._unread += chunk
            self._over = True
        *lines, self._unread = self._unread.split(b"\n")
        self._lines.extend(lines)
        while self._lines:
            with suppress(ValueError):
                said = json.loads(self._lines.popleft())
                if isinstance(said, dict):
                    yield said

    def says(self, word: str, timeout: float) -> Any:
        """What it says under a word, which it soon does.

        Raises:
            DeviceError: it says why it cannot start, or says nothing in time.
        """
        deadline = time.monotonic() + timeout
        poll = select.poll()
        poll.register(self.reports, select.POLLIN)
        while True:
            for said in self.heard():
                if "refused" in said:
                    raise DeviceError(said["refused"])
                if word in said:
                    return said[word]
            if self._over:
                raise DeviceError("the clock guard did not start; what it wrote is above")
            if not poll.poll(1e3 * max(0.0, deadline - time.monotonic())):
                raise DeviceError("the clock guard does not answer; the driver may hang, see dmesg")

    def let_go(self) -> None:
        """Tell it nothing more, and hear nothing."""
        for end in (self.requests, self.stdout):
            if end is not None:
                with suppress(OSError):
                    end.close()

    def leave(self) -> None:
        """Let go of it, and wait a little for its end: it may hang in the driver."""
        self.let_go()
        with suppress(subprocess.TimeoutExpired):
            self.wait(_KILL_TIMEOUT_S)


def _open_standard_streams() -> None:
    """Open those of 0, 1 and 2 that are closed, as a daemon's may be, on nothing.

    Else the pipes made next would be them, and what a library prints would be clocks for the guard.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


class _GuardProcess:
    """The guard's own side.

    Args:
        device: the GPU.
        wanted: the program's arguments.
        stop: becomes readable when the guard is asked to stop.

    Attributes:
        before: the clock that somebody else had set, MHz; 0: none.
    """

    def __init__(self, device: Device, wanted: Mapping[str, Any], stop: int) -> None:
        self.before = 0
        self._device = device
        self._owner = wanted["owner"]
        self._every_request = wanted["every_request"]
        self._read_next = 0.0 if wanted["meter"] else math.inf
        self._stop = stop
        self._requests = socket.socket(fileno=0)
        self._requests.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._requests, select.POLLIN)
        self._poll.register(stop, select.POLLIN)
        self._wanted = self._set = _RESET
        self._number = self._told = self._failed = self._sent = 0
        self._complained: str | None = None

    def told_to_start(self) -> bool:
        """Wait for the owner to agree with the GPU; False if it does not or is gone."""
        while self._wait(_PARENT_CHECK_S):
            for *_, mhz in self._received():
                return mhz != _CLOSE
        return False

    def run(self) -> None:
        """Serve requests until the owner is done or gone, or the guard is asked to stop."""
        while self._wait(_PARENT_CHECK_S if self._wanted == self._set else RETRY_S):
            for number, sent, mhz in self._received():
                if mhz == _CLOSE:
                    return
                self._number, self._sent, self._wanted = number, sent, mhz
                if self._every_request:
                    break
            self._apply()  # again, where it failed
            if time.monotonic() >= self._read_next:
                self.read_energy()

    def read_energy(self) -> None:
        """Say what the energy counter shows, if that is wanted and it can be read."""
        if self._read_next < math.inf:
            self._read_next = time.monotonic() + _READ_ENERGY_S
            with suppress(DeviceError):
                at = time.perf_counter_ns()
                _report(energy=self._device.energy(), at=at)

    def _wait(self, seconds: float) -> bool:
        """Wait for a request, not for long; False when it is time to end."""
        ready = dict(self._poll.poll(seconds * 1e3))
        return self._stop not in ready and os.getppid() == self._owner

    def _received(self) -> Iterator[tuple[int, int, int]]:
        """The requests that have come: number, time and clock; the end if the owner is gone."""
        with suppress(BlockingIOError):
            while message := self._requests.recv(_REQUEST.size):
                yield _REQUEST.unpack(message)
            yield 0, 0, _CLOSE

    def _apply(self) -> None:
        try:
            if self._wanted != self._set:
                give_back(self._device, self._wanted or self.before)
                self._set = self._wanted
                self._complained = None
        except DeviceError as error:
            # It is tried again many times a second.
            if str(error) != self._complained or self._number != self._failed:
                _report(problem=str(error), again=str(error) == self._complained)
            self._complained, self._failed = str(error), self._number
            return
        if self._number != self._told:
            self._told = self._number
            _report(set=self._number, lag=time.perf_counter_ns() - self._sent)


def _report(**line: Any) -> None:
    """A line of its own to the owner, unless it is gone or has left the pipe full."""
    with suppress(OSError):
        os.write(1, b"\n" + json.dumps(line).encode() + b"\n")


def _main(arguments: Sequence[str]) -> None:
    """The guard's program."""
    wanted = json.loads(arguments[0])
    stop = _stop_signals()
    os.set_blocking(1, False)
    lock = None
    try:
        source = backend(wanted["backend"], **wanted["options"])
        device = choose(source, wanted["device"], Counted(wanted["counted"]))
        if "recover" in wanted:
            if source.real:
                recover(device)
            return _report(recovered=True)
        _report(info=asdict(device.info))
        guard = _GuardProcess(device, {**wanted, "meter": wanted["meter"] and source.real}, stop)
        if not guard.told_to_start():
            return None
        if source.real:
            lock, guard.before = _take(device, wanted)
    except EnvplanError as error:
        return _report(refused=str(error))
    _report(ready=True)
    problem = None
    try:
        guard.read_energy()
        guard.run()
        guard.read_energy()
    finally:
        # Also if nothing was asked for: an owner may set clocks itself and have this for its death.
        try:
            if lock is None:
                insist(device.reset_clock)
            else:
                lock.restore(device)
        except DeviceError as error:
            problem = str(error)
        _report(ended=problem)
    return None


def _stop_signals() -> int:
    """Have the signals that ask to stop make a descriptor readable, and do nothing else."""
    readable, writable = os.pipe()
    os.set_blocking(writable, False)
    signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    for number in _STOPPING:
        signal.signal(number, lambda *_: None)
    for number in signal.valid_signals().difference(_LEFT_ALONE, _STOPPING):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # whatever the owner had blocked
    return readable


def _take(device: Device, wanted: Mapping[str, Any]) -> tuple[LockFile, int]:
    """Mark a GPU as ours, its clock given back.

    Args:
        device: the GPU.
        wanted: the arguments of this guard; `handover` is how long to wait for the guard of a
            training that has ended, s.

    Returns:
        The mark's file, and the clock that somebody else had set, MHz; 0: none.

    Raises:
        DeviceError: its clock may not be set, or another guard has it.
    """
    refusal = device.can_lock(probe=True)
    if refusal is not None:
        raise DeviceError(refusal)
    lock = LockFile(device.info.uuid)
    if not lock.acquire(wanted["handover"]):
        mark = lock.mark
        guard = f"process {mark.guard}" if mark else "just starting"
        whose = (
            f"the guard of a training that has ended, {guard}, does not end; the driver may hang, "
            "see dmesg"
            if mark and mark.orphaned
            else f"another training process of this user sets its clock (its guard is {guard})"
        )
        raise DeviceError(f"GPU {device.info.index}: {whose}")
    lock.restore(device)
    own = Mark(os.getpid(), wanted["owner"], device.held_at(), wanted["backend"])
    lock.set_mark(own)
    if own.before and not _is_held(device, own.before):
        own = replace(own, before=0)
        lock.set_mark(own)
    return lock, own.before


def _is_held(device: Device, mhz: int) -> bool:
    """Whether somebody holds a GPU at the clock it seems held at: it then leaves it when let go."""
    insist(device.reset_clock)
    deadline = time.monotonic() + _LET_GO_S
    while (still := device.held_at() == mhz) and time.monotonic() < deadline:
        time.sleep(RETRY_S)
    if not still:
        insist(partial(device.lock_clock, mhz))
    return not still


if __name__ == "__main__":
    _main(sys.argv[1:])
