"""The models that the built-in profiles train, with their sizes as published."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from envplan.profiling.workloads import ConvolutionalModel, EncoderDecoderModel, TransformerModel

__all__ = [
    "BERT_1_3B",
    "BERT_336M",
    "BLOOM_3B",
    "GPT3_1_3B",
    "GPT3_2_7B",
    "GPT3_175B",
    "GPT_125M",
    "MEGATRON_1_3B",
    "MEGATRON_125M",
    "RESNET_152",
    "T5_3B",
    "WIDE_RESNET_101_8",
]

#: Brown et al., "Language Models are Few-Shot Learners" (2020), table 2.1, with the 16 heads that
#: its 2048 units make at 128 each, and the vocabulary padded to a multiple of 128.
GPT3_1_3B: Final = TransformerModel(
    name="GPT-3 1.3B",
    num_layers=24,
    hidden_size=2048,
    num_heads=16,
    vocabulary_size=50304,
    sequence_length=2048,
)

#: The same table.
GPT3_2_7B: Final = TransformerModel(
    name="GPT-3 2.7B",
    num_layers=32,
    hidden_size=2560,
    num_heads=32,
    vocabulary_size=50304,
    sequence_length=2048,
)

#: The same table, and a vocabulary that eight GPUs can share in multiples of 128. Whoever trains
#: it on an H100 fuses attention.
GPT3_175B: Final = TransformerModel(
    name="GPT-3 175B",
    num_layers=96,
    hidden_size=12288,
    num_heads=96,
    vocabulary_size=51200,
    sequence_length=2048,
    fused_attention=True,
)

#: BigScience, the bloom-3b model card.
BLOOM_3B: Final = TransformerModel(
    name="Bloom 3B",
    num_layers=30,
    hidden_size=2560,
    num_heads=32,
    vocabulary_size=250880,
    sequence_length=2048,
)

#: The size that EnvPipe and Perseus call 1.3B: BERT-Large's depth at twice its width.
BERT_1_3B: Final = TransformerModel(
    name="BERT 1.3B",
    num_layers=24,
    hidden_size=2048,
    num_heads=32,
    vocabulary_size=30592,
    sequence_length=512,
)

#: Raffel et al., "Exploring the Limits of Transfer Learning" (2020), the 3B variant; 512 tokens
#: on either side are our assumption.
T5_3B: Final = EncoderDecoderModel(
    name="T5 3B",
    num_encoder_layers=24,
    num_decoder_layers=24,
    hidden_size=1024,
    num_heads=32,
    head_size=128,
    feed_forward_size=16384,
    vocabulary_size=32128,
    source_length=512,
    target_length=512,
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
    name="BERT 336M",
    num_layers=24,
    hidden_size=1024,
    num_heads=16,
    vocabulary_size=0,
    sequence_length=512,
)

#: EnvPipe's benchmark: the layers of GPT-3 Small alone.
GPT_125M: Final = TransformerModel(
    name="GPT 125M",
    num_layers=12,
    hidden_size=768,
    num_heads=12,
    vocabulary_size=0,
    sequence_length=2048,
)

#: GPT-3 Small in Megatron-DeepSpeed, with embedding and head.
MEGATRON_125M: Final = TransformerModel(
    name="Megatron 125M",
    num_layers=12,
    hidden_size=768,
    num_heads=12,
    vocabulary_size=50304,
    sequence_length=2048,
)

#: GPT-3 1.3B in Megatron-DeepSpeed.
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
