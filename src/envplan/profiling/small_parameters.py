"""Norms and biases of models whose layers are all alike, by their type.

They cost next to no time, but they count: parameters are those that Hugging Face's transformers
counts, for every type. Where a type leaves it to a file whether there are biases or norms of
queries and keys, a field says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict

__all__ = ["SmallFields", "SmallParameters", "Widths", "small_parameters"]


class SmallParameters(NamedTuple):
    """Parameters beside the weights of products.

    Attributes:
        layer: of every layer.
        dense_layer: of a layer with one feed-forward part, besides.
        expert_layer: of a layer with experts, besides.
        outside: of the whole model, outside its layers.
    """

    layer: int = 0
    dense_layer: int = 0
    expert_layer: int = 0
    outside: int = 0


class Widths(NamedTuple):
    """The widths that norms and biases have.

    Attributes:
        hidden: of a token.
        head: of a head.
        query: of all heads' queries.
        key: of all heads' keys, and of all values.
        feed_forward: of a feed-forward part.
        vocabulary: words.
        positions: that are learned, where they are.
        latent_norms: of all norms in a latent attention; 0: it is usual.
        latent_biases: of all biases in it.
        experts: of a layer that has them.
    """

    hidden: int
    head: int
    query: int
    key: int
    feed_forward: int
    vocabulary: int
    positions: int
    latent_norms: int
    latent_biases: int
    experts: int


class SmallFields(BaseModel):
    """The fields of a config.json that say which norms and biases there are."""

    model_config = ConfigDict(strict=True)

    attention_bias: bool | None = None
    attention_out_bias: bool = False
    qkv_bias: bool = True
    use_qkv_bias: bool = False
    add_qkv_bias: bool = False
    mlp_bias: bool = False
    bias: bool = False
    use_bias: bool | None = None
    enable_bias: bool = True
    lm_head_bias: bool = False
    use_qk_norm: bool = False
    qk_layernorm: bool = False
    do_layer_norm_before: bool = True
    layer_norm_elementwise_affine: bool = True
    parallel_attn: bool = True
    new_decoder_architecture: bool = False
    num_ln_in_parallel_attn: int | None = None
    use_parallel_residual: bool = False


@dataclass(frozen=True, kw_only=True)
class _Parts:
    """The norms and biases of a type.

    Attributes:
        norms: of a layer, as wide as a token.
        norm_vectors: of each norm: 1 with a scale, 2 with a shift, too; 0: it has no parameters.
        norms_outside: behind the last layer, and before the first.
        query_norms: norms of queries and keys: one for all heads, one for each, or none.
        has_query_bias: of queries, keys and values.
        has_output_bias: of the product behind an attention.
        has_feed_forward_bias: of all products of a dense feed-forward part.
        has_head_bias: of the product with the vocabulary.
        more_positions: rows of learned positions beside those of a sample; None: none are learned.
        others: parameters of a layer that are none of these.
        expert_gate: whether a product of one column weighs what all tokens take.
        has_expert_bias: whether each expert has a number that is added to its score.
    """

    norms: int = 2
    norm_vectors: int = 1
    norms_outside: int = 1
    query_norms: Literal["", "of a head", "of all heads"] = ""
    has_query_bias: bool = False
    has_output_bias: bool = False
    has_feed_forward_bias: bool = False
    has_head_bias: bool = False
    more_positions: int | None = None
    others: int = 0
    expert_gate: bool = False
    has_expert_bias: bool = False


def small_parameters(
    name: str, fields: SmallFields, *, is_gated: bool, widths: Widths
) -> SmallParameters:
    """The norms and biases of a model.

    Args:
        name: its type.
        fields: of its config.json.
        is_gated: whether a feed-forward part has a third product.
        widths: of the model.
    """
    parts = _parts_of(name, fields)
    norm = parts.norm_vectors * widths.hidden
    layer = parts.norms * norm + parts.others + widths.latent_norms
    layer += _query_norm_parameters(parts, widths)
    if widths.latent_norms:
        layer += widths.latent_biases if parts.has_query_bias else 0
    elif parts.has_query_bias:
        layer += widths.query + 2 * widths.key
    if parts.has_output_bias:
        layer += widths.hidden
    dense_layer = 0
    if parts.has_feed_forward_bias:
        inner_products = 2 if is_gated else 1
        dense_layer = inner_products * widths.feed_forward + widths.hidden
    expert_layer = widths.hidden if parts.expert_gate else 0
    if parts.has_expert_bias:
        expert_layer += widths.experts
    outside = parts.norms_outside * norm
    if parts.more_positions is not None:
        outside += (widths.positions + parts.more_positions) * widths.hidden
    if parts.has_head_bias:
        outside += widths.vocabulary
    return SmallParameters(layer, dense_layer, expert_layer, outside)


def _query_norm_parameters(parts: _Parts, widths: Widths) -> int:
    if parts.query_norms == "of a head":
        return 2 * parts.norm_vectors * widths.head
    if parts.query_norms == "of all heads":
        return widths.query + widths.key
    return 0


def _parts_of(name: str, fields: SmallFields) -> _Parts:
    """The norms and biases of a type, as the fields of a file have it."""
    parts = _PARTS.get(name, _Parts())
    if name in _BY_FIELDS:
        return _BY_FIELDS[name](parts, fields)
    return _with_attention_bias(parts, fields)


# --- what a field decides ------------------------------------------------------------------------


def _with_attention_bias(parts: _Parts, fields: SmallFields) -> _Parts:
    """Biases of an attention's products, and of a feed-forward part's, where the file says so."""
    has_bias = bool(fields.attention_bias)
    return replace(
        parts,
        has_query_bias=parts.has_query_bias or has_bias,
        has_output_bias=parts.has_output_bias or has_bias,
        has_feed_forward_bias=parts.has_feed_forward_bias or fields.mlp_bias,
    )


def _with_query_bias(parts: _Parts, fields: SmallFields) -> _Parts:
    """The same for types whose output never has a bias."""
    return replace(_with_attention_bias(parts, fields), has_output_bias=False)


def _glm(parts: _Parts, fields: SmallFields) -> _Parts:
    has_bias = fields.attention_bias is not False  # GLM's file may leave it out
    return replace(parts, has_query_bias=has_bias)


def _glm4_moe(parts: _Parts, fields: SmallFields) -> _Parts:
    query_norms: Final = "of a head" if fields.use_qk_norm else ""
    return replace(_with_query_bias(parts, fields), query_norms=query_norms)


def _seed_oss(parts: _Parts, fields: SmallFields) -> _Parts:
    has_bias = fields.attention_bias is not False
    return replace(
        parts,
        has_query_bias=has_bias,
        has_output_bias=fields.attention_out_bias,
        has_feed_forward_bias=fields.mlp_bias,
    )


def _cohere(parts: _Parts, fields: SmallFields) -> _Parts:
    query_norms: Final = "of all heads" if fields.use_qk_norm else ""
    return replace(_with_attention_bias(parts, fields), query_norms=query_norms)


def _qwen2_moe(parts: _Parts, fields: SmallFields) -> _Parts:
    return replace(parts, has_query_bias=fields.qkv_bias)


def _everywhere(parts: _Parts, has_bias: bool) -> _Parts:
    """All products have a bias, or none has."""
    return replace(
        parts,
        has_query_bias=has_bias,
        has_output_bias=has_bias,
        has_feed_forward_bias=has_bias,
    )


def _ernie(parts: _Parts, fields: SmallFields) -> _Parts:
    return _everywhere(parts, bool(fields.use_bias))


def _starcoder2(parts: _Parts, fields: SmallFields) -> _Parts:
    return _everywhere(parts, fields.use_bias is not False)


def _internlm2(parts: _Parts, fields: SmallFields) -> _Parts:
    return replace(parts, has_query_bias=fields.bias, has_output_bias=fields.bias)


def _gpt_neox(parts: _Parts, fields: SmallFields) -> _Parts:
    has_bias = fields.attention_bias is not False
    return replace(parts, has_query_bias=has_bias, has_output_bias=has_bias)


def _opt(parts: _Parts, fields: SmallFields) -> _Parts:
    return replace(
        _everywhere(parts, fields.enable_bias),
        norm_vectors=2 if fields.layer_norm_elementwise_affine else 0,
        norms_outside=1 if fields.do_layer_norm_before else 0,
    )


def _falcon(parts: _Parts, fields: SmallFields) -> _Parts:
    norms = 1
    if fields.new_decoder_architecture:
        norms = fields.num_ln_in_parallel_attn or 2
    elif not fields.parallel_attn:
        norms = 2
    return replace(_everywhere(parts, fields.bias), norms=norms)


def _stablelm(parts: _Parts, fields: SmallFields) -> _Parts:
    query_norms: Final = "of all heads" if fields.qk_layernorm else ""
    return replace(
        parts,
        norms=1 if fields.use_parallel_residual else 2,
        query_norms=query_norms,
        has_query_bias=fields.use_qkv_bias,
    )


def _phi(parts: _Parts, fields: SmallFields) -> _Parts:
    query_norms: Final = "of a head" if fields.qk_layernorm else ""
    return replace(parts, query_norms=query_norms)


def _phimoe(parts: _Parts, fields: SmallFields) -> _Parts:
    return replace(_with_attention_bias(parts, fields), has_head_bias=fields.lm_head_bias)


def _chatglm(parts: _Parts, fields: SmallFields) -> _Parts:
    return replace(parts, has_query_bias=fields.add_qkv_bias)


# --- the types -----------------------------------------------------------------------------------

_WITH_SHIFT: Final = _Parts(norm_vectors=2)
_QUERY_BIAS: Final = _Parts(has_query_bias=True)
_HEAD_NORMS: Final = _Parts(query_norms="of a head")
_ALL_HEADS_NORMS: Final = _Parts(query_norms="of all heads")
_GPT2: Final = _everywhere(replace(_WITH_SHIFT, more_positions=0), has_bias=True)

#: Norms and biases that a type always has; others have two norms in a layer and one behind it.
_PARTS: Final[Mapping[str, _Parts]] = {
    **dict.fromkeys(("qwen2", "qwen2_vl", "qwen2_5_vl", "mimo"), _QUERY_BIAS),
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text"), _QUERY_BIAS),
    **dict.fromkeys(("qwen3", "qwen3_moe", "qwen3_vl_text", "qwen3_vl_moe_text"), _HEAD_NORMS),
    **dict.fromkeys(("hunyuan_v1_dense", "dots1"), _HEAD_NORMS),
    **dict.fromkeys(("olmo2", "olmo3", "olmoe", "minimax_m2"), _ALL_HEADS_NORMS),
    **dict.fromkeys(("phimoe", "stablelm", "nemotron"), _WITH_SHIFT),
    "qwen2_moe": _Parts(expert_gate=True),
    "olmo": _Parts(norm_vectors=0),
    "gemma2": _Parts(norms=4),
    "gemma3_text": _Parts(norms=4, query_norms="of a head"),
    "glm4": _Parts(norms=4),
    "ernie4_5_moe": _Parts(has_expert_bias=True),
    "cohere": _Parts(norms=1),
    "cohere2": _Parts(norms=1),
    "apertus": replace(_HEAD_NORMS, others=2),  # the two slopes of its activation
    "gpt_neox": replace(_WITH_SHIFT, has_feed_forward_bias=True),
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2,
    "gptj": _Parts(norms=1, norm_vectors=2, has_feed_forward_bias=True, has_head_bias=True),
    "phi": _everywhere(_Parts(norms=1, norm_vectors=2, has_head_bias=True), has_bias=True),
    "opt": _Parts(norm_vectors=2, more_positions=2),
    "bloom": _everywhere(_Parts(norm_vectors=2, norms_outside=2), has_bias=True),
    "falcon": _WITH_SHIFT,
    "starcoder2": _WITH_SHIFT,
}
#: Types of which fields other than attention_bias and mlp_bias decide, or these otherwise.
_BY_FIELDS: Final[Mapping[str, Callable[[_Parts, SmallFields], _Parts]]] = {
    "helium": _with_query_bias,
    "glm": _glm,
    "glm4": _glm,
    "glm4_moe": _glm4_moe,
    "seed_oss": _seed_oss,
    "cohere": _cohere,
    "cohere2": _with_attention_bias,
    "qwen2_moe": _qwen2_moe,
    "ernie4_5": _ernie,
    "ernie4_5_moe": _ernie,
    "starcoder2": _starcoder2,
    "internlm2": _internlm2,
    "gpt_neox": _gpt_neox,
    "opt": _opt,
    "falcon": _falcon,
    "stablelm": _stablelm,
    "phi": _phi,
    "phimoe": _phimoe,
    "chatglm": _chatglm,
}
