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
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import IO, Final, Self

from envplan.devices.base import DeviceError

__all__ = ["Peers", "run"]

_READY: Final = b"ready\n"
_DONE: Final = b"done\n"
_START_LIMIT: Final = 120.0  # loading CUDA and NCCL takes a while
_GRACE: Final = 30.0  # on top of the seconds asked for
_END_LIMIT: Final = 5.0

_WAITER, _SENDER = 0, 1


class Peers:
    """The two processes; a context that ends them.

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
        self._stack = ExitStack()
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="envplan-")))
        self._said: list[IO[bytes]] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank, environment in enumerate(environments):
                said = self._stack.enter_context((folder / f"stderr{rank}").open("wb+"))
                self._said.append(said)
                command = [sys.executable, "-m", __name__, backend, device, str(rank)]
                process = subprocess.Popen(
                    [*command, str(folder / "store")],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=said,
                    bufsize=0,
                    env={**os.environ, **environment},
                    start_new_session=True,  # Ctrl-C is for the sweep, which ends them
                )
                self._stack.callback(_end, process)
                self._processes.append(process)
            self._expect(_READY, _START_LIMIT)
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
        self._expect(_DONE, seconds + _GRACE)

    def close(self) -> None:
        """End both, whatever they are doing."""
        for process in self._processes:  # both learn of it before either is waited for
            assert process.stdin is not None
            process.stdin.close()
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _expect(self, word: bytes, limit: float) -> None:
        """Read until both have said the word, past whatever libraries print.

        Raises:
            DeviceError: one ends, or says nothing for too long.
        """
        deadline = time.monotonic() + limit
        for process in self._processes:
            assert process.stdout is not None
            line = b""
            while line != word:
                left = max(0.0, deadline - time.monotonic())
                if not select.select([process.stdout], [], [], left)[0]:
                    raise self._failure()
                line = process.stdout.readline()
                if not line:
                    raise self._failure()

    def _failure(self) -> DeviceError:
        """With the last line that either of them said."""
        lines: list[str] = []
        for file in self._said:
            file.seek(0)
            lines += file.read().decode("utf-8", errors="replace").strip().splitlines()[-1:]
        reason = lines[0] if lines else "they did not answer in time"
        return DeviceError(f"two processes cannot wait for each other: {reason}")


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(_END_LIMIT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    assert process.stdout is not None
    process.stdout.close()


def run(backend: str, device: str, rank: int, store: str, asks: IO[bytes], says: IO[bytes]) -> None:
    """Be one of the two: wait, or keep the other waiting, for each number of seconds asked for."""
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
    name, where, number, meeting = sys.argv[1:]
    run(name, where, int(number), meeting, sys.stdin.buffer, sys.stdout.buffer)
