"""`envplan site`: many jobs under one power budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from envplan._io.words import counted
from envplan.cli import output as ui
from envplan.cli.invocation import invocation
from envplan.cli.progress import progress
from envplan.cli.shared import MOST_USED, HostPowerOption, PueOption
from envplan.cli.site_orders import (
    OrderOptions,
    follow_signal,
    order_rows,
    order_writer,
    print_orders,
    tell,
)
from envplan.cli.tables import (
    Column,
    change_column,
    number_column,
    percent_column,
    text_column,
    value_column,
)
from envplan.cli.types import OPTIONAL_FILE, InputFile, OutputFile, one_of, quantity
from envplan.errors import InputError, NoAnswerError
from envplan.quantities import POWER

if TYPE_CHECKING:
    from envplan.site import Budget, SiteJob, SitePlan
    from envplan.site.model import JobAssignment, SiteInterval, SiteJobRecord
    from envplan.site.order_writer import OrderWriter
    from envplan.site.plan import SiteOverheads
    from envplan.site.shedding import ShedPoint
    from envplan.site.watch import SiteWatch

SITE = "Site"
_W_PER_KW = 1e3
#: Throughputs this close, as a fraction, are the same.
_SAME_THROUGHPUT = 1e-9
_S_PER_H = 3600.0
#: Throughput lost by short ladders that is worth a line, percent of all.
_WORTH_SAYING_PERCENT = 0.01
#: Rows of a table of intervals or jobs, at most; --json and the file have all.
_MAX_ROWS = 48
#: The power of a plan that counts against the budget.
PlanPower = Literal["average", "peak"]
#: Rows of the table of what shedding costs.
_SHED_ROWS = 9


@dataclass(frozen=True, kw_only=True)
class BudgetOptions:
    """The power that the site may draw."""

    power: Annotated[
        str,
        typer.Option(
            metavar="W|FILE",
            help="Power of the site: such as 600kW, or a CSV with hour,power or time,power (W).",
            rich_help_panel=MOST_USED,
        ),
        InputFile(),
    ]
    reserved: Annotated[
        str | None,
        typer.Option(
            metavar="W|FILE",
            help="Power of others within --power, such as an inference fleet; as for --power.",
            rich_help_panel=SITE,
        ),
        InputFile(),
    ] = None
    start: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="When the plan starts, as in 2026-12-01T00:00, for files with times.",
            rich_help_panel=SITE,
        ),
    ] = None

    def read(self) -> Budget:
        """The budget.

        Raises:
            InputError: a power or a file of powers cannot be read.
        """
        from envplan.site import read_budget

        return read_budget(self.power, self.reserved, start=self.start)


@dataclass(frozen=True, kw_only=True)
class SiteOptions:
    """Power of the site beside the jobs' GPUs, and which plans and powers count."""

    pue: PueOption = 1.0
    host_power: HostPowerOption = 0.0
    fixed_power: Annotated[
        float,
        typer.Option(
            metavar="W",
            parser=quantity(POWER),
            help="Power that the site draws whatever runs.",
            rich_help_panel=SITE,
        ),
    ] = 0.0
    alternate: Annotated[
        bool,
        typer.Option(
            "--alternate/--no-alternate",
            help="Two plans of a job may alternate by iterations.",
            rich_help_panel=SITE,
        ),
    ] = True

    plan_power: Annotated[
        PlanPower,
        typer.Option(
            "--plan-power",
            metavar="average|peak",
            parser=one_of("average", "peak"),
            help="Power of a plan that counts against --power: its mean or its peak.",
            rich_help_panel=SITE,
        ),
    ] = "average"

    @property
    def overheads(self) -> SiteOverheads:
        """Power of the site beside the jobs' GPUs."""
        from envplan.site.plan import SiteOverheads

        return SiteOverheads(self.pue, self.host_power, self.fixed_power)


