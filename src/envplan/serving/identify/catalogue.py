"""Language models and GPUs that benchmarks name, with the figures of their data sheets."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Annotated, Final, TypeVar

from pydantic import Field

from envplan._io.documents import Model, parse_document
from envplan._io.markup import read_toml
from envplan.devices.modelled import ModelledGpu, gpu
from envplan.errors import InputError, meant

#: Bytes of a weight in memory, by precision; 4-bit formats have a scale for each 16 or 32 weights.
WEIGHT_BYTES: Final = {"bf16": 2.0, "fp8": 1.0, "int4": 0.5625, "fp4": 0.5625}

Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(gt=0)]


class LanguageModel(Model):
    """What of a language model decides how long its requests take.

    Attributes:
        key: short name.
        names: what benchmarks call it.
        parameters: all of them.
        active_parameters: those that a token uses; None: all.
        layers: transformer layers.
        hidden: width of a token between layers.
        attention_layers: layers that keep the whole context.
        kv_values: numbers in the KV cache of a token in one of these layers.
        attention_width: attention heads times their size.
        experts: of a layer; 0: none.
        top_k: experts that a token uses.
        expert_inner: inner size of an expert.
        expert_layers: layers with experts.
        max_context_tokens: the longest request, input and output.
        latent_attention: whether each GPU of a tensor-parallel group keeps the whole KV cache.
    """

    key: str = ""
    names: list[str]
    parameters: Positive
    active_parameters: Positive | None = None
    layers: Count
    hidden: Count
    attention_layers: Count
    kv_values: Count
    attention_width: Count
    experts: int = 0
    top_k: int = 0
    expert_inner: int = 0
    expert_layers: int = 0
    max_context_tokens: Count
    latent_attention: bool = False

    @property
    def used_parameters(self) -> float:
        """Parameters that one token uses."""
        return self.active_parameters or self.parameters

    @property
    def expert_parameters(self) -> float:
        """Parameters of all experts: three matrices each."""
        return float(3 * self.experts * self.hidden * self.expert_inner * self.expert_layers)

    @property
    def used_expert_parameters(self) -> float:
        """Parameters of experts that one token uses."""
        if not self.experts:
            return 0.0
        return self.expert_parameters * self.top_k / self.experts

    def kv_bytes_per_token(self, value_bytes: float) -> float:
        """Bytes of KV cache of a token of context, once, where each number takes so many."""
        return self.kv_values * self.attention_layers * value_bytes

    def weight_bytes(self, precision: str) -> float:
        """Bytes of all weights; 4-bit formats keep what is not in experts in 8 bit."""
        return self.expert_bytes(precision) + self.shared_bytes(precision)

    def expert_bytes(self, precision: str) -> float:
        """Bytes of the experts' weights."""
        return self.expert_parameters * WEIGHT_BYTES[precision]

    def shared_bytes(self, precision: str) -> float:
        """Bytes of the weights that every token uses."""
        weight_bytes = WEIGHT_BYTES[precision]
        if self.experts:
            weight_bytes = max(1.0, weight_bytes)
        return (self.parameters - self.expert_parameters) * weight_bytes


class ServingGpu(Model):
    """A GPU's data sheet, as far as serving needs it.

    Attributes:
        key: short name.
        names: what benchmarks call it.
        title: name that NVML gives it.
        bandwidth: of its memory, bytes/s.
        bf16_flops: dense FLOP/s in 16 bit.
        fp8_flops: in 8 bit.
        fp4_flops: in 4 bit.
        memory: bytes.
        has_eight_bit_cache: all engines keep the KV cache of models in 8 or 4 bit in 8 bit.
        link: bandwidth to other GPUs in one direction, bytes/s.
        power_limit_w: its power limit.
        clocks_of: the modelled GPU with its clocks and voltages.
    """

    key: str = ""
    names: list[str]
    title: str
    bandwidth: Positive
    bf16_flops: Positive
    fp8_flops: Positive
    fp4_flops: Positive
    memory: Positive
    has_eight_bit_cache: bool
    link: Positive
    power_limit_w: Positive
    clocks_of: str

    def flops(self, precision: str) -> float:
        """Dense FLOP/s of products of weights in a precision; 4-bit integers are unpacked to 8."""
        by_precision = {"bf16": self.bf16_flops, "fp4": self.fp4_flops}
        return by_precision.get(precision, self.fp8_flops)

    @property
    def device(self) -> ModelledGpu:
        """Its clocks and voltages."""
        return gpu(self.clocks_of)


class _Catalogue(Model):
    models: dict[str, LanguageModel]
    gpus: dict[str, ServingGpu]


@cache
def catalogue() -> _Catalogue:
    """The tables of catalogue.toml."""
    path = Path(__file__).with_name("catalogue.toml")
    found = parse_document(read_toml(path), _Catalogue, kind="catalogue of models", path=path)
    keyed_models = {
        key: model.model_copy(update={"key": key}) for key, model in found.models.items()
    }
    keyed_gpus = {key: gpu.model_copy(update={"key": key}) for key, gpu in found.gpus.items()}
    return _Catalogue.model_construct(models=keyed_models, gpus=keyed_gpus)


Entry = TypeVar("Entry", bound=LanguageModel | ServingGpu)


def language_model(name: str) -> LanguageModel:
    """The model of a name such as meta-llama/Llama-3.1-70B, or of its short name.

    Raises:
        InputError: there is none; names the nearest.
    """
    return _named(name, catalogue().models, "language model")


def serving_gpu(name: str) -> ServingGpu:
    """The GPU of a name such as h100_sxm or b200.

    Raises:
        InputError: there is none; names the nearest.
    """
    return _named(name, catalogue().gpus, "GPU for serving")


def _named(name: str, entries: dict[str, Entry], kind: str) -> Entry:
    wanted = name.lower()
    last_part = wanted.rpartition("/")[2]
    for key, entry in entries.items():
        known_names = {name.lower() for name in entry.names}
        known_last_parts = {name.rpartition("/")[2] for name in known_names}
        if {wanted, last_part} & {key, *known_names, *known_last_parts}:
            return entry
    raise InputError(f"there is no {kind} {name!r}{meant(last_part, list(entries))}")
