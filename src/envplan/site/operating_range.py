"""How a job reaches a throughput: one plan, two plans that alternate, or a plan and pauses."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from envplan.site.curve import OperatingPoint, PowerCurve
from envplan.site.jobs import SiteJob
from envplan.site.model import JobAssignment

#: A throughput this close to a stop's, as a fraction, is the stop's.
_SAME = 1e-12


class Stop(NamedTuple):
    """An operating point at which a job follows a single plan, or pauses all the time.

    Attributes:
        point: its throughput and power.
        plan: the index of the plan; None: the job pauses.
    """

    point: OperatingPoint
    plan: int | None

    @property
    def throughput(self) -> float:
        """Iterations a second."""
        return self.point.throughput

    @property
    def is_pause(self) -> bool:
        """Whether the job stands still."""
        return self.plan is None


@dataclass(frozen=True, eq=False)
class OperatingRange:
    """The throughputs that a job can have, their powers, and the plans that reach each.

    Attributes:
        job: the job.
        curve: power over throughput within what the job may lose.
        bound: a curve that no plans of the job undercut, whatever they are mixed with; where peaks
            count, none of those that it can follow: of its ladder, or else of its frontier file.
        stops: by ascending throughput: the corners of the hull of all plans and of the pause, those
            below what it may lose among them. Where peaks count, all plans that it may follow. Only
            the slowest can be a pause.
    """

    job: SiteJob
    curve: PowerCurve
    bound: PowerCurve
    stops: tuple[Stop, ...]
    #: By throughput: in most intervals of a day a job is at one of a few.
    _assignment_cache: dict[float, JobAssignment] = field(
        default_factory=dict, init=False, repr=False
    )

    @classmethod
    def of(cls, job: SiteJob, *, alternates: bool) -> OperatingRange:
        """The range of a job by the mean power of its plans, which may alternate or may not."""
        stops = _hull_stops(job.plan_points(), job)
        hull = PowerCurve.through(stop.point for stop in stops)
        if alternates:
            curve = hull.from_throughput(job.least_throughput)
        else:
            curve = _curve_without_mixtures(stops, job.least_throughput)
        return cls(job, curve, job.relaxed_curve, stops)

    @classmethod
    def by_peak(cls, job: SiteJob, peak_powers_w: Sequence[float]) -> OperatingRange:
        """The range of a job by the peak power of its plans.

        One plan is followed at a time: two that alternate have the higher peak of both, and pauses
        in between save nothing of it.

        Args:
            job: the job.
            peak_powers_w: of each of its plans.
        """
        points = [
            OperatingPoint(point.throughput, peak_w)
            for point, peak_w in zip(job.plan_points(), peak_powers_w, strict=True)
        ]
        bound = PowerCurve.hull_of([*points, *job.pause()]).from_throughput(job.least_throughput)
        stops = [Stop(point, plan) for plan, point in enumerate(points)]
        stops += [Stop(point, None) for point in job.pause()]
        fast_enough = [stop for stop in stops if stop.throughput >= job.least_throughput]
        admissible = _undominated(fast_enough or [max(stops, key=lambda stop: stop.throughput)])
        curve = PowerCurve.hull_of(stop.point for stop in admissible)
        return cls(job, curve, bound, tuple(admissible))

    def needs_two_plans(self, throughput: float) -> bool:
        """Whether a throughput lies between two plans: it is no stop, nor below the first plan."""
        slower, faster = self._neighbours(throughput)
        return slower != faster and not slower.is_pause

    def stop_below(self, throughput: float) -> float:
        """The throughput of the fastest stop that is no faster than this, within the curve."""
        slower, _ = self._neighbours(throughput)
        return max(slower.throughput, self.curve.slowest.throughput)

    def assignment_at(self, throughput: float) -> JobAssignment:
        """The plans or pauses by which the job has a throughput of its curve."""
        if throughput not in self._assignment_cache:
            self._assignment_cache[throughput] = self._assignment(throughput)
        return self._assignment_cache[throughput]

    def _assignment(self, throughput: float) -> JobAssignment:
        slower, faster = self._neighbours(throughput)
        if slower == faster:
            return self._assignment_of_stop(slower)
        power_w = self.curve.power_at(throughput)
        if slower.is_pause:
            return JobAssignment(
                name=self.job.name,
                plan=faster.plan,
                iteration_time_s=1 / faster.throughput,
                paused_share=1 - throughput / faster.throughput,
                power_w=power_w,
            )
        time_share = (throughput - slower.throughput) / (faster.throughput - slower.throughput)
        return JobAssignment(
            name=self.job.name,
            plan=slower.plan,
            faster_plan=faster.plan,
            # A share of time becomes one of iterations, of which fast ones take less time.
            faster_share=time_share * faster.throughput / throughput,
            iteration_time_s=1 / throughput,
            paused_share=0.0,
            power_w=power_w,
        )

    def _assignment_of_stop(self, stop: Stop) -> JobAssignment:
        """The assignment of a job that is at one stop all the time."""
        return JobAssignment(
            name=self.job.name,
            plan=stop.plan,
            iteration_time_s=None if stop.is_pause else 1 / stop.throughput,
            paused_share=1.0 if stop.is_pause else 0.0,
            power_w=stop.point.power_w,
        )

    def _neighbours(self, throughput: float) -> tuple[Stop, Stop]:
        """The stops below and above a throughput; the same stop twice where it is at a stop."""
        tolerated = throughput * (1 + _SAME)
        num_below = bisect_right(self.stops, tolerated, key=lambda stop: stop.throughput)
        slower = self.stops[max(0, num_below - 1)]
        is_stop = throughput <= slower.throughput * (1 + _SAME)
        if is_stop or num_below == len(self.stops):
            return slower, slower
        return slower, self.stops[num_below]


def _hull_stops(points: Sequence[OperatingPoint], job: SiteJob) -> tuple[Stop, ...]:
    """The corners of the hull of a job's plans and its pause, by ascending throughput.

    Args:
        points: of its plans, in their order.
        job: the job.
    """
    index_of = {point: index for index, point in enumerate(points)}
    hull = PowerCurve.hull_of([*points, *job.pause()])
    return tuple(Stop(corner, index_of.get(corner)) for corner in hull.corners())


def _curve_without_mixtures(stops: Sequence[Stop], least_throughput: float) -> PowerCurve:
    """The curve of a job that follows one plan at a time; it starts at a plan or with pauses."""
    allowed = [stop.point for stop in stops if stop.throughput >= least_throughput]
    if not allowed:
        allowed = [stops[-1].point]
    num_too_slow = len(stops) - len(allowed)
    starts_with_pauses = num_too_slow > 0 and stops[num_too_slow - 1].is_pause
    if starts_with_pauses:
        whole = PowerCurve.through(stop.point for stop in stops)
        return whole.from_throughput(least_throughput)
    return PowerCurve.through(allowed)


def _undominated(stops: Sequence[Stop]) -> list[Stop]:
    """The stops that no other one beats in throughput at no more power, by ascending throughput."""
    kept: list[Stop] = []
    for stop in sorted(stops, key=lambda stop: (stop.throughput, -stop.point.power_w)):
        while kept and kept[-1].point.power_w >= stop.point.power_w:
            kept.pop()
        kept.append(stop)
    return kept
