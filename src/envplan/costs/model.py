"""A training run whose costs are wanted, and the costs of its time and energy."""

from __future__ import annotations

from typing import Annotated, Final, Literal, NamedTuple, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from envplan._io.documents import Model
from envplan.costs.rates import Rate

MAX_ITERATIONS: Final = 10**12

Minimized = Literal["energy", "money", "carbon"]
Amount = Annotated[float, Field(ge=0)]
NonNegative = Annotated[float, Field(ge=0, le=1e9)]
#: One number or many.
Numbers = TypeVar("Numbers", float, NDArray[np.float64])
Iterations = Annotated[int, Field(ge=1, le=MAX_ITERATIONS)]

HOURS_PER_YEAR: Final = 8760.0


class Overheads(Model):
    """Overheads: energy and money beside the energy of GPUs.

    Attributes:
        pue: power usage effectiveness: what the site draws for each W of its computers.
        host_power: W of the host for each of its GPUs, drawn while the job runs.
        gpu_hour: what an hour of one GPU costs besides energy. Slower plans take more of them.
        embodied: kg CO2 of making one GPU, spread evenly over its lifetime.
        lifetime: years.
    """

    pue: Annotated[float, Field(ge=1, le=100)] = 1.0
    host_power: NonNegative = 0.0
    gpu_hour: NonNegative = 0.0
    embodied: NonNegative = 0.0
    lifetime: Annotated[float, Field(gt=0, le=1000)] = 5.0

    def site_energy_j(self, time_s: Numbers, energy_j: Numbers, num_gpus: int) -> Numbers:
        """The energy that the site draws while GPUs use `energy_j` in `time_s`, J."""
        return self.pue * (energy_j + self.host_power * num_gpus * time_s)

    def gpu_time_cost(self, time_s: Numbers, num_gpus: int) -> Numbers:
        """The cost of GPUs for a time besides their energy, in currency units."""
        return self.gpu_hour * num_gpus * time_s / 3600

    def embodied_carbon_g(self, time_s: float, num_gpus: int) -> float:
        """The share of a time in the CO2 of making GPUs, g."""
        embodied_g = self.embodied * 1e3 * num_gpus
        return embodied_g * time_s / 3600 / (self.lifetime * HOURS_PER_YEAR)

    def in_words(self) -> str:
        """The overheads in a phrase; "" where there are none."""
        parts = []
        if self.pue != 1:
            parts.append(f"PUE {self.pue:g}")
        if self.host_power:
            parts.append(f"hosts of {self.host_power:g} W a GPU")
        if self.gpu_hour:
            parts.append(f"{self.gpu_hour:g} a GPU-hour")
        if self.embodied:
            parts.append(f"{self.embodied:g} kg CO2 a GPU over {self.lifetime:g} years")
        return ", ".join(parts)


class Run(Model):
    """A number of iterations of one plan, back to back, and what a kWh costs meanwhile."""

    iterations: Iterations | None = Field(None, description="absent: one iteration is priced")
    price: Rate | None = Field(None, description="currency units per kWh")
    carbon: Rate | None = Field(None, description="gCO2 per kWh")
    currency: str | None = None
    tokens: Annotated[int, Field(ge=1)] | None = Field(
        None, description="what the iterations were derived from"
    )
    deadline_s: Amount | None = Field(None, description="the run is over by then")
    minimize: Minimized | None = Field(
        None, description="what is to be least; absent: money, else carbon, else energy"
    )
    overheads: Overheads = Overheads()

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        self._check_rate("price", self.price, "money")
        self._check_rate("carbon", self.carbon, "carbon")
        if self.deadline_s is not None and self.iterations is None:
            raise ValueError("a deadline needs to know the work: give --iterations or --tokens")
        return self

    def _check_rate(self, kind: str, rate: Rate | None, amount: Minimized) -> None:
        """Refuse a rate that is absent where its amount is minimized, or changes over no time."""
        if rate is None and self.minimize == amount:
            raise ValueError(f"to minimize {amount}, give the {kind} of a kWh (--{kind})")
        if rate is not None and not rate.is_fixed and self.iterations is None:
            raise ValueError(
                f"a {kind} that changes with time needs to know how long the run is: give "
                "--iterations or --tokens"
            )

    @property
    def minimized(self) -> Minimized:
        """The amount that is least in the cheapest plan."""
        if self.minimize is not None:
            return self.minimize
        if self.price is not None:
            return "money"
        return "energy" if self.carbon is None else "carbon"

    @property
    def minimized_rate(self) -> Rate:
        """The minimized amount of a kWh."""
        rates = {"money": self.price, "carbon": self.carbon, "energy": Rate.fixed(1.0)}
        rate = rates[self.minimized]
        assert rate is not None, "the validator saw that the rate is there"
        return rate

    def minimized_overhead(self, time_s: float, num_gpus: int) -> float:
        """The part of the minimized amount that comes of time alone."""
        match self.minimized:
            case "money":
                return self.overheads.gpu_time_cost(time_s, num_gpus)
            case "carbon":
                return self.overheads.embodied_carbon_g(time_s, num_gpus)
            case "energy":
                return 0.0


class TimeAndEnergy(NamedTuple):
    """Time (s) and energy of all GPUs (J) of one iteration."""

    time_s: float
    energy_j: float


class Cost(Model):
    """Time, energy, money and carbon of an iteration or a run, over all GPUs, with overheads."""

    time_s: Amount
    energy_kwh: Amount
    money: float | None = Field(None, description="in currency units, where a price is known")
    carbon_g: Amount | None = Field(None, description="gCO2, where the carbon intensity is known")

    def amount(self, minimized: Minimized) -> float:
        """One of the amounts, which must be known."""
        amounts = {"energy": self.energy_kwh, "money": self.money, "carbon": self.carbon_g}
        amount = amounts[minimized]
        assert amount is not None, f"no rate says the {minimized}"
        return amount

    def divided_by(self, count: int) -> Cost:
        """The average cost of one of so many equal parts."""
        return Cost(
            time_s=self.time_s / count,
            energy_kwh=self.energy_kwh / count,
            money=None if self.money is None else self.money / count,
            carbon_g=None if self.carbon_g is None else self.carbon_g / count,
        )


class RunCosts(NamedTuple):
    """Costs of an iteration, and of the run; None where nobody says how many iterations it has."""

    iteration: Cost
    run: Cost | None


class CostComparison(Model):
    """The costs of the same work at maximum frequency and by the plan."""

    max_frequency: Cost
    plan: Cost


class RunComparison(NamedTuple):
    """Comparisons of an iteration, and of the run; None where its length is not known."""

    iteration: CostComparison
    run: CostComparison | None


class Costs(Run):
    """The costs of a plan, with all that is needed to find them again."""

    minimize: Minimized | None = Field(
        None, alias="minimized", description="what the plan was chosen for"
    )
    iteration: CostComparison
    run: CostComparison | None = None

    def of_run(self) -> Run:
        """The run that was priced."""
        return Run(**{name: getattr(self, name) for name in Run.model_fields})
