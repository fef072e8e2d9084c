"""The price of time and energy, in money and carbon, at given rates.

A run draws its average power all the while, so its price is that power times the integral of the
rate over the hours it runs.
"""

from __future__ import annotations

from envplan.costs.model import Cost, CostComparison, Run, RunComparison, RunCosts, TimeAndEnergy
from envplan.costs.rates import Rate
from envplan.errors import InputError
from envplan.units import J_PER_KWH, duration_text


def compare_costs(
    at_max_frequency: TimeAndEnergy, by_plan: TimeAndEnergy, run: Run, num_gpus: int
) -> RunComparison:
    """Costs at maximum frequency beside those of a plan, of one iteration and of the run.

    Args:
        at_max_frequency: time and energy of an iteration at maximum frequency, all GPUs.
        by_plan: the same by the plan.
        run: how many iterations there are, and the rates.
        num_gpus: GPUs of all replicas.

    Raises:
        InputError: a rate ends before the run does.
    """
    baseline = price_iteration_and_run(at_max_frequency, run, num_gpus)
    planned = price_iteration_and_run(by_plan, run, num_gpus)
    of_iteration = CostComparison(max_frequency=baseline.iteration, plan=planned.iteration)
    of_run: CostComparison | None = None
    if baseline.run is not None and planned.run is not None:
        of_run = CostComparison(max_frequency=baseline.run, plan=planned.run)
    return RunComparison(of_iteration, of_run)


def price_iteration_and_run(iteration: TimeAndEnergy, run: Run, num_gpus: int) -> RunCosts:
    """The cost of an iteration, on average, and of the run of such iterations.

    Args:
        iteration: time and energy of one, all GPUs.
        run: how many iterations there are, and the rates.
        num_gpus: GPUs of all replicas.

    Raises:
        InputError: a rate ends before the run does.
    """
    total = price_run(iteration, run, num_gpus)
    if run.iterations is None:
        return RunCosts(total, None)
    return RunCosts(total.divided_by(run.iterations), total)


def price_run(iteration: TimeAndEnergy, run: Run, num_gpus: int) -> Cost:
    """The cost of a run of equal iterations; of one iteration where the run has no number of them.

    Args:
        iteration: time and energy of one, all GPUs.
        run: how many iterations there are, and the rates.
        num_gpus: GPUs of all replicas.

    Raises:
        InputError: a rate ends before the run does.
    """
    time_s, energy_j = iteration
    iterations = run.iterations or 1
    overheads = run.overheads
    duration_s = time_s * iterations
    joules = overheads.site_energy_j(time_s, energy_j, num_gpus)

    def total(rate: Rate | None, overhead: float) -> float | None:
        """The price of the site's energy at a rate, and what time costs beside it."""
        if rate is None:
            return None
        check_span(rate, duration_s)
        if rate.is_fixed:
            return rate.per_kwh[0] * (joules * iterations) / J_PER_KWH + overhead
        mean_power_w = joules / time_s
        return mean_power_w * rate.integral(duration_s) / J_PER_KWH + overhead

    return Cost(
        time_s=duration_s,
        energy_kwh=joules * iterations / J_PER_KWH,
        money=total(run.price, overheads.gpu_time_cost(duration_s, num_gpus)),
        carbon_g=total(run.carbon, overheads.embodied_carbon_g(duration_s, num_gpus)),
    )


def check_span(rate: Rate, duration_s: float) -> None:
    """Refuse a run that outlasts a rate.

    Raises:
        InputError: the rate ends before a run of so many seconds does.
    """
    if duration_s > rate.lasts_s:
        raise InputError(
            f"lasts {duration_text(rate.lasts_s)} from the start of the run, and the run "
            f"{duration_text(duration_s)}; add the rows that are missing, or let it begin again "
            "with --repeat-rates",
            path=rate.file,
        )
