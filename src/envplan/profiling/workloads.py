"""What a pipeline stage of a transformer has to do: arithmetic and memory traffic per microbatch.

The counts follow published formulas; how often the saved activations travel through memory in a
pass is calibrated, as said at the constants below. Nothing here knows a GPU: `devices.modelled`
turns work into seconds and joules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from envplan.errors import InputError

__all__ = ["GPT3_1_3B", "StageWork", "TransformerModel", "Work", "partition", "stage_works"]

# A backward multiplies by the weights and by the activations where a forward multiplies once.
_BACKWARD_FLOPS: Final = 2.0

# How many times the saved activations of a layer cross the memory bus. A forward writes each once
# and reads most of them once. Both figures, with the compute efficiency of the A40, are set so
# that six layers of GPT-3 1.3B take what the Zeus documentation's A40 profile says of a first
# stage: 0.0937 s forward and 0.2453 s backward.
_FORWARD_PASSES: Final = 1.8
_BACKWARD_PASSES: Final = 6.5

_HALF: Final = 2.0  # bytes of a weight or activation in mixed precision
_GRADIENT: Final = 8.0  # bytes to read and write a 32-bit gradient sum

# Bytes per token and hidden unit for embedding look-up, position, dropout; and for the final norm.
_EMBEDDING_BYTES: Final = 12.0
_NORM_BYTES: Final = 8.0
# Bytes per logit with a fused cross entropy: written, read twice, probabilities written; the
# backward reads them, writes their gradient and reads it for two products.
_LOGIT_BYTES: Final = 8.0


@dataclass(frozen=True)
class Work:
    """Work of one operation on one GPU.

    Attributes:
        flops: floating-point operations of its matrix products.
        traffic: bytes its other kernels move between the GPU and its memory.
    """

    flops: float
    traffic: float

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.traffic + other.traffic)


@dataclass(frozen=True)
class StageWork:
    """Forward and backward of one microbatch on one stage.

    Attributes:
        num_layers: transformer layers of the stage.
        forward: work of the forward.
        backward: work of the backward, without recomputation.
    """

    num_layers: int
    forward: Work
    backward: Work


@dataclass(frozen=True, kw_only=True)
class TransformerModel:
    """A decoder-only transformer.

    Attributes:
        name: for people.
        num_layers: transformer layers.
        hidden_size: width h.
        num_heads: attention heads a.
        vocabulary_size: rows of the embedding and of the head, with padding.
        sequence_length: tokens s of a sample.
    """

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    vocabulary_size: int
    sequence_length: int


#: Brown et al., "Language Models are Few-Shot Learners" (2020), table 2.1, with the 16 heads that
#: its 2048 units make at 128 each, and the vocabulary padded to a multiple of 128.
GPT3_1_3B: Final = TransformerModel(
    name="GPT-3 1.3B",
    num_layers=24,
    hidden_size=2048,
    num_heads=16,
    vocabulary_size=50304,
    sequence_length=2048,
)


def _layer(model: TransformerModel, microbatch_size: int, tensor_parallel: int) -> StageWork:
    """One transformer layer.

    FLOPs: 24 B s h^2 + 4 B s^2 h forward (Narayanan et al., SC 2021, appendix). Activations:
    s b h (10 + 24 / t + 5 a s / (h t)) bytes (Korthikanti et al., MLSys 2023, section 4.2).
    """
    h, s, t = model.hidden_size, model.sequence_length, tensor_parallel
    tokens = microbatch_size * s
    flops = tokens * h * (24 * h + 4 * s) / t
    activations = tokens * h * (10 + 24 / t + 5 * model.num_heads * s / (h * t))
    weights = 12 * h * h / t
    return StageWork(
        num_layers=1,
        forward=Work(flops, _FORWARD_PASSES * activations + _HALF * weights),
        backward=Work(
            _BACKWARD_FLOPS * flops,
            _BACKWARD_PASSES * activations + (_HALF + _GRADIENT) * weights,
        ),
    )


def _embedding(model: TransformerModel, microbatch_size: int) -> Work:
    """The embedding, forward or backward: memory traffic alone."""
    tokens = microbatch_size * model.sequence_length
    return Work(0.0, _EMBEDDING_BYTES * tokens * model.hidden_size)


def _head(model: TransformerModel, microbatch_size: int, tensor_parallel: int) -> StageWork:
    """The final norm, the product with the vocabulary, and the loss."""
    tokens = microbatch_size * model.sequence_length
    logits = tokens * model.vocabulary_size / tensor_parallel
    flops = 2 * model.hidden_size * logits
    weights = model.hidden_size * model.vocabulary_size / tensor_parallel
    traffic = _NORM_BYTES * tokens * model.hidden_size + _LOGIT_BYTES * logits + _HALF * weights
    return StageWork(
        num_layers=0,
        forward=Work(flops, traffic),
        backward=Work(_BACKWARD_FLOPS * flops, traffic + _GRADIENT * weights),
    )


def stage_works(
    model: TransformerModel,
    *,
    num_stages: int,
    microbatch_size: int,
    tensor_parallel: int = 1,
    cost: Callable[[Work], float],
) -> list[StageWork]:
    """Split a model over pipeline stages for least imbalance, and say what each has to do.

    The embedding is on the first stage, the final norm and the vocabulary head on the last.

    Args:
        model: what is trained.
        num_stages: pipeline stages, at most one per layer.
        microbatch_size: samples per microbatch.
        tensor_parallel: GPUs that share each layer; the work is that of one of them.
        cost: seconds (or any measure) of a piece of work, by which stages are balanced.

    Returns:
        num_stages stages in order.

    Raises:
        InputError: there are more stages than layers, or none.
    """
    layer = _layer(model, microbatch_size, tensor_parallel)
    embedding = _embedding(model, microbatch_size)
    head = _head(model, microbatch_size, tensor_parallel)
    layers = partition(
        model.num_layers,
        num_stages,
        layer=cost(layer.forward) + cost(layer.backward),
        first=2 * cost(embedding),
        last=cost(head.forward) + cost(head.backward),
    )
    stages = []
    for stage, count in enumerate(layers):
        forward = _times(count, layer.forward)
        backward = _times(count, layer.backward)
        if stage == 0:
            forward, backward = forward + embedding, backward + embedding
        if stage == num_stages - 1:
            forward, backward = forward + head.forward, backward + head.backward
        stages.append(StageWork(count, forward, backward))
    return stages


def _times(count: int, work: Work) -> Work:
    return Work(count * work.flops, count * work.traffic)


def partition(
    num_layers: int, num_stages: int, *, layer: float, first: float = 0.0, last: float = 0.0
) -> list[int]:
    """Layers per stage such that the slowest stage is the least times slower than the fastest.

    That ratio is how Perseus (SOSP 2024) measures imbalance. Layers cost the same, so a split
    is a number of layers for the first stage, one for the last, and an even share of the rest for
    those between. Of equal splits the one with fewer layers on earlier stages wins: those keep
    the activations of more microbatches.

    Args:
        num_layers: layers to split.
        num_stages: stages, each of which gets at least one layer.
        layer: cost of a layer.
        first: further cost on the first stage.
        last: further cost on the last stage.

    Returns:
        num_stages counts that sum to num_layers.

    Raises:
        InputError: there are more stages than layers, or none.
    """
    if not 1 <= num_stages <= num_layers:
        raise InputError(
            f"{num_layers} layers cannot be split over {num_stages} stages; "
            f"choose 1 to {num_layers} stages"
        )
    if num_stages == 1:
        return [num_layers]
    between = num_stages - 2
    splits = []
    for head in range(1, num_layers - num_stages + 2):
        for tail in range(1, num_layers - head - between + 1):
            middle = num_layers - head - tail
            if (between == 0) != (middle == 0):
                continue
            splits.append([head, *_even(middle, between), tail])
    return min(splits, key=lambda split: (_imbalance(split, layer, first, last), split))


def _even(total: int, parts: int) -> list[int]:
    """Shares of `total` that differ by one at most, the smaller ones in front."""
    return [(total + part) // parts for part in range(parts)]


def _imbalance(split: Sequence[int], layer: float, first: float, last: float) -> float:
    costs = [count * layer for count in split]
    costs[0] += first
    costs[-1] += last
    return max(costs) / min(costs)
