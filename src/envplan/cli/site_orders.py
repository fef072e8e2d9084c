"""Orders of `envplan site`: written once, or again and again as a signal says."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from envplan._io.words import counted
from envplan.cli import output as ui
from envplan.cli.invocation import invocation
from envplan.cli.tables import number_column, text_column, value_column
from envplan.cli.types import quantity
from envplan.errors import InputError
from envplan.quantities import TIME

if TYPE_CHECKING:
    from envplan.site import Budget, SiteJob
    from envplan.site.order_writer import OrderWriter, WrittenOrder
    from envplan.site.watch import SiteWatch
    from envplan.site.watch_events import WatchEvent

ORDERS: Final = "Orders"
_W_PER_KW: Final = 1e3
#: Names of jobs in a line, at most.
_MAX_NAMES: Final = 5


@dataclass(frozen=True, kw_only=True)
class OrderOptions:
    """Whether and how running jobs get orders."""

    orders: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Write an order for each running job into this folder.",
            rich_help_panel=ORDERS,
        ),
    ] = None
    watch: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|URL",
            help="Follow a signal that says a power or a share of --power, such as 75%.",
            rich_help_panel=ORDERS,
        ),
    ] = None
    every: Annotated[
        float,
        typer.Option(
            metavar="TIME",
            parser=quantity(TIME.within(0.01, 3600)),
            help="How often the signal is read, s.",
            rich_help_panel=ORDERS,
        ),
    ] = 2.0
    lead: Annotated[
        float,
        typer.Option(
            metavar="TIME",
            parser=quantity(TIME.within(0, 3600)),
            help="Until all ranks see a new file, such as NFS's cache time, s.",
            rich_help_panel=ORDERS,
        ),
    ] = 0.0

    def require_fixed_power(self, budget: Budget) -> None:
        """Refuse budgets over time: orders are for now.

        Raises:
            InputError: the budget has several intervals, or a signal has no folder of orders.
        """
        if self.watch is not None and self.orders is None:
            raise InputError("--watch needs --orders DIR, which it writes")
        if self.orders is not None and len(budget.intervals) > 1:
            raise InputError(
                "--orders are for one power that counts now; give one to --power and --reserved, "
                "and change it with --watch"
            )

    def require_no_deadline(self, jobs: Sequence[SiteJob]) -> None:
        """Refuse deadlines where a signal is followed, which nobody knows ahead.

        Raises:
            InputError: a job has one.
        """
        for job in jobs:
            if self.watch is not None and job.iterations is not None:
                raise InputError(
                    f"job {job.name} has a deadline, which --watch cannot keep: it does not know "
                    "the power to come; say how much the job may lose (flexible)"
                )


def order_writer(
    jobs: Sequence[SiteJob], folder: Path, lead_s: float
) -> tuple[list[SiteJob], OrderWriter]:
    """The jobs as orders can have them, and the writer of their orders.

    Raises:
        InputError: a job cannot have orders, or the folder cannot be made.
    """
    from envplan.site.order_writer import OrderWriter, orderable

    site_jobs = orderable(jobs)
    pausing = [job.name for job in jobs if job.may_pause]
    if pausing:
        ui.warn(
            f"orders pause no job: {', '.join(pausing)} may pause and run on, and the power is "
            "shared so"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot be made ({error.strerror})", path=folder) from None
    return site_jobs, OrderWriter(folder, site_jobs, lead_s=lead_s)


def order_rows(written: Sequence[WrittenOrder]) -> list[dict[str, object]]:
    """What is said of orders in JSON."""
    rows: list[dict[str, object]] = []
    for one in written:
        document = one.order.model_dump(mode="json", by_alias=True, exclude_none=True)
        rows.append({**document, "path": str(one.path)})
    return rows


def print_orders(written: Sequence[WrittenOrder], folder: Path) -> None:
    """Print a table of orders, and what training has to be told."""
    if not written:
        ui.say(f"the orders in {folder} say so already")
        return
    first_iterations = [one.order.from_iteration for one in written]
    ui.show_table(
        f"Orders in {folder}",
        [
            text_column("job", [one.job.name for one in written]),
            text_column("rung", [_rung_words(one) for one in written]),
            text_column("from iteration", list(map(_iteration_words, first_iterations))),
            value_column("rungs", [len(one.job.plans) for one in written]),
            number_column("iteration (s)", [one.order.iteration_time_s for one in written]),
            number_column("power (kW)", [one.order.power_w / _W_PER_KW for one in written]),
        ],
    )
    if None in first_iterations:
        ui.say(
            "where no run log tells how far a job is, its ranks follow as soon as they read their "
            "order, so they may change an iteration apart"
        )


def _rung_words(one: WrittenOrder) -> str:
    order = one.order
    if order.faster_rung is None:
        return str(order.rung)
    return f"{order.rung}, {order.faster_rung} for {100 * order.faster_share:.0f}%"


def _iteration_words(iteration: int | None) -> str:
    return "as it is read" if iteration is None else str(iteration)


def follow_signal(watch: SiteWatch, every_s: float) -> None:
    """Do rounds until interrupted.

    Args:
        watch: does the rounds.
        every_s: from one round's begin to the next one's.
    """
    call = invocation()
    signal.signal(signal.SIGTERM, call.interrupt)
    with call.until_interrupted():
        while True:
            begin_s = time.monotonic()
            for event in watch.round():
                tell(event)
            time.sleep(max(0.0, begin_s + every_s - time.monotonic()))
    if not (call.json or call.quiet):
        ui.say("stopped; jobs go on under their last orders")


def tell(event: WatchEvent) -> None:
    """Print a line about an event at once: a JSON object with --json, nothing with --quiet."""
    if invocation().json:
        print(json.dumps(event.to_dict(), allow_nan=False), flush=True)
    elif not invocation().quiet:
        clock = time.strftime("%H:%M:%S", time.localtime(event.time))
        print(f"{clock} {_words(event)}", flush=True)


def _words(event: WatchEvent) -> str:
    """An event in words."""
    from envplan.site import watch_events as events

    match event:
        case events.OrdersWritten():
            missing = ""
            if event.missing_w:
                missing = (
                    f"; jobs at their least draw {_kw(event.missing_w)} more than the signal allows"
                )
            return (
                f"signal {event.signal}: {_kw(event.budget_w)}; "
                f"{counted(len(event.orders), 'order')} {event.after_signal_s:.2f} s after it; "
                f"{_kw(event.power_w)} planned, {event.throughput_loss_percent:.2f}% of "
                f"throughput lost{missing}"
            )
        case events.AllFollow():
            late = f", {event.most_late} iterations late at most" if event.most_late else ""
            return (
                f"{_names(event.jobs)} follow{late}; the last rank {event.after_signal_s:.2f} s "
                "after the signal changed"
            )
        case events.NotFollowing():
            return (
                f"{_names(event.jobs)}: not all ranks have said within {event.waited_s:.0f} s that "
                "they follow (is orders= given in training, and the run log where the site looks?)"
            )
        case events.OrdersLost():
            return f"{_names(event.jobs)}: orders were lost or damaged, and are written again"
        case events.SignalLost():
            return f"no signal, the last one counts, {_kw(event.budget_w)}: {event.message}"
        case events.PlanFailed():
            return f"the site's plan is not kept, tried again: {event.message}"
        case events.OrdersFailed():
            return f"orders are not written, tried again: {event.message}"
    raise AssertionError(event)


def _names(jobs: Sequence[str]) -> str:
    """A few names of jobs, or how many there are."""
    if len(jobs) > _MAX_NAMES:
        return f"{len(jobs)} jobs"
    return ", ".join(jobs)


def _kw(power_w: float) -> str:
    return f"{power_w / _W_PER_KW:,.4g} kW"
