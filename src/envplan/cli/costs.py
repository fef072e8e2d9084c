"""Costs of runs and savings of plans, as commands show them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import envplan
from envplan._io.words import significant
from envplan.cli import output as ui
from envplan.cli.cost_options import CostOptions
from envplan.cli.describe import modelled_title
from envplan.cli.tables import Column, table_columns, value_column
from envplan.units import duration_text

if TYPE_CHECKING:
    from envplan.costs import Cost, CostComparison, Rate, Run, RunComparison, RunCosts
    from envplan.solve.savings import Amounts

#: What money is called where nobody says.
CURRENCY: Final = "USD"
_GRAMS: Final = {"g": 1.0, "kg": 1000.0}


class CostRow(NamedTuple):
    """One kind of cost of the same work, at maximum frequency and with a plan.

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
    comparison: CostComparison, currency: str | None, carbon_unit: Literal["g", "kg"] = "kg"
) -> list[CostRow]:
    """Energy, and money and carbon where they are known, in this order."""
    baseline = comparison.max_frequency
    planned = comparison.plan
    rows = [CostRow("energy", "kWh", baseline.energy_kwh, planned.energy_kwh)]
    if baseline.money is not None and planned.money is not None:
        rows.append(CostRow("cost", currency or CURRENCY, baseline.money, planned.money))
    if baseline.carbon_g is not None and planned.carbon_g is not None:
        unit_g = _GRAMS[carbon_unit]
        carbon = CostRow(
            kind="carbon",
            unit=f"{carbon_unit} CO2",
            max_frequency=baseline.carbon_g / unit_g,
            plan=planned.carbon_g / unit_g,
        )
        rows.append(carbon)
    return rows


def year_amounts(amounts: Amounts, currency: str | None) -> dict[str, float]:
    """The amounts of a month or year that are known, by their units."""
    by_unit = {"kWh": amounts.kwh, currency or CURRENCY: amounts.money}
    if amounts.carbon_t is not None:
        by_unit["t CO2"] = amounts.carbon_t
    return by_unit


def print_costs(plan: envplan.Plan) -> None:
    """Print what the run takes at maximum frequency and with the plan, if there is a run."""
    costs = plan.costs
    if costs is None or costs.run is None:
        return
    rows = [_time_cells(costs.run)]
    rows += map(_amount_cells, cost_rows(costs.run, costs.currency))
    headers = ("", "max frequency", "plan", "saved", "saved (%)")
    ui.show_table(cost_title(costs, plan.profile.source), table_columns(headers, rows))


def _time_cells(run: CostComparison) -> list[str]:
    baseline_s = run.max_frequency.time_s
    planned_s = run.plan.time_s
    saved = "-"
    if planned_s != baseline_s:
        sign = "-" if planned_s > baseline_s else ""
        saved = sign + duration_text(abs(baseline_s - planned_s))
    return [
        "time",
        duration_text(baseline_s),
        duration_text(planned_s),
        saved,
        _saved_percent(baseline_s, planned_s),
    ]


def _amount_cells(row: CostRow) -> list[str]:
    return [
        row.name,
        significant(row.max_frequency),
        significant(row.plan),
        significant(row.max_frequency - row.plan),
        _saved_percent(row.max_frequency, row.plan),
    ]


def year_of(plan: envplan.Plan, costs: CostOptions) -> str:
    """The savings of a year of iterations on the job's GPUs, in a sentence."""
    from envplan.costs import Run
    from envplan.solve.savings import Site

    run = Run(overheads=costs.overheads()) if plan.costs is None else plan.costs.of_run()
    site = Site.of_run(run)
    saved = site.year(plan).saved
    amounts = {}
    for unit, amount in year_amounts(saved, run.currency).items():
        amounts[unit] = abs(amount)
    verb = "saves" if saved.money >= 0 else "costs"
    rate = f"at {site.price:g} a kWh"
    if run.price is None:
        rate += " (assumed; --price says yours)"
    elif not run.price.is_fixed:
        rate += " on average"
    notes = [rate]
    overheads = run.overheads.in_words()
    if overheads:
        notes.append(overheads)
    if plan.profile.source == "modelled":
        notes.append("modelled")
    return f"a year of it on the job's GPUs {verb} {amounts_text(amounts)} {', '.join(notes)}"


