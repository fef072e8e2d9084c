"""Models from the config.json that Hugging Face keeps beside their weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, field_validator, model_validator

from envplan._io.documents import parse_document, read_json
from envplan.errors import meant
from envplan.profiling.transformer import Experts, LatentAttention, TransformerModel

__all__ = ["MODEL_TYPES", "read_model"]

#: Types whose feed-forward part has three products, the result of one of which gates.
_GATED: Final = (
    *("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "deepseek"),
    *("deepseek_v2", "deepseek_v3", "kimi_k2", "phi3", "phimoe", "olmo", "olmo2", "olmo3", "olmoe"),
    *("gemma", "gemma2", "gemma3_text", "glm", "glm4", "glm4_moe", "chatglm", "gpt_oss"),
    *("llama4_text", "minimax_m2", "mimo", "ernie4_5", "ernie4_5_moe", "seed_oss", "smollm3"),
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
MODEL_TYPES: Final = (*_GATED, *_PLAIN)
_TIED: Final = {"tie_word_embeddings": True}
#: What files of a type leave out where it is usual.
_USUAL: Final[dict[str, dict[str, Any]]] = {
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
    "gpt_oss": {"sliding_window_pattern": 2},
    "llama4_text": {"no_rope_layer_interval": 4, "n_shared_experts": 1},
    "olmo3": {"sliding_window_pattern": 4},
}
#: Layers that attend to all tokens, and those that attend to a window of them, in `layer_types`.
_ATTENTION: Final = {
    "full_attention": True,
    "sliding_attention": False,
    "chunked_attention": False,
}
#: Context lengths are often those of an extension after the pretraining.
LONGEST_SEQUENCE: Final = 4096
_LARGEST: Final = 100_000_000


def _or(name: str, *others: str, default: Any = ...) -> Any:
    """A field that some types call otherwise."""
    return Field(default, validation_alias=AliasChoices(name, *others))


_Number = Annotated[int, Field(ge=0, le=_LARGEST)]
_Size = Annotated[int, Field(ge=1, le=_LARGEST)]


class _Fields(BaseModel):
    model_config = ConfigDict(strict=True, protected_namespaces=())


class _Experts(_Fields):
    count: _Size = _or("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    per_token: _Size = _or("num_experts_per_tok", "moe_k")
    feed_forward_size: _Size = _or("moe_intermediate_size", "intermediate_size")
    shared_size: _Number = _or("shared_expert_intermediate_size", default=0)
    shared: _Number = _or("n_shared_experts", "moe_num_shared_experts", default=0)
    first: _Number = _or("first_k_dense_replace", "moe_layer_start_index", default=0)
    every: _Size = _or(
        *("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval"),
        *("moe_layer_freq",),
        default=1,
    )
    dense: list[int] = _or("mlp_only_layers", default=[])
    kinds: list[str] = _or("mlp_layer_types", default=[])

    def of(self, layers: int) -> Experts:
        """These experts in a model of so many layers."""
        dense = [
            number
            for number in range(layers)
            if number < self.first
            or number in self.dense
            or (number + 1) % self.every
            or self.kinds[number : number + 1] == ["dense"]
        ]
        return Experts(
            count=self.count,
            per_token=self.per_token,
            feed_forward_size=self.feed_forward_size,
            shared_size=self.shared_size or self.feed_forward_size * self.shared,
            dense_layers=tuple(dense),
        )


class _Latent(_Fields):
    query_rank: _Number = _or("q_lora_rank", default=0)
    rank: _Size = _or("kv_lora_rank")
    key_size: _Size = _or("qk_nope_head_dim")
    rotary_size: _Number = _or("qk_rope_head_dim", default=0)
    value_size: _Size = _or("v_head_dim")


class _Config(_Fields):
    model_type: str
    hidden_size: _Size = _or("hidden_size", "n_embd", "n_embed")
    num_attention_heads: _Size = _or("num_attention_heads", "n_head")
    num_hidden_layers: _Size = _or("num_hidden_layers", "n_layer", "num_layers")
    vocab_size: _Number = _or("vocab_size", "padded_vocab_size")
    architectures: list[str] = []
    head_dim: _Number = _or("head_dim", "kv_channels", default=0)
    num_key_value_heads: _Size | None = _or(
        "num_key_value_heads", "num_kv_heads", "multi_query_group_num", default=None
    )
    multi_query: bool = False
    new_decoder_architecture: bool = False
    intermediate_size: _Number = _or(
        *("intermediate_size_mlp", "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
        default=0,
    )
    max_position_embeddings: _Size = _or(
        *("max_position_embeddings", "n_positions", "seq_length", "model_max_length"),
        default=LONGEST_SEQUENCE,
    )
    use_sliding_window: bool | None = None
    sliding_window: _Number = _or("sliding_window", "attention_chunk_size", default=0)
    sliding_window_pattern: _Number = _or(
        "sliding_window_pattern", "no_rope_layer_interval", default=0
    )
    max_window_layers: _Number = 0
    layer_types: list[str] = []
    word_embed_proj_dim: _Number = 0
    tie_word_embeddings: bool = False
    experts: _Number = _or(
        *("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), default=0
    )
    kv_lora_rank: _Number = 0

    @field_validator("model_type")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in MODEL_TYPES:
            near = meant(name, MODEL_TYPES).removeprefix("; ")
            raise ValueError(
                "should be a transformer's that envplan can model "
                f"({near or 'docs/measuring.md lists them'}; measure others with --entry)"
            )
        return name

    @model_validator(mode="after")
    def _modelled(self) -> _Config:
        if other := next((kind for kind in self.layer_types if kind not in _ATTENTION), None):
            raise ValueError(f"layer_types: layers of {other} are not modelled")
        if self.layer_types and len(self.layer_types) != self.num_hidden_layers:
            number = len(self.layer_types)
            raise ValueError(f"layer_types are {number}, but layers {self.num_hidden_layers}")
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
    def window(self) -> int:
        """Tokens that a token attends to, in some layers at least; 0: all."""
        used = self.use_sliding_window
        if used is None:  # files of Qwen state one that they do not use
            used = not self.model_type.startswith("qwen")
        return self.sliding_window if used else 0

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Layers that attend to all tokens, whatever the window."""
        if self.layer_types:
            return tuple(n for n, kind in enumerate(self.layer_types) if _ATTENTION[kind])
        layers, first = self.num_hidden_layers, self.max_window_layers
        every = self.sliding_window_pattern or layers + 1
        return tuple(n for n in range(layers) if n < first or not (n + 1) % every)


