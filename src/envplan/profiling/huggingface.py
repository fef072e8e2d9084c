"""Models from the config.json that Hugging Face keeps beside their weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, field_validator

from envplan._documents import parse_document, read_json
from envplan.errors import InputError, unknown
from envplan.profiling.workloads import Experts, LatentAttention, TransformerModel

__all__ = ["MODEL_TYPES", "read_model"]

#: Models of these types have the fields that are read here.
MODEL_TYPES: Final = (
    *("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe"),
    *("deepseek", "deepseek_v2", "deepseek_v3", "phi3", "olmo2", "gpt_neox", "gpt2"),
)
#: Types whose feed-forward part has two products instead of three.
_PLAIN: Final = ("gpt_neox", "gpt2")
#: Context lengths are often those of an extension after the pretraining.
LONGEST_SEQUENCE: Final = 4096
_LARGEST: Final = 10_000_000


def _or(name: str, *others: str, default: Any = ...) -> Any:
    """A field that some types call otherwise."""
    return Field(default, validation_alias=AliasChoices(name, *others))


_Number = Annotated[int, Field(ge=0, le=_LARGEST)]
_Size = Annotated[int, Field(ge=1, le=_LARGEST)]


class _Fields(BaseModel):
    model_config = ConfigDict(strict=True, protected_namespaces=())


class _Experts(_Fields):
    count: _Size = _or("num_local_experts", "num_experts", "n_routed_experts")
    per_token: _Size = _or("num_experts_per_tok")
    feed_forward_size: _Number = _or("moe_intermediate_size", default=0)
    shared_size: _Number = _or("shared_expert_intermediate_size", default=0)
    shared: _Number = _or("n_shared_experts", default=0)
    dense_layers: _Number = _or("first_k_dense_replace", default=0)


class _Latent(_Fields):
    query_rank: _Number = _or("q_lora_rank", default=0)
    rank: _Size = _or("kv_lora_rank")
    key_size: _Size = _or("qk_nope_head_dim")
    rotary_size: _Number = _or("qk_rope_head_dim", default=0)
    value_size: _Size = _or("v_head_dim")


class _Config(_Fields):
    model_type: str
    hidden_size: _Size = _or("hidden_size", "n_embd")
    num_attention_heads: _Size = _or("num_attention_heads", "n_head")
    num_hidden_layers: _Size = _or("num_hidden_layers", "n_layer")
    vocab_size: _Number
    architectures: list[str] = []
    head_dim: _Number = 0
    num_key_value_heads: _Size | None = None
    intermediate_size: _Number = _or("intermediate_size", "n_inner", default=0)
    max_position_embeddings: _Size = _or(
        "max_position_embeddings", "n_positions", default=LONGEST_SEQUENCE
    )
    use_sliding_window: bool = False
    sliding_window: _Number = 0
    tie_word_embeddings: bool | None = None
    experts: _Number = _or("num_local_experts", "num_experts", "n_routed_experts", default=0)
    kv_lora_rank: _Number = 0

    @field_validator("model_type")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in MODEL_TYPES:
            raise ValueError(unknown("model type", name, MODEL_TYPES))
        return name


def read_model(path: Path) -> TransformerModel:
    """The model that a config.json describes, trained on at most 4096 tokens a sample.

    Args:
        path: of the file, or of the folder that it lies in.

    Raises:
        InputError: it cannot be read, is of an unknown type, or a field is missing or wrong.
    """
    file = path / "config.json" if path.is_dir() else path
    fields = read_json(file)
    if isinstance(fields, dict):
        inner = fields.get("text_config")
        fields = {**fields, **(inner if isinstance(inner, dict) else {})}
        fields = {name: value for name, value in fields.items() if value is not None}
    read = partial(parse_document, fields, kind="model's config.json", path=file)
    config = read(_Config)
    kind, hidden, heads = config.model_type, config.hidden_size, config.num_attention_heads
    layers = config.num_hidden_layers
    head_size = config.head_dim or hidden // heads
    if not head_size:
        raise InputError(f"{hidden} units do not make {heads} heads", path=file)
    wide = config.intermediate_size or 4 * hidden
    experts = latent = None
    if config.experts:
        own = dict(read(_Experts))
        size = own["feed_forward_size"] or wide
        shared = own["shared_size"] or size * own["shared"]
        del own["shared"]
        experts = Experts(**{**own, "feed_forward_size": size, "shared_size": shared})
    if config.kv_lora_rank:
        latent = LatentAttention(**dict(read(_Latent)))
    sliding = kind == "mistral" or config.use_sliding_window
    tied = config.tie_word_embeddings
    name = next(iter(config.architectures), kind).removesuffix("ForCausalLM")
    return TransformerModel(
        *(f"{name} of {layers} layers x {hidden}", layers, hidden, heads, config.vocab_size),
        min(config.max_position_embeddings, LONGEST_SEQUENCE),
        key_value_heads=config.num_key_value_heads or heads,
        head_size=head_size,
        feed_forward_size=wide,
        gated=kind not in _PLAIN,
        window=(config.sliding_window or None) if sliding else None,
        fused_attention=True,
        experts=experts,
        latent=latent,
        tied=kind == "gpt2" if tied is None else tied,
    )
