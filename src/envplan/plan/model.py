"""Plans: one frequency for every operation, and what they cost.

A plan is a file, plan.json ("envplan/plan/v1"), whose models are below. Times in it are seconds,
energies joules, powers watts; each is the exact integer that envplan counts in (ns, 10 fJ, 10 uW),
correctly rounded to a float and written so that it reads back the same.

`python -m tools.schemas` writes the JSON Schema of the format anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, NamedTuple, Self

from pydantic import ConfigDict, Field, model_validator

from envplan._io.completion import names_for_users
from envplan._io.documents import Count, Document, GpuCount, Index, Joules, Model, Seconds, Watts
from envplan.clocks import Rung
from envplan.costs.model import Costs, TimeAndEnergy
from envplan.errors import InputError
from envplan.frontier import BlockingPowerSource
from envplan.pipeline import Pipeline
from envplan.pipeline.spec import DAG_SCHEDULE, PipelineSpec
from envplan.plan.late_clock_prices import LateClockPrices
from envplan.plan.plan_v1 import request_of_v1
from envplan.plan.target import Target
from envplan.profile import Adjustments, Profile
from envplan.replay import Ask, Machine, Problem
from envplan.request import Request
from envplan.request.limits import Robustness
from envplan.units import in_10fj, in_10uw, j_from_10fj, ns_from_s, w_from_10uw

if TYPE_CHECKING:
    import pandas as pd

PLAN_SCHEMA: Final = "envplan/plan/v1"

#: The operations of a job of so many are made in less than a second.
_QUICKLY_MADE_OPERATIONS: Final = 10_000

#: What the lower bound of a plan follows from: the relaxation alone, the relaxation and what late
#: and held clocks cost at least, or a proof of CP-SAT.
Bound = Literal["relaxation", "late-clocks", "cp-sat"]
BlockingWatts = Annotated[float, Field(ge=0, le=1e5)]


class Job(PipelineSpec):
    """The job: a pipeline, its GPUs, and the power of one that waits."""

    model_config = ConfigDict(extra="forbid")

    chunks: Count
    p2p_latency_s: Seconds | list[Seconds] = Field(
        description="of a transfer; a list has one for each pair of neighbouring stages"
    )
    gpus_per_stage: GpuCount
    replicas: GpuCount
    blocking_power_w: list[BlockingWatts] = Field(description="W of one waiting GPU, per stage")
    blocking_power_source: BlockingPowerSource
    switch_latency_s: Seconds | None = Field(
        None, description="from a clock request until the clock changes; absent: at once"
    )
    ask: Ask | None = Field(
        None,
        description="where clocks come late, whether each is asked for so much ahead of its "
        "operation, or as that starts; absent: as it starts",
    )
    min_dwell_s: Seconds | None = Field(
        None, description="least time between two clock changes of a stage; absent: none"
    )

    @property
    def num_gpus(self) -> int:
        """GPUs that each operation of a plan stands for."""
        return self.gpus_per_stage * self.replicas

    @property
    def all_gpus(self) -> int:
        """GPUs of all stages."""
        return self.num_gpus * self.stages

    def pipeline(self) -> Pipeline:
        """The pipeline described.

        Raises:
            InputError: there is no such pipeline.
        """
        return Pipeline.from_job(self.model_dump(exclude_none=True))

    @property
    def is_in_whole_units(self) -> bool:
        """Whether its powers are counted in units of 10 uW; files of envplan 0.1 may have uW."""
        return all(watts == w_from_10uw(in_10uw(watts)) for watts in self.blocking_power_w)

    @property
    def waiting_10uw(self) -> int:
        """Power of all GPUs while they wait, 10 uW."""
        return sum(map(in_10uw, self.blocking_power_w)) * self.num_gpus

    @property
    def machine(self) -> Machine:
        """How clocks follow requests."""
        return Machine.of(ns_from_s(self.switch_latency_s or 0.0), self.ask)

    def problem(self, profile: Profile) -> Problem:
        """The pipeline with the option tables of a profile.

        Raises:
            InputError: the profile lacks an operation, or powers are missing.
        """
        pipeline, powers = self.pipeline(), self.blocking_power_w
        if len(powers) != pipeline.num_stages:
            raise InputError(
                f"job.blocking_power_w has {len(powers)} values for {pipeline.num_stages} stages"
            )
        return Problem(pipeline, profile, [in_10uw(power) for power in powers])


class ProfileReference(Model):
    """Which profile a plan was made from."""

    name: str
    path: str | None = Field(None, description="as it was given; none for a built-in profile")
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    source: Literal["measured", "modelled"] | None = None
    adjustments: Adjustments | None = Field(
        None, description="absent where the rows were taken as they are"
    )


class Baseline(Model):
    """The same pipeline with every operation at its highest frequency."""

    iteration_time_s: Seconds
    energy_j: Joules
    average_power_w: Watts


class UntilStraggler(Model):
    """Energy until a straggler has finished, all other GPUs' waiting for it included."""

    energy_j: Joules
    energy_lower_bound_j: Joules = Field(description="no plan in time for the straggler uses less")
    gap: float = Field(description="energy_j / energy_lower_bound_j - 1")
    baseline_energy_j: Joules = Field(description="likewise, at maximum frequency")


