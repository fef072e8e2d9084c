"""A training run whose costs are wanted, and what it was found to cost."""

from __future__ import annotations

from typing import Annotated, Final, Literal, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from envplan._io.documents import Model
from envplan.costs.rates import Rate

MAX_ITERATIONS: Final = 10**12

Minimized = Literal["energy", "money", "carbon"]
Amount = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(ge=0, le=1e9)]
#: One number or many.
Numbers = TypeVar("Numbers", float, NDArray[np.float64])
Iterations = Annotated[int, Field(ge=1, le=MAX_ITERATIONS)]


HOURS_PER_YEAR: Final = 8760.0


class Overheads(Model):
    """What is used and paid beside the energy of GPUs.

    Attributes:
        pue: power usage effectiveness: what the site draws for each W of its computers.
        host_power: W of the host for each of its GPUs, drawn while the job runs.
        gpu_hour: what an hour of one GPU costs besides energy. Slower plans take more of them.
        embodied: kg CO2 of making one GPU, spread evenly over its lifetime.
        lifetime: years.
    """

    pue: Annotated[float, Field(ge=1, le=100)] = 1.0
    host_power: Positive = 0.0
    gpu_hour: Positive = 0.0
    embodied: Positive = 0.0
    lifetime: Annotated[float, Field(gt=0, le=1000)] = 5.0

    def joules(self, time_s: Numbers, energy_j: Numbers, gpus: int) -> Numbers:
        """What the site draws while GPUs use so much, J."""
        return self.pue * (energy_j + self.host_power * gpus * time_s)

    def hours_cost(self, time_s: Numbers, gpus: int) -> Numbers:
        """What so long on GPUs costs besides energy, in currency units."""
        return self.gpu_hour * gpus * time_s / 3600

    def made_g(self, time_s: float, gpus: int) -> float:
        """The part of the CO2 of making GPUs that falls on so long, g."""
        return self.embodied * 1e3 * gpus * time_s / 3600 / (self.lifetime * HOURS_PER_YEAR)

    def in_words(self) -> str:
        """What is counted beside the energy of GPUs; "" where nothing is."""
        parts = [f"PUE {self.pue:g}"] if self.pue != 1 else []
        parts += [f"hosts of {self.host_power:g} W a GPU"] if self.host_power else []
        parts += [f"{self.gpu_hour:g} a GPU-hour"] if self.gpu_hour else []
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
        for kind, rate, what in (("price", self.price, "money"), ("carbon", self.carbon, "carbon")):
            if rate is None and self.minimize == what:
                raise ValueError(f"to minimize {what}, give the {kind} of a kWh (--{kind})")
            if rate is not None and not rate.is_fixed and self.iterations is None:
                raise ValueError(
                    f"a {kind} that changes with time needs to know how long the run is: give "
                    "--iterations or --tokens"
                )
        if self.deadline_s is not None and self.iterations is None:
            raise ValueError("a deadline needs to know the work: give --iterations or --tokens")
        return self

    @property
    def minimized(self) -> Minimized:
        """What the cheapest plan has least of."""
        usual: Minimized = "energy" if self.carbon is None else "carbon"
        return self.minimize or (usual if self.price is None else "money")

    @property
    def minimized_rate(self) -> Rate:
        """What is to be least, per kWh."""
        rate = {"money": self.price, "carbon": self.carbon}.get(self.minimized, Rate.fixed(1.0))
        assert rate is not None
        return rate

    def minimized_beside(self, time_s: float, gpus: int) -> float:
        """What is to be least, as far as it comes of time alone."""
        return {
            "money": self.overheads.hours_cost(time_s, gpus),
            "carbon": self.overheads.made_g(time_s, gpus),
            "energy": 0.0,
        }[self.minimized]


class Spent(Model):
    """What an iteration or a run takes, over all GPUs, overheads included."""

    time_s: Amount
    energy_kwh: Amount
    money: float | None = Field(None, description="in currency units, where a price is known")
    carbon_g: Amount | None = Field(None, description="gCO2, where the carbon intensity is known")

    def amount(self, what: Minimized) -> float:
        """The amount of that."""
        known = {"energy": self.energy_kwh, "money": self.money, "carbon": self.carbon_g}[what]
        assert known is not None
        return known


class Pair(Model):
    """The same work at maximum frequency and by the plan."""

    max_frequency: Spent
    plan: Spent


class Costs(Run):
    """What a plan was found to cost, with all that is needed to find it again."""

    minimize: Minimized | None = Field(
        None, alias="minimized", description="what the plan was chosen for"
    )
    iteration: Pair
    run: Pair | None = None

    def of_run(self) -> Run:
        """The run that was priced."""
        return Run(**{name: getattr(self, name) for name in Run.model_fields})
