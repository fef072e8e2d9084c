"""Plans: one frequency for every operation, what they cost, and the proof that this is so.

A plan is a file, plan.json ("envplan/plan/v1"), whose models are below. Times in it are seconds,
energies joules, powers watts; each is the exact integer that envplan counts in (ns, fJ, uW),
correctly rounded to a float and written so that it reads back the same.

`python -m envplan.plan` writes the JSON Schema of the format anew.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from envplan._files import atomic_write, parse_json, read_bounded
from envplan.costs import MAX_ITERATIONS, Costs
from envplan.errors import InputError, shown
from envplan.pipeline import Pipeline
from envplan.profile import OptionTable, Profile, builtin_paths
from envplan.units import (
    UW_PER_W,
    fj_from_j,
    j_from_fj,
    ns_from_s,
    s_from_ns,
    uw_from_w,
    w_from_uw,
)

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "PLAN_SCHEMA",
    "Baseline",
    "Job",
    "Plan",
    "PlannedOperation",
    "Predicted",
    "Priced",
    "ProfileReference",
    "Robustness",
    "Rung",
    "Target",
    "UntilStraggler",
    "build_plan",
    "first_problem",
    "gap_over",
    "json_schema",
    "max_frequency_baseline",
    "max_frequency_options",
    "option_tables",
    "predict",
    "price",
    "read_json",
    "readable_json",
    "rows_by_knobs",
    "until_straggler",
]

PLAN_SCHEMA: Final = "envplan/plan/v1"
MAX_PLAN_BYTES: Final = 256 * 2**20
SCHEMA_FILE: Final = Path(__file__).parent / "schemas" / "plan.v1.schema.json"

BlockingPowerSource = Literal["profile", "argument", "default"]
TargetKind = Literal[
    "no-slowdown",
    "time",
    "slowdown",
    "min-energy",
    "energy-budget",
    "power-cap",
    "peak-power-cap",
    "sync-time",
    "max-frequency",
    "planner",
]
Bound = Literal["relaxation", "cp-sat"]
Seconds = Annotated[float, Field(ge=0)]
Joules = Annotated[float, Field(ge=0)]
Watts = Annotated[float, Field(ge=0)]
Index = Annotated[int, Field(ge=0, lt=2**31)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
GpuCount = Annotated[int, Field(ge=1, le=10**6)]
BlockingWatts = Annotated[float, Field(ge=0, le=1e5)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Job(_Model):
    """What runs: a pipeline, on how many GPUs, and what one of them draws while it waits."""

    schedule: str
    stages: Count
    microbatches: Count
    chunks: Count
    p2p_latency_s: Seconds | list[Seconds] = Field(
        description="of a transfer; a list has one for each pair of neighbouring stages"
    )
    forwards_ahead: list[Index] | None = Field(
        None, description="schedule envpipe: forwards before the first backward beyond 1F1B's"
    )
    extras: dict[str, list[Index]] | None = Field(
        None,
        description="operations beside forwards and backwards, and which model stages have them",
    )
    dag: dict[str, Any] | None = None
    gpus_per_stage: GpuCount
    replicas: GpuCount
    blocking_power_w: list[BlockingWatts] = Field(description="W of one waiting GPU, per stage")
    blocking_power_source: BlockingPowerSource
    switch_latency_s: Seconds | None = Field(
        None, description="from a clock request until the clock changes; absent: at once"
    )
    min_dwell_s: Seconds | None = Field(
        None, description="least time between two clock changes of a stage; absent: none"
    )

    @property
    def num_gpus(self) -> int:
        """GPUs that each operation of a plan stands for."""
        return self.gpus_per_stage * self.replicas

    def above_waiting_fj(self, time_s: float, energy_j: float) -> int:
        """What an iteration uses above what waiting for as long would, all GPUs, fJ.

        Of two iterations in time for a straggler, the one with less uses less until it is finished.
        """
        power_uw = sum(uw_from_w(power) for power in self.blocking_power_w)
        return fj_from_j(energy_j) - power_uw * ns_from_s(time_s) * self.num_gpus

    def pipeline(self) -> Pipeline:
        """The pipeline described.

        Raises:
            InputError: there is no such pipeline.
        """
        return Pipeline.from_job(self.model_dump(exclude_none=True))


class AppliedAdjustments(_Model):
    """What was derived from a profile's rows; see envplan.adjustments.Adjustments."""

    recompute: bool = Field(False, description="the forward was added to the backward")
    backward_input_share: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None, description="backward was split, this share of it into backward_input"
    )
    joined_backward: bool = Field(
        False, description="backward_input and backward_weight were added up"
    )


