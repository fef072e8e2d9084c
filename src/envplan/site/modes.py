"""How a job reaches a throughput: one plan, two plans that alternate, or a plan and pauses."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from envplan.site.curve import OperatingPoint, PowerCurve
from envplan.site.jobs import SiteJob
from envplan.site.model import JobShare

#: A throughput this close to a corner, as a fraction, is the corner's.
_SAME = 1e-12


@dataclass(frozen=True, eq=False)
class JobModes:
    """What a job can do, and what each throughput means for it.

    Attributes:
        job: the job.
        curve: power over throughput within what the job may lose.
        stops: throughputs at which it follows one plan or pauses alone, ascending: corners of the
            hull of all plans; those below what it may lose are among them.
        plans: the index of the plan at each stop, None at a pause.
    """

    job: SiteJob
    curve: PowerCurve
    stops: tuple[OperatingPoint, ...]
    plans: tuple[int | None, ...]

    @classmethod
    def of(cls, job: SiteJob, *, alternates: bool) -> JobModes:
        """The modes of a job, whose plans may alternate or may not."""
        points = job.plan_points()
        index_of = {point: index for index, point in enumerate(points)}
        hull = PowerCurve.hull_of([*points, *job.pause()])
        stops = tuple(map(OperatingPoint, hull.throughput.tolist(), hull.power_w.tolist()))
        plans = tuple(index_of.get(point) for point in stops)
        curve = hull.from_throughput(job.least_throughput)
        if not alternates:
            curve = _without_mixtures(job, stops, plans)
        return cls(job, curve, stops, plans)

    def is_divisible(self, throughput: float) -> bool:
        """Whether a throughput needs no two plans: a stop, or between a pause and a plan."""
        slower, faster = self._neighbours(throughput)
        return slower == faster or self.plans[slower] is None

    def stop_below(self, throughput: float) -> float:
        """The fastest stop that is no faster than this, within the job's curve."""
        slower, _ = self._neighbours(throughput)
        return max(self.stops[slower].throughput, self.curve.slowest.throughput)

    def share_at(self, throughput: float) -> JobShare:
        """What the job does to have a throughput of its curve."""
        if throughput not in self._shares:
            self._shares[throughput] = self._share(throughput)
        return self._shares[throughput]

    @cached_property
    def _shares(self) -> dict[float, JobShare]:
        """What it does by throughput: in most intervals of a day a job is at one of a few."""
        return {}

    def _share(self, throughput: float) -> JobShare:
        slower, faster = self._neighbours(throughput)
        power_w = self.curve.power_at(throughput)
        if slower == faster:
            return self._alone(slower, power_w)
        if self.plans[slower] is None:
            running = self.stops[faster].throughput
            return JobShare(
                name=self.job.name,
                plan=self.plans[faster],
                iteration_time_s=1 / running,
                paused_share=1 - throughput / running,
                power_w=power_w,
            )
        slow, fast = self.stops[slower].throughput, self.stops[faster].throughput
        time_share = (throughput - slow) / (fast - slow)
        return JobShare(
            name=self.job.name,
            plan=self.plans[slower],
            faster_plan=self.plans[faster],
            faster_share=time_share * fast / throughput,
            iteration_time_s=1 / throughput,
            paused_share=0.0,
            power_w=power_w,
        )

    def _alone(self, stop: int, power_w: float) -> JobShare:
        plan, throughput = self.plans[stop], self.stops[stop].throughput
        return JobShare(
            name=self.job.name,
            plan=plan,
            iteration_time_s=None if plan is None else 1 / throughput,
            paused_share=1.0 if plan is None else 0.0,
            power_w=power_w,
        )

    def _neighbours(self, throughput: float) -> tuple[int, int]:
        """Indices of the stops at or around a throughput; equal where it is a stop."""
        faster = bisect_right(self.stops, throughput * (1 + _SAME), key=_throughput_of)
        slower = max(0, faster - 1)
        is_stop = throughput <= self.stops[slower].throughput * (1 + _SAME)
        if is_stop or faster == len(self.stops):
            return slower, slower
        return slower, faster


def _throughput_of(point: OperatingPoint) -> float:
    return point.throughput


def _without_mixtures(
    job: SiteJob, stops: Sequence[OperatingPoint], plans: Sequence[int | None]
) -> PowerCurve:
    """The curve of a job that follows one plan at a time; it starts at a plan or with pauses."""
    least = job.least_throughput
    allowed = [point for point in stops if point.throughput >= least] or [stops[-1]]
    first = len(stops) - len(allowed)
    pauses_before_first_plan = first > 0 and plans[first - 1] is None
    if pauses_before_first_plan:
        return PowerCurve.through(stops).from_throughput(least)
    return PowerCurve.through(allowed)