class Predicted(Model):
    """Predicted time and energy of one iteration, over all GPUs."""

    iteration_time_s: Seconds
    energy_j: Joules
    average_power_w: Watts
    energy_lower_bound_j: Joules = Field(description="no plan that meets the deadline uses less")
    bound: Bound = Field(description="what the lower bound follows from")
    late_clock_prices: LateClockPrices | None = Field(
        None, description="of the bound late-clocks; absent: those of the relaxed optimum"
    )
    gap: float = Field(description="energy_j / energy_lower_bound_j - 1")
    baseline: Baseline
    savings_percent: float = Field(description="energy saved, of the baseline's")
    slowdown_percent: float = Field(description="time lost, of the baseline's")
    robustness: Robustness | None = Field(None, description="absent where times are exact")
    until_straggler: UntilStraggler | None = Field(
        None, description="absent where there is none to wait for"
    )


class Savings(NamedTuple):
    """Savings of one iteration, over all GPUs, against maximum frequency.

    Attributes:
        percent: of the energy at maximum frequency.
        joules: negative where the plan uses more.
    """

    percent: float
    joules: float


class PlannedOperation(Model):
    """One operation; time and energy are those of one GPU at the planned clock all along.

    Where the job has a switch latency, an operation may run at an earlier one's clock for a while:
    start_s and all that is predicted are of the replay with it.
    """

    instruction: str
    microbatch: Index
    chunk: Index
    frequency_mhz: Index
    config: str
    start_s: Seconds
    time_s: Seconds
    energy_j: Joules


