"""Savings of plans in a month and a year, against maximum frequency."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, Literal, NamedTuple, Self

import numpy as np
from pydantic import Field

from envplan.costs.model import HOURS_PER_YEAR, NonNegative, Overheads, Run
from envplan.errors import InputError
from envplan.plan import Plan
from envplan.plan.costs import before_and_after
from envplan.solve.frontier import Frontier
from envplan.units import J_PER_KWH

#: Assumed per kWh where nobody says.
DEFAULT_PRICE: Final = 0.12
_MONTHS: Final = 12
_MAX_GPUS: Final = 10**9

Point = Literal["no slowdown", "best money", "T_star"]


class Amounts(NamedTuple):
    """Energy, money and CO2.

    Attributes:
        kwh: energy, kWh.
        money: in units of the price.
        carbon_t: CO2, t; None where no intensity is known.
    """

    kwh: float
    money: float
    carbon_t: float | None


class YearAmounts(NamedTuple):
    """A year's amounts.

    Attributes:
        spent: at maximum frequency.
        saved: of that, by a plan; negative where the plan takes more.
    """

    spent: Amounts
    saved: Amounts


class Site(Overheads):
    """Where a job runs, and what is paid there.

    Attributes:
        price: of a kWh.
        carbon: gCO2 of a kWh; None: CO2 is not counted.
        utilization: share of the year that the GPUs train at maximum frequency.
    """

    price: NonNegative = DEFAULT_PRICE
    carbon: NonNegative | None = None
    utilization: Annotated[float, Field(gt=0, le=1)] = 1.0

    @classmethod
    def of_run(cls, run: Run, utilization: float = 1.0) -> Self:
        """The site that a run's rates, on average, and overheads describe."""
        mean_rates = {}
        for name, rate in (("price", run.price), ("carbon", run.carbon)):
            if rate is not None:
                mean_rates[name] = rate.mean
        return cls.of(**mean_rates, **run.overheads.model_dump(), utilization=utilization)

    def year(self, plan: Plan, gpus: int | None = None) -> YearAmounts:
        """A year at maximum frequency, and what a plan saves of it.

        The plan does the same work, which is what maximum frequency does in the utilized part of a
        year. Where the plan waits for a straggler, iterations last until that has finished.

        Args:
            plan: of the job.
            gpus: how many run such jobs; default: those of the plan's job.
        """
        job_gpus = plan.job.all_gpus
        usual, planned = before_and_after(plan)
        iterations_of_job = self.utilization * HOURS_PER_YEAR * 3600 / usual.time_s
        iterations = iterations_of_job * (gpus or job_gpus) / job_gpus
        saved_s = iterations * (usual.time_s - planned.time_s)
        saved_j = iterations * (usual.energy_j - planned.energy_j)
        return YearAmounts(
            spent=self.amounts(iterations * usual.time_s, iterations * usual.energy_j, job_gpus),
            saved=self.amounts(saved_s, saved_j, job_gpus),
        )

    def amounts(self, time_s: float, energy_j: float, num_gpus: int) -> Amounts:
        """Amounts for a time and an energy of GPUs, or for differences of both."""
        kwh = self.site_energy_j(time_s, energy_j, num_gpus) / J_PER_KWH
        money = self.price * kwh + self.gpu_time_cost(time_s, num_gpus)
        carbon_t = None
        if self.carbon is not None:
            carbon_g = self.carbon * kwh + self.embodied_carbon_g(time_s, num_gpus)
            carbon_t = carbon_g / 1e6
        return Amounts(kwh, money, carbon_t)


@dataclass(frozen=True)
class Saving:
    """Savings of one plan, against maximum frequency.

    Attributes:
        point: which plan it is.
        plan: the plan.
        spent: a year's amounts at maximum frequency.
        year: what the plan saves of them; negative where it takes more.
    """

    point: Point
    plan: Plan
    spent: Amounts
    year: Amounts

    @property
    def month(self) -> Amounts:
        """The plan's savings in a month, on average."""
        year = self.year
        carbon_t = None if year.carbon_t is None else year.carbon_t / _MONTHS
        return Amounts(year.kwh / _MONTHS, year.money / _MONTHS, carbon_t)


def savings(
    frontier: Frontier, *, gpus: int | None = None, **site: Any
) -> tuple[Saving, Saving, Saving]:
    """Savings at no slowdown, at the best money, and at T_star.

    The best money is looked for at all times between T_min and T_star.

    Args:
        frontier: of the job.
        gpus: how many run such jobs; default: those of the frontier's job.
        site: fields of Site, such as price=0.12, pue=1.3, carbon=380, utilization=0.8, gpu_hour=2.

    Raises:
        InputError: a number is out of range.
    """
    if gpus is not None and not 1 <= gpus <= _MAX_GPUS:
        raise InputError(f"gpus must be between 1 and {_MAX_GPUS}, not {gpus}")
    job_site = Site.of(**site)

    def saving(point: Point, plan: Plan) -> Saving:
        year = job_site.year(plan, gpus)
        return Saving(point, plan, spent=year.spent, year=year.saved)

    # As in all comparisons, clocks come at once.
    no_slowdown = saving("no slowdown", frontier.plan(switch_latency=0.0))
    t_star = saving("T_star", frontier.plan(min_energy=True, switch_latency=0.0))
    cheapest_s = _cheapest_time_s(frontier, job_site)
    cheapest = saving("best money", frontier.plan(cheapest_s, switch_latency=0.0))
    # Rounding may turn around what lies close together on the relaxed frontier.
    best = max((cheapest, no_slowdown, t_star), key=lambda candidate: candidate.year.money)
    return no_slowdown, replace(best, point="best money"), t_star


def _cheapest_time_s(frontier: Frontier, site: Site) -> float:
    """The iteration time at which the relaxed frontier costs least, s.

    Energy falls along straight lines and the cost of hours rises along one, so the least lies at a
    breakpoint.
    """
    num_gpus = frontier.num_gpus * frontier.pipeline.num_stages
    site_energies_j = site.site_energy_j(frontier.times, frontier.energies, num_gpus)
    costs = site.price * site_energies_j / J_PER_KWH
    costs = costs + site.gpu_time_cost(frontier.times, num_gpus)
    return float(frontier.times[np.argmin(costs)])