def site(
    jobs: Annotated[
        Path,
        typer.Argument(
            metavar="JOBS", help="TOML file of jobs, or a folder of frontier files (.json)."
        ),
        InputFile(),
    ],
    budget: BudgetOptions,
    options: SiteOptions,
    order_options: OrderOptions,
    *,
    output: Annotated[
        Path,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            parser=OutputFile(".json"),
            help="Write the site's plan here.",
            rich_help_panel=MOST_USED,
        ),
    ] = Path("site.json"),
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar=OPTIONAL_FILE,
            parser=OutputFile(".png", ".svg", ".pdf", bare="site.png"),
            help="Draw power, throughput and what shedding costs; without a name: site.png.",
            rich_help_panel=MOST_USED,
        ),
    ] = None,
    shed: Annotated[
        bool,
        typer.Option(
            "--shed",
            help="Also say what it costs to shed power, beside three simpler ways.",
            rich_help_panel=MOST_USED,
        ),
    ] = False,
) -> None:
    """Share a site's power among its jobs, and price the next kilowatt.

    Each job's exact frontier says what it makes of any power. The answer is the plan of every job
    in every interval that together lose least, with a certified gap.

    \b
    Example:
      envplan frontier sosp24-a100-gpt3-xl-4stage --slower -o gpt3.json
      envplan frontier sosp24-a100-t5-3b-4stage --slower -o t5.json
      envplan site . --power 1.9kW --shed
      envplan site site.toml --power budget.csv --pue 1.2 --plot
      envplan site jobs --power 600kW --orders orders --watch signal.txt
    """
    from envplan.site import plan_site, read_jobs
    from envplan.site.shedding import shed_curve

    counts_peaks = options.plan_power == "peak"
    if shed and counts_peaks:
        raise InputError("--shed compares mean powers; leave out --plan-power peak")
    site_budget, overheads = budget.read(), options.overheads
    order_options.require_fixed_power(site_budget)
    with progress("Reading the jobs") as work:
        jobs_as_read = read_jobs(jobs, work.items)
    order_options.require_no_deadline(jobs_as_read)
    site_jobs = _with_frontier_files(jobs_as_read, output)
    writer = None
    if order_options.orders is not None:
        site_jobs, writer = order_writer(site_jobs, order_options.orders, order_options.lead)
    curve: list[ShedPoint] = []
    if (shed or plot is not None) and not counts_peaks:
        curve = shed_curve(site_jobs, overheads, alternates=options.alternate)
    keep_plan = partial(_keep_plan, output=output, plot=plot, curve=curve)
    if writer is not None and order_options.watch is not None:
        _write_frontiers(jobs_as_read, site_jobs)
        if shed:
            _tell_shedding(curve)
        watch = _site_watch(order_options.watch, site_jobs, site_budget, options, writer, keep_plan)
        follow_signal(watch, order_options.every)
        return
    with progress("Sharing the power") as work:
        plan = plan_site(
            site_jobs,
            site_budget,
            overheads=overheads,
            alternates=options.alternate,
            plan_power=options.plan_power,
            progress=work.items,
        )
    _write_frontiers(jobs_as_read, site_jobs)
    orders = [] if writer is None else list(writer.write(plan.intervals[0]))
    keep_plan(plan)

    def show() -> None:
        _print_site(plan, curve if shed else [])
        _print_slow_ladders(site_jobs)
        if order_options.orders is not None:
            print_orders(orders, order_options.orders)
            _print_cost_of_ladders(plan, site_jobs, site_budget, options)

    ui.answer(
        lambda: {
            **plan.model_dump(mode="json", by_alias=True, exclude_none=True),
            **({"shed_curve": [point._asdict() for point in curve]} if shed else {}),
            **({} if writer is None else {"orders": order_rows(orders)}),
        },
        show,
        next_command=["envplan", "check", str(output)],
    )


def _keep_plan(
    plan: SitePlan, *, output: Path, plot: Path | None, curve: Sequence[ShedPoint]
) -> None:
    """Write the plan to its file, and its picture if there is to be one.

    Raises:
        InputError: one of them cannot be written.
    """
    plan.save(output)
    if plot is not None:
        from envplan.plotting.figures import save_figure
        from envplan.plotting.site import site_figure

        save_figure(site_figure(plan, curve), plot)


