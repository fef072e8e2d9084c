"""What plans save in a month and a year, against maximum frequency."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, Literal, NamedTuple, Self

import numpy as np
from pydantic import Field

from envplan.costs.model import HOURS_PER_YEAR, Overheads, Positive, Run
from envplan.errors import InputError
from envplan.plan import Plan
from envplan.plan.costs import before_and_after
from envplan.solve.frontier import Frontier
from envplan.units import J_PER_KWH

#: Assumed per kWh where nobody says.
DEFAULT_PRICE: Final = 0.12
_MONTHS: Final = 12

Point = Literal["no slowdown", "best money", "T_star"]


class Amounts(NamedTuple):
    """Energy, kWh; money, in units of the price; CO2, t, None where no intensity is known."""

    kwh: float
    money: float
    carbon_t: float | None


class Site(Overheads):
    """Where a job runs, and what is paid there.

    Attributes:
        price: of a kWh.
        carbon: gCO2 of a kWh; None: CO2 is not counted.
        utilization: share of the year that the GPUs train at maximum frequency.
    """

    price: Positive = DEFAULT_PRICE
    carbon: Positive | None = None
    utilization: Annotated[float, Field(gt=0, le=1)] = 1.0

    @classmethod
    def of_run(cls, run: Run, utilization: float = 1.0) -> Self:
        """The site that a run's rates, on average, and overheads describe."""
        rates = {"price": run.price, "carbon": run.carbon}
        known = {name: rate.mean for name, rate in rates.items() if rate is not None}
        return cls.of(**known, **run.overheads.model_dump(), utilization=utilization)

    def year(self, plan: Plan, gpus: int | None = None) -> tuple[Amounts, Amounts]:
        """What a year takes at maximum frequency, and what a plan saves of it.

        The plan does the same work, which is what maximum frequency does in the utilized part of a
        year. Where the plan waits for a straggler, iterations last until that has finished.

        Args:
            gpus: how many run such jobs; default: those of the plan's job.
        """
        job_gpus = plan.job.all_gpus
        (usual_s, usual_j), (after_s, after_j) = before_and_after(plan)
        times = self.utilization * HOURS_PER_YEAR * 3600 / usual_s * (gpus or job_gpus) / job_gpus
        saved_s, saved_j = times * (usual_s - after_s), times * (usual_j - after_j)
        usual = self.spent(times * usual_s, times * usual_j, job_gpus)
        return usual, self.spent(saved_s, saved_j, job_gpus)

    def spent(self, time_s: float, energy_j: float, gpus: int) -> Amounts:
        """What so much time and energy of GPUs takes; what is saved, where both are differences."""
        kwh, carbon = self.site_energy_j(time_s, energy_j, gpus) / J_PER_KWH, None
        if self.carbon is not None:
            carbon = (self.carbon * kwh + self.embodied_carbon_g(time_s, gpus)) / 1e6
        return Amounts(kwh, self.price * kwh + self.gpu_time_cost(time_s, gpus), carbon)


@dataclass(frozen=True)
class Saving:
    """What one plan saves, against maximum frequency.

    Attributes:
        point: which plan it is.
        plan: the plan.
        spent: what a year takes at maximum frequency.
        year: what the plan saves of it; negative where it takes more.
    """

    point: Point
    plan: Plan
    spent: Amounts
    year: Amounts

    @property
    def month(self) -> Amounts:
        """What the plan saves in a month, on average."""
        return Amounts._make(amount and amount / _MONTHS for amount in self.year)


def savings(
    frontier: Frontier, *, gpus: int | None = None, **site: Any
) -> tuple[Saving, Saving, Saving]:
    """What is saved at no slowdown, at the best money, and at T_star.

    The best money is looked for at all times between T_min and T_star.

    Args:
        gpus: how many run such jobs; default: those of the frontier's job.
        site: fields of Site, such as price=0.12, pue=1.3, carbon=380, utilization=0.8, gpu_hour=2.

    Raises:
        InputError: a number is out of range.
    """
    if gpus is not None and not 1 <= gpus <= 10**9:
        raise InputError(f"gpus must be between 1 and 1000000000, not {gpus}")
    where = Site.of(**site)

    def saving(point: Point, plan: Plan) -> Saving:
        return Saving(point, plan, *where.year(plan, gpus))

    none = saving("no slowdown", frontier.plan())
    star = saving("T_star", frontier.plan(min_energy=True))
    # Energy falls along straight lines and hours rise along one: least is one of the breakpoints.
    times, own = frontier.times, frontier.num_gpus * frontier.pipeline.num_stages
    costs = where.price * where.site_energy_j(times, frontier.energies, own) / J_PER_KWH
    least = np.argmin(costs + where.gpu_time_cost(times, own))
    between = saving("best money", frontier.plan(float(times[least])))
    # Rounding may turn around what lies close together on the relaxed frontier.
    best = max((between, none, star), key=lambda row: row.year.money)
    return none, replace(best, point="best money"), star
