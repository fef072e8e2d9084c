"""From jobs and a budget to the plan of a site."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from envplan.errors import InputError, NoAnswerError
from envplan.site.budget import Budget, Interval
from envplan.site.curve import PowerCurve
from envplan.site.jobs import SiteJob
from envplan.site.model import SITE_SCHEMA, PlanPower, SiteInterval, SiteJobRecord, SitePlan
from envplan.site.one_plan import follow_one_plan_each
from envplan.site.operating_range import OperatingRange
from envplan.site.peaks import peak_powers_w
from envplan.site.sharing import Allocation, Demand, Market, Slot, allocate_over_time
from envplan.site.whole_plans import choose_whole_plans

__all__ = ["SiteOverheads", "least_site_power_w", "plan_site"]

W_PER_KW = 1e3
S_PER_H = 3600.0
#: Pieces of a relaxed curve that the bound of a day with deadlines looks at, at most.
_PIECES_OF_BOUND = 64
#: Counts of iterations this close, as a fraction, are the same.
_SAME_COUNT = 1e-9


@dataclass(frozen=True)
class SiteOverheads:
    """Power of a site beside that of the GPUs of its jobs.

    Attributes:
        pue: power usage effectiveness, from 1 up.
        host_power_w: of the hosts for each GPU, W.
        fixed_power_w: of the site, whatever runs, W.
    """

    pue: float = 1.0
    host_power_w: float = 0.0
    fixed_power_w: float = 0.0

    def site_power_w(self, gpu_power_w: float, num_gpus: int) -> float:
        """The power of the site whose GPUs draw so much, without what others draw, W."""
        return self.pue * (gpu_power_w + self.host_power_w * num_gpus) + self.fixed_power_w

    def gpu_power_w(self, site_power_w: float, num_gpus: int) -> float:
        """The power that GPUs may draw so that the site draws so much, W."""
        return (site_power_w - self.fixed_power_w) / self.pue - self.host_power_w * num_gpus


def plan_site(
    jobs: Sequence[SiteJob],
    budget: Budget,
    *,
    overheads: SiteOverheads = SiteOverheads(),
    alternates: bool = True,
    plan_power: PlanPower = "average",
    progress: Callable[[int, int], None] | None = None,
) -> SitePlan:
    """Share a site's power among its jobs for the most value, interval by interval.

    Args:
        jobs: with their frontiers.
        budget: the power of the whole site over time.
        overheads: what the site draws beside the jobs' GPUs.
        alternates: two plans of a job may alternate by iterations; else each follows one at a time.
        plan_power: the power of a plan that counts: its mean over an iteration, or its peak. Where
            peaks count, plans do not alternate.
        progress: called with (jobs whose curves are made, jobs in all).

    Raises:
        InputError: peaks count, and the profile of a frontier is not found or has changed.
        NoAnswerError: the jobs' least power, or that of what must be done by a deadline, is more
            than the budget; says by how much.
    """
    alternates = alternates and plan_power == "average"
    ranges = _operating_ranges(jobs, alternates, plan_power, progress)
    num_gpus = sum(job.num_gpus for job in jobs)
    slots = [_slot(interval, overheads, num_gpus) for interval in budget.intervals]
    _require_least_power(ranges, budget, overheads)
    _require_time(jobs, budget)

    if plan_power == "peak":
        allocations = choose_whole_plans(ranges, slots)
    else:
        demands = [_demand(job_range.job, job_range.curve) for job_range in ranges]
        allocations = allocate_over_time(demands, slots)
        if not alternates:
            allocations = [
                follow_one_plan_each(ranges, allocation, slot.power_w)
                for allocation, slot in zip(allocations, slots, strict=True)
            ]
    _require_deadlines(jobs, allocations, slots)
    gaps = _gaps(jobs, allocations, _best_values(ranges, slots), slots)
    full_value = sum(job.value_per_iteration * job.full_throughput for job in jobs)
    return SitePlan(
        schema=SITE_SCHEMA,
        pue=overheads.pue,
        host_power_w=overheads.host_power_w,
        fixed_power_w=overheads.fixed_power_w,
        alternates=alternates,
        plan_power=plan_power,
        jobs=[
            _record(job_range, index, allocations, slots) for index, job_range in enumerate(ranges)
        ],
        intervals=[
            _interval(interval, ranges, allocation, gap, overheads, full_value)
            for interval, allocation, gap in zip(budget.intervals, allocations, gaps, strict=True)
        ],
    )


def _operating_ranges(
    jobs: Sequence[SiteJob],
    alternates: bool,
    plan_power: PlanPower,
    progress: Callable[[int, int], None] | None,
) -> list[OperatingRange]:
    """The operating ranges of all jobs; arguments as for plan_site."""
    if plan_power == "peak":
        return list(map(OperatingRange.by_peak, jobs, peak_powers_w(jobs)))
    ranges = []
    for number, job in enumerate(jobs, start=1):
        ranges.append(OperatingRange.of(job, alternates=alternates))
        if progress is not None:
            progress(number, len(jobs))
    return ranges


def iterations_made(
    job_index: int, allocations: Sequence[Allocation], slots: Sequence[Slot], by_s: float
) -> float:
    """The iterations that a job makes by a time."""
    counts = []
    for allocation, slot in zip(allocations, slots, strict=True):
        duration_s = max(0.0, min(slot.end_s, by_s) - slot.start_s)
        counts.append(float(allocation.throughput[job_index]) * duration_s)
    return sum(counts)


def _slot(interval: Interval, overheads: SiteOverheads, num_gpus: int) -> Slot:
    """The power that is left for the jobs' GPUs in an interval."""
    for_jobs_w = interval.budget_w - interval.reserved_w
    return Slot(interval.start_s, interval.end_s, overheads.gpu_power_w(for_jobs_w, num_gpus))


