"""Waiting in a transfer, made by two processes on two GPUs, to measure the blocking power.

One process waits to receive, on the GPU that is measured, while the other sleeps on a second GPU
before it sends: just what a pipeline's stage does that is faster than its neighbour. Whoever reads
the energy counter meanwhile has the blocking power.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Final

from envplan.devices import DeviceError

__all__ = ["Peers"]

_START_LIMIT: Final = 120.0  # loading CUDA and NCCL takes a while
_GRACE: Final = 30.0  # on top of the seconds asked for
_END_LIMIT: Final = 5.0

_WAITER, _SENDER = 0, 1


class Peers(ExitStack):
    """The two processes; a context that ends them, whatever they are doing.

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
        super().__init__()
        self.description = f"of a GPU that waits to receive from another through {backend}"
        folder = self.enter_context(tempfile.TemporaryDirectory(prefix="envplan-"))
        spawning = multiprocessing.get_context("spawn")
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self.callback(self._end)
        try:
            for rank, environment in enumerate(environments):
                ours, theirs = spawning.Pipe()
                how = (backend, device, rank, f"{folder}/store", dict(environment), theirs)
                process = spawning.Process(target=_run, args=how, daemon=True)
                self._pipes.append(ours)
                process.start()
                theirs.close()
                self._processes.append(process)
            self._expect(_START_LIMIT)
        except BaseException:
            self.close()
            raise

    def wait(self, seconds: float) -> None:
        """Have the one process wait for the other for so long.

        Raises:
            DeviceError: one of them has failed.
        """
        for pipe in self._pipes:
            with suppress(OSError):  # what it said before it ended is read below
                pipe.send(seconds)
        self._expect(seconds + _GRACE)

    def _end(self) -> None:
        for pipe in self._pipes:  # both learn of it before either is waited for
            pipe.close()
        for process in self._processes:
            process.join(_END_LIMIT)
            process.kill()
            process.join()

    def _expect(self, limit: float) -> None:
        """Read until both have said that all is well.

        Raises:
            DeviceError: one ends, or says nothing for too long.
        """
        deadline = time.monotonic() + limit
        for pipe in self._pipes:
            reason = "they did not answer in time"
            with suppress(EOFError, OSError):
                if pipe.poll(max(0.0, deadline - time.monotonic())):
                    reason = "one of them ended"
                    reason = pipe.recv()
            if reason:
                raise DeviceError(f"two processes cannot wait for each other: {reason}")


def _run(
    backend: str,
    device: str,
    rank: int,
    store: str,
    environment: Mapping[str, str],
    pipe: Connection,
) -> None:
    """Be one of the two: wait, or keep the other waiting, for each number of seconds asked for.

    After each wait, and once both have met, "" is said; the reason, when something fails.
    """
    os.setsid()  # Ctrl-C is for the sweep, which ends them
    os.environ.update(environment)
    for stream in (1, 2):  # whatever libraries print
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    try:
        _meet(backend, device, rank, store, pipe)
    except Exception as error:
        with suppress(OSError):
            pipe.send(str(error).strip().splitlines()[-1] if str(error) else type(error).__name__)


def _meet(backend: str, device: str, rank: int, store: str, pipe: Connection) -> None:
    import torch
    from torch import distributed

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
    with suppress(EOFError):
        while True:
            pipe.send("")
            seconds = pipe.recv()
            if rank == _SENDER:
                time.sleep(seconds)
            transfer()
