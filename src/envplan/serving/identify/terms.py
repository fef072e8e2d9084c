"""What times to the first token and between tokens are made of, by data sheets.

Each term is a time that follows from the model, the GPUs and the load, if everything ran as data
sheets say; software that does nothing but start kernels has a usual time. `fit` finds how many
times as long each of them takes.

A benchmark keeps so many requests under way: each that ends makes room for the next one. So while
a request decodes, each of the others ends and begins once, and a token waits for concurrency /
output prompts, where prefill and decode share GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from envplan.serving.classes import FloatArray
from envplan.serving.identify.benchmark import Benchmark

#: Terms of a time between tokens.
STEP_TERMS: Final = (
    "step",  # a decode step's software
    "layers",  # kernels of a layer, however little they do
    "exchange",  # messages between the GPUs of a layer, however short
    "weights",  # reading the weights that the batch uses
    "context",  # reading the KV cache
    "requests",  # software for each request
    "arithmetic",  # products of weights with the batch's tokens
    "traffic",  # bytes between the GPUs
    "prompts",  # arithmetic of prompts that run meanwhile, outside of experts
    "expert_prompts",  # and in experts, whose products are smaller
    "prompt_software",  # and their software
)
#: Terms of a time to the first token.
FIRST_TOKEN_TERMS: Final = (
    "software",  # of a request: text to tokens, scheduling, the answer's way back
    "prompt",  # arithmetic of the prompt outside of experts
    "expert_prompt",  # and in experts
    "queue",  # prompts that began before
    "requests",  # software for each request under way
    "weights",  # reading all weights once
    "traffic",  # bytes between the GPUs
    "transfer",  # the KV cache's way to the decode worker, where that is another one
    "memory",  # waiting for memory that other requests have
    "step",  # the decode step under way
    "chunks",  # decode steps between the pieces of a prompt
)

_STEP_S: Final = 1e-3
_LAYER_S: Final = 20e-6
_REQUEST_S: Final = 20e-6
_PROMPT_S: Final = 2e-3
_FIRST_TOKEN_S: Final = 20e-3
_UNDER_WAY_S: Final = 1e-3
#: Share of the other requests whose prompts are still to be run when one comes. All come at once
#: when a benchmark begins, and it runs about ten times as many requests as are under way.
_QUEUED_SHARE: Final = 0.1
#: Products of experts take about so many times as long as others of as many FLOP, in the queue.
_EXPERT_SLOWNESS: Final = 4.0
_CHUNK_TOKENS: Final = 2048
_TRANSFER_BANDWIDTH: Final = 50e9  # bytes/s between nodes
#: Bytes of a token that a layer sends: twice, 16 bit.
_EXCHANGED_BYTES: Final = 4


def step_terms(rows: Sequence[Benchmark]) -> FloatArray:
    """Terms of the time between tokens of each row, s, (rows, terms)."""
    return np.array([_step_terms(row) for row in rows])


def first_token_terms(rows: Sequence[Benchmark], token_interval_s: FloatArray) -> FloatArray:
    """Terms of the time to the first token of each row, s, (rows, terms).

    Args:
        rows: the benchmarks.
        token_interval_s: predicted time between tokens of each.
    """
    pairs = zip(rows, token_interval_s, strict=True)
    return np.array([_first_token_terms(row, float(interval_s)) for row, interval_s in pairs])


def read_weight_bytes(row: Benchmark, batch_size: float) -> float:
    """Bytes of weights that a step of so many requests reads.

    Each token chooses top_k of a layer's experts; experts that no token chose are not read.
    """
    model, precision = row.model, row.precision
    shared = model.shared_bytes(precision)
    if not model.experts:
        return shared
    missed = float((1 - model.top_k / model.experts) ** batch_size)
    return shared + model.expert_bytes(precision) * (1 - missed)


class PromptArithmetic(NamedTuple):
    """Times of a prompt's arithmetic at the GPUs' peak, s.

    Attributes:
        dense_s: products of weights that all tokens use, and attention.
        expert_s: products of experts.
    """

    dense_s: float
    expert_s: float

    @property
    def queued_s(self) -> float:
        """What those behind it wait for, about."""
        return self.dense_s + _EXPERT_SLOWNESS * self.expert_s


def prompt_arithmetic(row: Benchmark, tokens: float, num_gpus: float) -> PromptArithmetic:
    """Arithmetic of a prompt of so many tokens on so many GPUs."""
    model = row.model
    peak_flops = num_gpus * row.gpu.flops(row.precision)
    # Scores and weighted values: 2 FLOP each for every earlier token, half of all on average.
    attention_flops = 2 * model.attention_width * model.attention_layers * tokens
    dense_flops = 2 * (model.used_parameters - model.used_expert_parameters) + attention_flops
    expert_flops = 2 * model.used_expert_parameters
    return PromptArithmetic(
        dense_s=tokens * dense_flops / peak_flops, expert_s=tokens * expert_flops / peak_flops
    )


def context_token_s(row: Benchmark) -> float:
    """Time in which a decode step reads a token of context, s."""
    cache_bytes = row.kv_copies * row.kv_bytes_per_token
    return cache_bytes / (row.num_gpus * row.gpu.bandwidth)


def _step_terms(row: Benchmark) -> list[float]:
    model, gpu = row.model, row.gpu
    batch_size, num_gpus = row.batch_size, row.num_gpus
    batch_flops = 2 * model.used_parameters * batch_size
    exchanged_bytes = batch_size * model.layers * model.hidden * _EXCHANGED_BYTES
    prompts_per_step = 0.0
    if not row.disaggregated:
        prompts_per_step = row.instance_concurrency / row.output_tokens
    prompt = prompt_arithmetic(row, row.input_tokens, num_gpus)
    return [
        _STEP_S,
        model.layers * _LAYER_S,
        model.layers * _LAYER_S * float(np.log2(num_gpus)),
        read_weight_bytes(row, batch_size) / (num_gpus * gpu.bandwidth),
        batch_size * row.mean_context_tokens * context_token_s(row),
        batch_size * _REQUEST_S,
        batch_flops / (num_gpus * gpu.flops(row.precision)),
        exchanged_bytes / gpu.link if num_gpus > 1 else 0.0,
        prompts_per_step * prompt.dense_s,
        prompts_per_step * prompt.expert_s,
        prompts_per_step * _PROMPT_S,
    ]


def _first_token_terms(row: Benchmark, token_interval_s: float) -> list[float]:
    model, gpu, tokens = row.model, row.gpu, row.input_tokens
    prompt = prompt_arithmetic(row, tokens, row.prefill_gpus)
    exchanged_bytes = tokens * model.layers * model.hidden * _EXCHANGED_BYTES
    cache_bytes = tokens * row.kv_bytes_per_token
    # A request waits for a place as long as others keep theirs.
    too_many = max(0.0, row.instance_concurrency / row.max_batch - 1)
    # Alike instances have software of their own; workers of one deployment share what is in front.
    under_way = row.concurrency if row.disaggregated else row.instance_concurrency
    return [
        _FIRST_TOKEN_S,
        prompt.dense_s,
        prompt.expert_s,
        _QUEUED_SHARE * row.concurrency / row.prefill_workers * prompt.queued_s,
        under_way * _UNDER_WAY_S,
        model.weight_bytes(row.precision) / (row.prefill_gpus * gpu.bandwidth),
        exchanged_bytes / gpu.link if row.prefill_gpus > 1 else 0.0,
        cache_bytes / _TRANSFER_BANDWIDTH if row.disaggregated else 0.0,
        too_many * row.output_tokens * token_interval_s,
        token_interval_s,
        tokens / _CHUNK_TOKENS * token_interval_s,
    ]
