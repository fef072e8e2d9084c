"""What a line of the run log says: a step that was measured, or an event of the run.

A line is one object with `event` and `rank`. `start` says which plan is followed; `step` has an
iteration's time (s) and, for each (instruction, chunk, MHz) of it, how many operations there were,
their mean and their least time (s), and after these their config, if they have one. Its `changes`
say of each change of clock for which operation it was made, when it was wanted, when it was asked
for and when the driver had set it. `mismatch` and `clock_error` say what happened; `end` counts
them. Of a run that was killed the next one says in `killed` how many iterations it had.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, ClassVar, Final, NamedTuple, Protocol

from pydantic import Field, GetCoreSchemaHandler, JsonValue, Strict
from pydantic_core import CoreSchema, core_schema

from envplan._io.documents import Index
from envplan.enforce.freqplan import OperationKey
from envplan.runtime.iteration_energy import EnergyTotals

RUN_SCHEMA: Final = "envplan/run/v1"

_Duration = Annotated[float, Field(ge=0, le=1e9)]
# JSON has no tuples, so a list is read.
_WithoutConfig = Annotated[tuple[str, Index, Index, Index, _Duration, _Duration], Strict(False)]
_WithConfig = Annotated[tuple[str, Index, Index, Index, _Duration, _Duration, str], Strict(False)]


class OperationTimes(NamedTuple):
    """The times of a step's operations of one kind at one clock; in the log a list of these.

    Attributes:
        instruction: of the operations.
        chunk: of the operations.
        frequency_mhz: the clock in force; 0 where the planned one was not set.
        num_operations: that there were.
        mean_s: their mean time.
        min_s: their least time.
        config: "" where they have none; the list then ends before it.
    """

    instruction: str
    chunk: int
    frequency_mhz: int
    num_operations: int
    mean_s: float
    min_s: float
    config: str = ""

    def to_list(self) -> list[JsonValue]:
        """The list in the log."""
        return list(self if self.config else self[:-1])

    @classmethod
    def __get_pydantic_core_schema__(
        cls, _source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        lists = _WithoutConfig | _WithConfig
        return core_schema.no_info_after_validator_function(
            lambda fields: cls(*fields), handler.generate_schema(lists)
        )


class ChangeTimes(NamedTuple):
    """The times of a change of clock, from the begin of its step; in the log a list of these.

    Attributes:
        position: of the operation that it was made for, in execution order.
        frequency_mhz: the clock.
        wanted_s: when the operation began, s.
        asked_s: when the clock was asked for.
        seen_s: when the driver had set it; None: a newer one overtook it, or it was not set.
    """

    position: int
    frequency_mhz: int
    wanted_s: float
    asked_s: float
    seen_s: float | None


class RunRecord(Protocol):
    """A line of the log before it is written."""

    def to_dict(self) -> dict[str, JsonValue]:
        """Its JSON object."""


@dataclass(frozen=True, kw_only=True)
class RunEvent:
    """Something that happened in a run.

    Attributes:
        rank: that it happened to.
        time: when, s since 1970.
    """

    event: ClassVar[str]

    rank: int
    time: float = field(default_factory=time.time)

    def to_dict(self) -> dict[str, JsonValue]:
        """Its JSON object."""
        return {"event": self.event, **asdict(self)}


@dataclass(frozen=True, kw_only=True)
class RunStarted(RunEvent):
    """A rank begins to follow a plan.

    Attributes:
        plan_sha256: of the plan.json.
        world_size: of the plan.
        clocks: whether clocks can be set.
    """

    event: ClassVar[str] = "start"

    schema: str = RUN_SCHEMA
    plan_sha256: str
    world_size: int
    clocks: bool


@dataclass(frozen=True, kw_only=True)
class RunKilled(RunEvent):
    """The run before this one was killed, without a line about its end.

    Attributes:
        iterations: that it had, by their outcome; the last ones have no lines of their own.
    """

    event: ClassVar[str] = "killed"

    iterations: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class ClockError(RunEvent):
    """A clock could not be set, or the guard is gone.

    Attributes:
        step: when that was noticed, from 0.
        message: a line for people.
    """

    event: ClassVar[str] = "clock_error"

    step: int
    message: str


@dataclass(frozen=True, kw_only=True)
class Mismatch(RunEvent):
    """A step has left the order of the plan.

    Attributes:
        step: which, from 0.
        where: "begin" or "end" of an operation, or "step" for the step's end.
        expected: the operation that the plan has there; None: none.
        got: the operation that came; None: none.
    """

    event: ClassVar[str] = "mismatch"

    step: int
    where: str
    expected: OperationKey | None
    got: OperationKey | None


@dataclass(frozen=True, kw_only=True)
class RunEnded(RunEvent):
    """A rank follows the plan no longer.

    Attributes:
        steps: of the run.
        mismatches: steps that left the order of the plan.
        clock_errors: that were noticed.
        energy: of the steps that followed the plan itself, and not a slower one of its ladder.
        dropped: lines that were not written: the log was far behind, or they could not be made.
        iterations: how many followed the plan, and how many did not, by the reason.
    """

    event: ClassVar[str] = "end"

    steps: int
    mismatches: int
    clock_errors: int
    energy: EnergyTotals
    dropped: int = 0
    iterations: Mapping[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, JsonValue]:
        """Its JSON object."""
        return {
            "event": self.event,
            "rank": self.rank,
            "time": self.time,
            "steps": self.steps,
            "mismatches": self.mismatches,
            "clock_errors": self.clock_errors,
            **self.energy.to_dict(),
            "dropped": self.dropped,
            "iterations": dict(self.iterations),
        }


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """A step that followed the plan, measured.

    Attributes:
        rank: global rank.
        stage: that the rank runs.
        step: its number, from 0.
        planned_s: iteration time of the plan that the clocks in force belong to.
        iteration_s: from the begin of the first operation to the end of the last.
        num_requested: operations with a planned clock.
        num_in_force: operations that had it.
        max_lag_s: the longest time until a requested clock was set.
        mismatches: steps so far whose order was not the plan's.
        energy: of the steps so far that followed the plan itself.
        operations: times by kind of operation and clock.
        changes: of clocks, in execution order.
    """

    rank: int
    stage: int
    step: int
    planned_s: float
    iteration_s: float
    num_requested: int
    num_in_force: int
    max_lag_s: float
    mismatches: int
    energy: EnergyTotals
    operations: list[OperationTimes]
    changes: list[ChangeTimes] = field(default_factory=list)

    def to_dict(self) -> dict[str, JsonValue]:
        """Its JSON object."""
        return {
            "event": "step",
            "rank": self.rank,
            "stage": self.stage,
            "step": self.step,
            "planned_s": self.planned_s,
            "iteration_s": self.iteration_s,
            "asked": self.num_requested,
            "in_force": self.num_in_force,
            "lag_s": self.max_lag_s,
            "mismatches": self.mismatches,
            **self.energy.to_dict(),
            "operations": [times.to_list() for times in self.operations],
            "changes": [list(change) for change in self.changes],
        }
