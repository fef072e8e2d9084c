"""Types of language models whose layers differ, by the fields of their config.json.

A type is a class here: its fields with the defaults of Hugging Face's transformers, and how they
make layers. `tools.compat` holds their parameters against those of transformers, which are equal.
Types whose layers are all alike, as in Llama, are in `huggingface`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Final, TypeVar, get_args

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, model_validator

from envplan.profiling.language_model import LanguageModel, Layer
from envplan.profiling.mixers import (
    Block,
    FeedForward,
    GatedDeltaNet,
    GroupedAttention,
    LatentSparseAttention,
    Mamba2,
    MixtureOfExperts,
    PerLayerInput,
    ShortConvolution,
)

__all__ = ["LAYERED_TYPES", "ConfigFields", "model_type"]

_LARGEST: Final = 100_000_000
#: Of a model; the deepest ones have some 130.
_MOST_LAYERS: Final = 1000

Number = Annotated[int, Field(ge=0, le=_LARGEST)]
Size = Annotated[int, Field(ge=1, le=_LARGEST)]
Layers = Annotated[int, Field(ge=1, le=_MOST_LAYERS)]

_FULL: Final = "full_attention"
_SLIDING: Final = ("sliding_attention", "chunked_attention")
_LINEAR: Final = "linear_attention"


class ConfigFields(BaseModel):
    """The fields that all types have, and what a type says of its layers."""

    model_config = ConfigDict(strict=True, protected_namespaces=())

    #: Parameters of the norm behind the last layer, for each unit of width.
    _norms_at_end: ClassVar[int] = 1

    hidden_size: Size
    num_hidden_layers: Layers
    vocab_size: Number
    max_position_embeddings: Size = 2**17
    tie_word_embeddings: bool = False
    architectures: list[str] = []
    #: Kinds of the layers, in order.
    layer_types: list[str] = []
    #: Layers behind the last one that predict further tokens.
    num_nextn_predict_layers: Number = 0

    @model_validator(mode="before")
    @classmethod
    def _leave_null_out(cls, fields: Any) -> Any:
        """Leave out fields that say nothing, where nothing is no value of theirs."""
        if not isinstance(fields, dict):
            return fields
        return {
            name: value
            for name, value in fields.items()
            if value is not None or cls._may_be_null(name)
        }

    @classmethod
    def _may_be_null(cls, name: str) -> bool:
        field = cls.model_fields.get(name)
        return field is not None and type(None) in get_args(field.annotation)

    @model_validator(mode="after")
    def _has_a_kind_for_each_layer(self) -> ConfigFields:
        if self.layer_types and len(self.layer_types) != self.num_hidden_layers:
            num_types = len(self.layer_types)
            raise ValueError(f"layer_types are {num_types}, but layers {self.num_hidden_layers}")
        for kind in self.layer_types:
            if kind not in self._known_kinds():
                raise ValueError(f"layer_types: layers of {kind} are not modelled")
        return self

    @classmethod
    def _known_kinds(cls) -> tuple[str, ...]:
        """The kinds of layers that the type has."""
        return (_FULL, *_SLIDING)

    def _layer(self, index: int) -> Layer:
        """The layer of an index, from 0."""
        raise NotImplementedError

    def _other_parameters(self) -> int:
        """Of what stands outside the layers, beside the last norm."""
        return 0

    def language_model(self, *, name: str, sequence_length: int) -> LanguageModel:
        """The model with these sizes."""
        layers = [self._layer(index) for index in range(self.num_hidden_layers)]
        return LanguageModel(
            name=name,
            hidden_size=self.hidden_size,
            vocabulary_size=self.vocab_size,
            sequence_length=sequence_length,
            layers=tuple(layers),
            tied=self.tie_word_embeddings,
            final_parameters=self._norms_at_end * self.hidden_size + self._other_parameters(),
            prediction=(layers[-1],) * self.num_nextn_predict_layers,
        )

    def _kind(self, index: int, *, period: int, other: str) -> str:
        """A layer's kind: as the file says, or full attention at the end of each period."""
        if self.layer_types:
            return self.layer_types[index]
        return _FULL if period and (index + 1) % period == 0 else other


#: The types by the name of their field `model_type`.
LAYERED_TYPES: Final[dict[str, type[ConfigFields]]] = {}

_Type = TypeVar("_Type", bound=type[ConfigFields])


