"""What runs cost and what plans save, as commands show it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import envplan
from envplan._io.words import significant
from envplan.cli import output as ui
from envplan.cli.describe import modelled_title
from envplan.cli.groups import CostOptions
from envplan.cli.tables import (
    Column,
    table_columns,
    value_column,
)
from envplan.units import duration_text

if TYPE_CHECKING:
    from envplan.costs import Cost, CostComparison, Run, RunComparison
    from envplan.solve.savings import Amounts

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
    pair: CostComparison, currency: str | None, carbon_unit: Literal["g", "kg"] = "kg"
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
    ui.show_table(modelled_title(_title(costs), plan.profile.source), table_columns(headers, rows))


def _time_row(run: CostComparison) -> list[str]:
    before_s, after_s = run.max_frequency.time_s, run.plan.time_s
    saved = "-"
    if before_s != after_s:
        saved = ("-" if after_s > before_s else "") + duration_text(abs(before_s - after_s))
    percent = _saved(before_s, after_s)
    return ["time", duration_text(before_s), duration_text(after_s), saved, percent]


def _amount_row(row: CostRow) -> list[str]:
    before, after = row.max_frequency, row.plan
    amounts = [significant(amount) for amount in (before, after, before - after)]
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
    what = [f"{significant(abs(amount))} {unit}" for unit, amount in amounts.items()]
    rate = f"at {site.price:g} a kWh"
    if run.price is None:
        rate += " (assumed; --price says yours)"
    elif not run.price.is_fixed:
        rate += " on average"
    modelled = "modelled" if plan.profile.source == "modelled" else ""
    notes = [note for note in (rate, run.overheads.in_words(), modelled) if note]
    verb = "saves" if saved.money >= 0 else "costs"
    return f"a year of it on the job's GPUs {verb} {', '.join(what)} {', '.join(notes)}"


def replay_cost_notes(run: Run, iteration: Cost, whole_run: Cost | None) -> list[str]:
    """What an iteration costs and what the run does, in sentences."""
    notes = [f"an iteration costs {_amounts(iteration, run.currency)} over all GPUs"]
    if whole_run is not None:
        amounts = _amounts(whole_run, run.currency)
        notes.append(f"{run.iterations:,} iterations cost {amounts} over all GPUs")
    return notes


def _amounts(spent: Cost, currency: str | None) -> str:
    """Energy, money and carbon that are known, as in `3.2 kWh, 0.4 USD`."""
    from envplan.costs.model import CostComparison

    rows = cost_rows(CostComparison(max_frequency=spent, plan=spent), currency)
    return ", ".join(f"{significant(row.plan)} {row.unit}" for row in rows)


def cost_title(run: Run, source: str | None) -> str:
    """The title of a table of costs."""
    return modelled_title(_title(run), source)


def cost_columns(run: Run, spent_on: Sequence[RunComparison]) -> list[Column]:
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
    return value_column(rows[0].name, [significant(row.plan) for row in rows])


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
