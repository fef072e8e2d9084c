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

_WAITER, _SENDER = 0, 1  # ranks
_ALL_WELL: Final = ""  # the message of a process that has failed at nothing


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
                process = spawning.Process(
                    target=_run,
                    args=(backend, device, rank, f"{folder}/store", dict(environment), theirs),
                    daemon=True,
                )
                self._pipes.append(ours)
                process.start()
                theirs.close()
                self._processes.append(process)
            self._expect_all_well(_START_LIMIT)
        except BaseException:
            self.close()
            raise

    def wait(self, seconds: float) -> None:
        """Have the one process wait for the other for so long.

        Raises:
            DeviceError: one of them has failed.
        """
        for pipe in self._pipes:
            with suppress(OSError):  # one has ended; its last message is read below
                pipe.send(seconds)
        self._expect_all_well(seconds + _GRACE)

    def _end(self) -> None:
        for pipe in self._pipes:  # both learn of the end before either is waited for
            pipe.close()
        for process in self._processes:
            process.join(_END_LIMIT)
            process.kill()
            process.join()

    def _expect_all_well(self, limit_s: float) -> None:
        """Read a message of each process, which must be that all is well.

        Raises:
            DeviceError: one ends or fails, or says nothing for so many seconds.
        """
        deadline_s = time.monotonic() + limit_s
        for pipe in self._pipes:
            message = _message(pipe, deadline_s)
            if message != _ALL_WELL:
                raise DeviceError(f"two processes cannot wait for each other: {message}")


def _message(pipe: Connection, deadline_s: float) -> str:
    """The next message of a process, or why there is none by a time of the monotonic clock."""
    try:
        if not pipe.poll(max(0.0, deadline_s - time.monotonic())):
            return "they did not answer in time"
    except OSError:
        return "they did not answer in time"
    try:
        message: str = pipe.recv()
    except (EOFError, OSError):
        return "one of them ended"
    return message


def _run(
    backend: str,
    device: str,
    rank: int,
    store: str,
    environment: Mapping[str, str],
    pipe: Connection,
) -> None:
    """Be one of the two: wait, or keep the other waiting, for each number of seconds asked for.

    Once both have met, and after each wait, it sends _ALL_WELL; when something fails, the reason.
    """
    os.setsid()  # Ctrl-C is for the sweep, which ends them
    os.environ.update(environment)
    for stream in (1, 2):  # whatever libraries print
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    try:
        _meet(backend, device, rank, store, pipe)
    except Exception as error:
        with suppress(OSError):
            pipe.send(_reason(error))


def _reason(error: Exception) -> str:
    """The last line of an error's words, or its name if it has none."""
    return str(error).strip().splitlines()[-1] if str(error) else type(error).__name__


def _meet(backend: str, device: str, rank: int, store: str, pipe: Connection) -> None:
    """Connect the two processes, then transfer after each number of seconds, until the pipe ends.

    The sender sleeps for so long, while the other waits to receive.
    """
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
            pipe.send(_ALL_WELL)
            seconds = pipe.recv()
            if rank == _SENDER:
                time.sleep(seconds)
            transfer()
