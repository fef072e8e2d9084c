"""Models from the config.json that Hugging Face keeps beside their weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from envplan._documents import read_json
from envplan.errors import InputError, shown, unknown
from envplan.profiling.workloads import Experts, LatentAttention, TransformerModel

__all__ = ["MODEL_TYPES", "read_model"]

#: Models of these types have the fields that are read here.
MODEL_TYPES: Final = (
    *("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe"),
    *("deepseek", "deepseek_v2", "deepseek_v3", "phi3", "olmo2", "gpt_neox", "gpt2"),
)
#: Types whose feed-forward part has two products instead of three.
_PLAIN: Final = ("gpt_neox", "gpt2")
#: What GPT-2 calls them.
_OTHER_NAMES: Final = {
    "num_hidden_layers": "n_layer",
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
}
#: Context lengths are often those of an extension after the pretraining.
LONGEST_SEQUENCE: Final = 4096
_LARGEST: Final = 10_000_000
_TIED: Final = ("gpt2",)


class _Config:
    """The fields of a config.json, checked as they are read."""

    def __init__(self, fields: dict[str, Any], path: Path) -> None:
        self._fields, self._path = fields, path

    def number(self, name: str, default: int | None = None) -> int:
        """A whole number from 0 up.

        Raises:
            InputError: it is another value, or missing without a default.
        """
        value = self._fields.get(name)
        if value is None and name in _OTHER_NAMES:
            value = self._fields.get(_OTHER_NAMES[name])
        if value is None:
            if default is None:
                raise InputError("is missing", path=self._path, column=name)
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _LARGEST:
            raise InputError(
                f"must be a whole number from 0 to {_LARGEST}, not {shown(value)}",
                path=self._path,
                column=name,
            )
        return value

    def size(self, name: str, default: int | None = None) -> int:
        """A whole number from 1 up. As number."""
        value = self.number(name, default)
        if value < 1:
            raise InputError("must be at least 1, not 0", path=self._path, column=name)
        return value

    def flag(self, name: str, default: bool) -> bool:
        """Whether a field is true."""
        value = self._fields.get(name)
        return default if value is None else value is True


def read_model(path: Path) -> TransformerModel:
    """The model that a config.json describes, trained on at most 4096 tokens a sample.

    Args:
        path: of the file, or of the folder that it lies in.

    Raises:
        InputError: it cannot be read, is of an unknown type, or a field is missing or wrong.
    """
    file = path / "config.json" if path.is_dir() else path
    fields = read_json(file)
    if not isinstance(fields, dict):
        raise InputError("must hold one JSON object, {...}", path=file)
    if isinstance(inner := fields.get("text_config"), dict):
        fields = {**fields, **inner}
    kind = fields.get("model_type")
    if kind not in MODEL_TYPES:
        raise InputError(unknown("model type", str(kind), MODEL_TYPES), path=file)
    config = _Config(fields, file)
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    head_size = config.number("head_dim", 0) or hidden // heads
    if not head_size:
        raise InputError(f"{hidden} units do not make {heads} heads", path=file)
    longest = config.size("max_position_embeddings", LONGEST_SEQUENCE)
    layers = config.size("num_hidden_layers")
    sliding = kind == "mistral" or config.flag("use_sliding_window", False)
    name = next(iter(fields.get("architectures") or []), None) or str(kind)
    experts = _experts(config, layers)
    return TransformerModel(
        name=f"{str(name).removesuffix('ForCausalLM')} of {layers} layers x {hidden}",
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        key_value_heads=config.size("num_key_value_heads", heads),
        head_size=head_size,
        feed_forward_size=config.number("intermediate_size", 4 * hidden) or 4 * hidden,
        gated=kind not in _PLAIN,
        vocabulary_size=config.number("vocab_size"),
        sequence_length=min(longest, LONGEST_SEQUENCE),
        window=(config.number("sliding_window", 0) or None) if sliding else None,
        fused_attention=True,
        experts=experts,
        latent=_latent(config),
        tied=config.flag("tie_word_embeddings", kind in _TIED),
    )


def _experts(config: _Config, layers: int) -> Experts | None:
    """Mixtral, Qwen and DeepSeek name them differently."""
    count = max(
        config.number(name, 0) for name in ("num_local_experts", "num_experts", "n_routed_experts")
    )
    if not count:
        return None
    wide = config.number("moe_intermediate_size", 0) or config.size("intermediate_size")
    shared = config.number("shared_expert_intermediate_size", 0)
    return Experts(
        count=count,
        per_token=min(count, config.size("num_experts_per_tok")),
        feed_forward_size=wide,
        shared_size=shared or wide * config.number("n_shared_experts", 0),
        dense_layers=min(layers, config.number("first_k_dense_replace", 0)),
    )


def _latent(config: _Config) -> LatentAttention | None:
    rank = config.number("kv_lora_rank", 0)
    if not rank:
        return None
    return LatentAttention(
        query_rank=config.number("q_lora_rank", 0),
        rank=rank,
        key_size=config.size("qk_nope_head_dim"),
        rotary_size=config.number("qk_rope_head_dim", 0),
        value_size=config.size("v_head_dim"),
    )
