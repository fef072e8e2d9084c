"""The stages of the known workloads as torch modules, with the sizes of `models.py`.

Each stage takes what the one before sends and returns what the next one needs: tokens or images
come in at the first stage, hidden states (feature maps) go on, a loss comes out of the last. With
tensor parallelism the module is the shard of one rank: products are split by columns, then by
rows, heads and vocabulary over the ranks, and what the ranks would send each other is left out.

Only `torch_workloads` imports this module, and says so if torch is not installed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from envplan.errors import InputError
from envplan.profiling.workloads import Convolution, ConvolutionalModel, Model, TransformerModel

__all__ = ["How", "Stage", "model_stages"]

#: A stage's module and its sample inputs, made when its turn comes.
Stage = Callable[[], tuple[nn.Module, tuple[Any, ...]]]

# T5 tells apart distances up to so many tokens.
_FARTHEST: Final = 128


@dataclass(frozen=True, kw_only=True)
class How:
    """How a model is run.

    Attributes:
        microbatch_size: samples.
        dtype: of weights and activations.
        device: where, such as "cuda:0".
        tensor_parallel: ranks that share a layer; the modules are those of one.
        recompute: a layer keeps its inputs only, and its backward does its forward again.
        causal: a token attends to those before it only; in a decoder behind an encoder it does.
    """

    microbatch_size: int
    dtype: torch.dtype
    device: str
    tensor_parallel: int = 1
    recompute: bool = False
    causal: bool = True


def model_stages(model: Model, layers: Sequence[int], how: How) -> list[Stage]:
    """What makes each stage's module and a random microbatch for it.

    Args:
        model: what is trained.
        layers: of each stage, as in `StageWork.num_layers`; for T5 encoder layers come first.
        how: how it is run.

    Raises:
        InputError: widths or words do not divide by the tensor-parallel ranks.
    """
    if isinstance(model, TransformerModel):
        for count, what in (
            (model.feed_forward_width, "units of a feed-forward"),
            (model.vocabulary_size, "words"),
        ):
            if count % how.tensor_parallel:
                raise InputError(
                    f"--tp {how.tensor_parallel} does not divide the {count} {what} of the workload"
                )
    ends = list(accumulate(layers, initial=0))
    return [
        partial(_made, model, begin, end, end == ends[-1], how) for begin, end in pairwise(ends)
    ]


def _made(
    model: Model, begin: int, end: int, last: bool, how: How
) -> tuple[nn.Module, tuple[Any, ...]]:
    module: nn.Module
    with torch.device(how.device):
        torch.manual_seed(0)
        if isinstance(model, TransformerModel):
            module = _Transformer(model, begin, end, last, how)
            inputs = _sequences(model, begin, end, how)
        else:
            module = _ResNet(model, begin, end, last, how)
            inputs = (_images(model, begin, how),)
        return module.to(how.dtype), inputs


def _run(layer: nn.Module, recompute: bool, *inputs: torch.Tensor | None) -> torch.Tensor:
    out: torch.Tensor = (
        checkpoint(layer, *inputs, use_reentrant=False) if recompute else layer(*inputs)
    )
    return out


def _sequences(model: TransformerModel, begin: int, end: int, how: How) -> tuple[Any, ...]:
    """What `_Transformer` takes in."""
    words, border = model.vocabulary_size // how.tensor_parallel, model.encoder_layers
    shape = (how.microbatch_size, model.sequence_length)

    def tokens() -> torch.Tensor:
        return torch.randint(words, shape) if words else hidden()

    def hidden() -> torch.Tensor:
        return torch.randn(*shape, model.hidden_size, dtype=how.dtype)

    inputs = []
    if border or begin:
        inputs.append(hidden() if begin else tokens())
    if begin <= border < end:
        inputs.append(tokens())
    elif 0 < border < begin:
        inputs.append(hidden())
    return tuple(inputs)


class _Transformer(nn.Module):
    """Encoder layers, decoder layers, or the end of the one and the beginning of the other.

    GPT and BERT have what is called a decoder here, and no encoder. Inputs and outputs between
    stages: hidden states of the encoder up to where the decoder begins, from there on those of the
    decoder and, for all its layers to attend to, the encoder's result.
    """

    def __init__(self, model: TransformerModel, begin: int, end: int, last: bool, how: How) -> None:
        super().__init__()
        border, width = model.encoder_layers, model.hidden_size
        words = model.vocabulary_size // how.tensor_parallel
        starts = begin <= border < end
        self.recompute = how.recompute
        self.source = _Embedding(model, how) if begin == 0 < border else None
        self.encoder = nn.ModuleList(
            _Layer(model, how, cross=False) for _ in range(begin, min(end, border))
        )
        self.encoder_norm = nn.LayerNorm(width, bias=False) if starts and border else None
        self.target = _Embedding(model, how) if starts else None
        self.decoder = nn.ModuleList(
            _Layer(model, how, cross=border > 0) for _ in range(max(begin, border), end)
        )
        distances = [
            _Distances(model, how, causal=causal) if border and layers else None
            for layers, causal in ((self.encoder, False), (self.decoder, True))
        ]
        self.encoder_distances, self.decoder_distances = distances
        self.head = _Head(width, words, bias=not border) if last and words else None

    def forward(self, *inputs: torch.Tensor) -> Any:
        hidden, memory = inputs[0], inputs[-1]
        if self.source is not None:
            hidden = self.source(hidden)
        hidden = self._through(self.encoder, self.encoder_distances, hidden)
        if not self.decoder:
            return hidden
        if self.encoder_norm is not None:
            memory = self.encoder_norm(hidden)
        if self.target is not None:
            hidden = self.target(inputs[-1])
        hidden = self._through(self.decoder, self.decoder_distances, hidden, memory)
        if self.head is not None:
            return self.head(hidden)
        return hidden if self.decoder_distances is None else (hidden, memory)

    def _through(
        self,
        layers: nn.ModuleList,
        distances: nn.Module | None,
        hidden: torch.Tensor,
        memory: torch.Tensor | None = None,
    ) -> torch.Tensor:
        bias = None if distances is None else distances(hidden)
        for layer in layers:
            hidden = _run(layer, self.recompute, hidden, bias, memory)
        return hidden


class _Embedding(nn.Module):
    """Of words; and of positions, where no distances tell them. Without words: nothing to do."""

    def __init__(self, model: TransformerModel, how: How) -> None:
        super().__init__()
        words, width = model.vocabulary_size // how.tensor_parallel, model.hidden_size
        positions = 0 if model.encoder_layers else model.sequence_length
        self.words = nn.Embedding(words, width) if words else None
        self.positions = nn.Embedding(positions, width) if words and positions else None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = tokens if self.words is None else self.words(tokens)
        return hidden if self.positions is None else hidden + self.positions.weight


class _Distances(nn.Module):
    """What attention adds to its scores for how far two tokens are apart, one learned for each.

    T5 shares one among far distances that are alike; looking it up costs the same.
    """

    def __init__(self, model: TransformerModel, how: How, *, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.values = nn.Embedding(2 * _FARTHEST + 1, model.num_heads // how.tensor_parallel)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        at = torch.arange(hidden.shape[1], device=hidden.device)
        apart = at[None, :] - at[:, None]
        near = apart.clamp(-_FARTHEST, _FARTHEST) + _FARTHEST
        bias: torch.Tensor = self.values(near).permute(2, 0, 1).to(hidden.dtype)
        return bias.masked_fill(apart > 0, float("-inf")) if self.causal else bias


class _Layer(nn.Module):
    """Attention to its own tokens, in T5's decoder to the encoder's, and a feed-forward part.

    Norms stand in front, as in GPT-2 and later. T5's have no biases, like its products; they keep
    the mean here, which T5's do not take off: that moves the same bytes.
    """

    def __init__(self, model: TransformerModel, how: How, *, cross: bool) -> None:
        super().__init__()
        width, inner = model.hidden_size, model.feed_forward_width // how.tensor_parallel
        bias = not model.encoder_layers
        self.attention = _Attention(model, how, cross=False)
        self.cross = _Attention(model, how, cross=True) if cross else None
        self.norm = nn.LayerNorm(width, bias=bias)
        self.widen = nn.Linear(width, inner, bias)
        self.narrow = nn.Linear(inner, width, bias)

    def forward(
        self, hidden: torch.Tensor, bias: torch.Tensor | None, memory: torch.Tensor | None
    ) -> torch.Tensor:
        hidden = hidden + self.attention(hidden, bias)
        if self.cross is not None:
            hidden = hidden + self.cross(hidden, None, memory)
        out: torch.Tensor = self.narrow(functional.gelu(self.widen(self.norm(hidden))))
        return hidden + out


class _Attention(nn.Module):
    """Attention to its own tokens, or across to others, and its norm."""

    def __init__(self, model: TransformerModel, how: How, *, cross: bool) -> None:
        super().__init__()
        width, bias = model.hidden_size, not model.encoder_layers
        self.causal = how.causal and bias  # T5 has it in what distances add
        self.num_heads, self.head_width = model.num_heads // how.tensor_parallel, model.head_width
        inner = self.num_heads * self.head_width
        self.norm = nn.LayerNorm(width, bias=bias)
        # Queries, keys and values: of one product, or the queries of another.
        self.into_heads = nn.ModuleList(
            nn.Linear(width, count * inner, bias) for count in ((1, 2) if cross else (3,))
        )
        self.out_of_heads = nn.Linear(inner, width, bias)

    def forward(
        self,
        hidden: torch.Tensor,
        bias: torch.Tensor | None = None,
        memory: torch.Tensor | None = None,
    ) -> torch.Tensor:
        batch, length, _ = hidden.shape
        made: list[torch.Tensor] = []
        for product, tokens in zip(self.into_heads, (self.norm(hidden), memory), strict=False):
            split = product(tokens).unflatten(-1, (-1, self.num_heads, self.head_width))
            made += split.permute(2, 0, 3, 1, 4)
        query, key, value = made
        mixed = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=bias, is_causal=self.causal
        )
        out: torch.Tensor = self.out_of_heads(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out


class _Head(nn.Module):
    """Final norm, product with the vocabulary and loss, against made-up words."""

    def __init__(self, width: int, words: int, *, bias: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, bias=bias)
        self.words = nn.Linear(width, words, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return _loss(self.words(self.norm(hidden)).flatten(0, 1))


def _loss(logits: torch.Tensor) -> torch.Tensor:
    targets = torch.arange(len(logits), device=logits.device) % logits.shape[1]
    return functional.cross_entropy(logits.float(), targets)


def _images(model: ConvolutionalModel, begin: int, how: How) -> torch.Tensor:
    """What `_ResNet` takes in."""
    if begin == 0:
        sides = (model.image_size, model.image_size)
        return torch.randint(256, (how.microbatch_size, 3, *sides), dtype=torch.uint8)
    first = model.bottlenecks()[begin][0]
    return torch.randn(how.microbatch_size, first.channels, first.size, first.size, dtype=how.dtype)


class _ResNet(nn.Module):
    """Images for the first stage, feature maps that shrink and deepen for others."""

    def __init__(
        self, model: ConvolutionalModel, begin: int, end: int, last: bool, how: How
    ) -> None:
        super().__init__()
        blocks = model.bottlenecks()
        self.recompute = how.recompute
        self.stem = _Stem(model) if begin == 0 else None
        self.blocks = nn.ModuleList(_Bottleneck(block) for block in blocks[begin:end])
        self.classes = nn.Linear(blocks[-1][2].out, model.classes) if last else None

    def forward(self, maps: torch.Tensor) -> torch.Tensor:
        if self.stem is not None:
            maps = self.stem(maps)
        for block in self.blocks:
            maps = _run(block, self.recompute, maps)
        return maps if self.classes is None else _loss(self.classes(maps.mean(dim=(2, 3))))


class _Stem(nn.Module):
    """From the bytes of images to the first feature maps."""

    def __init__(self, model: ConvolutionalModel) -> None:
        super().__init__()
        self.convolve = _convolution(model.stem)
        self.pool = nn.MaxPool2d(3, 2, 1) if model.downsampling_stem else nn.Identity()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        dtype = self.convolve[0].weight.dtype
        pooled: torch.Tensor = self.pool(functional.relu_(self.convolve(images.to(dtype) / 255)))
        return pooled


class _Bottleneck(nn.Module):
    def __init__(self, block: Sequence[Convolution]) -> None:
        super().__init__()
        self.narrow, self.look, self.widen, *around = map(_convolution, block)
        self.around = around[0] if around else nn.Identity()

    def forward(self, maps: torch.Tensor) -> torch.Tensor:
        inner = functional.relu_(self.narrow(maps))
        inner = functional.relu_(self.look(inner))
        return functional.relu_(self.widen(inner) + self.around(maps))


def _convolution(sizes: Convolution) -> nn.Sequential:
    """A convolution and its normalization."""
    channels, out, kernel, stride, _ = sizes
    convolve = nn.Conv2d(channels, out, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(convolve, nn.BatchNorm2d(out))
