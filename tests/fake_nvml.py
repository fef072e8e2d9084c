"""GPUs for tests: the fake NVML library, built once, and a view of its state.

While a test has the fixture `fake_nvml`, this process and all that it starts see its GPUs through
the real nvidia-ml-py, and no others: LD_LIBRARY_PATH and ENVPLAN_FAKE_NVML are set in os.environ.
"""

from __future__ import annotations

import atexit
import ctypes
import mmap
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from envplan.devices.locks import lock_folders
from envplan.devices.modelled import ModelledGpu, gpu

SOURCE = Path(__file__).parent / "fake_nvml" / "libnvidia-ml.c"
KINDS = ("init", "lock", "reset", "energy", "power", "clock", "throttle", "limit", "handle")
MAX_GPUS, MAX_LOG, TEXT = 16, 65536, 96

#: Codes for faults, as in nvml.h.
NOT_SUPPORTED, NO_PERMISSION, GPU_IS_LOST, UNKNOWN = 3, 4, 15, 999


class _Fault(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_int32),
        ("remaining", ctypes.c_int32),
        ("probability", ctypes.c_double),
    )


class _Gpu(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char * TEXT),
        ("uuid", ctypes.c_char * TEXT),
        ("num_clocks", ctypes.c_int32),
        ("clocks", ctypes.c_int32 * 256),
        ("memory_clock", ctypes.c_int32),
        ("permission", ctypes.c_int32),
        ("energy_counter", ctypes.c_int32),
        ("mig", ctypes.c_int32),
        ("locked", ctypes.c_int32),
        ("boost", ctypes.c_int32),
        ("earlier", ctypes.c_int32),
        ("stuck", ctypes.c_int32),
        ("hang", ctypes.c_uint32),
        ("due_time", ctypes.c_int64),
        ("clock_delay_ns", ctypes.c_int64),
        ("clock_jitter_ns", ctypes.c_int64),
        ("throttle", ctypes.c_uint64),
        ("lock_delay_ns", ctypes.c_uint64),
        ("energy_step_ns", ctypes.c_uint64),
        ("power_limit", ctypes.c_double),
        ("static_power", ctypes.c_double),
        ("dynamic", ctypes.c_double),
        ("knee", ctypes.c_double),
        ("slope", ctypes.c_double),
        ("activity", ctypes.c_double),
        ("energy", ctypes.c_double),
        ("counter", ctypes.c_double),
        ("energy_time", ctypes.c_int64),
        ("counter_time", ctypes.c_int64),
        ("faults", _Fault * len(KINDS)),
        ("num_processes", ctypes.c_int32),
        ("processes", ctypes.c_int32 * 8),
    )


class _Entry(ctypes.Structure):
    _fields_ = (
        ("time", ctypes.c_int64),
        ("due", ctypes.c_int64),
        ("pid", ctypes.c_int32),
        ("gpu", ctypes.c_int32),
        ("kind", ctypes.c_int32),
        ("mhz", ctypes.c_int32),
        ("result", ctypes.c_int32),
        ("before", ctypes.c_int32),
    )


class _State(ctypes.Structure):
    _fields_ = (
        ("driver", ctypes.c_char * TEXT),
        ("num_gpus", ctypes.c_int32),
        ("log_size", ctypes.c_int32),
        ("random", ctypes.c_uint64),
        ("gpus", _Gpu * MAX_GPUS),
        ("log", _Entry * MAX_LOG),
    )


