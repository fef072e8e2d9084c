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
from itertools import accumulate
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from envplan.errors import InputError
from envplan.profiling.workloads import (
    Bottleneck,
    ConvolutionalModel,
    EncoderDecoderModel,
    Model,
    TransformerModel,
)

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
        causal: a token attends to those before it only.
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
    match model:
        case TransformerModel():
            _check_divides(4 * model.hidden_size, model.vocabulary_size, how)
            build: Callable[..., tuple[nn.Module, tuple[Any, ...]]] = _transformer_stage
        case EncoderDecoderModel():
            _check_divides(model.feed_forward_size, model.vocabulary_size, how)
            build = _t5_stage
        case ConvolutionalModel():
            build = _resnet_stage
        case _:
            raise AssertionError(model)
    begins = list(accumulate(layers, initial=0))
    return [
        partial(_made, build, model, begin, begin + count, begins[-1], how)
        for begin, count in zip(begins, layers, strict=False)
    ]


def _made(
    build: Callable[..., tuple[nn.Module, tuple[Any, ...]]],
    model: Model,
    begin: int,
    end: int,
    layers: int,
    how: How,
) -> tuple[nn.Module, tuple[Any, ...]]:
    with torch.device(how.device):
        torch.manual_seed(0)
        module, inputs = build(model, begin, end, layers, how)
        return module.to(how.dtype), inputs


def _check_divides(inner: int, words: int, how: How) -> None:
    ranks = how.tensor_parallel
    for count, what in ((inner, "units of a feed-forward"), (words, "words")):
        if count % ranks:
            raise InputError(f"--tp {ranks} does not divide the {count} {what} of the workload")


def _run(layer: nn.Module, recompute: bool, *inputs: torch.Tensor | None) -> torch.Tensor:
    out: torch.Tensor = (
        checkpoint(layer, *inputs, use_reentrant=False) if recompute else layer(*inputs)
    )
    return out


class _Chain(nn.Module):
    """Parts one after the other: what comes before the layers, the layers, what comes after."""

    def __init__(
        self,
        before: nn.Module | None,
        layers: Sequence[nn.Module],
        after: nn.Module | None,
        recompute: bool,
    ) -> None:
        super().__init__()
        self.before, self.layers, self.after = before, nn.ModuleList(layers), after
        self.recompute = recompute

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.before is not None:
            hidden = self.before(hidden)
        for layer in self.layers:
            hidden = _run(layer, self.recompute, hidden)
        return hidden if self.after is None else self.after(hidden)


def _transformer_stage(
    model: TransformerModel, begin: int, end: int, layers: int, how: How
) -> tuple[nn.Module, tuple[Any, ...]]:
    """GPT or BERT: tokens for the first stage, hidden states for others."""
    words, length, width = model.vocabulary_size, model.sequence_length, model.hidden_size
    own_words = words // how.tensor_parallel
    embedding = _Embedding(own_words, length, width) if begin == 0 and words else None
    head = _Head(own_words, width, bias=True) if end == layers and words else None
    chain = _Chain(
        embedding,
        [_Layer(width, model.num_heads, how) for _ in range(begin, end)],
        head,
        how.recompute,
    )
    if embedding is not None:
        return chain, (torch.randint(own_words, (how.microbatch_size, length)),)
    return chain, (torch.randn(how.microbatch_size, length, width, dtype=how.dtype),)


