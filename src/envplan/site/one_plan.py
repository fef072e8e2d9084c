"""Each job follows one plan at a time: what is left of the optimum where plans do not alternate."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from envplan.site.operating_range import OperatingRange
from envplan.site.sharing import Allocation, FloatArray


def follow_one_plan_each(
    ranges: Sequence[OperatingRange], allocation: Allocation, power_w: float
) -> Allocation:
    """An allocation within a budget in which no job is between two plans.

    Jobs between two plans take the slower one. What that leaves of the budget goes to the jobs
    whose next plan fits and gains most value per watt, until none fits. This is a heuristic; how
    much it loses is in the plan's certified gap.

    Args:
        ranges: of all jobs.
        allocation: the optimum with alternating plans.
        power_w: that all jobs together may draw.
    """
    throughput = allocation.throughput.copy()
    for job, job_range in enumerate(ranges):
        if job_range.needs_two_plans(float(throughput[job])):
            throughput[job] = job_range.stop_below(float(throughput[job]))
    power = np.array(
        [_power(job_range, x) for job_range, x in zip(ranges, throughput, strict=True)]
    )
    while True:
        raised = _best_step(ranges, throughput, power_w - float(power.sum()))
        if raised is None:
            break
        throughput[raised] = _next_stop(ranges[raised], float(throughput[raised]))
        power[raised] = _power(ranges[raised], float(throughput[raised]))
    values = np.array([job_range.job.value_per_iteration for job_range in ranges])
    return Allocation(throughput, float(power.sum()), float(throughput @ values), allocation.price)


def _best_step(
    ranges: Sequence[OperatingRange], throughput: FloatArray, spare_w: float
) -> int | None:
    """The job whose next plan fits into the spare power and gains most value per watt, if any."""
    best_job, best_price = None, 0.0
    for job, job_range in enumerate(ranges):
        current = float(throughput[job])
        faster = _next_stop(job_range, current)
        more_w = job_range.curve.power_at(faster) - job_range.curve.power_at(current)
        if not 0 < more_w <= spare_w:
            continue
        price = job_range.job.value_per_iteration * (faster - current) / more_w
        if price > best_price:
            best_job, best_price = job, price
    return best_job


def _next_stop(job_range: OperatingRange, throughput: float) -> float:
    """The throughput of the next faster plan; the same where there is none."""
    corners = job_range.curve.throughput
    next_corner = int(np.searchsorted(corners, throughput, side="right"))
    return float(corners[next_corner]) if next_corner < len(corners) else throughput


def _power(job_range: OperatingRange, throughput: float) -> float:
    """The power of a job at a throughput, W."""
    return job_range.curve.power_at(float(throughput))