def _print_cost_of_ladders(
    plan: SitePlan, jobs: Sequence[SiteJob], budget: Budget, options: SiteOptions
) -> None:
    """Print what is lost because the ladders lack the plans that would be followed, if anything."""
    from envplan.site import plan_site

    try:
        free = plan_site(
            [replace(job, ladder=None) for job in jobs],
            budget,
            overheads=options.overheads,
            alternates=options.alternate,
            plan_power=options.plan_power,
        )
    except NoAnswerError:
        return  # a ladder may reach less power than a frontier that was traced without --slower
    lost_percent = plan.throughput_loss_percent - free.throughput_loss_percent
    if lost_percent > _WORTH_SAYING_PERCENT:
        ui.say(
            f"the ladders that jobs train by lack better plans of their frontiers, which would "
            f"lose {free.throughput_loss_percent:.2f}%; solve with a longer --ladder, from T_min"
        )


def _print_slow_ladders(jobs: Sequence[SiteJob]) -> None:
    """Name the jobs whose plans are all slower than what they may lose."""
    for job in jobs:
        kept = job.fastest_throughput / job.full_throughput
        if kept < (1 - job.flexible) * (1 - _SAME_THROUGHPUT):
            ui.say(
                f"the fastest plan that {job.name} trains by loses {100 * (1 - kept):.2f}% of its "
                f"throughput, more than it may ({100 * job.flexible:g}%); solve its --ladder from "
                "T_min"
            )


def _site_watch(
    source: str,
    jobs: Sequence[SiteJob],
    budget: Budget,
    options: SiteOptions,
    writer: OrderWriter,
    keep_plan: Callable[[SitePlan], None],
) -> SiteWatch:
    """A watch that follows a signal; the budget's only interval counts until that was read."""
    from envplan.site.watch import SiteWatch

    (interval,) = budget.intervals
    return SiteWatch(
        jobs,
        source,
        full_power_w=interval.budget_w,
        reserved_w=interval.reserved_w,
        overheads=options.overheads,
        alternates=options.alternate,
        plan_power=options.plan_power,
        writer=writer,
        keep_plan=keep_plan,
    )


def _with_frontier_files(jobs: Sequence[SiteJob], output: Path) -> list[SiteJob]:
    """The jobs, those that were traced now with the place where their frontiers will be written.

    A plan refers to the frontier file of each job, by which it is proved.
    """
    from envplan.site.jobs import frontier_sha256

    folder = output.with_suffix(".frontiers")
    placed = []
    for number, job in enumerate(jobs):
        if job.source is None:
            path, sha256 = folder / f"{number}.json", frontier_sha256(job.frontier)
            placed.append(replace(job, source=path, sha256=sha256))
        else:
            placed.append(job)
    return placed


def _write_frontiers(jobs: Sequence[SiteJob], placed: Sequence[SiteJob]) -> None:
    """Write the frontiers of the jobs that were traced now beside the plan."""
    for job, placed_job in zip(jobs, placed, strict=True):
        if job.source is None and placed_job.source is not None:
            placed_job.source.parent.mkdir(exist_ok=True)
            invocation().will_write(placed_job.source)
            job.frontier.save(placed_job.source)


def _print_site(plan: SitePlan, curve: Sequence[ShedPoint]) -> None:
    gpus = sum(job.gpus for job in plan.jobs)
    full_kw = sum(job.full_power_w for job in plan.jobs) / _W_PER_KW
    counts_peaks = plan.plan_power == "peak"
    ui.say(
        f"{counted(len(plan.jobs), 'job')} on {gpus:,} GPUs, {full_kw:,.4g} kW of GPUs at T_min"
        f"{', all peaks at once' if counts_peaks else ''}; "
        f"PUE {plan.pue:g}, hosts {plan.host_power_w:g} W a GPU, {plan.fixed_power_w:g} W fixed"
    )
    if len(plan.intervals) == 1:
        _print_jobs(plan, plan.intervals[0])
    else:
        _print_intervals(plan)
    if curve:
        _print_shedding(curve)
    for job in plan.jobs:
        if job.iterations is not None and job.by_s is not None:
            ui.say(
                f"{job.name} makes {job.iterations_made:,.1f} iterations by "
                f"{job.by_s / _S_PER_H:g} h; {job.iterations:,} are asked for"
            )
    if counts_peaks:
        ui.say(
            "peaks are those of operations that the profiles have rows for; an optimizer without "
            "rows runs at the highest clocks between iterations, and may draw more"
        )
    gap = max(interval.gap for interval in plan.intervals)
    plans = "no plans that they can follow lose" if counts_peaks else "no plans lose"
    ui.say(
        f"{plan.throughput_loss_percent:.2f}% of throughput lost; {plans} less by more than a "
        f"certified {100 * gap:.4f}% of what is left"
    )


