"""Blocks of today's language models, each with its parameters and kernels.

Parameters are all of a block's own, its inner norms and biases included; norms between blocks
belong to the layer. Kernels are those of one of the GPUs that share a stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

from envplan.profiling.blocks import (
    Share,
    activation_kernels,
    attention_kernels,
    expert_kernels,
    product_kernels,
    rotary_kernels,
)
from envplan.profiling.work import HALF_BYTES, ModuleKernels

__all__ = [
    "Block",
    "FeedForward",
    "GatedDeltaNet",
    "GroupedAttention",
    "LatentSparseAttention",
    "Mamba2",
    "MixtureOfExperts",
    "PerLayerInput",
    "ShortConvolution",
]

#: Tokens that the delta rule's kernels take at a time (Yang et al., "Gated Delta Networks", 2024).
_DELTA_CHUNK: Final = 64


class Block(Protocol):
    """A part of a layer."""

    @property
    def name(self) -> str:
        """What it is called in a table of parts."""

    @property
    def parameters(self) -> int:
        """All of them."""

    def kernels(self, share: Share) -> ModuleKernels:
        """What it runs on one GPU."""


@dataclass(frozen=True, kw_only=True)
class GroupedAttention:
    """Attention whose heads share keys and values in groups.

    Attributes:
        hidden_size: width of a token.
        heads: of queries.
        key_value_heads: of keys and values.
        head_size: width of a head.
        window: tokens that a token attends to at most; 0: all before it.
        has_gate: queries come with a gate for the result (Qwen3-Next).
        shares_values: keys are values, too (Gemma 4).
        reuses_keys: keys and values are those of an earlier layer (Gemma 4).
        has_bias: the products that make queries, keys and values have biases.
        has_output_bias: so has the one behind the core.
        inner_norms: parameters of norms of queries and keys.
    """

    hidden_size: int
    heads: int
    key_value_heads: int
    head_size: int
    window: int = 0
    has_gate: bool = False
    shares_values: bool = False
    reuses_keys: bool = False
    has_bias: bool = False
    has_output_bias: bool = False
    inner_norms: int = 0

    name = "core_attention"

    @property
    def _made(self) -> int:
        """Width of what the first products make."""
        queries = (2 if self.has_gate else 1) * self.heads
        key_values = (1 if self.shares_values else 2) * self.key_value_heads
        if self.reuses_keys:
            key_values = 0
        return (queries + key_values) * self.head_size

    @property
    def parameters(self) -> int:
        """All of them."""
        biases = (self._made if self.has_bias else 0) + (
            self.hidden_size if self.has_output_bias else 0
        )
        products = self.hidden_size * (self._made + self.heads * self.head_size)
        return products + biases + self.inner_norms

    def kernels(self, share: Share) -> ModuleKernels:
        """What it runs on one GPU."""
        heads, key_value_heads = share.part_of(self.heads), share.part_of(self.key_value_heads)
        width = heads * self.head_size
        kernels = product_kernels(share, share.part_of(self._made), self.hidden_size)
        kernels += rotary_kernels(share, (heads + key_value_heads) * self.head_size)
        kernels += attention_kernels(
            share,
            heads=heads,
            key_value_heads=key_value_heads,
            key_size=self.head_size,
            value_size=self.head_size,
            window=self.window,
        )
        if self.has_gate:
            kernels += activation_kernels(share, width, gated=True)
        return kernels + product_kernels(share, self.hidden_size, width)


@dataclass(frozen=True, kw_only=True)
class LatentSparseAttention:
    """Latent attention to the tokens that a small attention, the indexer, picks.

    (DeepSeek-V3.2, 2025, section 2.1; without an indexer DeepSeek-V2, 2024)

    Attributes:
        hidden_size: width of a token.
        heads: of queries, keys and values.
        query_rank: width between the two products that make queries; 0: there is one product.
        rank: width of the vector that keys and values come from.
        key_size: width of a head's keys without position.
        rotary_size: width of a head's keys with position.
        value_size: width of a head's values.
        index_heads: of the indexer; 0: there is none, and tokens attend to all before them.
        index_size: width of its heads.
        index_tokens: that it picks.
    """

    hidden_size: int
    heads: int
    query_rank: int
    rank: int
    key_size: int
    rotary_size: int
    value_size: int
    index_heads: int = 0
    index_size: int = 0
    index_tokens: int = 0

    name = "core_attention"

    @property
    def parameters(self) -> int:
        """All of them."""
        hidden, wide_key = self.hidden_size, self.key_size + self.rotary_size
        queries = (self.query_rank or hidden) * self.heads * wide_key
        if self.query_rank:
            queries += hidden * self.query_rank + self.query_rank  # with a norm
        narrow = hidden * (self.rank + self.rotary_size) + self.rank
        key_values = self.rank * self.heads * (self.key_size + self.value_size)
        out = self.heads * self.value_size * hidden
        return queries + narrow + key_values + out + self._index_parameters

    @property
    def _index_parameters(self) -> int:
        if not self.index_heads:
            return 0
        queries = (self.query_rank or self.hidden_size) * self.index_heads * self.index_size
        key_norm = 2 * self.index_size
        return queries + self.hidden_size * (self.index_size + self.index_heads) + key_norm

    def kernels(self, share: Share) -> ModuleKernels:
        """What it runs on one GPU; each has the products that make narrow vectors."""
        hidden, heads = self.hidden_size, share.part_of(self.heads)
        wide_key = self.key_size + self.rotary_size
        kernels = product_kernels(share, self.query_rank, hidden)
        kernels += product_kernels(share, heads * wide_key, self.query_rank or hidden)
        kernels += product_kernels(share, self.rank + self.rotary_size, hidden)
        kernels += product_kernels(share, heads * (self.key_size + self.value_size), self.rank)
        kernels += rotary_kernels(share, 2 * heads * wide_key)
        kernels += self._index_kernels(share)
        kernels += attention_kernels(
            share,
            heads=heads,
            key_value_heads=heads,
            key_size=wide_key,
            value_size=self.value_size,
            window=self.index_tokens,
        )
        return kernels + product_kernels(share, hidden, heads * self.value_size)

    def _index_kernels(self, share: Share) -> ModuleKernels:
        """Of the indexer: its scores are those of an attention without values."""
        if not self.index_heads:
            return ModuleKernels()
        width = self.index_heads * self.index_size
        kernels = product_kernels(share, width, self.query_rank or self.hidden_size)
        kernels += product_kernels(share, self.index_size + self.index_heads, self.hidden_size)
        # Causal: half the pairs of tokens.
        scored = self.index_heads * share.num_tokens
        return kernels + ModuleKernels.of_activations(
            scored, share.sequence_length, self.index_size, count=0.5
        )


@dataclass(frozen=True, kw_only=True)
class FeedForward:
    """Two products with an activation between them, or three of which one gates.

    Attributes:
        hidden_size: width of a token.
        width: between the products.
        is_gated: whether there are three.
        has_bias: whether products have biases.
    """

    hidden_size: int
    width: int
    is_gated: bool = True
    has_bias: bool = False

    name = "mlp"

    @property
    def parameters(self) -> int:
        """All of them."""
        num_up = 2 if self.is_gated else 1
        biases = num_up * self.width + self.hidden_size if self.has_bias else 0
        return (num_up + 1) * self.hidden_size * self.width + biases

    def kernels(self, share: Share) -> ModuleKernels:
        """What it runs on one GPU."""
        width = share.part_of(self.width)
        num_up = 2 if self.is_gated else 1
        return (
            product_kernels(share, num_up * width, self.hidden_size)
            + activation_kernels(share, width, gated=self.is_gated)
            + product_kernels(share, self.hidden_size, width)
        )


@dataclass(frozen=True, kw_only=True)
class MixtureOfExperts:
    """Feed-forward parts of which each token takes a few, and one that all take.

    Attributes:
        hidden_size: width of a token.
        count: experts.
        per_token: that a token takes.
        width: of an expert.
        shared_width: of what all tokens take; 0: there is none.
        has_shared_gate: a token says how much of that it takes.
        is_gated: whether experts have three products.
        latent_size: width that tokens are narrowed to for the experts; 0: they are not.
        other_parameters: of norms and biases.
    """

    hidden_size: int
    count: int
    per_token: int
    width: int
    shared_width: int = 0
    has_shared_gate: bool = False
    is_gated: bool = True
    latent_size: int = 0
    other_parameters: int = 0

    name = "mlp"

    @property
    def _shared(self) -> FeedForward:
        return FeedForward(
            hidden_size=self.hidden_size, width=self.shared_width, is_gated=self.is_gated
        )

    @property
    def parameters(self) -> int:
        """All of them."""
        expert_input = self.latent_size or self.hidden_size
        products = (3 if self.is_gated else 2) * expert_input * self.width
        narrowing = 2 * self.hidden_size * self.latent_size
        router = self.hidden_size * self.count
        shared_gate = self.hidden_size if self.has_shared_gate else 0
        shared = self._shared.parameters
        own = self.count * products + router + narrowing
        return own + shared + shared_gate + self.other_parameters

    def kernels(self, share: Share) -> ModuleKernels:
        """What it runs on one GPU; experts without a gate cost two thirds of gated ones."""
        expert_input = self.latent_size or self.hidden_size
        width = self.width if self.is_gated else round(self.width * 2 / 3)
        kernels = product_kernels(share, self.count, self.hidden_size)
        kernels += product_kernels(share, self.latent_size, self.hidden_size)
        kernels += product_kernels(share, self.hidden_size, self.latent_size)
        kernels += expert_kernels(
            share,
            hidden_size=expert_input,
            expert_size=width,
            per_token=self.per_token,
            count=self.count,
        )
        return kernels + self._shared.kernels(share) if self.shared_width else kernels


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNet:
    """Linear attention with the gated delta rule (Yang et al., "Gated Delta Networks", 2024).

    Attributes:
        hidden_size: width of a token.
        key_heads: of queries and keys.
        value_heads: of values.
        key_size: width of a head's keys.
        value_size: width of a head's values.
        kernel_size: tokens that the convolution in front sees.
    """

    hidden_size: int
    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    kernel_size: int

    name = "linear_attention"

    @property
    def _convolved(self) -> int:
        """Width of queries, keys and values together."""
        return 2 * self.key_heads * self.key_size + self.value_heads * self.value_size

    @property
    def parameters(self) -> int:
        """All of them."""
        values = self.value_heads * self.value_size
        made = self._convolved + values + 2 * self.value_heads  # with gates
        decays = 2 * self.value_heads
        norm = self.value_size
        products = self.hidden_size * (made + values)
        return products + self.kernel_size * self._convolved + decays + norm

    def kernels(self, share: Share) -> ModuleKernels:
        """What it runs on one GPU: the chunked form of the paper's section 3.3."""
        values = share.part_of(self.value_heads) * self.value_size
        convolved = share.part_of(self._convolved)
        made = convolved + values + 2 * share.part_of(self.value_heads)
        rows, chunk = share.part_of(self.value_heads) * share.num_tokens, _DELTA_CHUNK
        of_activations = ModuleKernels.of_activations
        return (
            product_kernels(share, made, self.hidden_size)
            + activation_kernels(share, convolved, gated=False)
            + of_activations(rows, chunk, self.key_size, count=2)  # keys with keys, and queries
            + of_activations(rows, self.value_size, chunk, count=2)  # and both with values
            + of_activations(rows, self.key_size, chunk)
            + of_activations(rows, self.value_size, self.key_size, count=3)  # with the state
            + activation_kernels(share, values, gated=True)
            + product_kernels(share, self.hidden_size, values)
        )


