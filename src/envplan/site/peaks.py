"""The most power that each plan of a job draws at any moment, by the replay of its clocks.

What runs between iterations, such as an optimizer, runs at the highest clocks whatever the plan. It
counts where the profile has rows for it. Where it has none, its power is not known and not counted.
"""

from __future__ import annotations

from collections.abc import Sequence

from envplan.pipeline import Pipeline
from envplan.plan import Rung, as_referenced, check_reference, find_profile, rung_rows
from envplan.profile import Profile
from envplan.simulation.between_iterations import extra_tables, extras_outside
from envplan.site.jobs import SiteJob
from envplan.units import w_from_10uw

__all__ = ["peak_powers_w"]


def peak_powers_w(jobs: Sequence[SiteJob]) -> list[list[float]]:
    """The peak power of each plan of each job, W.

    Stages of a pipeline count as the replay has them side by side, and between iterations as if the
    highest power of each came at one moment. Replicas count as if they ran
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
    referenced = as_referenced(file.profile, profile)
    problem = file.job.problem(referenced)
    between_w = _peak_between_iterations_w(problem.pipeline, referenced)
    peaks_w = []
    for number, plan in enumerate(job.plans):
        rung = Rung(**{field: getattr(plan, field) for field in Rung.model_fields})
        rows = rung_rows(f"plan {number} of job {job.name}", rung, problem)
        peak_w = w_from_10uw(problem.replay(rows, file.job.machine).peak_10uw)
        peaks_w.append(max(peak_w, between_w))
    return peaks_w


def _peak_between_iterations_w(pipeline: Pipeline, profile: Profile) -> float:
    """The most power of what the profile has rows for and the iterations do not have, W.

    It is that of one GPU of each stage together, at the highest clocks; 0 where there are no rows.
    """
    instructions = extras_outside(pipeline, profile)
    total_w = 0.0
    for stage in range(pipeline.num_stages):
        tables = extra_tables(pipeline, profile, stage, instructions)
        peaks_10uw = [int(table.peak_10uw[table.max_frequency_option]) for table in tables]
        total_w += w_from_10uw(max(peaks_10uw, default=0))
    return total_w
