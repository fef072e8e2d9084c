"""Stages that can be measured: what the measuring loop asks of them."""

from __future__ import annotations

from typing import Final, Protocol

__all__ = ["SPLIT_BACKWARD", "RunnableStages"]

#: The two parts of a split backward: gradients of inputs, and of weights.
SPLIT_BACKWARD: Final = ("backward_input", "backward_weight")


class RunnableStages(Protocol):
    """The stages to be measured, one microbatch at a time.

    Work may be queued and go on after a call returns; `synchronize` waits for it. Every stage is
    tried once, then they are measured in turn. Calls for one stage follow each other before those
    for the next, and `forward` comes before `backward`. Whatever they raise is said in a line.

    Stages may also have `backward_input(stage)` and `backward_weight(stage)`, the two parts of a
    split backward, each of which may be called again for the same forward; `timer`, a `Timer` for
    their work; `waiting`, which says in words what `wait` has the GPU do; and `slices`, the
    `switch_latency.Slices` by which it is measured how late clocks come.
    """

    @property
    def description(self) -> str:
        """Their name for people; also tells sweeps of different stages apart."""

    @property
    def num_stages(self) -> int:
        """How many stages there are."""

    def forward(self, stage: int) -> None:
        """Run the stage's forward of a microbatch."""

    def backward(self, stage: int) -> None:
        """Run the stage's backward for the last forward; may be called again for the same one."""

    def wait(self, seconds: float) -> None:
        """Have the GPU do for so long what it does while it waits for a neighbour."""

    def synchronize(self) -> None:
        """Return once the GPU has done everything asked for."""
