"""Throughput lost over the power of a site, for four ways to shed power."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np

from envplan.errors import InputError
from envplan.plan import as_referenced, check_reference, find_profile
from envplan.site.curve import FloatArray, OperatingPoint
from envplan.site.jobs import SiteJob
from envplan.site.operating_range import OperatingRange
from envplan.site.plan import SiteOverheads
from envplan.site.sharing import Demand, Market
from envplan.solve.uniform_clocks import UniformClocks
from envplan.units import j_from_10fj, s_from_ns

#: Budgets along the curve.
_NUM_BUDGETS = 41
#: Powers this close, as a fraction, are the same.
_SAME_POWER = 1e-9
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
            least value per watt are paused; None where those that may pause save too little.
        capped_percent: lost where all clocks are capped at the same share of their highest, as
            without envplan; None where no clock is low enough.
    """

    power_w: float
    shared_percent: float
    alike_percent: float
    paused_percent: float | None
    capped_percent: float | None


def shed_curve(
    jobs: Sequence[SiteJob], overheads: SiteOverheads, *, alternates: bool = True
) -> list[ShedPoint]:
    """The cost of shedding power, from maximum frequency down to what jobs may not lose.

    Caps on clocks need the profiles of all frontiers; where one is not found or has changed, what
    they cost is not known.
    """
    caps = _clock_caps_or_none(jobs)
    ranges = [OperatingRange.of(job, alternates=alternates) for job in jobs]
    market = Market(
        [Demand(job_range.curve, job_range.job.value_per_iteration) for job_range in ranges]
    )
    num_gpus = sum(job.num_gpus for job in jobs)
    full_value = sum(job.value_per_iteration * job.full_throughput for job in jobs)
    unplanned_w = sum(_max_frequency_power_w(job) for job in jobs)
    budgets_w = np.linspace(unplanned_w, market.least_power_w, _NUM_BUDGETS)
    points = []
    for budget_w in budgets_w.tolist():
        capped_value = None if caps is None else caps.value_within(budget_w)
        paused_value = _value_with_pauses(jobs, budget_w)
        point = ShedPoint(
            power_w=overheads.site_power_w(budget_w, num_gpus),
            shared_percent=_lost_percent(market.best_value(budget_w), full_value),
            alike_percent=_lost_percent(_value_cut_alike(ranges, budget_w), full_value),
            paused_percent=_lost_percent_or_none(paused_value, full_value),
            capped_percent=_lost_percent_or_none(capped_value, full_value),
        )
        points.append(point)
    return points


def _lost_percent(value: float, full_value: float) -> float:
    """Percent of the full value that is lost where a value is left."""
    return max(0.0, 100 * (1 - value / full_value))


def _lost_percent_or_none(value: float | None, full_value: float) -> float | None:
    return None if value is None else _lost_percent(value, full_value)


def _max_frequency_power_w(job: SiteJob) -> float:
    """The power of a job that follows no plan, W."""
    return job.frontier.baseline.average_power_w * job.scale


class ClockCaps(NamedTuple):
    """Power and value of all jobs together under each cap on their clocks.

    Attributes:
        power_w: over all jobs at each cap, W, (n).
        value: of all jobs at each cap, per second, (n).
    """

    power_w: FloatArray
    value: FloatArray

    @classmethod
    def of(cls, jobs: Sequence[SiteJob]) -> Self:
        """Replay every job at each of its clocks, and put those of the same cap together."""
        points_of_frontier = {job.sha256: _points_by_clock(job) for job in jobs}
        caps = sorted(set().union(*points_of_frontier.values()))
        power_w, value = np.zeros(len(caps)), np.zeros(len(caps))
        for job in jobs:
            points = points_of_frontier[job.sha256]
            for index, cap in enumerate(caps):
                point = points[_highest_clock_within(cap, list(points))]
                power_w[index] += point.power_w * job.scale
                value[index] += point.throughput * job.value_per_iteration
        return cls(power_w, value)

    def value_within(self, power_w: float) -> float | None:
        """The value of the best cap within a budget, per second; None where no cap is."""
        within = self.power_w <= power_w * (1 + _SAME_POWER)
        return float(self.value[within].max()) if within.any() else None


