"""Follows a signal: shares the power anew when it changes, and sees that the jobs follow.

Each round reads the signal. Where it has changed, the power is shared anew and jobs whose plans
change get orders. What goes wrong keeps what was: a signal that cannot be read leaves the last one,
and a file of orders that was lost or damaged is written again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import ClassVar, Final, NamedTuple, Self

from pydantic import JsonValue

from envplan.enforce.orders import Order
from envplan.errors import InputError, NoAnswerError
from envplan.site.budget import Budget
from envplan.site.jobs import SiteJob
from envplan.site.model import PlanPower, SitePlan
from envplan.site.orders import OrderWriter, WrittenOrder
from envplan.site.plan import SiteOverheads, least_site_power_w, plan_site
from envplan.site.signal import Signal, read_signal

__all__ = [
    "AllFollow",
    "NotFollowing",
    "OrdersFailed",
    "OrdersLost",
    "OrdersWritten",
    "SignalLost",
    "SiteWatch",
    "WatchEvent",
]

#: After so long without an acknowledgement this is said, s.
_ACKNOWLEDGEMENT_LIMIT_S: Final = 60.0
#: The least power is asked for with so much more, as a fraction, against rounding.
_ROUNDING: Final = 2e-6


@dataclass(frozen=True, kw_only=True)
class WatchEvent:
    """Something that happened.

    Attributes:
        time: when, s since 1970.
    """

    event: ClassVar[str]

    time: float = field(default_factory=time.time)

    def to_dict(self) -> dict[str, JsonValue]:
        """Its JSON object."""
        return {"event": self.event, **asdict(self)}


class OrderNote(NamedTuple):
    """An order that was written, in short; its attributes are those of Order."""

    job: str
    sequence: int
    rung: int
    from_iteration: int | None

    @classmethod
    def of(cls, order: Order) -> Self:
        """The note of an order."""
        return cls(order.job, order.sequence, order.rung, order.from_iteration)


@dataclass(frozen=True, kw_only=True)
class OrdersWritten(WatchEvent):
    """The power was shared anew.

    Attributes:
        signal: its text.
        budget_w: the power that the signal allows.
        power_w: planned, of the whole site.
        missing_w: by which the least power of all jobs is above the budget; 0: it is not.
        throughput_loss_percent: of the plan.
        price_percent_per_kw: of the value that the next kilowatt of the site buys.
        after_signal_s: from the change of the signal until all orders were written.
        orders: that were written.
    """

    event: ClassVar[str] = "orders"

    signal: str
    budget_w: float
    power_w: float
    missing_w: float
    throughput_loss_percent: float
    price_percent_per_kw: float
    after_signal_s: float
    orders: list[OrderNote]

    def to_dict(self) -> dict[str, JsonValue]:
        """Its JSON object."""
        return {**super().to_dict(), "orders": [order._asdict() for order in self.orders]}


@dataclass(frozen=True, kw_only=True)
class AllFollow(WatchEvent):
    """All ranks of all jobs that got orders follow them, but for those told of in NotFollowing.

    Attributes:
        jobs: that got orders.
        after_signal_s: from the change of the signal until the last rank began to follow.
        most_late: iterations by which a rank was late, at most.
    """

    event: ClassVar[str] = "followed"

    jobs: list[str]
    after_signal_s: float
    most_late: int


@dataclass(frozen=True, kw_only=True)
class NotFollowing(WatchEvent):
    """Jobs have not said for long that they follow their orders.

    Attributes:
        jobs: which.
        waited_s: since their orders were written.
    """

    event: ClassVar[str] = "not_followed"

    jobs: list[str]
    waited_s: float


@dataclass(frozen=True, kw_only=True)
class OrdersLost(WatchEvent):
    """Files of orders did not hold the last order any more; they were written again.

    Attributes:
        jobs: whose.
    """

    event: ClassVar[str] = "rewritten"

    jobs: list[str]


@dataclass(frozen=True, kw_only=True)
class SignalLost(WatchEvent):
    """The signal cannot be read; the last one counts.

    Attributes:
        message: why, a line for people.
        budget_w: that counts.
    """

    event: ClassVar[str] = "signal_lost"

    message: str
    budget_w: float


@dataclass(frozen=True, kw_only=True)
class OrdersFailed(WatchEvent):
    """A file of orders cannot be written; it is tried again.

    Attributes:
        message: why, a line for people.
    """

    event: ClassVar[str] = "orders_failed"

    message: str


@dataclass
class _Waiting:
    """An order that its job has yet to acknowledge."""

    written: WrittenOrder
    since_s: float


class SiteWatch:
    """Shares a site's power as a signal says.

    Args:
        jobs: of the site, as `orders.orderable` has them.
        source: of the signal; see `signal`.
        full_power_w: of the site; counts until a signal was read.
        reserved_w: that others draw of it.
        overheads, alternates, plan_power: as for `plan_site`.
        writer: of the orders.

    Attributes:
        plan: the last plan; None before the first.
    """

    def __init__(
        self,
        jobs: Sequence[SiteJob],
        source: str,
        *,
        full_power_w: float,
        reserved_w: float,
        overheads: SiteOverheads,
        alternates: bool,
        plan_power: PlanPower,
        writer: OrderWriter,
    ) -> None:
        self.plan: SitePlan | None = None
        self._jobs = jobs
        self._source = source
        self._full_power_w = full_power_w
        self._reserved_w = reserved_w
        self._overheads = overheads
        self._alternates = alternates
        self._plan_power = plan_power
        self._writer = writer
        self._signal = Signal("none yet", full_power_w, time.time())
        #: The power that all orders are written for; None: they are not all written.
        self._ordered_w: float | None = None
        #: When it began to watch; what the signal said before counts from then on.
        self._begin_s = time.time()
        self._changed_s = 0.0
        self._is_signal_lost = False
        self._failure = ""
        self._waiting: dict[str, _Waiting] = {}
        #: Of the orders that were written last: jobs, and what their ranks have said.
        self._ordered: list[str] = []
        self._last_followed_s = 0.0
        self._most_late = 0

    def round(self) -> Iterator[WatchEvent]:
        """Read the signal; plan and write orders if it has changed; look for acknowledgements."""
        signal = self._signal
        try:
            signal = read_signal(self._source, self._full_power_w)
            self._is_signal_lost = False
        except InputError as error:
            if not self._is_signal_lost:
                yield SignalLost(message=str(error), budget_w=signal.power_w)
            self._is_signal_lost = True
        self._signal = signal
        try:
            if signal.power_w != self._ordered_w:
                yield self._share_anew(signal)
            yield from self._rewrite_lost()
            self._failure = ""
        except (InputError, NoAnswerError) as error:
            if str(error) != self._failure:
                yield OrdersFailed(message=str(error))
            self._failure = str(error)
        yield from self._see_who_follows()

    def _share_anew(self, signal: Signal) -> OrdersWritten:
        """Share the power that a signal allows, and write the orders."""
        missing_w = 0.0
        try:
            self.plan = self._planned(signal.power_w)
        except NoAnswerError:
            least_w = least_site_power_w(
                self._jobs,
                self._overheads,
                alternates=self._alternates,
                plan_power=self._plan_power,
            )
            needed_w = (least_w + self._reserved_w) * (1 + _ROUNDING)
            missing_w = needed_w - signal.power_w
            self.plan = self._planned(needed_w)
        (interval,) = self.plan.intervals
        self._changed_s = max(signal.changed_s, self._begin_s)
        self._ordered_w = None
        written = []
        for one in self._writer.write(interval):
            written.append(one)
            self._waiting[one.job.name] = _Waiting(one, time.time())
        self._ordered_w = signal.power_w
        now_s = time.time()
        self._ordered = list(self._waiting)
        self._last_followed_s, self._most_late = now_s, 0
        return OrdersWritten(
            signal=signal.text,
            budget_w=signal.power_w,
            power_w=interval.power_w,
            missing_w=missing_w,
            throughput_loss_percent=interval.throughput_loss_percent,
            price_percent_per_kw=interval.price_percent_per_kw,
            after_signal_s=max(0.0, now_s - self._changed_s),
            orders=[OrderNote.of(one.order) for one in written],
        )

    def _planned(self, power_w: float) -> SitePlan:
        """The plan for a power of the site.

        Raises:
            NoAnswerError: jobs need more.
        """
        return plan_site(
            self._jobs,
            Budget.fixed(power_w, reserved_w=self._reserved_w),
            overheads=self._overheads,
            alternates=self._alternates,
            plan_power=self._plan_power,
        )

    def _rewrite_lost(self) -> Iterator[OrdersLost]:
        """Write orders again whose files were lost or damaged."""
        written = self._writer.rewrite_lost()
        if not written:
            return
        for one in written:
            if one.job.name in self._waiting:
                self._waiting[one.job.name].written = one
        yield OrdersLost(jobs=[one.job.name for one in written])

    def _see_who_follows(self) -> Iterator[AllFollow | NotFollowing]:
        """Look for acknowledgements of orders that have none yet."""
        if not self._waiting:
            return
        for name, waiting in list(self._waiting.items()):
            if self._follows(waiting.written):
                del self._waiting[name]
        if not self._waiting:
            yield AllFollow(
                jobs=self._ordered,
                after_signal_s=max(0.0, self._last_followed_s - self._changed_s),
                most_late=self._most_late,
            )
            return
        now_s = time.time()
        overdue = [
            name
            for name, waiting in self._waiting.items()
            if now_s - waiting.since_s > _ACKNOWLEDGEMENT_LIMIT_S
        ]
        if overdue:
            longest_s = max(now_s - self._waiting[name].since_s for name in overdue)
            for name in overdue:
                del self._waiting[name]
                self._ordered.remove(name)
            yield NotFollowing(jobs=overdue, waited_s=longest_s)

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
