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
from envplan.profile.sidecar import ProfileMetadata

__all__ = ["JobShape", "parse_extras", "pipeline_of_job", "shape_of_job"]


class DescribedProfile(Protocol):
    """The part of a Profile that says which job it was measured for."""

    @property
    def name(self) -> str: ...
    @property
    def path(self) -> Path | None: ...
    @property
    def metadata(self) -> ProfileMetadata: ...
    @property
    def num_stages(self) -> int: ...
    def has(self, stage: int, instruction: str) -> bool: ...


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
        schedule, num_stages, num_microbatches, chunks, p2p_latency, extras, microbatch_group:
            instead of what the sidecar says. Stages or chunks alone tell the other; 1f1b with
            chunks is interleaved unless it is asked for by name.
        forwards_ahead: for envpipe, of a number of microbatches; as for Pipeline.

    Raises:
        InputError: nobody says how many microbatches an iteration has, the stages of the profile
            cannot be shared out, or as for Pipeline.
    """
    metadata, job, count = profile.metadata, profile.metadata.job, profile.num_stages
    shape = shape_of_job(profile, schedule=schedule, num_stages=num_stages, chunks=chunks)
    name, stages, chunks = shape
    if stages * chunks != count:
        raise InputError(
            f"schedule {name} with {counted(chunks, 'chunk')} (--vp) on "
            f"{counted(stages, 'pipeline stage')} (--pp) has "
            f"{counted(stages * chunks, 'model stage')}, but profile {profile.name} has "
            f"{counted(count, 'stage')}"
        )
    microbatches = num_microbatches or metadata.num_microbatches
    if microbatches is None:
        raise InputError(
            "how many microbatches has an iteration? Give --microbatches M (profile "
            f"{profile.name} does not say)"
        )
    if p2p_latency is None:
        p2p_latency = job.p2p_latency_s
        if isinstance(p2p_latency, list) and len(p2p_latency) != stages - 1:
            p2p_latency = max(p2p_latency)  # of other stages than those described
    if microbatch_group is None and schedule is None:
        microbatch_group = job.microbatch_group
    ahead = None
    if forwards_ahead is not None and name == ENVPIPE and chunks == 1:
        ahead = forwards_ahead(microbatches)
    return Pipeline(
        name,
        stages,
        microbatches,
        num_chunks=chunks,
        p2p_latency=p2p_latency,
        forwards_ahead=ahead,
        microbatch_group=microbatch_group,
        extras=job.extras if extras is None else extras,
        # As measured under 1F1B; other schedules or stages are no evidence for it.
        in_turn=job.in_turn if name in ("1f1b", ENVPIPE) and count == job.stages else (),
    )


def parse_extras(text: str | None, profile: DescribedProfile) -> dict[str, list[int]] | None:
    """The operations that `--extra` names, and the stages for which the profile has rows.

    Raises:
        InputError: one is not known, or the profile has no rows for it.
    """
    if text is None:
        return None
    extras = {}
    for name in text.replace("-", "_").replace(" ", "").split(","):
        extras[name] = [s for s in range(profile.num_stages) if profile.has(s, name)]
        if not extras[name]:
            raise InputError(
                f"--extra {name}: profile {profile.name} has no rows for {name}; it must name some "
                f"of {', '.join(EXTRAS)} that have rows, at 0 MHz if they take the same time at "
                "any clock",
                path=profile.path,
            )
    return extras
