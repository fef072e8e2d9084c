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
from envplan.sweep.work import Done, Group, Task, compute, failed_row

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
                    task, outcome, rest = worker.died()
                    if rest is not None:
                        waiting.appendleft(rest)
                    yield task, outcome
                    continue
                if done is None:
                    worker.begin()
                    continue
                yield worker.finished(done)
                if not worker.tasks and not worker.take(waiting):
                    del workers[connection]
    finally:
        for worker in workers.values():
            worker.stop()


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
        self._group = group
        self.tasks = deque(group.tasks)

    def begin(self) -> None:
        """It is there: send it its first group."""
        self._ready = True
        self._send()

    def finished(self, done: Done) -> tuple[Task, Done]:
        return self.tasks.popleft(), done

    def take(self, waiting: deque[Group]) -> bool:
        """Give it another group, or let it end where there is none."""
        if not waiting:
            self.connection.close()
            self._process.join()
            return False
        self._group = waiting.popleft()
        self.tasks = deque(self._group.tasks)
        self._send()
        return True

    def _send(self) -> None:
        with suppress(ConnectionError):  # it has died, as waiting for it will show
            self.connection.send(self._group)

    def died(self) -> tuple[Task, Done, Group | None]:
        """The task it was at, as failed, and the group of those that are left."""
        self._process.join()
        self.connection.close()
        code = self._process.exitcode
        if not self._ready:
            raise EnvplanError(f"a process of the sweep ended as it began, with exit code {code}")
        task = self.tasks.popleft()
        how = f"by signal {-code}" if code is not None and code < 0 else f"with exit code {code}"
        row = failed_row(task.point, self._group.profile, f"its process was ended {how}")
        rest = Group(self._group.profile, tuple(self.tasks)) if self.tasks else None
        return task, Done(row, final=False), rest

    def stop(self) -> None:
        self.connection.close()
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