class ProfileReference(_Model):
    """Which profile a plan was made from."""

    name: str
    path: str | None = Field(None, description="as it was given; none for a built-in profile")
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    source: Literal["measured", "modelled"] | None = None
    adjustments: AppliedAdjustments | None = Field(
        None, description="absent where the rows were taken as they are"
    )


class Target(_Model):
    """What was asked for, and the deadline that planning came to meet for it."""

    kind: TargetKind
    time_s: Seconds | None = None
    slowdown: Annotated[float, Field(ge=0)] | None = Field(None, description="fraction of T_min")
    energy_j: Joules | None = None
    power_w: Watts | None = None
    peak_power_w: Watts | None = Field(
        None, description="W over all GPUs at any moment of the replay"
    )
    straggler_time_s: Seconds | None = None
    deadline_s: Seconds = Field(description="the time the plan and its lower bound are for")


class Baseline(_Model):
    """The same pipeline with every operation at its highest frequency."""

    iteration_time_s: Seconds
    energy_j: Joules
    average_power_w: Watts


class Robustness(_Model):
    """How sure it is that a plan holds its target under noise.

    Each operation's time is multiplied by a lognormal factor of its own with mean 1.
    """

    probability: Annotated[float, Field(gt=0, lt=1)] = Field(description="asked for")
    noise: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None,
        description="standard deviation of times, as a fraction of them; absent: by the profile's "
        "column time_std",
    )
    seed: Index
    runs: Count = Field(le=10**6, description="replays with noise drawn from the seed")
    held_runs: Index = Field(description="those of them that ended by the target")
    confidence: Annotated[float, Field(gt=0, lt=1)]
    share_at_least: Annotated[float, Field(ge=0, le=1)] = Field(
        description="the probability that this proves with the confidence (Clopper and Pearson; of "
        "a run by Cantelli's inequality)"
    )
    iterations: Annotated[int, Field(ge=1, le=MAX_ITERATIONS)] | None = Field(
        None,
        description="what is sure to be over by the deadline under costs is a run of so many; "
        "absent: one iteration by the target",
    )

    @property
    def percent_at_least(self) -> str:
        """share_at_least in percent, rounded down."""
        return f"{math.floor(1e4 * self.share_at_least) / 100:.2f}%"


class UntilStraggler(_Model):
    """What is used until a straggler has finished, all other GPUs' waiting for it included."""

    energy_j: Joules
    energy_lower_bound_j: Joules = Field(description="no plan in time for the straggler uses less")
    gap: float = Field(description="energy_j / energy_lower_bound_j - 1")
    baseline_energy_j: Joules = Field(description="likewise, at maximum frequency")


class Predicted(_Model):
    """What one iteration will take, over all GPUs."""

    iteration_time_s: Seconds
    energy_j: Joules
    average_power_w: Watts
    energy_lower_bound_j: Joules = Field(description="no plan that meets the deadline uses less")
    bound: Bound = Field(description="what the lower bound follows from")
    gap: float = Field(description="energy_j / energy_lower_bound_j - 1")
    baseline: Baseline
    savings_percent: float = Field(description="energy saved, of the baseline's")
    slowdown_percent: float = Field(description="time lost, of the baseline's")
    robustness: Robustness | None = Field(None, description="absent where times are exact")
    until_straggler: UntilStraggler | None = Field(
        None, description="absent where there is none to wait for"
    )


