"""Operations of a pipeline: one instruction of one microbatch on one stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias


@dataclass(frozen=True, slots=True)
class Operation:
    """One instruction of one microbatch, running on one stage's GPUs.

    Attributes:
        stage: the pipeline rank that runs it, from 0.
        instruction: what is computed, such as `forward` or `backward`.
        microbatch: which microbatch, from 0.
        chunk: which of the stage's model chunks, from 0; 0 if it has only one.
        profile_stage: the stage of the profile that times it, which is the model stage, counted
            along the model. Equal to `stage` without chunks; with chunks, chunk * num_stages +
            stage in generated schedules, but 2 num_stages - 1 - stage for the second chunk of
            `zb-v` and `dualpipe-v`.
    """

    stage: int
    instruction: str
    microbatch: int
    chunk: int
    profile_stage: int


#: For each rank, its operations in execution order.
Orders: TypeAlias = Sequence[Sequence[Operation]]

FORWARD: Final = "forward"
BACKWARD: Final = "backward"
BACKWARD_INPUT: Final = "backward_input"
BACKWARD_WEIGHT: Final = "backward_weight"
#: The instructions of every microbatch, with PyTorch's letters (torch.distributed.pipelining).
LETTERS: Final = {FORWARD: "F", BACKWARD: "B", BACKWARD_INPUT: "I", BACKWARD_WEIGHT: "W"}

LOAD: Final = "load"
#: Once per model stage after its last backward, in this order.
AT_THE_END: Final = ("all_reduce", "reduce_scatter", "optimizer", "all_gather")
#: What a schedule can be given besides its forwards and backwards. These operations share their
#: rank's GPU with the rest and run when nothing else does. Most take about the same time at any
#: clock, but not the same energy: rows at several clocks let a plan run them at a low one. One row
#: at 0 MHz makes a constant of them.
EXTRAS: Final = (LOAD, *AT_THE_END)


def short_name(op: Operation) -> str:
    """`2F3`, the forward of microbatch 3 on model stage 2; B, I and W are the backwards."""
    return f"{op.profile_stage}{LETTERS.get(op.instruction, op.instruction)}{op.microbatch}"
