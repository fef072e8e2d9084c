"""The pipeline of the job that a profile's sidecar describes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from envplan._io.words import counted
from envplan.errors import InputError
from envplan.pipeline.generate import ENVPIPE
from envplan.pipeline.graph import Pipeline
from envplan.pipeline.operations import EXTRAS
from envplan.pipeline.schedules import traits
from envplan.profile.sidecar import ProfileMetadata, Workload

__all__ = ["JobShape", "parse_extras", "pipeline_of_job", "shape_of_job"]


class DescribedProfile(Protocol):
    """The part of a Profile that says which job it was measured for."""

    @property
    def name(self) -> str:
        """The file's name without .csv."""

    @property
    def path(self) -> Path | None:
        """Where it was read from, if it was."""

    @property
    def metadata(self) -> ProfileMetadata:
        """The sidecar."""

    @property
    def num_stages(self) -> int:
        """Model stages."""

    def has(self, stage: int, instruction: str) -> bool:
        """Whether the profile times this instruction on this stage."""


class JobShape(NamedTuple):
    """The schedule of a job, and how a profile's stages are shared out.

    Attributes:
        schedule: its name.
        num_stages: pipeline stages.
        num_chunks: model chunks of each.
    """

    schedule: str
    num_stages: int
    num_chunks: int


def shape_of_job(
    profile: DescribedProfile,
    *,
    schedule: str | None = None,
    num_stages: int | None = None,
    chunks: int | None = None,
) -> JobShape:
    """The shape of a profile's job, whether or not the profile has stages for it.

    Args:
        profile: its sidecar says the job; where it says nothing, the schedule is 1f1b.
        schedule: instead of the sidecar's. 1f1b with chunks is interleaved unless it is asked for
            here.
        num_stages: instead of the sidecar's stages and chunks; it tells the chunks, too.
        chunks: instead of the sidecar's stages and chunks; it tells the stages, too.
    """
    name = schedule or profile.metadata.schedule or "1f1b"
    if num_stages is None and chunks is None:
        num_stages, chunks = profile.metadata.job.stages, profile.metadata.job.chunks
    if chunks is None:
        fits = num_stages is not None and profile.num_stages % num_stages == 0
        chunks = profile.num_stages // (num_stages or 1) if fits else traits(name).chunks
    if schedule is None and name == "1f1b" and chunks > 1:
        name = "interleaved"
    return JobShape(name, num_stages or max(1, profile.num_stages // chunks), chunks)


def pipeline_of_job(
    profile: DescribedProfile,
    *,
    schedule: str | None = None,
    num_stages: int | None = None,
    num_microbatches: int | None = None,
    chunks: int | None = None,
    p2p_latency: float | list[float] | None = None,
    extras: Mapping[str, Sequence[int]] | None = None,
    microbatch_group: int | None = None,
    forwards_ahead: Callable[[int], Sequence[int] | None] | None = None,
) -> Pipeline:
    """The pipeline of a profile's job, with its transfers and operations of constant time.

    Args:
        profile: its sidecar says the job; where it says nothing, the schedule is 1f1b and takes no
            time for transfers.
        schedule: in place of the sidecar's, as all below; 1f1b with chunks is interleaved unless
            it is asked for by name.
        num_stages: pipeline stages; without chunks, these follow from it.
        num_microbatches: of an iteration.
        chunks: model chunks of each stage; without num_stages, this follows from it.
        p2p_latency: of a transfer, s, or of each pair of neighbouring stages.
        extras: as for Pipeline.
        microbatch_group: as for Pipeline.
        forwards_ahead: for envpipe, of a number of microbatches; as for Pipeline.

    Raises:
        InputError: nobody says how many microbatches an iteration has, the stages of the profile
            cannot be shared out, or as for Pipeline.
    """
    metadata, job = profile.metadata, profile.metadata.job
    shape = _fitting_shape(profile, schedule, num_stages, chunks)
    microbatches = num_microbatches or metadata.num_microbatches
    if microbatches is None:
        raise InputError(
            "how many microbatches has an iteration? Give --microbatches M (profile "
            f"{profile.name} does not say)"
        )
    if microbatch_group is None and schedule is None:
        microbatch_group = job.microbatch_group
    ahead = None
    if forwards_ahead is not None and shape.schedule == ENVPIPE and shape.num_chunks == 1:
        ahead = forwards_ahead(microbatches)
    # As measured under 1F1B; other schedules or stages are no evidence for it.
    is_as_measured = shape.schedule in ("1f1b", ENVPIPE) and profile.num_stages == job.stages
    return Pipeline(
        shape.schedule,
        shape.num_stages,
        microbatches,
        num_chunks=shape.num_chunks,
        p2p_latency=(
            _latency_of_job(job, shape.num_stages) if p2p_latency is None else p2p_latency
        ),
        forwards_ahead=ahead,
        microbatch_group=microbatch_group,
        extras=job.extras if extras is None else extras,
        in_turn=job.in_turn if is_as_measured else (),
    )


def _fitting_shape(
    profile: DescribedProfile, schedule: str | None, num_stages: int | None, chunks: int | None
) -> JobShape:
    """The shape of a profile's job, for which the profile has stages.

    Raises:
        InputError: the stages of the profile cannot be shared out so.
    """
    shape = shape_of_job(profile, schedule=schedule, num_stages=num_stages, chunks=chunks)
    model_stages = shape.num_stages * shape.num_chunks
    if model_stages != profile.num_stages:
        raise InputError(
            f"schedule {shape.schedule} with {counted(shape.num_chunks, 'chunk')} (--vp) on "
            f"{counted(shape.num_stages, 'pipeline stage')} (--pp) has "
            f"{counted(model_stages, 'model stage')}, but profile {profile.name} has "
            f"{counted(profile.num_stages, 'stage')}"
        )
    return shape


def _latency_of_job(job: Workload, num_stages: int) -> float | list[float]:
    """The latencies of a job's transfers, s; the longest where it has other stages."""
    latency_s = job.p2p_latency_s
    if isinstance(latency_s, list) and len(latency_s) != num_stages - 1:
        return max(latency_s)
    return latency_s


def parse_extras(text: str | None, profile: DescribedProfile) -> dict[str, list[int]] | None:
    """The operations that `--extra` names, and the stages for which the profile has rows.

    Raises:
        InputError: one is not known, or the profile has no rows for it.
    """
    if text is None:
        return None
    extras = {}
    for name in text.replace("-", "_").replace(" ", "").split(","):
        stages = range(profile.num_stages)
        extras[name] = [stage for stage in stages if profile.has(stage, name)]
        if not extras[name]:
            raise InputError(
                f"--extra {name}: profile {profile.name} has no rows for {name}; it must name some "
                f"of {', '.join(EXTRAS)} that have rows, at 0 MHz if they take the same time at "
                "any clock",
                path=profile.path,
            )
    return extras
