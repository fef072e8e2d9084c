"""The stages of the known workloads as torch modules, with the sizes of `models.py`.

Each stage takes what the one before sends and returns what the next one needs: tokens or images
come in at the first stage, hidden states (feature maps) go on, a loss comes out of the last. With
tensor parallelism the module is the shard of one rank: products are split by columns, then by
rows, heads and vocabulary over the ranks, and what the ranks would send each other is left out.

Only `torch_workloads` imports this module, and says so if torch is not installed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from envplan.errors import InputError
from envplan.profiling.workloads import (
    Convolution,
    ConvolutionalModel,
    TrainingJob,
    TransformerModel,
)

__all__ = ["Stage", "model_stages"]

#: A stage's module and its sample inputs, made when its turn comes.
Stage = Callable[[], tuple[nn.Module, tuple[Any, ...]]]

# T5 tells apart distances up to so many tokens.
_FARTHEST: Final = 128


def model_stages(job: TrainingJob, layers: Sequence[int], device: str) -> list[Stage]:
    """What makes each stage's module and a random microbatch for it.

    Args:
        job: what is trained and how.
        layers: of each stage, as in `StageWork.num_layers`; for T5 encoder layers come first.
        device: where, such as "cuda:0".

    Raises:
        InputError: widths or words do not divide by the tensor-parallel ranks.
    """
    model, ranks = job.model, job.tensor_parallel
    if isinstance(model, TransformerModel):
        for count, what in (
            (model.feed_forward_width, "units of a feed-forward"),
            (model.vocabulary_size, "words"),
        ):
            if count % ranks:
                raise InputError(f"--tp {ranks} does not divide the {count} {what} of the workload")
    ends = list(accumulate(layers, initial=0))
    return [
        partial(_made, job, begin, end, end == ends[-1], device) for begin, end in pairwise(ends)
    ]


def _made(
    job: TrainingJob, begin: int, end: int, last: bool, device: str
) -> tuple[nn.Module, tuple[Any, ...]]:
    model, dtype = job.model, getattr(torch, job.dtype)
    module: nn.Module
    with torch.device(device):
        torch.manual_seed(0)
        if isinstance(model, TransformerModel):
            module = _Transformer(job, model, begin, end, last)
            inputs = _sequences(job, model, begin, end, dtype)
        else:
            assert model is not None
            module = _resnet(job, model, begin, end, last)
            inputs = (_images(job, model, begin, dtype),)
        return module.to(dtype), inputs


class _Again(nn.Module):
    """A layer that keeps its inputs only, and whose backward does its forward again."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *inputs: torch.Tensor | None) -> Any:
        return checkpoint(self.layer, *inputs, use_reentrant=False)


class _Loss(nn.Module):
    """Cross entropy of logits (n, words), against made-up words."""

    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        targets = torch.arange(len(logits), device=logits.device) % logits.shape[1]
        return functional.cross_entropy(logits.float(), targets)


# --- transformers --------------------------------------------------------------------------------


def _sequences(
    job: TrainingJob, model: TransformerModel, begin: int, end: int, dtype: torch.dtype
) -> tuple[Any, ...]:
    """What `_Transformer` takes in."""
    words, border = model.vocabulary_size // job.tensor_parallel, model.encoder_layers
    shape = (job.microbatch_size, model.sequence_length)

    def tokens() -> torch.Tensor:
        return torch.randint(words, shape) if words else hidden()

    def hidden() -> torch.Tensor:
        return torch.randn(*shape, model.hidden_size, dtype=dtype)

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

    def __init__(
        self, job: TrainingJob, model: TransformerModel, begin: int, end: int, last: bool
    ) -> None:
        super().__init__()
        border, width = model.encoder_layers, model.hidden_size
        words = model.vocabulary_size // job.tensor_parallel
        starts = begin <= border < end
        self.encoder = self.norm = self.decoder = self.head = None
        if begin < border:
            count = min(end, border) - begin
            self.encoder = _Layers(job, model, count, begins=begin == 0, decodes=False)
        if starts and border:
            self.norm = nn.LayerNorm(width, bias=False)
        if end > border:
            count = end - max(begin, border)
            self.decoder = _Layers(job, model, count, begins=starts, decodes=True)
        if last and words:
            product = nn.Linear(width, words, bias=False)
            norm = nn.LayerNorm(width, bias=not border)
            self.head = nn.Sequential(norm, product, nn.Flatten(0, 1), _Loss())

    def forward(self, *inputs: torch.Tensor) -> Any:
        hidden, memory = inputs[0], inputs[-1]
        if self.encoder is not None:
            hidden = self.encoder(hidden)
        if self.decoder is None:
            return hidden
        if self.norm is not None:  # here the decoder begins
            hidden, memory = inputs[-1], self.norm(hidden)
        hidden = self.decoder(hidden, memory)
        if self.head is not None:
            return self.head(hidden)
        return hidden if self.decoder.distances is None else (hidden, memory)


