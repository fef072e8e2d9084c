"""`envplan savings`: what plans save in a month and a year."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import envplan
from envplan.cli import output as ui
from envplan.cli.command import options, typed
from envplan.cli.costs import CURRENCY, year_amounts
from envplan.cli.options import JobOptions, RateOptions
from envplan.quantities import PERCENT

if TYPE_CHECKING:
    from envplan.costs.spending import Site

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
    gpus = site.gpus or frontier.num_gpus * frontier.pipeline.num_stages
    currency, energies = site.currency or CURRENCY, frontier.profile.metadata.energies_are
    best, star = (row.plan for row in rows[1:])
    # To type next: the plan of the best money where time is paid for, else that at T_min.
    target: list[str] = []
    if site.gpu_hour and best.iteration_time > rows[0].plan.iteration_time:
        target = ["--min-energy"]
        if best.iteration_time < star.iteration_time:
            target = ["--target-time", ui.exact_seconds(best.target.deadline_s)]

    def document() -> dict[str, Any]:
        return {
            "profile": best.profile.model_dump(exclude_none=True),
            "energies_are": energies,
            "gpus": gpus,
            "currency": currency,
            "price_is_assumed": site.price is None,
            "site": where.model_dump(),
            "max_frequency_year": rows[0].spent._asdict(),
            "savings": [
                {**ui.picked(row, _ROW), "month": row.month._asdict(), "year": row.year._asdict()}
                for row in rows
            ],
        }

    def tell() -> None:
        assumed = " (assumed; --price says yours)" if site.price is None else ""
        beside = where.in_words() or "GPUs alone"
        ui.say(ui.describe_job(frontier))
        ui.say(f"one year at {where.price:g} {currency} a kWh{assumed}, {beside}:")
        year = year_amounts(rows[0].spent, currency)
        spent = ", ".join(f"{ui.significant(amount)} {unit}" for unit, amount in year.items())
        used = "" if site.utilization == 1 else f" {100 * site.utilization:g}% of the time"
        ui.say(f"{gpus:,} GPUs at maximum frequency{used} take {spent}")
        columns: dict[str, Any] = {
            "": [row.point for row in rows],
            "slower (%)": [row.plan.predicted.slowdown_percent for row in rows],
            "energy saved (%)": [row.plan.savings.percent for row in rows],
        }
        for period in ("month", "year"):
            saved = [year_amounts(getattr(row, period), currency) for row in rows]
            for unit in saved[0]:
                columns[f"{unit} a {period}"] = [ui.significant(one[unit]) for one in saved]
        title = f"Saved for the same work, {gpus:,} GPUs"
        monthly = [name for name in reversed(columns) if name.endswith("a month")]
        title += f", energies {energies}" if energies else ""
        ui.print_columns(title, columns, drop=monthly)
        if not site.gpu_hour:
            ui.say("time lost by slower plans is not paid for; --gpu-hour P says what it costs")
        if site.carbon is None:
            ui.say("--carbon G (gCO2 of a kWh) adds CO2")

    ui.answer(document, tell, then=["envplan", "solve", *typed(job), *target])