@dataclass(frozen=True, kw_only=True)
class Mamba2:
    """A state space model (Dao and Gu, "Transformers are SSMs", 2024).

    Attributes:
        hidden_size: width of a token.
        heads: of the inner width.
        head_size: width of a head.
        groups: of heads that share their input and output matrices.
        state_size: numbers that each unit remembers.
        kernel_size: tokens that the convolution in front sees.
        chunk_size: tokens that are taken at a time.
        has_bias: whether the first product has a bias.
        has_output_bias: whether the last one has.
        has_convolution_bias: whether the convolution has.
        has_norm: whether there is a norm in front of the last product.
    """

    hidden_size: int
    heads: int
    head_size: int
    groups: int
    state_size: int
    kernel_size: int
    chunk_size: int
    has_bias: bool = False
    has_output_bias: bool = False
    has_convolution_bias: bool = True
    has_norm: bool = True

    name = "state_space"

    @property
    def _inner(self) -> int:
        return self.heads * self.head_size

    @property
    def _convolved(self) -> int:
        return self._inner + 2 * self.groups * self.state_size

    @property
    def parameters(self) -> int:
        """All of them."""
        made = self._inner + self._convolved + self.heads
        convolution = self._convolved * (self.kernel_size + self.has_convolution_bias)
        biases = made * self.has_bias + self.hidden_size * self.has_output_bias
        of_heads = 3 * self.heads  # decay, its bias, and what passes by
        products = self.hidden_size * (made + self._inner)
        return products + convolution + biases + of_heads + self._inner * self.has_norm

    def kernels(self, share: Share) -> ModuleKernels:
        """What it runs on one GPU: the chunked form of the paper's section 6."""
        inner, heads = share.part_of(self._inner), share.part_of(self.heads)
        convolved = share.part_of(self._convolved)
        rows, chunk, state = heads * share.num_tokens, self.chunk_size, self.state_size
        of_activations = ModuleKernels.of_activations
        return (
            product_kernels(share, inner + convolved + heads, self.hidden_size)
            + activation_kernels(share, convolved, gated=False)
            + of_activations(share.part_of(self.groups) * share.num_tokens, chunk, state)
            + of_activations(rows, self.head_size, chunk)
            + of_activations(rows, self.head_size, state, count=2)  # into the state and out of it
            + activation_kernels(share, inner, gated=True)
            + product_kernels(share, self.hidden_size, inner)
        )


