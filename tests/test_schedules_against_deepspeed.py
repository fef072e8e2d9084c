"""DeepSpeed's own schedule against ours: what its instructions say of microbatches is 1F1B."""

from __future__ import annotations

import pytest

from envplan.pipeline import Pipeline
from schedule_oracles import orders_of

schedule = pytest.importorskip(
    "deepspeed.runtime.pipe.schedule", reason="deepspeed is not installed: pip install deepspeed"
)


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 5, 8, 13])
def test_a_train_schedule_is_1f1b(stages: int, microbatches: int) -> None:
    """Forwards take microbatches in order; a backward is that of the one in its buffer."""
    for stage, ours in enumerate(orders_of(Pipeline("1f1b", stages, microbatches))):
        train = schedule.TrainSchedule(micro_batches=microbatches, stages=stages, stage_id=stage)
        order: list[tuple[str, int]] = []
        held: dict[int, int] = {}
        for command in (command for step in train.steps() for command in step):
            if isinstance(command, schedule.ForwardPass):
                held[command.buffer_id] = sum(name == "forward" for name, _ in order)
                order.append(("forward", held[command.buffer_id]))
            elif isinstance(command, schedule.BackwardPass):
                order.append(("backward", held.pop(command.buffer_id)))
        assert order == [(op.instruction, op.microbatch) for op in ours]
