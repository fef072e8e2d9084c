"""The guard's own side: a process that sets one GPU's clock until its owner is gone.

`python -m envplan.devices.guard_process CONFIG`, as guard.py starts it. It has one thread. Requests
come from a pipe, its standard input, and wait here until they are due: a thread of the training
would have to wait for its turn in the interpreter. What the guard reports goes to its standard
output. It ends, with the clock given back, when its owner says so, closes the pipe or dies, or when
it is asked to by a signal.
"""

from __future__ import annotations

import math
import os
import select
import signal
import sys
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Final, NamedTuple

from envplan.devices import Device, DeviceError, backend, choose
from envplan.devices.gpu_users import may_be_set_by_a_guard, wait_until_alone
from envplan.devices.guard_protocol import (
    READ_BYTES,
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
    message_line,
)
from envplan.devices.locks import (
    GIVE_BACK_TIMEOUT_S,
    RETRY_S,
    START_RETRY_S,
    LockFile,
    Mark,
    recover,
    retry_driver_call,
)
from envplan.errors import EnvplanError

#: Standard input, which requests come from.
_REQUESTS: Final = 0
_PARENT_CHECK_S: Final = 0.2
_READ_ENERGY_S: Final = 1.0
#: Requests that are read before they are due; others wait in the pipe, until that is full.
_MAX_WAITING: Final = 1024
#: How long a GPU may take to leave a clock that it is no longer held at.
_RELEASE_S: Final = 1.0

_ASK_TO_STOP: Final = [
    signal.Signals[f"SIG{name}"] for name in ["TERM", "INT", "HUP", "QUIT", "XCPU"]
]
#: What the process itself has done, and its children's end. All others are for the training, such
#: as those that batch systems send to every process of a job to warn it, and are ignored.
_LEFT_ALONE: Final = [
    signal.Signals[f"SIG{name}"]
    for name in ["KILL", "STOP", "CONT", "CHLD", "ABRT", "SEGV", "BUS", "ILL", "FPE", "TRAP", "SYS"]
]


def main(config: GuardConfig) -> None:
    """Be the guard of a GPU, or give its clock back in the place of one that was killed."""
    stop_signals = _open_stop_signals()
    os.set_blocking(1, False)
    lease = None
    try:
        if config.recovers:
            retry_driver_call(partial(_recover, config), GIVE_BACK_TIMEOUT_S)
            _report(Recovered())
            return
        source = backend(config.backend, **config.options)
        device = choose(source, config.device, config.counted)
        _report(GpuFound(device.info))
        reads_energy = config.reads_energy and source.real
        server = _ClockServer(device, replace(config, reads_energy=reads_energy), stop_signals)
        if not server.is_told_to_start():
            return
        if source.real:
            lease = _acquire_gpu(device, config, source.socket)
            server.previous_mhz = lease.previous_mhz
    except EnvplanError as error:
        _report(Refused(str(error)))
        return
    _report(Ready())
    problem = None
    try:
        server.read_energy()
        server.serve()
        server.read_energy()
    finally:
        # Also if nothing was asked for: an owner may set clocks itself and have this for its death.
        try:
            if lease is None:
                retry_driver_call(device.reset_clock, GIVE_BACK_TIMEOUT_S)
            else:
                lease.lock.restore(device, timeout_s=GIVE_BACK_TIMEOUT_S)
        except DeviceError as error:
            problem = str(error)
        _report(GuardEnded(problem))


def _recover(config: GuardConfig) -> None:
    """Give a clock back in the place of a guard that was killed.

    Raises:
        DeviceError: the GPU cannot be reached, or the driver does not do it.
    """
    source = backend(config.backend, **config.options)
    device = choose(source, config.device, config.counted)
    if source.real:
        recover(device)


def _report(message: Message) -> None:
    """Send a message to the owner, unless it is gone or has left the pipe full."""
    with suppress(OSError):
        os.write(1, message_line(message))


def _open_stop_signals() -> int:
    """A descriptor that becomes readable by signals that ask to stop; they do nothing else."""
    readable, writable = os.pipe()
    os.set_blocking(writable, False)
    signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    for number in _ASK_TO_STOP:
        signal.signal(number, lambda *_: None)
    for number in signal.valid_signals().difference(_LEFT_ALONE, _ASK_TO_STOP):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # whatever the owner had blocked
    return readable


