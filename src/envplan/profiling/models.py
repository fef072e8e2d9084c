"""Models with their sizes as published, and with others."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from envplan._io.files import exists
from envplan.errors import InputError, meant, shown, unknown
from envplan.profiling.huggingface import read_model
from envplan.profiling.workloads import (
    ConvolutionalModel,
    Experts,
    LatentAttention,
    Model,
    TransformerModel,
)

# The figures of a transformer: layers, width, heads, words and tokens of a sample.

#: Brown et al., "Language Models are Few-Shot Learners" (2020), table 2.1, with the 16 heads that
#: its 2048 units make at 128 each, and the vocabulary padded to a multiple of 128.
GPT3_1_3B: Final = TransformerModel("GPT-3 1.3B", 24, 2048, 16, 50304, 2048)

#: The same table.
GPT3_2_7B: Final = TransformerModel("GPT-3 2.7B", 32, 2560, 32, 50304, 2048)

#: The same table, and a vocabulary that eight GPUs can share in multiples of 128. Whoever trains
#: it on an H100 fuses attention.
GPT3_175B: Final = TransformerModel("GPT-3 175B", 96, 12288, 96, 51200, 2048, fused_attention=True)

#: The size that EnvPipe and Perseus call 1.3B: BERT-Large's depth at twice its width.
BERT_1_3B: Final = TransformerModel("BERT 1.3B", 24, 2048, 32, 30592, 512, causal=False)

#: Raffel et al., "Exploring the Limits of Transfer Learning" (2020), the 3B variant; 512 tokens
#: on either side are our assumption.
T5_3B: Final = TransformerModel(
    *("T5 3B", 24, 1024, 32, 32128, 512), encoder_layers=24, head_size=128, feed_forward_size=16384
)

#: The width that Perseus trains (wide-resnet101_8): 1.5 billion parameters.
WIDE_RESNET_101_8: Final = ConvolutionalModel(
    name="Wide-ResNet-101-8 1.5B",
    blocks=(3, 4, 23, 3),
    width_factor=8,
    image_size=224,
    classes=1000,
    downsampling_stem=True,
)

#: EnvPipe's benchmark: BERT-Large's layers alone, and those of GPT-3 Small.
BERT_336M: Final = TransformerModel("BERT 336M", 24, 1024, 16, 0, 512, causal=False)
GPT_125M: Final = TransformerModel("GPT 125M", 12, 768, 12, 0, 2048)

#: GPT-3 Small and GPT-3 1.3B in Megatron-DeepSpeed, with embedding and head.
MEGATRON_125M: Final = replace(GPT_125M, name="Megatron 125M", vocabulary_size=50304)
MEGATRON_1_3B: Final = replace(GPT3_1_3B, name="Megatron 1.3B")

#: EnvPipe's benchmark: a stem for small images, given images of 224 x 224.
RESNET_152: Final = ConvolutionalModel(
    name="ResNet-152",
    blocks=(3, 8, 36, 3),
    width_factor=1,
    image_size=224,
    classes=100,
    downsampling_stem=False,
)

#: Decoders with gated feed-forward parts, as most have today; most with grouped-query attention.
_llm = partial(TransformerModel, head_size=128, gated=True, fused_attention=True)
_llm_8 = partial(_llm, key_value_heads=8)

#: What `envplan profile --model` knows by name, at the sequence lengths of pretraining. Llama:
#: "The Llama 3 Herd of Models" (2024), table 3. Qwen: "Qwen3 Technical Report" (2025), table 1, and
#: the model's card. Mixtral: "Mixtral of Experts" (2024), table 1, at 4096 tokens. DeepSeek:
#: "DeepSeek-V3 Technical Report" (2024), section 4.2, without its prediction of further tokens.
PRESETS: Final = {
    "llama3-8b": _llm_8("Llama 3 8B", 32, 4096, 32, 128256, 8192, feed_forward_size=14336),
    "llama3-70b": _llm_8("Llama 3 70B", 80, 8192, 64, 128256, 8192, feed_forward_size=28672),
    "llama3-405b": _llm_8("Llama 3 405B", 126, 16384, 128, 128256, 8192, feed_forward_size=53248),
    "qwen3-32b": _llm_8("Qwen3 32B", 64, 5120, 64, 151936, 4096, feed_forward_size=25600),
    "mixtral-8x7b": _llm_8(
        *("Mixtral 8x7B", 32, 4096, 32, 32000, 4096),
        feed_forward_size=14336,
        experts=Experts(count=8, per_token=2, feed_forward_size=14336),
    ),
    "deepseek-v3": _llm(
        *("DeepSeek-V3", 61, 7168, 128, 129280, 4096),
        feed_forward_size=18432,
        experts=Experts(
            count=256,
            per_token=8,
            feed_forward_size=2048,
            shared_size=2048,
            dense_layers=(0, 1, 2),
        ),
        latent=LatentAttention(
            query_rank=1536, rank=512, key_size=128, rotary_size=64, value_size=128
        ),
    ),
    "gpt3-175b": GPT3_175B,
}

#: The workloads that sizes may be given for, and what each is without any.
WORKLOADS: Final[dict[str, Model]] = {
    "gpt": GPT3_1_3B,
    "bert": BERT_1_3B,
    "t5": T5_3B,
    "wide-resnet": WIDE_RESNET_101_8,
}

#: Sizes that may be given: the model's field, and the least and the most that it may be.
_SIZES: Final = {
    "layers": ("num_layers", 1, 1000),
    "hidden_size": ("hidden_size", 1, 10**7),
    "heads": ("num_heads", 1, 10**7),
    "vocabulary_size": ("vocabulary_size", 0, 10**7),
    "sequence_length": ("sequence_length", 1, 10**7),
    "width_factor": ("width_factor", 1, 10**7),
    "image_size": ("image_size", 32, 10**7),
}
#: Those of a model by name.
_OF_MODELS: Final = ("layers", "sequence_length", "vocabulary_size")

#: Bottleneck blocks of the four groups, by the number of layers that ResNets are named after.
_BLOCKS: Final = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}


def model_of(workload: str, **sizes: int) -> Model:
    """The model of a workload with some of its sizes changed.

    Args:
        sizes: layers (of a T5 in encoder and decoder each; of a ResNet 50, 101 or 152),
            hidden_size, heads (without it, a new width keeps the width of a head),
            vocabulary_size (0 leaves out embedding and head), sequence_length (of a T5 on either
            side), width_factor and image_size (pixels on a side).

    Raises:
        InputError: there is no such workload, or it has no such size.
    """
    usual = WORKLOADS.get(workload)
    if usual is None:
        raise InputError(unknown("workload", workload, WORKLOADS))
    if not sizes:
        return usual
    changed: dict[str, Any] = {}
    known = {"num_layers", *(field.name for field in fields(usual))}
    for size, value in sizes.items():
        field, least, most = _SIZES[size]
        option = "--" + size.replace("_", "-")
        if field not in known:
            raise InputError(f"{option} does not go with workload {workload}")
        if not least <= value <= most:
            raise InputError(f"{option} must be {least} to {most}, not {shown(value)}")
        changed[field] = value
    if isinstance(usual, ConvolutionalModel):
        layers = changed.pop("num_layers", 101)
        if layers not in _BLOCKS:
            raise InputError(
                f"--layers of workload wide-resnet must be 50, 101 or 152, not {layers}"
            )
        name = f"Wide-ResNet-{layers}-{changed.get('width_factor', usual.width_factor)}"
        return replace(usual, **changed, blocks=_BLOCKS[layers], name=name)
    layers = changed.get("num_layers", usual.num_layers)
    width = changed.get("hidden_size", usual.hidden_size)
    if usual.encoder_layers:
        changed["encoder_layers"] = layers
    if usual.feed_forward_size:
        changed["feed_forward_size"] = usual.feed_forward_size * width // usual.hidden_size
    if not usual.head_size:
        usual_heads = max(1, width * usual.num_heads // usual.hidden_size)
        heads = changed.setdefault("num_heads", usual_heads)
        if width % heads:
            raise InputError(
                f"--hidden-size {width} does not divide into {heads} heads; set --heads"
            )
    twice = "2 x " if usual.encoder_layers else ""
    return replace(usual, **changed, name=f"{workload.upper()} of {twice}{layers} layers x {width}")


def named_model(name: str, **sizes: int) -> TransformerModel:
    """A preset, or the model that a Hugging Face config.json describes.

    Args:
        name: in PRESETS, also as the hub writes it, or a path.
        sizes: layers, sequence_length and vocabulary_size may be others.

    Raises:
        InputError: there is neither, the file is wrong, or another size is given.
    """
    known = PRESETS.get(name)
    if known is None and not exists(name):  # the hub's names, such as Qwen/Qwen3-32B
        known = PRESETS.get(name.lower().rpartition("/")[2])
    if known is None:
        if not exists(name):
            raise InputError(
                f"no such config.json, and no model of that name{meant(name, PRESETS)}", path=name
            )
        known = read_model(Path(name))
    for size in sizes.keys() - set(_OF_MODELS):
        raise InputError(f"--{size.replace('_', '-')} does not go with --model, which says it")
    changed: dict[str, Any] = {_SIZES[size][0]: value for size, value in sizes.items()}
    return replace(known, **changed)