class _Layers(nn.Module):
    """Layers of an encoder or decoder, and what they begin with.

    Embeddings are of words, and of positions where no distances tell them. Without words what
    comes in is hidden states.
    """

    def __init__(
        self, job: TrainingJob, model: TransformerModel, count: int, *, begins: bool, decodes: bool
    ) -> None:
        super().__init__()
        words, width = model.vocabulary_size // job.tensor_parallel, model.hidden_size
        t5 = model.encoder_layers > 0
        self.words = nn.Embedding(words, width) if begins and words else None
        self.positions = None
        if self.words is not None and not t5:
            self.positions = nn.Embedding(model.sequence_length, width)
        self.distances = _Distances(job, model, causal=decodes) if t5 else None
        layers = [_Layer(job, model, cross=t5 and decodes) for _ in range(count)]
        self.layers = nn.ModuleList(map(_Again, layers) if job.recompute else layers)

    def forward(self, hidden: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        if self.words is not None:
            hidden = self.words(hidden)
        if self.positions is not None:
            hidden = hidden + self.positions.weight
        bias = None if self.distances is None else self.distances(hidden)
        for layer in self.layers:
            hidden = layer(hidden, bias, memory)
        return hidden


class _Distances(nn.Module):
    """What attention adds to its scores for how far two tokens are apart, one learned for each.

    T5 shares one among far distances that are alike; looking it up costs the same.
    """

    def __init__(self, job: TrainingJob, model: TransformerModel, *, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.values = nn.Embedding(2 * _FARTHEST + 1, model.num_heads // job.tensor_parallel)

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

    def __init__(self, job: TrainingJob, model: TransformerModel, *, cross: bool) -> None:
        super().__init__()
        width, inner = model.hidden_size, model.feed_forward_width // job.tensor_parallel
        bias = not model.encoder_layers
        self.attention = _Attention(job, model, cross=False)
        self.cross = _Attention(job, model, cross=True) if cross else None
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width, bias=bias),
            nn.Linear(width, inner, bias),
            nn.GELU(),
            nn.Linear(inner, width, bias),
        )

    def forward(
        self, hidden: torch.Tensor, bias: torch.Tensor | None, memory: torch.Tensor | None
    ) -> torch.Tensor:
        hidden = hidden + self.attention(hidden, bias)
        if self.cross is not None:
            hidden = hidden + self.cross(hidden, None, memory)
        out: torch.Tensor = hidden + self.feed_forward(hidden)
        return out


class _Attention(nn.Module):
    """Attention to its own tokens, or across to others, and its norm."""

    def __init__(self, job: TrainingJob, model: TransformerModel, *, cross: bool) -> None:
        super().__init__()
        width, bias = model.hidden_size, not model.encoder_layers
        self.causal = model.causal and bias  # T5 has it in what distances add
        self.num_heads = model.num_heads // job.tensor_parallel
        inner = self.num_heads * model.head_width
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
        width = self.out_of_heads.in_features // self.num_heads
        made: list[torch.Tensor] = []
        for product, tokens in zip(self.into_heads, (self.norm(hidden), memory), strict=False):
            made += (
                product(tokens).unflatten(-1, (-1, self.num_heads, width)).permute(2, 0, 3, 1, 4)
            )
        query, key, value = made
        mixed = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=bias, is_causal=self.causal
        )
        out: torch.Tensor = self.out_of_heads(mixed.transpose(1, 2).flatten(2))
        return out


# --- ResNets -------------------------------------------------------------------------------------


def _images(
    job: TrainingJob, model: ConvolutionalModel, begin: int, dtype: torch.dtype
) -> torch.Tensor:
    """What `_resnet` takes in: images for the first stage, feature maps for others."""
    if begin == 0:
        shape = (job.microbatch_size, 3, model.image_size, model.image_size)
        return torch.randint(256, shape, dtype=torch.uint8)
    first = model.bottlenecks()[begin][0]
    return torch.randn(job.microbatch_size, first.channels, first.size, first.size, dtype=dtype)


def _resnet(
    job: TrainingJob, model: ConvolutionalModel, begin: int, end: int, last: bool
) -> nn.Module:
    """Blocks over feature maps that shrink and deepen, the stem before and the classifier after."""
    blocks = model.bottlenecks()
    layers: list[nn.Module] = [_Stem(model)] if begin == 0 else []
    kept = [_Bottleneck(block) for block in blocks[begin:end]]
    layers += map(_Again, kept) if job.recompute else kept
    if last:
        classes = nn.Linear(blocks[-1][2].out, model.classes)
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), classes, _Loss()]
    return nn.Sequential(*layers)


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
