"""Independent work side by side on this machine's cores."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from contextvars import copy_context
from threading import Event
from typing import Final, TypeVar

from envplan import _kernel

Item = TypeVar("Item")
Answer = TypeVar("Answer")

# How long a thread that comes back from the kernel waits for the interpreter. Python's 5 ms are as
# long as the kernel often works at a time, so two threads would take turns.
_WAIT_S: Final = 5e-5

_used: int | None = None


def cores() -> int:
    """The cores that this process may use, where the system tells (macOS does not)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def use_cores(count: int | None) -> None:
    """Plan on so many cores from now on; None: on all there are. Results do not depend on it."""
    global _used
    _used = count


def parallel_map(work: Callable[[Item], Answer], items: Iterable[Item]) -> list[Answer]:
    """The answer for each item, in their order, worked out by as many threads as may be used.

    The work must leave the interpreter free, as the kernel does. What an item raises is raised, the
    first of them, and with Ctrl-C the others end where they honour that.
    """
    todo = list(items)
    num_threads = min(len(todo), _used or cores())
    if num_threads <= 1:
        return [work(item) for item in todo]
    from concurrent.futures import ThreadPoolExecutor

    stop = Event()

    def stoppable_work(item: Item) -> Answer:
        _kernel.STOP.set(stop)
        return work(item)

    usual_interval_s = sys.getswitchinterval()
    sys.setswitchinterval(min(usual_interval_s, _WAIT_S))
    try:
        with ThreadPoolExecutor(num_threads) as pool:
            futures = [pool.submit(copy_context().run, stoppable_work, item) for item in todo]
            try:
                return [future.result() for future in futures]
            except BaseException:
                stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    finally:
        if usual_interval_s > _WAIT_S:  # else another thread has set it, which sets it back
            sys.setswitchinterval(usual_interval_s)
