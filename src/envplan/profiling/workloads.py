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
from dataclasses import KW_ONLY, dataclass, replace
from fractions import Fraction
from functools import reduce
from itertools import accumulate, combinations, pairwise
from operator import add
from typing import Any, ClassVar, Final, NamedTuple

from envplan.errors import InputError
from envplan.profile import ProfileMetadata
from envplan.profile.sidecar import Workload

__all__ = [
    "Convolution",
    "ConvolutionalModel",
    "Experts",
    "LatentAttention",
    "Model",
    "ModuleWork",
    "StageWork",
    "TrainingJob",
    "TransformerModel",
    "Work",
    "partition",
]

# A backward multiplies by the weights and by the activations where a forward multiplies once.
_BACKWARD_FLOPS: Final = 2.0

# How many times the saved activations of a layer cross the memory bus, forward and backward. A
# forward writes each once and reads most of them once. Both figures, with the compute efficiency of
# the A40, are set so that six layers of GPT-3 1.3B take what the Zeus documentation's A40 profile
# says of a first stage: 0.0937 s forward and 0.2453 s backward.
_PASSES: Final = (1.8, 6.5)

_HALF: Final = 2.0  # bytes of a weight or activation in mixed precision
_GRADIENT: Final = 8.0  # bytes to read and write a 32-bit gradient sum

# Bytes per token and hidden unit for embedding look-up, position, dropout; and for the final norm.
_EMBEDDING_BYTES: Final = 12.0
_NORM_BYTES: Final = 8.0
#: Modules that every layer has.
_OF_A_LAYER: Final = ("linear_qkv", "core_attention", "mlp")
# Bytes per logit with a fused cross entropy: written, read twice, probabilities written; the
# backward reads them, writes their gradient and reads it for two products.
_LOGIT_BYTES: Final = 8.0

# How many times an activation of a ResNet crosses the memory bus. Forward: written by the
# convolution, read twice and written by the normalization, read and written by the activation,
# read by the next convolution. Backward: three by the activation, five by the normalization, and
# the convolution reads activation and gradient, the gradient once more, and writes its own twice.
_CONVOLUTION_PASSES: Final = (7.0, 13.0)


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
class ModuleWork:
    """Forward and backward of one microbatch through one module.

    Attributes:
        name: such as mlp; "" where parts are not told apart.
        forward: work of the forward.
        backward: work of the backward.
        backward_weight: the part of it that makes gradients of weights. Every product with
            weights costs as much again there as in the forward; attention's core has no weights.
            Of the traffic it is the sums of gradients alone: what else a backward moves is on the
            way to the inputs.
    """

    name: str
    forward: Work
    backward: Work
    backward_weight: Work

    @property
    def backward_input(self) -> Work:
        """The rest of the backward: gradients of activations, and recomputation if any."""
        return self.backward - self.backward_weight

    def __add__(self, other: ModuleWork) -> ModuleWork:
        return ModuleWork(
            "",
            self.forward + other.forward,
            self.backward + other.backward,
            self.backward_weight + other.backward_weight,
        )


#: What a stage boundary never separates: a transformer layer, or a block of a ResNet.
Unit = tuple[ModuleWork, ...]


@dataclass(frozen=True)
class StageWork:
    """What a stage has to do.

    Attributes:
        num_layers: transformer layers, or blocks of a ResNet.
        modules: in order.
    """

    num_layers: int
    modules: tuple[ModuleWork, ...]

    @property
    def whole(self) -> ModuleWork:
        """All modules together."""
        return reduce(add, self.modules)

    def named_modules(self) -> list[tuple[str, ModuleWork]]:
        """Modules by name; those of a layer with its number, as in layers.3.mlp."""
        count: Counter[str] = Counter()
        found = []
        for module in self.modules:
            layer = f"layers.{count[module.name]}." if module.name in _OF_A_LAYER else ""
            found.append((layer + module.name, module))
            count[module.name] += 1
        return found


