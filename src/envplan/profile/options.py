"""The options of an operation, and the names of instructions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]

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
    """

    stage: int
    instruction: str
    frequency_mhz: IntArray
    config: tuple[str, ...]
    time_ns: IntArray
    energy_fj: IntArray
    parts: tuple[Part, ...] = ()

    def __len__(self) -> int:
        return len(self.config)

    @property
    def max_frequency_option(self) -> int:
        """Index of the row at the highest frequency all along; of several, the fastest, then
        cheapest."""
        # The first of equals, and rows are sorted so.
        return int(np.argmax(np.where(self.changes_clock, -1, self.frequency_mhz)))

    @cached_property
    def left_mhz(self) -> IntArray:
        """SM clock of each option as it ends, MHz, shape (n,)."""
        last = [config.rpartition(" @")[2].partition("=")[2] for config in self.config]
        ends = zip(self.changes_clock.tolist(), last, self.frequency_mhz.tolist(), strict=True)
        return frozen([int(end.partition("/")[0]) if ch else mhz for ch, end, mhz in ends])

    @cached_property
    def changes_clock(self) -> npt.NDArray[np.bool_]:
        """Whether each option runs its parts at clocks of their own, shape (n,)."""
        return np.array([config.startswith("@") for config in self.config])

    def rows(self) -> list[tuple[int, str, int, int]]:
        """MHz, config, ns and fJ of each option."""
        columns = (self.frequency_mhz.tolist(), self.config, self.time_ns.tolist())
        return list(zip(*columns, self.energy_fj.tolist(), strict=True))


def option_table(
    stage: int, instruction: str, options: Iterable[tuple[int, int, int, str]]
) -> OptionTable:
    """The table of some options, each ns, fJ, minus MHz and config, in any order."""
    times, energies, minus_mhz, configs = zip(*sorted(options), strict=True)
    return OptionTable(
        stage=stage,
        instruction=instruction,
        frequency_mhz=frozen([-mhz for mhz in minus_mhz]),
        config=configs,
        time_ns=frozen(times),
        energy_fj=frozen(energies),
    )


def frozen(values: Sequence[int]) -> IntArray:
    """An array of integers that cannot be changed."""
    array = np.array(values, dtype=np.int64)
    array.flags.writeable = False
    return array
