"""What files of power limits, and of the power of jobs, state; `envplan apply` writes them."""

from __future__ import annotations

from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from envplan._io.documents import (
    Count,
    Document,
    Index,
    Joules,
    Model,
    Seconds,
    Watts,
    check_stated,
)
from envplan.enforce.freqplan import Sha256
from envplan.enforce.power_limits import JOB_SCHEMA, LIMITS_SCHEMA
from envplan.errors import InputError

__all__ = ["StatedJobPower", "StatedPowerLimits"]

#: How far stated percents may lie from their recomputation.
_TOLERANCE: Final = 1e-9


class StatedDrawnPower(Model):
    """Power over an iteration: its average, the most at any time and the largest change."""

    steady_w: Watts
    peak_w: Watts
    ramp_w_per_s: Watts


class StatedJobPower(Document):
    """The power of a job: of its hungriest GPU and node, and of all."""

    kind: ClassVar[str] = "line of a job's power"
    schema_name: ClassVar[str] = JOB_SCHEMA

    schema_id: Literal["envplan/job-power/v1"] = Field(alias="schema")
    plan_sha256: Sha256
    enforced_by: Literal["clocks", "power limits"]
    gpu: StatedDrawnPower
    node: StatedDrawnPower
    job: StatedDrawnPower


class StatedGpu(Model):
    """The power limit of one GPU."""

    rank: Index
    stage: Index
    device: Index
    power_limit_w: Count


class StatedPowerLimits(Document):
    """The power limits of a job's GPUs, and what they cost against a plan's clocks."""

    kind: ClassVar[str] = "file of power limits"
    schema_name: ClassVar[str] = LIMITS_SCHEMA

    schema_id: Literal["envplan/power-limits/v1"] = Field(alias="schema")
    plan_sha256: Sha256
    source: Literal["modelled"]
    iteration_time_s: Seconds
    energy_j: Joules
    clocks_iteration_time_s: Annotated[float, Field(gt=0)]
    clocks_energy_j: Annotated[float, Field(gt=0)]
    more_time_percent: float
    more_energy_percent: float
    gpus: list[StatedGpu]
    power: StatedJobPower
    clocks_power: StatedJobPower

    def check(self) -> None:
        """Check that the file agrees with itself.

        Raises:
            InputError: the first contradiction.
        """
        more_time = 100 * (self.iteration_time_s / self.clocks_iteration_time_s - 1)
        more_energy = 100 * (self.energy_j / self.clocks_energy_j - 1)
        check_stated("more_time_percent", self.more_time_percent, more_time, _TOLERANCE)
        check_stated("more_energy_percent", self.more_energy_percent, more_energy, _TOLERANCE)
        self._check_gpus()
        for name, expected in (("power", "power limits"), ("clocks_power", "clocks")):
            power: StatedJobPower = getattr(self, name)
            check_stated(f"{name}.plan_sha256", power.plan_sha256, self.plan_sha256)
            check_stated(f"{name}.enforced_by", power.enforced_by, expected)

    def _check_gpus(self) -> None:
        limit_of_stage: dict[int, int] = {}
        for number, gpu in enumerate(self.gpus):
            if gpu.rank != number:
                raise InputError(f"gpus[{number}].rank is {gpu.rank}; ranks come in order")
            limit_w = limit_of_stage.setdefault(gpu.stage, gpu.power_limit_w)
            if gpu.power_limit_w != limit_w:
                raise InputError(
                    f"gpus[{number}].power_limit_w is {gpu.power_limit_w}, and {limit_w} for "
                    f"another GPU of stage {gpu.stage}"
                )
