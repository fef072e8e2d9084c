"""A row of a benchmark: a model on some GPUs at some load, and how fast it answered."""

from __future__ import annotations

from dataclasses import dataclass, replace

from envplan.serving.identify.catalogue import LanguageModel, ServingGpu
from envplan.serving.identify.engine_memory import engine_memory


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """One load of a benchmark in which so many requests are always under way.

    Attributes:
        model: what is served.
        gpu: on what.
        engine: such as "vllm".
        version: of the engine, or "".
        precision: of the weights: "bf16", "fp8", "fp4" or "int4".
        disaggregated: prefill and decode have GPUs of their own.
        input_tokens: of a request.
        output_tokens: of a request.
        concurrency: requests under way at once, in the whole deployment.
        num_gpus: GPUs of an instance, or of a decode worker.
        attention_groups: data-parallel groups of its attention.
        layout: how experts are split, as text: instances that differ in it are not alike.
        num_workers: decode workers; where prefill has no GPUs of its own, alike instances.
        prefill_gpus: GPUs of a prefill worker; where prefill has no GPUs of its own, num_gpus.
        prefill_workers: how many.
        workers_known: it was stated how many workers there are; otherwise both numbers are 1.
        first_token_s: measured time to the first token; None: not measured.
        token_interval_s: measured time between further tokens; None: not measured.
    """

    model: LanguageModel
    gpu: ServingGpu
    engine: str
    version: str = ""
    precision: str
    disaggregated: bool = False
    input_tokens: float
    output_tokens: float
    concurrency: float
    num_gpus: float
    attention_groups: float = 1.0
    layout: str = ""
    num_workers: float = 1.0
    prefill_gpus: float
    prefill_workers: float = 1.0
    workers_known: bool = True
    first_token_s: float | None = None
    token_interval_s: float | None = None

    @property
    def pair(self) -> tuple[str, str]:
        """Short names of model and GPU."""
        return self.model.key, self.gpu.key

    @property
    def instance_concurrency(self) -> float:
        """Requests under way at once in one decode worker or instance."""
        return self.concurrency / self.num_workers

    @property
    def software(self) -> tuple[str, ...]:
        """Rows alike in this ran the same software on the same kind of GPU."""
        mode = "disagg" if self.disaggregated else "agg"
        workers = "known" if self.workers_known else "unknown"
        return (*self.pair, self.engine, self.version, self.precision, mode, workers)

    @property
    def parallelism(self) -> tuple[object, ...]:
        """Rows alike in this, and in software, differ in the load only."""
        gpus = (self.num_gpus, self.attention_groups, self.prefill_gpus)
        return (*self.software, *gpus, self.layout)

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of KV cache of a token of context, once."""
        value_bytes = engine_memory(self.engine).cache_value_bytes(self.precision, self.gpu)
        return self.model.kv_bytes_per_token(value_bytes)

    @property
    def kv_copies(self) -> float:
        """How many GPUs keep the same token of context."""
        return self.num_gpus / self.attention_groups if self.model.latent_attention else 1.0

    @property
    def kv_capacity_tokens(self) -> float:
        """Tokens of context that an instance's memory holds; 0 or less: not even the weights."""
        used_bytes = engine_memory(self.engine).used_share * self.gpu.memory * self.num_gpus
        cache_bytes = used_bytes - self.model.weight_bytes(self.precision)
        return cache_bytes / (self.kv_copies * self.kv_bytes_per_token)

    @property
    def max_batch(self) -> float:
        """Requests that the memory of a decode worker holds at once.

        Where the weights seem to leave no room for a single one, the row was measured all the same:
        then it had room for all that it was given. So it is said to have where nobody knows how
        many workers there were.
        """
        reserved_tokens = engine_memory(self.engine).reserved_output * self.output_tokens
        context_tokens = self.input_tokens + reserved_tokens
        if not self.workers_known or self.kv_capacity_tokens < context_tokens:
            return self.instance_concurrency
        return self.kv_capacity_tokens / context_tokens

    @property
    def batch_size(self) -> float:
        """Requests that a decode worker has at once."""
        return min(self.instance_concurrency, self.max_batch)

    @property
    def mean_context_tokens(self) -> float:
        """Context of a request while it decodes, on average."""
        return self.input_tokens + self.output_tokens / 2

    def unmeasured(self) -> Benchmark:
        """The same load, without what was measured."""
        return replace(self, first_token_s=None, token_interval_s=None)
