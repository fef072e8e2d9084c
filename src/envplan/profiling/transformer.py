"""Transformers: decoders (GPT-3, Llama), encoders (BERT), or both (T5), and their layers' work."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Final, NamedTuple

from envplan.errors import InputError
from envplan.profiling.blocks import (
    Share,
    activation_kernels,
    attention_kernels,
    expert_kernels,
    product_kernels,
    residual_kernels,
    rotary_kernels,
    unfused_attention_kernels,
)
from envplan.profiling.kernels import ElementWise
from envplan.profiling.small_parameters import SmallParameters
from envplan.profiling.work import (
    MemoryPasses,
    ModuleKernels,
    ModuleWork,
    Unit,
    Work,
    products_work,
)

__all__ = ["Experts", "LatentAttention", "TransformerModel"]

# Bytes per token and hidden unit for embedding look-up, position, dropout; and for the final norm.
_EMBEDDING_BYTES: Final = 12.0
_NORM_BYTES: Final = 8.0
# Bytes per logit with a fused cross entropy: written, read twice, probabilities written; the
# backward reads them, writes their gradient and reads it for two products.
_LOGIT_BYTES: Final = 8.0
_HEAD_PASSES: Final = MemoryPasses(forward=1.0, backward=1.0)

# Bytes of saved activations per token and hidden unit that GPUs of a stage do not share, 10 in a
# layer with one attention (Korthikanti et al., MLSys 2023, section 4.1): inputs of an attention's
# norm and products; the same of a feed-forward part, with the dropout mask behind it; the dropout
# mask behind an attention.
_ATTENTION_INPUT_BYTES: Final = 4
_FEED_FORWARD_INPUT_BYTES: Final = 5
_ATTENTION_MASK_BYTES: Final = 1
# Bytes per head and pair of tokens: softmax, dropout mask, and what dropout leaves.
_SCORE_BYTES: Final = 5

#: Three of an attention's four projections come before its core, which reads what they make.
_BEFORE_CORE: Final = 0.75
_AFTER_CORE: Final = 0.25


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
    """Multi-head latent attention: keys and values come from a narrow vector of all heads.

    (DeepSeek-V2, 2024, section 2.1)

    Attributes:
        query_rank: width between the two products that make queries; 0: there is one product.
        rank: width of the vector that keys and values come from.
        key_size: width of a head's keys without position.
        rotary_size: width of a head's keys with position.
        value_size: width of a head's values.
    """

    query_rank: int
    rank: int
    key_size: int
    rotary_size: int
    value_size: int


class _AttentionWidths(NamedTuple):
    """Widths of what an attention's products make, all heads together, and all their weights.

    Attributes:
        query: of queries.
        key: of keys.
        value: of values.
        out: of what the core makes, which the last product takes.
        num_weights: of all products, on all GPUs that share the attention.
    """

    query: int
    key: int
    value: int
    out: int
    num_weights: int

    @property
    def all_products(self) -> int:
        """Widths of the results of all four products together."""
        return self.query + self.key + self.value + self.out


class _FeedForward(NamedTuple):
    """A feed-forward part: the width that a token passes through, and weights of all experts."""

    width: int
    num_weights: int


class _LayerKind(NamedTuple):
    """The features in which layers of a model differ.

    Attributes:
        has_experts: whether it has experts instead of one feed-forward part.
        num_attentions: 2 in a decoder behind an encoder, to its own tokens and to the encoder's;
            else 1.
        has_window: whether the model's window holds in it, if the model has one.
    """

    has_experts: bool
    num_attentions: int
    has_window: bool


class _LayerKernels(NamedTuple):
    """The kernels of a layer, by where they are.

    Attributes:
        before_core: what makes queries, keys and values.
        core: attention itself.
        after_core: the product behind it.
        feed_forward: the rest.
    """

    before_core: ModuleKernels
    core: ModuleKernels
    after_core: ModuleKernels
    feed_forward: ModuleKernels = ModuleKernels()


_NOTHING_SMALL: Final = SmallParameters()


@dataclass(frozen=True)
class TransformerModel:
    """A stack of transformer layers.

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
        small: norms and biases, which count among the parameters, but do no work.
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
    small: SmallParameters = _NOTHING_SMALL

    def units(
        self, microbatch_size: int, tensor_parallel: int, context_parallel: int = 1
    ) -> list[Unit]:
        """The layers, with the embedding on the first (of either part) and the head on the last.

        A layer: 24 B s h^2 + 4 B s^2 h FLOPs forward (Narayanan et al., SC 2021, appendix) and
        s b h (10 + 24 / t + 5 a s / (h t)) bytes of activations (Korthikanti et al., MLSys 2023,
        section 4.2), where it has the usual widths. Other widths change each product's share.

        Raises:
            InputError: heads or tokens cannot be shared out evenly.
        """
        microbatch_tokens = microbatch_size * self.sequence_length
        if microbatch_tokens % context_parallel:
            raise InputError(f"--cp {context_parallel} does not divide {microbatch_tokens} tokens")
        num_tokens = microbatch_tokens // context_parallel
        units: list[Unit] = []
        work_of_kind: dict[_LayerKind, Unit] = {}
        for kind in self._layer_kinds:
            if kind not in work_of_kind:
                work_of_kind[kind] = self._layer_work(num_tokens, tensor_parallel, kind)
            units.append(work_of_kind[kind])
        if self.vocabulary_size:
            first_layers = {0, self.encoder_layers}  # of the encoder, if any, and of the decoder
            for layer in first_layers:
                units[layer] = (self._embedding_work(num_tokens, tensor_parallel), *units[layer])
            units[-1] = (*units[-1], self._head_work(num_tokens, tensor_parallel))
        return units

    def _embedding_work(self, num_tokens: int, tensor_parallel: int) -> ModuleWork:
        look_up_bytes = _EMBEDDING_BYTES * num_tokens * self.hidden_size
        look_up = Work(0.0, look_up_bytes, {ElementWise(look_up_bytes): 1.0})
        return ModuleWork(
            "embedding",
            forward=look_up,
            backward=look_up,
            backward_weight=look_up,
            num_weights=self.vocabulary_size * self.hidden_size / tensor_parallel,
        )

    def _head_work(self, num_tokens: int, tensor_parallel: int) -> ModuleWork:
        """The final norm, the product with the vocabulary, and the loss."""
        num_logits = num_tokens * self.vocabulary_size / tensor_parallel
        share = Share(num_tokens, self.sequence_length, tensor_parallel)
        kernels = (
            residual_kernels(share, self.hidden_size)
            + product_kernels(share, share.part_of(self.vocabulary_size), self.hidden_size)
            + ModuleKernels.of_element_wise(_LOGIT_BYTES * num_logits)
        )
        return products_work(
            "head",
            flops=2 * self.hidden_size * num_logits,
            activation_bytes=_NORM_BYTES * num_tokens * self.hidden_size
            + _LOGIT_BYTES * num_logits,
            num_weights=self.hidden_size * self.vocabulary_size / tensor_parallel,
            passes=_HEAD_PASSES,
            kernels=kernels,
        )

    @property
    def parameters(self) -> int:
        """Weights of all products, and the norms and biases that are stated."""
        embeddings = (1 if self.tied else 2) * self.vocabulary_size * self.hidden_size
        attention_weights = self._attention_widths().num_weights
        layers = 0
        for kind in self._layer_kinds:
            layers += kind.num_attentions * attention_weights
            layers += self._feed_forward(kind.has_experts).num_weights
            layers += self.small.layer
            layers += self.small.expert_layer if kind.has_experts else self.small.dense_layer
        return embeddings + layers + self.small.outside

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
        num_layers = str(self.num_layers)
        if self.encoder_layers:
            num_layers = f"{self.encoder_layers} encoder and {self.num_layers} decoder"
        parts = [f"{num_layers} layers of {self.hidden_size} units and {self.num_heads} heads"]
        if self.latent is not None:
            parts.append(f"latent attention of rank {self.latent.rank}")
        elif self.key_value_heads not in (None, self.num_heads):
            parts.append(f"{self.key_value_heads} key-value heads")
        if self.feed_forward_size is not None or self.gated:
            gated = "gated " if self.gated else ""
            parts.append(f"{gated}feed-forward {self.feed_forward_width}")
        if self.experts is not None:
            parts.append(self._describe_experts(self.experts))
        parts.append(self.sample)
        if self.window is not None and self.window < self.sequence_length:
            parts.append(self._describe_window(self.window))
        if self.vocabulary_size:
            parts.append(
                f"{self.vocabulary_size} words; embedding on the first stage, final norm and "
                "vocabulary head on the last"
            )
        else:
            parts.append("without embedding and head")
        return ", ".join(parts)

    def _describe_experts(self, experts: Experts) -> str:
        shared = f" and {experts.shared_size} shared" if experts.shared_size else ""
        num_dense = len(experts.dense_layers)
        layers = ""
        if num_dense and experts.dense_layers == tuple(range(num_dense)):
            layers = f" after {num_dense} layers"
        elif num_dense:
            layers = f" in {self.num_layers - num_dense} layers"
        return (
            f"{experts.per_token} of {experts.count} experts of {experts.feed_forward_size}"
            f"{shared}{layers}, all on the GPUs of their stage"
        )

    def _describe_window(self, window: int) -> str:
        num_windowed = self.num_layers - len(self.full_layers)
        layers = f" in {num_windowed} layers" if self.full_layers else ""
        return f"attention to {window}{layers}"

    @property
    def tokens(self) -> int | None:
        """Tokens of a sample; None where it has two kinds of them."""
        return None if self.encoder_layers else self.sequence_length

    @property
    def sample(self) -> str:
        """Size of a sample, for people."""
        if self.encoder_layers:
            return f"{self.sequence_length} + {self.sequence_length} tokens"
        return f"{self.sequence_length} tokens"

    @property
    def _layer_kinds(self) -> list[_LayerKind]:
        """The kind of each layer, those of the encoder first."""
        encoder = _LayerKind(has_experts=False, num_attentions=1, has_window=True)
        kinds = [encoder] * self.encoder_layers
        for layer in range(self.num_layers):
            kinds.append(
                _LayerKind(
                    has_experts=self.experts is not None and layer not in self.experts.dense_layers,
                    num_attentions=2 if self.encoder_layers else 1,
                    has_window=layer not in self.full_layers,
                )
            )
        return kinds

    def _attention_widths(self, num_gpus: int = 1) -> _AttentionWidths:
        """Widths of an attention on so many GPUs: each has a head of keys and values at least."""
        if self.latent is not None:
            return self._latent_widths(self.latent, num_gpus)
        query_width = self.num_heads * self.head_width
        key_value_heads = max(self.key_value_heads or self.num_heads, num_gpus)
        key_width = key_value_heads * self.head_width
        return _AttentionWidths(
            query=query_width,
            key=key_width,
            value=key_width,
            out=query_width,
            num_weights=2 * self.hidden_size * (query_width + key_width),
        )

    def _latent_widths(self, latent: LatentAttention, num_gpus: int) -> _AttentionWidths:
        """Widths of a latent attention; every GPU has the weights that make narrow vectors."""
        hidden, heads = self.hidden_size, self.num_heads
        key_width = heads * (latent.key_size + latent.rotary_size)
        value_width = heads * latent.value_size
        narrow_weights = hidden * (latent.query_rank + latent.rank + latent.rotary_size)
        query_weights = (latent.query_rank or hidden) * key_width
        key_value_weights = heads * latent.rank * (latent.key_size + latent.value_size)
        out_weights = value_width * hidden
        shared_weights = query_weights + key_value_weights + out_weights
        return _AttentionWidths(
            query=key_width,
            key=key_width,
            value=value_width,
            out=value_width,
            num_weights=num_gpus * narrow_weights + shared_weights,
        )

    def _feed_forward(self, has_experts: bool) -> _FeedForward:
        weights_per_unit = (3 if self.gated else 2) * self.hidden_size
        if self.experts is None or not has_experts:
            width = self.feed_forward_width
            return _FeedForward(width, weights_per_unit * width)
        count, size = self.experts.count, self.experts.feed_forward_size
        shared = self.experts.shared_size
        router = self.hidden_size * count
        return _FeedForward(
            width=self.experts.per_token * size + shared,
            num_weights=weights_per_unit * (count * size + shared) + router,
        )

    def _layer_work(self, num_tokens: int, num_gpus: int, kind: _LayerKind) -> Unit:
        """A layer: attentions, then a feed-forward part, with norms.

        Args:
            num_tokens: that pass through it; as many are attended to.
            num_gpus: that share it (tensor parallelism).
            kind: of the layer.

        Raises:
            InputError: the heads cannot be shared out evenly.
        """
        if self.num_heads % num_gpus:
            raise InputError(
                f"--tp {num_gpus} does not divide the {self.num_heads} heads of the model"
            )
        widths = self._attention_widths(num_gpus)
        feed_forward = self._feed_forward(kind.has_experts)
        num_attentions = kind.num_attentions
        inputs = num_tokens * self.hidden_size
        projections = num_attentions * 2 * num_tokens * widths.num_weights / num_gpus
        projected_bytes = num_attentions * 2 * num_tokens * widths.all_products / num_gpus
        attention_weights = num_attentions * widths.num_weights / num_gpus
        token_pairs = num_tokens * self._attended_tokens(kind)
        core = num_attentions * 2 * token_pairs * (widths.query + widths.out) / num_gpus
        score_bytes = 0.0
        if not self.fused_attention:
            score_bytes = num_attentions * _SCORE_BYTES * self.num_heads * token_pairs / num_gpus
        num_products = 3 if self.gated else 2
        kept_bytes = 2 * num_products  # per unit: inputs of the last product, and what makes them
        unshared_bytes = _FEED_FORWARD_INPUT_BYTES + num_attentions * _ATTENTION_MASK_BYTES
        feed_forward_flops = 2 * num_products * inputs * feed_forward.width / num_gpus
        kernels = self._layer_kernels(Share(num_tokens, self.sequence_length, num_gpus), kind)
        return (
            products_work(
                "linear_qkv",
                flops=_BEFORE_CORE * projections,
                activation_bytes=num_attentions * _ATTENTION_INPUT_BYTES * inputs,
                num_weights=_BEFORE_CORE * attention_weights,
                kernels=kernels.before_core,
            ),
            products_work(
                "core_attention",
                flops=core,
                activation_bytes=_BEFORE_CORE * projected_bytes + score_bytes,
                num_weights=0.0,
                kernels=kernels.core,
            ),
            products_work(
                "mlp",
                flops=feed_forward_flops + _AFTER_CORE * projections,
                activation_bytes=unshared_bytes * inputs
                + kept_bytes * num_tokens * feed_forward.width / num_gpus
                + _AFTER_CORE * projected_bytes,
                num_weights=feed_forward.num_weights / num_gpus + _AFTER_CORE * attention_weights,
                kernels=kernels.after_core + kernels.feed_forward,
            ),
        )

    def _layer_kernels(self, share: Share, kind: _LayerKind) -> _LayerKernels:
        """The kernels of a layer on one GPU."""
        feed_forward = residual_kernels(share, self.hidden_size)
        if self.experts is not None and kind.has_experts:
            feed_forward += self._expert_kernels(share, self.experts)
        else:
            feed_forward += self._dense_kernels(share, self.feed_forward_width)
        attention = self._attention_kernels(share, kind)
        if kind.num_attentions > 1:
            attention = _LayerKernels(*(kernels + kernels for kernels in attention))
        return attention._replace(feed_forward=feed_forward)

    def _dense_kernels(self, share: Share, width: int) -> ModuleKernels:
        """Of a feed-forward part that all tokens take."""
        width = share.part_of(width)
        return (
            product_kernels(share, 2 * width if self.gated else width, self.hidden_size)
            + activation_kernels(share, width, gated=self.gated)
            + product_kernels(share, self.hidden_size, width)
        )

    def _expert_kernels(self, share: Share, experts: Experts) -> ModuleKernels:
        router = product_kernels(share, experts.count, self.hidden_size)
        routed = expert_kernels(
            share,
            hidden_size=self.hidden_size,
            expert_size=experts.feed_forward_size,
            per_token=experts.per_token,
            count=experts.count,
        )
        if not experts.shared_size:
            return router + routed
        return router + routed + self._dense_kernels(share, experts.shared_size)

    def _attention_kernels(self, share: Share, kind: _LayerKind) -> _LayerKernels:
        """Of one attention and its four products, or those of a latent one."""
        hidden, heads = self.hidden_size, share.part_of(self.num_heads)
        before_core = residual_kernels(share, hidden)
        if self.latent is not None:
            latent = self.latent
            key_value_heads, value_size = heads, latent.value_size
            key_size = latent.key_size + latent.rotary_size
            narrow_queries = latent.query_rank or hidden
            before_core += product_kernels(share, latent.query_rank, hidden)
            before_core += product_kernels(share, heads * key_size, narrow_queries)
            before_core += product_kernels(share, latent.rank + latent.rotary_size, hidden)
            width = heads * (latent.key_size + value_size)
            before_core += product_kernels(share, width, latent.rank)
        else:
            key_value_heads = share.part_of(self.key_value_heads or self.num_heads)
            key_size = value_size = self.head_width
            width = (heads + 2 * key_value_heads) * key_size
            before_core += product_kernels(share, width, hidden)
        before_core += rotary_kernels(share, (heads + key_value_heads) * key_size)
        if self.fused_attention:
            core = attention_kernels(
                share,
                heads=heads,
                key_value_heads=key_value_heads,
                key_size=key_size,
                value_size=value_size,
                window=(self.window or 0) if kind.has_window else 0,
                causal=self.causal,
            )
        else:
            score_bytes = _SCORE_BYTES * heads * share.num_tokens * share.sequence_length
            core = unfused_attention_kernels(
                share, heads=heads, head_size=key_size, score_bytes=score_bytes
            )
        after_core = product_kernels(share, hidden, heads * value_size)
        return _LayerKernels(before_core, core, after_core)

    def _attended_tokens(self, kind: _LayerKind) -> int:
        """Tokens that a token attends to in a layer."""
        if self.window is None or not kind.has_window:
            return self.sequence_length
        return min(self.sequence_length, self.window)
