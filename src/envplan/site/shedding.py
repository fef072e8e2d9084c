"""Throughput lost over the power of a site, for three ways to shed power."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from envplan.site.curve import FloatArray
from envplan.site.jobs import SiteJob
from envplan.site.modes import JobModes
from envplan.site.plan import SiteOverheads
from envplan.site.sharing import Demand, Market

#: Budgets along the curve.
_NUM_BUDGETS = 41
#: Halvings of an interval that find the common cut of all jobs.
_HALVINGS = 60


class ShedPoint(NamedTuple):
    """The value lost at one budget, in percent of all jobs at full throughput.

    Attributes:
        power_w: the site's budget, what others draw left aside.
        shared_percent: lost where jobs share the budget by its price.
        alike_percent: lost where every job's power is cut by the same share, each by its own best
            plans.
        paused_percent: lost where jobs run at maximum frequency, as without envplan, and those of
            least value per watt are paused.
    """

    power_w: float
    shared_percent: float
    alike_percent: float
    paused_percent: float


def shed_curve(
    jobs: Sequence[SiteJob], overheads: SiteOverheads, *, alternates: bool = True
) -> list[ShedPoint]:
    """What it costs to shed power, from maximum frequency down to what jobs may not lose."""
    modes = [JobModes.of(job, alternates=alternates) for job in jobs]
    market = Market([Demand(mode.curve, mode.job.value_per_iteration) for mode in modes])
    num_gpus = sum(job.num_gpus for job in jobs)
    full_value = sum(job.value_per_iteration * job.full_throughput for job in jobs)
    unplanned_w = sum(_max_frequency_power_w(job) for job in jobs)

    def lost_percent(value: float) -> float:
        return max(0.0, 100 * (1 - value / full_value))

    return [
        ShedPoint(
            power_w=overheads.site_power_w(gpu_power_w, num_gpus),
            shared_percent=lost_percent(market.best_value(gpu_power_w)),
            alike_percent=lost_percent(_value_cut_alike(modes, gpu_power_w)),
            paused_percent=lost_percent(_value_with_pauses(jobs, gpu_power_w)),
        )
        for gpu_power_w in np.linspace(unplanned_w, market.least_power_w, _NUM_BUDGETS).tolist()
    ]


def _max_frequency_power_w(job: SiteJob) -> float:
    """The power of a job that follows no plan, W."""
    return job.frontier.baseline.average_power_w * job.scale


def _value_cut_alike(modes: Sequence[JobModes], power_w: float) -> float:
    """The value where every job's power is cut by the same share, per second."""
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if sum(map(float, _cut_powers_w(modes, middle))) <= power_w:
            low = middle
        else:
            high = middle
    throughputs = [
        float(np.interp(job_power_w, mode.curve.power_w, mode.curve.throughput))
        for mode, job_power_w in zip(modes, _cut_powers_w(modes, low), strict=True)
    ]
    return sum(
        mode.job.value_per_iteration * throughput
        for mode, throughput in zip(modes, throughputs, strict=True)
    )


def _cut_powers_w(modes: Sequence[JobModes], share: float) -> FloatArray:
    """The power of each job at a share of its full power, within what it may lose, W."""
    least = np.array([mode.curve.slowest.power_w for mode in modes])
    full = np.array([mode.curve.fastest.power_w for mode in modes])
    powers_w: FloatArray = np.maximum(least, share * full)
    return powers_w


def _value_with_pauses(jobs: Sequence[SiteJob], power_w: float) -> float:
    """The value where jobs at maximum frequency are paused, least value per watt first."""
    running = [_RunningJob.at_max_frequency(job) for job in jobs]
    value = sum(job.value for job in running)
    spent_w = sum(_max_frequency_power_w(job) for job in jobs)
    for job in sorted(running, key=lambda job: job.value / job.saved_w):
        if spent_w <= power_w:
            break
        paused_share = min(1.0, (spent_w - power_w) / job.saved_w)
        value -= paused_share * job.value
        spent_w -= paused_share * job.saved_w
    return value


class _RunningJob(NamedTuple):
    """A job that runs or pauses.

    Attributes:
        value: while it runs, per second.
        saved_w: by pausing, W.
    """

    value: float
    saved_w: float

    @classmethod
    def at_max_frequency(cls, job: SiteJob) -> _RunningJob:
        """A job that follows no plan."""
        value = job.value_per_iteration / job.frontier.baseline.iteration_time_s
        return cls(value, _max_frequency_power_w(job) - job.waiting_w)
