"""Models with their sizes as published, and with others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Final

from envplan._io.files import exists
from envplan.errors import InputError, meant, shown, unknown
from envplan.profiling.huggingface import read_model
from envplan.profiling.language_model import LanguageModel
from envplan.profiling.resnet import ConvolutionalModel
from envplan.profiling.small_parameters import SmallParameters
from envplan.profiling.training_job import Model
from envplan.profiling.transformer import Experts, LatentAttention, TransformerModel

#: Brown et al., "Language Models are Few-Shot Learners" (2020), table 2.1, with the 16 heads that
#: its 2048 units make at 128 each, and the vocabulary padded to a multiple of 128.
GPT3_1_3B: Final = TransformerModel(
    "GPT-3 1.3B",
    num_layers=24,
    hidden_size=2048,
    num_heads=16,
    vocabulary_size=50304,
    sequence_length=2048,
)

#: The same table.
GPT3_2_7B: Final = TransformerModel(
    "GPT-3 2.7B",
    num_layers=32,
    hidden_size=2560,
    num_heads=32,
    vocabulary_size=50304,
    sequence_length=2048,
)

#: The same table, and a vocabulary that eight GPUs can share in multiples of 128. Whoever trains
#: it on an H100 fuses attention.
GPT3_175B: Final = TransformerModel(
    "GPT-3 175B",
    num_layers=96,
    hidden_size=12288,
    num_heads=96,
    vocabulary_size=51200,
    sequence_length=2048,
    fused_attention=True,
)

#: The size that EnvPipe and Perseus call 1.3B: BERT-Large's depth at twice its width.
BERT_1_3B: Final = TransformerModel(
    "BERT 1.3B",
    num_layers=24,
    hidden_size=2048,
    num_heads=32,
    vocabulary_size=30592,
    sequence_length=512,
    causal=False,
)

#: Raffel et al., "Exploring the Limits of Transfer Learning" (2020), the 3B variant; 512 tokens
#: on either side are our assumption.
T5_3B: Final = TransformerModel(
    "T5 3B",
    num_layers=24,
    hidden_size=1024,
    num_heads=32,
    vocabulary_size=32128,
    sequence_length=512,
    encoder_layers=24,
    head_size=128,
    feed_forward_size=16384,
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

#: EnvPipe's benchmark: BERT-Large's layers alone.
BERT_336M: Final = TransformerModel(
    "BERT 336M",
    num_layers=24,
    hidden_size=1024,
    num_heads=16,
    vocabulary_size=0,
    sequence_length=512,
    causal=False,
)
#: EnvPipe's benchmark: the layers of GPT-3 Small alone.
GPT_125M: Final = TransformerModel(
    "GPT 125M",
    num_layers=12,
    hidden_size=768,
    num_heads=12,
    vocabulary_size=0,
    sequence_length=2048,
)

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

#: Decoders with gated feed-forward parts and heads of 128 units, as most have today.
_llm = partial(TransformerModel, head_size=128, gated=True, fused_attention=True)


def _norms(hidden_size: int, *, other: int = 0) -> SmallParameters:
    """Parameters of two norms in each layer and one behind the last, and of others in a layer."""
    return SmallParameters(layer=2 * hidden_size + other, outside=hidden_size)


#: What `envplan profile --model` knows by name, at the sequence lengths of pretraining. Llama:
#: "The Llama 3 Herd of Models" (2024), table 3. Qwen: "Qwen3 Technical Report" (2025), table 1, and
#: the model's card. Mixtral: "Mixtral of Experts" (2024), table 1, at 4096 tokens. DeepSeek:
#: "DeepSeek-V3 Technical Report" (2024), section 4.2, without its prediction of further tokens.
PRESETS: Final[Mapping[str, TransformerModel]] = {
    "llama3-8b": _llm(
        "Llama 3 8B",
        num_layers=32,
        hidden_size=4096,
        num_heads=32,
        key_value_heads=8,
        feed_forward_size=14336,
        vocabulary_size=128256,
        sequence_length=8192,
        small=_norms(4096),
    ),
    "llama3-70b": _llm(
        "Llama 3 70B",
        num_layers=80,
        hidden_size=8192,
        num_heads=64,
        key_value_heads=8,
        feed_forward_size=28672,
        vocabulary_size=128256,
        sequence_length=8192,
        small=_norms(8192),
    ),
    "llama3-405b": _llm(
        "Llama 3 405B",
        num_layers=126,
        hidden_size=16384,
        num_heads=128,
        key_value_heads=8,
        feed_forward_size=53248,
        vocabulary_size=128256,
        sequence_length=8192,
        small=_norms(16384),
    ),
    "qwen3-32b": _llm(
        "Qwen3 32B",
        num_layers=64,
        hidden_size=5120,
        num_heads=64,
        key_value_heads=8,
        feed_forward_size=25600,
        vocabulary_size=151936,
        sequence_length=4096,
        small=_norms(5120, other=2 * 128),
    ),
    "mixtral-8x7b": _llm(
        "Mixtral 8x7B",
        num_layers=32,
        hidden_size=4096,
        num_heads=32,
        key_value_heads=8,
        feed_forward_size=14336,
        vocabulary_size=32000,
        sequence_length=4096,
        small=_norms(4096),
        experts=Experts(count=8, per_token=2, feed_forward_size=14336),
    ),
    "deepseek-v3": _llm(
        "DeepSeek-V3",
        num_layers=61,
        hidden_size=7168,
        num_heads=128,
        feed_forward_size=18432,
        vocabulary_size=129280,
        sequence_length=4096,
        small=_norms(7168, other=1536 + 512),
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

#: The workloads that sizes may be given for, and the model that each is without any.
WORKLOADS: Final[Mapping[str, Model]] = {
    "gpt": GPT3_1_3B,
    "bert": BERT_1_3B,
    "t5": T5_3B,
    "wide-resnet": WIDE_RESNET_101_8,
}


@dataclass(frozen=True)
class _Size:
    """A size of a model that may be given.

    Attributes:
        field: the model's.
        min_value: the smallest value.
        max_value: the largest value.
        of_presets: whether it may be given for a model by name, too.
    """

    field: str
    min_value: int
    max_value: int
    of_presets: bool = False


_SIZES: Final[Mapping[str, _Size]] = {
    "layers": _Size("num_layers", 1, 1000, of_presets=True),
    "hidden_size": _Size("hidden_size", 1, 10**7),
    "heads": _Size("num_heads", 1, 10**7),
    "vocabulary_size": _Size("vocabulary_size", 0, 10**7, of_presets=True),
    "sequence_length": _Size("sequence_length", 1, 10**7, of_presets=True),
    "width_factor": _Size("width_factor", 1, 10**7),
    "image_size": _Size("image_size", 32, 10**7),
}

#: Bottleneck blocks of the four groups, by the number of layers that ResNets are named after.
_RESNET_BLOCKS: Final = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
_DEFAULT_RESNET_LAYERS: Final = 101


def _option(size: str) -> str:
    """The command line's option for a size."""
    return "--" + size.replace("_", "-")


