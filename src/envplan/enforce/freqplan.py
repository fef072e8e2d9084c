"""Frequency plans: what every rank of a training job sets its clock to, operation by operation.

A frequency plan is a file, run.freqplan.json ("envplan/freqplan/v1"), that `envplan apply` makes
from a plan and that the runtime shim reads; its models are below. Two other formats hold less: a
CSV, and the text file that the server of Zeus's pipeline frequency optimizer reads.

`python -m tools.schemas` writes the JSON Schema of the format anew.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Annotated, ClassVar, Final, Literal, NamedTuple, Self

from pydantic import Field, GetCoreSchemaHandler, Strict
from pydantic_core import CoreSchema, core_schema

from envplan._io.documents import Count, Document, Index, Joules, Model, Seconds, Watts
from envplan._io.files import AnyPath
from envplan.clocks import Rung, parse_clock_requests
from envplan.enforce.topology import Topology
from envplan.errors import InputError, naming

FREQPLAN_SCHEMA: Final = "envplan/freqplan/v1"

#: Operations of all ranks together that a file may hold: about 150 MB of text.
MAX_OPERATIONS: Final = 4_000_000

CSV_COLUMNS: Final = (
    *("rank", "stage", "device", "position"),
    *("instruction", "microbatch", "chunk", "frequency_mhz"),
)

ClockSource = Literal["modelled", "given", "nvml", "profile"]
Megahertz = Annotated[int, Field(ge=1, le=10**6)]
MegahertzOrNone = Annotated[int, Field(ge=0, le=10**6)]
MegahertzText = Annotated[str, Field(pattern="^[1-9][0-9]{0,5}$")]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class OperationKey(NamedTuple):
    """One operation among those of its stage: in every iteration there is one with this key."""

    instruction: str
    microbatch: int
    chunk: int

    def __str__(self) -> str:
        """Words such as "forward 3 of chunk 1"; chunk 0 is not named."""
        text = f"{self.instruction} {self.microbatch}"
        return f"{text} of chunk {self.chunk}" if self.chunk else text


class ClockedOperation(NamedTuple):
    """An operation with the clock that it runs at; in the file a list of these four.

    Attributes:
        instruction: its kind of computation.
        microbatch: from 0.
        chunk: the model chunk, from 0.
        frequency_mhz: 0 leaves the clock as it is.
    """

    instruction: str
    microbatch: int
    chunk: int
    frequency_mhz: int

    @property
    def key(self) -> OperationKey:
        """The operation without its clock."""
        return OperationKey(self.instruction, self.microbatch, self.chunk)

    @classmethod
    def __get_pydantic_core_schema__(
        cls, _source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        # JSON has no tuples, so a list is read. A NamedTuple's own schema is slower by far.
        fields = Annotated[tuple[str, Index, Index, MegahertzOrNone], Strict(False)]
        return core_schema.no_info_after_validator_function(
            cls._make, handler.generate_schema(fields)
        )


class StageClocks(Model):
    """The SM clocks that the GPU of a stage can be set to.

    Attributes:
        gpu: its name; None if nobody said.
        clocks_source: where they come from.
        supported_clocks_mhz: ascending.
    """

    gpu: str | None = None
    clocks_source: ClockSource
    supported_clocks_mhz: list[Megahertz]


class StageEnergy(Model):
    """J that one GPU of a stage uses in an iteration by the profile, waiting included."""

    planned_j: Joules = Field(description="with the clocks written here")
    baseline_j: Joules = Field(description="with every operation at its highest frequency")


class StagePower(Model):
    """W of one GPU of a stage by the profile, for checks of power limits.

    Attributes:
        highest_w: the largest average power of an operation at the clock written here.
        profile_limit_w: the power limit that the profile was measured or modelled with; absent
            where its sidecar does not say.
    """

    highest_w: Watts
    profile_limit_w: Watts | None = None


class RaisedClock(Model):
    """Operations whose planned clock the GPU does not have, and the clock they got instead."""

    stage: Index
    instruction: str
    planned_mhz: Megahertz
    applied_mhz: Megahertz
    operations: Count
    profiled: bool = Field(
        description="whether the profile knows the applied clock; if not, time and energy are "
        "counted as planned"
    )


class StageTimes(Model):
    """The planned times of a stage's operations, in execution order.

    Attributes:
        waits_s: from the end of the operation before until each begins, s; for the first one from
            the begin of the iteration.
        durations_s: of each, s.
    """

    waits_s: list[Seconds]
    durations_s: list[Seconds]


class Switching(Model):
    """How long clocks take to change, and what the shim needs to ask for them ahead.

    Attributes:
        ask: whether clocks are asked for so long `ahead`, or as operations `start`.
        latency_s: from a request until the clock has changed, s, by which the plan was made.
        latency_by_mhz: how long ahead each clock is asked for, s, by MHz as text, such as a 95th
            percentile; absent where only the one figure is known.
        source: of the latency: `measured`, as the profile's sidecar has it, or `given`.
        times: of the plan, and then of each rung of its ladder: the times of each stage. Absent
            where clocks are asked for as operations start.
    """

    ask: Literal["ahead", "start"]
    latency_s: Seconds
    latency_by_mhz: dict[MegahertzText, Seconds] | None = None
    source: str
    times: list[list[StageTimes]] | None = None

    def latency_to(self, mhz: int) -> float:
        """How long ahead a clock is asked for, s."""
        return (self.latency_by_mhz or {}).get(str(mhz), self.latency_s)

    def times_of(self, schedule: int, stage: int) -> StageTimes | None:
        """The planned times of a stage; None: clocks are not asked for ahead.

        Args:
            schedule: 0 for the plan itself, 1 for the first rung of its ladder, and so on.
            stage: of the pipeline.
        """
        if self.ask != "ahead" or self.times is None:
            return None
        return self.times[schedule][stage]


class RankPlan(Model):
    """One rank's part.

    Attributes:
        rank: global rank.
        stage: the pipeline stage it runs.
        device: index of its GPU on its node.
        clocks_mhz: all clocks it will ask for, ladder included, ascending; the GPU has them all.
        operations: in execution order.
        configs: the config of each operation, "" where it has none, for the training code to
            set; for an operation whose parts have clocks of their own these, as in
            "@attention=1410 @mlp=990": from which part on which clock; absent where no operation
            of the job has one.
    """

    rank: Index
    stage: Index
    device: Index
    clocks_mhz: list[Megahertz]
    operations: list[ClockedOperation]
    configs: list[str] | None = None

    @property
    def frequencies(self) -> list[int]:
        """MHz of its operations in execution order."""
        return [operation.frequency_mhz for operation in self.operations]

    def config_of(self, position: int) -> str:
        """The config of an operation by its place in execution order; "" where it has none."""
        return self.configs[position] if self.configs else ""


class FrequencyPlan(Document):
    """The clocks that every rank of a job sets, checked.

    Attributes:
        plan_sha256: of the plan.json it was made from.
        profile_sha256: of the profile that plan was made from.
        gpu: name of the GPU it is for; absent if nobody said, or stages run on different ones.
        clocks_source: where supported_clocks_mhz come from.
        supported_clocks_mhz: SM clocks of that GPU, or of all of them together, ascending.
        stage_gpus: for each stage its own GPU; absent where all run on the same.
        deadline_s: the time the plan is for.
        iteration_time_s: replayed with the clocks written here; no later than the plan's.
        energy_j: per iteration over all GPUs, waiting included.
        stage_energies: of one GPU of each stage; absent in files of older versions.
        stage_power: of one GPU of each stage; absent in files of older versions.
        raised: planned clocks that the GPU does not have.
        dwell: in files of older versions, what it took to make clocks last.
        min_dwell_s: so long clocks shall last, s, for which the plan was planned again; absent
            where it was applied as it is.
        switching: how long clocks take to change; absent where they are taken to come at once,
            and in files of older versions.
        ranks: every global rank, in order; those of one stage have the same operations.
        ladder: slower rungs by ascending iteration time; absent if the plan has none.
    """

    kind: ClassVar[str] = "frequency plan"
    schema_name: ClassVar[str] = FREQPLAN_SCHEMA

    schema_id: Literal["envplan/freqplan/v1"] = Field(alias="schema")
    plan_sha256: Sha256
    profile_sha256: Sha256
    gpu: str | None = None
    clocks_source: ClockSource
    supported_clocks_mhz: list[Megahertz]
    stage_gpus: list[StageClocks] | None = None
    world_size: Count
    layout: Topology
    deadline_s: Seconds
    iteration_time_s: Seconds
    energy_j: Joules
    stage_energies: list[StageEnergy] | None = None
    stage_power: list[StagePower] | None = None
    raised: list[RaisedClock]
    dwell: dict[str, float] | None = None
    min_dwell_s: Seconds | None = None
    switching: Switching | None = None
    ranks: list[RankPlan]
    ladder: list[Rung] | None = None

    def rank_plan(self, rank: int) -> RankPlan:
        """The part of a global rank.

        Raises:
            InputError: there is no such rank.
        """
        if 0 <= rank < self.world_size:
            return self.ranks[rank]
        raise InputError(
            f"rank {rank} is not in the frequency plan, which is for {self.world_size} ranks"
        )

    def check_world(self, world_size: int) -> None:
        """Check that a job of so many ranks is the one this is for.

        Raises:
            InputError: it is not.
        """
        if world_size != self.world_size:
            raise InputError(
                f"the frequency plan is for {self.world_size} ranks, but the job has {world_size}; "
                "apply the plan again with the job's --tp, --cp and --dp"
            )

    def clocks_of(self, stage: int) -> StageClocks:
        """The GPU of a stage and its clocks."""
        if self.stage_gpus is not None:
            return self.stage_gpus[stage]
        return StageClocks(
            gpu=self.gpu,
            clocks_source=self.clocks_source,
            supported_clocks_mhz=self.supported_clocks_mhz,
        )

    def check_gpu(self, name: str, supported_clocks: Sequence[int], stage: int) -> None:
        """Check that a GPU is of the model this is for and supports every planned clock.

        Args:
            name: of the GPU, as its driver says.
            supported_clocks: MHz.
            stage: that it runs.

        Raises:
            InputError: it is not or has not.
        """
        planned = self.clocks_of(stage).gpu
        if planned is not None and name != planned:
            where = "" if self.stage_gpus is None else f" on stage {stage}"
            raise InputError(
                f"the frequency plan is for {planned}{where}, but the GPU here is {name}; "
                "profile it and plan again"
            )
        planned_mhz: set[int] = set()
        for rank in self.ranks:
            if rank.stage == stage:
                planned_mhz.update(rank.clocks_mhz)
        unsupported_mhz = planned_mhz.difference(supported_clocks)
        if unsupported_mhz:
            raise InputError(
                f"the frequency plan asks for {min(unsupported_mhz)} MHz, which the {name} does "
                "not have; "
                "apply the plan again with --backend nvml on this machine"
            )

    def stage_operations(self) -> list[list[ClockedOperation]]:
        """The operations of each stage, which all its ranks have."""
        by_stage = {rank.stage: rank.operations for rank in self.ranks}
        return [by_stage[stage] for stage in range(self.layout.stages)]

    def to_csv(self) -> str:
        """The ranks as a CSV table, CSV_COLUMNS, a row an operation; without the ladder.

        Where operations have configs, a column `config` follows.
        """
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        has_configs = any(rank.configs for rank in self.ranks)
        writer.writerow([*CSV_COLUMNS, "config"] if has_configs else CSV_COLUMNS)
        for rank in self.ranks:
            for position, operation in enumerate(rank.operations):
                row = [rank.rank, rank.stage, rank.device, position, *operation]
                if has_configs:
                    row.append(rank.config_of(position))
                writer.writerow(row)
        return text.getvalue()

    def to_zeus(self) -> str:
        """The text that Zeus's server reads as a PointSolution3D, a stage a line.

        A Python list with, for each stage, the list of its (instruction, MHz). The server hands a
        stage's list to all ranks of that stage. Zeus sets a clock for every instruction, so one
        that this plan leaves alone gets that of the instruction before it.

        Raises:
            InputError: parts have clocks of their own, or a stage has no clock at all.
        """
        if any(part_clocks(rank.configs or ()) for rank in self.ranks):
            raise InputError(
                "operations have clocks by part, which Zeus's format has no place for; solve again "
                "with --one-clock"
            )
        lines = [f"{_clock_everywhere(operations)},\n" for operations in self.stage_operations()]
        return "[\n" + "".join(lines) + "]\n"

    @classmethod
    def from_document(cls, document: object, *, path: AnyPath | None = None) -> Self:
        """Read a frequency plan from a JSON value as parsed, and check it.

        Args:
            document: the value.
            path: the file that errors shall name.

        Raises:
            InputError: it is no frequency plan (names the field), or contradicts itself.
        """
        plan = super().from_document(document, path=path)
        with naming(path):
            plan.check()
        return plan

    def check(self) -> list[str]:
        """Check that ranks, stages, clocks and ladder agree with each other.

        Returns:
            A sentence for everything that was checked.

        Raises:
            InputError: the first contradiction.
        """
        self._check_ranks()
        self._check_clocks()
        self._check_ladder()
        self._check_times()
        return [
            f"{self.world_size} ranks on {self.layout.stages} stages, in the order "
            f"{self.layout.rank_order}",
            "all ranks of a stage have the same operations",
            *self._supported_clocks_in_words(),
        ]

    def _supported_clocks_in_words(self) -> list[str]:
        if self.stage_gpus is None:
            return [f"all clocks are among the {_number_of_clocks(self.clocks_of(0))}"]
        return [
            f"all clocks of stage {stage} are among the {_number_of_clocks(clocks)}"
            for stage, clocks in enumerate(self.stage_gpus)
        ]

    def _check_ranks(self) -> None:
        topology = self.layout
        topology.check_order()
        if not self.world_size == topology.world_size == len(self.ranks):
            raise InputError(
                f"world_size is {self.world_size}, but the layout makes {topology.world_size} and "
                f"there are {len(self.ranks)} ranks"
            )
        first_of_stage: dict[int, RankPlan] = {}
        for position, rank in enumerate(self.ranks):
            if rank.rank != position or rank.stage != topology.stage_of(position):
                raise InputError(
                    f"ranks[{position}] is rank {rank.rank} on stage {rank.stage}, but the layout "
                    f"has rank {position} on stage {topology.stage_of(position)} there"
                )
            if rank.configs is not None and len(rank.configs) != len(rank.operations):
                raise InputError(f"ranks[{position}] does not have one config for every operation")
            twin = first_of_stage.setdefault(rank.stage, rank)
            if (rank.operations, rank.configs) != (twin.operations, twin.configs):
                raise InputError(
                    f"ranks {twin.rank} and {rank.rank} run the same stage, "
                    f"{rank.stage}, with different operations"
                )

    def _check_clocks(self) -> None:
        if self.stage_gpus is not None and len(self.stage_gpus) != self.layout.stages:
            raise InputError(
                f"stage_gpus has {len(self.stage_gpus)} entries for {self.layout.stages} stages"
            )
        supported_mhz = [
            set(self.clocks_of(stage).supported_clocks_mhz) for stage in range(self.layout.stages)
        ]
        for rank in self.ranks:
            listed_mhz = set(rank.clocks_mhz)
            planned_mhz = requested_clocks(rank.frequencies, rank.configs)
            unsupported_mhz = listed_mhz - supported_mhz[rank.stage]
            unlisted_mhz = planned_mhz - listed_mhz
            wrong_mhz = unsupported_mhz or unlisted_mhz
            if wrong_mhz:
                raise InputError(
                    f"ranks[{rank.rank}] asks for {min(wrong_mhz)} MHz, which is not a supported "
                    "clock"
                )

    def _check_ladder(self) -> None:
        previous_time_s = self.iteration_time_s
        for number, rung in enumerate(self.ladder or []):
            self._check_rung(f"ladder[{number}]", rung)
            if rung.iteration_time_s <= previous_time_s:
                raise InputError(f"ladder[{number}] is not slower than what comes before it")
            previous_time_s = rung.iteration_time_s

    def _check_rung(self, name: str, rung: Rung) -> None:
        num_operations = _lengths(self.stage_operations())
        if _lengths(rung.frequencies_mhz) != num_operations:
            raise InputError(f"{name} does not have one clock for every operation")
        if rung.configs is not None and _lengths(rung.configs) != num_operations:
            raise InputError(f"{name} does not have one config for every operation")
        listed_mhz = {rank.stage: set(rank.clocks_mhz) for rank in self.ranks}
        for stage, clocks in enumerate(rung.frequencies_mhz):
            unlisted_mhz = requested_clocks(clocks, rung.configs_of(stage)) - listed_mhz[stage]
            if unlisted_mhz:
                raise InputError(
                    f"{name} asks for {min(unlisted_mhz)} MHz on stage {stage}, which is not among "
                    "the clocks of its ranks"
                )

    def _check_times(self) -> None:
        if self.switching is None or self.switching.times is None:
            return
        times_of_schedules = self.switching.times
        num_schedules = 1 + len(self.ladder or [])
        if len(times_of_schedules) != num_schedules:
            raise InputError(
                f"switching has times of {len(times_of_schedules)} plans, but with its ladder this "
                f"has {num_schedules}"
            )
        num_operations = _lengths(self.stage_operations())
        for number, times in enumerate(times_of_schedules):
            num_waits = [len(stage_times.waits_s) for stage_times in times]
            num_durations = [len(stage_times.durations_s) for stage_times in times]
            if not num_waits == num_durations == num_operations:
                raise InputError(
                    f"switching.times[{number}] does not have one wait and one duration for every "
                    "operation"
                )


def _lengths(lists: Iterable[Sequence[object]]) -> list[int]:
    return [len(values) for values in lists]


def part_clocks(configs: Iterable[str]) -> set[int]:
    """The clocks that parts of operations ask for, MHz.

    Args:
        configs: of the operations.

    Raises:
        InputError: a config begins as one of an operation by parts, but does not go on so.
    """
    clocks_mhz: set[int] = set()
    for config in set(configs):
        clocks_mhz.update(change.frequency_mhz for change in parse_clock_requests(config))
    return clocks_mhz


def requested_clocks(frequencies: Sequence[int], configs: Sequence[str] | None) -> set[int]:
    """All clocks that operations and their parts ask for, MHz.

    Args:
        frequencies: of the operations, MHz; 0 asks for none.
        configs: of the operations; None: they have none.

    Raises:
        InputError: as for part_clocks.
    """
    return {*frequencies, *part_clocks(configs or ())} - {0}


def _number_of_clocks(clocks: StageClocks) -> str:
    return f"{len(clocks.supported_clocks_mhz)} of {clocks.gpu or 'the GPU'}"


def _clock_everywhere(operations: Sequence[ClockedOperation]) -> list[tuple[str, int]]:
    """(instruction, MHz) of a stage's operations, with a clock for those that have none.

    An operation without a clock runs at the one set before it, or else at the stage's first.
    """
    clocks_mhz = [operation.frequency_mhz for operation in operations if operation.frequency_mhz]
    if not clocks_mhz:
        raise InputError(
            "a stage has no operation with a clock, and Zeus's format cannot leave one out"
        )
    clock_mhz = clocks_mhz[0]
    settings = []
    for operation in operations:
        clock_mhz = operation.frequency_mhz or clock_mhz
        settings.append((operation.instruction, clock_mhz))
    return settings
