"""Names of instructions and of a sidecar's field about them, which files and schedules share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

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

#: The halves of a backward: gradients of inputs, and of weights.
BACKWARD_HALVES: Final = ("backward_input", "backward_weight")

#: The instruction name of rows that give the power while waiting; not an operation.
BLOCKING: Final = "blocking"

#: W that a GPU draws while it waits for a neighbour, where neither the profile nor the user says.
DEFAULT_BLOCKING_POWER_W: Final = 70.0

#: Field of a sidecar that says, if it is true, that `backward` rows include recomputation.
INCLUDES_RECOMPUTATION: Final = "recompute"


def in_usual_order(names: Iterable[str]) -> tuple[str, ...]:
    """Names of operations, each once: those that schedules know in their order, then the others."""
    present = dict.fromkeys(names)
    usual = [name for name in INSTRUCTIONS if name in present]
    unusual = [name for name in present if name not in INSTRUCTIONS and name != BLOCKING]
    return (*usual, *unusual)