def model_type(*names: str) -> Callable[[_Type], _Type]:
    """Enter a class under the names of its type."""

    def enter(fields: _Type) -> _Type:
        LAYERED_TYPES.update(dict.fromkeys(names, fields))
        return fields

    return enter


class _Attentive(ConfigFields):
    """The fields of grouped attention."""

    num_attention_heads: Size
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    attention_bias: bool = False

    @property
    def head_size(self) -> int:
        """Width of a head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    def _attention(self, **more: Any) -> GroupedAttention:
        """An attention of these sizes, but for some."""
        usual: Mapping[str, Any] = {
            "hidden_size": self.hidden_size,
            "heads": self.num_attention_heads,
            "key_value_heads": self.num_key_value_heads or self.num_attention_heads,
            "head_size": self.head_size,
            "has_bias": self.attention_bias,
            "has_output_bias": self.attention_bias,
        }
        return GroupedAttention(**{**usual, **more})

    def _layer_of(self, *blocks: Block, norms: int = 2) -> Layer:
        """A layer with so many norms as wide as a token."""
        return Layer(blocks, norms * self.hidden_size)


# --- linear attention ----------------------------------------------------------------------------


class _Linear(_Attentive):
    """The fields of Qwen's layers of linear attention, with full attention in every fourth."""

    full_attention_interval: Size = 4
    linear_conv_kernel_dim: Size = 4
    linear_key_head_dim: Size = 128
    linear_value_head_dim: Size = 128
    linear_num_key_heads: Size = 16
    linear_num_value_heads: Size = 32

    @classmethod
    def _known_kinds(cls) -> tuple[str, ...]:
        return (_FULL, _LINEAR)

    def _mixer(self, index: int) -> Block:
        period = self.full_attention_interval
        if self._kind(index, period=period, other=_LINEAR) == _FULL:
            return self._attention(has_gate=True, inner_norms=2 * self.head_size)
        return GatedDeltaNet(
            hidden_size=self.hidden_size,
            key_heads=self.linear_num_key_heads,
            value_heads=self.linear_num_value_heads,
            key_size=self.linear_key_head_dim,
            value_size=self.linear_value_head_dim,
            kernel_size=self.linear_conv_kernel_dim,
        )


@model_type("qwen3_5", "qwen3_5_text")
class _Qwen35(_Linear):
    """Qwen3.5."""

    intermediate_size: Size

    def _layer(self, index: int) -> Layer:
        feed_forward = FeedForward(hidden_size=self.hidden_size, width=self.intermediate_size)
        return self._layer_of(self._mixer(index), feed_forward)


@model_type("qwen3_5_moe", "qwen3_5_moe_text")
class _Qwen35Experts(_Linear):
    """Qwen3.5 with experts."""

    num_experts: Size
    num_experts_per_tok: Size
    moe_intermediate_size: Size
    shared_expert_intermediate_size: Number = 0

    def _experts(self) -> Block:
        return MixtureOfExperts(
            hidden_size=self.hidden_size,
            count=self.num_experts,
            per_token=self.num_experts_per_tok,
            width=self.moe_intermediate_size,
            shared_width=self.shared_expert_intermediate_size,
            has_shared_gate=True,
        )

    def _layer(self, index: int) -> Layer:
        return self._layer_of(self._mixer(index), self._experts())


@model_type("qwen3_next")
class _Qwen3Next(_Qwen35Experts):
    """Qwen3-Next."""

    intermediate_size: Size = 5632
    decoder_sparse_step: Size = 1
    mlp_only_layers: list[int] = []

    def _layer(self, index: int) -> Layer:
        is_dense = index in self.mlp_only_layers or (index + 1) % self.decoder_sparse_step
        if not is_dense:
            return super()._layer(index)
        feed_forward = FeedForward(hidden_size=self.hidden_size, width=self.intermediate_size)
        return self._layer_of(self._mixer(index), feed_forward)


# --- windows and shared experts ------------------------------------------------------------------


@model_type("exaone4")
class _Exaone4(_Attentive):
    """EXAONE 4: norms behind the blocks, windows but in every fourth layer."""

    intermediate_size: Size
    sliding_window: Number | None = 4096
    sliding_window_pattern: Number | str | None = 4

    def _layer(self, index: int) -> Layer:
        period = self.sliding_window_pattern
        # The larger models write LLLG: local layers, then a global one.
        period = len(period) if isinstance(period, str) else period or 1
        is_full = self._kind(index, period=period, other=_SLIDING[0]) == _FULL
        window = 0 if is_full else self.sliding_window or 0
        attention = self._attention(window=window, inner_norms=2 * self.head_size)
        return self._layer_of(
            attention, FeedForward(hidden_size=self.hidden_size, width=self.intermediate_size)
        )


