"""The options of an operation, and the names of instructions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

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
)

#: The instruction name of rows that give the power while waiting; not an operation.
BLOCKING: Final = "blocking"

#: Field of a sidecar that says, if it is true, that `backward` rows include recomputation.
INCLUDES_RECOMPUTATION: Final = "recompute"


@dataclass(frozen=True, eq=False)
class OptionTable:
    """All options of one instruction on one stage, sorted by time, energy, falling frequency.

    Attributes:
        stage: 0-based stage of the profile.
        instruction: its name.
        frequency_mhz: SM clock of each option, MHz, shape (n,); 0 where no clock is controlled.
        config: label of the second knob of each option, n of them, "" where there is none.
        time_ns: ns, shape (n,), ascending.
        energy_fj: fJ, shape (n,).
    """

    stage: int
    instruction: str
    frequency_mhz: IntArray
    config: tuple[str, ...]
    time_ns: IntArray
    energy_fj: IntArray

    def __len__(self) -> int:
        return len(self.config)

    @property
    def max_frequency_option(self) -> int:
        """Index of the row with the highest frequency; of several, the fastest, then cheapest."""
        return int(np.argmax(self.frequency_mhz))  # the first of equals, and rows are sorted so

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
