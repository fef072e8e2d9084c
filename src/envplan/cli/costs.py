"""What runs cost and what plans save, as commands show it; and `envplan savings`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple

import typer

import envplan
from envplan.cli import output as ui
from envplan.cli.given import as_typed
from envplan.cli.groups import CostOptions, JobOptions, RateOptions
from envplan.cli.shared import JOB
from envplan.cli.tables import (
    Column,
    change_column,
    percent_column,
    table_columns,
    text_column,
    value_column,
)
from envplan.cli.types import parser_of, quantity
from envplan.quantities import COUNT, PERCENT
from envplan.units import duration_text

if TYPE_CHECKING:
    from envplan.costs import Run
    from envplan.costs.model import Pair, Spent
    from envplan.solve.savings import Amounts, Saving, Site

#: What money is called where nobody says.
CURRENCY: Final = "USD"
_GRAMS: Final = {"g": 1.0, "kg": 1000.0}


class CostRow(NamedTuple):
    """What the same work takes at maximum frequency and with a plan, of one kind.

    Attributes:
        kind: energy, cost or carbon.
        unit: of both amounts.
        max_frequency: the amount at maximum frequency.
        plan: the amount with the plan.
    """

    kind: str
    unit: str
    max_frequency: float
    plan: float

    @property
    def name(self) -> str:
        """Kind and unit, as in `energy (kWh)`."""
        return f"{self.kind} ({self.unit})"


def cost_rows(
    pair: Pair, currency: str | None, carbon_unit: Literal["g", "kg"] = "kg"
) -> list[CostRow]:
    """Energy, and money and carbon where they are known, in this order."""
    before, after = pair.max_frequency, pair.plan
    rows = [CostRow("energy", "kWh", before.energy_kwh, after.energy_kwh)]
    if before.money is not None and after.money is not None:
        rows.append(CostRow("cost", currency or CURRENCY, before.money, after.money))
    if before.carbon_g is not None and after.carbon_g is not None:
        grams = _GRAMS[carbon_unit]
        carbon = before.carbon_g / grams, after.carbon_g / grams
        rows.append(CostRow("carbon", f"{carbon_unit} CO2", *carbon))
    return rows


def year_amounts(amounts: Amounts, currency: str | None) -> dict[str, float]:
    """What is known of the amounts of a month or year, by their units."""
    known = {"kWh": amounts.kwh, currency or CURRENCY: amounts.money, "t CO2": amounts.carbon_t}
    return {unit: amount for unit, amount in known.items() if amount is not None}


def print_costs(plan: envplan.Plan) -> None:
    """The run's table and what it was chosen for; nothing where there is no run."""
    costs = plan.costs
    if costs is None or costs.run is None:
        return
    time, amounts = _time_row(costs.run), cost_rows(costs.run, costs.currency)
    rows = [time, *map(_amount_row, amounts)]
    headers = ("", "max frequency", "plan", "saved", "saved (%)")
    ui.show_table(ui.titled(_title(costs), plan.profile.source), table_columns(headers, rows))


def _time_row(run: Pair) -> list[str]:
    before_s, after_s = run.max_frequency.time_s, run.plan.time_s
    saved = "-"
    if before_s != after_s:
        saved = ("-" if after_s > before_s else "") + duration_text(abs(before_s - after_s))
    percent = _saved(before_s, after_s)
    return ["time", duration_text(before_s), duration_text(after_s), saved, percent]


def _amount_row(row: CostRow) -> list[str]:
    before, after = row.max_frequency, row.plan
    amounts = [ui.significant(amount) for amount in (before, after, before - after)]
    return [row.name, *amounts, _saved(before, after)]


def _title(run: Run) -> str:
    what = f"The run: {run.iterations:,} iterations" if run.iterations else "One iteration"
    return what + (f" ({run.tokens:g} tokens)" if run.tokens else "") + ", all GPUs"


def year_of(plan: envplan.Plan, costs: CostOptions) -> str:
    """What a year of iterations saves on the job's GPUs, in a sentence."""
    from envplan.costs import Run
    from envplan.solve.savings import Site

    run = Run(overheads=costs.overheads()) if plan.costs is None else plan.costs.of_run()
    site = Site.of_run(run)
    _, saved = site.year(plan)
    amounts = year_amounts(saved, run.currency)
    what = [f"{ui.significant(abs(amount))} {unit}" for unit, amount in amounts.items()]
    rate = f"at {site.price:g} a kWh"
    if run.price is None:
        rate += " (assumed; --price says yours)"
    elif not run.price.is_fixed:
        rate += " on average"
    modelled = "modelled" if plan.profile.source == "modelled" else ""
    notes = [note for note in (rate, run.overheads.in_words(), modelled) if note]
    verb = "saves" if saved.money >= 0 else "costs"
    return f"a year of it on the job's GPUs {verb} {', '.join(what)} {', '.join(notes)}"