@model_type("gemma4", "gemma4_text")
class _Gemma4(_Attentive):
    """Gemma 4: wide heads where attention is full, embeddings of each layer's own, experts."""

    num_key_value_heads: Size | None = 4
    head_dim: Size | None = 256
    tie_word_embeddings: bool = True
    intermediate_size: Size
    sliding_window: Number | None = 512
    global_head_dim: Size | None = 512
    num_global_key_value_heads: Size | None = None
    vocab_size_per_layer_input: Number = 262_144
    hidden_size_per_layer_input: Number | None = 256
    attention_k_eq_v: bool = False
    num_kv_shared_layers: Number = 0
    enable_moe_block: bool = False
    use_double_wide_mlp: bool = False
    num_experts: Number | None = None
    top_k_experts: Number | None = None
    moe_intermediate_size: Number | None = None

    def _layer(self, index: int) -> Layer:
        hidden, num_norms = self.hidden_size, 4
        reuses = index >= self.num_hidden_layers - self.num_kv_shared_layers
        blocks: list[Block] = [self._attention_of_layer(index, reuses=reuses)]
        width = self.intermediate_size * (2 if self.use_double_wide_mlp and reuses else 1)
        blocks.append(FeedForward(hidden_size=hidden, width=width))
        if self.enable_moe_block and self.num_experts:
            num_norms += 3
            experts = MixtureOfExperts(
                hidden_size=hidden,
                count=self.num_experts,
                per_token=self.top_k_experts or 1,
                width=self.moe_intermediate_size or self.intermediate_size,
                other_parameters=hidden + self.num_experts,  # scales of the router
            )
            blocks.append(experts)
        if self.hidden_size_per_layer_input:
            num_norms += 1
            blocks.append(PerLayerInput(hidden_size=hidden, width=self.hidden_size_per_layer_input))
        return self._layer_of(*blocks, norms=num_norms)

    def _attention_of_layer(self, index: int, *, reuses: bool) -> Block:
        """The attention of a layer, which may reuse keys and values of one before it."""
        is_last = index == self.num_hidden_layers - 1  # attends to all tokens in any case
        is_full = is_last or self._kind(index, period=6, other=_SLIDING[0]) == _FULL
        size = (self.global_head_dim if is_full else None) or self.head_size
        heads = self.num_key_value_heads or self.num_attention_heads
        if is_full and self.attention_k_eq_v:
            heads = self.num_global_key_value_heads or heads
        return self._attention(
            head_size=size,
            key_value_heads=heads,
            window=0 if is_full else self.sliding_window or 0,
            shares_values=self.attention_k_eq_v and is_full,
            reuses_keys=reuses,
            inner_norms=size if reuses else 2 * size,
        )

    def _other_parameters(self) -> int:
        width = self.hidden_size_per_layer_input
        if not width:
            return 0
        all_widths = self.num_hidden_layers * width
        return (self.vocab_size_per_layer_input + self.hidden_size) * all_widths + width


@model_type("gpt_oss")
class _GptOss(_Attentive):
    """gpt-oss: windows in every other layer, sinks, biases."""

    attention_bias: bool = True
    head_dim: Size | None = 64
    intermediate_size: Size
    sliding_window: Number | None = 128
    num_local_experts: Size
    num_experts_per_tok: Size = Field(
        4, validation_alias=AliasChoices("num_experts_per_tok", "experts_per_token")
    )

    def _layer(self, index: int) -> Layer:
        is_full = self._kind(index, period=2, other=_SLIDING[0]) == _FULL
        sinks = self.num_attention_heads
        attention = self._attention(
            window=0 if is_full else self.sliding_window or 0, inner_norms=sinks
        )
        width, hidden = self.intermediate_size, self.hidden_size
        experts = MixtureOfExperts(
            hidden_size=hidden,
            count=self.num_local_experts,
            per_token=self.num_experts_per_tok,
            width=width,
            other_parameters=self.num_local_experts * (2 * width + hidden + 1),  # biases
        )
        return self._layer_of(attention, experts)


