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
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from multiprocessing.connection import Connection, wait
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
    workers: dict[Connection, _Worker] = {}
    try:
        while waiting or workers:
            while waiting and len(workers) < min(jobs, len(groups)):
                worker = _Worker()
                workers[worker.connection] = worker
            for connection in wait(list(workers)):
                assert isinstance(connection, Connection)
                worker = workers[connection]
                try:
                    done = connection.recv()
                except (EOFError, ConnectionError):
                    del workers[connection]
                    group, why = worker.died()
                    if group.tasks:
                        yield group.lose(why)
                    if group.tasks:
                        waiting.appendleft(group)
                    continue
                if done is not None:
                    assert worker.group is not None
                    yield worker.group.tasks.popleft(), done
                elif waiting:
                    worker.begin(waiting.popleft())
                else:
                    worker.stop()
                    del workers[connection]
    finally:
        for worker in workers.values():
            worker.stop(at_once=True)


class _Worker:
    """A process and the group that it was given last; it says None when it has nothing to do."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        with _interrupts_ignored():
            self._process.start()
        theirs.close()
        self.group: Group | None = None

    def begin(self, group: Group) -> None:
        self.group = group
        with suppress(ConnectionError):  # it has died, as waiting for it will show
            self.connection.send(group)

    def died(self) -> tuple[Group, str]:
        """What it has not done of its group, and how it ended."""
        self.stop()
        code = self._process.exitcode
        if self.group is None:
            raise EnvplanError(f"a process of the sweep ended as it began, with exit code {code}")
        how = f"by signal {-code}" if code is not None and code < 0 else f"with exit code {code}"
        return self.group, f"its process was ended {how}"

    def stop(self, *, at_once: bool = False) -> None:
        """Let it end: it does so where nobody sends it any more."""
        self.connection.close()
        if at_once:
            self._process.terminate()
        self._process.join()


def _serve(connection: Connection) -> None:
    """Compute groups until nobody sends any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    use_cores(1)
    with suppress(EOFError, ConnectionError):
        while True:
            connection.send(None)
            for done in compute(connection.recv()):
                connection.send(done)


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """A process started here ignores Ctrl-C from its first instruction on: we end it ourselves."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


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
        raise InputError(
            f"--ray {address}: no Ray cluster can be reached there ({reason})"
        ) from None
    try:
        yield from _outcomes(ray, groups)
    finally:
        ray.shutdown()


def _compute(group: Group) -> Iterator[Done]:
    use_cores(1)
    yield from compute(group)


def _outcomes(ray: Any, groups: Sequence[Group]) -> Iterator[tuple[Task, Done]]:
    remote = ray.remote(num_cpus=1, max_retries=0, num_returns="streaming")(_compute)
    running = {remote.remote(group): group for group in groups}
    while running:
        ready, _ = ray.wait(list(running), num_returns=1)
        stream = ready[0]
        group = running[stream]
        try:
            done = ray.get(next(stream))
            yield group.tasks.popleft(), done
        except StopIteration:
            del running[stream]
        except ray.exceptions.RayError as error:
            del running[stream]
            if group.tasks:
                yield group.lose(f"Ray: {str(error).strip()}"[:500])
            if group.tasks:
                running[remote.remote(group)] = group