def _highest_clock_within(cap: float, clocks: Sequence[float]) -> float:
    """The highest clock that a cap allows; the lowest of all where it allows none."""
    allowed = [clock for clock in clocks if clock <= cap]
    return max(allowed, default=min(clocks))


def _clock_caps_or_none(jobs: Sequence[SiteJob]) -> ClockCaps | None:
    """The caps on clocks; None where a profile is not found or has changed."""
    try:
        return ClockCaps.of(jobs)
    except InputError:
        return None


def _points_by_clock(job: SiteJob) -> dict[float, OperatingPoint]:
    """Throughput and power with all operations at one clock, by its share of the highest clock.

    They are those of the replicas that the frontier was traced for.
    """
    file = job.frontier
    profile = find_profile(file.profile, job.source)
    check_reference(file.profile, profile, force=False)
    problem = file.job.problem(as_referenced(file.profile, profile))
    clocks = UniformClocks(problem)
    points = {}
    for mhz, choice in zip(clocks.clocks_mhz, clocks.one_for_all(), strict=True):
        replay = problem.replay(choice)
        time_s = s_from_ns(replay.makespan_ns)
        energy_j = j_from_10fj(replay.energy_10fj * file.job.num_gpus)
        points[mhz / clocks.clocks_mhz[-1]] = OperatingPoint(1 / time_s, energy_j / time_s)
    return points


def _value_cut_alike(ranges: Sequence[OperatingRange], power_w: float) -> float:
    """The value where every job's power is cut by the same share, per second."""
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if sum(_cut_powers_w(ranges, middle).tolist()) <= power_w:
            low = middle
        else:
            high = middle
    values = []
    for job_range, job_power_w in zip(ranges, _cut_powers_w(ranges, low).tolist(), strict=True):
        throughput = job_range.curve.throughput_at(job_power_w)
        values.append(job_range.job.value_per_iteration * throughput)
    return sum(values)


def _cut_powers_w(ranges: Sequence[OperatingRange], share: float) -> FloatArray:
    """The power of each job at a share of its full power, within what it may lose, W."""
    least_w = np.array([job_range.curve.slowest.power_w for job_range in ranges])
    full_w = np.array([job_range.curve.fastest.power_w for job_range in ranges])
    powers_w: FloatArray = np.maximum(least_w, share * full_w)
    return powers_w


def _value_with_pauses(jobs: Sequence[SiteJob], power_w: float) -> float | None:
    """The value where jobs at maximum frequency pause, least value per watt first.

    None where those that may pause cannot save enough.
    """
    running = [_RunningJob.at_max_frequency(job) for job in jobs]
    value = sum(job.value for job in running)
    spent_w = sum(_max_frequency_power_w(job) for job in jobs)
    for job in sorted(running, key=lambda job: job.value / job.saved_w):
        if spent_w <= power_w:
            break
        paused_share = min(job.may_pause_share, (spent_w - power_w) / job.saved_w)
        value -= paused_share * job.value
        spent_w -= paused_share * job.saved_w
    return value if spent_w <= power_w * (1 + _SAME_POWER) else None


class _RunningJob(NamedTuple):
    """A job that runs or pauses.

    Attributes:
        value: while it runs, per second.
        saved_w: by pausing, W.
        may_pause_share: of the time it may pause, 0 to 1.
    """

    value: float
    saved_w: float
    may_pause_share: float

    @classmethod
    def at_max_frequency(cls, job: SiteJob) -> Self:
        """A job that follows no plan."""
        throughput = 1 / job.frontier.baseline.iteration_time_s
        spare_share = max(0.0, 1 - job.least_throughput / throughput)
        return cls(
            value=job.value_per_iteration * throughput,
            saved_w=_max_frequency_power_w(job) - job.waiting_w,
            may_pause_share=spare_share if job.may_pause else 0.0,
        )
