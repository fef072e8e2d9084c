"""Pipeline stages that run for real, in torch: those of a transformer, or the user's own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any, Final

try:
    import torch
    from torch import nn
    from torch.nn import functional
except ImportError as error:
    from envplan.errors import InputError

    raise InputError(
        "torch is not installed, and stages are measured through it; run: "
        "pip install 'envplan[torch]'"
    ) from error

from envplan.devices.modelled import gpu
from envplan.errors import InputError
from envplan.profiling.workloads import Model, TransformerModel, Work, stage_works

__all__ = ["TorchWorkload", "transformer"]

#: A stage's module and its sample inputs, made when its turn comes.
Stage = Callable[[], tuple[nn.Module, tuple[Any, ...]]]

# By whose times layers are shared out; any GPU with tensor cores splits alike.
_BALANCE: Final = "a100-sxm4-80gb"


class TorchWorkload:
    """Stages made of torch modules, one at a time on the device.

    A forward keeps its graph until the next forward, so that its backward can be run any number
    of times; gradients add up as they do over the microbatches of an iteration. Inputs that are
    not integers get gradients too, as what the neighbour sent would.

    Args:
        stages: makes each stage's module and inputs, in order.
        description: what it is, for people.
        device: such as "cuda:0" or "cpu".

    Raises:
        InputError: this torch cannot use that device.
    """

    def __init__(self, stages: Sequence[Stage], *, description: str, device: str) -> None:
        self.description = description
        self.num_stages = len(stages)
        self._stages = stages
        self._device = torch.device(device)
        self._loaded: int | None = None
        self._module: nn.Module | None = None
        self._inputs: tuple[Any, ...] = ()
        self._outputs: list[torch.Tensor] = []
        self._gradients: list[torch.Tensor] = []
        if self._device.type == "cuda" and not torch.cuda.is_available():
            raise InputError(
                "this torch cannot use the GPU: it is a build for the CPU, or the driver is too "
                "old for it; install a build of torch for your driver's CUDA"
            )

    def forward(self, stage: int) -> None:
        """Queue the stage's forward of a microbatch.

        Raises:
            InputError: the stage fails, or does not fit in the GPU's memory.
        """
        with self._explained(stage, "forward"):
            if self._loaded != stage:
                self._load(stage)
            assert self._module is not None
            self._outputs = []  # frees the graph of the last forward first
            self._outputs = _differentiable(self._module(*self._inputs))

    def backward(self, stage: int) -> None:
        """Queue the stage's backward for the last forward.

        Raises:
            InputError: the stage fails, or does not fit in the GPU's memory.
        """
        with self._explained(stage, "backward"):
            if len(self._gradients) != len(self._outputs):
                self._gradients = [torch.ones_like(output) for output in self._outputs]
            torch.autograd.backward(self._outputs, self._gradients, retain_graph=True)

    def wait(self, seconds: float) -> None:
        """Keep the GPU spinning for about so long, as one that waits for a neighbour does."""
        if self._device.type == "cuda":
            with torch.cuda.device(self._device):
                torch.cuda._sleep(round(seconds * 1e9))
        else:
            time.sleep(seconds)

    def synchronize(self) -> None:
        """Return once the GPU has done everything asked for."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _load(self, stage: int) -> None:
        self._module, self._inputs = None, ()
        self._outputs, self._gradients = [], []
        self._loaded = None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        module, inputs = self._stages[stage]()
        self._module = module.to(self._device).train()
        self._inputs = tuple(self._input(value) for value in inputs)
        self._loaded = stage

    def _input(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        moved = value.detach().to(self._device)
        return moved.requires_grad_(moved.is_floating_point())

    @contextmanager
    def _explained(self, stage: int, what: str) -> Iterator[None]:
        try:
            yield
        except torch.cuda.OutOfMemoryError:
            raise InputError(
                f"stage {stage} does not fit in the GPU's memory; choose more stages or a smaller "
                "microbatch"
            ) from None
        except InputError:
            raise
        except Exception as error:  # whatever the user's module raises
            raise InputError(
                f"the {what} of stage {stage} fails: {type(error).__name__}: {error}"
            ) from error


def _differentiable(outputs: Any) -> list[torch.Tensor]:
    """The tensors among a module's outputs that a backward can start from."""
    listed = outputs if isinstance(outputs, tuple | list) else [outputs]
    found = [one for one in listed if isinstance(one, torch.Tensor) and one.requires_grad]
    if not found:
        raise InputError("a stage must return a tensor that depends on its parameters")
    return found


def transformer(
    workload: str,
    model: Model,
    *,
    num_stages: int,
    microbatch_size: int,
    dtype: str,
    device: str,
) -> TorchWorkload:
    """The stages of a GPT or BERT, split over layers for least imbalance.

    Args:
        workload: "gpt" attends to the past only, "bert" to all tokens.
        model: its sizes.
        num_stages: pipeline stages.
        microbatch_size: samples per microbatch.
        dtype: "bfloat16", "float16" or "float32", of weights and activations.
        device: such as "cuda:0".

    Raises:
        InputError: the workload cannot be measured, or not be split so.
    """
    if workload not in ("gpt", "bert") or not isinstance(model, TransformerModel):
        raise InputError(
            f"workload {workload} can be modelled (--backend modelled) but not yet measured; "
            "gpt and bert can, and your own stages with --entry"
        )
    modelled = gpu(_BALANCE)
    works = stage_works(
        model,
        num_stages=num_stages,
        microbatch_size=microbatch_size,
        cost=lambda work: _seconds(modelled.time_s, work, modelled.clocks_mhz[0]),
    )
    counts = [work.num_layers for work in works]
    stages = [
        partial(
            _transformer_stage,
            model,
            layers=count,
            first=begin == 0,
            last=begin + count == model.num_layers,
            microbatch_size=microbatch_size,
            causal=workload == "gpt",
            dtype=getattr(torch, dtype),
            device=device,
        )
        for begin, count in zip(accumulate(counts, initial=0), counts, strict=False)
    ]
    description = (
        f"{model.name} training, {num_stages} stages of {'-'.join(map(str, counts))} layers, "
        f"{microbatch_size} x {model.sequence_length} tokens, {dtype}, torch {torch.__version__}"
    )
    return TorchWorkload(stages, description=description, device=device)


def _seconds(time_s: Callable[[float, float, float], float], work: Work, clock: float) -> float:
    return time_s(work.flops, work.traffic, clock)


def _transformer_stage(
    model: TransformerModel,
    *,
    layers: int,
    first: bool,
    last: bool,
    microbatch_size: int,
    causal: bool,
    dtype: torch.dtype,
    device: str,
) -> tuple[nn.Module, tuple[Any, ...]]:
    """A stage and a random microbatch for it: tokens for the first, hidden states for others."""
    words, length = model.vocabulary_size, model.sequence_length
    with torch.device(device):
        torch.manual_seed(0)
        parts: list[nn.Module] = [_Embedding(model)] if first and words else []
        parts += [_Layer(model.hidden_size, model.num_heads, causal) for _ in range(layers)]
        if last and words:
            parts.append(_Head(model))
        inputs = (
            torch.randint(words, (microbatch_size, length))
            if first and words
            else torch.randn(microbatch_size, length, model.hidden_size, dtype=dtype)
        )
        return nn.Sequential(*parts).to(dtype), (inputs,)


class _Embedding(nn.Module):
    def __init__(self, model: TransformerModel) -> None:
        super().__init__()
        self.words = nn.Embedding(model.vocabulary_size, model.hidden_size)
        self.positions = nn.Embedding(model.sequence_length, model.hidden_size)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.words(tokens) + self.positions.weight
        return hidden


class _Layer(nn.Module):
    """A transformer layer with its norms in front, as in GPT-2 and later."""

    def __init__(self, hidden_size: int, num_heads: int, causal: bool) -> None:
        super().__init__()
        self.num_heads, self.causal = num_heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(hidden_size), nn.LayerNorm(hidden_size)
        self.into_heads = nn.Linear(hidden_size, 3 * hidden_size)
        self.out_of_heads = nn.Linear(hidden_size, hidden_size)
        self.widen = nn.Linear(hidden_size, 4 * hidden_size)
        self.narrow = nn.Linear(4 * hidden_size, hidden_size)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, width = hidden.shape
        split = self.into_heads(self.norm1(hidden)).view(batch, length, 3, self.num_heads, -1)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        hidden = hidden + self.out_of_heads(mixed.transpose(1, 2).reshape(batch, length, width))
        return hidden + self.narrow(functional.gelu(self.widen(self.norm2(hidden))))


class _Head(nn.Module):
    """Final norm, product with the vocabulary and loss, against random words."""

    def __init__(self, model: TransformerModel) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(model.hidden_size)
        self.words = nn.Linear(model.hidden_size, model.vocabulary_size, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.words(self.norm(hidden)).flatten(0, 1)
        targets = torch.arange(len(logits), device=logits.device) % logits.shape[1]
        return functional.cross_entropy(logits.float(), targets)
