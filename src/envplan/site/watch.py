"""Follows a signal: shares the power anew when it changes, and sees that the jobs follow.

Each round reads the signal. Where it has changed, the power is shared anew and jobs whose plans
change get orders. What goes wrong keeps what was: a signal that cannot be read leaves the last one,
a file of orders that was lost or damaged is written again, and so is what could not be written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from envplan.errors import InputError, NoAnswerError
from envplan.site.acknowledgements import Acknowledgements
from envplan.site.budget import Budget
from envplan.site.jobs import SiteJob
from envplan.site.model import PlanPower, SitePlan
from envplan.site.order_writer import OrderWriter, WrittenOrder
from envplan.site.plan import SiteOverheads, least_site_power_w, plan_site
from envplan.site.signal import Signal, read_signal
from envplan.site.watch_events import (
    OrderNote,
    OrdersFailed,
    OrdersLost,
    OrdersWritten,
    PlanFailed,
    SignalLost,
    WatchEvent,
)

__all__ = ["SiteWatch"]

#: The least power is asked for with so much more, as a fraction, against rounding.
_ROUNDING: Final = 2e-6


class SiteWatch:
    """Shares a site's power as a signal says.

    Args:
        jobs: of the site, as `orderable` has them (order_writer.py).
        source: of the signal; see `signal`.
        full_power_w: of the site; counts until a signal was read.
        reserved_w: that others draw of it.
        overheads, alternates, plan_power: as for `plan_site`.
        writer: of the orders.
        keep_plan: is called with each plan of the site once its orders are written, to write it to
            its file; again where it raises an InputError. None: plans are not kept.

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
        keep_plan: Callable[[SitePlan], None] | None = None,
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
        #: The orders that the latest change of the signal brought, by job.
        self._written: dict[str, WrittenOrder] = {}
        #: When it began to watch; what the signal said before counts from then on.
        self._begin_s = time.time()
        self._is_signal_lost = False
        self._orders_failure = self._plan_failure = ""
        self._acknowledgements = Acknowledgements(writer)
        self._keep_plan = keep_plan
        #: A plan whose orders are written, and that is not kept yet.
        self._unkept_plan: SitePlan | None = None

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
                orders_written = self._share_anew(signal)
                yield from self._save_plan()
                yield orders_written
            yield from self._rewrite_lost()
            self._orders_failure = ""
        except (InputError, NoAnswerError) as error:
            if str(error) != self._orders_failure:
                yield OrdersFailed(message=str(error))
            self._orders_failure = str(error)
        yield from self._save_plan()  # again, where it failed
        yield from self._acknowledgements.update()

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
        changed_s = max(signal.changed_s, self._begin_s)
        if self._ordered_w is not None:  # else these orders could not all be written last time
            self._written = {}
        self._ordered_w = None
        self._acknowledgements.begin_change(changed_s)
        for order in self._writer.write(interval):
            self._written[order.job.name] = order
            self._acknowledgements.expect(order)
        self._ordered_w = signal.power_w
        self._unkept_plan = self.plan
        self._acknowledgements.all_written()
        return OrdersWritten(
            signal=signal.text,
            budget_w=signal.power_w,
            power_w=interval.power_w,
            missing_w=missing_w,
            throughput_loss_percent=interval.throughput_loss_percent,
            price_percent_per_kw=interval.price_percent_per_kw,
            after_signal_s=max(0.0, time.time() - changed_s),
            orders=[OrderNote.of(written.order) for written in self._written.values()],
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
        for order in written:
            self._acknowledgements.expect_again(order)
        yield OrdersLost(jobs=[order.job.name for order in written])

    def _save_plan(self) -> Iterator[PlanFailed]:
        """Keep the plan, if that is not done yet."""
        if self._keep_plan is None or self._unkept_plan is None:
            return
        try:
            self._keep_plan(self._unkept_plan)
        except InputError as error:
            if str(error) != self._plan_failure:
                yield PlanFailed(message=str(error))
            self._plan_failure = str(error)
        else:
            self._unkept_plan = None
            self._plan_failure = ""
