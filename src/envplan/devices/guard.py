"""A small process that owns a GPU's clock for a training process and always gives it back.

The owner writes clocks into a pipe and goes on; the guard sets them and says when it has. Only
the guard calls the driver. What may happen, and what then does:

- The owner closes the guard, ends or dies in any way: the kernel closes a dead process's pipe, and
  where forked children still hold it open the guard sees its parent change. The guard gives the
  clock back. It also does when asked to stop (SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGXCPU); other
  signals do not end it.
- The guard is killed: its owner, which waits for that in a thread, starts a process that gives the
  clock back, another one where that fails, and trains on without clocks.
- The driver hangs, or the guard is stopped: requests are not acknowledged, and `Guard.failing` says
  so. Neither start nor close wait for a driver without a limit. A guard that hangs when it is
  closed is left behind, and gives the clock back once the driver answers. One that is stopped goes
  on when it is closed, or when the next guard finds that its owner has died.
- Guard and owner are killed together: nobody is left to do anything. Each guard marks a lock file
  for as long as it may have set the clock (see `locks`), and the service `envplan guard` (see
  `service`), the next guard of that GPU and `envplan reset` give it back. So they do where the
  training is process 1 of a container: its end kills all others there. Start it with --init.
- Somebody else computes on the GPU: it is left alone, unless the owner insists.
- Somebody else had set the clock before: that clock is put back, as far as the driver tells it, and
  where no guard of another user or container can have set it. Else the driver gets the clock.

The guard's program is in guard_process.py, the messages between the two in guard_protocol.py.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from enum import Enum, auto
from typing import Any, Final, TypeVar

from envplan.devices import Counted, DeviceError, DeviceInfo
from envplan.devices.guard_protocol import (
    RESET,
    SHUT_DOWN,
    ClockFailed,
    ClockSet,
    CounterReading,
    GpuFound,
    GuardConfig,
    GuardEnded,
    Message,
    Ready,
    Recovered,
    Refused,
    Request,
    parse_message,
)

__all__ = ["Guard"]

M = TypeVar("M", bound=Message)

_PROGRAM: Final = "envplan.devices.guard_process"
# Time limits; tests make them shorter.
#: For the GPU to be found, and again for its clock to be the guard's, s.
START_TIMEOUT_S: Final = 60.0
#: For the guard to end after it was asked to, s.
CLOSE_TIMEOUT_S: Final = 10.0
#: For it to end after SIGTERM, or after its pipes were closed, s.
TERMINATE_TIMEOUT_S: Final = 1.0
#: For the guard of a training that has ended to let go of the GPU, s.
HANDOVER_TIMEOUT_S: Final = 5.0
#: A request that is not acknowledged for so long counts as failing, s.
ACKNOWLEDGE_TIMEOUT_S: Final = 1.0
#: Between two processes that try to give the clock of a killed guard back, s.
_RECOVERY_PAUSE_S: Final = 0.2
#: What the kernel keeps for the guard to read, bytes; it may leave a user with 65,536 of them.
_PIPE_BYTES: Final = 2**20
#: In the place of a descriptor that is closed.
_CLOSED: Final = -1

_logger = logging.getLogger("envplan.runtime")

# A thread that calls os.write gives up the interpreter, and gets it back when another one lets go
# of it: up to 5 ms later. PyDLL keeps it, for the microsecond that a write takes here.
_libc: Final = ctypes.PyDLL(None, use_errno=True)
_libc.write.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t)
_libc.write.restype = ctypes.c_ssize_t


class _Cause(Enum):
    """Why a guard is shut down."""

    CLOSED = auto()
    DIED = auto()


#: The guards of this process.
_guards: Final[weakref.WeakSet[Guard]] = weakref.WeakSet()


def _leave_guards_to_parent() -> None:
    """In a forked child no guard can be used: it is the parent's."""
    for guard in _guards:
        guard._is_closed = True


