"""What a run costs, as commands show it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from envplan.cli.options import RunOptions
    from envplan.costs import Costs, Pair, Run, Spent
    from envplan.plan import Plan


def cost_rows(plan: Plan) -> list[tuple[str, float, float]]:
    """Name, before and after of an iteration's costs."""
    if plan.costs is None:
        return []
    pair = plan.costs.iteration
    rows = []
    if pair.plan.money is not None and pair.max_frequency.money is not None:
        rows.append((_money(plan.costs.currency), pair.max_frequency.money, pair.plan.money))
    if pair.plan.carbon_g is not None and pair.max_frequency.carbon_g is not None:
        rows.append(("carbon (g CO2)", pair.max_frequency.carbon_g, pair.plan.carbon_g))
    return rows


def print_costs(plan: Plan) -> None:
    """The run's table and what it was chosen for; nothing where there is no run."""
    from envplan.cli.output import print_table, titled

    costs = plan.costs
    if costs is None or costs.run is None:
        return
    of = f" ({costs.tokens:g} tokens)" if costs.tokens is not None else ""
    print_table(
        titled(f"The run: {costs.iterations:,} iterations{of}, all GPUs", plan.profile.source),
        ("", "max frequency", "plan", "saved", "saved (%)"),
        _run_rows(costs, costs.run),
    )


def year_of(plan: Plan, costs: RunOptions) -> str:
    """What a year of iterations saves on the job's GPUs, in a sentence."""
    from envplan.cli.output import significant
    from envplan.costs import Run
    from envplan.costs.savings import Site

    run = Run(overheads=costs.overheads()) if plan.costs is None else plan.costs.of_run()
    site, modelled = Site.of_run(run), plan.profile.source == "modelled"
    _, saved = site.year(plan)
    parts = [
        f"{significant(abs(saved.kwh))} kWh",
        f"{significant(abs(saved.money))} {_unit(run.currency)}",
    ]
    if saved.carbon_t is not None:
        parts.append(f"{significant(abs(saved.carbon_t))} t CO2")
    notes = [f"at {site.price:g} a kWh"]
    if run.price is None:
        notes[0] += " (assumed; --price says yours)"
    elif not run.price.is_fixed:
        notes[0] += " on average"
    notes += [run.overheads.in_words()] if run.overheads.in_words() else []
    notes += ["modelled"] if modelled else []
    verb = "saves" if saved.money >= 0 else "costs"
    return f"a year of it on the job's GPUs {verb} {', '.join(parts)} {', '.join(notes)}"


def _unit(currency: str | None) -> str:
    return currency or "USD"


def _run_rows(costs: Costs, run: Pair) -> list[list[str]]:
    from envplan.cli.output import significant
    from envplan.units import duration_text

    before, after = run.max_frequency, run.plan
    times = [before.time_s, after.time_s]
    lost = "-" if times[0] == times[1] else duration_text(abs(times[0] - times[1]))
    longer = "-" if times[1] > times[0] and lost != "-" else ""
    rows = [("energy (kWh)", before.energy_kwh, after.energy_kwh)]
    if before.money is not None and after.money is not None:
        rows.append((_money(costs.currency), before.money, after.money))
    if before.carbon_g is not None and after.carbon_g is not None:
        rows.append(("carbon (kg CO2)", before.carbon_g / 1000, after.carbon_g / 1000))
    return [
        ["time", *map(duration_text, times), longer + lost, _saved(*times)],
        *(
            [name, *(significant(value) for value in (old, new, old - new)), _saved(old, new)]
            for name, old, new in rows
        ),
    ]


def replay_cost_notes(run: Run, spent_on: tuple[Spent, Spent | None]) -> list[str]:
    """The same in sentences."""
    from envplan.cli.output import significant

    currency = _unit(run.currency)
    notes = []
    words = ("an iteration costs", f"{run.iterations:,} iterations cost")
    for what, spent in zip(words, spent_on, strict=True):
        if spent is None:
            continue
        parts = [f"{significant(spent.energy_kwh)} kWh"]
        if spent.money is not None:
            parts.append(f"{significant(spent.money)} {currency}")
        if spent.carbon_g is not None:
            parts.append(f"{significant(spent.carbon_g / 1000)} kg CO2")
        notes.append(f"{what} {', '.join(parts)} over all GPUs")
    return notes


def cost_columns(
    run: Run, spent_on: Sequence[tuple[Pair, Pair | None]]
) -> tuple[str, dict[str, list[str]]]:
    """Title and columns of what several ways to do the same work cost.

    Args:
        spent_on: an iteration and the run, each at maximum frequency and otherwise.
    """
    from envplan.cli.output import significant
    from envplan.units import duration_text

    shown = [whole or iteration for iteration, whole in spent_on]
    spent, before = [pair.plan for pair in shown], shown[0].max_frequency
    columns = {
        "time": [duration_text(one.time_s) for one in spent],
        "energy (kWh)": [significant(one.energy_kwh) for one in spent],
    }
    if before.money is not None:
        money = [one.money or 0.0 for one in spent]
        columns[_money(run.currency)] = [significant(one) for one in money]
        columns["saved (%)"] = [_saved(before.money, after) for after in money]
    if before.carbon_g is not None:
        carbon = [(one.carbon_g or 0.0) / 1000 for one in spent]
        columns["carbon (kg CO2)"] = [significant(one) for one in carbon]
        columns["avoided (%)"] = [_saved(before.carbon_g / 1000, after) for after in carbon]
    what = f"The run: {run.iterations:,} iterations" if run.iterations else "One iteration"
    return f"{what}, all GPUs", columns


def _saved(before: float, after: float) -> str:
    return f"{100 * (before - after) / before:.2f}" if before > 0 else "-"


def _money(currency: str | None) -> str:
    return f"cost ({_unit(currency)})"


def costs_document(plan: Plan) -> dict[str, Any]:
    """The costs as JSON, with files instead of their rows."""
    assert plan.costs is not None
    document = plan.costs.model_dump(exclude_none=True)
    for rate in ("price", "carbon"):
        if rate in document:
            known = document[rate]
            document[rate] = (
                {"per_kwh": known["per_kwh"][0]}
                if known.get("file") is None
                else {key: known[key] for key in ("file", "start_s", "end_s", "repeats")}
            )
    return document
