"""Blocks that layers of language models are made of: the kernels that each runs on a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from envplan.profiling.kernels import Attention, ExpertProducts, Kernel, MatrixProduct
from envplan.profiling.work import HALF_BYTES, ModuleKernels

__all__ = [
    "Share",
    "activation_kernels",
    "attention_kernels",
    "expert_kernels",
    "product_kernels",
    "residual_kernels",
    "rotary_kernels",
    "unfused_attention_kernels",
]

# Values that element-wise kernels read and write, forward, with what is commonly fused: a norm
# reads its input and writes its output; a sum with the residual stream reads two and writes one; a
# rotary embedding reads and writes; a gated activation reads two and writes one.
_NORM_VALUES: Final = 2
_RESIDUAL_VALUES: Final = 3
_ROTARY_VALUES: Final = 2
_GATED_VALUES: Final = 3
_PLAIN_VALUES: Final = 2


@dataclass(frozen=True)
class Share:
    """What one of the GPUs that share a stage has of a microbatch and of a model.

    Attributes:
        num_tokens: tokens that pass through its layers.
        sequence_length: tokens of a sample.
        tensor_parallel: GPUs that share each layer.
    """

    num_tokens: int
    sequence_length: int
    tensor_parallel: int = 1

    @property
    def num_sequences(self) -> float:
        """Samples; a part of one where GPUs share its tokens."""
        return self.num_tokens / self.sequence_length

    def part_of(self, size: int) -> int:
        """What a GPU has of heads or units that all share; one at least."""
        return -(-size // self.tensor_parallel)


def product_kernels(share: Share, columns: int, depth: int) -> ModuleKernels:
    """Of a product of all tokens (tokens, depth) with weights (depth, columns)."""
    return ModuleKernels.of_product(share.num_tokens, columns, depth)


def residual_kernels(share: Share, hidden_size: int) -> ModuleKernels:
    """Of a norm in front of a block, and the sum of its result with the residual stream."""
    values = _NORM_VALUES + _RESIDUAL_VALUES
    return ModuleKernels.of_element_wise(HALF_BYTES * values * share.num_tokens * hidden_size)


def rotary_kernels(share: Share, width: int) -> ModuleKernels:
    """Of a rotary embedding, or a norm, of queries and keys of such a width together."""
    return ModuleKernels.of_element_wise(HALF_BYTES * _ROTARY_VALUES * share.num_tokens * width)


def activation_kernels(share: Share, width: int, *, gated: bool) -> ModuleKernels:
    """Of the activation of a feed-forward part that is so wide on this GPU."""
    values = _GATED_VALUES if gated else _PLAIN_VALUES
    return ModuleKernels.of_element_wise(HALF_BYTES * values * share.num_tokens * width)


def attention_kernels(
    share: Share,
    *,
    heads: int,
    key_value_heads: int,
    key_size: int,
    value_size: int,
    window: int = 0,
    causal: bool = True,
) -> ModuleKernels:
    """Of a fused attention's core; heads are those on this GPU."""
    whole_sequences = max(1, round(share.num_sequences))
    count = share.num_sequences / whole_sequences  # below 1 where GPUs share a sample's tokens

    def kernel(is_backward: bool) -> Kernel:
        return Attention(
            sequences=whole_sequences,
            tokens=share.sequence_length,
            heads=heads,
            key_value_heads=key_value_heads,
            key_size=key_size,
            value_size=value_size,
            window=window,
            causal=causal,
            is_backward=is_backward,
        )

    return ModuleKernels(
        forward={kernel(is_backward=False): count},
        backward_input={kernel(is_backward=True): count},
    )


def unfused_attention_kernels(
    share: Share, *, heads: int, head_size: int, score_bytes: float
) -> ModuleKernels:
    """Of an attention whose scores reach memory: two products of activations, and the softmax.

    Args:
        share: tokens of a GPU.
        heads: on this GPU.
        head_size: width of a head.
        score_bytes: that the softmax moves forward.
    """
    rows, tokens = heads * share.num_tokens, share.sequence_length
    scores = MatrixProduct(rows, tokens, head_size)
    mixed = MatrixProduct(rows, head_size, tokens)
    softmax = ModuleKernels.of_element_wise(score_bytes)
    # Each of the two factors of each product gets a gradient.
    return softmax + ModuleKernels(
        forward={scores: 1.0, mixed: 1.0}, backward_input={scores: 2.0, mixed: 2.0}
    )


def expert_kernels(
    share: Share, *, hidden_size: int, expert_size: int, per_token: int, count: int
) -> ModuleKernels:
    """Of gated experts, all on the GPUs that share the layer, each of which has a part of each.

    Gradients of inputs and of weights take as long as the forward each.
    """
    experts = ExpertProducts(
        tokens=share.num_tokens,
        hidden_size=hidden_size,
        expert_size=share.part_of(expert_size),
        per_token=per_token,
        experts=count,
        local_experts=count,
    )
    return ModuleKernels({experts: 1.0}, {experts: 1.0}, {experts: 1.0})