# To compare process numbers at every request would take a call of the kernel each.
os.register_at_fork(after_in_child=_leave_guards_to_parent)


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

    def __init__(self, process: _GuardChild, info: DeviceInfo, config: GuardConfig) -> None:
        self.info = info
        self.lost = self.reports_closed = False
        self.lags: dict[int, int] = {}
        self.readings: list[CounterReading] = []
        self._process = process
        self._config = config
        self._is_closed = False
        # Held for as long as the guard is shut down, and taken before _report_lock.
        self._shutdown_lock = threading.Lock()

        self.done = 0
        # Requests, which `send` changes without a lock.
        self._newest = Request(0, 0, RESET)
        self._first_due: Request | None = None  # of those that are not carried out
        self._last_set_ns = 0  # when one was last carried out
        self._unsent_packet: bytes | None = None  # the last one, where there was no room for it
        self._num_dropped = 0

        self._report_lock = threading.Lock()  # for all that follows, and for what is public above
        self._problems: list[str] = []
        self._last_request_failed = self._is_overdue = False
        # What the guard says, and not its exit status: whoever ignores SIGCHLD does not get that.
        self._ended: GuardEnded | None = None

        _guards.add(self)
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
        share: bool = False,
        check: Callable[[DeviceInfo], None] | None = None,
        **options: Any,
    ) -> Guard:
        """Start a guard for one GPU and wait until it is ready, for two minutes at most.

        A clock that a killed guard of the same GPU left set is given back first.

        Args:
            backend_name: one of envplan.devices.BACKENDS.
            device: which GPU.
            counted: by whom.
            every_request: set every clock asked for, in order, instead of only the newest when
                the driver takes longer than the owner's operations.
            meter: read the energy counter, too, about once a second, into `readings`.
            share: set the clock though processes of other users or containers compute on the
                GPU, which it slows down.
            check: is told of the GPU before it is touched, and raises what shall keep it so.
            options: for the backend; JSON values.

        Raises:
            DeviceError: there is no such GPU, this user may not set its clock, another guard has
                it, others compute on it, the driver hangs, or no process can be started; nothing
                was changed.
        """
        config = GuardConfig(
            backend=backend_name,
            device=device,
            counted=counted,
            options=options,
            every_request=every_request,
            reads_energy=meter,
            owner_pid=os.getpid(),
            handover_s=HANDOVER_TIMEOUT_S,
            shares=share,
        )
        process = _GuardChild(config)
        try:
            info = process.wait_for(GpuFound, START_TIMEOUT_S).info
            if check is not None:
                check(info)
            process.send(Request.packet([Request(0, 0, RESET)]))
            process.wait_for(Ready, START_TIMEOUT_S)
        except BaseException as error:
            process.kill()
            process.abandon()
            if isinstance(error, OSError):
                raise DeviceError("the clock guard did not start; it was killed") from error
            raise
        if os.getpid() == 1:
            _logger.warning(
                "training is process 1 of its container, whose end kills the clock guard as well: "
                "start the container with --init, or run envplan reset afterwards"
            )
        # From here on the GPU is known by the driver's index.
        return cls(process, info, replace(config, device=info.index, counted=Counted.BY_DRIVER))

    @property
    def pid(self) -> int:
        """The guard's process."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the guard is there, as far as is known."""
        return not self._is_closed

    @property
    def failing(self) -> bool:
        """Whether, when `problems` was last asked, the clock was not what was asked for."""
        return self._last_request_failed or self._is_overdue

    def request(self, mhz: int) -> None:
        """Have the clock set now. Never blocks, never raises; see `problems`.

        Args:
            mhz: the clock; 0 gives it back.
        """
        self.send([Request(self._newest.request_id + 1, time.perf_counter_ns(), mhz)])

    def send(self, requests: Sequence[Request]) -> None:
        """Have clocks set when they are due. Never blocks, never raises; see `problems`.

        Args:
            requests: a few of them, numbered upwards. One that was sent before may be sent again
                to become due sooner.
        """
        if self._is_closed:
            return
        for request in requests:
            if self._first_due is None or request.due_ns < self._first_due.due_ns:
                self._first_due = request
        self._newest = requests[-1]
        self._send(Request.packet(requests))

    def problems(self) -> list[str]:
        """Read what the guard reports: what went wrong since last asked, a line each.

        Sends a request again for which there was no room. Never blocks.
        """
        with self._report_lock:
            if not self._is_closed:
                self._read_reports()
                if self._unsent_packet is not None:
                    self._send(self._unsent_packet)
                self._note_overdue_requests()
            if self._num_dropped:
                self._problems.append(
                    f"the clock guard does not keep up: {self._num_dropped} requests were dropped"
                )
                self._num_dropped = 0
            problems, self._problems = self._problems, []
        return problems

    def close(self) -> None:
        """Give the clock back, end the guard and wait for it. Harmless when done before.

        Where the guard was killed, this gives the clock back in its place. Never raises, and does
        not wait for a driver that hangs, for more than 22 s: a clock that is not given back is
        among `problems`.
        """
        if self._is_owner():
            self._shut_down(_Cause.CLOSED)
            # Not by `_watch`: a request on its way would go to whatever gets its number next.
            self._process.close_requests()

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # subprocess keeps a process that runs, and so its pipes, when nobody else does.
        self._process.close_pipes()

    def _is_owner(self) -> bool:
        """Whether this is the process that started the guard, and no forked child of it."""
        return os.getpid() == self._config.owner_pid

    def _send(self, packet: bytes) -> None:
        self._unsent_packet = None
        try:
            self._process.send(packet)
        except BlockingIOError:
            self._num_dropped += 1
            self._unsent_packet = packet
        except OSError:
            pass  # it is gone, and `_watch` deals with that

    def _note_overdue_requests(self) -> None:
        """Note, once, that requests have not been acknowledged for too long."""
        is_overdue = False
        if self._first_due is not None:
            unset_since_ns = max(self._first_due.due_ns, self._last_set_ns)
            unset_s = (time.perf_counter_ns() - unset_since_ns) / 1e9
            is_overdue = unset_s > ACKNOWLEDGE_TIMEOUT_S
        if is_overdue and not self._is_overdue:
            self._problems.append(
                f"GPU {self.info.index}: the clock asked for {unset_s:.1f} s ago is not set "
                "yet; the driver hangs (see dmesg), or the clock guard was stopped"
            )
        self._is_overdue = is_overdue

    def _shut_down(self, cause: _Cause) -> None:
        """Make sure that the guard ends and the clock is given back; once.

        Runs in the thread of close(), or in that of `_watch`.
        """
        with self._shutdown_lock:
            if self._is_closed:
                return
            self._is_closed = True
            self.lost = cause is _Cause.DIED
            if cause is _Cause.CLOSED:
                self._process.ask_to_end()
            self._process.wait_or_terminate()
            with self._report_lock:
                self._read_reports()
                self._process.close_reports()
                self.reports_closed = True
            outcome = None
            reason = self._why_not_given_back()
            if reason is not None:
                outcome = f"the clock may still be set: {reason}; run: envplan reset"
            if cause is _Cause.DIED:
                outcome = f"the clock guard is gone; {outcome or 'its clock was given back'}"
            if outcome is not None:
                with self._report_lock:
                    self._problems.append(outcome)

    def _why_not_given_back(self) -> str | None:
        """Why the clock may still be set, after trying in the guard's place; None: it is not."""
        if self._process.returncode is None:
            return "the clock guard hangs or its driver fails, and it goes on trying"
        if self._ended is not None:
            return self._ended.problem
        return _recover(self._config)

    def _read_reports(self) -> None:
        """Take in what the guard has said. The caller holds _report_lock."""
        for message in self._process.read_messages():
            match message:
                case ClockSet():
                    self._note_clock_set(message)
                case ClockFailed(problem, is_repeated):
                    if not is_repeated:  # once for each failure that lasts
                        self._problems.append(problem)
                    self._last_request_failed = True
                case CounterReading():
                    self.readings.append(message)
                case GuardEnded():
                    self._ended = message

    def _note_clock_set(self, message: ClockSet) -> None:
        """A request is carried out. The caller holds _report_lock."""
        request_id = message.request_id
        self.done = request_id
        self.lags[request_id] = message.lag_ns
        self._last_set_ns = time.perf_counter_ns()
        self._last_request_failed = False
        if self._first_due is not None and self._first_due.request_id <= request_id:
            has_newer = self._newest.request_id > request_id
            self._first_due = self._newest if has_newer else None


