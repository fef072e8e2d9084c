"""The most power that each plan of a job draws at any moment, by the replay of its clocks."""

from __future__ import annotations

from collections.abc import Sequence

from envplan.plan import Rung, as_referenced, check_reference, find_profile, rung_rows
from envplan.site.jobs import SiteJob
from envplan.units import w_from_10uw

__all__ = ["peak_powers_w"]


def peak_powers_w(jobs: Sequence[SiteJob]) -> list[list[float]]:
    """The peak power of each plan of each job, W.

    Stages of a pipeline count as the replay has them side by side. Replicas count as if they ran
    in step, so that their peaks fall together: the worst case.

    Raises:
        InputError: the profile of a frontier is not found or has changed.
    """
    known_w: dict[tuple[str, str], list[float]] = {}
    peaks_w = []
    for job in jobs:
        key = (job.sha256, "" if job.ladder is None else job.ladder.sha256)
        if key not in known_w:
            known_w[key] = _peaks_of_replica_w(job)
        peaks_w.append([peak_w * job.num_gpus_of_stage for peak_w in known_w[key]])
    return peaks_w


def _peaks_of_replica_w(job: SiteJob) -> list[float]:
    """The peaks of the plans that a job can follow, of one GPU a stage together, W."""
    file = job.frontier
    profile = find_profile(file.profile, job.source)
    check_reference(file.profile, profile, force=False)
    problem = file.job.problem(as_referenced(file.profile, profile))
    peaks_w = []
    for number, plan in enumerate(job.plans):
        rung = Rung(**{field: getattr(plan, field) for field in Rung.model_fields})
        rows = rung_rows(f"plan {number} of job {job.name}", rung, problem)
        peaks_w.append(w_from_10uw(problem.replay(rows, file.job.machine).peak_10uw))
    return peaks_w