def _products(
    name: str,
    flops: float,
    activations: float,
    weights: float,
    passes: tuple[float, float] = _PASSES,
) -> ModuleWork:
    """The work of products.

    Args:
        flops: of a forward.
        activations: bytes that cross the memory bus as often as `passes` says.
        weights: how many; 0: what is multiplied are activations alone.
    """
    forward, backward = (times * activations for times in passes)
    return ModuleWork(
        name,
        forward=Work(flops, forward + _HALF * weights),
        backward=Work(_BACKWARD_FLOPS * flops, backward + (_HALF + _GRADIENT) * weights),
        backward_weight=Work(flops if weights else 0.0, _GRADIENT * weights),
    )


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Feed-forward parts of which each token takes a few (mixture of experts).

    Attributes:
        count: experts of a layer.
        per_token: that a token takes.
        feed_forward_size: width of an expert.
        shared_size: width of what all tokens take besides; 0 for none.
        dense_layers: which layers, from 0, have one feed-forward part instead.
    """

    count: int
    per_token: int
    feed_forward_size: int
    shared_size: int = 0
    dense_layers: tuple[int, ...] = ()


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


class _Attention(NamedTuple):
    """Widths of what an attention's products make, all heads together, and all their weights."""

    query: int
    key: int
    value: int
    out: int
    weights: int