def _print_jobs(plan: SitePlan, interval: SiteInterval) -> None:
    """A row for each job of a site with one interval."""
    rows = list(zip(plan.jobs, interval.jobs, strict=True))[:_MAX_ROWS]
    ui.show_table(
        f"{interval.power_w / _W_PER_KW:,.4g} of {interval.budget_w / _W_PER_KW:,.4g} kW",
        _job_columns(rows),
    )
    if len(plan.jobs) > len(rows):
        ui.say(f"and {len(plan.jobs) - len(rows)} more jobs; --json has them")
    ui.say(f"the next kilowatt is worth {_price(interval)}")


def _job_columns(rows: Sequence[tuple[SiteJobRecord, JobAssignment]]) -> list[Column]:
    return [
        text_column("job", [job.name for job, _ in rows]),
        value_column("GPUs", [job.gpus for job, _ in rows]),
        text_column("plan", [_plan_words(assignment) for _, assignment in rows]),
        number_column(
            "iteration time (s)", [assignment.iteration_time_s for _, assignment in rows]
        ),
        percent_column("paused (%)", [100 * assignment.paused_share for _, assignment in rows]),
        number_column("power (kW)", [assignment.power_w / _W_PER_KW for _, assignment in rows]),
        change_column(
            "change (%)",
            [100 * (assignment.power_w / job.full_power_w - 1) for job, assignment in rows],
        ),
    ]


def _plan_words(assignment: JobAssignment) -> str:
    """The plan or plans that a job follows, such as "3, 4 for 38%"."""
    if assignment.plan is None:
        return "pause"
    if assignment.faster_plan is None:
        return str(assignment.plan)
    return f"{assignment.plan}, {assignment.faster_plan} for {100 * assignment.faster_share:.0f}%"


def _print_intervals(plan: SitePlan) -> None:
    """A row for each interval, or for some of many."""
    step = -(-len(plan.intervals) // _MAX_ROWS)
    rows = plan.intervals[::step]
    ui.show_table(
        "Intervals" if step == 1 else f"Every {step}th of {len(plan.intervals)} intervals",
        [
            number_column("from (h)", [row.start_s / _S_PER_H for row in rows]),
            number_column("budget (kW)", [row.budget_w / _W_PER_KW for row in rows]),
            number_column("power (kW)", [row.power_w / _W_PER_KW for row in rows]),
            percent_column("throughput lost (%)", [row.throughput_loss_percent for row in rows]),
            percent_column("price (%/kW)", [row.price_percent_per_kw for row in rows], decimals=4),
            percent_column("gap (%)", [100 * row.gap for row in rows], decimals=4),
        ],
    )


def _tell_shedding(curve: Sequence[ShedPoint]) -> None:
    """Say what shedding costs before a signal is followed: with --json in a line, as all events."""
    from envplan.site.watch_events import SheddingCosts

    if invocation().json:
        tell(SheddingCosts(shed_curve=curve))
    elif not invocation().quiet:
        _print_shedding(curve)


def _print_shedding(curve: Sequence[ShedPoint]) -> None:
    """Print the cost of shedding power, in some rows."""
    step = max(1, (len(curve) - 1) // (_SHED_ROWS - 1))
    rows = curve[::step]
    ui.show_table(
        "Throughput lost (%) where power is shed",
        [
            number_column("power (kW)", [row.power_w / _W_PER_KW for row in rows]),
            percent_column("shared by price", [row.shared_percent for row in rows]),
            percent_column("each job cut alike", [row.alike_percent for row in rows]),
            percent_column("clocks capped alike", [row.capped_percent for row in rows]),
            percent_column("least valuable paused", [row.paused_percent for row in rows]),
        ],
    )


def _price(interval: SiteInterval) -> str:
    """The worth of the next kilowatt, in words."""
    if interval.price_money_per_kwh is not None:
        return f"{interval.price_money_per_kwh:.4g} for each hour"
    return f"{interval.price_percent_per_kw:.4g}% of throughput"
