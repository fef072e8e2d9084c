"""The pipeline of the job that a profile's sidecar describes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from envplan.errors import InputError
from envplan.pipeline.graph import Pipeline
from envplan.pipeline.schedules import traits

if TYPE_CHECKING:
    from envplan.profile import Profile

__all__ = ["described_pipeline"]


def described_pipeline(
    profile: Profile,
    *,
    schedule: str | None = None,
    num_microbatches: int | None = None,
    chunks: int | None = None,
    p2p_latency: float | None = None,
    extras: Mapping[str, Sequence[int]] | None = None,
    forwards_ahead: Sequence[int] | None = None,
) -> Pipeline:
    """The pipeline of a profile's job, with its transfers and operations of constant time.

    Args:
        profile: its sidecar says the job; where it says nothing, the schedule is 1f1b and takes no
            time for transfers.
        schedule, num_microbatches, chunks, p2p_latency, extras: instead of what the sidecar says.
        forwards_ahead: as for Pipeline.

    Raises:
        InputError: nobody says how many microbatches an iteration has, the stages of the profile
            cannot be shared out, or as for Pipeline.
    """
    metadata, job = profile.metadata, profile.metadata.job
    schedule = schedule or metadata.schedule or "1f1b"
    chunks = chunks or job.chunks or traits(schedule).chunks
    microbatches = num_microbatches or metadata.num_microbatches
    if microbatches is None:
        raise InputError(
            "how many microbatches has an iteration? Give --microbatches M (profile "
            f"{profile.name} does not say)"
        )
    stages = profile.num_stages // chunks
    if stages * chunks != profile.num_stages or job.stages not in (None, stages):
        raise InputError(
            f"profile {profile.name} has {profile.num_stages} stages, which are not "
            f"{job.stages or 'any number of'} pipeline stages of {chunks} chunks each"
        )
    return Pipeline(
        schedule,
        num_stages=stages,
        num_microbatches=microbatches,
        num_chunks=chunks,
        p2p_latency=_transfers(job.p2p_latency_s, stages) if p2p_latency is None else p2p_latency,
        forwards_ahead=forwards_ahead,
        extras=job.extras if extras is None else extras,
    )


def _transfers(latency_s: float | list[float], stages: int) -> float | list[float]:
    """What transfers take; where the stages are others than those described, the longest."""
    if isinstance(latency_s, list) and len(latency_s) != stages - 1:
        return max(latency_s)
    return latency_s
