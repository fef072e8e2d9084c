"""A row of a benchmark: a model on some GPUs at some load, and how fast it answered."""

from __future__ import annotations

from dataclasses import dataclass, replace

from envplan.serving.identify.catalogue import (
    LanguageModel,
    ServingGpu,
    kv_capacity_tokens,
)

#: Requests that are in memory have their inputs and, on average, a bit more than half their output.
_CONTEXT_SHARE = 0.75


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
        num_workers: decode workers.
        prefill_gpus: GPUs of a prefill worker; where prefill has no GPUs of its own, num_gpus.
        prefill_workers: how many.
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
    first_token_s: float | None = None
    token_interval_s: float | None = None

    @property
    def pair(self) -> tuple[str, str]:
        """Short names of model and GPU."""
        return self.model.key, self.gpu.key

    @property
    def software(self) -> tuple[str, ...]:
        """Rows alike in this ran the same software on the same kind of GPU."""
        mode = "disagg" if self.disaggregated else "agg"
        return (*self.pair, self.engine, self.version, self.precision, mode)

    @property
    def parallelism(self) -> tuple[object, ...]:
        """Rows alike in this, and in software, differ in the load only."""
        gpus = (self.num_gpus, self.attention_groups, self.prefill_gpus)
        return (*self.software, *gpus, self.layout)

    @property
    def max_batch(self) -> float:
        """Requests that the memory of a decode worker holds at once.

        Where the weights seem to leave no room for a single one, the row was measured all the same:
        then it had room for all that it was given.
        """
        capacity_tokens = kv_capacity_tokens(
            self.model, self.gpu, self.precision, self.num_gpus, self.attention_groups
        )
        context_tokens = self.input_tokens + _CONTEXT_SHARE * self.output_tokens
        if capacity_tokens < context_tokens:
            return self.concurrency / self.num_workers
        return capacity_tokens / context_tokens

    @property
    def batch_size(self) -> float:
        """Requests that a decode worker has at once."""
        return min(self.concurrency / self.num_workers, self.max_batch)

    @property
    def mean_context_tokens(self) -> float:
        """Context of a request while it decodes, on average."""
        return self.input_tokens + self.output_tokens / 2

    def unmeasured(self) -> Benchmark:
        """The same load, without what was measured."""
        return replace(self, first_token_s=None, token_interval_s=None)
