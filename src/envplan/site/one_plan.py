"""Each job follows one plan at a time: what is left of the optimum where plans do not alternate."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from envplan.site.modes import JobModes
from envplan.site.sharing import FloatArray, Share


def follow_one_plan_each(modes: Sequence[JobModes], share: Share, power_w: float) -> Share:
    """A share within a budget in which no job is between two plans.

    Jobs between two plans take the slower one. What that leaves of the budget goes to the jobs
    whose next plan fits and gains most value per watt, until none fits. This is a heuristic; how
    much it loses is in the plan's certified gap.

    Args:
        modes: of all jobs.
        share: the optimum with alternating plans.
        power_w: that all jobs together may draw.
    """
    throughput = share.throughput.copy()
    for job, mode in enumerate(modes):
        if mode.needs_two_plans(float(throughput[job])):
            throughput[job] = mode.stop_below(float(throughput[job]))
    power = np.array([_power(mode, x) for mode, x in zip(modes, throughput, strict=True)])
    while True:
        raised = _best_step(modes, throughput, power_w - float(power.sum()))
        if raised is None:
            break
        throughput[raised] = _next_stop(modes[raised], float(throughput[raised]))
        power[raised] = _power(modes[raised], float(throughput[raised]))
    values = np.array([mode.job.value_per_iteration for mode in modes])
    return Share(throughput, float(power.sum()), float(throughput @ values), share.price)


def _best_step(modes: Sequence[JobModes], throughput: FloatArray, spare_w: float) -> int | None:
    """The job whose next plan fits into the spare power and gains most value per watt, if any."""
    best_job, best_price = None, 0.0
    for job, mode in enumerate(modes):
        current = float(throughput[job])
        faster = _next_stop(mode, current)
        more_w = mode.curve.power_at(faster) - mode.curve.power_at(current)
        if not 0 < more_w <= spare_w:
            continue
        price = mode.job.value_per_iteration * (faster - current) / more_w
        if price > best_price:
            best_job, best_price = job, price
    return best_job


def _next_stop(mode: JobModes, throughput: float) -> float:
    """The throughput of the next faster plan; the same where there is none."""
    corners = mode.curve.throughput
    next_corner = int(np.searchsorted(corners, throughput, side="right"))
    return float(corners[next_corner]) if next_corner < len(corners) else throughput


def _power(mode: JobModes, throughput: float) -> float:
    """The power of a job at a throughput, W."""
    return mode.curve.power_at(float(throughput))
