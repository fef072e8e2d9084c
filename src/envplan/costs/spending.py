"""What a plan costs, in money and carbon, and what it saves in a month and a year.

A run draws its plan's average power all the while, so what it costs is that power times the
integral of the rate over the hours it runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple, Self

import numpy as np
from pydantic import Field

from envplan._model import check_stated
from envplan.costs.model import HOURS_PER_YEAR, Costs, Overheads, Pair, Positive, Run, Spent
from envplan.costs.rates import Rate
from envplan.errors import InputError
from envplan.units import J_PER_KWH, duration_text, j_from_fj, ns_from_s, ns_from_s_floor, s_from_ns

if TYPE_CHECKING:
    from envplan.frontier import Relaxation
    from envplan.plan import Plan
    from envplan.simulation import Timeline
    from envplan.solve import Frontier

#: How far a stated cost may lie from its recomputation.
_TOLERANCE: Final = 1e-9
#: Assumed per kWh where nobody says.
DEFAULT_PRICE: Final = 0.12
_MONTHS: Final = 12

Point = Literal["no slowdown", "best money", "T_star"]


def priced(plan: Plan, run: Run, straggler_s: float | None = None) -> Plan:
    """The plan, with what it costs; where it waits for a straggler, until that has finished.

    Args:
        straggler_s: when the straggler has finished, s; default: what the plan's target says.

    Raises:
        InputError: a rate ends before the run does.
    """
    iteration, whole = pairs(*before_and_after(plan, straggler_s), run, plan.job.all_gpus)
    asked = run.model_dump(exclude={"minimize"})
    asked["minimized"] = run.minimized if run.deadline_s is not None else None
    costs = Costs(**asked, iteration=iteration, run=whole)
    return plan.model_copy(update={"costs": costs})


def before_and_after(
    plan: Plan, straggler_s: float | None = None
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Time (s) and energy (J) of an iteration at maximum frequency and by the plan; where there is
    a straggler, both until it has finished.

    Args:
        straggler_s: as for priced.
    """
    known = plan.target.straggler_time_s if straggler_s is None else straggler_s
    before, until_s = plan.predicted.baseline, known or 0.0
    return (
        plan.until(until_s, before.iteration_time_s, before.energy_j),
        plan.until(until_s, plan.iteration_time, plan.energy),
    )


def pairs(
    before: tuple[float, float], after: tuple[float, float], run: Run, gpus: int
) -> tuple[Pair, Pair | None]:
    """What one iteration costs, and what the run does.

    Args:
        before: time (s) and energy (J) of an iteration at maximum frequency, all GPUs.
        after: the same by the plan.
        gpus: how many they are.

    Raises:
        InputError: a rate ends before the run does.
    """
    (old, old_run), (new, new_run) = (_each_and_all(*one, run, gpus) for one in (before, after))
    if old_run is None or new_run is None:
        return Pair(max_frequency=old, plan=new), None
    return Pair(max_frequency=old, plan=new), Pair(max_frequency=old_run, plan=new_run)


def spent_in_replays(
    run: Run, timeline: Timeline, sync_time: float | None = None
) -> tuple[Spent, Spent | None]:
    """What an iteration costs, on average of all replays of a timeline, and what the run does.

    Args:
        sync_time: s; an iteration is over only then.

    Raises:
        InputError: a rate ends before the run does.
    """
    runs, least_ns, plan = len(timeline.run_times_ns), ns_from_s(sync_time or 0.0), timeline.plan
    time_s = s_from_ns(sum(max(time, least_ns) for time in timeline.run_times_ns)) / runs
    energy_j = j_from_fj(sum(timeline.run_energies_fj)) / runs
    until_s = plan.target.straggler_time_s or 0.0
    return _each_and_all(*plan.until(until_s, time_s, energy_j), run, plan.job.all_gpus)


def _each_and_all(
    time_s: float, energy_j: float, run: Run, gpus: int
) -> tuple[Spent, Spent | None]:
    """What an iteration takes on average, and what the run does; None where that is one."""
    whole = spent(time_s, energy_j, run, gpus)
    if (count := run.iterations) is None:
        return whole, None
    return Spent(**{name: x / count for name, x in whole if x is not None}), whole


