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
_GIVE_UP_AFTER_S: Final = 60.0


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

    A job that does not for a minute is told of, and not waited for any longer. A change of the
    signal is told of by `begin_change`, then `expect` for each order that it brings, then
    `all_written`; until that comes, nobody can say that all jobs follow. `update` looks into the
    run logs, as often as one likes.

    Args:
        writer: of the orders, which knows the run logs of their jobs.
    """

    def __init__(self, writer: OrderWriter) -> None:
        self._writer = writer
        self._awaited: dict[str, _Awaited] = {}
        #: Jobs that the orders of the latest change are for, but for those told of.
        self._jobs_of_change: list[str] = []
        self._is_all_written = True
        self._changed_s = 0.0
        self._last_followed_s = 0.0
        self._most_late = 0

    def begin_change(self, changed_s: float) -> None:
        """Orders will be written for a change of the signal, or again, where that failed before.

        Args:
            changed_s: when it changed, s since 1970.
        """
        self._changed_s = changed_s
        if self._is_all_written:
            self._is_all_written = False
            self._jobs_of_change = list(self._awaited)
            self._last_followed_s, self._most_late = time.time(), 0

    def expect(self, written: WrittenOrder) -> None:
        """Wait for the job of an order that was written; an older order of it counts no more."""
        name = written.job.name
        self._awaited[name] = _Awaited(written, time.time())
        if name not in self._jobs_of_change:
            self._jobs_of_change.append(name)

    def expect_again(self, written: WrittenOrder) -> None:
        """An order was written again: wait for it where the job had not acknowledged the last."""
        awaited = self._awaited.get(written.job.name)
        if awaited is not None:
            awaited.written = written

    def all_written(self) -> None:
        """All orders are written that the change brings."""
        self._is_all_written = True

    def update(self) -> Iterator[AllFollow | NotFollowing]:
        """Look into the run logs of jobs that are waited for."""
        for name, awaited in list(self._awaited.items()):
            if self._follows(awaited.written):
                del self._awaited[name]
        yield from self._give_up_overdue(time.time())
        if self._jobs_of_change and self._is_all_written and not self._awaited:
            yield AllFollow(
                jobs=self._jobs_of_change,
                after_signal_s=max(0.0, self._last_followed_s - self._changed_s),
                most_late=self._most_late,
            )
            self._jobs_of_change = []

    def _give_up_overdue(self, now_s: float) -> Iterator[NotFollowing]:
        """Wait no longer for jobs that have not followed for too long."""
        overdue = {
            name: now_s - awaited.since_s
            for name, awaited in self._awaited.items()
            if now_s - awaited.since_s > _GIVE_UP_AFTER_S
        }
        if not overdue:
            return
        for name in overdue:
            del self._awaited[name]
            self._jobs_of_change.remove(name)
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
