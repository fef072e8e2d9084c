"""The proof of a site's plan: shared again from its jobs' frontiers, it comes out the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from envplan._io.documents import check_stated
from envplan._io.files import exists
from envplan._io.words import counted
from envplan.errors import InputError
from envplan.plan.frontier_file import FrontierFile
from envplan.site import Budget, SiteJob, SitePlan, plan_site
from envplan.site.budget import Interval
from envplan.site.jobs import read_frontier, read_ladder
from envplan.site.ladder import JobLadder
from envplan.site.model import SiteJobRecord
from envplan.site.plan import SiteOverheads

__all__ = ["verify_site"]

#: Stated figures are floats of sums whose order may differ.
_TOLERANCE = 1e-9


def verify_site(plan: SitePlan, file: Path) -> list[str]:
    """Prove a site's plan.

    Args:
        plan: to be proved.
        file: where it stands; frontiers are looked for from its folder, then from here.

    Returns:
        A sentence for everything that was proved.

    Raises:
        InputError: a frontier is missing or has changed, or a figure is not what comes out.
    """
    jobs = [_job_of_record(record, file.parent) for record in plan.jobs]
    intervals = []
    for stated in plan.intervals:
        interval = Interval(stated.start_s, stated.end_s, stated.budget_w, stated.reserved_w)
        intervals.append(interval)
    budget = Budget(tuple(intervals))
    overheads = SiteOverheads(plan.pue, plan.host_power_w, plan.fixed_power_w)
    again = plan_site(
        jobs,
        budget,
        overheads=overheads,
        alternates=plan.alternates,
        plan_power=plan.plan_power,
    )
    found_jobs = [
        # Found from another folder, a frontier is called otherwise; its hash is the same.
        made.model_copy(update={"frontier": stated.frontier})
        for stated, made in zip(plan.jobs, again.jobs, strict=True)
    ]
    check_stated("jobs", plan.jobs, found_jobs, _TOLERANCE)
    check_stated("intervals", plan.intervals, again.intervals, _TOLERANCE)
    largest_gap = max(interval.gap for interval in plan.intervals)
    counts_peaks = plan.plan_power == "peak"
    of_plans = "peaks, replayed with the profiles," if counts_peaks else "times and energies"
    bounded = "ladders and frontier files" if counts_peaks else "jobs"
    num_shares = len(plan.jobs) * len(plan.intervals)
    return [
        f"{counted(len(jobs), 'job')}, files unchanged; envplan check proves each of them",
        f"{counted(len(plan.intervals), 'interval')}, within the budget",
        f"{num_shares} shares of power are what their plans' {of_plans} give",
        f"no plans of these {bounded} lose less: the gap is at most {100 * largest_gap:.4f}%",
    ]


def _job_of_record(record: SiteJobRecord, folder: Path) -> SiteJob:
    """The job of a record, its frontier read anew.

    Raises:
        InputError: its frontier is missing or has changed.
    """
    if record.frontier is None:
        raise InputError(f"job {record.name} names no frontier file, so nothing can be proved")
    path = _found(record.frontier, folder)
    frontier, sha256 = read_frontier(path)
    if sha256 != record.sha256:
        raise InputError(
            f"the frontier of job {record.name} has changed since; plan the site again", path=path
        )
    ladder = None if record.freqplan is None else _ladder_of_record(record, frontier, folder)
    return SiteJob(
        record.name,
        frontier,
        source=path,
        sha256=sha256,
        replicas=record.replicas,
        ladder=ladder,
        weight=record.weight,
        money=record.money,
        flexible=record.flexible,
        may_pause=record.may_pause,
        iterations=record.iterations,
        by_s=record.by_s,
    )


def _ladder_of_record(record: SiteJobRecord, frontier: FrontierFile, folder: Path) -> JobLadder:
    """The frequency plan of a record, read anew.

    Raises:
        InputError: it is missing, has changed, or is not for the job of the frontier.
    """
    assert record.freqplan is not None
    path = _found(record.freqplan, folder)
    ladder = read_ladder(path)
    if ladder.sha256 != record.freqplan_sha256:
        raise InputError(
            f"the frequency plan of job {record.name} has changed since; plan the site again",
            path=path,
        )
    ladder.replicas_of(frontier, record.replicas)
    return replace(ladder, source=Path(record.freqplan))


def _found(path: str, folder: Path) -> Path:
    """Where a file that a site plan names is: beside the plan, or else from here."""
    near = folder / path
    return near if exists(near) else Path(path)
