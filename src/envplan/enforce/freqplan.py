"""Frequency plans: what every rank of a training job sets its clock to, operation by operation.

A frequency plan is a file, run.freqplan.json ("envplan/freqplan/v1"), that `envplan apply` makes
from a plan and that the runtime shim reads; its models are below. Two other formats hold less: a
CSV, and the text file that the server of Zeus's pipeline frequency optimizer reads.

`python -m tools.schemas` writes the JSON Schema of the format anew.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Annotated, ClassVar, Final, Literal, Self

from pydantic import Field, Strict

from envplan._io.documents import Count, Document, Index, Joules, Model, Seconds
from envplan._io.files import AnyPath
from envplan.enforce.topology import Topology
from envplan.errors import InputError, naming
from envplan.plan import Rung
from envplan.profile import parse_clock_requests

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
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
# JSON has no tuples: its lists are taken for them, and nothing else is.
Operation = Annotated[tuple[str, Index, Index, MegahertzOrNone], Strict(False)]


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


class RankPlan(Model):
    """One rank's part.

    Attributes:
        rank: global rank.
        stage: the pipeline stage it runs.
        device: index of its GPU on its node.
        clocks_mhz: all clocks it will ask for, ladder included, ascending; the GPU has them all.
        operations: (instruction, microbatch, chunk, MHz) in execution order; 0 MHz leaves the
            clock as it is.
        configs: the second knob of each operation, "" where it has none, for the training code to
            set; for an operation whose parts have clocks of their own these, as in
            "@attention=1410 @mlp=990": from which part on which clock; absent where no operation
            of the job has one.
    """

    rank: Index
    stage: Index
    device: Index
    clocks_mhz: list[Megahertz]
    operations: list[Operation]
    configs: list[str] | None = None

    @property
    def frequencies(self) -> list[int]:
        """MHz of its operations in execution order."""
        return [operation[3] for operation in self.operations]


class FrequencyPlan(Document):
    """What every rank sets its clock to, checked.

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
        raised: planned clocks that the GPU does not have.
        dwell: in files of older versions, what it took to make clocks last.
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
    raised: list[RaisedClock]
    dwell: dict[str, float] | None = None
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
        """That a job of so many ranks is the one this is for.

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
        """That a GPU is of the model this is for and has every clock that is asked for.

        Args:
            name: as its driver says.
            supported_clocks: MHz.
            stage: what it runs.

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
        asked = {c for rank in self.ranks if rank.stage == stage for c in rank.clocks_mhz}
        lacking = sorted(asked - set(supported_clocks))
        if lacking:
            raise InputError(
                f"the frequency plan asks for {lacking[0]} MHz, which the {name} does not have; "
                "apply the plan again with --backend nvml on this machine"
            )

    def stage_operations(self) -> list[list[Operation]]:
        """For each stage the operations that all its ranks have."""
        by_stage = {rank.stage: rank.operations for rank in self.ranks}
        return [by_stage[stage] for stage in range(self.layout.stages)]

    def to_csv(self) -> str:
        """The ranks as a CSV table, CSV_COLUMNS, a row an operation; without the ladder.

        Where operations have configs, a column `config` follows.
        """
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        named = any(rank.configs for rank in self.ranks)
        writer.writerow((*CSV_COLUMNS, *(["config"] if named else [])))
        for rank in self.ranks:
            configs = rank.configs or [""] * len(rank.operations)
            for position, operation in enumerate(rank.operations):
                row = (rank.rank, rank.stage, rank.device, position, *operation)
                writer.writerow((*row, configs[position]) if named else row)
        return text.getvalue()

    def to_zeus(self) -> str:
        """The text that Zeus's server reads as a PointSolution3D, a stage a line.

        A Python list with, for each stage, the list of its (instruction, MHz). The server hands a
        stage's list to all ranks of that stage. Zeus sets a clock for every instruction, so one
        that this plan leaves alone gets that of the instruction before it.

        Raises:
            InputError: parts have clocks of their own, or a stage has no clock at all.
        """
        if any(clocks_within(rank.configs) for rank in self.ranks):
            raise InputError(
                "operations have clocks by part, which Zeus's format has no place for; solve again "
                "with --one-clock"
            )
        lines = [f"{_clock_everywhere(stage)},\n" for stage in self.stage_operations()]
        return "[\n" + "".join(lines) + "]\n"

    @classmethod
    def from_document(cls, document: object, *, path: AnyPath | None = None) -> Self:
        """A frequency plan from a JSON value as parsed, which says one thing throughout.

        Args:
            path: the file that errors shall name.

        Raises:
            InputError: it is none (names the field), or contradicts itself.
        """
        read = super().from_document(document, path=path)
        with naming(path):
            read.check()
        return read

    def check(self) -> list[str]:
        """That ranks, stages, clocks and ladder agree with each other.

        Returns:
            A sentence for everything that was checked.

        Raises:
            InputError: the first thing that is not so.
        """
        self._check_ranks()
        self._check_clocks()
        self._check_ladder()
        gpus = [(f" of stage {stage}", gpu) for stage, gpu in enumerate(self.stage_gpus or ())]
        return [
            f"{self.world_size} ranks on {self.layout.stages} stages, in the order "
            f"{self.layout.rank_order}",
            "all ranks of a stage have the same operations",
            *(
                f"all clocks{where} are among the {len(gpu.supported_clocks_mhz)} of "
                f"{gpu.gpu or 'the GPU'}"
                for where, gpu in gpus or [("", self.clocks_of(0))]
            ),
        ]

    def _check_ranks(self) -> None:
        topology = self.layout
        topology.check_order()
        if not self.world_size == topology.world_size == len(self.ranks):
            raise InputError(
                f"world_size is {self.world_size}, but the layout makes {topology.world_size} and "
                f"there are {len(self.ranks)} ranks"
            )
        first: dict[int, RankPlan] = {}
        for position, rank in enumerate(self.ranks):
            if rank.rank != position or rank.stage != topology.stage_of(position):
                raise InputError(
                    f"ranks[{position}] is rank {rank.rank} on stage {rank.stage}, but the layout "
                    f"has rank {position} on stage {topology.stage_of(position)} there"
                )
            if rank.configs is not None and len(rank.configs) != len(rank.operations):
                raise InputError(f"ranks[{position}] does not have one config for every operation")
            twin = first.setdefault(rank.stage, rank)
            if (rank.operations, rank.configs) != (twin.operations, twin.configs):
                raise InputError(
                    f"ranks {first[rank.stage].rank} and {rank.rank} run the same stage, "
                    f"{rank.stage}, with different operations"
                )

    def _check_clocks(self) -> None:
        if self.stage_gpus is not None and len(self.stage_gpus) != self.layout.stages:
            raise InputError(
                f"stage_gpus has {len(self.stage_gpus)} entries for {self.layout.stages} stages"
            )
        known = [set(self.clocks_of(s).supported_clocks_mhz) for s in range(self.layout.stages)]
        for rank in self.ranks:
            own, asked = set(rank.clocks_mhz), asked_for(rank.frequencies, rank.configs)
            for lacking in sorted(own - known[rank.stage]) or sorted(asked - own):
                raise InputError(
                    f"ranks[{rank.rank}] asks for {lacking} MHz, which is not a supported clock"
                )

    def _check_ladder(self) -> None:
        stages = self.stage_operations()
        allowed = {rank.stage: set(rank.clocks_mhz) for rank in self.ranks}
        slowest = self.iteration_time_s
        for n, rung in enumerate(self.ladder or []):
            for what, lists in (("clock", rung.frequencies_mhz), ("config", rung.configs)):
                if lists is not None and list(map(len, lists)) != list(map(len, stages)):
                    raise InputError(f"ladder[{n}] does not have one {what} for every operation")
            for stage, clocks in enumerate(rung.frequencies_mhz):
                asked = asked_for(clocks, rung.configs_of(stage))
                for lacking in sorted(asked - allowed[stage]):
                    raise InputError(
                        f"ladder[{n}] asks for {lacking} MHz on stage {stage}, which is not among "
                        "the clocks of its ranks"
                    )
            if rung.iteration_time_s <= slowest:
                raise InputError(f"ladder[{n}] is not slower than what comes before it")
            slowest = rung.iteration_time_s


def clocks_within(configs: Sequence[str] | None) -> set[int]:
    """The clocks that parts of operations ask for, MHz.

    Raises:
        InputError: a config begins as such, but does not go on so.
    """
    return {
        change.frequency_mhz
        for config in set(configs or ())
        for change in parse_clock_requests(config)
    }


def asked_for(frequencies: Sequence[int], configs: Sequence[str] | None) -> set[int]:
    """All clocks that operations and their parts ask for, MHz.

    Raises:
        InputError: as for clocks_within.
    """
    return {*frequencies, *clocks_within(configs)} - {0}


def _clock_everywhere(operations: Sequence[Operation]) -> list[tuple[str, int]]:
    """(instruction, MHz) of a stage's operations, with a clock for those that have none."""
    clock = next((operation[3] for operation in operations if operation[3]), 0)
    if clock == 0:
        raise InputError(
            "a stage has no operation with a clock, and Zeus's format cannot leave one out"
        )
    return [(operation[0], clock := operation[3] or clock) for operation in operations]
