"""Models from the config.json that Hugging Face keeps beside their weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, model_validator

from envplan._io.documents import parse_document, read_json
from envplan.errors import InputError, meant, shown
from envplan.profiling.language_model import LanguageModel
from envplan.profiling.model_types import LAYERED_TYPES
from envplan.profiling.small_parameters import SmallFields, Widths, small_parameters
from envplan.profiling.transformer import Experts, LatentAttention, TransformerModel

__all__ = ["MODEL_TYPES", "read_model"]

#: Types whose feed-forward part has three products, the result of one of which gates.
_GATED: Final = (
    *("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "deepseek"),
    *("deepseek_v2", "deepseek_v3", "kimi_k2", "phi3", "phimoe", "olmo", "olmo2", "olmo3", "olmoe"),
    *("gemma", "gemma2", "gemma3_text", "glm", "glm4", "glm4_moe", "chatglm"),
    *("minimax_m2", "mimo", "ernie4_5", "ernie4_5_moe", "seed_oss", "smollm3"),
    *("granite", "granitemoe", "cohere", "cohere2", "stablelm", "internlm2", "baichuan"),
    *("hunyuan_v1_dense", "qwen2_vl", "qwen2_5_vl", "qwen3_vl_text", "qwen3_vl_moe_text"),
    *("qwen2_vl_text", "qwen2_5_vl_text", "ministral", "ministral3", "dots1", "helium"),
)
#: Types whose feed-forward part has two.
_PLAIN: Final = (
    *("gpt_neox", "gpt2", "gptj", "gpt_bigcode", "phi", "opt", "bloom", "falcon", "starcoder2"),
    *("nemotron", "arcee", "apertus"),
)
#: Models of these types have the fields that are read here.
MODEL_TYPES: Final = (*_GATED, *_PLAIN, *LAYERED_TYPES)
_TIED: Final = {"tie_word_embeddings": True}
#: Fields that files of a type leave out where they have these values.
_DEFAULTS: Final[Mapping[str, Mapping[str, object]]] = {
    **dict.fromkeys(("gpt2", "opt", "bloom", "falcon", "starcoder2", "gemma", "cohere"), _TIED),
    **dict.fromkeys(("smollm3", "ernie4_5", "ernie4_5_moe"), _TIED),
    "gpt_bigcode": {**_TIED, "multi_query": True},
    "cohere2": {**_TIED, "sliding_window_pattern": 4},
    "gemma2": {**_TIED, "sliding_window_pattern": 2},
    "gemma3_text": {
        **_TIED,
        "sliding_window_pattern": 6,
        "vocab_size": 262208,
        "head_dim": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
    "olmo3": {"sliding_window_pattern": 4},
}
#: Kinds of layers in `layer_types`: one attends to all tokens, others to a window of them.
_FULL_ATTENTION: Final = "full_attention"
_WINDOWED_ATTENTION: Final = ("sliding_attention", "chunked_attention")
_MODELLED_LAYERS: Final = (_FULL_ATTENTION, *_WINDOWED_ATTENTION)
#: Context lengths are often those of an extension after the pretraining.
LONGEST_SEQUENCE: Final = 4096
_LARGEST: Final = 100_000_000
#: Of a model; the deepest ones have some 130.
_MOST_LAYERS: Final = 1000


def _named(name: str, *other_names: str, default: Any = ...) -> Any:
    """A field with the names that types of models have for it."""
    return Field(default, validation_alias=AliasChoices(name, *other_names))


_Number = Annotated[int, Field(ge=0, le=_LARGEST)]
_Size = Annotated[int, Field(ge=1, le=_LARGEST)]
_Layers = Annotated[int, Field(ge=1, le=_MOST_LAYERS)]


class _Fields(BaseModel):
    model_config = ConfigDict(strict=True, protected_namespaces=())


class _Experts(_Fields):
    """The fields of a mixture of experts."""

    count: _Size = _named("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    per_token: _Size = _named("num_experts_per_tok", "moe_k")
    feed_forward_size: _Size = _named("moe_intermediate_size", "intermediate_size")
    shared_size: _Number = _named("shared_expert_intermediate_size", default=0)
    num_shared: _Number = _named("n_shared_experts", "moe_num_shared_experts", default=0)
    first_sparse_layer: _Number = _named(
        "first_k_dense_replace", "moe_layer_start_index", default=0
    )
    sparse_layer_step: _Size = _named(
        "decoder_sparse_step",
        "interleave_moe_layer_step",
        "moe_layer_interval",
        "moe_layer_freq",
        default=1,
    )
    dense_layers: list[int] = _named("mlp_only_layers", default=[])
    layer_kinds: list[str] = _named("mlp_layer_types", default=[])

    def in_model_of(self, num_layers: int) -> Experts:
        """These experts in a model of so many layers."""
        dense_layers = [layer for layer in range(num_layers) if self._is_dense(layer)]
        return Experts(
            count=self.count,
            per_token=self.per_token,
            feed_forward_size=self.feed_forward_size,
            shared_size=self.shared_size or self.feed_forward_size * self.num_shared,
            dense_layers=tuple(dense_layers),
        )

    def _is_dense(self, layer: int) -> bool:
        """Whether a layer has one feed-forward part, by any of the ways to say so."""
        is_dense_by_kind = layer < len(self.layer_kinds) and self.layer_kinds[layer] == "dense"
        is_between_sparse = (layer + 1) % self.sparse_layer_step != 0
        return (
            layer < self.first_sparse_layer
            or layer in self.dense_layers
            or is_between_sparse
            or is_dense_by_kind
        )


class _Latent(_Fields):
    """The fields of multi-head latent attention."""

    query_rank: _Number = _named("q_lora_rank", default=0)
    rank: _Size = _named("kv_lora_rank")
    key_size: _Size = _named("qk_nope_head_dim")
    rotary_size: _Number = _named("qk_rope_head_dim", default=0)
    value_size: _Size = _named("v_head_dim")

    def attention(self) -> LatentAttention:
        """The attention with these sizes."""
        return LatentAttention(
            query_rank=self.query_rank,
            rank=self.rank,
            key_size=self.key_size,
            rotary_size=self.rotary_size,
            value_size=self.value_size,
        )


class _Type(_Fields):
    """The type of a model."""

    model_type: str

    def known_type(self, file: Path) -> str:
        """The type, where it can be modelled.

        Raises:
            InputError: it cannot; the message names the nearest.
        """
        name = self.model_type
        if name in MODEL_TYPES:
            return name
        nearest = meant(name, MODEL_TYPES).removeprefix("; ")
        raise InputError(
            f"model_type {shown(name)} is not known{f'; {nearest}' if nearest else ''} "
            "(docs/measuring.md lists all); where its layers are those of a known type, say which, "
            "as in --as llama; measure others with --entry",
            path=file,
        )


class _Config(_Fields):
    """The fields that all types have, or may have."""

    model_type: str
    hidden_size: _Size = _named("hidden_size", "n_embd", "n_embed")
    num_attention_heads: _Size = _named("num_attention_heads", "n_head")
    num_hidden_layers: _Layers = _named("num_hidden_layers", "n_layer", "num_layers")
    vocab_size: _Number = _named("vocab_size", "padded_vocab_size")
    architectures: list[str] = []
    head_dim: _Number = _named("head_dim", "kv_channels", default=0)
    num_key_value_heads: _Size | None = _named(
        "num_key_value_heads", "num_kv_heads", "multi_query_group_num", default=None
    )
    multi_query: bool = False
    new_decoder_architecture: bool = False
    intermediate_size: _Number = _named(
        "intermediate_size_mlp",
        "intermediate_size",
        "n_inner",
        "ffn_dim",
        "ffn_hidden_size",
        default=0,
    )
    max_position_embeddings: _Size = _named(
        "max_position_embeddings",
        "n_positions",
        "seq_length",
        "model_max_length",
        default=LONGEST_SEQUENCE,
    )
    use_sliding_window: bool | None = None
    sliding_window: _Number = _named("sliding_window", "attention_chunk_size", default=0)
    sliding_window_pattern: _Number = _named(
        "sliding_window_pattern", "no_rope_layer_interval", default=0
    )
    max_window_layers: _Number = 0
    layer_types: list[str] = []
    word_embed_proj_dim: _Number = 0
    tie_word_embeddings: bool = False
    num_experts: _Number = _named(
        "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", default=0
    )
    kv_lora_rank: _Number = 0

    @model_validator(mode="after")
    def _can_be_modelled(self) -> _Config:
        for kind in self.layer_types:
            if kind not in _MODELLED_LAYERS:
                raise ValueError(f"layer_types: layers of {kind} are not modelled")
        if self.layer_types and len(self.layer_types) != self.num_hidden_layers:
            num_types = len(self.layer_types)
            raise ValueError(f"layer_types are {num_types}, but layers {self.num_hidden_layers}")
        if self.word_embed_proj_dim not in (0, self.hidden_size):
            raise ValueError("word_embed_proj_dim is not hidden_size, which is not modelled")
        if not self.head_size:
            units, heads = self.hidden_size, self.num_attention_heads
            raise ValueError(f"{units} units do not make {heads} heads")
        return self

    @property
    def head_size(self) -> int:
        """Width of a head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def key_value_heads(self) -> int:
        """Heads of keys and values."""
        if self.multi_query and not self.new_decoder_architecture:
            return 1
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def window(self) -> int | None:
        """Tokens that a token attends to, in some layers at least; None: all."""
        is_used = self.use_sliding_window
        if is_used is None:  # files of Qwen state one that they do not use
            is_used = not self.model_type.startswith("qwen")
        return (self.sliding_window or None) if is_used else None

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Layers that attend to all tokens, whatever the window."""
        layers = range(self.num_hidden_layers)
        return tuple(layer for layer in layers if self._has_full_attention(layer))

    def _has_full_attention(self, layer: int) -> bool:
        if self.layer_types:
            return self.layer_types[layer] == _FULL_ATTENTION
        is_in_pattern = False
        if self.sliding_window_pattern:
            is_in_pattern = (layer + 1) % self.sliding_window_pattern == 0
        return layer < self.max_window_layers or is_in_pattern


def read_model(path: Path, *, as_type: str | None = None) -> TransformerModel | LanguageModel:
    """The model that a config.json describes, trained on at most 4096 tokens a sample.

    Args:
        path: of the file, or of the folder that it lies in.
        as_type: read it as if it were of this type.

    Raises:
        InputError: it cannot be read, is of an unknown type, or a field is missing or wrong.
    """
    file = path / "config.json" if path.is_dir() else path
    document = read_json(file)
    # What is no object is left for parse_document to refuse.
    fields = _language_fields(document) if isinstance(document, dict) else document
    if as_type is not None and isinstance(fields, dict):
        fields["model_type"] = as_type
    read = partial(parse_document, kind="model's config.json", path=file)
    name = read(_without_null(fields), _Type).known_type(file)
    part = " (its text part)" if _has_other_parts(document) else ""
    if name in LAYERED_TYPES:
        layered = read(fields, LAYERED_TYPES[name])
        return layered.language_model(
            name=f"{_architecture(layered.architectures, name)}{part} of "
            f"{layered.num_hidden_layers} layers x {layered.hidden_size}",
            sequence_length=min(layered.max_position_embeddings, LONGEST_SEQUENCE),
        )
    return _uniform_model(_with_defaults(name, _without_null(fields)), file, part)


def _uniform_model(fields: Mapping[str, object], file: Path, part: str) -> TransformerModel:
    """A model whose layers are all alike, but for windows and experts.

    Args:
        fields: of the file.
        file: that they are from.
        part: which part of the file's model it is, to follow its name.
    """
    read = partial(parse_document, fields, kind="model's config.json", path=file)
    config = read(_Config)
    layers, hidden = config.num_hidden_layers, config.hidden_size
    architecture = _architecture(config.architectures, config.model_type)
    experts = read(_Experts).in_model_of(layers) if config.num_experts else None
    latent = read(_Latent).attention() if config.kv_lora_rank else None
    return TransformerModel(
        name=f"{architecture}{part} of {layers} layers x {hidden}",
        num_layers=layers,
        hidden_size=hidden,
        num_heads=config.num_attention_heads,
        vocabulary_size=config.vocab_size,
        sequence_length=min(config.max_position_embeddings, LONGEST_SEQUENCE),
        key_value_heads=config.key_value_heads,
        head_size=config.head_size,
        feed_forward_size=config.intermediate_size or 4 * hidden,
        gated=config.model_type in _GATED,
        window=config.window,
        full_layers=config.full_layers if config.window else (),
        fused_attention=True,
        experts=experts,
        latent=latent,
        tied=config.tie_word_embeddings,
        small=small_parameters(
            config.model_type,
            read(SmallFields),
            is_gated=config.model_type in _GATED,
            widths=_widths(config, experts, latent),
        ),
    )


def _widths(config: _Config, experts: Experts | None, latent: LatentAttention | None) -> Widths:
    """The widths that norms and biases have."""
    latent_norms = 0 if latent is None else latent.query_rank + latent.rank
    return Widths(
        hidden=config.hidden_size,
        head=config.head_size,
        query=config.num_attention_heads * config.head_size,
        key=config.key_value_heads * config.head_size,
        feed_forward=config.intermediate_size or 4 * config.hidden_size,
        vocabulary=config.vocab_size,
        positions=config.max_position_embeddings,
        latent_norms=latent_norms,
        latent_biases=0 if latent is None else latent_norms + latent.rotary_size,
        experts=0 if experts is None else experts.count,
    )


def _architecture(architectures: Sequence[str], name: str) -> str:
    """The name of the model's class, or of its type."""
    if not architectures:
        return name
    return architectures[0].removesuffix("ForCausalLM")


def _has_other_parts(document: Mapping[str, object]) -> bool:
    """Whether a model sees or hears beside its text."""
    return bool(document.get("text_config")) or "vision_config" in document


def _language_fields(document: Mapping[str, object]) -> dict[str, object]:
    """The fields of a model's language part."""
    text_part = document.get("text_config")
    return {**document, **(text_part if isinstance(text_part, dict) else {})}


def _without_null(fields: Any) -> Any:
    """The fields that say something."""
    if not isinstance(fields, dict):
        return fields
    return {name: value for name, value in fields.items() if value is not None}


def _with_defaults(name: str, fields: dict[str, object]) -> dict[str, object]:
    """The fields, with those of a type where the file leaves them out."""
    return {**_DEFAULTS.get(name, {}), **fields}