class _ClockServer:
    """Carries out requests for one GPU.

    A request that fails is tried again until it succeeds or a newer one comes.

    Args:
        device: the GPU.
        config: of the guard.
        stop_signals: becomes readable when the guard is asked to stop.

    Attributes:
        previous_mhz: the clock that somebody else had set, MHz; 0: none.
    """

    def __init__(self, device: Device, config: GuardConfig, stop_signals: int) -> None:
        self.previous_mhz = 0
        self._device = device
        self._config = config
        self._stop_signals = stop_signals
        self._next_reading = 0.0 if config.reads_energy else math.inf
        os.set_blocking(_REQUESTS, False)

        self._waiting: list[Request] = []  # that are not due yet, or not taken up
        self._is_told_to_end = False
        self._request = Request(-1, 0, RESET)  # the newest that was taken up; at first none
        self._applied_target = RESET
        self._last_reported_id = self._request.request_id
        self._failure: _Failure | None = None  # of the last try

    def is_told_to_start(self) -> bool:
        """Wait for the owner to agree with the GPU; False if it does not or is gone."""
        while self._wait_for_requests(_PARENT_CHECK_S):
            self._receive_requests()
            if self._waiting or self._is_told_to_end:
                self._waiting.clear()
                return not self._is_told_to_end
        return False

    def serve(self) -> None:
        """Serve requests until the owner is done or gone, or the guard is asked to stop."""
        while self._wait_for_requests(self._time_to_next_s()):
            self._receive_requests()
            request = self._take_due_request()
            has_to_finish = self._config.every_request and request is not None
            if self._is_told_to_end and not has_to_finish:
                return
            if request is not None:
                self._request = request
            self._apply_request()  # again, where it failed
            if time.monotonic() >= self._next_reading:
                self.read_energy()

    def read_energy(self) -> None:
        """Report what the energy counter shows, if that is wanted and it can be read."""
        if self._config.reads_energy:
            self._next_reading = time.monotonic() + _READ_ENERGY_S
            with suppress(DeviceError):
                time_ns = time.perf_counter_ns()
                _report(CounterReading(time_ns, self._device.energy()))

    def _time_to_next_s(self) -> float:
        """How long to wait for requests from the owner at most, s."""
        is_applied = self._request.target == self._applied_target
        pause_s = _PARENT_CHECK_S if is_applied else RETRY_S
        if not self._waiting:
            return pause_s
        next_due_ns = min(request.due_ns for request in self._waiting)
        return min(pause_s, max(0, next_due_ns - time.perf_counter_ns()) / 1e9)

    def _wait_for_requests(self, timeout_s: float) -> bool:
        """Wait for a request, or until the timeout; False if asked to stop, or the owner died."""
        sources = [_REQUESTS, self._stop_signals]
        readable, _, _ = select.select(sources, [], [], timeout_s)  # poll waits for whole ms
        is_stopped = self._stop_signals in readable
        return not is_stopped and os.getppid() == self._config.owner_pid

    def _receive_requests(self) -> None:
        """Read what has come from the owner. One that has closed the pipe is done."""
        with suppress(BlockingIOError):  # it is open, and there are no more for now
            while len(self._waiting) < _MAX_WAITING:
                packets = os.read(_REQUESTS, READ_BYTES)
                if not packets:
                    self._is_told_to_end = True
                    return
                for request in Request.from_packets(packets):
                    self._take_in(request)

    def _take_in(self, request: Request) -> None:
        if request.target == SHUT_DOWN:
            self._is_told_to_end = True
        elif request.request_id > self._request.request_id:
            self._waiting.append(request)

    def _take_due_request(self) -> Request | None:
        """Take out the request to carry out now, with those that it overtakes; None: there is none.

        That is the newest that is due, or the first one where every clock shall be set.
        """
        now_ns = time.perf_counter_ns()
        due = [request for request in self._waiting if request.due_ns <= now_ns]
        if not due:
            return None
        choose_one = min if self._config.every_request else max
        taken = choose_one(due, key=lambda request: request.request_id)
        self._waiting = [
            request for request in self._waiting if request.request_id > taken.request_id
        ]
        return taken

    def _apply_request(self) -> None:
        """Set the clock of the newest request, and report what becomes of it, once."""
        request = self._request
        try:
            if request.target != self._applied_target:
                if request.target:
                    self._device.lock_clock(request.target)
                else:
                    self._device.give_back_clock(self.previous_mhz)
                self._applied_target = request.target
                self._failure = None
        except DeviceError as error:
            self._report_failure(_Failure(str(error), request.request_id))
            return
        if request.request_id != self._last_reported_id:
            self._last_reported_id = request.request_id
            _report(ClockSet(request.request_id, time.perf_counter_ns() - request.due_ns))

    def _report_failure(self, failure: _Failure) -> None:
        """Report a failure, unless it is that of the same request again, many times a second."""
        if failure != self._failure:
            is_repeated = self._failure is not None and failure.problem == self._failure.problem
            _report(ClockFailed(failure.problem, is_repeated))
        self._failure = failure


