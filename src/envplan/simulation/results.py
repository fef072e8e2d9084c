"""The parts of a timeline: what operations, clocks and stages do while a plan runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from envplan.units import s_from_ns

__all__ = [
    "Bubble",
    "ClockChange",
    "OperationRun",
    "Percentiles",
    "PowerSteps",
    "Slice",
    "StageUse",
]


# Slices and runs of operations are made by the ten thousand: named tuples are made in half the time
# of frozen dataclasses.


class Slice(NamedTuple):
    """An operation, or a part of one, while the clock stays the same.

    Attributes:
        operation: index into pipeline.operations.
        frequency_mhz: the clock in force; 0 for an operation that controls none.
        start_ns, finish_ns: when it begins and ends.
        energy_10fj: energy of one GPU meanwhile.
        part: name of the part, where parts of the operation have clocks of their own; else "".
    """

    operation: int
    frequency_mhz: int
    start_ns: int
    finish_ns: int
    energy_10fj: int
    part: str = ""


class OperationRun(NamedTuple):
    """One operation as it ran.

    Attributes:
        stage, instruction, microbatch, chunk: which operation it is.
        frequency_mhz: the clock that it requests; 0: it controls none.
        config: label of its second setting; "" without one.
        start_s, finish_s: when it begins and ends.
        energy_j: energy of one GPU.
        could_stretch_s: how much longer it could take without anybody finishing later; the total
            float of project scheduling.
        critical_path: whether it lies on the critical path.
    """

    stage: int
    instruction: str
    microbatch: int
    chunk: int
    frequency_mhz: int
    config: str
    start_s: float
    finish_s: float
    energy_j: float
    could_stretch_s: float
    critical_path: bool

    @property
    def duration_s(self) -> float:
        """Time from its start to its finish."""
        return self.finish_s - self.start_s

    def to_dict(self) -> dict[str, object]:
        """The run in JSON types, without its stage, under which documents list it."""
        fields: dict[str, object] = self._asdict()
        del fields["stage"]
        return fields


@dataclass(frozen=True, slots=True)
class ClockChange:
    """The moment at which a stage's clock becomes another one.

    Attributes:
        at_ns: when; 0 for the clock that the stage begins with.
        frequency_mhz: the new clock; 0: no operation of the stage controls one.
    """

    at_ns: int
    frequency_mhz: int

    @property
    def at_s(self) -> float:
        """The moment in seconds."""
        return s_from_ns(self.at_ns)

    def to_dict(self) -> dict[str, object]:
        """The change in JSON types."""
        return {"at_s": self.at_s, "frequency_mhz": self.frequency_mhz}


@dataclass(frozen=True, slots=True)
class Bubble:
    """A gap in a stage's timeline, in which its GPUs wait (EnvPipe, USENIX ATC 2023).

    Attributes:
        start_s, finish_s: when it begins and ends.
        could_stretch_s: how much longer the operation before it could take without anybody
            finishing later, maybe pushing others; 0 where there is none.
        could_fill_s: how much of the gap that operation could fill and use less energy: it cannot
            take longer than at the clock at which it uses least, waiting left out.
    """

    start_s: float
    finish_s: float
    could_stretch_s: float
    could_fill_s: float

    @property
    def duration_s(self) -> float:
        """Time from its start to its finish."""
        return self.finish_s - self.start_s

    @property
    def usable(self) -> bool:
        """Whether the operation before it could take longer."""
        return self.could_stretch_s > 0

    def to_dict(self) -> dict[str, object]:
        """The bubble in JSON types."""
        return {
            "start_s": self.start_s,
            "finish_s": self.finish_s,
            "usable": self.usable,
            "could_stretch_s": self.could_stretch_s,
            "could_fill_s": self.could_fill_s,
        }


@dataclass(frozen=True)
class StageUse:
    """Time and energy of one stage; energies are those of its GPUs in all replicas.

    Attributes:
        stage: its number.
        busy_s, blocked_s: how long it runs operations, and how long it waits.
        computation_energy_j, blocking_energy_j: energy meanwhile.
        clock_changes: in time order, from the clock that it begins with.
        operations: in execution order.
        bubbles: in time order.
    """

    stage: int
    busy_s: float
    blocked_s: float
    computation_energy_j: float
    blocking_energy_j: float
    clock_changes: tuple[ClockChange, ...]
    operations: tuple[OperationRun, ...]
    bubbles: tuple[Bubble, ...]

    @property
    def energy_j(self) -> float:
        """Energy of computation and of waiting together."""
        return self.computation_energy_j + self.blocking_energy_j

    def to_dict(self) -> dict[str, object]:
        """The stage in JSON types."""
        return {
            "stage": self.stage,
            "busy_s": self.busy_s,
            "blocked_s": self.blocked_s,
            "computation_energy_j": self.computation_energy_j,
            "blocking_energy_j": self.blocking_energy_j,
            "clock_changes": [change.to_dict() for change in self.clock_changes],
            "operations": [operation.to_dict() for operation in self.operations],
            "bubbles": [bubble.to_dict() for bubble in self.bubbles],
        }


class PowerSteps(NamedTuple):
    """Power of all GPUs over time, a step function.

    Attributes:
        times_ns: where it changes, ascending from 0 to the end, (k + 1,).
        power_w: between one time and the next, (k,).
    """

    times_ns: NDArray[np.int64]
    power_w: NDArray[np.float64]


class Percentiles(NamedTuple):
    """Time and energy that so many percent of all runs do not exceed, a value each.

    Attributes:
        iteration_time_s: iteration times.
        energy_j: energies of all GPUs.
    """

    iteration_time_s: list[float]
    energy_j: list[float]