@model_type("llama4_text", "llama4")
class _Llama4(_Attentive):
    """Llama 4: chunks but in every fourth layer, a shared expert beside one of many."""

    intermediate_size: Size
    intermediate_size_mlp: Size = 16384
    num_local_experts: Size
    num_experts_per_tok: Size = 1
    interleave_moe_layer_step: Size = 1
    moe_layers: list[int] | None = None
    attention_chunk_size: Number | None = 8192
    no_rope_layer_interval: Number = 4

    def _layer(self, index: int) -> Layer:
        period = self.no_rope_layer_interval
        is_full = self._kind(index, period=period, other=_SLIDING[1]) == _FULL
        attention = self._attention(window=0 if is_full else self.attention_chunk_size or 0)
        return self._layer_of(attention, self._feed_forward(index))

    def _feed_forward(self, index: int) -> Block:
        has_experts = (index + 1) % self.interleave_moe_layer_step == 0
        if self.moe_layers is not None:
            has_experts = index in self.moe_layers
        if not has_experts:
            return FeedForward(hidden_size=self.hidden_size, width=self.intermediate_size_mlp)
        return MixtureOfExperts(
            hidden_size=self.hidden_size,
            count=self.num_local_experts,
            per_token=self.num_experts_per_tok,
            width=self.intermediate_size,
            shared_width=self.intermediate_size,
        )


@model_type("hunyuan_v1_moe")
class _HunYuan(_Attentive):
    """Hunyuan: a shared part beside the experts; some fields have a value for each layer."""

    intermediate_size: Size
    num_experts: Size | list[Size]
    moe_topk: Size | list[Size] = 1

    def _layer(self, index: int) -> Layer:
        count, per_token = self.num_experts, self.moe_topk
        experts = MixtureOfExperts(
            hidden_size=self.hidden_size,
            count=count[index] if isinstance(count, list) else count,
            per_token=per_token[index] if isinstance(per_token, list) else per_token,
            width=self.intermediate_size,
            shared_width=self.intermediate_size,
        )
        attention = self._attention(inner_norms=2 * self.head_size)
        return self._layer_of(attention, experts)


# --- latent and sparse attention -----------------------------------------------------------------


@model_type("mistral4")
class _Latent(ConfigFields):
    """Latent attention and experts behind a few dense layers, as in DeepSeek-V3."""

    num_attention_heads: Size
    q_lora_rank: Number | None = None
    kv_lora_rank: Size
    qk_nope_head_dim: Size
    qk_rope_head_dim: Number = 64
    v_head_dim: Size
    intermediate_size: Size
    moe_intermediate_size: Size
    n_routed_experts: Size
    n_shared_experts: Number | None = 1
    num_experts_per_tok: Size
    first_k_dense_replace: Number | None = 0
    mlp_layer_types: list[str] = []
    index_n_heads: Number = 0
    index_head_dim: Number = 0
    index_topk: Number = 0

    @classmethod
    def _known_kinds(cls) -> tuple[str, ...]:
        return (_FULL, "indexed_attention")

    def _layer(self, index: int) -> Layer:
        attention = LatentSparseAttention(
            hidden_size=self.hidden_size,
            heads=self.num_attention_heads,
            query_rank=self.q_lora_rank or 0,
            rank=self.kv_lora_rank,
            key_size=self.qk_nope_head_dim,
            rotary_size=self.qk_rope_head_dim,
            value_size=self.v_head_dim,
            index_heads=self.index_n_heads,
            index_size=self.index_head_dim,
            index_tokens=self.index_topk,
        )
        return Layer((attention, self._feed_forward(index)), 2 * self.hidden_size)

    def _feed_forward(self, index: int) -> Block:
        is_dense = index < (self.first_k_dense_replace or 0)
        if self.mlp_layer_types:
            is_dense = self.mlp_layer_types[index] == "dense"
        if is_dense:
            return FeedForward(hidden_size=self.hidden_size, width=self.intermediate_size)
        return MixtureOfExperts(
            hidden_size=self.hidden_size,
            count=self.n_routed_experts,
            per_token=self.num_experts_per_tok,
            width=self.moe_intermediate_size,
            shared_width=self.moe_intermediate_size * (self.n_shared_experts or 0),
        )


