"""Options about money, carbon and deadlines, and how commands show what a run costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from envplan.errors import InputError, shown

if TYPE_CHECKING:
    from envplan.costs import Costs, Pair, Run, Spent
    from envplan.frontier import Frontier
    from envplan.plan import Plan
    from envplan.rates import Kind, Rate
    from envplan.simulation import Timeline

PriceOption = Annotated[
    str | None,
    typer.Option(
        metavar="P|FILE",
        help="Price of a kWh, or a CSV with hour,price or time,price if it changes with time.",
    ),
]
CarbonOption = Annotated[
    str | None,
    typer.Option(metavar="G|FILE", help="gCO2 of a kWh, or a CSV with hour,carbon or time,carbon."),
]
CurrencyOption = Annotated[
    str | None, typer.Option(metavar="NAME", help="What to call the units of --price.")
]
IterationsOption = Annotated[
    int | None, typer.Option(metavar="N", help="Iterations of the training run.")
]
TokensOption = Annotated[
    float | None,
    typer.Option(metavar="N", help="Instead of --iterations: tokens of the run, as in 300e9."),
]
TokensPerIterationOption = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Tokens of an iteration over all replicas; default: from the profile's sidecar.",
    ),
]
StartOption = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        help="When the run starts, as in 2026-12-01T00:00, for files with times; default: when "
        "they do.",
    ),
]
RepeatRatesOption = Annotated[
    bool,
    typer.Option("--repeat-rates", help="Let the files begin again where the run outlasts them."),
]
DeadlineOption = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        help="The cheapest plan whose run is over within TIME, as in 14d, 36h or 1d12h.",
    ),
]
MinimizeOption = Annotated[
    str | None,
    typer.Option(
        metavar="WHAT",
        help="With --deadline: money, carbon or energy; default: the first of these that is known.",
    ),
]

_MINIMIZED = ("money", "carbon", "energy")


@dataclass(frozen=True)
class CostOptions:
    """What the options of a command say about costs, as given."""

    price: str | None = None
    carbon: str | None = None
    currency: str | None = None
    iterations: int | None = None
    tokens: float | None = None
    tokens_per_iteration: int | None = None
    start: str | None = None
    repeat_rates: bool = False
    deadline: str | None = None
    minimize: str | None = None

    def __post_init__(self) -> None:
        """Raises: InputError: options contradict each other or lack one another."""
        for option, value, needed, other in (
            ("--currency", self.currency, "--price", self.price),
            ("--tokens-per-iteration", self.tokens_per_iteration, "--tokens", self.tokens),
            ("--minimize", self.minimize, "--deadline", self.deadline),
            ("--start", self.start, "--price or --carbon", self.price or self.carbon),
            ("--repeat-rates", self.repeat_rates, "--price or --carbon", self.price or self.carbon),
        ):
            if value and not other:
                raise InputError(f"{option} goes with {needed}")
        if self.iterations is not None and self.tokens is not None:
            raise InputError("--iterations and --tokens exclude each other; give one of them")
        if self.deadline and self.iterations is None and self.tokens is None:
            raise InputError("--deadline needs to know the work: give --iterations or --tokens")
        if self.minimize is not None and self.minimize not in _MINIMIZED:
            raise InputError(
                f"--minimize must be {', '.join(_MINIMIZED[:2])} or {_MINIMIZED[2]}, not "
                f"{self.minimize}"
            )
        for count, option in (
            (self.iterations, "--iterations"),
            (self.tokens, "--tokens"),
            (self.tokens_per_iteration, "--tokens-per-iteration"),
        ):
            if count is not None and not 1 <= count <= 1e18:
                raise InputError(f"{option} must be between 1 and 10^18, not {shown(count)}")

    @property
    def given(self) -> bool:
        """Whether anything is to be reckoned."""
        work = (self.iterations, self.tokens)
        return any((self.price, self.carbon, self.deadline)) or work != (None, None)

    @property
    def files(self) -> list[tuple[str, str | None]]:
        """What may be files to read, each after what it is."""
        return [("the file of prices", self.price), ("the file of carbon", self.carbon)]

    def refuse_with(self, option: str) -> None:
        """Raises: InputError: costs are asked for, which do not go with the option."""
        if self.given:
            raise InputError(
                f"{option} does not go with --price, --carbon, --iterations, --tokens or "
                "--deadline: costs are those of iterations without a straggler"
            )

    def deadline_s(self) -> float | None:
        """Raises: InputError: it is no duration."""
        from envplan.costs import parse_duration

        return None if self.deadline is None else parse_duration(self.deadline, "--deadline")

    def run(self, frontier: Frontier | None) -> Run:
        """The run to be reckoned.

        Args:
            frontier: what says how many tokens an iteration has; not needed without tokens.

        Raises:
            InputError: a rate cannot be read, or the sidecar does not say how many tokens an
                iteration has.
        """
        from envplan.costs import Run

        return Run(
            iterations=self._iterations(frontier),
            price=self._rate(self.price, "price"),
            carbon=self._rate(self.carbon, "carbon"),
            currency=self.currency,
            tokens=None if self.tokens is None else math.ceil(self.tokens),
            deadline_s=self.deadline_s(),
            minimize=self.minimize,  # type: ignore[arg-type]  # checked above
        )

    def _rate(self, given: str | None, kind: Kind) -> Rate | None:
        from envplan.rates import read_rate

        if given is None:
            return None
        return read_rate(given, kind, start=self.start, repeats=self.repeat_rates)

    def _iterations(self, frontier: Frontier | None) -> int | None:
        if self.tokens is None or frontier is None:
            return self.iterations
        from envplan.costs import tokens_per_iteration

        each = self.tokens_per_iteration or tokens_per_iteration(frontier)
        return -(-math.ceil(self.tokens) // each)


def cost_rows(plan: Plan) -> list[tuple[str, int, float, float]]:
    """Name, digits, before and after of an iteration's costs."""
    if plan.costs is None:
        return []
    pair = plan.costs.iteration
    rows = []
    if pair.plan.money is not None and pair.max_frequency.money is not None:
        rows.append((_money(plan.costs), 4, pair.max_frequency.money, pair.plan.money))
    if pair.plan.carbon_g is not None and pair.max_frequency.carbon_g is not None:
        rows.append(("carbon (g CO2)", 4, pair.max_frequency.carbon_g, pair.plan.carbon_g))
    return rows