class PlannedOperation(_Model):
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


class Rung(_Model):
    """A further plan of the same job, for when a straggler makes everyone wait.

    Attributes:
        frequencies_mhz: MHz of each stage's operations in execution order.
        configs: likewise; absent where no operation has one.
    """

    iteration_time_s: Seconds
    energy_j: Joules
    frequencies_mhz: list[list[Index]]
    configs: list[list[str]] | None = None


class Plan(_Model):
    """A frequency for every operation of a pipeline, checked and priced.

    Attributes:
        stages: for each stage its operations in execution order.
        ladder: slower plans by ascending iteration time, for stragglers, each of less energy than
            those before it where there is time; absent if not asked for.
        costs: money and carbon of an iteration and of a run; absent if not asked for.
    """

    schema_id: Literal["envplan/plan/v1"] = Field(alias="schema")
    planner: str
    job: Job
    profile: ProfileReference
    target: Target
    predicted: Predicted
    stages: list[list[PlannedOperation]]
    ladder: list[Rung] | None = None
    costs: Costs | None = None

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
    def gap(self) -> float:
        """energy / energy_lower_bound - 1: at most this fraction of the bound is lost."""
        return self.predicted.gap

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
        begin = self.iteration_time if since is None else since
        ns = max(0, ns_from_s(sync_time) - ns_from_s(begin))
        powers_uw = [uw_from_w(power) for power in self.job.blocking_power_w]
        return j_from_fj(sum(powers_uw) * ns * self.job.num_gpus)

    def with_straggler(self, time: float, lower_bound: float | None = None) -> Self:
        """This plan, with a note that it was made to wait for a straggler of `time` s.

        Args:
            lower_bound: J that no plan in time for it uses less than until then, where known.
        """
        target = self.target.model_copy(update={"straggler_time_s": time})
        until = None if lower_bound is None else until_straggler(self, time, lower_bound)
        predicted = self.predicted.model_copy(update={"until_straggler": until})
        return self.model_copy(update={"target": target, "predicted": predicted})

    def beats_where_there_is_time(self, other: Plan) -> bool:
        """Whether this uses less than another plan of the same job until any time after both."""
        mine, others = (
            self.job.above_waiting_fj(plan.iteration_time, plan.energy) for plan in (self, other)
        )
        return mine < others

    def with_ladder(self, plans: Sequence[Plan]) -> Self:
        """This plan, carrying those of `plans`, by ascending time, that are worth following.

        Each is slower than the one before, the first than this plan, and uses less until any time
        after both.
        """
        best: Plan = self
        rungs = []
        for plan in plans:
            slower = plan.iteration_time > best.iteration_time
            if slower and plan.beats_where_there_is_time(best):
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
        from envplan.plotting.notebook import plan_frame

        return plan_frame(self)

    def _repr_html_(self) -> str:
        from envplan.plotting.notebook import plan_html

        return plan_html(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write plan.json, whole or not at all.

        Raises:
            InputError: it cannot be written there.
        """
        atomic_write(path, self.to_json())

    def to_json(self) -> str:
        """The text of plan.json: readable, with one operation a line."""
        document = self.model_dump(by_alias=True, exclude_none=True)
        return readable_json(document)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a plan and check its form; verify_plan checks what it says.

        Raises:
            InputError: the file cannot be read, is larger than 256 MiB, is not JSON (says line and
                column) or not a plan (names the field).
        """
        return cls.from_document(read_json(path), path=path)

    @classmethod
    def from_document(cls, document: object, *, path: str | os.PathLike[str] | None = None) -> Self:
        """A plan from a JSON value as parsed.

        Args:
            path: the file that errors shall name.

        Raises:
            InputError: it is not a plan; names the field.
        """
        found = document.get("schema") if isinstance(document, dict) else None
        if found != PLAN_SCHEMA:
            raise InputError(
                f'is not a plan: its schema must be "{PLAN_SCHEMA}", not {shown(found)}', path=path
            )
        try:
            return cls.model_validate(document)
        except ValidationError as error:
            raise InputError(first_problem(error, "plan"), path=path) from None


def read_json(path: str | os.PathLike[str], max_bytes: int = MAX_PLAN_BYTES) -> object:
    """The JSON value in a file of at most `max_bytes`.

    Raises:
        InputError: the file cannot be read, is too large or is not JSON; says line and column.
    """
    return parse_json(read_bounded(path, max_bytes), path)


def first_problem(error: ValidationError, kind: str) -> str:
    """Field and complaint of the first of the errors of a file of some kind, in one line."""
    first = error.errors(include_url=False)[0]
    where = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in first["loc"])
    field = where.removeprefix(".")
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    match first["type"]:
        case "missing":
            return f"{field} is missing{more}"
        case "extra_forbidden":
            return f"{field} is not a field of a {kind}{more}"
        case _:
            complaint = first["msg"].replace("Input should", "should", 1)
            complaint = re.sub("a valid dictionary.*", "an object", complaint)
            return f"{field} {complaint}, not {shown(first['input'])}{more}"


