"""What time and energy cost, in money and carbon, at given rates.

A run draws its average power all the while, so what it costs is that power times the integral of
the rate over the hours it runs.
"""

from __future__ import annotations

from envplan.costs.model import Pair, Run, Spent
from envplan.costs.rates import Rate
from envplan.errors import InputError
from envplan.units import J_PER_KWH, duration_text


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
    (old, old_run), (new, new_run) = (iteration_and_run(*one, run, gpus) for one in (before, after))
    if old_run is None or new_run is None:
        return Pair(max_frequency=old, plan=new), None
    return Pair(max_frequency=old, plan=new), Pair(max_frequency=old_run, plan=new_run)


def iteration_and_run(
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
