"""What a run costs, as commands show it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import envplan
from envplan.cli import output as ui

if TYPE_CHECKING:
    from envplan.cli.options import CostOptions
    from envplan.costs import Pair, Run, Spent

#: What money is called where nobody says.
CURRENCY: Final = "USD"
_ENERGY: Final = "energy (kWh)"


def _amounts(spent: Spent, currency: str | None) -> dict[str, float]:
    """What is known of what was spent, by what it is and its unit."""
    known = {
        _ENERGY: spent.energy_kwh,
        f"cost ({currency or CURRENCY})": spent.money,
        "carbon (kg CO2)": None if spent.carbon_g is None else spent.carbon_g / 1000,
    }
    return {name: amount for name, amount in known.items() if amount is not None}


def cost_rows(plan: envplan.Plan) -> list[tuple[str, float, float]]:
    """Name, before and after of an iteration's costs."""
    if plan.costs is None:
        return []
    pair, rows = plan.costs.iteration, []
    if pair.plan.money is not None and pair.max_frequency.money is not None:
        name = f"cost ({plan.costs.currency or CURRENCY})"
        rows.append((name, pair.max_frequency.money, pair.plan.money))
    if pair.plan.carbon_g is not None and pair.max_frequency.carbon_g is not None:
        rows.append(("carbon (g CO2)", pair.max_frequency.carbon_g, pair.plan.carbon_g))
    return rows


def print_costs(plan: envplan.Plan) -> None:
    """The run's table and what it was chosen for; nothing where there is no run."""
    from envplan.units import duration_text

    costs = plan.costs
    if costs is None or costs.run is None:
        return
    old, new = costs.run.max_frequency.time_s, costs.run.plan.time_s
    lost = "-" if old == new else ("-" if new > old else "") + duration_text(abs(old - new))
    rows = [["time", duration_text(old), duration_text(new), lost, _saved(old, new)]]
    after = _amounts(costs.run.plan, costs.currency)
    for name, old in _amounts(costs.run.max_frequency, costs.currency).items():
        new = after[name]
        rows.append([name, *map(ui.significant, (old, new, old - new)), _saved(old, new)])
    of = f" ({costs.tokens:g} tokens)" if costs.tokens is not None else ""
    ui.print_table(
        ui.titled(f"The run: {costs.iterations:,} iterations{of}, all GPUs", plan.profile.source),
        ("", "max frequency", "plan", "saved", "saved (%)"),
        rows,
    )


def year_of(plan: envplan.Plan, costs: CostOptions) -> str:
    """What a year of iterations saves on the job's GPUs, in a sentence."""
    from envplan.costs import Run
    from envplan.costs.savings import Site

    run = Run(overheads=costs.overheads()) if plan.costs is None else plan.costs.of_run()
    site = Site.of_run(run)
    _, saved = site.year(plan)
    amounts = {"kWh": saved.kwh, run.currency or CURRENCY: saved.money, "t CO2": saved.carbon_t}
    what = [f"{ui.significant(abs(x))} {unit}" for unit, x in amounts.items() if x is not None]
    rate = f"at {site.price:g} a kWh"
    if run.price is None:
        rate += " (assumed; --price says yours)"
    elif not run.price.is_fixed:
        rate += " on average"
    modelled = "modelled" if plan.profile.source == "modelled" else ""
    notes = [note for note in (rate, run.overheads.in_words(), modelled) if note]
    verb = "saves" if saved.money >= 0 else "costs"
    return f"a year of it on the job's GPUs {verb} {', '.join(what)} {', '.join(notes)}"


def replay_cost_notes(run: Run, spent_on: tuple[Spent, Spent | None]) -> list[str]:
    """The same in sentences."""
    notes = []
    words = ("an iteration costs", f"{run.iterations:,} iterations cost")
    for what, spent in zip(words, spent_on, strict=True):
        if spent is not None:
            amounts = _amounts(spent, run.currency).items()
            parts = [f"{ui.significant(x)} {name.split('(')[1][:-1]}" for name, x in amounts]
            notes.append(f"{what} {', '.join(parts)} over all GPUs")
    return notes


def cost_columns(
    run: Run, spent_on: Sequence[tuple[Pair, Pair | None]]
) -> tuple[str, dict[str, list[str]]]:
    """Title and columns of what several ways to do the same work cost.

    Args:
        spent_on: an iteration and the run, each at maximum frequency and otherwise.
    """
    from envplan.units import duration_text

    shown = [whole or iteration for iteration, whole in spent_on]
    each = [_amounts(pair.plan, run.currency) for pair in shown]
    columns = {"time": [duration_text(pair.plan.time_s) for pair in shown]}
    for name, before in _amounts(shown[0].max_frequency, run.currency).items():
        columns[name] = [ui.significant(one[name]) for one in each]
        if name != _ENERGY:
            less = "avoided (%)" if name.startswith("carbon") else "saved (%)"
            columns[less] = [_saved(before, one[name]) for one in each]
    what = f"The run: {run.iterations:,} iterations" if run.iterations else "One iteration"
    return f"{what}, all GPUs", columns


def _saved(before: float, after: float) -> str:
    return f"{100 * (before - after) / before:.2f}" if before > 0 else "-"


def costs_document(plan: envplan.Plan) -> dict[str, Any]:
    """The costs as JSON, with files instead of their rows."""
    assert plan.costs is not None
    document = plan.costs.model_dump(exclude_none=True)
    for rate in {"price", "carbon"} & document.keys():
        known = document[rate]
        document[rate] = (
            {"per_kwh": known["per_kwh"][0]}
            if known.get("file") is None
            else {key: known[key] for key in ("file", "start_s", "end_s", "repeats")}
        )
    return document