def readable_json(document: object) -> str:
    """JSON text with a field a line and, in lists, an object a line; floats read back the same."""
    return _readable(document, 0) + "\n"


def _readable(value: object, depth: int) -> str:
    inner, outer = "  " * (depth + 1), "  " * depth
    if isinstance(value, dict) and value:
        fields = [f"{inner}{json.dumps(k)}: {_readable(v, depth + 1)}" for k, v in value.items()]
        return "{\n" + ",\n".join(fields) + f"\n{outer}}}"
    if isinstance(value, list) and value and isinstance(value[0], list | dict):
        dump = _readable if isinstance(value[0], list) else _one_line
        return "[\n" + ",\n".join(inner + dump(v, depth + 1) for v in value) + f"\n{outer}]"
    return _one_line(value, depth)


def _one_line(value: object, _depth: int) -> str:
    return json.dumps(value, allow_nan=False)


class Priced(NamedTuple):
    """An exact replay for one GPU per stage and one replica.

    Attributes:
        starts_ns: when each operation starts, (N), ns.
        makespan_ns: when the last one ends, ns.
        energy_fj: of all operations and all waiting until then, fJ.
    """

    starts_ns: NDArray[np.int64]
    makespan_ns: int
    energy_fj: int


def price(
    pipeline: Pipeline,
    profile: Profile,
    options: NDArray[np.int32],
    blocking_power_uw: Sequence[int],
) -> Priced:
    """Replay a choice of options and add up its energy, both exactly.

    E = sum of e_op + sum over stages of P_s (T - busy_s): the energy of Perseus (SOSP 2024,
    section 4.1), with T the makespan.

    Args:
        options: for each operation the row of its option table, (N).
        blocking_power_uw: power of a waiting GPU on each stage, (num_stages,), uW.

    Raises:
        InputError: the profile lacks an operation, or the iteration is too long for 64 bits.
    """
    time_ns, energy_fj = _costs(pipeline, profile, options)
    starts, makespan = pipeline.earliest_starts(time_ns)
    total = sum(energy_fj.tolist())
    for power, (first, last) in zip(
        blocking_power_uw, pairwise(pipeline.stage_begin.tolist()), strict=True
    ):
        total += int(power) * (makespan - int(time_ns[first:last].sum()))
    return Priced(starts, makespan, total)