def read_model(path: Path) -> TransformerModel:
    """The model that a config.json describes, trained on at most 4096 tokens a sample.

    Args:
        path: of the file, or of the folder that it lies in.

    Raises:
        InputError: it cannot be read, is of an unknown type, or a field is missing or wrong.
    """
    file = path / "config.json" if path.is_dir() else path
    fields = read_json(file)
    part = ""
    if isinstance(fields, dict):
        inner = fields.get("text_config")
        part = " (its text part)" if inner or "vision_config" in fields else ""
        fields = {**fields, **(inner if isinstance(inner, dict) else {})}
        fields = {name: value for name, value in fields.items() if value is not None}
        fields = {**_USUAL.get(str(fields.get("model_type")), {}), **fields}
    read = partial(parse_document, fields, kind="model's config.json", path=file)
    config = read(_Config)
    kind, layers, hidden = config.model_type, config.num_hidden_layers, config.hidden_size
    name = next(iter(config.architectures), kind).removesuffix("ForCausalLM")
    return TransformerModel(
        *(f"{name}{part} of {layers} layers x {hidden}", layers, hidden),
        *(config.num_attention_heads, config.vocab_size),
        min(config.max_position_embeddings, LONGEST_SEQUENCE),
        key_value_heads=config.key_value_heads,
        head_size=config.head_size,
        feed_forward_size=config.intermediate_size or 4 * hidden,
        gated=kind in _GATED,
        window=config.window or None,
        full_layers=config.full_layers if config.window else (),
        fused_attention=True,
        experts=read(_Experts).of(layers) if config.experts else None,
        latent=LatentAttention(**dict(read(_Latent))) if config.kv_lora_rank else None,
        tied=config.tie_word_embeddings,
    )
