"""The plans that a running job can change between: its frequency plan and the rungs of its ladder.

Where a job of a site has a frequency plan, it follows these and not the plans of its frontier file,
which training does not know. What that costs is in the site plan's gap.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from envplan.enforce.freqplan import FrequencyPlan
from envplan.errors import InputError
from envplan.plan import Rung
from envplan.plan.frontier_file import FrontierFile

__all__ = ["JobLadder"]


@dataclass(frozen=True, eq=False)
class JobLadder:
    """The frequency plan of a running job, with its ladder.

    Attributes:
        freqplan: that its ranks follow.
        source: where it was read.
        sha256: of that file's content.
    """

    freqplan: FrequencyPlan
    source: Path
    sha256: str

    @cached_property
    def rungs(self) -> list[Rung]:
        """The plan itself and its slower rungs, by ascending iteration time.

        Energies are those of all GPUs of the job.
        """
        freqplan = self.freqplan
        clocks = [
            [operation.frequency_mhz for operation in operations]
            for operations in freqplan.stage_operations()
        ]
        configs_of_stage = {rank.stage: rank.configs for rank in freqplan.ranks}
        configs = None
        if any(configs_of_stage.values()):
            configs = [
                configs_of_stage[stage] or [""] * len(of_stage)
                for stage, of_stage in enumerate(clocks)
            ]
        itself = Rung(
            iteration_time_s=freqplan.iteration_time_s,
            energy_j=freqplan.energy_j,
            frequencies_mhz=clocks,
            configs=configs,
        )
        return [itself, *(freqplan.ladder or [])]

    def replicas_of(self, frontier: FrontierFile, stated: int | None) -> int:
        """The data-parallel replicas that it is for.

        Args:
            frontier: of the same job.
            stated: what the site's file says; None where it says nothing.

        Raises:
            InputError: it was not made from the frontier's profile, or is for another job.
        """
        freqplan, job = self.freqplan, frontier.job
        if freqplan.profile_sha256 != frontier.profile.sha256:
            raise InputError("was not made from the profile of the frontier", path=self.source)
        pipeline_gpus = job.stages * job.gpus_per_stage
        if freqplan.layout.stages != job.stages or freqplan.world_size % pipeline_gpus:
            raise InputError(
                f"is for {freqplan.layout.stages} stages on {freqplan.world_size} GPUs; the "
                f"frontier is for {job.stages} stages of {job.gpus_per_stage} GPUs each",
                path=self.source,
            )
        num_operations = sum(map(len, freqplan.stage_operations()))
        planned_operations = sum(map(len, frontier.plans[0].frequencies_mhz))
        if num_operations != planned_operations:
            raise InputError(
                f"has {num_operations} operations of a replica; the frontier has "
                f"{planned_operations}",
                path=self.source,
            )
        replicas = freqplan.world_size // pipeline_gpus
        if stated is not None and stated != replicas:
            raise InputError(f"is for {replicas} replicas, not {stated}", path=self.source)
        return replicas