def _costs(
    pipeline: Pipeline, profile: Profile, options: NDArray[np.int32]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Time (ns) and energy (fJ) of each operation, (N)."""
    tables = option_tables(pipeline, profile)
    rows = [(table, row) for table, row in zip(tables, options.tolist(), strict=True)]
    time = np.array([table.time_ns[row] for table, row in rows], np.int64)
    energy = np.array([table.energy_fj[row] for table, row in rows], np.int64)
    return time, energy


def option_tables(pipeline: Pipeline, profile: Profile) -> list[OptionTable]:
    """The option table of each operation, (N)."""
    return [profile.table(op.profile_stage, op.instruction) for op in pipeline.operations]


def rows_by_knobs(pipeline: Pipeline, profile: Profile) -> list[dict[tuple[int, str], int]]:
    """For each operation, (N), the row of its option table at each (MHz, config).

    Operations with one table share one dictionary.
    """
    known: dict[int, dict[tuple[int, str], int]] = {}
    rows = []
    for table in option_tables(pipeline, profile):
        if id(table) not in known:
            knobs = zip(table.frequency_mhz.tolist(), table.config, strict=True)
            known[id(table)] = {knob: row for row, knob in enumerate(knobs)}
        rows.append(known[id(table)])
    return rows


def max_frequency_options(pipeline: Pipeline, profile: Profile) -> NDArray[np.int32]:
    """The row of each operation's highest frequency, (N)."""
    best: dict[int, int] = {}
    rows = []
    for table in option_tables(pipeline, profile):
        if id(table) not in best:
            best[id(table)] = table.max_frequency_option
        rows.append(best[id(table)])
    return np.array(rows, np.int32)


def max_frequency_baseline(
    pipeline: Pipeline,
    profile: Profile,
    *,
    blocking_power_uw: Sequence[int],
    gpus_per_stage: int,
    replicas: int,
) -> Baseline:
    """What the pipeline takes with every operation at its highest frequency.

    Raises:
        InputError: as for price.
    """
    options = max_frequency_options(pipeline, profile)
    priced = price(pipeline, profile, options, blocking_power_uw)
    energy_fj = priced.energy_fj * gpus_per_stage * replicas
    return Baseline(
        iteration_time_s=s_from_ns(priced.makespan_ns),
        energy_j=j_from_fj(energy_fj),
        average_power_w=_average_power(energy_fj, priced.makespan_ns),
    )


def _average_power(energy_fj: int, time_ns: int) -> float:
    return energy_fj / (time_ns * UW_PER_W)


def build_plan(
    pipeline: Pipeline,
    profile: Profile,
    options: NDArray[np.int32],
    *,
    blocking_power_uw: Sequence[int],
    blocking_power_source: BlockingPowerSource,
    gpus_per_stage: int,
    replicas: int,
    target: dict[str, float | str],
    lower_bound_fj: int,
    bound: str,
    planner: str = "frontier",
    deadline_ns: int,
    baseline: Baseline | None = None,
) -> Plan:
    """Replay and price a choice of options, and put it into words.

    Args:
        options: for each operation the row of its option table, (N).
        blocking_power_uw: power of a waiting GPU on each stage, (num_stages,), uW.
        blocking_power_source: where these powers come from.
        gpus_per_stage: GPUs that run each stage together.
        replicas: data-parallel replicas.
        target: what was asked: `kind` and the number that goes with it (see Target).
        lower_bound_fj: least energy possible by the deadline, fJ, of one GPU per stage and one
            replica.
        bound: what that follows from, "relaxation" or "cp-sat".
        planner: what chose the options.
        deadline_ns: the time that was planned for, ns.
        baseline: max_frequency_baseline of the same, where it is known already.

    Raises:
        InputError: the profile lacks an operation, or the iteration is too long for 64 bits.
    """
    scale = gpus_per_stage * replicas
    priced = price(pipeline, profile, options, blocking_power_uw)
    predicted = predict(
        priced.makespan_ns,
        priced.energy_fj * scale,
        max(0, int(lower_bound_fj)) * scale,
        bound,
        baseline
        or max_frequency_baseline(
            pipeline,
            profile,
            blocking_power_uw=blocking_power_uw,
            gpus_per_stage=gpus_per_stage,
            replicas=replicas,
        ),
    )
    job = Job(
        **pipeline.to_job(),
        gpus_per_stage=gpus_per_stage,
        replicas=replicas,
        blocking_power_w=[w_from_uw(power) for power in blocking_power_uw],
        blocking_power_source=blocking_power_source,
    )
    return Plan(
        schema=PLAN_SCHEMA,
        planner=planner,
        job=job,
        profile=_reference(profile),
        target=Target.model_validate({**target, "deadline_s": s_from_ns(deadline_ns)}),
        predicted=predicted,
        stages=_planned(pipeline, profile, options, priced.starts_ns),
    )


def predict(
    time_ns: int, energy_fj: int, bound_fj: int, bound: str, baseline: Baseline
) -> Predicted:
    energy, least = j_from_fj(energy_fj), j_from_fj(bound_fj)
    return Predicted.model_validate(
        {
            "iteration_time_s": s_from_ns(time_ns),
            "energy_j": energy,
            "average_power_w": _average_power(energy_fj, time_ns),
            "energy_lower_bound_j": least,
            "bound": bound,
            "gap": gap_over(energy, least),
            "baseline": baseline,
            "savings_percent": _percent(baseline.energy_j - energy, baseline.energy_j),
            "slowdown_percent": _percent(
                s_from_ns(time_ns) - baseline.iteration_time_s, baseline.iteration_time_s
            ),
        }
    )


def until_straggler(plan: Plan, time: float, lower_bound: float) -> UntilStraggler:
    """What a plan and its waiting for a straggler of `time` s cost, against a lower bound in J."""
    baseline = plan.predicted.baseline
    waiting = plan.waiting_energy(time, since=baseline.iteration_time_s)
    energy = plan.energy + plan.waiting_energy(time)
    return UntilStraggler(
        energy_j=energy,
        # Both are rounded to floats.
        energy_lower_bound_j=min(lower_bound, energy),
        gap=gap_over(energy, lower_bound),
        baseline_energy_j=baseline.energy_j + waiting,
    )


def gap_over(energy_j: float, bound_j: float) -> float:
    # A profile may say that everything is free; then nothing is lost either.
    return energy_j / max(bound_j, j_from_fj(1)) - 1 if energy_j > bound_j else 0.0


def _percent(part: float, whole: float) -> float:
    return 100 * part / whole if whole else 0.0


def _planned(
    pipeline: Pipeline,
    profile: Profile,
    options: NDArray[np.int32],
    starts_ns: NDArray[np.int64],
) -> list[list[PlannedOperation]]:
    stages: list[list[PlannedOperation]] = [[] for _ in range(pipeline.num_stages)]
    for op, row, start in zip(
        pipeline.operations, options.tolist(), starts_ns.tolist(), strict=True
    ):
        table = profile.table(op.profile_stage, op.instruction)
        stages[op.stage].append(
            PlannedOperation(
                instruction=op.instruction,
                microbatch=op.microbatch,
                chunk=op.chunk,
                frequency_mhz=int(table.frequency_mhz[row]),
                config=table.config[row],
                start_s=s_from_ns(start),
                time_s=s_from_ns(table.time_ns[row]),
                energy_j=j_from_fj(table.energy_fj[row]),
            )
        )
    return stages


def _reference(profile: Profile) -> ProfileReference:
    is_builtin = profile.path is not None and builtin_paths().get(profile.name) == profile.path
    path = None if profile.path is None or is_builtin else profile.path.as_posix()
    return ProfileReference.model_validate(
        {
            "name": _utf8(profile.name),
            "path": None if path is None else _utf8(path),
            "sha256": profile.sha256,
            "source": profile.metadata.source,
            "adjustments": profile.adjustments.to_dict() or None,
        }
    )


def _utf8(name: str) -> str:
    # File names on Linux are bytes, and need not be text.
    return name.encode("utf-8", "replace").decode("utf-8")


def write_schema() -> None:
    """Write the JSON Schema of plan.json, generated from the models, to SCHEMA_FILE."""
    atomic_write(SCHEMA_FILE, schema_text())


def schema_text() -> str:
    """The JSON Schema of plan.json."""
    return json_schema(Plan)


def json_schema(model: type[BaseModel]) -> str:
    """The text of a model's JSON Schema file."""
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **model.model_json_schema(),
    }
    return json.dumps(schema, indent=2) + "\n"


if __name__ == "__main__":
    write_schema()
