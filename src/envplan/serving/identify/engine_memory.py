"""How engines fill the memory of GPUs: what decides how many requests run at once."""

from __future__ import annotations

from typing import Final, NamedTuple

from envplan.serving.identify.catalogue import ServingGpu


class EngineMemory(NamedTuple):
    """An engine's habits, as its usual settings have them.

    Attributes:
        used_share: share of a GPU's memory that weights and KV cache may fill together.
        reserved_output: share of a request's output that has to fit, beside its input, on average
            while requests come and go.
        is_eight_bit: the KV cache of models in 8 or 4 bit is kept in 8 bit, on every GPU.
    """

    used_share: float
    reserved_output: float
    is_eight_bit: bool

    def cache_value_bytes(self, precision: str, gpu: ServingGpu) -> float:
        """Bytes of a number in the KV cache of a model of some precision."""
        if precision == "bf16":
            return 2.0
        return 1.0 if self.is_eight_bit or gpu.has_eight_bit_cache else 2.0


#: Read off how long requests waited in benchmarks (docs/serving-models.md), not stated by engines.
#: vLLM takes a request in as soon as its input fits, and others go when outputs need the room;
#: SGLang reserves a part of the output, and TensorRT-LLM all of it.
_ENGINES: Final = {
    "vllm": EngineMemory(used_share=0.89, reserved_output=0.5, is_eight_bit=False),
    "sglang": EngineMemory(used_share=0.85, reserved_output=0.67, is_eight_bit=False),
    "trtllm": EngineMemory(used_share=0.95, reserved_output=1.0, is_eight_bit=True),
}


def engine_memory(engine: str) -> EngineMemory:
    """The habits of an engine; of one that nothing is known about, those of vLLM."""
    return _ENGINES.get(engine, _ENGINES["vllm"])