@dataclass(frozen=True, kw_only=True)
class ShortConvolution:
    """A gated convolution over a few tokens (LFM2).

    Attributes:
        hidden_size: width of a token.
        kernel_size: tokens that it sees.
        has_bias: whether its products and itself have biases.
    """

    hidden_size: int
    kernel_size: int
    has_bias: bool = False

    name = "convolution"

    @property
    def parameters(self) -> int:
        """All of them."""
        biases = 5 * self.hidden_size if self.has_bias else 0
        return 4 * self.hidden_size**2 + self.kernel_size * self.hidden_size + biases

    def kernels(self, share: Share) -> ModuleKernels:
        """What it runs on one GPU."""
        width = share.part_of(self.hidden_size)
        return (
            product_kernels(share, 3 * width, self.hidden_size)
            + activation_kernels(share, width, gated=True)  # gates what goes in
            + activation_kernels(share, width, gated=True)  # and what comes out
            + product_kernels(share, self.hidden_size, width)
        )


@dataclass(frozen=True, kw_only=True)
class PerLayerInput:
    """A layer's own embedding of each token, gated by the hidden state (Gemma 3n, Gemma 4).

    Attributes:
        hidden_size: width of a token.
        width: of the layer's own embedding.
    """

    hidden_size: int
    width: int

    name = "per_layer_input"

    @property
    def parameters(self) -> int:
        """All of them."""
        return 2 * self.hidden_size * self.width

    def kernels(self, share: Share) -> ModuleKernels:
        """What it runs on one GPU, the look-up included."""
        look_up = ModuleKernels.of_element_wise(HALF_BYTES * 2 * share.num_tokens * self.width)
        return (
            look_up
            + product_kernels(share, self.width, self.hidden_size)
            + activation_kernels(share, self.width, gated=True)
            + product_kernels(share, self.hidden_size, self.width)
        )