@dataclass(frozen=True)
class TransformerModel:
    """A stack of transformer layers: decoders (GPT-3, Llama), encoders (BERT), or both (T5).

    Attributes:
        name: for people.
        num_layers: transformer layers; of the decoder, where there is an encoder, too.
        hidden_size: width h.
        num_heads: attention heads a.
        vocabulary_size: rows of the embedding and of the head, with padding; 0 where a benchmark
            leaves both out.
        sequence_length: tokens s of a sample, on either side where there are two.
        encoder_layers: layers before those, to whose result each of those attends, too.
        fused_attention: the scores never reach memory.
        key_value_heads: heads of keys and values, fewer with grouped-query attention; None: a.
        head_size: width of a head; None: h / a.
        feed_forward_size: None: 4 h.
        gated: the feed-forward part has a third product, whose result gates (SwiGLU).
        window: tokens that a token attends to at most; None: all of its sample.
        full_layers: which layers, from 0, have no window.
        experts: instead of one feed-forward part; None: there are none.
        latent: instead of usual attention; None: it is usual.
        causal: a token attends to those before it only; in a decoder behind an encoder it always
            does.
        tied: embedding and head are one matrix. Counts once among the parameters; each of its two
            stages has a copy, so the work is the same.
    """

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    vocabulary_size: int
    sequence_length: int
    _: KW_ONLY
    encoder_layers: int = 0
    fused_attention: bool = False
    key_value_heads: int | None = None
    head_size: int | None = None
    feed_forward_size: int | None = None
    gated: bool = False
    window: int | None = None
    full_layers: tuple[int, ...] = ()
    experts: Experts | None = None
    latent: LatentAttention | None = None
    causal: bool = True
    tied: bool = False

    def units(
        self, microbatch_size: int, tensor_parallel: int, context_parallel: int = 1
    ) -> list[Unit]:
        """The layers, with the embedding on the first (of either part) and the head on the last.

        A layer: 24 B s h^2 + 4 B s^2 h FLOPs forward (Narayanan et al., SC 2021, appendix) and
        s b h (10 + 24 / t + 5 a s / (h t)) bytes of activations (Korthikanti et al., MLSys 2023,
        section 4.2), where it has the usual widths. Other widths change each product's share.
        """
        tokens, rest = divmod(microbatch_size * self.sequence_length, context_parallel)
        if rest:
            raise InputError(f"--cp {context_parallel} does not divide {tokens} tokens")
        made = {kind: self._layer(tokens, tensor_parallel, *kind) for kind in set(self._layers)}
        units = [made[kind] for kind in self._layers]
        if self.vocabulary_size:
            for first in {0, self.encoder_layers}:
                look_up = Work(0.0, _EMBEDDING_BYTES * tokens * self.hidden_size)
                units[first] = (ModuleWork("embedding", *[look_up] * 3), *units[first])
            # The final norm, the product with the vocabulary, and the loss.
            logits = tokens * self.vocabulary_size / tensor_parallel
            traffic = _NORM_BYTES * tokens * self.hidden_size + _LOGIT_BYTES * logits
            weights = self.hidden_size * self.vocabulary_size / tensor_parallel
            head = _products("head", 2 * self.hidden_size * logits, traffic, weights, (1.0, 1.0))
            units[-1] = (*units[-1], head)
        return units

    @property
    def parameters(self) -> int:
        """Weights, without norms and biases."""
        ends = (1 if self.tied else 2) * self.vocabulary_size * self.hidden_size
        return ends + sum(
            attentions * self._attention().weights + self._feed_forward(sparse)[1]
            for sparse, attentions, _ in self._layers
        )

    @property
    def head_width(self) -> int:
        """Width of a head."""
        return self.head_size or self.hidden_size // self.num_heads

    @property
    def feed_forward_width(self) -> int:
        """Width of a feed-forward part that is no expert."""
        return self.feed_forward_size or 4 * self.hidden_size

    def describe(self) -> str:
        """Its sizes, in a sentence without a full stop."""
        count = f"{self.encoder_layers} encoder and {self.num_layers} decoder"
        layers = f"{count if self.encoder_layers else self.num_layers} layers"
        parts = [f"{layers} of {self.hidden_size} units and {self.num_heads} heads"]
        if self.latent is not None:
            parts.append(f"latent attention of rank {self.latent.rank}")
        elif self.key_value_heads not in (None, self.num_heads):
            parts.append(f"{self.key_value_heads} key-value heads")
        if self.feed_forward_size is not None or self.gated:
            gated = "gated " if self.gated else ""
            parts.append(f"{gated}feed-forward {self.feed_forward_width}")
        if (experts := self.experts) is not None:
            shared = f" and {experts.shared_size} shared" if experts.shared_size else ""
            dense = len(experts.dense_layers)
            first = experts.dense_layers == tuple(range(dense))
            where = f"after {dense}" if first else f"in {self.num_layers - dense}"
            after = f" {where} layers" if dense else ""
            parts.append(
                f"{experts.per_token} of {experts.count} experts of "
                f"{experts.feed_forward_size}{shared}{after}, all on the GPUs of their stage"
            )
        parts.append(self.sample)
        if self.window is not None and self.window < self.sequence_length:
            near = self.num_layers - len(self.full_layers)
            some = f" in {near} layers" if self.full_layers else ""
            parts.append(f"attention to {self.window}{some}")
        parts.append(
            f"{self.vocabulary_size} words; embedding on the first stage, final norm and "
            "vocabulary head on the last"
            if self.vocabulary_size
            else "without embedding and head"
        )
        return ", ".join(parts)

    @property
    def tokens(self) -> int | None:
        """Tokens of a sample; None where it has two kinds of them."""
        return None if self.encoder_layers else self.sequence_length

    @property
    def sample(self) -> str:
        """Size of a sample, for people."""
        both = f"{self.sequence_length} + " if self.encoder_layers else ""
        return f"{both}{self.sequence_length} tokens"

    @property
    def _layers(self) -> list[tuple[bool, int, bool]]:
        """Of each layer, whether it has experts, how many attentions, whether it has a window."""
        dense = range(self.num_layers) if self.experts is None else self.experts.dense_layers
        attentions = 2 if self.encoder_layers else 1
        decoder = [
            (number not in dense, attentions, number not in self.full_layers)
            for number in range(self.num_layers)
        ]
        return [(False, 1, True)] * self.encoder_layers + decoder

    def _attention(self, gpus: int = 1) -> _Attention:
        """Of an attention on so many GPUs together: each has a head of keys and values at least."""
        h, heads = self.hidden_size, self.num_heads
        if (sizes := self.latent) is None:
            query = heads * self.head_width
            key = max(self.key_value_heads or heads, gpus) * self.head_width
            return _Attention(query, key, key, query, 2 * h * (query + key))
        key, value = heads * (sizes.key_size + sizes.rotary_size), heads * sizes.value_size
        # What makes the narrow vectors is on every GPU.
        narrow = h * (sizes.query_rank + sizes.rank + sizes.rotary_size)
        wide = (sizes.query_rank or h) * key + value * h
        wide += heads * sizes.rank * (sizes.key_size + sizes.value_size)
        return _Attention(key, key, value, value, gpus * narrow + wide)

    def _feed_forward(self, sparse: bool) -> tuple[int, int]:
        """Width that a token passes through, and weights of all experts together."""
        products = (3 if self.gated else 2) * self.hidden_size
        if not sparse or (experts := self.experts) is None:
            return self.feed_forward_width, products * self.feed_forward_width
        size, shared = experts.feed_forward_size, experts.shared_size
        weights = products * (experts.count * size + shared) + self.hidden_size * experts.count
        return experts.per_token * size + shared, weights

    def _layer(self, tokens: int, gpus: int, sparse: bool, attentions: int, windowed: bool) -> Unit:
        """A layer: attentions, then a feed-forward part, with norms.

        Args:
            tokens: that pass through it; as many are attended to.
            gpus: that share it (tensor parallelism).

        Raises:
            InputError: the heads cannot be shared out evenly.
        """
        if self.num_heads % gpus:
            raise InputError(f"--tp {gpus} does not divide the {self.num_heads} heads of the model")
        widths = self._attention(gpus)
        window = self.window if windowed else None
        length = min(self.sequence_length, window or self.sequence_length)
        inputs = tokens * self.hidden_size
        pairs = tokens * length
        projections = attentions * 2 * tokens * widths.weights / gpus
        moved = attentions * 2 * tokens * sum(widths[:4]) / gpus
        scores = 0.0 if self.fused_attention else attentions * 5 * self.num_heads * pairs / gpus
        core = attentions * 2 * pairs * (widths.query + widths.out) / gpus
        weights = attentions * widths.weights / gpus
        # Three of four projections come before the attention's core, which reads what they make.
        before = 0.75 * projections
        width, stored = self._feed_forward(sparse)
        products, kept = (3, 6) if self.gated else (2, 4)
        after = 2 * products * inputs * width / gpus + 0.25 * projections
        activations = (5 + attentions) * inputs + kept * tokens * width / gpus + 0.25 * moved
        return (
            _products("linear_qkv", before, attentions * 4 * inputs, 0.75 * weights),
            _products("core_attention", core, 0.75 * moved + scores, 0.0),
            _products("mlp", after, activations, stored / gpus + 0.25 * weights),
        )


