"""Who follows the orders that were written, by what the ranks of each job log."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from envplan.site.order_writer import OrderWriter, WrittenOrder
from envplan.site.watch_events import AllFollow, NotFollowing

__all__ = ["Acknowledgements"]

#: After so long without an acknowledgement this is said, s.
_LIMIT_S: Final = 60.0


@dataclass
class _Awaited:
    """An order that its job has yet to acknowledge.

    Attributes:
        written: the order.
        since_s: when its job got it, s since 1970.
    """

    written: WrittenOrder
    since_s: float


class Acknowledgements:
    """Waits for the jobs of a site to say that they follow their orders.

    A job that does not for a minute is told of, and not waited for any longer.

    Args:
        writer: of the orders, which knows the run logs of their jobs.
    """

    def __init__(self, writer: OrderWriter) -> None:
        self._writer = writer
        self._awaited: dict[str, _Awaited] = {}
        #: Jobs that the orders of the latest change are for, but for those told of.
        self._jobs: list[str] = []
        self._changed_s = 0.0
        self._last_followed_s = 0.0
        self._most_late = 0

    def expect(self, written: WrittenOrder) -> None:
        """Wait for the job of an order that was written; an older order of it counts no more."""
        self._awaited[written.job.name] = _Awaited(written, time.time())

    def expect_again(self, written: WrittenOrder) -> None:
        """An order was written again: wait for it where the job had not acknowledged the last."""
        awaited = self._awaited.get(written.job.name)
        if awaited is not None:
            awaited.written = written

    def all_written(self, changed_s: float) -> None:
        """All orders are written that a change of the signal brings.

        Args:
            changed_s: when it changed, s since 1970.
        """
        self._jobs = list(self._awaited)
        self._changed_s = changed_s
        self._last_followed_s, self._most_late = time.time(), 0

    def update(self) -> Iterator[AllFollow | NotFollowing]:
        """Look into the run logs of jobs that are waited for."""
        if not self._awaited:
            return
        for name, awaited in list(self._awaited.items()):
            if self._follows(awaited.written):
                del self._awaited[name]
        if not self._awaited:
            yield AllFollow(
                jobs=self._jobs,
                after_signal_s=max(0.0, self._last_followed_s - self._changed_s),
                most_late=self._most_late,
            )
            return
        yield from self._give_up_overdue(time.time())

    def _give_up_overdue(self, now_s: float) -> Iterator[NotFollowing]:
        """Wait no longer for jobs that have not followed for too long."""
        overdue = {
            name: now_s - awaited.since_s
            for name, awaited in self._awaited.items()
            if now_s - awaited.since_s > _LIMIT_S
        }
        if not overdue:
            return
        for name in overdue:
            del self._awaited[name]
            self._jobs.remove(name)
        yield NotFollowing(jobs=list(overdue), waited_s=max(overdue.values()))

    def _follows(self, written: WrittenOrder) -> bool:
        """Whether all ranks of a job have said that they follow an order, or a later one."""
        job, order = written.job, written.order
        assert job.ladder is not None
        acknowledged = self._writer.run_progress(job).acknowledged
        following = [ack for ack in acknowledged.values() if ack.sequence >= order.sequence]
        if len(following) < job.ladder.freqplan.world_size:
            return False
        self._last_followed_s = max(self._last_followed_s, *(ack.time for ack in following))
        self._most_late = max(self._most_late, *(ack.late for ack in following))
        return True
