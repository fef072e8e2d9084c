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
from envplan.sweep.work import Done, Group, Task, compute, failed_row

__all__ = ["run_on_processes", "run_on_ray"]

#: Every task with its outcome, as they come.
Outcomes = Generator[tuple[Task, Done], None, None]

_PATIENCE_S: Final = 10.0


class Underway:
    """A group that somebody computes, task by task, and what is left of it."""

    def __init__(self, group: Group) -> None:
        self._profile = group.profile
        self.tasks = deque(group.tasks)

    def finished(self, done: Done) -> tuple[Task, Done]:
        """The task it was at, with its outcome."""
        return self.tasks.popleft(), done

    def lost(self, why: str) -> tuple[tuple[Task, Done], list[Group]]:
        """The task it was at, as failed; and a group of those that are left, if any are."""
        task = self.tasks.popleft()
        failed = task, Done(failed_row(task.point, self._profile, why), final=False)
        return failed, [Group(self._profile, tuple(self.tasks))] if self.tasks else []


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
            while waiting and len(workers) < jobs:
                worker = _Worker(waiting.popleft())
                workers[worker.connection] = worker
            for connection in wait(list(workers)):
                assert isinstance(connection, Connection)
                worker = workers[connection]
                try:
                    done = connection.recv()
                except (EOFError, ConnectionError):
                    del workers[connection]
                    failed, rest = worker.died()
                    waiting.extendleft(rest)
                    yield failed
                    continue
                if done is None:
                    worker.begin()
                    continue
                yield worker.underway.finished(done)
                if not worker.underway.tasks and waiting:
                    worker.begin(waiting.popleft())
                elif not worker.underway.tasks:
                    worker.stop()
                    del workers[connection]
    finally:
        for worker in workers.values():
            worker.stop(at_once=True)


class _Worker:
    """A process and what it still has to do of its group."""

    def __init__(self, group: Group) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        with _interrupts_ignored():
            self._process.start()
        theirs.close()
        self._ready = False
        self._group, self.underway = group, Underway(group)

    def begin(self, group: Group | None = None) -> None:
        """It is ready: send it another group, or the first."""
        self._ready = True
        if group is not None:
            self._group, self.underway = group, Underway(group)
        with suppress(ConnectionError):  # it has died, as waiting for it will show
            self.connection.send(self._group)

    def died(self) -> tuple[tuple[Task, Done], list[Group]]:
        """The task it was at, as failed, and the group of those that are left."""
        self.stop()
        code = self._process.exitcode
        if not self._ready:
            raise EnvplanError(f"a process of the sweep ended as it began, with exit code {code}")
        how = f"by signal {-code}" if code is not None and code < 0 else f"with exit code {code}"
        return self.underway.lost(f"its process was ended {how}")

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
    try:
        connection.send(None)
        while True:
            for done in compute(connection.recv()):
                connection.send(done)
    except (EOFError, ConnectionError):
        return


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
    _check_address(address)
    import ray

    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise InputError(
            f"--ray {address}: no Ray cluster can be reached there ({reason})"
        ) from None
    try:
        yield from _outcomes(ray, groups)
    finally:
        ray.shutdown()


def _check_address(address: str) -> None:
    """Fail at once where Ray would go on trying for minutes."""
    if "://" in address:
        raise InputError(
            f"--ray {address}: Ray clients cannot run sweeps; run it on a node of the cluster with "
            "--ray auto, or give the address of its head, as in 10.0.0.1:6379"
        )
    host, colon, port = address.rpartition(":")
    if not colon:
        return
    try:
        socket.create_connection((host, int(port)), timeout=_PATIENCE_S).close()
    except (OSError, ValueError, OverflowError) as error:
        raise InputError(
            f"--ray {address}: no Ray cluster can be reached there ({error})"
        ) from None


def _compute(group: Group) -> Iterator[Done]:
    use_cores(1)
    yield from compute(group)


def _outcomes(ray: Any, groups: Sequence[Group]) -> Iterator[tuple[Task, Done]]:
    remote = ray.remote(num_cpus=1, max_retries=0, num_returns="streaming")(_compute)
    running = {remote.remote(group): Underway(group) for group in groups}
    while running:
        ready, _ = ray.wait(list(running), num_returns=1)
        stream = ready[0]
        group = running[stream]
        try:
            yield group.finished(ray.get(next(stream)))
        except StopIteration:
            del running[stream]
        except ray.exceptions.RayError as error:
            del running[stream]
            if group.tasks:
                failed, rest = group.lost(f"Ray: {str(error).strip()}"[:500])
                running |= {remote.remote(left): Underway(left) for left in rest}
                yield failed
