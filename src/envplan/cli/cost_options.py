"""The options that say what energy costs, and what a run costs.

Each group is a frozen dataclass whose fields are options, as in `job_options`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

import typer

import envplan
from envplan.cli.given import options_given, refuse_both, require_with
from envplan.cli.shared import MONEY, HostPowerOption, PueOption
from envplan.cli.types import InputFile, quantity
from envplan.errors import InputError
from envplan.quantities import COUNT, NUMBER

if TYPE_CHECKING:
    from envplan.costs import Overheads, Run
    from envplan.costs.model import Minimized
    from envplan.costs.rates import Rate

_MANY: Final = COUNT.within(1, 10**18)


class Rates(NamedTuple):
    """Price and carbon of a kWh; None where it is not given."""

    price: Rate | None
    carbon: Rate | None


@dataclass(frozen=True, kw_only=True)
class RateOptions:
    """Rates of a kWh, and overheads beside the energy of GPUs."""

    price: Annotated[
        str | None,
        typer.Option(
            metavar="P|FILE",
            help=(
                "Price of a kWh, or a CSV with hour,price or time,price if it changes with time."
            ),
            rich_help_panel=MONEY,
        ),
        InputFile(),
    ] = None
    carbon: Annotated[
        str | None,
        typer.Option(
            metavar="G|FILE",
            help="gCO2 of a kWh, or a CSV with hour,carbon or time,carbon.",
            rich_help_panel=MONEY,
        ),
        InputFile(),
    ] = None
    currency: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="What to call the units of --price; default: USD.",
            rich_help_panel=MONEY,
        ),
    ] = None
    pue: PueOption = 1.0
    host_power: HostPowerOption = 0.0
    gpu_hour: Annotated[
        float,
        typer.Option(
            metavar="P",
            parser=quantity(NUMBER),
            help=(
                "What an hour of a GPU costs besides energy: slower plans take more of "
                "them. Default: 0."
            ),
            show_default=False,
            rich_help_panel=MONEY,
        ),
    ] = 0.0
    embodied: Annotated[
        float,
        typer.Option(
            metavar="KG",
            parser=quantity(NUMBER),
            help="CO2 of making one GPU, kg; goes with --carbon. Default: 0.",
            show_default=False,
            rich_help_panel=MONEY,
        ),
    ] = 0.0
    lifetime: Annotated[
        float,
        typer.Option(
            metavar="YEARS",
            parser=quantity(NUMBER),
            help="Years that --embodied is spread over; default: 5.",
            show_default=False,
            rich_help_panel=MONEY,
        ),
    ] = 5.0

    def __post_init__(self) -> None:
        """Raises: InputError: options contradict each other or lack one another."""
        require_with(self, "embodied", "carbon")

    def overheads(self) -> Overheads:
        """The overheads that are counted beside the energy of GPUs."""
        from envplan.costs import Overheads

        return Overheads.of(
            pue=self.pue,
            host_power=self.host_power,
            gpu_hour=self.gpu_hour,
            embodied=self.embodied,
            lifetime=self.lifetime,
        )

    def rates(self, *, start: str | None = None, repeats: bool = False) -> Rates:
        """Price and carbon of a kWh.

        Args:
            start: when the run starts, ISO 8601, for files with times.
            repeats: whether files begin again after their end.

        Raises:
            InputError: one is neither a number nor a file of rates.
        """
        from envplan.costs.rate_file import read_rate

        price, carbon = None, None
        if self.price:
            price = read_rate(self.price, "price", start=start, repeats=repeats)
        if self.carbon:
            carbon = read_rate(self.carbon, "carbon", start=start, repeats=repeats)
        return Rates(price, carbon)


@dataclass(frozen=True, kw_only=True)
class CostOptions(RateOptions):
    """Costs of a run: rates, and how much work it is."""

    iterations: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            parser=quantity(_MANY),
            help="Iterations of the training run, as in 100k.",
            rich_help_panel=MONEY,
        ),
    ] = None
    tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            parser=quantity(_MANY),
            help="Instead of --iterations: tokens of the run, as in 300e9 or 15T.",
            rich_help_panel=MONEY,
        ),
    ] = None
    tokens_per_iteration: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            parser=quantity(_MANY),
            help="Tokens of an iteration over all replicas; default: from the profile's sidecar.",
            rich_help_panel=MONEY,
        ),
    ] = None
    start: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help=(
                "When the run starts, as in 2026-12-01T00:00, for files with times; "
                "default: when they do."
            ),
            rich_help_panel=MONEY,
        ),
    ] = None
    repeat_rates: Annotated[
        bool,
        typer.Option(
            "--repeat-rates",
            help="Let the files begin again where the run outlasts them.",
            rich_help_panel=MONEY,
        ),
    ] = False

    def __post_init__(self) -> None:
        """Raises: InputError: options contradict each other or lack one another."""
        super().__post_init__()
        rates = ("price", "carbon")
        work = ("iterations", "tokens")
        require_with(self, "currency", "price")
        require_with(self, "gpu_hour", "price")
        require_with(self, "pue", *rates, *work)
        require_with(self, "host_power", *rates, *work)
        require_with(self, "tokens_per_iteration", "tokens")
        require_with(self, "start", *rates)
        require_with(self, "repeat_rates", *rates)
        refuse_both(options_given(self, *work))

    def run(
        self,
        frontier: envplan.Frontier | None = None,
        *,
        deadline_s: float | None = None,
        minimize: Minimized | None = None,
    ) -> Run | None:
        """The run whose costs are wanted; None where no costs are.

        Args:
            frontier: what says how many tokens an iteration has; None: an option must.
            deadline_s: by when the run is to be over.
            minimize: what is to be least then; None: what is known.

        Raises:
            InputError: a rate cannot be read, or nothing says how many tokens an iteration has.
        """
        from envplan.costs import Run

        if not options_given(self, "price", "carbon", "iterations", "tokens"):
            return None
        rates = self.rates(start=self.start, repeats=self.repeat_rates)
        return Run.of(
            price=rates.price,
            carbon=rates.carbon,
            iterations=self._num_iterations(frontier),
            currency=self.currency,
            tokens=self.tokens,
            overheads=self.overheads(),
            deadline_s=deadline_s,
            minimize=minimize,
        )

    def _num_iterations(self, frontier: envplan.Frontier | None) -> int | None:
        """Iterations as given, or as many as the tokens need."""
        from envplan.plan.costs import tokens_per_iteration

        if self.tokens is None:
            return self.iterations
        tokens = self.tokens_per_iteration
        if tokens is None and frontier is not None:
            tokens = tokens_per_iteration(frontier)
        if tokens is None:
            raise InputError("--tokens needs --tokens-per-iteration here")
        return -(-self.tokens // tokens)  # rounded up
