"""Whether changes of clock disturb NCCL (NCCL#1551): all-reduces while clocks change, and do not.

    python -m tools.changing_clocks          two GPUs, NCCL; sets clocks; about two minutes

Two processes, one a GPU, reduce the same tensor over and over. In turn the clocks are locked, and
changed at intervals of 1 s down to 10 ms between two neighbouring clocks, so that the clock itself
makes nothing slower. Each process changes its own GPU's clock, in a thread. Guards give clocks
back.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from benchmarks.report import table

from envplan.devices import Device, DeviceError, backend
from envplan.devices.guard import Guard

#: Between two changes of clock, s; None: locked.
INTERVALS_S: tuple[float | None, ...] = (None, 1.0, 0.3, 0.1, 0.05, 0.02, 0.01, None)
SECONDS = 12.0
_WARM_UP = 20
_START_S, _GRACE_S = 120.0, 60.0


@dataclass(frozen=True)
class Setting:
    """How all-reduces are run.

    Attributes:
        source: the backend whose GPUs' clocks are changed.
        communication: of torch.distributed: "nccl", or "gloo" on the CPU.
        elements: of the tensor, in single precision.
        seconds: for each interval.
        intervals_s: between changes, s; None: locked.
    """

    source: str = "nvml"
    communication: str = "nccl"
    elements: int = 2**22
    seconds: float = SECONDS
    intervals_s: Sequence[float | None] = INTERVALS_S


@dataclass(frozen=True)
class Row:
    """All-reduces at one interval, as the first process saw them.

    Attributes:
        interval_s: between changes of clock; None: locked.
        changes: of one GPU's clock.
        reductions: how many were timed.
        median_s: of their times.
        p99_s: the 99th percentile.
    """

    interval_s: float | None
    changes: int
    reductions: int
    median_s: float
    p99_s: float


def two_clocks(clocks_mhz: Sequence[int]) -> tuple[int, int]:
    """Neighbouring clocks at three quarters of the highest, so that no power limit interferes."""
    wanted = 0.75 * max(clocks_mhz)
    below = [mhz for mhz in sorted(clocks_mhz) if mhz <= wanted]
    return below[-1], below[-2]


class Changer:
    """Changes a GPU's clock between two at an interval, in a thread, while the context lasts."""

    def __init__(self, device: Device, clocks_mhz: tuple[int, int], interval_s: float | None):
        self.changes = 0
        self._device, self._clocks_mhz, self._interval_s = device, clocks_mhz, interval_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Changer:
        self._device.lock_clock(self._clocks_mhz[0])
        if self._interval_s is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        if self._interval_s is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(self._interval_s):
            self.changes += 1
            self._device.lock_clock(self._clocks_mhz[self.changes % 2])


def measure(setting: Setting) -> list[Row]:
    """A row for each interval.

    Raises:
        DeviceError: there are no two GPUs, a clock may not be set, or a process fails.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        source = backend(setting.source)
        stack.callback(source.close)
        if len(source.devices()) < 2:
            raise DeviceError("this takes two GPUs, and there is one")
        for device in source.devices()[:2]:
            if refusal := device.lock_refusal(probe=True):
                raise DeviceError(refusal)
        pipes, processes = [], []
        for rank in range(2):
            here, there = context.Pipe()
            arguments = (rank, setting, str(Path(folder, "store")), there)
            processes.append(context.Process(target=_rank, args=arguments, daemon=True))
            processes[-1].start()
            there.close()
            pipes.append(here)
        try:
            return _result(pipes, _START_S + _GRACE_S + len(setting.intervals_s) * setting.seconds)
        finally:
            for process in processes:
                process.join(_GRACE_S)
                if process.is_alive():
                    process.kill()


def _result(pipes: Sequence[Connection], timeout_s: float) -> list[Row]:
    results = []
    for pipe in pipes:
        try:
            answered = pipe.poll(timeout_s)
            result = pipe.recv() if answered else "a process did not end in time"
        except EOFError:
            result = "a process died"
        if isinstance(result, str):
            raise DeviceError(f"all-reduces: {result}")
        results.append(result)
    rows: list[Row] = results[0]
    return rows


def _rank(rank: int, setting: Setting, store: str, pipe: Connection) -> None:
    """One process: reduce, and change the clock of its GPU."""
    try:
        with ExitStack() as stack:
            stack.enter_context(Guard.start(setting.source, rank))
            source = backend(setting.source)
            stack.callback(source.close)
            device = source.devices()[rank]
            stack.callback(device.reset_clock)
            dist.init_process_group(
                setting.communication, store=dist.FileStore(store, 2), rank=rank, world_size=2
            )
            stack.callback(dist.destroy_process_group)
            on_gpu = setting.communication == "nccl"
            there = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
            if on_gpu:
                torch.cuda.set_device(there)
            tensor = torch.zeros(setting.elements, device=there)
            clocks_mhz = two_clocks(device.info.supported_clocks)
            rows = []
            for interval_s in setting.intervals_s:
                with Changer(device, clocks_mhz, interval_s) as changer:
                    times_s = _reduce(tensor, setting.seconds, rank)
                rows.append(_row(interval_s, changer.changes, times_s))
        pipe.send(rows)
    except Exception as error:
        pipe.send(" ".join(f"{type(error).__name__}: {error}".split()))


def _reduce(tensor: torch.Tensor, seconds: float, rank: int) -> list[float]:
    """Times of all-reduces, s, until the first process says that it is enough."""
    synchronize: Callable[[], object] = torch.cuda.synchronize if tensor.is_cuda else lambda: None
    go_on = torch.ones(1, device=tensor.device)
    for _ in range(_WARM_UP):
        dist.all_reduce(tensor)
    synchronize()
    times_s = []
    end_s = time.monotonic() + seconds
    while True:
        begin_s = time.perf_counter()
        dist.all_reduce(tensor)
        synchronize()
        times_s.append(time.perf_counter() - begin_s)
        if len(times_s) % 100 == 0:
            go_on.fill_(float(time.monotonic() < end_s))
            dist.broadcast(go_on, 0)
            if not go_on.item():
                return times_s


def _row(interval_s: float | None, changes: int, times_s: Sequence[float]) -> Row:
    p99_s = statistics.quantiles(times_s, n=100)[-1]
    return Row(interval_s, changes, len(times_s), statistics.median(times_s), p99_s)


def section(rows: Sequence[Row]) -> str:
    """The page's table."""
    header = ("clocks change every", "changes", "all-reduces", "median, us", "99th percentile, us")
    cells = []
    for row in rows:
        every = "locked" if row.interval_s is None else f"{1e3 * row.interval_s:g} ms"
        times = [f"{1e6 * seconds:.1f}" for seconds in (row.median_s, row.p99_s)]
        cells.append([every, str(row.changes), str(row.reductions), *times])
    return table(header, cells)


def main() -> None:
    """Measure on this machine's first two GPUs and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for each interval")
    options = parser.parse_args()
    try:
        print(section(measure(Setting(seconds=options.seconds))))
    except DeviceError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
