"""What a pipeline stage of a model has to do: arithmetic and memory traffic per microbatch.

A model is a chain of units that a stage boundary may separate: transformer layers, or the blocks
of a ResNet; what comes before and after them (embedding, stem; norm, head) belongs to the first
and the last unit. The counts follow published formulas; how often the saved activations of a
transformer travel through memory in a pass is calibrated, as said at the constants below. Nothing
here knows a GPU: `devices.modelled` turns work into seconds and joules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial, reduce
from itertools import accumulate
from operator import add
from typing import Any, Final, Protocol, Self

from envplan.errors import InputError

__all__ = [
    "Bottleneck",
    "ConvolutionalModel",
    "EncoderDecoderModel",
    "Experts",
    "LatentAttention",
    "Model",
    "StageWork",
    "TransformerModel",
    "Work",
    "partition",
    "stage_works",
]

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
#: Parts that every layer has.
_OF_A_LAYER: Final = ("linear_qkv", "core_attention", "mlp")
# Bytes per logit with a fused cross entropy: written, read twice, probabilities written; the
# backward reads them, writes their gradient and reads it for two products.
_LOGIT_BYTES: Final = 8.0

# How many times an activation of a ResNet crosses the memory bus. Forward: written by the
# convolution, read twice and written by the normalization, read and written by the activation,
# read by the next convolution. Backward: three by the activation, five by the normalization, and
# the convolution reads activation and gradient, the gradient once more, and writes its own twice.
_CONVOLUTION_FORWARD_PASSES: Final = 7.0
_CONVOLUTION_BACKWARD_PASSES: Final = 13.0


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

    def __sub__(self, other: Work) -> Work:
        return Work(self.flops - other.flops, self.traffic - other.traffic)


@dataclass(frozen=True)
class StageWork:
    """Forward and backward of one microbatch on one stage.

    Attributes:
        num_layers: transformer layers, or blocks of a ResNet, of the stage.
        forward: work of the forward.
        backward: work of the backward, without recomputation.
        backward_weight: the part of it that makes gradients of weights. Every product with
            weights costs as much again there as in the forward; attention's core has no weights.
            Of the traffic it is the sums of gradients alone: what else a backward moves is on the
            way to the inputs.
        parts: modules that it consists of, by name and in order; none where that is not said.
    """

    num_layers: int
    forward: Work
    backward: Work
    backward_weight: Work
    parts: tuple[tuple[str, StageWork], ...] = ()

    @property
    def backward_input(self) -> Work:
        """The rest of the backward: gradients of activations, and recomputation if any."""
        return self.backward - self.backward_weight

    def __add__(self, other: StageWork) -> StageWork:
        return StageWork(
            self.num_layers + other.num_layers,
            self.forward + other.forward,
            self.backward + other.backward,
            self.backward_weight + other.backward_weight,
            self.parts + other.parts,
        )

    def __sub__(self, other: StageWork) -> StageWork:
        return StageWork(
            self.num_layers - other.num_layers,
            self.forward - other.forward,
            self.backward - other.backward,
            self.backward_weight - other.backward_weight,
        )

    def named(self, name: str) -> StageWork:
        """The same as a part of that name."""
        return replace(self, parts=((name, self),))

    def named_parts(self) -> list[tuple[str, StageWork]]:
        """Its parts; those of a layer with its number, as in layers.3.mlp."""
        count: Counter[str] = Counter()
        found = []
        for name, part in self.parts:
            layer = f"layers.{count[name]}." if name in _OF_A_LAYER else ""
            found.append((layer + name, part))
            count[name] += 1
        return found


class Model(Protocol):
    """What can be split over pipeline stages."""

    @property
    def name(self) -> str:
        """For people."""

    def units(
        self, microbatch_size: int, tensor_parallel: int, context_parallel: int = 1
    ) -> list[StageWork]:
        """The chain of units, in order, for one microbatch on one GPU, in half precision."""

    def describe(self) -> str:
        """Its sizes, in a sentence without a full stop."""


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Feed-forward parts of which each token takes a few (mixture of experts).

    Attributes:
        count: experts of a layer.
        per_token: that a token takes.
        feed_forward_size: width of an expert.
        shared_size: width of what all tokens take besides; 0 for none.
        dense_layers: layers, the first ones, that have one feed-forward part instead.
    """

    count: int
    per_token: int
    feed_forward_size: int
    shared_size: int = 0
    dense_layers: int = 0


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, 2024, section 2.1): keys and values come from a
    narrow vector that all heads share.

    Attributes:
        query_rank: width between the two products that make queries; 0: there is one product.
        rank: width of the vector that keys and values come from.
        key_size, rotary_size, value_size: of a head, without and with position, and of values.
    """

    query_rank: int
    rank: int
    key_size: int
    rotary_size: int
    value_size: int


@dataclass(frozen=True, kw_only=True)
class TransformerModel:
    """A stack of transformer layers: decoders (GPT-3, Llama, Mixtral) and encoders (BERT) alike.

    Attributes:
        name: for people.
        num_layers: transformer layers.
        hidden_size: width h.
        num_heads: attention heads a.
        vocabulary_size: rows of the embedding and of the head, with padding; 0 where a benchmark
            leaves both out.
        sequence_length: tokens s of a sample.
        fused_attention: the scores never reach memory.
        key_value_heads: heads of keys and values, fewer with grouped-query attention; None: a.
        head_size: width of a head; None: h / a.
        feed_forward_size: None: 4 h.
        gated: the feed-forward part has a third product, whose result gates (SwiGLU).
        window: tokens that a token attends to at most; None: all of its sample.
        experts: instead of one feed-forward part; None: there are none.
        latent: instead of usual attention; None: it is usual.
        tied: embedding and head are one matrix. Counts once among the parameters; each of its two
            stages has a copy, so the work is the same.
    """

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    vocabulary_size: int
    sequence_length: int
    fused_attention: bool = False
    key_value_heads: int | None = None
    head_size: int | None = None
    feed_forward_size: int | None = None
    gated: bool = False
    window: int | None = None
    experts: Experts | None = None
    latent: LatentAttention | None = None
    tied: bool = False

    def units(
        self, microbatch_size: int, tensor_parallel: int, context_parallel: int = 1
    ) -> list[StageWork]:
        """The layers, with the embedding on the first and norm and head on the last.

        A layer: 24 B s h^2 + 4 B s^2 h FLOPs forward (Narayanan et al., SC 2021, appendix) and
        s b h (10 + 24 / t + 5 a s / (h t)) bytes of activations (Korthikanti et al., MLSys 2023,
        section 4.2), where it has the usual widths. Other widths change each product's share.
        """
        tokens, rest = divmod(microbatch_size * self.sequence_length, context_parallel)
        if rest:
            raise InputError(f"--cp {context_parallel} does not divide {tokens} tokens")
        layers = [
            self._layer(tokens, tensor_parallel, sparse=number >= self._dense_layers)
            for number in (0, self.num_layers - 1)
        ]
        units = [layers[number >= self._dense_layers] for number in range(self.num_layers)]
        if self.vocabulary_size:
            units[0] = _embedding(tokens, self.hidden_size) + units[0]
            units[-1] += _head(tokens, self.hidden_size, self.vocabulary_size, tensor_parallel)
        return units

    @property
    def parameters(self) -> int:
        """Weights, without norms and biases."""
        ends = (1 if self.tied else 2) * self.vocabulary_size * self.hidden_size
        dense = self._dense_layers
        return ends + sum(
            count * (self._attention.weights + self._feed_forward_weights(sparse=sparse))
            for count, sparse in ((dense, False), (self.num_layers - dense, True))
        )

    def describe(self) -> str:
        """Its sizes, in a sentence without a full stop."""
        parts = [f"{self.num_layers} layers of {self.hidden_size} units and {self.num_heads} heads"]
        if self.latent is not None:
            parts.append(f"latent attention of rank {self.latent.rank}")
        elif self._key_value_heads != self.num_heads:
            parts.append(f"{self._key_value_heads} key-value heads")
        if self.feed_forward_size is not None or self.gated:
            gated = "gated " if self.gated else ""
            parts.append(f"{gated}feed-forward {self._feed_forward_size}")
        if (experts := self.experts) is not None:
            shared = f" and {experts.shared_size} shared" if experts.shared_size else ""
            after = f" after {experts.dense_layers} layers" if experts.dense_layers else ""
            parts.append(
                f"{experts.per_token} of {experts.count} experts of "
                f"{experts.feed_forward_size}{shared}{after}, all on the GPUs of their stage"
            )
        parts.append(f"{self.sequence_length} tokens")
        if self.window is not None and self.window < self.sequence_length:
            parts.append(f"attention to {self.window}")
        parts.append(
            f"{self.vocabulary_size} words; embedding on the first stage, final norm and "
            "vocabulary head on the last"
            if self.vocabulary_size
            else "without embedding and head"
        )
        return ", ".join(parts)

    @property
    def _key_value_heads(self) -> int:
        return self.key_value_heads or self.num_heads

    @property
    def _feed_forward_size(self) -> int:
        return self.feed_forward_size or 4 * self.hidden_size

    @property
    def _dense_layers(self) -> int:
        return self.num_layers if self.experts is None else self.experts.dense_layers

    @property
    def _attention(self) -> _Attention:
        size = self.head_size or self.hidden_size // self.num_heads
        if self.latent is None:
            keys = self._key_value_heads * size
            return _Attention(self.hidden_size, self.num_heads * size, keys, self.num_heads, size)
        return _Attention.latent(self.hidden_size, self.num_heads, self.latent)

    def _feed_forward_weights(self, *, sparse: bool) -> int:
        products = 3 if self.gated else 2
        if not sparse or self.experts is None:
            return products * self.hidden_size * self._feed_forward_size
        experts = self.experts
        width = experts.count * experts.feed_forward_size + experts.shared_size
        return self.hidden_size * (products * width + experts.count)

    def _layer(self, tokens: int, tensor_parallel: int, *, sparse: bool) -> StageWork:
        length = min(self.sequence_length, self.window or self.sequence_length)
        width, weights = self._feed_forward_size, self._feed_forward_weights(sparse=sparse)
        if sparse and self.experts is not None:
            width = self.experts.per_token * self.experts.feed_forward_size
            width += self.experts.shared_size
        return _layer(
            tokens,
            [(tokens, length)],
            self._attention,
            feed_forward_size=width,
            feed_forward_weights=weights,
            gated=self.gated,
            tensor_parallel=tensor_parallel,
            fused=self.fused_attention,
        )


@dataclass(frozen=True, kw_only=True)
class EncoderDecoderModel:
    """A transformer of encoder layers followed by decoder layers that attend to them (T5).

    Attributes:
        name: for people.
        num_encoder_layers: encoder layers.
        num_decoder_layers: decoder layers.
        hidden_size: width h.
        num_heads: attention heads.
        head_size: width of a head; all heads together need not be as wide as h.
        feed_forward_size: width between the two products of a feed-forward part.
        vocabulary_size: rows of the embedding and of the head.
        source_length: tokens that the encoder reads.
        target_length: tokens that the decoder writes.
    """

    name: str
    num_encoder_layers: int
    num_decoder_layers: int
    hidden_size: int
    num_heads: int
    head_size: int
    feed_forward_size: int
    vocabulary_size: int
    source_length: int
    target_length: int

    def units(
        self, microbatch_size: int, tensor_parallel: int, context_parallel: int = 1
    ) -> list[StageWork]:
        """Encoder layers, then decoder layers, each part with its embedding on its first layer.

        Counts as for `TransformerModel`, with a second attention in each decoder layer whose keys
        and values come from the encoder's tokens.
        """
        _refuse_context_parallel(self.name, context_parallel)
        source = microbatch_size * self.source_length
        target = microbatch_size * self.target_length
        inner = self.num_heads * self.head_size
        layer = partial(
            _layer,
            attention=_Attention(self.hidden_size, inner, inner, self.num_heads, self.head_size),
            feed_forward_size=self.feed_forward_size,
            feed_forward_weights=2 * self.hidden_size * self.feed_forward_size,
            tensor_parallel=tensor_parallel,
        )
        encoder = layer(source, [(source, self.source_length)])
        decoder = layer(target, [(target, self.target_length), (source, self.source_length)])
        units = [encoder] * self.num_encoder_layers + [decoder] * self.num_decoder_layers
        decoders = self.num_encoder_layers
        units[0] = _embedding(source, self.hidden_size) + units[0]
        units[decoders] = _embedding(target, self.hidden_size) + units[decoders]
        units[-1] += _head(target, self.hidden_size, self.vocabulary_size, tensor_parallel)
        return units

    def describe(self) -> str:
        """Its sizes, in a sentence without a full stop."""
        return (
            f"{self.num_encoder_layers} encoder and {self.num_decoder_layers} decoder layers of "
            f"{self.hidden_size} units, {self.num_heads} heads of {self.head_size}, feed-forward "
            f"{self.feed_forward_size}, {self.source_length} tokens in and {self.target_length} "
            f"out, {self.vocabulary_size} words; encoder embedding on the first stage, decoder "
            "embedding with the first decoder layer, vocabulary head on the last stage"
        )


@dataclass(frozen=True)
class Bottleneck:
    """Sizes of a block of a ResNet.

    Attributes:
        channels: coming in; width: in between; out: going out.
        stride: of the 3x3 convolution.
        size: pixels on a side of the maps coming in.
        projects: whether the way around the block has a convolution, too.
    """

    channels: int
    width: int
    out: int
    stride: int
    size: int
    projects: bool


@dataclass(frozen=True, kw_only=True)
class ConvolutionalModel:
    """A ResNet of bottleneck blocks (He et al., 2016), wide or not (Zagoruyko et al., 2016).

    Attributes:
        name: for people.
        blocks: bottleneck blocks of the four groups.
        width_factor: how much wider the 3x3 convolutions are than in the plain ResNet.
        image_size: pixels on a side.
        classes: rows of the head.
        downsampling_stem: a 7x7 convolution of stride 2 and pooling come first, as for ImageNet;
            otherwise a 3x3 convolution of stride 1 alone.
    """

    name: str
    blocks: tuple[int, int, int, int]
    width_factor: int
    image_size: int
    classes: int
    downsampling_stem: bool

    def units(
        self, microbatch_size: int, tensor_parallel: int, context_parallel: int = 1
    ) -> list[StageWork]:
        """The blocks, with the stem on the first and the head on the last.

        Raises:
            InputError: tensor_parallel is not 1: ResNets are not split that way here.
        """
        _refuse_context_parallel(self.name, context_parallel)
        if tensor_parallel != 1:
            raise InputError(f"{self.name} cannot be split by tensor parallelism; leave --tp out")
        units = []
        for block in self.bottlenecks():
            size = block.size // block.stride
            convolutions = [
                (block.channels, block.width, 1, block.size),
                (block.width, block.width, 3, size),
                (block.width, block.out, 1, size),
            ]
            if block.projects:
                convolutions.append((block.channels, block.out, 1, size))
            units.append(_convolved(convolutions, microbatch_size, num_layers=1))
        stem = (3, 64, 3, self.image_size)
        if self.downsampling_stem:
            stem = (3, 64, 7, self.image_size // 2)
        head = (block.out, self.classes, 1, 1)
        units[0] += _convolved([stem], microbatch_size, num_layers=0)
        units[-1] += _convolved([head], microbatch_size, num_layers=0)
        return units

    def bottlenecks(self) -> list[Bottleneck]:
        """The blocks, in order."""
        made = []
        channels = 64
        size = self.image_size // 4 if self.downsampling_stem else self.image_size
        for group, count in enumerate(self.blocks):
            for number in range(count):
                stride = 2 if group > 0 and number == 0 else 1
                width, out = 64 * 2**group * self.width_factor, 256 * 2**group
                made.append(Bottleneck(channels, width, out, stride, size, projects=number == 0))
                channels, size = out, size // stride
        return made

    def describe(self) -> str:
        """Its sizes, in a sentence without a full stop."""
        stem = "7x7 stem of stride 2 and pooling" if self.downsampling_stem else "3x3 stem"
        return (
            f"bottleneck blocks {list(self.blocks)} with 3x3 convolutions {self.width_factor} "
            f"times as wide as ResNet's, {stem}, images of {self.image_size} x "
            f"{self.image_size}, {self.classes} classes; a block is never split, stem on the "
            "first stage, pooling and classifier on the last"
        )


def _refuse_context_parallel(name: str, context_parallel: int) -> None:
    if context_parallel != 1:
        raise InputError(f"{name} cannot be split by context parallelism; leave --cp out")


@dataclass(frozen=True)
class _Attention:
    """Widths of a layer's attention.

    Attributes:
        hidden_size: of the layer.
        query_size: all queries together.
        key_size: all keys together; values are as wide unless value_size says otherwise.
        num_heads: of queries.
        head_size: the least width of keys on a GPU, which holds a head at least.
        value_size: all values that come out of the attention together; None: query_size.
        narrow: weights that tensor parallelism does not split.
        wide: weights that it does; None: those of queries, keys, values and output.
    """

    hidden_size: int
    query_size: int
    key_size: int
    num_heads: int
    head_size: int
    value_size: int | None = None
    narrow: int = 0
    wide: int | None = None

    @classmethod
    def latent(cls, hidden_size: int, heads: int, sizes: LatentAttention) -> Self:
        """Keys and values of full width, made from what all heads share."""
        h, key = hidden_size, sizes.key_size + sizes.rotary_size
        narrow = h * (sizes.query_rank + sizes.rank + sizes.rotary_size)
        wide = heads * (
            (sizes.query_rank or h) * key
            + sizes.rank * (sizes.key_size + sizes.value_size)
            + sizes.value_size * h
        )
        values = heads * sizes.value_size
        return cls(h, heads * key, heads * key, heads, key, values, narrow, wide)

    @property
    def weights(self) -> int:
        """Of all GPUs together."""
        usual = 2 * self.hidden_size * (self.query_size + self.key_size)
        return self.narrow + (usual if self.wide is None else self.wide)


def _layer(
    tokens: int,
    contexts: Sequence[tuple[int, int]],
    attention: _Attention,
    *,
    feed_forward_size: int,
    feed_forward_weights: int,
    tensor_parallel: int,
    gated: bool = False,
    fused: bool = False,
) -> StageWork:
    """A transformer layer: an attention to each context, then a feed-forward part, with norms.

    Args:
        tokens: that pass through it.
        contexts: tokens that it attends to, of all samples and of one.
        feed_forward_size: width that a token passes through, of all experts that it takes.
        feed_forward_weights: of all experts that there are.

    Raises:
        InputError: the heads cannot be shared out evenly.
    """
    h, f, t = attention.hidden_size, feed_forward_size, tensor_parallel
    if attention.num_heads % t:
        raise InputError(f"--tp {t} does not divide the {attention.num_heads} heads of the model")
    products, kept = (3, 6) if gated else (2, 4)
    flops = weighted = 2 * products * tokens * h * f / t
    activations = 2 * (len(contexts) + 1) * tokens * h + 3 * tokens * h + kept * tokens * f / t
    weights = feed_forward_weights / t
    # With fewer heads of keys and values than GPUs, each GPU has one.
    keys_size = max(attention.key_size, t * attention.head_size)
    values = attention.query_size if attention.value_size is None else attention.value_size
    projecting = attending = _weighted(0, 0.0, 0.0, 0.0, 0.0)
    for keys, length in contexts:
        if attention.wide is None:
            each = 2 * h * (attention.query_size + keys_size)
            projections = 4 * h * (attention.query_size * tokens + keys_size * keys) / t
            moved = 4 * (tokens * attention.query_size + keys * keys_size)
        else:
            each = t * attention.narrow + attention.wide
            projections = 2 * tokens * each / t
            moved = 4 * tokens * (attention.query_size + values)
        scores = 0.0 if fused else 5 * attention.num_heads * tokens * length
        paired = 2 * tokens * length * (attention.query_size + values) / t
        weighted += projections
        flops += projections + paired
        activations += 3 * tokens * h + (moved + scores) / t
        weights += each / t
        # Three of four projections come before the attention's core, which reads what they make.
        before = 0.75 * projections
        projecting += _weighted(0, before, before, 4 * tokens * h, 0.75 * each / t)
        attending += _weighted(0, paired, 0.0, (0.75 * moved + scores) / t, 0.0)
    layer = _weighted(1, flops, weighted, activations, weights)
    parts = (
        ("linear_qkv", projecting),
        ("core_attention", attending),
        ("mlp", layer - projecting - attending),
    )
    return replace(layer, parts=parts)


def _weighted(
    num_layers: int, flops: float, weighted: float, activations: float, weights: float
) -> StageWork:
    """Products of so many FLOPs, those with weights among them, and what they move."""
    return StageWork(
        num_layers=num_layers,
        forward=Work(flops, _FORWARD_PASSES * activations + _HALF * weights),
        backward=Work(
            _BACKWARD_FLOPS * flops,
            _BACKWARD_PASSES * activations + (_HALF + _GRADIENT) * weights,
        ),
        backward_weight=Work(weighted, _GRADIENT * weights),
    )


def _embedding(tokens: int, hidden_size: int) -> StageWork:
    """The embedding: memory traffic alone."""
    work = Work(0.0, _EMBEDDING_BYTES * tokens * hidden_size)
    whole = StageWork(num_layers=0, forward=work, backward=work, backward_weight=work)
    return whole.named("embedding")


def _head(tokens: int, hidden_size: int, vocabulary_size: int, tensor_parallel: int) -> StageWork:
    """The final norm, the product with the vocabulary, and the loss."""
    logits = tokens * vocabulary_size / tensor_parallel
    flops = 2 * hidden_size * logits
    weights = hidden_size * vocabulary_size / tensor_parallel
    traffic = _NORM_BYTES * tokens * hidden_size + _LOGIT_BYTES * logits + _HALF * weights
    return StageWork(
        num_layers=0,
        forward=Work(flops, traffic),
        backward=Work(_BACKWARD_FLOPS * flops, traffic + _GRADIENT * weights),
        backward_weight=Work(flops, _GRADIENT * weights),
    ).named("head")


def _convolved(
    convolutions: Sequence[tuple[int, int, int, int]], microbatch_size: int, *, num_layers: int
) -> StageWork:
    """Convolutions (channels in and out, kernel, size of the output) with their normalization and
    activation."""
    none = Work(0.0, 0.0)
    total = StageWork(num_layers, none, none, none)
    for channels, out, kernel, size in convolutions:
        pixels = microbatch_size * size**2
        weights = channels * out * kernel**2
        flops = 2.0 * pixels * weights
        activations = _HALF * pixels * out
        forward = Work(flops, _CONVOLUTION_FORWARD_PASSES * activations + _HALF * weights)
        backward = Work(
            _BACKWARD_FLOPS * flops,
            _CONVOLUTION_BACKWARD_PASSES * activations + (_HALF + _GRADIENT) * weights,
        )
        total += StageWork(0, forward, backward, Work(flops, _GRADIENT * weights))
    return total


def stage_works(
    model: Model,
    *,
    num_stages: int,
    microbatch_size: int,
    tensor_parallel: int = 1,
    context_parallel: int = 1,
    recompute: bool = False,
    precision: str = "half",
    layers: Sequence[int] | None = None,
    cost: Callable[[Work], float],
) -> list[StageWork]:
    """Split a model over pipeline stages, and say what each has to do.

    Args:
        model: what is trained.
        num_stages: pipeline stages, at most one per unit of the model.
        microbatch_size: samples per microbatch.
        tensor_parallel, context_parallel: GPUs that share each layer, and each sequence; the work
            is that of one of them.
        recompute: a backward does its forward over again, instead of keeping activations.
        precision: "half" or "single"; single moves twice the bytes.
        layers: transformer layers, or blocks, of each stage; None: the split of least imbalance.
        cost: seconds (or any measure) of a piece of work, by which stages are balanced.

    Returns:
        num_stages stages in order.

    Raises:
        InputError: there are more stages than units, or none, or `layers` are not the model's.
    """
    bytes_factor = 2.0 if precision == "single" else 1.0
    units = [
        _adapted(unit, bytes_factor, recompute)
        for unit in model.units(microbatch_size, tensor_parallel, context_parallel)
    ]
    if layers is None:
        costs = [cost(unit.forward) + cost(unit.backward) for unit in units]
        counts = partition(costs, num_stages)
    else:
        counts = list(layers)
        if len(counts) != num_stages or sum(counts) != len(units):
            raise InputError(
                f"--layers-per-stage has {sum(counts)} layers on {len(counts)} stages, but "
                f"{model.name} has {len(units)} layers and there are {num_stages} stages"
            )
    begins = accumulate(counts, initial=0)
    return [
        reduce(add, units[begin : begin + count])
        for begin, count in zip(begins, counts, strict=False)
    ]


def _adapted(unit: StageWork, bytes_factor: float, recompute: bool) -> StageWork:
    forward, backward, backward_weight = (
        Work(work.flops, bytes_factor * work.traffic)
        for work in (unit.forward, unit.backward, unit.backward_weight)
    )
    return StageWork(
        unit.num_layers,
        forward,
        backward + forward if recompute else backward,
        backward_weight,
        tuple((name, _adapted(part, bytes_factor, recompute)) for name, part in unit.parts),
    )


# Costs are compared as integers, of which all units together make this many: equal units stay
# equal, and ties are broken by rule instead of by rounding.
_RESOLUTION: Final = 10**12


def partition(costs: Sequence[float], num_stages: int) -> list[int]:
    """Units per stage such that the slowest stage is the least times slower than the fastest.

    That ratio is how Perseus (SOSP 2024) measures imbalance. Of equal splits the one whose stages
    are most alike wins (least sum of squared costs), then the one with fewer units on earlier
    stages: those keep the activations of more microbatches.

    Args:
        costs: of each unit, above 0, in order.
        num_stages: stages, each of which gets at least one unit.

    Returns:
        num_stages counts that sum to len(costs).

    Raises:
        InputError: there are more stages than units, or none.
    """
    number = len(costs)
    if not 1 <= num_stages <= number:
        raise InputError(
            f"{number} layers cannot be split over {num_stages} stages; choose 1 to {number} stages"
        )
    scale = _RESOLUTION / sum(costs)
    upto = [0, *accumulate(round(cost * scale) for cost in costs)]
    least, most = _narrowest(upto, num_stages)
    found = _best_split(upto, num_stages, least, most, lambda cost, rest: cost**2 + rest)
    assert found is not None  # the bounds come from such a split
    counts, rest = [], found[1]
    while rest:
        counts.append(rest[0])
        rest = rest[1]
    return counts


def _narrowest(upto: Sequence[int], num_stages: int) -> tuple[int, int]:
    """Costs of the fastest and of the slowest stage with the least ratio between them."""
    number, mean = len(upto) - 1, Fraction(upto[-1], num_stages)
    sums = {upto[j] - upto[i] for i in range(number) for j in range(i + 1, number + 1)}
    best: tuple[int, int] | None = None
    for least in sorted((cost for cost in sums if cost <= mean), reverse=True):
        if best and mean / least >= Fraction(best[1], best[0]):
            break  # the slowest stage takes the mean at least
        found = _best_split(upto, num_stages, least, upto[-1], max)
        if found is not None and (not best or found[0] * best[0] < best[1] * least):
            best = least, found[0]
    assert best is not None  # the least of all sums forbids nothing
    return best


def _best_split(
    upto: Sequence[int],
    num_stages: int,
    least: int,
    most: int,
    join: Callable[[int, int], int],
) -> tuple[int, Any] | None:
    """The split into stages that cost `least` to `most` each; None if there is none.

    Args:
        upto: cost of all units before each one, and of all, (n + 1,), ascending.
        join: the figure to be small, of a stage's cost and the figure of the stages after it; of
            equal ones fewer units on earlier stages win.

    Returns:
        The figure, and units of the stages as (first, (second, ...)).
    """
    number = len(upto) - 1
    best: list[tuple[int, Any] | None] = [*[None] * number, (0, ())]  # from each unit to the end
    for _ in range(num_stages):
        longer: list[tuple[int, Any] | None] = [None] * (number + 1)
        for begin in range(number):
            choices = (
                (join(cost, rest[0]), (end - begin, rest[1]))
                for end in range(begin + 1, number + 1)
                if least <= (cost := upto[end] - upto[begin]) <= most
                and (rest := best[end]) is not None
            )
            longer[begin] = min(choices, default=None)
        best = longer
    return best[0]