@model_type("deepseek_v32", "glm_moe_dsa")
class _LatentSparse(_Latent):
    """DeepSeek-V3.2 and GLM-5: an indexer picks the tokens that are attended to."""

    first_k_dense_replace: Number | None = 3
    index_n_heads: Number = 64
    index_head_dim: Number = 128
    index_topk: Number = 2048


# --- state spaces and convolutions ---------------------------------------------------------------


@model_type("mamba2")
class _Mamba2(ConfigFields):
    """Mamba 2."""

    num_heads: Size = 128
    head_dim: Size = 64
    state_size: Size = 128
    conv_kernel: Size = 4
    n_groups: Size = 8
    chunk_size: Size = 256
    use_bias: bool = False
    use_conv_bias: bool = True

    @classmethod
    def _known_kinds(cls) -> tuple[str, ...]:
        return (_LINEAR,)

    def _layer(self, index: int) -> Layer:
        mixer = Mamba2(
            hidden_size=self.hidden_size,
            heads=self.num_heads,
            head_size=self.head_dim,
            groups=self.n_groups,
            state_size=self.state_size,
            kernel_size=self.conv_kernel,
            chunk_size=self.chunk_size,
            has_bias=self.use_bias,
            has_output_bias=self.use_bias,
            has_convolution_bias=self.use_conv_bias,
        )
        return Layer((mixer,), self.hidden_size)


@model_type("falcon_h1")
class _FalconH1(_Attentive):
    """Falcon-H1: attention and a state space side by side in every layer."""

    intermediate_size: Size
    mamba_d_ssm: Size | None = 1024
    mamba_n_heads: Size = 128
    mamba_d_head: Size | str = "auto"
    mamba_n_groups: Size = 1
    mamba_d_state: Size = 256
    mamba_d_conv: Size = 4
    mamba_expand: Size = 2
    mamba_chunk_size: Size = 256
    mamba_conv_bias: bool = True
    mamba_rms_norm: bool = False
    mamba_proj_bias: bool = False
    projectors_bias: bool = False
    mlp_bias: bool = False

    @classmethod
    def _known_kinds(cls) -> tuple[str, ...]:
        return ("hybrid",)

    def _layer(self, index: int) -> Layer:
        inner = self.mamba_d_ssm or self.mamba_expand * self.hidden_size
        mixer = Mamba2(
            hidden_size=self.hidden_size,
            heads=self.mamba_n_heads,
            head_size=inner // self.mamba_n_heads,
            groups=self.mamba_n_groups,
            state_size=self.mamba_d_state,
            kernel_size=self.mamba_d_conv,
            chunk_size=self.mamba_chunk_size,
            has_bias=self.mamba_proj_bias,
            has_output_bias=self.projectors_bias,
            has_convolution_bias=self.mamba_conv_bias,
            has_norm=self.mamba_rms_norm,
        )
        feed_forward = FeedForward(
            hidden_size=self.hidden_size, width=self.intermediate_size, has_bias=self.mlp_bias
        )
        return self._layer_of(mixer, self._attention(), feed_forward)