def model_of(workload: str, **sizes: int) -> Model:
    """The model of a workload with some of its sizes changed.

    Args:
        workload: one of WORKLOADS.
        sizes: layers (of a T5 in encoder and decoder each; of a ResNet 50, 101 or 152),
            hidden_size, heads (without it, a new width keeps the width of a head),
            vocabulary_size (0 leaves out embedding and head), sequence_length (of a T5 on either
            side), width_factor and image_size (pixels on a side).

    Raises:
        InputError: there is no such workload, or it has no such size.
    """
    model = WORKLOADS.get(workload)
    if model is None:
        raise InputError(unknown("workload", workload, WORKLOADS))
    if not sizes:
        return model
    changes = _checked_changes(workload, model, sizes)
    if isinstance(model, ConvolutionalModel):
        return _resized_resnet(model, changes)
    assert isinstance(model, TransformerModel)  # the workloads are no others
    return _resized_transformer(workload, model, changes)


def _checked_changes(workload: str, model: Model, sizes: Mapping[str, int]) -> dict[str, int]:
    """The new values of a model's fields.

    Raises:
        InputError: the model has no such size, or it is out of range.
    """
    # Of a ResNet, the number of layers says which blocks it has.
    model_fields = {"num_layers", *(field.name for field in fields(model))}
    changes = {}
    for name, value in sizes.items():
        size = _SIZES[name]
        if size.field not in model_fields:
            raise InputError(f"{_option(name)} does not go with workload {workload}")
        if not size.min_value <= value <= size.max_value:
            raise InputError(
                f"{_option(name)} must be {size.min_value} to {size.max_value}, not {shown(value)}"
            )
        changes[size.field] = value
    return changes


