"""The options of an operation, and the names of instructions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
Knob = tuple[int, str]  # MHz, config

#: Instructions that schedules know. A profile may hold others: any identifier will do.
INSTRUCTIONS: Final = (
    "forward",
    "backward",
    "backward_input",
    "backward_weight",
    "optimizer",
    "load",
    "recompute",
    "all_reduce",
    "reduce_scatter",
    "all_gather",
)

#: The instruction name of rows that give the power while waiting; not an operation.
BLOCKING: Final = "blocking"

#: W that a GPU draws while it waits for a neighbour, where neither the profile nor the user says.
DEFAULT_BLOCKING_POWER_W: Final = 70.0

#: Field of a sidecar that says, if it is true, that `backward` rows include recomputation.
INCLUDES_RECOMPUTATION: Final = "recompute"


class Part(NamedTuple):
    """A part of an operation, and its own options."""

    name: str
    table: OptionTable


class Slices(NamedTuple):
    """What options draw as they run, in order: one power, or that of each part.

    Attributes:
        begin: first slice of each option, int64 (n + 1,).
        time_ns: int64 (k,), ns.
        power_uw: average, rounded up, int64 (k,), uW.
    """

    begin: IntArray
    time_ns: IntArray
    power_uw: IntArray

    @classmethod
    def of(cls, time_ns: IntArray, energy_fj: IntArray) -> Slices:
        """Of options with equally many slices, both (n, slices)."""
        count, each = time_ns.shape
        begin = np.arange(0, count * each + 1, each, dtype=np.int64)
        return cls(begin, time_ns.ravel(), -(-energy_fj // time_ns).ravel())

    def of_option(self, k: int) -> list[tuple[int, int]]:
        """ns and uW of an option's slices."""
        own = slice(self.begin[k], self.begin[k + 1])
        return list(zip(self.time_ns[own].tolist(), self.power_uw[own].tolist(), strict=True))


@dataclass(frozen=True, eq=False)
class OptionTable:
    """All options of one instruction on one stage, sorted by time, energy, falling frequency.

    Attributes:
        stage: 0-based stage of the profile.
        instruction: its name.
        frequency_mhz: SM clock of each option as it starts, MHz, shape (n,); 0 where no clock is
            controlled.
        config: label of the second knob of each option, n of them, "" where there is none; for
            an option that runs its parts at clocks of their own, what these are (see parts.py).
        time_ns: ns, shape (n,), ascending.
        energy_fj: fJ, shape (n,).
        parts: in order of execution, where some options run them at clocks of their own.
        left_mhz: SM clock of each option as it ends, MHz, shape (n,).
        changes_clock: whether each option runs its parts at clocks of their own, shape (n,).
        first_config: the second knob of each option as it starts, n of them.
        slices: how long each option draws which power.
    """

    stage: int
    instruction: str
    frequency_mhz: IntArray
    config: Sequence[str]
    time_ns: IntArray
    energy_fj: IntArray
    left_mhz: IntArray
    changes_clock: npt.NDArray[np.bool_]
    first_config: tuple[str, ...]
    slices: Slices
    parts: tuple[Part, ...] = ()

    def __len__(self) -> int:
        return len(self.config)

    @property
    def max_frequency_option(self) -> int:
        """Index of the row at the highest frequency all along; of several, the fastest, then
        cheapest."""
        # The first of equals, and rows are sorted so.
        return int(np.argmax(np.where(self.changes_clock, -1, self.frequency_mhz)))

    @property
    def peak_uw(self) -> IntArray:
        """The most power that each option draws, uW, shape (n,)."""
        peaks: IntArray = np.maximum.reduceat(self.slices.power_uw, self.slices.begin[:-1])
        return peaks

    def rows(self) -> list[tuple[int, str, int, int]]:
        """MHz, config, ns and fJ of each option."""
        columns = (self.frequency_mhz.tolist(), self.config, self.time_ns.tolist())
        return list(zip(*columns, self.energy_fj.tolist(), strict=True))

    def by_knob(self) -> dict[Knob, tuple[int, int]]:
        """ns and fJ by MHz and config."""
        return {(mhz, config): (time, energy) for mhz, config, time, energy in self.rows()}


def option_table(
    stage: int, instruction: str, options: Iterable[tuple[int, int, int, str]]
) -> OptionTable:
    """The table of some options of one clock, each ns, fJ, minus MHz and config, in any order."""
    times, energies, minus_mhz, configs = zip(*sorted(options), strict=True)
    mhz, time_ns, energy_fj = frozen([-m for m in minus_mhz]), frozen(times), frozen(energies)
    return OptionTable(
        stage=stage,
        instruction=instruction,
        frequency_mhz=mhz,
        config=configs,
        time_ns=time_ns,
        energy_fj=energy_fj,
        left_mhz=mhz,
        changes_clock=np.zeros(len(mhz), np.bool_),
        first_config=configs,
        slices=Slices.of(time_ns[:, None], energy_fj[:, None]),
    )


def frozen(values: npt.ArrayLike) -> IntArray:
    """An array of integers that cannot be changed."""
    array = np.array(values, dtype=np.int64)
    array.flags.writeable = False
    return array
