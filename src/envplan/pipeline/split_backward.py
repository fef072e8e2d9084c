"""Schedules that split backwards in two: the gradient of the input, which the stage before waits
for, and the gradients of the weights, for which there is time and which fill bubbles.

Generators as in schedules.py.
"""

from __future__ import annotations

from collections import Counter, deque

from envplan.errors import InputError
from envplan.pipeline.schedules import (
    Operation,
    group_length,
    operations_of,
    schedule,
    through_chunks,
)


@schedule("interleaved-zb", passes=3)
def interleaved_zero_bubble(
    num_stages: int, num_microbatches: int, num_chunks: int
) -> list[list[Operation]]:
    """Interleaved zero bubble, PyTorch's ScheduleInterleavedZeroBubble: `interleaved` with the
    backwards split as in `zb-h1`.

    Microbatches go through the chunks in groups of G as in `interleaved`, but stage s runs only
    (S - s - 1) + (C - 1) G forwards ahead.

    Raises:
        InputError: the microbatches do not fill equal groups.
    """
    length = group_length("interleaved-zb", num_stages, num_microbatches, num_chunks)
    down, up = through_chunks(num_microbatches, num_chunks, length)
    return [
        _late_weights(
            operations_of("forward", stage, num_stages, down),
            operations_of("backward_input", stage, num_stages, up),
            operations_of("backward_weight", stage, num_stages, up),
            warmup=num_stages - stage - 1 + (num_chunks - 1) * length,
            owed=stage,
        )
        for stage in range(num_stages)
    ]


@schedule("zb-h1", passes=3)
def zb_h1(num_stages: int, num_microbatches: int, num_chunks: int) -> list[list[Operation]]:
    """ZB-H1 (Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2.1): 1F1B whose
    stage s puts its weight gradients off by s microbatches.

    So every stage holds the activations of S microbatches at most, as the first one does in 1F1B,
    and the bubble is a third of 1F1B's where all three parts take equally long. PyTorch has no
    class of this name: the order is that of ScheduleInterleavedZeroBubble with one stage per rank
    ("ZB1P"), which refuses some numbers of microbatches above S where this takes any. The paper
    also has the optimizer step without a global synchronization; that is outside a schedule.

    Raises:
        InputError: more than one chunk.
    """
    if num_chunks > 1:
        raise InputError(
            f"schedule zb-h1 runs one model chunk per stage, not {num_chunks}; "
            "schedule interleaved-zb runs several"
        )
    return interleaved_zero_bubble(num_stages, num_microbatches, num_chunks)


@schedule("zb-v", chunks=2, passes=3)
def zb_v(num_stages: int, num_microbatches: int, num_chunks: int) -> list[list[Operation]]:
    """ZB-V (Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 6), PyTorch's
    ScheduleZBVZeroBubble.

    The model goes down the stages and up again: stage s has model stages s and 2 S - 1 - s, so the
    last stage has two neighbours. No bubbles at all where forward, input and weight gradients take
    equally long and there are at least 2 S - 1 microbatches; with fewer, the order is that of
    2 S - 1 without the ones that are not there.

    Raises:
        InputError: other than two chunks.
    """
    _refuse_other_than_two("zb-v", num_chunks)
    return [_zb_v_stage(stage, num_stages, num_microbatches) for stage in range(num_stages)]


def _zb_v_stage(stage: int, num_stages: int, num_microbatches: int) -> list[Operation]:
    count = max(2 * num_stages - 1, num_microbatches)
    run = _VStage(stage, num_stages)
    to_turn = num_stages - stage  # stages from here to the turn of the V, this one included
    for _ in range(2 * to_turn - 1):
        run.forward(0)
    for _ in range(stage):
        run.forward(1)
        run.forward(0)
    for _ in range(to_turn):
        run.forward(1)
        run.split_backward(1)
    for k in range(count - num_stages):
        if k < count - (2 * num_stages - 1 - stage):
            run.forward(0)
        run.split_backward(0)
        run.forward(1)
        run.split_backward(1)
    for _ in range(stage):
        run.backward_input(0)
        run.backward_input(1)
    for _ in range(to_turn):
        run.backward_input(0)
        run.backward_weight(0)
    for chunk in (1, 0):
        for _ in range(stage):
            run.backward_weight(chunk)
    return [op for op in run.order if op.microbatch < num_microbatches]