@model_type("nemotron_h")
class _NemotronH(_Attentive):
    """Nemotron-H: each layer is one block; a pattern says which."""

    num_hidden_layers: Layers = 52
    layers_block_type: list[str] | None = None
    hybrid_override_pattern: str | None = None
    head_dim: Size | None = 128
    intermediate_size: Size = 21504
    mlp_bias: bool = False
    ssm_state_size: Size = 128
    mamba_num_heads: Size = 128
    mamba_head_dim: Size = 64
    n_groups: Size = 8
    conv_kernel: Size = 4
    chunk_size: Size = 128
    use_conv_bias: bool = True
    mamba_proj_bias: bool = False
    n_routed_experts: Size = 8
    num_experts_per_tok: Size = 2
    moe_intermediate_size: Size = 7688
    moe_shared_expert_intermediate_size: Number = 7688
    moe_latent_size: Number | None = None

    @classmethod
    def _known_kinds(cls) -> tuple[str, ...]:
        return (*_NEMOTRON_LETTERS.values(), "mamba", "attention")

    @model_validator(mode="before")
    @classmethod
    def _take_pattern(cls, fields: Any) -> Any:
        """Let the pattern of letters, or the blocks, be the kinds of the layers."""
        if not isinstance(fields, dict) or fields.get("layer_types"):
            return fields
        kinds = fields.get("layers_block_type")
        pattern = fields.get("hybrid_override_pattern")
        if kinds is None and isinstance(pattern, str):
            kinds = [_NEMOTRON_LETTERS.get(letter, letter) for letter in pattern]
        if not isinstance(kinds, list):
            raise ValueError("hybrid_override_pattern and layers_block_type are missing")  # noqa: TRY004
        return {**fields, "layer_types": kinds, "num_hidden_layers": len(kinds)}

    def _layer(self, index: int) -> Layer:
        return Layer((self._block(self.layer_types[index]),), self.hidden_size)

    def _block(self, kind: str) -> Block:
        hidden = self.hidden_size
        if kind in (_FULL, "attention"):
            return self._attention()
        if kind == "mlp":
            return FeedForward(
                hidden_size=hidden,
                width=self.intermediate_size,
                is_gated=False,
                has_bias=self.mlp_bias,
            )
        if kind == "moe":
            return MixtureOfExperts(
                hidden_size=hidden,
                count=self.n_routed_experts,
                per_token=self.num_experts_per_tok,
                width=self.moe_intermediate_size,
                shared_width=self.moe_shared_expert_intermediate_size,
                is_gated=False,
                latent_size=self.moe_latent_size or 0,
            )
        return Mamba2(
            hidden_size=hidden,
            heads=self.mamba_num_heads,
            head_size=self.mamba_head_dim,
            groups=self.n_groups,
            state_size=self.ssm_state_size,
            kernel_size=self.conv_kernel,
            chunk_size=self.chunk_size,
            has_bias=self.mamba_proj_bias,
            has_output_bias=self.mamba_proj_bias,
            has_convolution_bias=self.use_conv_bias,
        )


#: What the letters of Nemotron's pattern stand for.
_NEMOTRON_LETTERS: Final = {"M": _LINEAR, "*": _FULL, "-": "mlp", "E": "moe"}


@model_type("lfm2")
class _Lfm2(_Attentive):
    """LFM2: short convolutions, with attention in some layers."""

    num_key_value_heads: Size | None = 8
    tie_word_embeddings: bool = Field(
        True, validation_alias=AliasChoices("tie_embedding", "tie_word_embeddings")
    )
    intermediate_size: Size = Field(
        12288, validation_alias=AliasChoices("block_ff_dim", "intermediate_size")
    )
    conv_L_cache: Size = 3  # noqa: N815
    conv_bias: bool = False
    full_attn_idxs: list[int] | None = None
    block_multiple_of: Size = 256
    block_ffn_dim_multiplier: float | int | None = 1.0
    block_auto_adjust_ff_dim: bool = True

    @classmethod
    def _known_kinds(cls) -> tuple[str, ...]:
        return (_FULL, "conv")

    def _mixer(self, index: int) -> Block:
        kind = self.layer_types[index] if self.layer_types else _FULL
        if not self.layer_types and self.full_attn_idxs is not None:
            kind = _FULL if index in self.full_attn_idxs else "conv"
        if kind == _FULL:
            return self._attention(inner_norms=2 * self.head_size)
        return ShortConvolution(
            hidden_size=self.hidden_size,
            kernel_size=self.conv_L_cache,
            has_bias=self.conv_bias,
        )

    def _width(self) -> int:
        """The feed-forward part's, which the file's is adjusted to."""
        width = self.intermediate_size
        if not self.block_auto_adjust_ff_dim:
            return width
        width = int((self.block_ffn_dim_multiplier or 1.0) * int(2 * width / 3))
        return self.block_multiple_of * -(-width // self.block_multiple_of)

    def _layer(self, index: int) -> Layer:
        return self._layer_of(
            self._mixer(index), FeedForward(hidden_size=self.hidden_size, width=self._width())
        )


@model_type("lfm2_moe")
class _Lfm2Experts(_Lfm2):
    """LFM2 with experts behind the first layers."""

    intermediate_size: Size = 7168
    moe_intermediate_size: Size = 1792
    num_dense_layers: Number = 2
    num_experts: Size = 32
    num_experts_per_tok: Size = 4

    def _width(self) -> int:
        return self.intermediate_size

    def _layer(self, index: int) -> Layer:
        if index < self.num_dense_layers:
            return super()._layer(index)
        experts = MixtureOfExperts(
            hidden_size=self.hidden_size,
            count=self.num_experts,
            per_token=self.num_experts_per_tok,
            width=self.moe_intermediate_size,
        )
        return self._layer_of(self._mixer(index), experts)
