"""`envplan savings`: what plans save in a month and a year."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

from envplan.cli.command import JOB, MONEY, option, typed
from envplan.cli.options import JobOptions, OutputOptions, RateOptions
from envplan.quantities import COUNT, NUMBER, PERCENT, POWER

if TYPE_CHECKING:
    from envplan.costs.savings import Amounts, Saving
    from envplan.solve import Frontier

SCHEMA: Final = "envplan/savings/v1"
_CURRENCY: Final = "USD"


def _share(text: str, name: str) -> float:
    """A share such as 0.8 or 80%."""
    return PERCENT.parse(text, name) / (100 if "%" in text else 1)


@dataclass(frozen=True, kw_only=True)
class SiteOptions(RateOptions):
    """Where a job runs, how much, and what is paid there."""

    gpus: Annotated[
        int | None,
        option("--gpus N", JOB, "How many GPUs run such jobs; default: those of the job.", COUNT),
    ] = None
    utilization: Annotated[
        float,
        option("--utilization SHARE", JOB, "Share of the year they train: 0.8 or 80%.", _share),
    ] = 1.0
    pue: Annotated[
        float,
        option("--pue X", MONEY, "Power usage effectiveness of the site, from 1 up.", NUMBER),
    ] = 1.0
    gpu_hour: Annotated[
        float,
        option(
            "--gpu-hour P",
            MONEY,
            "What an hour of a GPU costs besides energy: slower plans take more of them.",
            NUMBER,
        ),
    ] = 0.0
    host_power: Annotated[
        float,
        option("--host-power W", MONEY, "What the host draws for each of its GPUs.", POWER),
    ] = 0.0
    embodied: Annotated[
        float,
        option("--embodied KG", MONEY, "CO2 of making one GPU, kg; goes with --carbon.", NUMBER),
    ] = 0.0
    lifetime: Annotated[
        float,
        option("--lifetime YEARS", MONEY, "Years that --embodied is spread over.", NUMBER),
    ] = 5.0

    def numbers(self) -> dict[str, Any]:
        """As envplan.savings takes them."""
        from envplan.costs import read_rate
        from envplan.errors import InputError

        if self.embodied and self.carbon is None:
            raise InputError("--embodied goes with --carbon")
        names = ("gpus", "utilization", "pue", "gpu_hour", "host_power", "embodied", "lifetime")
        given: dict[str, Any] = {name: getattr(self, name) for name in names}
        if self.price is not None:
            given["price"] = read_rate(self.price, "price").mean
        if self.carbon is not None:
            given["carbon"] = read_rate(self.carbon, "carbon").mean
        return given


def savings(job: JobOptions, site: SiteOptions, show: OutputOptions) -> None:
    """Say what plans save: energy, money and CO2 a year.

    In a month and a year, for the same work, against maximum frequency: at no slowdown, at the best
    money between T_min and T_star, and at T_star.

    \b
    Example:
      envplan savings a40-gpt3-1.3b-4stage --microbatches 32
      envplan savings --gpus 64 --price 0.12 --pue 1.3 --carbon 380 --utilization 0.8
      envplan savings --gpus 1024 --price 0.25 --currency EUR --gpu-hour 1.90 --host-power 150
    """
    import envplan

    numbers = site.numbers()
    frontier = job.trace(quiet=show.quiet)
    rows = envplan.savings(frontier, **numbers)
    if show.json:
        _print_json(frontier, rows, job, site, numbers)
    elif not show.quiet:
        _print(frontier, rows, job, site, numbers)


def _print(
    frontier: Frontier,
    rows: Sequence[Saving],
    job: JobOptions,
    site: SiteOptions,
    numbers: dict[str, Any],
) -> None:
    from envplan.cli.output import describe_job, print_columns, say, signed_percent
    from envplan.costs.savings import DEFAULT_PRICE

    currency = site.currency or _CURRENCY
    gpus = site.gpus or frontier.num_gpus * frontier.pipeline.num_stages
    price = numbers.get("price", DEFAULT_PRICE)
    assumed = " (assumed; --price says yours)" if site.price is None else ""
    say(describe_job(frontier))
    say(f"one year at {price:g} {currency} a kWh{assumed}, PUE {site.pue:g}, {_paid(site)}:")
    spent = ", ".join(f"{text} {unit}" for unit, text in _amounts(rows[0].spent, currency).items())
    used = "" if site.utilization == 1 else f" {100 * site.utilization:g}% of the time"
    say(f"{gpus:,} GPUs at maximum frequency{used} take {spent}")
    columns: dict[str, list[str]] = {
        "": [row.point for row in rows],
        "slower (%)": [signed_percent(row.plan.predicted.slowdown_percent) for row in rows],
        "energy saved (%)": [f"{row.plan.savings.percent:.2f}" for row in rows],
    }
    for period in ("month", "year"):
        cells = [_amounts(getattr(row, period), currency) for row in rows]
        columns |= {f"{unit} a {period}": [cell[unit] for cell in cells] for unit in cells[0]}
    energies = frontier.profile.metadata.energies_are
    title = f"Saved for the same work, {gpus:,} GPUs"
    print_columns(title + (f", energies {energies}" if energies else ""), columns)
    if not site.gpu_hour:
        say("time lost by slower plans is not paid for; --gpu-hour P says what it costs")
    if site.carbon is None:
        say("--carbon G (gCO2 of a kWh) adds CO2")
    say(f"next: {_next(rows, job, site)}")


def _paid(site: SiteOptions) -> str:
    """What is counted beside GPUs, in words."""
    parts = [f"hosts of {site.host_power:g} W a GPU"] if site.host_power else ["GPUs alone"]
    if site.gpu_hour:
        parts.append(f"{site.gpu_hour:g} {site.currency or _CURRENCY} a GPU-hour")
    if site.embodied:
        parts.append(f"{site.embodied:g} kg CO2 a GPU over {site.lifetime:g} years")
    return ", ".join(parts)


def _amounts(amounts: Amounts, currency: str) -> dict[str, str]:
    """Numbers by their units."""
    from envplan.cli.output import grouped

    texts = {"kWh": grouped(amounts.kwh), currency: grouped(amounts.money)}
    return texts if amounts.carbon_t is None else texts | {"t CO2": grouped(amounts.carbon_t)}


def _next(rows: Sequence[Saving], job: JobOptions, site: SiteOptions) -> str:
    """The command that makes the plan: of the best money where time is paid for, else at T_min."""
    from envplan.cli.output import exact_seconds

    none, best, star = rows
    target: list[str] = []
    if site.gpu_hour and best.plan.iteration_time > none.plan.iteration_time:
        target = ["--min-energy"]
        if best.plan.iteration_time < star.plan.iteration_time:
            target = ["--target-time", exact_seconds(best.plan.target.deadline_s)]
    return shlex.join(["envplan", "solve", *typed(job), *target])


def _print_json(
    frontier: Frontier,
    rows: Sequence[Saving],
    job: JobOptions,
    site: SiteOptions,
    numbers: dict[str, Any],
) -> None:
    from envplan.cli.output import print_json
    from envplan.costs.savings import Site

    plan, gpus = rows[0].plan, numbers.pop("gpus")
    print_json(
        {
            "schema": SCHEMA,
            "profile": plan.profile.model_dump(exclude_none=True),
            "energies_are": frontier.profile.metadata.energies_are,
            "gpus": gpus or frontier.num_gpus * frontier.pipeline.num_stages,
            "currency": site.currency or _CURRENCY,
            "price_is_assumed": site.price is None,
            "site": Site.of(**numbers).model_dump(),
            "max_frequency_year": asdict(rows[0].spent),
            "savings": [
                {
                    "point": row.point,
                    "iteration_time_s": row.plan.iteration_time,
                    "slowdown_percent": row.plan.predicted.slowdown_percent,
                    "energy_j": row.plan.energy,
                    "savings_percent": row.plan.savings.percent,
                    "month": asdict(row.month),
                    "year": asdict(row.year),
                }
                for row in rows
            ],
            "next": _next(rows, job, site),
        }
    )
