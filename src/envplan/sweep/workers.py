"""Who computes a sweep's groups: processes of this machine, or a Ray cluster that is there already.

Both report task by task. A worker that dies costs the task it was at, which then has failed;
another one takes the rest of its group.
"""

from __future__ import annotations

import logging
import multiprocessing
import signal
import socket
import threading
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Final

from envplan.cores import use_cores
from envplan.errors import EnvplanError, InputError
from envplan.sweep.work import Done, Group, Task, compute

__all__ = ["run_on_processes", "run_on_ray"]

#: Every task with its outcome, as they come.
Outcomes = Generator[tuple[Task, Done], None, None]

_PATIENCE_S: Final = 10.0


def run_on_processes(groups: Sequence[Group], jobs: int) -> Outcomes:
    """Every task with its outcome, as they come.

    Args:
        jobs: processes, at most.

    Raises:
        EnvplanError: processes die before they begin.
    """
    waiting = deque(groups)
    # For each connection its process, and the group that this was given last.
    workers: dict[Any, tuple[BaseProcess, Group | None]] = {}
    try:
        while waiting or workers:
            while waiting and len(workers) < min(jobs, len(groups)):
                workers.update(_started())
            for connection in wait(list(workers)):
                assert isinstance(connection, Connection)
                process, group = workers[connection]
                try:
                    done = connection.recv()
                except (EOFError, ConnectionError):
                    _end(connection, process)
                    del workers[connection]
                    yield from _lost(group, process.exitcode or 0)
                    if group is not None and group.tasks:
                        waiting.appendleft(group)
                    continue
                if done is not None:
                    assert group is not None
                    yield group.tasks.popleft(), done
                elif waiting:
                    workers[connection] = process, (group := waiting.popleft())
                    with suppress(ConnectionError):  # it has died, as waiting for it will show
                        connection.send(group)
                else:
                    _end(connection, process)
                    del workers[connection]
    finally:
        for connection, (process, _) in workers.items():
            process.terminate()
            _end(connection, process)


def _started() -> dict[Any, tuple[BaseProcess, None]]:
    """A process that says None when it has nothing to do, and then takes a group. We end it
    ourselves, so it ignores Ctrl-C from its first instruction on."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    if threading.current_thread() is threading.main_thread():
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            process.start()
        finally:
            signal.signal(signal.SIGINT, before)
    else:
        process.start()
    theirs.close()
    return {ours: (process, None)}


def _end(connection: Connection, process: BaseProcess) -> None:
    """Let a process end: it does so where nobody sends it any more."""
    connection.close()
    process.join()


def _lost(group: Group | None, code: int) -> Iterator[tuple[Task, Done]]:
    if group is None:
        raise EnvplanError(f"a process of the sweep ended as it began, with exit code {code}")
    how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
    yield from group.lose(f"its process was ended {how}")


def _serve(connection: Connection) -> None:
    """Compute groups until nobody sends any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    use_cores(1)
    with suppress(EOFError, ConnectionError):
        while True:
            connection.send(None)
            for done in compute(connection.recv()):
                connection.send(done)


def run_on_ray(groups: Sequence[Group], address: str) -> Outcomes:
    """Every task with its outcome, as they come.

    A group is a Ray task on one CPU. envplan must be installed on the nodes; profiles need not be
    there.

    Args:
        address: of the cluster's head, such as 10.0.0.1:6379, or "auto".

    Raises:
        InputError: ray is not installed, or there is no cluster at the address.
    """
    if find_spec("ray") is None:
        raise InputError("--ray needs ray: pip install 'envplan[ray]'")
    if "://" in address:
        raise InputError(
            f"--ray {address}: Ray clients cannot run sweeps; run it on a node of the cluster with "
            "--ray auto, or give the address of its head, as in 10.0.0.1:6379"
        )
    import ray

    host, colon, port = address.rpartition(":")
    try:
        if colon:  # fail at once where Ray would go on trying for minutes
            socket.create_connection((host, int(port)), timeout=_PATIENCE_S).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, ValueError, OverflowError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        words = f"--ray {address}: no Ray cluster can be reached there ({reason})"
        raise InputError(words) from None
    try:
        remote = ray.remote(num_cpus=1, max_retries=0, num_returns="streaming")(_compute)
        running = {remote.remote(group): group for group in groups}
        while running:
            (stream,), _ = ray.wait(list(running), num_returns=1)
            group = running[stream]
            try:
                done = ray.get(next(stream))
                yield group.tasks.popleft(), done
            except StopIteration:
                del running[stream]
            except ray.exceptions.RayError as error:
                del running[stream]
                yield from group.lose(f"Ray: {str(error).strip()}"[:500])
                if group.tasks:
                    running[remote.remote(group)] = group
    finally:
        ray.shutdown()


def _compute(group: Group) -> Iterator[Done]:
    use_cores(1)
    yield from compute(group)
