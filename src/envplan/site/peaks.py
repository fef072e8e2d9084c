"""The most power that each plan of a job draws at any moment, by the replay of its clocks."""

from __future__ import annotations

from collections.abc import Sequence

from envplan.plan import as_referenced, check_reference, find_profile
from envplan.site.jobs import SiteJob
from envplan.units import w_from_uw

__all__ = ["peak_powers_w"]


def peak_powers_w(jobs: Sequence[SiteJob]) -> list[list[float]]:
    """The peak power of each plan of each job, W.

    Stages of a pipeline count as the replay has them side by side. Replicas count as if they ran
    in step, so that their peaks fall together: the worst case.

    Raises:
        InputError: the profile of a frontier is not found or has changed.
    """
    peaks_w: dict[str, list[float]] = {}
    for job in jobs:
        if job.sha256 not in peaks_w:
            peaks_w[job.sha256] = _peaks_of_frontier_w(job)
    return [[peak_w * job.scale for peak_w in peaks_w[job.sha256]] for job in jobs]


def _peaks_of_frontier_w(job: SiteJob) -> list[float]:
    """The peaks of a job with the replicas that its frontier was traced for, W."""
    file = job.frontier
    profile = find_profile(file.profile, job.source)
    check_reference(file.profile, profile, force=False)
    problem = file.job.problem(as_referenced(file.profile, profile))
    peaks_w = []
    for number, plan in enumerate(job.plans):
        replay = plan.replayed(f"plan {number} of job {job.name}", problem)
        peaks_w.append(w_from_uw(replay.peak_uw * file.job.num_gpus))
    return peaks_w
