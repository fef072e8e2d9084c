"""Kernels by their sizes, and what each asks of a GPU.

Flops are padded by what a kernel does for nothing: parts of its tiles that lie outside the
matrices, multiprocessors without a tile in the last wave, and the first and last steps of each
tile. `kernel_model` turns them into seconds and watts.

Sizes of a kernel are whole numbers, or arrays of them for many kernels at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt

__all__ = [
    "Attention",
    "Demand",
    "ElementWise",
    "ExpertProducts",
    "FloatArray",
    "Kernel",
    "KernelKind",
    "MatrixProduct",
]

FloatArray = npt.NDArray[np.float64]
#: A size of one kernel, or of many.
Size = int | npt.NDArray[np.int64]

_HALF_BYTES: Final = 2
#: Side of the smallest tiles that kernels cut a result into.
_TILE: Final = 64
#: Widths of experts that are no multiples of this make their products take twice as long.
_ALIGNED: Final = 16
_UNALIGNED_COST: Final = 2.0
#: Cost of an attention's backward over its forward: five products for two, at 0.87 of the rate that
#: the forward reaches (FlashAttention-3, 2024, figures 5 and 6, heads of 128, 16,384 tokens).
_BACKWARD_COST: Final = 2.5 / 0.87
#: Widths of heads that attention has kernels for.
_HEAD_WIDTHS: Final = (64, 128, 192, 256, 512)


class Demand(NamedTuple):
    """What a kernel asks of a GPU.

    Attributes:
        padded_flops: floating-point operations, with those for nothing.
        num_bytes: that it moves between the GPU and its memory while it computes.
        serial_bytes: that it moves before and after.
    """

    padded_flops: FloatArray
    num_bytes: FloatArray
    serial_bytes: FloatArray


@dataclass(frozen=True, kw_only=True)
class KernelKind:
    """Coefficients of a kind of kernels on a GPU.

    Attributes:
        efficiency: share of the peak that it reaches in full tiles.
        memory_efficiency: share of the bandwidth that it reaches.
        start_us: time of any such kernel, however small, microseconds.
        sharpness: s; 1: math and memory follow each other; large: the longer hides the other.
        depth_overhead: steps of the inner loop that each tile costs besides its own.
        wave_overhead: waves of tiles that a kernel costs besides its own.
        tile_rows: tokens of a tile of an attention; wide heads leave room for fewer.
        tokens_overhead: times that experts move all tokens before and after the products.
        math_weight: activity while it does nothing but compute, above the base.
        memory_weight: activity while it does nothing but move data, above the base.
        time_error: of kernels kept aside, root mean square as a fraction.
        power_error: of kernels kept aside, root mean square as a fraction.
    """

    efficiency: float
    memory_efficiency: float
    start_us: float
    sharpness: float
    depth_overhead: float = 0.0
    wave_overhead: float = 0.0
    tile_rows: float = 128.0
    tokens_overhead: float = 0.0
    math_weight: float
    memory_weight: float
    time_error: float
    power_error: float


class Kernel(Protocol):
    """A kernel, by its sizes."""

    @property
    def kind(self) -> str:
        """Its kind in kernels.toml."""

    @property
    def flops(self) -> FloatArray:
        """Floating-point operations, without padding."""

    @property
    def saved_bytes(self) -> FloatArray:
        """Activations that it reads and a backward reads again."""

    def demand(self, coefficients: KernelKind, multiprocessors: int) -> Demand:
        """What it asks of a GPU with so many multiprocessors."""


@dataclass(frozen=True)
class MatrixProduct:
    """A product of a (rows, depth) and a (depth, columns) matrix, in half precision."""

    rows: Size
    columns: Size
    depth: Size

    @property
    def kind(self) -> str:
        """Its kind in kernels.toml."""
        return "matrix_product"

    @property
    def flops(self) -> FloatArray:
        """Floating-point operations, without padding."""
        rows, columns, depth = _as_floats(self.rows, self.columns, self.depth)
        return 2 * rows * columns * depth

    @property
    def saved_bytes(self) -> FloatArray:
        """Activations that it reads and a backward reads again."""
        rows, depth = _as_floats(self.rows, self.depth)
        return _HALF_BYTES * rows * depth

    def demand(self, coefficients: KernelKind, multiprocessors: int) -> Demand:
        """What it asks of a GPU with so many multiprocessors."""
        rows, columns, depth = _as_floats(self.rows, self.columns, self.depth)
        tiles = np.ceil(rows / _TILE) * np.ceil(columns / _TILE)
        waves = _waves(tiles, multiprocessors) + coefficients.wave_overhead
        flops_of_wave = multiprocessors * 2 * _TILE * _TILE * (depth + coefficients.depth_overhead)
        elements = rows * depth + depth * columns + rows * columns
        return Demand(waves * flops_of_wave, _HALF_BYTES * elements, np.zeros(()))


@dataclass(frozen=True)
class Attention:
    """Fused attention of sequences to themselves; a token attends to those before it.

    Attributes:
        sequences: how many.
        tokens: of each.
        heads: of queries, on this GPU.
        key_value_heads: of keys and values, on this GPU.
        key_size: width of a head's queries and keys.
        value_size: width of a head's values.
        window: tokens that a token attends to at most; 0: all before it.
        causal: False where a token attends to those after it, too.
        is_backward: whether it is the backward of one.
    """

    sequences: Size
    tokens: Size
    heads: Size
    key_value_heads: Size
    key_size: Size
    value_size: Size
    window: Size = 0
    causal: bool = True
    is_backward: bool = False

    @property
    def kind(self) -> str:
        """Its kind in kernels.toml: that of the narrowest heads that its own fit into."""
        widest = int(np.max(self.key_size))
        width = next((width for width in _HEAD_WIDTHS if widest <= width), _HEAD_WIDTHS[-1])
        return f"attention_{width}"

    @property
    def flops(self) -> FloatArray:
        """Floating-point operations, without padding: of two products, or five backward."""
        sequences, tokens, heads = _as_floats(self.sequences, self.tokens, self.heads)
        key_size, value_size = _as_floats(self.key_size, self.value_size)
        pairs = sequences * tokens * self._attended() * heads
        forward = 2 * pairs * (key_size + value_size)
        return (2.5 if self.is_backward else 1.0) * forward

    @property
    def saved_bytes(self) -> FloatArray:
        """Activations that it reads and a backward reads again."""
        sequences, tokens, key_value_heads = _as_floats(
            self.sequences, self.tokens, self.key_value_heads
        )
        heads, key_size, value_size = _as_floats(self.heads, self.key_size, self.value_size)
        widths = (heads + key_value_heads) * key_size + key_value_heads * value_size
        return _HALF_BYTES * sequences * tokens * widths

    def demand(self, coefficients: KernelKind, multiprocessors: int) -> Demand:
        """What it asks of a GPU with so many multiprocessors."""
        sequences, tokens, heads = _as_floats(self.sequences, self.tokens, self.heads)
        key_value_heads, key_size, value_size = _as_floats(
            self.key_value_heads, self.key_size, self.value_size
        )
        tiles = sequences * heads * np.ceil(tokens / coefficients.tile_rows)
        waves = _waves(tiles, multiprocessors) + coefficients.wave_overhead
        attended = self._attended() + coefficients.depth_overhead
        rows_of_wave = multiprocessors * coefficients.tile_rows
        flops_of_wave = 2 * rows_of_wave * attended * (key_size + value_size)
        elements = sequences * tokens * (heads + key_value_heads) * (key_size + value_size)
        flops, num_bytes = waves * flops_of_wave, _HALF_BYTES * elements
        if self.is_backward:
            flops, num_bytes = _BACKWARD_COST * flops, 2 * num_bytes
        return Demand(flops, num_bytes, np.zeros(()))

    def _attended(self) -> FloatArray:
        """Tokens that a token attends to, on average."""
        tokens, window = _as_floats(self.tokens, self.window)
        if not self.causal:
            return tokens
        window = np.where(window > 0, np.minimum(window, tokens), tokens)
        return window - window * window / (2 * tokens)


@dataclass(frozen=True)
class ExpertProducts:
    """Gated feed-forward experts of a layer, all in one kernel.

    Attributes:
        tokens: that are shared out.
        hidden_size: width of a token.
        expert_size: inner width of an expert, on this GPU.
        per_token: experts that a token takes.
        experts: of the layer.
        local_experts: of these on this GPU.
    """

    tokens: Size
    hidden_size: Size
    expert_size: Size
    per_token: Size
    experts: Size
    local_experts: Size

    @property
    def kind(self) -> str:
        """Its kind in kernels.toml."""
        return "experts"

    @property
    def flops(self) -> FloatArray:
        """Floating-point operations, without padding."""
        tokens, hidden_size, expert_size = _as_floats(
            self.tokens, self.hidden_size, self.expert_size
        )
        per_token, experts, local_experts = _as_floats(
            self.per_token, self.experts, self.local_experts
        )
        return 6 * tokens * per_token * local_experts / experts * hidden_size * expert_size

    @property
    def saved_bytes(self) -> FloatArray:
        """Activations that it reads and a backward reads again."""
        tokens, hidden_size, expert_size = _as_floats(
            self.tokens, self.hidden_size, self.expert_size
        )
        per_token, experts, local_experts = _as_floats(
            self.per_token, self.experts, self.local_experts
        )
        rows = tokens * per_token * local_experts / experts
        return _HALF_BYTES * rows * (hidden_size + 3 * expert_size)

    def demand(self, coefficients: KernelKind, multiprocessors: int) -> Demand:
        """What it asks of a GPU with so many multiprocessors."""
        tokens, hidden_size, expert_size = _as_floats(
            self.tokens, self.hidden_size, self.expert_size
        )
        per_token, experts, local_experts = _as_floats(
            self.per_token, self.experts, self.local_experts
        )
        rows_of_expert = tokens * per_token / experts
        # Tiles are as high as twice the smallest where experts have enough tokens.
        height = np.where(rows_of_expert > _TILE, 2 * _TILE, _TILE)
        padded_rows = height * np.ceil(rows_of_expert / height)
        # Experts that no token takes are neither read nor computed.
        used_experts = local_experts * (1 - np.exp(-rows_of_expert))
        padded_size = _TILE * np.ceil(expert_size / _TILE)
        flops_of_row = 6 * hidden_size * (padded_size + coefficients.depth_overhead)
        flops_of_row = np.where(expert_size % _ALIGNED, _UNALIGNED_COST, 1.0) * flops_of_row
        weights = used_experts * 3 * hidden_size * expert_size
        moved = coefficients.tokens_overhead * (hidden_size + expert_size)
        return Demand(
            padded_flops=used_experts * padded_rows * flops_of_row,
            num_bytes=_HALF_BYTES * weights,
            serial_bytes=_HALF_BYTES * tokens * per_token * moved,
        )


@dataclass(frozen=True)
class ElementWise:
    """Norms, activations, sums: they read and write, and compute next to nothing."""

    num_bytes: float | npt.NDArray[np.float64]

    @property
    def kind(self) -> str:
        """Its kind in kernels.toml."""
        return "element_wise"

    @property
    def flops(self) -> FloatArray:
        """None that count."""
        return np.zeros(())

    @property
    def saved_bytes(self) -> FloatArray:
        """None that products beside it do not read."""
        return np.zeros(())

    def demand(self, coefficients: KernelKind, multiprocessors: int) -> Demand:
        """What it asks of a GPU with so many multiprocessors."""
        return Demand(np.zeros(()), np.asarray(self.num_bytes, dtype=np.float64), np.zeros(()))


def _as_floats(*sizes: Size) -> list[FloatArray]:
    return [np.asarray(size, dtype=np.float64) for size in sizes]


def _waves(tiles: FloatArray, multiprocessors: int) -> FloatArray:
    """Rounds in which all multiprocessors have a tile; the last one's are shared in part."""
    waves = tiles / multiprocessors
    return cast(FloatArray, np.where(waves < 1, 1.0, 0.5 * (waves + np.ceil(waves))))