def spent(time_s: float, energy_j: float, run: Run, gpus: int) -> Spent:
    """What a run takes whose iterations have so many seconds and joules; without a number of them,
    what one takes.

    Args:
        gpus: of all replicas.

    Raises:
        InputError: a rate ends before the run does.
    """
    iterations, more = run.iterations or 1, run.overheads
    duration = time_s * iterations
    joules = more.joules(time_s, energy_j, gpus)

    def total(rate: Rate | None, beside: float) -> float | None:
        if rate is None:
            return None
        check_span(rate, duration)
        if rate.is_fixed:
            return rate.per_kwh[0] * (joules * iterations) / J_PER_KWH + beside
        return joules / time_s * rate.integral(duration) / J_PER_KWH + beside

    return Spent(
        time_s=duration,
        energy_kwh=joules * iterations / J_PER_KWH,
        money=total(run.price, more.hours_cost(duration, gpus)),
        carbon_g=total(run.carbon, more.made_g(duration, gpus)),
    )


def check_span(rate: Rate, duration_s: float) -> None:
    """Raises: InputError: a rate ends before a run of so many seconds does."""
    if duration_s > rate.lasts_s:
        raise InputError(
            f"lasts {duration_text(rate.lasts_s)} from the start of the run, and the run "
            f"{duration_text(duration_s)}; add the rows that are missing, or let it begin again "
            "with --repeat-rates",
            path=rate.file,
        )


def check_costs(plan: Plan) -> list[str]:
    """Prove the costs in a plan from its rates, time and energy.

    Returns:
        A sentence for what was proved; none where the plan has no costs.

    Raises:
        InputError: the first number that is not so.
    """
    costs = plan.costs
    if costs is None:
        return []
    iteration, run = pairs(*before_and_after(plan), costs.of_run(), plan.job.all_gpus)
    check_stated("costs.iteration", costs.iteration, iteration, _TOLERANCE)
    check_stated("costs.run", costs.run, run, _TOLERANCE)
    proved = ["costs follow from the plan's time and energy and the rates in the file"]
    if costs.deadline_s is not None and costs.iterations is not None:
        taken_ns = ns_from_s(before_and_after(plan)[1][0]) * costs.iterations
        taken = f"{costs.iterations} iterations take {s_from_ns(taken_ns)!r} s"
        if taken_ns > ns_from_s_floor(costs.deadline_s):
            raise InputError(f"{taken}, more than the deadline of {costs.deadline_s!r} s")
        proved.append(f"{taken} <= deadline {costs.deadline_s!r} s")
    return proved


def tokens_per_iteration(frontier: Relaxation) -> int:
    """Tokens of one iteration over all replicas, from what the profile's sidecar says.

    Microbatch size x sequence length x microbatches x replicas.

    Raises:
        InputError: the sidecar does not say microbatch_size or sequence_length.
    """
    metadata = frontier.profile.metadata
    size, length = metadata.microbatch_size, metadata.extra.get("sequence_length")
    if size is None or not isinstance(length, int) or not 0 < length < 2**31:
        raise InputError(
            f"how many tokens has an iteration? Give --tokens-per-iteration (the sidecar of "
            f"profile {frontier.profile.name} does not say "
            f"{'microbatch_size' if size is None else 'sequence_length'})"
        )
    return size * frontier.pipeline.num_microbatches * frontier.replicas * length


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
        kwh, carbon = self.joules(time_s, energy_j, gpus) / J_PER_KWH, None
        if self.carbon is not None:
            carbon = (self.carbon * kwh + self.made_g(time_s, gpus)) / 1e6
        return Amounts(kwh, self.price * kwh + self.hours_cost(time_s, gpus), carbon)


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
    costs = where.price * where.joules(times, frontier.energies, own) / J_PER_KWH
    least = np.argmin(costs + where.hours_cost(times, own))
    between = saving("best money", frontier.plan(float(times[least])))
    # Rounding may turn around what lies close together on the relaxed frontier.
    best = max((between, none, star), key=lambda row: row.year.money)
    return none, replace(best, point="best money"), star