def _demand(job: SiteJob, curve: PowerCurve) -> Demand:
    """A job with one of its curves."""
    return Demand(curve, job.value_per_iteration, job.iterations, job.by_s)


def least_site_power_w(
    jobs: Sequence[SiteJob],
    overheads: SiteOverheads,
    *,
    alternates: bool = True,
    plan_power: PlanPower = "average",
) -> float:
    """The power of a site whose jobs lose all that they may, without what others draw, W."""
    alternates = alternates and plan_power == "average"
    return _least_power_w(_operating_ranges(jobs, alternates, plan_power, None), overheads)


def _least_power_w(ranges: Sequence[OperatingRange], overheads: SiteOverheads) -> float:
    """The power of a site whose jobs lose all that they may, W."""
    least_gpu_w = sum(job_range.curve.slowest.power_w for job_range in ranges)
    num_gpus = sum(job_range.job.num_gpus for job_range in ranges)
    return overheads.site_power_w(least_gpu_w, num_gpus)


def _require_least_power(
    ranges: Sequence[OperatingRange], budget: Budget, overheads: SiteOverheads
) -> None:
    """Refuse a budget that is less than the power of jobs that lose all they may.

    Raises:
        NoAnswerError: an interval's is; says by how much.
    """
    least_site_w = _least_power_w(ranges, overheads)
    for interval in budget.intervals:
        needed_w = least_site_w + interval.reserved_w
        if needed_w > interval.budget_w:
            raise NoAnswerError(
                f"what is reserved and what jobs may not lose needs {_kw(needed_w)}, "
                f"{_kw(needed_w - interval.budget_w)} more than the budget of "
                f"{_kw(interval.budget_w)} from {interval.start_s / S_PER_H:g} h on; let jobs lose "
                "more (flexible) or pause (may_pause)"
            )


def _require_time(jobs: Sequence[SiteJob], budget: Budget) -> None:
    """Refuse deadlines that no sharing of power could keep.

    Raises:
        InputError: a deadline lies after the end of the budget.
        NoAnswerError: a job at its fastest misses its deadline.
    """
    end_s = budget.intervals[-1].end_s
    for job in jobs:
        if job.iterations is None or job.by_s is None:
            continue
        if job.by_s > end_s:
            raise InputError(
                f"job {job.name} has a deadline at {job.by_s / S_PER_H:g} h, and the budget is "
                f"known until {end_s / S_PER_H:g} h; give a file of powers that reaches so far"
            )
        reachable = job.full_throughput * job.by_s
        if job.iterations > reachable:
            raise NoAnswerError(
                f"job {job.name} makes at most {reachable:,.1f} iterations by "
                f"{job.by_s / S_PER_H:g} h, not {job.iterations:,}"
            )


def _require_deadlines(
    jobs: Sequence[SiteJob], allocations: Sequence[Allocation], slots: Sequence[Slot]
) -> None:
    """Refuse allocations that miss a deadline, where each job follows one plan at a time.

    Raises:
        NoAnswerError: one does.
    """
    for index, job in enumerate(jobs):
        if job.iterations is None or job.by_s is None:
            continue
        num_made = iterations_made(index, allocations, slots, job.by_s)
        if num_made < job.iterations * (1 - _SAME_COUNT):
            raise NoAnswerError(
                f"job {job.name} makes {num_made:.1f} of {job.iterations} iterations by "
                f"{job.by_s / S_PER_H:g} h where each job follows one plan at a time; let plans "
                "alternate, or give it more time"
            )


