"""A training run whose costs are wanted, and what it was found to cost."""

from __future__ import annotations

from typing import Annotated, Final, Literal, Self

from pydantic import Field, model_validator

from envplan._model import Model
from envplan.costs.rates import Rate

MAX_ITERATIONS: Final = 10**12

Minimized = Literal["energy", "money", "carbon"]
Amount = Annotated[float, Field(ge=0)]
Iterations = Annotated[int, Field(ge=1, le=MAX_ITERATIONS)]


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

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        for kind, rate in (("price", self.price), ("carbon", self.carbon)):
            if rate is not None and not rate.is_fixed and self.iterations is None:
                raise ValueError(
                    f"a {kind} that changes with time needs to know how long the run is: give "
                    "--iterations or --tokens"
                )
        if self.minimize == "money" and self.price is None:
            raise ValueError("to minimize money, give a price per kWh (--price)")
        if self.minimize == "carbon" and self.carbon is None:
            raise ValueError("to minimize carbon, give gCO2 per kWh (--carbon)")
        if self.deadline_s is not None and self.iterations is None:
            raise ValueError("a deadline needs to know the work: give --iterations or --tokens")
        return self

    @property
    def minimized(self) -> Minimized:
        """What the cheapest plan has least of."""
        if self.minimize is not None:
            return self.minimize
        if self.price is not None:
            return "money"
        return "energy" if self.carbon is None else "carbon"

    @property
    def minimized_rate(self) -> Rate:
        """What is to be least, per kWh."""
        known = {"money": self.price, "carbon": self.carbon, "energy": Rate.fixed(1.0)}
        rate = known[self.minimized]
        assert rate is not None
        return rate


class Spent(Model):
    """What an iteration or a run takes, over all GPUs."""

    time_s: Amount
    energy_kwh: Amount
    money: float | None = Field(None, description="in currency units, where a price is known")
    carbon_g: Amount | None = Field(None, description="gCO2, where the carbon intensity is known")


class Pair(Model):
    """The same work at maximum frequency and by the plan."""

    max_frequency: Spent
    plan: Spent


class Costs(Model):
    """What a plan was found to cost, with all that is needed to find it again."""

    currency: str | None = None
    price: Rate | None = Field(None, description="currency units per kWh")
    carbon: Rate | None = Field(None, description="gCO2 per kWh")
    iterations: Iterations | None = None
    tokens: Annotated[int, Field(ge=1)] | None = None
    deadline_s: Amount | None = Field(None, description="the run is over by then")
    minimized: Minimized | None = Field(None, description="what the plan was chosen for")
    iteration: Pair
    run: Pair | None = None

    def of_run(self) -> Run:
        """The run that was priced."""
        return Run(
            iterations=self.iterations,
            price=self.price,
            carbon=self.carbon,
            currency=self.currency,
            tokens=self.tokens,
            deadline_s=self.deadline_s,
            minimize=self.minimized,
        )