class _Embedding(nn.Module):
    def __init__(self, words: int, length: int, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.positions = nn.Embedding(length, width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.words(tokens) + self.positions.weight
        return hidden


class _Layer(nn.Module):
    """A transformer layer with its norms in front, as in GPT-2 and later."""

    def __init__(self, width: int, num_heads: int, how: How) -> None:
        super().__init__()
        ranks = how.tensor_parallel
        self.num_heads, self.causal = num_heads // ranks, how.causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.into_heads = nn.Linear(width, 3 * width // ranks)
        self.out_of_heads = nn.Linear(width // ranks, width)
        self.widen = nn.Linear(width, 4 * width // ranks)
        self.narrow = nn.Linear(4 * width // ranks, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, _ = hidden.shape
        split = self.into_heads(self.norm1(hidden)).view(batch, length, 3, self.num_heads, -1)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        hidden = hidden + self.out_of_heads(mixed.transpose(1, 2).reshape(batch, length, -1))
        return hidden + self.narrow(functional.gelu(self.widen(self.norm2(hidden))))


class _Head(nn.Module):
    """Final norm, product with the vocabulary and loss, against made-up words."""

    def __init__(self, words: int, width: int, *, bias: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, bias=bias)
        self.words = nn.Linear(width, words, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return _loss(self.words(self.norm(hidden)).flatten(0, 1))


def _loss(logits: torch.Tensor) -> torch.Tensor:
    targets = torch.arange(len(logits), device=logits.device) % logits.shape[1]
    return functional.cross_entropy(logits.float(), targets)


def _t5_stage(
    model: EncoderDecoderModel, begin: int, end: int, layers: int, how: How
) -> tuple[nn.Module, tuple[Any, ...]]:
    """T5: source tokens for the first stage, target tokens where the decoder begins."""
    module = _T5Stage(model, begin, end, layers, how)
    batch, own_words = how.microbatch_size, model.vocabulary_size // how.tensor_parallel
    source = (batch, model.source_length, model.hidden_size)
    target = (batch, model.target_length, model.hidden_size)
    inputs: list[torch.Tensor] = []
    if begin == 0:
        inputs.append(torch.randint(own_words, source[:2]))
    elif begin <= model.num_encoder_layers:
        inputs.append(torch.randn(source, dtype=how.dtype))
    else:
        inputs += [torch.randn(target, dtype=how.dtype), torch.randn(source, dtype=how.dtype)]
    if module.target_words is not None:
        inputs.append(torch.randint(own_words, target[:2]))
    return module, tuple(inputs)


class _T5Stage(nn.Module):
    """Encoder layers, decoder layers, or the end of the one and the beginning of the other.

    Inputs and outputs between stages: hidden states of the encoder up to where the decoder begins,
    from there on those of the decoder and, for all its layers to attend to, the encoder's result.
    """

    def __init__(
        self, model: EncoderDecoderModel, begin: int, end: int, layers: int, how: How
    ) -> None:
        super().__init__()
        border = model.num_encoder_layers
        words, width = model.vocabulary_size // how.tensor_parallel, model.hidden_size
        encoders, decoders = max(0, min(end, border) - begin), max(0, end - max(begin, border))
        heads = model.num_heads // how.tensor_parallel
        self.recompute = how.recompute
        self.source_words = nn.Embedding(words, width) if begin == 0 else None
        self.encoder_distances = _Distances(heads) if encoders else None
        self.encoders = nn.ModuleList(_T5Layer(model, how, cross=False) for _ in range(encoders))
        starts = begin <= border < end
        self.encoder_norm = nn.LayerNorm(width, bias=False) if starts else None
        self.target_words = nn.Embedding(words, width) if starts else None
        self.decoder_distances = _Distances(heads) if decoders else None
        self.decoders = nn.ModuleList(_T5Layer(model, how, cross=True) for _ in range(decoders))
        self.head = _Head(words, width, bias=False) if end == layers else None

    def forward(self, *inputs: torch.Tensor) -> Any:
        hidden = inputs[0] if self.source_words is None else self.source_words(inputs[0])
        if self.encoder_distances is not None:
            bias = self.encoder_distances(hidden.shape[1], causal=False).to(hidden.dtype)
            for layer in self.encoders:
                hidden = _run(layer, self.recompute, hidden, bias, None)
        if self.decoder_distances is None:
            return hidden
        if self.encoder_norm is None or self.target_words is None:
            memory = inputs[1]
        else:
            memory, hidden = self.encoder_norm(hidden), self.target_words(inputs[-1])
        bias = self.decoder_distances(hidden.shape[1], causal=True).to(hidden.dtype)
        for layer in self.decoders:
            hidden = _run(layer, self.recompute, hidden, bias, memory)
        return (hidden, memory) if self.head is None else self.head(hidden)


class _Distances(nn.Module):
    """What attention adds to its scores for how far two tokens are apart, one learned for each.

    T5 shares one among far distances that are alike; looking it up costs the same.
    """

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.values = nn.Embedding(2 * _FARTHEST + 1, heads)

    def forward(self, length: int, *, causal: bool) -> torch.Tensor:
        at = torch.arange(length, device=self.values.weight.device)
        apart = at[None, :] - at[:, None]
        near = apart.clamp(-_FARTHEST, _FARTHEST) + _FARTHEST
        bias: torch.Tensor = self.values(near).permute(2, 0, 1)
        return bias.masked_fill(apart > 0, float("-inf")) if causal else bias


class _T5Layer(nn.Module):
    """Attention to its own tokens, in the decoder to the encoder's, and a feed-forward part."""

    def __init__(self, model: EncoderDecoderModel, how: How, *, cross: bool) -> None:
        super().__init__()
        width, inner = model.hidden_size, model.feed_forward_size // how.tensor_parallel
        self.own = _Attention(model, how)
        self.cross = _Attention(model, how) if cross else None
        self.norm = nn.LayerNorm(width, bias=False)
        self.widen = nn.Linear(width, inner, bias=False)
        self.narrow = nn.Linear(inner, width, bias=False)

    def forward(
        self, hidden: torch.Tensor, bias: torch.Tensor, memory: torch.Tensor | None
    ) -> torch.Tensor:
        hidden = hidden + self.own(hidden, None, bias)
        if self.cross is not None:
            hidden = hidden + self.cross(hidden, memory, None)
        out: torch.Tensor = self.narrow(functional.relu(self.widen(self.norm(hidden))))
        return hidden + out


class _Attention(nn.Module):
    """T5's: no biases, heads of their own width, scores not scaled.

    The norm keeps the mean, which T5's does not take off: it moves the same bytes.
    """

    def __init__(self, model: EncoderDecoderModel, how: How) -> None:
        super().__init__()
        self.num_heads = model.num_heads // how.tensor_parallel
        width, inner = model.hidden_size, self.num_heads * model.head_size
        self.norm = nn.LayerNorm(width, bias=False)
        self.query = nn.Linear(width, inner, bias=False)
        self.key_value = nn.Linear(width, 2 * inner, bias=False)
        self.out = nn.Linear(inner, width, bias=False)

    def forward(
        self, hidden: torch.Tensor, memory: torch.Tensor | None, bias: torch.Tensor | None
    ) -> torch.Tensor:
        batch, length, _ = hidden.shape
        normed = self.norm(hidden)
        attended = normed if memory is None else memory
        query = self.query(normed).view(batch, length, self.num_heads, -1).transpose(1, 2)
        pairs = self.key_value(attended).view(batch, attended.shape[1], 2, self.num_heads, -1)
        key, value = pairs.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=bias, scale=1.0
        )
        out: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out


def _resnet_stage(
    model: ConvolutionalModel, begin: int, end: int, layers: int, how: How
) -> tuple[nn.Module, tuple[Any, ...]]:
    """ResNet: images for the first stage, feature maps that shrink and deepen for others."""
    blocks = model.bottlenecks()
    stem = _Stem(model) if begin == 0 else None
    head = _Classifier(blocks[-1].out, model.classes) if end == layers else None
    chain = _Chain(stem, [_Bottleneck(block) for block in blocks[begin:end]], head, how.recompute)
    batch, first = how.microbatch_size, blocks[begin]
    if stem is not None:
        size = model.image_size
        return chain, (torch.randint(256, (batch, 3, size, size), dtype=torch.uint8),)
    return chain, (torch.randn(batch, first.channels, first.size, first.size, dtype=how.dtype),)


class _Stem(nn.Module):
    """From the bytes of images to the first feature maps."""

    def __init__(self, model: ConvolutionalModel) -> None:
        super().__init__()
        self.convolve = (
            _convolution(3, 64, 7, stride=2) if model.downsampling_stem else _convolution(3, 64, 3)
        )
        self.pool = nn.MaxPool2d(3, 2, 1) if model.downsampling_stem else nn.Identity()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        dtype = self.convolve[0].weight.dtype
        pooled: torch.Tensor = self.pool(functional.relu_(self.convolve(images.to(dtype) / 255)))
        return pooled


class _Bottleneck(nn.Module):
    def __init__(self, block: Bottleneck) -> None:
        super().__init__()
        self.narrow = _convolution(block.channels, block.width, 1)
        self.look = _convolution(block.width, block.width, 3, stride=block.stride)
        self.widen = _convolution(block.width, block.out, 1)
        self.around = (
            _convolution(block.channels, block.out, 1, stride=block.stride)
            if block.projects
            else nn.Identity()
        )

    def forward(self, maps: torch.Tensor) -> torch.Tensor:
        inner = functional.relu_(self.narrow(maps))
        inner = functional.relu_(self.look(inner))
        return functional.relu_(self.widen(inner) + self.around(maps))


def _convolution(channels: int, out: int, kernel: int, *, stride: int = 1) -> nn.Sequential:
    """A convolution and its normalization."""
    convolve = nn.Conv2d(channels, out, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(convolve, nn.BatchNorm2d(out))


class _Classifier(nn.Module):
    """Mean over the image, product with the classes and loss, against made-up ones."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.classes = nn.Linear(channels, classes)

    def forward(self, maps: torch.Tensor) -> torch.Tensor:
        return _loss(self.classes(maps.mean(dim=(2, 3))))
