"""A training job as options and files describe it, and the way from its profile to its frontier.

The command line, sweeps and sites all go this way: the pipeline that the profile's sidecar and the
description give, the profile with that pipeline's operations, and the frontier of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from envplan.frontier import Progress
from envplan.pipeline import Pipeline
from envplan.planners.envpipe import forwards_ahead
from envplan.profile import ByParts, Profile
from envplan.profile.job import parse_extras, pipeline_of_job
from envplan.solve import Frontier, trace_frontier

__all__ = ["JobSpec"]


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """How a pipeline runs a profile's job; None leaves a thing to the profile's sidecar.

    Attributes:
        schedule: name of the schedule.
        num_stages, chunks: pipeline stages, and model chunks of each.
        num_microbatches: of an iteration.
        microbatch_group: microbatches that go through a chunk before the next.
        p2p_latency_s: of a transfer between stages, s.
        extra: operations beside forwards and backwards, as `--extra` names them.
        activation_slots: of schedule envpipe, as for forwards_ahead; None: enough.
        recompute: backwards recompute their activations.
        one_clock: each operation has one clock, though the profile splits some into parts.
        parts_within_percent: how much slower than without parts an operation may become.
        blocking_power_w: of one waiting GPU, W.
        gpus_per_stage, replicas: by which energies are multiplied.
    """

    schedule: str | None = None
    num_stages: int | None = None
    chunks: int | None = None
    num_microbatches: int | None = None
    microbatch_group: int | None = None
    p2p_latency_s: float | None = None
    extra: str | None = None
    activation_slots: int | Sequence[int] | None = None
    recompute: bool = False
    one_clock: bool = False
    parts_within_percent: float | None = None
    blocking_power_w: float | None = None
    gpus_per_stage: int = 1
    replicas: int = 1

    def pipeline(self, profile: Profile) -> Pipeline:
        """The pipeline of the job.

        Raises:
            InputError: as for pipeline_of_job and parse_extras.
        """

        def ahead(num_microbatches: int) -> tuple[int, ...]:
            timed = profile.fitted(("backward",), recompute=self.recompute)
            return forwards_ahead(timed, num_microbatches, self.activation_slots)

        return pipeline_of_job(
            profile,
            schedule=self.schedule,
            num_stages=self.num_stages,
            num_microbatches=self.num_microbatches,
            chunks=self.chunks,
            p2p_latency=self.p2p_latency_s,
            extras=parse_extras(self.extra, profile),
            microbatch_group=self.microbatch_group,
            forwards_ahead=ahead,
        )

    def fitted(self, profile: Profile, pipeline: Pipeline) -> Profile:
        """The profile with the operations of a pipeline, composed of parts where it has some.

        Raises:
            InputError: the profile lacks some, or the description contradicts it.
        """
        by_parts = None
        if profile.has_parts and not self.one_clock:
            by_parts = ByParts.from_options(self.parts_within_percent, self.blocking_power_w)
        instructions = {operation.instruction for operation in pipeline.operations}
        return profile.fitted(instructions, recompute=self.recompute, by_parts=by_parts)

    def trace_fitted(
        self,
        profile: Profile,
        pipeline: Pipeline,
        *,
        full: bool = False,
        whole: bool = True,
        progress: Progress | None = None,
    ) -> Frontier:
        """The frontier of a pipeline and a profile that has its operations.

        Args:
            profile: as `fitted` gives it.
            pipeline: its pipeline.
            full, whole, progress: as for trace_frontier.

        Raises:
            InputError: as for trace_frontier.
        """
        return trace_frontier(
            pipeline,
            profile,
            blocking_power=self.blocking_power_w,
            gpus_per_stage=self.gpus_per_stage,
            replicas=self.replicas,
            full=full,
            whole=whole,
            progress=progress,
        )

    def trace(
        self, profile: Profile, *, full: bool = False, progress: Progress | None = None
    ) -> Frontier:
        """The frontier of the job, from its profile as it was read.

        Args:
            profile: as it was read.
            full, progress: as for trace_frontier.

        Raises:
            InputError: as for pipeline, fitted and trace_frontier.
        """
        pipeline = self.pipeline(profile)
        fitted = self.fitted(profile, pipeline)
        return self.trace_fitted(fitted, pipeline, full=full, progress=progress)