def _best_values(ranges: Sequence[OperatingRange], slots: Sequence[Slot]) -> list[float]:
    """The most value that any plans could have, per second, of each interval."""
    if all(job_range.job.iterations is None for job_range in ranges):
        market = Market([_demand(job_range.job, job_range.bound) for job_range in ranges])
        return [market.best_value(slot.power_w) for slot in slots]
    demands = []
    for job_range in ranges:
        # A curve of fewer pieces, none of them above it, still gives a bound; and the linear
        # program stays small enough to be solved.
        lower_curve = job_range.bound.bounded_below(_PIECES_OF_BOUND)
        demands.append(_demand(job_range.job, lower_curve))
    return [allocation.value for allocation in allocate_over_time(demands, slots)]


def _gaps(
    jobs: Sequence[SiteJob],
    allocations: Sequence[Allocation],
    best_values: Sequence[float],
    slots: Sequence[Slot],
) -> list[float]:
    """The certified gap of each interval.

    Deadlines couple intervals: then the bound is one on the whole time, and so is the gap.
    """
    values = [allocation.value for allocation in allocations]
    if all(job.iterations is None for job in jobs):
        return [_gap(bound, value) for bound, value in zip(best_values, values, strict=True)]
    whole_gap = _gap(_over_time(best_values, slots), _over_time(values, slots))
    return [whole_gap] * len(slots)


def _over_time(values_per_s: Sequence[float], slots: Sequence[Slot]) -> float:
    """The value of all intervals, each of which has its value per second."""
    return sum(
        value_per_s * slot.duration_s for value_per_s, slot in zip(values_per_s, slots, strict=True)
    )


def _gap(bound: float, value: float) -> float:
    """The fraction by which a bound lies above a value; 0 where there is no value."""
    return max(0.0, bound / value - 1) if value else 0.0


def _record(
    job_range: OperatingRange,
    index: int,
    allocations: Sequence[Allocation],
    slots: Sequence[Slot],
) -> SiteJobRecord:
    """The entry of a job in a site plan, for all intervals together."""
    job = job_range.job
    num_made = None
    if job.by_s is not None:
        num_made = iterations_made(index, allocations, slots, job.by_s)
    return SiteJobRecord(
        name=job.name,
        frontier=None if job.source is None else job.source.as_posix(),
        sha256=job.sha256,
        freqplan=None if job.ladder is None else job.ladder.source.as_posix(),
        freqplan_sha256=None if job.ladder is None else job.ladder.sha256,
        gpus=job.num_gpus,
        replicas=job.replicas,
        full_power_w=job_range.bound.fastest.power_w,
        weight=job.weight,
        money=job.money,
        flexible=job.flexible,
        may_pause=job.may_pause,
        iterations=job.iterations,
        by_s=job.by_s,
        iterations_made=num_made,
    )


def _interval(
    interval: Interval,
    ranges: Sequence[OperatingRange],
    allocation: Allocation,
    gap: float,
    overheads: SiteOverheads,
    full_value: float,
) -> SiteInterval:
    """The entry of an interval in a site plan."""
    job_assignments = [
        job_range.assignment_at(throughput)
        for job_range, throughput in zip(ranges, allocation.throughput.tolist(), strict=True)
    ]
    num_gpus = sum(job_range.job.num_gpus for job_range in ranges)
    gpu_power_w = sum(job.power_w for job in job_assignments)
    price_per_site_w = allocation.price / overheads.pue
    in_money = ranges[0].job.money is not None
    return SiteInterval(
        start_s=interval.start_s,
        end_s=interval.end_s,
        budget_w=interval.budget_w,
        reserved_w=interval.reserved_w,
        power_w=overheads.site_power_w(gpu_power_w, num_gpus) + interval.reserved_w,
        throughput_loss_percent=max(0.0, 100 * (1 - allocation.value / full_value)),
        price_percent_per_kw=100 * price_per_site_w / full_value * W_PER_KW,
        price_money_per_kwh=price_per_site_w * W_PER_KW * S_PER_H if in_money else None,
        gap=gap,
        jobs=job_assignments,
    )


def _kw(power_w: float) -> str:
    """A power for people, in kW with as many digits as it takes."""
    return f"{power_w / W_PER_KW:,.4g} kW"