def _resized_resnet(model: ConvolutionalModel, changes: Mapping[str, int]) -> ConvolutionalModel:
    layers = changes.get("num_layers", _DEFAULT_RESNET_LAYERS)
    if layers not in _RESNET_BLOCKS:
        raise InputError(f"--layers of workload wide-resnet must be 50, 101 or 152, not {layers}")
    width_factor = changes.get("width_factor", model.width_factor)
    return replace(
        model,
        name=f"Wide-ResNet-{layers}-{width_factor}",
        blocks=_RESNET_BLOCKS[layers],
        width_factor=width_factor,
        image_size=changes.get("image_size", model.image_size),
    )


def _resized_transformer(
    workload: str, model: TransformerModel, changes: Mapping[str, int]
) -> TransformerModel:
    """The model with other sizes; what follows from them, and its name, follow."""
    layers = changes.get("num_layers", model.num_layers)
    width = changes.get("hidden_size", model.hidden_size)
    num_heads = changes.get("num_heads", model.num_heads)
    if not model.head_size:
        same_head_width = max(1, width * model.num_heads // model.hidden_size)
        num_heads = changes.get("num_heads", same_head_width)
        if width % num_heads:
            raise InputError(
                f"--hidden-size {width} does not divide into {num_heads} heads; set --heads"
            )
    feed_forward_size = model.feed_forward_size
    if feed_forward_size:
        feed_forward_size = feed_forward_size * width // model.hidden_size
    both_sides = "2 x " if model.encoder_layers else ""
    return replace(
        model,
        name=f"{workload.upper()} of {both_sides}{layers} layers x {width}",
        num_layers=layers,
        encoder_layers=layers if model.encoder_layers else 0,
        hidden_size=width,
        num_heads=num_heads,
        feed_forward_size=feed_forward_size,
        vocabulary_size=changes.get("vocabulary_size", model.vocabulary_size),
        sequence_length=changes.get("sequence_length", model.sequence_length),
    )


def named_model(
    name: str, as_type: str | None = None, /, **sizes: int
) -> TransformerModel | LanguageModel:
    """A preset, or the model that a Hugging Face config.json describes.

    Args:
        name: in PRESETS, also as the hub writes it, or a path.
        as_type: read the file as if it were of this type, such as "llama".
        sizes: layers, sequence_length and vocabulary_size may be others.

    Raises:
        InputError: there is neither, the file is wrong, or another size is given.
    """
    model: TransformerModel | LanguageModel | None = _preset_or_none(name)
    if model is None:
        if not exists(name):
            raise InputError(
                f"no such config.json, and no model of that name{meant(name, PRESETS)}", path=name
            )
        model = read_model(Path(name), as_type=as_type)
    elif as_type is not None:
        raise InputError(f"--as goes with a config.json; {name} is a model that envplan knows")
    for size in sizes:
        if not _SIZES[size].of_presets:
            raise InputError(f"{_option(size)} does not go with --model, which says it")
    if isinstance(model, LanguageModel):
        return model.with_sizes(
            num_layers=sizes.get("layers", model.num_layers),
            vocabulary_size=sizes.get("vocabulary_size", model.vocabulary_size),
            sequence_length=sizes.get("sequence_length", model.sequence_length),
        )
    return replace(
        model,
        num_layers=sizes.get("layers", model.num_layers),
        vocabulary_size=sizes.get("vocabulary_size", model.vocabulary_size),
        sequence_length=sizes.get("sequence_length", model.sequence_length),
    )


def _preset_or_none(name: str) -> TransformerModel | None:
    """The preset of a name, also as the hub writes it; what lies at a path comes before those."""
    if name in PRESETS or exists(name):
        return PRESETS.get(name)
    return PRESETS.get(name.lower().rpartition("/")[2])  # Qwen/Qwen3-32B