def replay_cost_notes(run: Run, costs: RunCosts) -> list[str]:
    """The costs of an iteration and of the run, in sentences."""
    iteration = amounts_text(_amounts(costs.iteration, run.currency))
    notes = [f"an iteration costs {iteration} over all GPUs"]
    if costs.run is not None:
        whole_run = amounts_text(_amounts(costs.run, run.currency))
        notes.append(f"{run.iterations:,} iterations cost {whole_run} over all GPUs")
    return notes


def _amounts(cost: Cost, currency: str | None) -> dict[str, float]:
    """Energy, money and carbon that are known, by their units."""
    amounts = {"kWh": cost.energy_kwh}
    if cost.money is not None:
        amounts[currency or CURRENCY] = cost.money
    if cost.carbon_g is not None:
        amounts["kg CO2"] = cost.carbon_g / _GRAMS["kg"]
    return amounts


def amounts_text(amounts: Mapping[str, float]) -> str:
    """Amounts by their units, as in `3.2 kWh, 0.4 USD`."""
    return ", ".join(f"{significant(amount)} {unit}" for unit, amount in amounts.items())


def cost_title(run: Run, source: str | None) -> str:
    """The title of a table of costs, of a run or, where it has no length, of an iteration."""
    title = f"The run: {run.iterations:,} iterations" if run.iterations else "One iteration"
    if run.tokens:
        title += f" ({run.tokens:g} tokens)"
    return modelled_title(f"{title}, all GPUs", source)


def cost_columns(run: Run, comparisons: Sequence[RunComparison]) -> list[Column]:
    """Columns of what several ways to do the same work cost.

    Args:
        run: whose costs they are.
        comparisons: of each way with maximum frequency.
    """
    times = []
    rows_by_way = []
    for entry in comparisons:
        comparison = entry.run or entry.iteration
        times.append(duration_text(comparison.plan.time_s))
        rows_by_way.append(cost_rows(comparison, run.currency))
    columns = [value_column("time", times)]
    for rows_of_kind in zip(*rows_by_way, strict=True):
        columns += _columns_of_kind(rows_of_kind)
    return columns


def _columns_of_kind(rows: Sequence[CostRow]) -> list[Column]:
    """Amounts of one kind; of money and carbon also what is saved of the first way's baseline."""
    header, kind, baseline = rows[0].name, rows[0].kind, rows[0].max_frequency
    columns = [value_column(header, [significant(row.plan) for row in rows])]
    if kind != "energy":
        saved = [_saved_percent(baseline, row.plan) for row in rows]
        columns.append(value_column("avoided (%)" if kind == "carbon" else "saved (%)", saved))
    return columns


def _saved_percent(baseline: float, planned: float) -> str:
    return f"{100 * (baseline - planned) / baseline:.2f}" if baseline > 0 else "-"


def costs_document(plan: envplan.Plan) -> dict[str, object]:
    """The costs as JSON, with the files of rates instead of their rows."""
    assert plan.costs is not None
    document: dict[str, object] = plan.costs.model_dump(by_alias=True, exclude_none=True)
    if plan.costs.price is not None:
        document["price"] = _rate_document(plan.costs.price)
    if plan.costs.carbon is not None:
        document["carbon"] = _rate_document(plan.costs.carbon)
    return document


def _rate_document(rate: Rate) -> dict[str, object]:
    if rate.file is None:
        return {"per_kwh": rate.per_kwh[0]}
    return {
        "file": rate.file,
        "start_s": rate.start_s,
        "end_s": rate.end_s,
        "repeats": rate.repeats,
    }