@schedule("dualpipe-v", chunks=2, passes=3)
def dualpipe_v(num_stages: int, num_microbatches: int, num_chunks: int) -> list[list[Operation]]:
    """DualPipeV, PyTorch's ScheduleDualPipeV, after DeepSeek's DualPipe (DeepSeek-V3 Technical
    Report, 2024, section 3.2.1) folded into the V of `zb-v`.

    Some backwards are whole, some are split. DualPipeV runs a forward and a backward at the same
    time where it can; here one GPU runs one operation after another, so the two of such a pair
    follow each other in PyTorch's order, forward first.

    Raises:
        InputError: other than two chunks, or fewer microbatches than model stages, 2 S.
    """
    _refuse_other_than_two("dualpipe-v", num_chunks)
    if num_microbatches < 2 * num_stages:
        raise InputError(
            f"schedule dualpipe-v needs at least as many microbatches as model stages: "
            f"{2 * num_stages} for {num_stages} pipeline stages, not {num_microbatches}"
        )
    return [_dualpipe_v_stage(stage, num_stages, num_microbatches) for stage in range(num_stages)]


def _dualpipe_v_stage(stage: int, num_stages: int, num_microbatches: int) -> list[Operation]:
    run = _VStage(stage, num_stages)
    below = num_stages - stage - 1
    for _ in range(2 * below):
        run.forward(0)
    for _ in range(stage + 1):
        run.forward(0)
        run.forward(1)
    for _ in range(below):
        run.split_backward(1)
        run.forward(1)
    for _ in range(num_microbatches - 2 * num_stages + stage + 1):
        run.forward(0)
        run.backward(1)
        run.forward(1)
        run.backward(0)
    for _ in range(below):
        run.backward(1)
        run.forward(1)
        run.backward(0)
    for k in range(2 * (stage + 1)):
        chunk = 1 - k % 2
        if k <= stage:
            run.backward(chunk)
        else:
            run.backward_input(chunk)
    for _ in range(below):
        run.backward_weight()
        run.backward_input(0)
    for _ in range(stage + 1):
        run.backward_weight()
    return run.order


class _VStage:
    """Writes down what one stage of a V runs.

    Each chunk takes its microbatches in turn, forwards and backwards alike, so what is written
    down says only which chunk; weight gradients are those that have been owed longest.
    """

    def __init__(self, stage: int, num_stages: int) -> None:
        self.order: list[Operation] = []
        self._stage = stage
        self._model_stage = (stage, 2 * num_stages - 1 - stage)
        self._forwards: Counter[int] = Counter()
        self._backwards: Counter[int] = Counter()
        self._owed: deque[tuple[int, int]] = deque()  # (chunk, microbatch)

    def forward(self, chunk: int) -> None:
        self._write("forward", self._forwards[chunk], chunk)
        self._forwards[chunk] += 1

    def backward(self, chunk: int) -> None:
        self._write("backward", self._backwards[chunk], chunk)
        self._backwards[chunk] += 1

    def backward_input(self, chunk: int) -> None:
        microbatch = self._backwards[chunk]
        self._write("backward_input", microbatch, chunk)
        self._backwards[chunk] += 1
        self._owed.append((chunk, microbatch))

    def backward_weight(self, chunk: int | None = None) -> None:
        """The oldest weight gradients owed, of the given chunk or of any."""
        owed = next(o for o in self._owed if chunk is None or o[0] == chunk)
        self._owed.remove(owed)
        self._write("backward_weight", owed[1], owed[0])

    def split_backward(self, chunk: int) -> None:
        self.backward_input(chunk)
        self.backward_weight(chunk)

    def _write(self, instruction: str, microbatch: int, chunk: int) -> None:
        model_stage = self._model_stage[chunk]
        self.order.append(Operation(self._stage, instruction, microbatch, chunk, model_stage))


def _late_weights(
    forwards: list[Operation],
    inputs: list[Operation],
    weights: list[Operation],
    *,
    warmup: int,
    owed: int,
) -> list[Operation]:
    """`warmup` forwards, then one forward and one input gradient in turn, each followed by weight
    gradients as soon as `owed` input gradients have been run without."""
    order = forwards[:warmup]
    ahead = forwards[warmup:]
    for k, backward in enumerate(inputs):
        order += ahead[k : k + 1]
        order.append(backward)
        if k >= owed:
            order.append(weights[k - owed])
    return order + weights[max(0, len(weights) - owed) :]


def _refuse_other_than_two(name: str, num_chunks: int) -> None:
    if num_chunks != 2:
        raise InputError(
            f"schedule {name} runs two model chunks per stage, not {num_chunks}: its stages are "
            "half as many as the profile's"
        )
