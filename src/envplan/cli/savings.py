"""`envplan savings`: what plans save in a month and a year."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final

import typer

import envplan
from envplan._io.words import exact_seconds, significant
from envplan.cli import output as ui
from envplan.cli.cost_options import RateOptions
from envplan.cli.costs import CURRENCY, amounts_text, year_amounts
from envplan.cli.describe import describe_job
from envplan.cli.given import as_typed
from envplan.cli.job_options import JobOptions
from envplan.cli.shared import JOB
from envplan.cli.tables import Column, change_column, percent_column, text_column
from envplan.cli.types import parser_of, quantity
from envplan.quantities import COUNT, PERCENT

if TYPE_CHECKING:
    from envplan.solve.savings import Saving, Site

#: What the table calls plans that JSON calls otherwise.
_POINTS: Final = {"best money": "least cost"}


def _share(text: str, option: str) -> float:
    """A share such as 0.8 or 80%."""
    return PERCENT.parse(text, option) / (100 if "%" in text else 1)


@dataclass(frozen=True, kw_only=True)
class SiteOptions(RateOptions):
    """Where a job runs, how much, and what is paid there."""

    gpus: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            parser=quantity(COUNT),
            help="How many GPUs run such jobs; default: those of the job.",
            rich_help_panel=JOB,
        ),
    ] = None
    utilization: Annotated[
        float,
        typer.Option(
            metavar="SHARE",
            parser=parser_of(_share),
            help="Share of the year they train: 0.8 or 80%; default: 1.",
            rich_help_panel=JOB,
            show_default=False,
        ),
    ] = 1.0

    def site(self) -> Site:
        """The site as the library takes it."""
        from envplan.costs import Run
        from envplan.solve.savings import Site

        price, carbon = self.rates()
        run = Run.of(price=price, carbon=carbon, iterations=1, overheads=self.overheads())
        return Site.of_run(run, self.utilization)


def savings(job: JobOptions, site: SiteOptions) -> None:
    """Say what plans save: energy, money and CO2 a year.

    In a month and a year, for the same work, against maximum frequency: at no slowdown, at the
    least cost of energy and GPU hours between T_min and T_star, and at T_star.

    \b
    Example:
      envplan savings a40-gpt3-1.3b-4stage --microbatches 32
      envplan savings --gpus 64 --price 0.12 --pue 1.3 --utilization 0.8
      envplan savings --gpus 1024 --price 0.25 --currency EUR --gpu-hour 1.90
    """
    where = site.site()
    frontier = job.trace()
    rows = envplan.savings(frontier, gpus=site.gpus, **where.model_dump())
    gpus = site.gpus or frontier.num_gpus * frontier.pipeline.num_stages
    ui.answer(
        lambda: _savings_document(frontier, rows, site, where, gpus),
        lambda: _print_savings(frontier, rows, site, where, gpus),
        next_command=["envplan", "solve", *as_typed(job), *_target_of_best_plan(rows, site)],
    )


def _target_of_best_plan(rows: Sequence[Saving], site: SiteOptions) -> list[str]:
    """Options of `solve` for the plan of least cost where time is paid for, else for none."""
    fastest, best, star = (row.plan for row in rows)
    if not site.gpu_hour or best.iteration_time <= fastest.iteration_time:
        return []
    if best.iteration_time >= star.iteration_time:
        return ["--min-energy"]
    return ["--target-time", exact_seconds(best.target.deadline_s)]


def _print_savings(
    frontier: envplan.Frontier,
    rows: Sequence[Saving],
    site: SiteOptions,
    where: Site,
    gpus: int,
) -> None:
    currency = site.currency or CURRENCY
    assumed = " (assumed; --price says yours)" if site.price is None else ""
    overheads = where.in_words() or "GPUs alone"
    year = year_amounts(rows[0].spent, currency)
    spent = amounts_text(year)
    used = "" if site.utilization == 1 else f" {100 * site.utilization:g}% of the time"
    ui.say(
        describe_job(frontier),
        f"one year at {where.price:g} {currency} a kWh{assumed}, {overheads}:",
        f"{gpus:,} GPUs at maximum frequency{used} take {spent}",
    )
    energies = frontier.profile.metadata.energies_in_words
    title = f"Saved for the same work, {gpus:,} GPUs"
    if energies:
        title += f", energies {energies}"
    ui.show_table(title, _saving_columns(rows, currency))
    if not site.gpu_hour:
        ui.say("time lost by slower plans is not paid for; --gpu-hour P says what it costs")
    if site.carbon is None:
        ui.say("--carbon G (gCO2 of a kWh) adds CO2")


def _saving_columns(rows: Sequence[Saving], currency: str) -> list[Column]:
    """A row for each plan; where there is no room, what a month saves is omitted first."""
    months = [year_amounts(row.month, currency) for row in rows]
    years = [year_amounts(row.year, currency) for row in rows]
    return [
        text_column("", [_POINTS.get(row.point, row.point) for row in rows]),
        change_column("slower (%)", [row.plan.predicted.slowdown_percent for row in rows]),
        percent_column("energy saved (%)", [row.plan.savings.percent for row in rows]),
        *_amount_columns("a month", months, keep=-1),
        *_amount_columns("a year", years, keep=0),
    ]


def _amount_columns(
    period: str, amounts: Sequence[Mapping[str, float]], *, keep: int
) -> list[Column]:
    """A column for each unit of the amounts, which all rows have."""
    columns = []
    for unit in amounts[0]:
        cells = [significant(by_unit[unit]) for by_unit in amounts]
        columns.append(Column(header=f"{unit} {period}", cells=cells, keep=keep))
    return columns


def _savings_document(
    frontier: envplan.Frontier,
    rows: Sequence[Saving],
    site: SiteOptions,
    where: Site,
    gpus: int,
) -> dict[str, object]:
    return {
        "profile": rows[0].plan.profile.model_dump(exclude_none=True),
        "energies_are": frontier.profile.metadata.energies_are,
        "gpus": gpus,
        "currency": site.currency or CURRENCY,
        "price_is_assumed": site.price is None,
        "site": where.model_dump(),
        "max_frequency_year": rows[0].spent._asdict(),
        "savings": [_saving_document(row) for row in rows],
    }


def _saving_document(saving: Saving) -> dict[str, object]:
    return {
        "point": saving.point,
        "iteration_time_s": saving.plan.iteration_time,
        "slowdown_percent": saving.plan.predicted.slowdown_percent,
        "energy_j": saving.plan.energy,
        "savings_percent": saving.plan.savings.percent,
        "month": saving.month._asdict(),
        "year": saving.year._asdict(),
    }
