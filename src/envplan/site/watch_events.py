"""What a watch over a site tells of: each event is a line for people, or a JSON object."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import ClassVar, NamedTuple, Self

from pydantic import JsonValue

from envplan.enforce.order_file import Order
from envplan.site.shedding import ShedPoint

__all__ = [
    "AllFollow",
    "NotFollowing",
    "OrderNote",
    "OrdersFailed",
    "OrdersLost",
    "OrdersWritten",
    "PlanFailed",
    "SheddingCosts",
    "SignalLost",
    "WatchEvent",
]


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
class PlanFailed(WatchEvent):
    """The plan of the site cannot be written, or not drawn; it is tried again.

    Attributes:
        message: why, a line for people.
    """

    event: ClassVar[str] = "plan_failed"

    message: str


@dataclass(frozen=True, kw_only=True)
class SheddingCosts(WatchEvent):
    """What it costs to shed power, whatever the signal says.

    Attributes:
        shed_curve: from maximum frequency down to what jobs may not lose.
    """

    event: ClassVar[str] = "shed_curve"

    shed_curve: Sequence[ShedPoint]

    def to_dict(self) -> dict[str, JsonValue]:
        """Its JSON object."""
        return {**super().to_dict(), "shed_curve": [point._asdict() for point in self.shed_curve]}


@dataclass(frozen=True, kw_only=True)
class OrdersFailed(WatchEvent):
    """A file of orders cannot be written; it is tried again.

    Attributes:
        message: why, a line for people.
    """

    event: ClassVar[str] = "orders_failed"

    message: str