def print_costs(plan: Plan) -> None:
    """The run's table and what it was chosen for; nothing where there is no run."""
    from envplan.cli.output import print_table

    costs = plan.costs
    if costs is None or costs.run is None:
        return
    modelled = ", modelled" if plan.profile.source == "modelled" else ""
    of = f" ({costs.tokens:g} tokens)" if costs.tokens is not None else ""
    print_table(
        f"The run: {costs.iterations} iterations{of}, all GPUs{modelled}",
        ("", "max frequency", "plan", "saved", "saved (%)"),
        _run_rows(costs, costs.run),
    )


def cost_notes(plan: Plan) -> list[str]:
    """What the plan was chosen for, in a sentence."""
    from envplan.costs import duration_text

    costs = plan.costs
    if costs is not None and plan.predicted.until_straggler is not None:
        return ["costs are those of iterations that last until the straggler has finished"]
    if costs is None or costs.deadline_s is None:
        return []
    return [
        f"least {costs.minimized} of the plans whose run is over within "
        f"{duration_text(costs.deadline_s)}"
    ]


def _run_rows(costs: Costs, run: Pair) -> list[list[str]]:
    from envplan.cli.output import column

    before, after = run.max_frequency, run.plan
    rows = [
        ("time (h)", before.time_s / 3600, after.time_s / 3600),
        ("energy (kWh)", before.energy_kwh, after.energy_kwh),
    ]
    if before.money is not None and after.money is not None:
        rows.append((_money(costs), before.money, after.money))
    if before.carbon_g is not None and after.carbon_g is not None:
        rows.append(("carbon (kg CO2)", before.carbon_g / 1000, after.carbon_g / 1000))
    return [
        [
            name,
            *column([old, new, old - new], 6),
            _saved(old, new),
        ]
        for name, old, new in rows
    ]


def replay_costs(
    run: Run, timeline: Timeline, sync_time: float | None
) -> tuple[Spent, Spent | None]:
    """What an iteration costs, on average of all replays of it, and what the whole run does.

    Args:
        sync_time: s; an iteration is over only then.

    Raises:
        InputError: a rate ends before the run does.
    """
    from envplan.units import j_from_fj, ns_from_s, s_from_ns

    runs, least_ns = len(timeline.run_times_ns), ns_from_s(sync_time or 0.0)
    time_ns = sum(max(time, least_ns) for time in timeline.run_times_ns)
    predicted = timeline.plan.predicted.model_copy(
        update={
            "iteration_time_s": s_from_ns(time_ns) / runs,
            "energy_j": j_from_fj(sum(timeline.run_energies_fj)) / runs,
        }
    )
    costs = run.reckon(timeline.plan.model_copy(update={"predicted": predicted})).costs
    assert costs is not None
    return costs.iteration.plan, None if costs.run is None else costs.run.plan


def replay_cost_notes(run: Run, spent_on: tuple[Spent, Spent | None]) -> list[str]:
    """The same in sentences."""
    from envplan.cli.output import significant

    currency = run.currency or "currency units"
    notes = []
    words = ("an iteration costs", f"{run.iterations} iterations cost")
    for what, spent in zip(words, spent_on, strict=True):
        if spent is None:
            continue
        parts = [f"{significant(spent.energy_kwh, 6)} kWh"]
        if spent.money is not None:
            parts.append(f"{significant(spent.money, 6)} {currency}")
        if spent.carbon_g is not None:
            parts.append(f"{significant(spent.carbon_g / 1000, 6)} kg CO2")
        notes.append(f"{what} {', '.join(parts)} over all GPUs")
    return notes


def comparison_columns(plans: Sequence[Plan]) -> tuple[str, dict[str, list[str]]]:
    """Title and columns of what several plans of one job cost, all with costs."""
    from envplan.cli.output import column

    costs = [plan.costs for plan in plans if plan.costs is not None]
    first = costs[0]
    if first.run is None:
        title, spent = "One iteration, all GPUs", [one.iteration.plan for one in costs]
        before = first.iteration.max_frequency
    else:
        title = f"The run: {first.iterations} iterations, all GPUs"
        spent, before = (
            [one.run.plan for one in costs if one.run is not None],
            (first.run.max_frequency),
        )
    columns = {
        "time (h)": column([one.time_s / 3600 for one in spent], 6),
        "energy (kWh)": column([one.energy_kwh for one in spent], 6),
    }
    if before.money is not None:
        money = [one.money or 0.0 for one in spent]
        columns[_money(first)] = column(money, 6)
        columns["saved (%)"] = [_saved(before.money, after) for after in money]
    if before.carbon_g is not None:
        carbon = [(one.carbon_g or 0.0) / 1000 for one in spent]
        columns["carbon (kg CO2)"] = column(carbon, 6)
        columns["avoided (%)"] = [_saved(before.carbon_g / 1000, after) for after in carbon]
    return title, columns


def _saved(before: float, after: float) -> str:
    return f"{100 * (before - after) / before:.2f}" if before > 0 else "-"


def _money(costs: Costs) -> str:
    return f"cost ({costs.currency or 'currency units'})"


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
