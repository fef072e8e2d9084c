"""Models with their sizes as published: those of the built-in profiles, and presets."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Final

from envplan.profiling.workloads import (
    ConvolutionalModel,
    Experts,
    LatentAttention,
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
BERT_1_3B: Final = TransformerModel("BERT 1.3B", 24, 2048, 32, 30592, 512)

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
BERT_336M: Final = TransformerModel("BERT 336M", 24, 1024, 16, 0, 512)
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
            count=256, per_token=8, feed_forward_size=2048, shared_size=2048, dense_layers=3
        ),
        latent=LatentAttention(
            query_rank=1536, rank=512, key_size=128, rotary_size=64, value_size=128
        ),
    ),
    "gpt3-175b": GPT3_175B,
}
