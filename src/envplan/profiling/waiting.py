"""What a GPU draws while it waits in a transfer, made by two processes on two GPUs.

One process waits to receive, on the GPU that is measured, while the other sleeps on a second GPU
before it sends: just what a pipeline's stage does that is faster than its neighbour. Whoever reads
the energy counter meanwhile has the blocking power.

As a program this module is one of the two: python -m envplan.profiling.waiting BACKEND DEVICE RANK
STORE. It says "ready" once both have met, then waits once for each number of seconds it reads.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import IO, Final, Self

from envplan.devices.base import DeviceError

__all__ = ["Peers", "main"]

_READY: Final = b"ready\n"
_DONE: Final = b"done\n"
_START_LIMIT: Final = 120.0  # loading CUDA and NCCL takes a while
_GRACE: Final = 30.0  # on top of the seconds asked for
_END_LIMIT: Final = 5.0

_WAITER, _SENDER = 0, 1


class Peers:
    """The two processes.

    Args:
        backend: of torch.distributed: "nccl", or "gloo" on the CPU.
        device: that each process uses, such as "cuda:0".
        environments: what to set for the one that waits and for the one that sends, such as
            CUDA_VISIBLE_DEVICES.

    Raises:
        DeviceError: they do not start or do not find each other.
    """

    def __init__(
        self,
        *,
        backend: str,
        device: str,
        environments: Sequence[Mapping[str, str]] = ({}, {}),
    ) -> None:
        self.description = f"of a GPU that waits to receive from another through {backend}"
        self._folder = tempfile.TemporaryDirectory(prefix="envplan-waiting-")
        self._said = [(Path(self._folder.name) / f"stderr{rank}").open("wb+") for rank in (0, 1)]
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank, environment in enumerate(environments):
                self._processes.append(self._started(backend, device, rank, environment))
            for process in self._processes:
                self._expect(process, _READY, _START_LIMIT)
        except BaseException:
            self.close()
            raise

    def wait(self, seconds: float) -> None:
        """Have the one process wait for the other for so long.

        Raises:
            DeviceError: one of them has failed.
        """
        for process in self._processes:
            assert process.stdin is not None
            try:
                process.stdin.write(f"{seconds}\n".encode())
            except OSError:
                raise self._failure() from None
        for process in self._processes:
            self._expect(process, _DONE, seconds + _GRACE)

    def close(self) -> None:
        """End both, whatever they are doing."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(_END_LIMIT)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()
        for file in self._said:
            file.close()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _started(
        self, backend: str, device: str, rank: int, environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        store = str(Path(self._folder.name) / "store")
        return subprocess.Popen(
            [sys.executable, "-m", "envplan.profiling.waiting", backend, device, str(rank), store],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said[rank],
            bufsize=0,
            env={**os.environ, **environment},
            start_new_session=True,  # Ctrl-C is for the sweep, which ends them
        )

    def _expect(self, process: subprocess.Popen[bytes], word: bytes, limit: float) -> None:
        """Read until the word comes, past whatever libraries print.

        Raises:
            DeviceError: the process ends, or says nothing for too long.
        """
        assert process.stdout is not None
        deadline = time.monotonic() + limit
        while select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
            line = process.stdout.readline()
            if line == word:
                return
            if not line:
                break
        raise self._failure()

    def _failure(self) -> DeviceError:
        """With the last line that either of them said."""
        lines: list[str] = []
        for file in self._said:
            file.seek(0)
            lines += file.read().decode("utf-8", errors="replace").strip().splitlines()[-1:]
        reason = lines[0] if lines else "they did not answer in time"
        return DeviceError(f"two processes cannot wait for each other: {reason}")


def main(arguments: Sequence[str]) -> None:
    """Be one of the two processes, until stdin ends."""
    backend, device, rank, store = arguments
    run(backend, device, int(rank), store, sys.stdin.buffer, sys.stdout.buffer)


def run(backend: str, device: str, rank: int, store: str, asks: IO[bytes], says: IO[bytes]) -> None:
    """Wait, or keep the other waiting, once for each number of seconds that is asked for."""
    import torch
    from torch import distributed

    def say(word: bytes) -> None:
        says.write(word)
        says.flush()

    def transfer() -> None:
        if rank == _WAITER:
            distributed.recv(parcel, _SENDER)
        else:
            distributed.send(parcel, _WAITER)
        parcel.sum().item()  # returns once the transfer is over, on the GPU too

    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    distributed.init_process_group(
        backend,
        rank=rank,
        world_size=2,
        init_method=f"file://{store}",
        timeout=timedelta(seconds=_START_LIMIT),  # one that lost the other ends by itself
    )
    parcel = torch.ones(1, device=device)
    transfer()  # the first one connects them
    say(_READY)
    for line in asks:
        if rank == _SENDER:
            time.sleep(float(line))
        transfer()
        say(_DONE)


if __name__ == "__main__":
    main(sys.argv[1:])