class _Failure(NamedTuple):
    """Why a request could not be carried out."""

    problem: str
    request_id: int


class _GpuLease(NamedTuple):
    """A GPU whose clock is the guard's to set.

    Attributes:
        lock: the file with the guard's mark, locked.
        previous_mhz: the clock that somebody else had set, MHz; 0: none.
    """

    lock: LockFile
    previous_mhz: int


def _acquire_gpu(device: Device, config: GuardConfig, socket_path: str) -> _GpuLease:
    """Lock a GPU's file and mark it as this guard's.

    A clock that a dead guard left set is given back first. Whether an administrator holds the GPU
    at a clock shows only when it is reset; it is then set again. A clock that may be another
    guard's is not noted: it would be put back when that guard is long gone.

    Args:
        device: the GPU.
        config: of the guard.
        socket_path: of the daemon that sets its clock; "" where none does.

    Raises:
        DeviceError: its clock may not be set, another guard has it, or others compute on it.
    """
    refusal = device.lock_refusal(probe=True)
    if refusal is not None:
        raise DeviceError(refusal)
    lock = LockFile(device.info.uuid)
    if not lock.acquire(config.handover_s):
        raise DeviceError(f"GPU {device.info.index}: {_whose_lock(lock.mark)}")
    others = [] if config.shares else wait_until_alone(device, config.handover_s)
    if others:
        raise DeviceError(
            f"GPU {device.info.index}: {' and '.join(others)} computes on it, and would be slowed "
            "down; to set its clock all the same: share=True, or --share"
        )
    lock.restore(device)
    previous_mhz = 0 if may_be_set_by_a_guard(device) else device.apparent_locked_clock()
    # Marked before anything is reset: a guard that is killed meanwhile leaves it to be put back.
    mark = Mark(os.getpid(), config.owner_pid, previous_mhz, config.backend, socket=socket_path)
    lock.set_mark(mark)
    if mark.previous_mhz:
        retry_driver_call(device.reset_clock, START_RETRY_S)
        if _leaves_clock(device, mark.previous_mhz):  # so somebody did hold it there
            retry_driver_call(partial(device.lock_clock, mark.previous_mhz), START_RETRY_S)
        else:
            mark = replace(mark, previous_mhz=0)
            lock.set_mark(mark)
    return _GpuLease(lock, mark.previous_mhz)


def _whose_lock(mark: Mark | None) -> str:
    """Whose guard has a GPU that cannot be locked, in a line."""
    guard = f"process {mark.guard_pid}" if mark else "just starting"
    if mark and mark.orphaned:
        return (
            f"the guard of a training that has ended, {guard}, does not end; the driver may hang, "
            "see dmesg"
        )
    return f"another training process of this user sets its clock (its guard is {guard})"


def _leaves_clock(device: Device, mhz: int) -> bool:
    """Whether a GPU that was reset leaves the clock that it seemed held at, within a second."""
    deadline_s = time.monotonic() + _RELEASE_S
    while device.apparent_locked_clock() == mhz:
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(RETRY_S)
    return True


if __name__ == "__main__":
    main(GuardConfig.from_json(sys.argv[1]))
