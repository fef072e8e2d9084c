"""A rank's view of the orders that its job gets: which rung of its ladder an iteration follows.

Every rank looks at the file of orders when an iteration ends, in the training thread: one stat,
and a read of a few hundred bytes where the file is new. Nothing is exchanged between ranks. They
change at the same iteration because the order names one that none of them has begun. An order that
names none is followed as it is read, so ranks may then differ by an iteration.

What may go wrong, and what happens then. In the first three cases the last order stays in force:

- The file is missing: nothing is said.
- The file cannot be read: it is tried again at the next iteration, and logged once.
- The order is cut short, is for another plan, is not newer than the one in force, or names a rung
  that the ladder does not have: logged once for each version of the file.
- A rank sees an order after the iteration that it names: it follows at once, and its log says how
  late it was.
- The job was restarted, and counts its iterations from 0 again: an order that is there at iteration
  0 takes effect at once. So does an order that names an iteration much farther ahead than its lead:
  it must count the iterations of an earlier run.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Final, NamedTuple

from envplan._io.files import open_regular, parse_json
from envplan.enforce.freqplan import FrequencyPlan
from envplan.enforce.order_file import MAX_ORDER_BYTES, Order
from envplan.errors import InputError
from envplan.runtime.run_records import RunEvent

__all__ = ["OrderFollowed", "OrderReader", "OrderRefused"]

#: An order that names an iteration so much farther ahead than its lead is taken to count the
#: iterations of an earlier run.
_EARLIER_RUN_MARGIN: Final = 100


@dataclass(frozen=True, kw_only=True)
class OrderFollowed(RunEvent):
    """A rank follows an order from a step on: its acknowledgement.

    Attributes:
        sequence: of the order.
        step: the first that follows it.
        rung: that the order names; of two that alternate the slower.
        late: steps after the one that the order names, at which this rank changed.
    """

    event: ClassVar[str] = "order"

    sequence: int
    step: int
    rung: int
    late: int


@dataclass(frozen=True, kw_only=True)
class OrderRefused(RunEvent):
    """A rank found a file of orders that it does not follow.

    Attributes:
        step: that was about to begin.
        message: why not, a line for people.
    """

    event: ClassVar[str] = "order_refused"

    step: int
    message: str


class _FileState(NamedTuple):
    """Identity of a version of a file: it changes when the file is replaced or rewritten."""

    inode: int
    size: int
    modified_ns: int

    @classmethod
    def of(cls, found: os.stat_result) -> _FileState:
        """The state in what the system says of a file."""
        return cls(found.st_ino, found.st_size, found.st_mtime_ns)


class OrderReader:
    """Reads the orders of a job, for one rank. For use by one thread.

    Args:
        path: of the file of orders; it need not exist yet.
        plan: that the rank follows.
        rank: global rank.
        log: takes a line of the run log.

    Attributes:
        in_force: the order that is followed; None before the first one.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        plan: FrequencyPlan,
        *,
        rank: int,
        log: Callable[[RunEvent], None],
    ) -> None:
        self.in_force: Order | None = None
        self._path = os.fspath(path)
        self._plan_sha256 = plan.plan_sha256
        self._num_rungs = 1 + len(plan.ladder or ())
        self._rank = rank
        self._log = log
        self._seen: _FileState | None = None
        self._pending: Order | None = None
        self._is_unreadable = False

    def rung_for(self, iteration: int) -> int:
        """The rung that an iteration follows, which is about to begin; 0 is the plan itself."""
        state = self._file_state()
        if state is not None and state != self._seen:
            self._read(iteration)
        pending = self._pending
        if pending is not None and self._is_due(pending, iteration):
            self._pending = None
            self._follow(pending, iteration)
        return 0 if self.in_force is None else self.in_force.rung_at(iteration)

    def _file_state(self) -> _FileState | None:
        """The state of the file; None where there is none or it cannot be looked at."""
        try:
            found = os.stat(self._path)  # noqa: PTH116 (a Path would take twice as long)
        except (OSError, ValueError):
            return None
        return _FileState.of(found)

    def _read(self, iteration: int) -> None:
        """Read the file, and take its order for the next one if it can be followed."""
        try:
            self._pending = self._followable_order()
        except OSError as error:
            self._seen = None  # try again next time
            if not self._is_unreadable:
                self._is_unreadable = True
                self._refuse(iteration, f"{self._path}: cannot be read ({error.strerror})")
        except InputError as error:
            self._refuse(iteration, str(error))
        else:
            self._is_unreadable = False

    def _refuse(self, iteration: int, message: str) -> None:
        self._log(OrderRefused(rank=self._rank, step=iteration, message=message))

    def _followable_order(self) -> Order:
        """The order in the file.

        Raises:
            OSError: the file cannot be read.
            InputError: it is no order, is for another plan, or is not newer than the last one.
        """
        with open_regular(self._path) as file:
            # Of the file that was opened: it may have been replaced since it was looked at.
            self._seen = _FileState.of(os.fstat(file.fileno()))
            data = file.read(MAX_ORDER_BYTES + 1)
        if len(data) > MAX_ORDER_BYTES:
            raise InputError("is too long for an order", path=self._path)
        order = Order.from_document(parse_json(data, self._path), path=self._path)
        if order.plan_sha256 != self._plan_sha256:
            raise InputError("is an order for another plan", path=self._path)
        if order.rung >= self._num_rungs:
            raise InputError(
                f"names rung {order.rung} of a ladder that ends at {self._num_rungs - 1}",
                path=self._path,
            )
        newest = self._pending or self.in_force
        if newest is not None and order.sequence <= newest.sequence:
            raise InputError(
                f"has order {order.sequence}, which is not newer than {newest.sequence}",
                path=self._path,
            )
        return order

    def _is_due(self, order: Order, iteration: int) -> bool:
        """Whether an iteration follows an order that was not followed before."""
        if order.from_iteration is None or iteration == 0:
            return True
        ahead = order.from_iteration - iteration
        counts_another_run = ahead > order.lead + _EARLIER_RUN_MARGIN
        return ahead <= 0 or counts_another_run

    def _follow(self, order: Order, iteration: int) -> None:
        """Put an order in force."""
        self.in_force = order
        planned = iteration if order.from_iteration is None else order.from_iteration
        is_of_this_run = iteration > 0
        self._log(
            OrderFollowed(
                rank=self._rank,
                sequence=order.sequence,
                step=iteration,
                rung=order.rung,
                late=max(0, iteration - planned) if is_of_this_run else 0,
            )
        )