class Convolution(NamedTuple):
    """Sizes of a convolution with its normalization and activation.

    Attributes:
        channels, out: coming in and going out.
        kernel: its width.
        stride: of its steps.
        size: pixels on a side of the maps coming in.
    """

    channels: int
    out: int
    kernel: int
    stride: int
    size: int

    def work(self, microbatch_size: int) -> ModuleWork:
        """What it has to do."""
        pixels = microbatch_size * (self.size // self.stride) ** 2
        weights = self.channels * self.out * self.kernel**2
        flops = 2.0 * pixels * weights
        return _products("", flops, _HALF * pixels * self.out, weights, _CONVOLUTION_PASSES)


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
    ) -> list[Unit]:
        """The blocks, with the stem on the first and the head on the last.

        Raises:
            InputError: GPUs shall share a stage: ResNets are not split that way here.
        """
        if tensor_parallel * context_parallel != 1:
            raise InputError(
                f"{self.name} cannot be split by tensor or context parallelism; leave --tp and "
                "--cp out"
            )
        blocks = self.bottlenecks()
        blocks[0].insert(0, self.stem)
        blocks[-1].append(Convolution(blocks[-1][2].out, self.classes, 1, 1, 1))
        return [tuple(one.work(microbatch_size) for one in block) for block in blocks]

    @property
    def stem(self) -> Convolution:
        """The first convolution."""
        kernel, stride = (7, 2) if self.downsampling_stem else (3, 1)
        return Convolution(3, 64, kernel, stride, self.image_size)

    def bottlenecks(self) -> list[list[Convolution]]:
        """The three convolutions of each block, and the one around them where there is one."""
        made = []
        channels = 64
        size = self.image_size // 4 if self.downsampling_stem else self.image_size
        for group, count in enumerate(self.blocks):
            width, out = 64 * 2**group * self.width_factor, 256 * 2**group
            for number in range(count):
                stride = 2 if group > 0 and number == 0 else 1
                block = [
                    Convolution(channels, width, 1, 1, size),
                    Convolution(width, width, 3, stride, size),
                    Convolution(width, out, 1, 1, size // stride),
                ]
                if number == 0:
                    block.append(Convolution(channels, out, 1, stride, size))
                made.append(block)
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

    tokens: ClassVar[int | None] = None

    @property
    def sample(self) -> str:
        """Size of a sample, for people."""
        return f"{self.image_size} x {self.image_size} pixels"


#: What can be split over pipeline stages: its `units` are the chain of units for one microbatch on
#: one GPU, in half precision.
Model = TransformerModel | ConvolutionalModel


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """What is trained and how, for a profile that is measured or modelled.

    Attributes:
        model: what is trained; None: only the user's own stages know.
        num_stages: pipeline stages.
        chunks: model chunks of each; the profile has a stage for each.
        num_microbatches: default for planning.
        microbatch_size: samples per microbatch; None: only the user's own stages know.
        tensor_parallel, context_parallel: GPUs that share a stage's layers, and its sequences.
        replicas: of the pipeline.
        dtype: "bfloat16", "float16" or "float32" (without tensor cores).
        recompute: whether backwards recompute their forward.
        split_backward: whether gradients of inputs and of weights are operations of their own.
        schedule: that the job runs.
        microbatch_group: of an interleaved schedule; see Pipeline.
        p2p_latency: what a transfer between stages takes, s.
        overlap_p2p: whether the GPU that sends computes meanwhile; otherwise operations take as
            much longer, at the power of waiting, and wait for no transfer.
        layers: of each stage or chunk, in the model's order; None: the split of least imbalance.
    """

    model: Model | None
    num_stages: int
    chunks: int = 1
    num_microbatches: int = 32
    microbatch_size: int | None = 4
    tensor_parallel: int = 1
    context_parallel: int = 1
    replicas: int = 1
    dtype: str = "bfloat16"
    recompute: bool = False
    split_backward: bool = False
    schedule: str = "1f1b"
    microbatch_group: int | None = None
    p2p_latency: float = 0.0
    overlap_p2p: bool = True
    layers: Sequence[int] | None = None

    def stages(self, cost: Callable[[Work], float]) -> list[StageWork]:
        """What each stage (or chunk) has to do, on one of the GPUs that share it.

        Args:
            cost: seconds (or any measure) of a piece of work, by which stages are balanced.

        Raises:
            InputError: there are more stages than units, or none, `layers` are not the model's, or
                GPUs cannot share it so.
        """
        assert self.model is not None
        assert self.microbatch_size is not None
        number = self.num_stages * self.chunks
        units = self.model.units(self.microbatch_size, self.tensor_parallel, self.context_parallel)
        if self.recompute:
            units = [
                tuple(replace(one, backward=one.backward + one.forward) for one in unit)
                for unit in units
            ]
        if self.layers is None:
            wholes = [reduce(add, unit) for unit in units]
            counts = partition([cost(one.forward) + cost(one.backward) for one in wholes], number)
        else:
            counts = list(self.layers)
            if len(counts) != number or sum(counts) != len(units):
                raise InputError(
                    f"--layers-per-stage has {sum(counts)} layers on {len(counts)} stages, but "
                    f"{self.model.name} has {len(units)} layers and there are {number} stages"
                )
        ends = accumulate(counts, initial=0)
        return [
            StageWork(end - begin, tuple(one for unit in units[begin:end] for one in unit))
            for begin, end in pairwise(ends)
        ]

    def metadata(self, **extra: Any) -> ProfileMetadata:
        """What the sidecar says of the job; of `extra` what says something."""
        chunked = self.chunks > 1
        gpus = self.tensor_parallel * self.context_parallel
        return ProfileMetadata(
            microbatch_size=self.microbatch_size,
            tensor_parallel=self.tensor_parallel,
            schedule=self.schedule,
            num_microbatches=self.num_microbatches,
            job=Workload(
                stages=self.num_stages if chunked else None,
                chunks=self.chunks if chunked else None,
                microbatch_group=self.microbatch_group,
                p2p_latency_s=self.p2p_latency if self.overlap_p2p else 0.0,
                gpus_per_stage=gpus if self.context_parallel > 1 else None,
                replicas=self.replicas,
            ),
            extra={name: value for name, value in extra.items() if value},
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
    mean = Fraction(upto[-1], num_stages)  # the slowest stage takes that at least
    fastest = slowest = 0
    for least in sorted({high - low for low, high in combinations(upto, 2)}, reverse=True):
        if least > mean:
            continue
        if fastest and mean / least >= Fraction(slowest, fastest):
            break
        found = _best_split(upto, num_stages, least, upto[-1], max)
        if found is not None and (not fastest or found[0] * fastest < slowest * least):
            fastest, slowest = least, found[0]
    best = _best_split(upto, num_stages, fastest, slowest, lambda cost, rest: cost**2 + rest)
    assert best is not None  # the bounds come from such a split
    return list(best[1])


def _best_split(
    upto: Sequence[int],
    num_stages: int,
    least: int,
    most: int,
    join: Callable[[int, int], int],
) -> tuple[int, tuple[int, ...]] | None:
    """The split into stages that cost `least` to `most` each; None if there is none.

    Args:
        upto: cost of all units before each one, and of all, (n + 1,), ascending.
        join: the figure to be small, of a stage's cost and the figure of the stages after it; of
            equal ones fewer units on earlier stages win.

    Returns:
        The figure, and units of the stages.
    """
    number = len(upto) - 1
    # From each unit to the end.
    best: list[tuple[int, tuple[int, ...]] | None] = [*[None] * number, (0, ())]
    for _ in range(num_stages):
        best = [
            min(
                (
                    (join(cost, rest[0]), (end - begin, *rest[1]))
                    for end in range(begin + 1, number + 1)
                    if (rest := best[end]) and least <= (cost := upto[end] - upto[begin]) <= most
                ),
                default=None,
            )
            for begin in range(number + 1)
        ]
    return best[0]