class Plan(Document):
    """A frequency for every operation of a pipeline, checked and priced.

    Attributes:
        stages: for each stage its operations in execution order.
        ladder: slower plans by ascending iteration time, for stragglers, each of less energy than
            those before it where there is time; absent if not asked for.
        costs: money and carbon of an iteration and of a run; absent if not asked for.
    """

    kind: ClassVar[str] = "plan"
    schema_name: ClassVar[str] = PLAN_SCHEMA

    def __dir__(self) -> list[str]:
        """Names for a user."""
        return names_for_users(super().__dir__(), ("as_rung", "stated_request", "until"))

    schema_id: Literal["envplan/plan/v1"] = Field(alias="schema")
    planner: str
    job: Job
    profile: ProfileReference
    target: Target
    predicted: Predicted
    stages: list[list[PlannedOperation]]
    ladder: list[Rung] | None = None
    costs: Costs | None = None
    stated_request: Request | None = Field(
        None, alias="request", description="what was asked for, so that it can be asked again"
    )

    @model_validator(mode="after")
    def _refuse_job_of_many_more_operations(self) -> Self:
        """Refuse a job of more operations than the plan lists, if it takes long to make them.

        Those of other jobs are made, and the first that differs is named.
        """
        job, num_listed = self.job, sum(map(len, self.stages))
        if job.schedule == DAG_SCHEDULE:
            return self
        # A microbatch goes forward and backward through every chunk.
        least = 2 * job.stages * job.chunks * job.microbatches
        if least > max(num_listed, _QUICKLY_MADE_OPERATIONS):
            raise ValueError(
                f"stages lists {num_listed} operations; {job.microbatches} microbatches on "
                f"{job.stages} stages of {job.chunks} chunks make at least {least}"
            )
        return self

    @property
    def request(self) -> Request:
        """The request; of a file that does not state one, what its other fields tell."""
        if self.stated_request is not None:
            return self.stated_request
        return request_of_v1(
            self.target,
            switch_latency_s=self.job.switch_latency_s or 0.0,
            ask=self.job.ask,
            min_dwell_s=self.job.min_dwell_s or 0.0,
            robustness=self.predicted.robustness,
            run=None if self.costs is None else self.costs.of_run(),
            num_rungs=None if self.ladder is None else len(self.ladder),
        )

    @property
    def iteration_time(self) -> float:
        """Replayed makespan, s."""
        return self.predicted.iteration_time_s

    @property
    def energy(self) -> float:
        """J per iteration over all GPUs, waiting included."""
        return self.predicted.energy_j

    @property
    def average_power(self) -> float:
        """W over all GPUs."""
        return self.predicted.average_power_w

    @property
    def energy_lower_bound(self) -> float:
        """J that no plan for the same deadline can undercut."""
        return self.predicted.energy_lower_bound_j

    @property
    def clock_changes(self) -> int:
        """How often operations of an iteration ask for another clock than the one before them.

        On each stage, the first one's is compared with the clock that the last one leaves. Clocks
        by part that change within an operation are not counted.
        """
        return sum(self.clock_changes_by_stage)

    @property
    def clock_changes_by_stage(self) -> list[int]:
        """The same for each stage."""
        by_stage = []
        for stage in self.stages:
            asked_mhz = [op.frequency_mhz for op in stage if op.frequency_mhz]
            before_mhz = asked_mhz[-1:] + asked_mhz[:-1]
            pairs = zip(before_mhz, asked_mhz, strict=True)
            by_stage.append(sum(before != after for before, after in pairs))
        return by_stage

    @property
    def gap(self) -> float:
        """The energy over its lower bound, less 1: at most this fraction of the bound is lost."""
        return self.predicted.gap

    @property
    def savings(self) -> Savings:
        """Percent and joules that one iteration saves against maximum frequency."""
        saved_j = self.predicted.baseline.energy_j - self.energy
        return Savings(self.predicted.savings_percent, saved_j)

    @property
    def frequencies(self) -> list[list[int]]:
        """MHz of each stage's operations in execution order."""
        return [[operation.frequency_mhz for operation in stage] for stage in self.stages]

    def waiting_energy(self, sync_time: float, *, since: float | None = None) -> float:
        """J that all GPUs together draw while they wait for a straggler.

        Args:
            sync_time: s; when the straggler ends.
            since: s; when the wait begins, default: when this plan's iteration ends.
        """
        begin_s = self.iteration_time if since is None else since
        waiting_ns = max(0, ns_from_s(sync_time) - ns_from_s(begin_s))
        return j_from_10fj(self.job.waiting_10uw * waiting_ns)

    def until(self, sync_time: float, time: float, energy: float) -> TimeAndEnergy:
        """Time and energy of an iteration of this job, s and J, that waits for a straggler.

        Args:
            sync_time: s; when the straggler ends.
            time, energy: of the iteration alone.
        """
        waiting_j = self.waiting_energy(sync_time, since=time)
        return TimeAndEnergy(max(time, sync_time), energy + waiting_j)

    @property
    def effective_10fj(self) -> int:
        """Energy above that of waiting for as long, all GPUs, 10 fJ.

        Of two plans in time for a straggler, the one with less uses less until it is finished.
        """
        return in_10fj(self.energy) - self.job.waiting_10uw * ns_from_s(self.iteration_time)

    def with_ladder(self, plans: Sequence[Plan]) -> Self:
        """This plan, carrying those of `plans`, by ascending time, that are worth following.

        Each is slower than the one before, the first than this plan, and uses less until any time
        after both.
        """
        best: Plan = self
        rungs = []
        for plan in plans:
            slower = plan.iteration_time > best.iteration_time
            if slower and plan.effective_10fj < best.effective_10fj:
                rungs.append(plan.as_rung())
                best = plan
        return self.model_copy(update={"ladder": rungs})

    def as_rung(self) -> Rung:
        """This plan in the short form that a ladder holds."""
        configs = [[operation.config for operation in stage] for stage in self.stages]
        return Rung(
            iteration_time_s=self.iteration_time,
            energy_j=self.energy,
            frequencies_mhz=self.frequencies,
            configs=configs if any(any(stage) for stage in configs) else None,
        )

    def to_dataframe(self) -> pd.DataFrame:
        """One row an operation, by stage and in execution order; energy is that of one GPU."""
        import pandas as pd

        rows: list[dict[str, Any]] = []
        for stage, operations in enumerate(self.stages):
            rows += [{"stage": stage, **operation.model_dump()} for operation in operations]
        return pd.DataFrame(rows)

    def __repr__(self) -> str:
        return (
            f"Plan({self.profile.name!r}, {self.iteration_time:.6g} s, {self.energy:.6g} J, "
            f"{self.predicted.savings_percent:.2f}% saved)"
        )

    __str__ = __repr__

    def _repr_html_(self) -> str:
        """Its figures beside those of maximum frequency, as a table."""
        import pandas as pd

        baseline, planned = self.predicted.baseline, self.predicted
        modelled = " (modelled)" if self.profile.source == "modelled" else ""
        rows = {
            "iteration time (s)": (baseline.iteration_time_s, planned.iteration_time_s),
            "energy (J)": (baseline.energy_j, planned.energy_j),
            "average power (W)": (baseline.average_power_w, planned.average_power_w),
            "saved (%)": ("", f"{planned.savings_percent:.2f}"),
            "slower (%)": ("", f"{planned.slowdown_percent:.2f}"),
            "certified gap (%)": ("", f"{100 * planned.gap:.3f}"),
        }
        columns = [self.profile.name + modelled, "maximum frequency", f"planner {self.planner}"]
        table = pd.DataFrame([(name, *row) for name, row in rows.items()], columns=columns)
        text: str = table.to_html(index=False)
        return text