def wait_for(condition: Callable[[], object]) -> None:
    """Until something is so, a minute at most."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.002)


@dataclass(frozen=True)
class Call:
    """A logged call that sets or resets a clock (or a power limit).

    Attributes:
        time: s, CLOCK_MONOTONIC.
        kind: "lock", "reset" or "limit".
        mhz: what was asked for (W for a limit); 0 for a reset.
        result: nvmlReturn_t, 0 for success.
        due: when the clock is there, s; 0 for a limit.
        before: the clock until then, MHz; 0 for a limit.
    """

    time: float
    pid: int
    gpu: int
    kind: str
    mhz: int
    result: int
    due: float = 0.0
    before: int = 0


class FakeNvml:
    """The GPUs of a state file, for reading and for changing from a test."""

    def __init__(self, path: Path, model: ModelledGpu, count: int) -> None:
        with path.open("wb") as file:
            file.truncate(ctypes.sizeof(_State))
        self._attach(path)
        self.model = model
        self.state.driver = b"550.54.14"
        self.state.num_gpus = count
        self.state.random = 0x9E3779B97F4A7C15
        for index in range(count):
            _fill(self.gpu(index), model, index)

    @classmethod
    def attached(cls, path: Path) -> FakeNvml:
        """The GPUs of a state file that there is already."""
        fake = cls.__new__(cls)
        fake._attach(path)
        return fake

    def _attach(self, path: Path) -> None:
        self.path = path
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self.state = _State.from_buffer(self._map)

    def gpu(self, index: int = 0) -> _Gpu:
        """The raw state of a GPU: every field may be read and set."""
        found: _Gpu = self.state.gpus[index]
        return found

    def locked(self, index: int = 0) -> int | None:
        """The clock a GPU is locked at, MHz, or None."""
        return int(self.gpu(index).locked) or None

    def wait_until_free(self, timeout: float = 1.0) -> float | None:
        """Wait until no GPU is locked.

        Returns:
            How long it took, s; None if some clock was still locked after `timeout`.
        """
        begin = time.monotonic()
        while any(self.gpu(k).locked for k in range(self.state.num_gpus)):
            if time.monotonic() - begin > timeout:
                return None
            time.sleep(0.002)
        return time.monotonic() - begin

    def calls(self, index: int | None = None, kind: str | None = None) -> list[Call]:
        """The logged calls, oldest first; of one GPU or one kind if asked for."""
        size = self.state.log_size
        entries = [self.state.log[k % MAX_LOG] for k in range(max(0, size - MAX_LOG), size)]
        calls = [
            Call(
                e.time * 1e-9, e.pid, e.gpu, KINDS[e.kind], e.mhz, e.result, e.due * 1e-9, e.before
            )
            for e in entries
        ]
        return [c for c in calls if index in (None, c.gpu) and kind in (None, c.kind)]

    def clock_changes(self, index: int = 0) -> list[int]:
        """What a GPU's clock was set to, in order, MHz; 0 is a reset. Failed calls left out."""
        done = [c for c in self.calls(index) if c.result == 0 and c.kind != "limit"]
        return [c.mhz for c in done]

    def clock_at(self, time_s: float, index: int = 0) -> int:
        """The clock that a GPU ran at, MHz, by the log."""
        slot = self.gpu(index)
        if slot.stuck:
            return int(slot.stuck)
        highest = int(slot.boost or slot.clocks[0])
        calls = [call for call in self._clock_calls(index) if call.time <= time_s]
        if not calls:
            return highest
        last = calls[-1]
        return last.before if time_s < last.due else last.mhz or highest

    def change_times(self, index: int = 0) -> list[float]:
        """When a GPU's clock may have changed, s, ascending, by the log."""
        calls = self._clock_calls(index)
        return sorted({time_s for call in calls for time_s in (call.time, call.due)})

    def _clock_calls(self, index: int) -> list[Call]:
        calls = self.calls(index)
        return [call for call in calls if call.result == 0 and call.kind != "limit"]

    def fail(
        self,
        kind: str,
        code: int = UNKNOWN,
        *,
        index: int = 0,
        times: int = -1,
        probability: float = 1.0,
    ) -> None:
        """Let calls of a kind fail: all of them, the next few, or by chance. Code 0 ends it."""
        fault = self.gpu(index).faults[KINDS.index(kind)]
        fault.code, fault.remaining, fault.probability = code, times, probability

    def compute(self, *pids: int, index: int = 0) -> None:
        """Let these processes compute on a GPU, as the driver tells it, and no others."""
        gpu = self.gpu(index)
        gpu.num_processes = len(pids)
        for number, pid in enumerate(pids):
            gpu.processes[number] = pid

    def hang(self, *kinds: str, index: int = 0) -> None:
        """Let calls of these kinds not return until this is called again without them."""
        self.gpu(index).hang = sum(1 << KINDS.index(kind) for kind in kinds)

    def close(self) -> None:
        """Let go of the file, and of the lock files; whatever hangs goes on."""
        for index in range(MAX_GPUS):
            self.hang(index=index)
            for folder in lock_folders(os.geteuid()):
                if uuid := self.gpu(index).uuid.decode():
                    (folder / f"{uuid}.lock").unlink(missing_ok=True)
        del self.state
        self._map.close()


def _fill(slot: _Gpu, model: ModelledGpu, index: int) -> None:
    slot.name = model.name.encode()
    # Lock files are found by it, and the tests of others run beside us.
    slot.uuid = f"GPU-{os.getpid():08x}-{time.monotonic_ns():x}-{index:04d}".encode()
    slot.num_clocks = len(model.clocks_mhz)
    for k, mhz in enumerate(model.clocks_mhz):
        slot.clocks[k] = mhz
    slot.memory_clock = model.memory_clock_mhz
    slot.permission = slot.energy_counter = 1
    slot.power_limit = model.power_limit_w
    slot.static_power = model.static_power_w
    slot.dynamic = model.dynamic_power_w_per_mhz
    slot.knee = model.knee_mhz
    slot.slope = model.voltage_slope_per_mhz
    slot.activity = 1.0
    slot.energy = slot.counter = 1e6
    slot.energy_time = slot.counter_time = time.monotonic_ns()


@cache
def fake_library() -> Path:
    """The folder with the fake libnvidia-ml.so.1, built when first asked for."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    folder = Path(tempfile.mkdtemp(prefix="envplan-fake-nvml-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    library = folder / "libnvidia-ml.so.1"
    command = [compiler, "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread"]
    command += [f"-Wl,-soname,{library.name}", str(SOURCE), "-o", str(library)]
    subprocess.run(command, check=True)
    folder.chmod(0o755)
    # The loader read LD_LIBRARY_PATH when this process began. A library that is loaded already is
    # found by its soname instead, so that here, too, nvidia-ml-py gets ours.
    loaded = ctypes.CDLL(str(library))
    found = ctypes.CDLL(library.name)
    for one in (loaded, found):
        assert ctypes.c_int.in_dll(one, "envplan_fake_nvml").value == ctypes.sizeof(_State)
    return folder


def open_fake_nvml(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, model: str = "a40", count: int = 4
) -> FakeNvml:
    """Let this process and its children see `count` fake GPUs of a model, and no others."""
    library = fake_library()
    fake = FakeNvml(folder / "nvml.state", gpu(model), count)
    monkeypatch.setenv("ENVPLAN_FAKE_NVML", str(fake.path))
    path = os.environ.get("LD_LIBRARY_PATH")
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{library}:{path}" if path else str(library))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return fake


@pytest.fixture
def fake_nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNvml]:
    """Four fake A40s that this test and all processes it starts see as theirs."""
    fake = open_fake_nvml(tmp_path, monkeypatch)
    yield fake
    fake.close()
