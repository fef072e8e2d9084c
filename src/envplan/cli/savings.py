"""`envplan savings`: what plans save in a month and a year."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import envplan
from envplan.cli import output as ui
from envplan.cli.command import options, typed
from envplan.cli.costs import CURRENCY, year_amounts
from envplan.cli.options import JobOptions, RateOptions
from envplan.quantities import PERCENT

if TYPE_CHECKING:
    from envplan.costs.spending import Amounts, Saving, Site

#: What JSON says of a plan.
_ROW: Final = """
    point iteration_time_s=plan.iteration_time slowdown_percent=plan.predicted.slowdown_percent
    energy_j=plan.energy savings_percent=plan.savings.percent
"""


def _share(text: str, name: str) -> float:
    """A share such as 0.8 or 80%."""
    return PERCENT.parse(text, name) / (100 if "%" in text else 1)


@options(
    """
    Job:
      --gpus N  How many GPUs run such jobs; default: those of the job.
      --utilization SHARE  Share of the year they train: 0.8 or 80%; default: 1.
    """,
    utilization=_share,
)
class SiteOptions(RateOptions):
    """Where a job runs, how much, and what is paid there."""

    gpus: int | None = None
    utilization: float = 1.0

    def site(self) -> Site:
        """As the library takes it."""
        from envplan.costs import Run
        from envplan.costs.spending import Site

        run = Run.of(**self.rates(), iterations=1, overheads=self.overheads())
        return Site.of_run(run, self.utilization)


def savings(job: JobOptions, site: SiteOptions) -> None:
    """Say what plans save: energy, money and CO2 a year.

    In a month and a year, for the same work, against maximum frequency: at no slowdown, at the best
    money between T_min and T_star, and at T_star.

    \b
    Example:
      envplan savings a40-gpt3-1.3b-4stage --microbatches 32
      envplan savings --gpus 64 --price 0.12 --pue 1.3 --carbon 380 --utilization 0.8
      envplan savings --gpus 1024 --price 0.25 --currency EUR --gpu-hour 1.90 --host-power 150
    """
    where = site.site()
    frontier = job.trace()
    rows = envplan.savings(frontier, gpus=site.gpus, **where.model_dump())
    ui.answer(
        lambda: _document(frontier, rows, site, where),
        lambda: _print(frontier, rows, site, where),
        then=_then(rows, job, site),
    )


def _print(
    frontier: envplan.Frontier, rows: Sequence[Saving], site: SiteOptions, where: Site
) -> None:
    gpus = site.gpus or frontier.num_gpus * frontier.pipeline.num_stages
    assumed = " (assumed; --price says yours)" if site.price is None else ""
    beside = where.in_words() or "GPUs alone"
    ui.say(ui.describe_job(frontier))
    ui.say(f"one year at {where.price:g} {site.currency or CURRENCY} a kWh{assumed}, {beside}:")
    spent = ", ".join(f"{text} {unit}" for unit, text in _amounts(rows[0].spent, site).items())
    used = "" if site.utilization == 1 else f" {100 * site.utilization:g}% of the time"
    ui.say(f"{gpus:,} GPUs at maximum frequency{used} take {spent}")
    columns: dict[str, Any] = {
        "": [row.point for row in rows],
        "slower (%)": [row.plan.predicted.slowdown_percent for row in rows],
        "energy saved (%)": [row.plan.savings.percent for row in rows],
    }
    for period in ("month", "year"):
        cells = [_amounts(getattr(row, period), site) for row in rows]
        columns |= {f"{unit} a {period}": [cell[unit] for cell in cells] for unit in cells[0]}
    energies = frontier.profile.metadata.energies_are
    title = f"Saved for the same work, {gpus:,} GPUs"
    monthly = [name for name in reversed(columns) if name.endswith("a month")]
    ui.print_columns(title + (f", energies {energies}" if energies else ""), columns, drop=monthly)
    if not site.gpu_hour:
        ui.say("time lost by slower plans is not paid for; --gpu-hour P says what it costs")
    if site.carbon is None:
        ui.say("--carbon G (gCO2 of a kWh) adds CO2")


def _amounts(amounts: Amounts, site: SiteOptions) -> dict[str, str]:
    """Numbers by their units."""
    known = year_amounts(amounts, site.currency)
    return {unit: ui.significant(amount) for unit, amount in known.items()}


def _then(rows: Sequence[Saving], job: JobOptions, site: SiteOptions) -> list[str]:
    """The command that makes the plan: of the best money where time is paid for, else at T_min."""
    none, best, star = rows
    target: list[str] = []
    if site.gpu_hour and best.plan.iteration_time > none.plan.iteration_time:
        target = ["--min-energy"]
        if best.plan.iteration_time < star.plan.iteration_time:
            target = ["--target-time", ui.exact_seconds(best.plan.target.deadline_s)]
    return ["envplan", "solve", *typed(job), *target]


def _document(
    frontier: envplan.Frontier, rows: Sequence[Saving], site: SiteOptions, where: Site
) -> dict[str, Any]:
    return {
        "profile": rows[0].plan.profile.model_dump(exclude_none=True),
        "energies_are": frontier.profile.metadata.energies_are,
        "gpus": site.gpus or frontier.num_gpus * frontier.pipeline.num_stages,
        "currency": site.currency or CURRENCY,
        "price_is_assumed": site.price is None,
        "site": where.model_dump(),
        "max_frequency_year": rows[0].spent._asdict(),
        "savings": [
            {**ui.picked(row, _ROW), "month": row.month._asdict(), "year": row.year._asdict()}
            for row in rows
        ],
    }
