"""A sweep's groups on processes of this machine."""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait

from envplan.cores import use_cores
from envplan.errors import EnvplanError
from envplan.sweep.work import Done, Group, Task, Underway, compute

__all__ = ["run_on_processes"]


def run_on_processes(groups: Sequence[Group], jobs: int) -> Iterator[tuple[Task, Done]]:
    """Every task with its outcome, as they come.

    A process has one group at a time and reports task by task. One that dies costs the task it was
    at, which then has failed; another process takes the rest of its group.

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