def _watch(guard_reference: weakref.ref[Guard], reports: int) -> None:
    """Wait until a guard is gone, and see to it that its clock is given back.

    Runs in a thread of its own.
    """
    end = select.poll()
    end.register(reports, 0)  # no interest in what it says
    end.poll()
    with suppress(OSError):  # the owner may have closed all descriptors, which ends the guard, too
        os.close(reports)
    guard = guard_reference()
    if guard is not None and guard._is_owner():
        guard._shut_down(_Cause.DIED)


def _recover(config: GuardConfig) -> str | None:
    """Have another process give the clock back in the place of a guard; why not, or None.

    One that ends without having done so, as where it is killed itself, is followed by another. It
    is not waited for without a limit, and goes on.
    """
    deadline = time.monotonic() + CLOSE_TIMEOUT_S
    while True:
        try:
            process = _GuardChild(replace(config, recovers=True))
            try:
                process.wait_for(Recovered, max(0.0, deadline - time.monotonic()))
            finally:
                process.abandon()
        except DeviceError as error:
            if time.monotonic() >= deadline:
                return str(error)
            time.sleep(_RECOVERY_PAUSE_S)
        else:
            return None


class _GuardChild(subprocess.Popen[bytes]):
    """The guard's process, as its owner sees it. Its standard output are its reports.

    Args:
        config: what it is started with.

    Attributes:
        reports: the descriptor of its reports.

    Raises:
        DeviceError: it cannot be started.
    """

    def __init__(self, config: GuardConfig) -> None:
        _open_standard_streams()
        # Both ends of the requests' pipe stay open here: to write to one that nobody can read ends
        # a process that leaves SIGPIPE at its default.
        self._requests_read_end, self._requests = os.pipe()
        os.set_blocking(self._requests, False)
        with suppress(OSError):
            fcntl.fcntl(self._requests, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._partial_line = b""
        self._lines: deque[bytes] = deque()
        self._has_closed_reports = False
        # Signals wait until the guard can deal with them.
        signals_before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            # -P: files in the folder that training was started in are no modules of ours. Its own
            # session: what a terminal sends to the training's processes is not for the guard.
            super().__init__(
                [sys.executable, "-P", "-m", _PROGRAM, config.to_json()],
                stdin=self._requests_read_end,
                stdout=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
            )
        except OSError as error:
            self.close_requests()
            raise DeviceError(f"the clock guard cannot be started: {error.strerror}") from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, signals_before)
        assert self.stdout is not None
        self.reports = self.stdout.fileno()
        os.set_blocking(self.reports, False)

    def send(self, packet: bytes) -> None:
        """Send the requests of a packet.

        Raises:
            BlockingIOError: the guard has too much to read.
            OSError: the pipe is closed.
        """
        if _libc.write(self._requests, packet, len(packet)) < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def read_messages(self) -> Iterator[Message]:
        """The messages that have come and were not read yet."""
        with suppress(OSError):  # there is nothing, for now
            while chunk := os.read(self.reports, 65536):
                self._partial_line += chunk
            self._has_closed_reports = True
        *lines, self._partial_line = self._partial_line.split(b"\n")
        self._lines.extend(lines)
        while self._lines:
            message = parse_message(self._lines.popleft())
            if message is not None:
                yield message

    def wait_for(self, kind: type[M], timeout_s: float) -> M:
        """The first message of a kind; others before it are passed over.

        Raises:
            DeviceError: it says why it cannot start, or says nothing in time.
        """
        deadline = time.monotonic() + timeout_s
        poll = select.poll()
        poll.register(self.reports, select.POLLIN)
        while True:
            for message in self.read_messages():
                if isinstance(message, Refused):
                    raise DeviceError(message.reason)
                if isinstance(message, kind):
                    return message
            if self._has_closed_reports:
                raise DeviceError("the clock guard did not start; what it wrote is above")
            if not poll.poll(1e3 * max(0.0, deadline - time.monotonic())):
                raise DeviceError("the clock guard does not answer; the driver may hang, see dmesg")

    def ask_to_end(self) -> None:
        """Ask it to give the clock back and end."""
        with suppress(OSError):  # it has so much to read that the end must do
            self.send(Request.packet([Request(0, 0, SHUT_DOWN)]))
        self.close_requests()
        self.send_signal(signal.SIGCONT)  # it may be stopped

    def wait_or_terminate(self) -> None:
        """Wait for its end; it is asked once more if that takes long, and may go on after that."""
        try:
            self.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.terminate()  # for one that has much to read yet
            with suppress(subprocess.TimeoutExpired):
                self.wait(TERMINATE_TIMEOUT_S)

    def close_reports(self) -> None:
        """Read nothing more."""
        assert self.stdout is not None
        with suppress(OSError):
            self.stdout.close()

    def close_requests(self) -> None:
        """Send nothing more. The owner may have closed the descriptors itself."""
        descriptors = (self._requests, self._requests_read_end)
        self._requests = self._requests_read_end = _CLOSED
        for descriptor in descriptors:
            with suppress(OSError):
                os.close(descriptor)

    def close_pipes(self) -> None:
        """Send and read nothing more."""
        self.close_requests()
        if self.stdout is not None:
            with suppress(OSError):
                self.stdout.close()

    def abandon(self) -> None:
        """Close the pipes, and wait a little for its end: it may hang in the driver."""
        self.close_pipes()
        with suppress(subprocess.TimeoutExpired):
            self.wait(TERMINATE_TIMEOUT_S)


def _open_standard_streams() -> None:
    """Open those of 0, 1 and 2 that are closed, as a daemon's may be, on nothing.

    Else the pipes made next would be them, and what a library prints would be clocks for the guard.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