def replay_cost_notes(run: Run, iteration: Spent, whole_run: Spent | None) -> list[str]:
    """What an iteration costs and what the run does, in sentences."""
    notes = [f"an iteration costs {_amounts(iteration, run.currency)} over all GPUs"]
    if whole_run is not None:
        amounts = _amounts(whole_run, run.currency)
        notes.append(f"{run.iterations:,} iterations cost {amounts} over all GPUs")
    return notes


def _amounts(spent: Spent, currency: str | None) -> str:
    """Energy, money and carbon that are known, as in `3.2 kWh, 0.4 USD`."""
    from envplan.costs.model import Pair

    rows = cost_rows(Pair(max_frequency=spent, plan=spent), currency)
    return ", ".join(f"{ui.significant(row.plan)} {row.unit}" for row in rows)


def cost_title(run: Run, source: str | None) -> str:
    """The title of a table of costs."""
    return ui.titled(_title(run), source)


def cost_columns(run: Run, spent_on: Sequence[tuple[Pair, Pair | None]]) -> list[Column]:
    """Columns of what several ways to do the same work cost.

    Args:
        spent_on: an iteration and the run, each at maximum frequency and otherwise.
    """
    pairs = [whole or iteration for iteration, whole in spent_on]
    energies, *others = zip(*(cost_rows(pair, run.currency) for pair in pairs), strict=True)
    columns = [
        value_column("time", [duration_text(pair.plan.time_s) for pair in pairs]),
        _amount_column(energies),
    ]
    for rows in others:
        before, header = rows[0].max_frequency, "saved (%)"
        if rows[0].kind == "carbon":
            header = "avoided (%)"
        columns.append(_amount_column(rows))
        columns.append(value_column(header, [_saved(before, row.plan) for row in rows]))
    return columns


def _amount_column(rows: Sequence[CostRow]) -> Column:
    return value_column(rows[0].name, [ui.significant(row.plan) for row in rows])


def _saved(before: float, after: float) -> str:
    return f"{100 * (before - after) / before:.2f}" if before > 0 else "-"


def costs_document(plan: envplan.Plan) -> dict[str, Any]:
    """The costs as JSON, with files instead of their rows."""
    assert plan.costs is not None
    document = plan.costs.model_dump(by_alias=True, exclude_none=True)
    for rate in {"price", "carbon"} & document.keys():
        known = document[rate]
        document[rate] = (
            {"per_kwh": known["per_kwh"][0]}
            if known.get("file") is None
            else {key: known[key] for key in ("file", "start_s", "end_s", "repeats")}
        )
    return document


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
        """As the library takes it."""
        from envplan.costs import Run
        from envplan.solve.savings import Site

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
    ui.answer(
        lambda: _savings_document(frontier, rows, site, where, gpus),
        lambda: _print_savings(frontier, rows, site, where, gpus),
        then=["envplan", "solve", *as_typed(job), *_target_of_best_plan(rows, site)],
    )


def _target_of_best_plan(rows: Sequence[Saving], site: SiteOptions) -> list[str]:
    """Options of `solve` for the plan of the best money where time is paid for, else for none."""
    fastest, best, star = (row.plan for row in rows)
    if not site.gpu_hour or best.iteration_time <= fastest.iteration_time:
        return []
    if best.iteration_time >= star.iteration_time:
        return ["--min-energy"]
    return ["--target-time", ui.exact_seconds(best.target.deadline_s)]


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
    spent = ", ".join(f"{ui.significant(amount)} {unit}" for unit, amount in year.items())
    used = "" if site.utilization == 1 else f" {100 * site.utilization:g}% of the time"
    ui.say(
        ui.describe_job(frontier),
        f"one year at {where.price:g} {currency} a kWh{assumed}, {overheads}:",
        f"{gpus:,} GPUs at maximum frequency{used} take {spent}",
    )
    energies = frontier.profile.metadata.energies_are
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
        text_column("", [row.point for row in rows]),
        change_column("slower (%)", [row.plan.predicted.slowdown_percent for row in rows]),
        percent_column("energy saved (%)", [row.plan.savings.percent for row in rows]),
        *(
            Column(
                header=f"{unit} a month",
                cells=[ui.significant(month[unit]) for month in months],
                keep=-1,
            )
            for unit in months[0]
        ),
        *(
            Column(header=f"{unit} a year", cells=[ui.significant(year[unit]) for year in years])
            for unit in years[0]
        ),
    ]


def _savings_document(
    frontier: envplan.Frontier,
    rows: Sequence[Saving],
    site: SiteOptions,
    where: Site,
    gpus: int,
) -> dict[str, Any]:
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


def _saving_document(saving: Saving) -> dict[str, Any]:
    return {
        "point": saving.point,
        "iteration_time_s": saving.plan.iteration_time,
        "slowdown_percent": saving.plan.predicted.slowdown_percent,
        "energy_j": saving.plan.energy,
        "savings_percent": saving.plan.savings.percent,
        "month": saving.month._asdict(),
        "year": saving.year._asdict(),
    }
