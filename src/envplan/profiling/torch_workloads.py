"""Pipeline stages that run for real, in torch: those of a known workload, or the user's own."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

try:
    import torch
    from torch import nn
except ImportError as error:
    from envplan.errors import InputError

    raise InputError(
        "torch is not installed, and stages are measured through it; run: "
        "pip install 'envplan[torch]'"
    ) from error

from envplan.devices.modelled import gpu
from envplan.errors import InputError
from envplan.profiling.timers import EventTimer, Timer
from envplan.profiling.torch_models import How, Stage, model_stages
from envplan.profiling.waiting import Peers
from envplan.profiling.workloads import ConvolutionalModel, Model, stage_works

__all__ = ["TorchWorkload", "torch_workload"]

# By whose times layers are shared out; any GPU with tensor cores splits alike.
_BALANCE: Final = "a100-sxm4-80gb"


class TorchWorkload:
    """Stages made of torch modules, one at a time on the device.

    A forward keeps its graph until the next forward, so that its backward can be run any number
    of times; gradients add up as they do over the microbatches of an iteration. Inputs that are
    not integers get gradients too, as what the neighbour sent would.

    A backward may also be run in two parts, as torch.distributed.pipelining splits it: gradients
    of the inputs, then those of the weights. Tokens and images get none; there the first part goes
    down to where gradients begin, such as the result of an embedding.

    Args:
        stages: makes each stage's module and inputs, in order.
        description: what it is, for people.
        device: such as "cuda:0" or "cpu".

    Attributes:
        timer: what times its work; None leaves it to the host's clock.
        peers: two processes of which one waits for the other on this GPU; without, `wait` spins.

    Raises:
        InputError: this torch cannot use that device.
    """

    def __init__(self, stages: Sequence[Stage], *, description: str, device: str) -> None:
        self.description = description
        self.num_stages = len(stages)
        self.timer: Timer | None = None
        self.peers: Peers | None = None
        self._stages = stages
        self._device = torch.device(device)
        self._loaded: int | None = None
        self._module = nn.Module()
        self._inputs: tuple[Any, ...] = ()
        self._outputs: list[torch.Tensor] = []
        self._gradients: list[torch.Tensor] = []
        self._sources: list[torch.Tensor] = []
        self._recorded: _Recorded | None = None
        if self._device.type == "cuda":
            if not torch.cuda.is_available():
                raise InputError(
                    "this torch cannot use the GPU: it is a build for the CPU, or the driver is "
                    "too old for it; install a build of torch for your driver's CUDA"
                )
            self.timer = EventTimer(partial(torch.cuda.Event, enable_timing=True))

    @property
    def waiting(self) -> str | None:
        """What `wait` has the GPU do, for people; None if it spins."""
        return None if self.peers is None else self.peers.description

    def forward(self, stage: int) -> None:
        """Queue the stage's forward of a microbatch."""
        if self._loaded != stage:
            self._load(stage)
        self._run_forward()

    def backward(self, stage: int) -> None:
        """Queue the stage's backward for the last forward."""
        torch.autograd.backward(self._outputs, self._ones(), retain_graph=True)

    def backward_input(self, stage: int) -> None:
        """Queue the part of the backward that makes gradients of the inputs.

        The first call after a forward runs that again, to see where gradients begin.

        Raises:
            InputError: gradients begin nowhere in it.
        """
        if not self._sources:
            self._find_sources()
        torch.autograd.grad(
            self._outputs, self._sources, self._ones(), retain_graph=True, allow_unused=True
        )

    def backward_weight(self, stage: int) -> None:
        """Queue the part of the backward that makes gradients of the weights.

        The first call after a forward also does all that comes before.

        Raises:
            InputError: as in backward_input, or this torch cannot split a backward.
        """
        if self._recorded is None:
            self._find_sources()
            weights = [weight for weight in self._module.parameters() if weight.requires_grad]
            self._recorded = _Recorded(self._outputs, self._ones(), self._sources, weights)
        self._recorded.run()

    def wait(self, seconds: float) -> None:
        """Have the GPU wait for about so long for a neighbour, or spin as one that waits does."""
        if self.peers is not None:
            self.peers.wait(seconds)
        elif self._device.type == "cuda":
            with torch.cuda.device(self._device):
                torch.cuda._sleep(round(seconds * 1e9))
        else:
            time.sleep(seconds)

    def synchronize(self) -> None:
        """Return once the GPU has done everything asked for."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _find_sources(self) -> None:
        """Run the forward, and note what backward_input makes gradients of."""
        sources = [one for one in self._inputs if _wants_gradient(one)]

        def note(module: nn.Module, inputs: Any, output: Any) -> None:
            if _wants_gradient(output) and not any(map(_wants_gradient, inputs)):
                sources.append(output)

        simple = [part for part in self._module.modules() if not any(part.children())]
        hooks = [part.register_forward_hook(note) for part in simple]
        try:
            self._run_forward()
        finally:
            for hook in hooks:
                hook.remove()
        if not sources:
            raise InputError("nothing in it passes gradients on, so its backward has one part only")
        self._sources = sources

    def _run_forward(self) -> None:
        self._forget()  # frees the graph of the last forward first
        self._outputs = _differentiable(self._module(*self._inputs))

    def _forget(self) -> None:
        self._outputs, self._sources, self._recorded = [], [], None

    def _ones(self) -> list[torch.Tensor]:
        """Gradients of the outputs, as the next stage would send them."""
        if len(self._gradients) != len(self._outputs):
            self._gradients = [torch.ones_like(output) for output in self._outputs]
        return self._gradients

    def _load(self, stage: int) -> None:
        self._forget()
        self._module, self._inputs, self._gradients = nn.Module(), (), []
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


class _Recorded:
    """A backward that has reached the inputs, from where the weights' part can be run again.

    Args:
        outputs: of the stage, with their graph.
        gradients: of the outputs.
        sources: what the inputs' part makes gradients of.
        weights: the stage's.

    Raises:
        InputError: this torch cannot split a backward.
    """

    def __init__(
        self,
        outputs: list[torch.Tensor],
        gradients: list[torch.Tensor],
        sources: list[torch.Tensor],
        weights: list[nn.Parameter],
    ) -> None:
        try:
            from torch.distributed.pipelining import _backward
        except ImportError as error:
            raise InputError(
                f"torch {torch.__version__} cannot split a backward; install torch 2.6 or later, "
                "or leave out --split-backward"
            ) from error
        for source in sources:
            source.retain_grad()
        # It cuts off the outputs it is given, so it gets some of its own.
        ends = [output.clone() for output in outputs]
        gradients_in, groups = _backward.stage_backward_input(
            ends, gradients, sources, iter(weights)
        )
        self._groups = [group for group in groups if group.get("grads") is not None]
        self._run_weights = _backward.stage_backward_weight
        self._weights = weights
        # Weights in front of the sources, such as an embedding's.
        self._edges = [
            (source, gradient)
            for source, gradient in zip(sources, gradients_in, strict=True)
            if gradient is not None and not source.is_leaf
        ]
        grouped = {node for group in self._groups for node in group["params"]}
        self._front = [
            weight
            for weight in weights
            if torch.autograd.graph.get_gradient_edge(weight).node not in grouped
        ]

    def run(self) -> None:
        """Queue the weights' part."""
        groups = [dict(group) for group in self._groups]  # it takes them apart
        self._run_weights(iter(self._weights), groups, retain_graph=True)
        if self._edges and self._front:
            sources, gradients = zip(*self._edges, strict=True)
            torch.autograd.backward(sources, gradients, retain_graph=True, inputs=self._front)


def _wants_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _differentiable(outputs: Any) -> list[torch.Tensor]:
    """The tensors among a module's outputs that a backward can start from."""
    listed = outputs if isinstance(outputs, tuple | list) else [outputs]
    found = [one for one in listed if _wants_gradient(one)]
    if not found:
        raise InputError("a stage must return a tensor that depends on its parameters")
    return found


def torch_workload(
    workload: str,
    model: Model,
    *,
    num_stages: int,
    microbatch_size: int,
    dtype: str,
    device: str,
    tensor_parallel: int = 1,
    recompute: bool = False,
    layers_per_stage: Sequence[int] | None = None,
) -> TorchWorkload:
    """The stages of a known workload.

    Args:
        workload: "gpt" attends to the past only, "bert" to all tokens; "t5" or "wide-resnet".
        model: its sizes.
        num_stages: pipeline stages.
        microbatch_size: samples per microbatch.
        dtype: "bfloat16", "float16" or "float32", of weights and activations.
        device: such as "cuda:0".
        tensor_parallel: ranks that share a stage; the shard of one is what runs.
        recompute: a layer's backward does its forward again.
        layers_per_stage: layers, or blocks, of each; None: the split of least imbalance.

    Raises:
        InputError: the workload cannot be split so.
    """
    modelled = gpu(_BALANCE)
    clock = modelled.clocks_mhz[0]
    works = stage_works(
        model,
        num_stages=num_stages,
        microbatch_size=microbatch_size,
        tensor_parallel=tensor_parallel,
        recompute=recompute,
        layers=layers_per_stage,
        cost=lambda work: modelled.time_s(work.flops, work.traffic, clock),
    )
    layers = [work.num_layers for work in works]
    how = How(
        microbatch_size=microbatch_size,
        dtype=getattr(torch, dtype),
        device=device,
        tensor_parallel=tensor_parallel,
        recompute=recompute,
        causal=workload == "gpt",
    )
    kind = "blocks" if isinstance(model, ConvolutionalModel) else "layers"
    parts = [
        f"{model.name} training, {num_stages} stages of {'-'.join(map(str, layers))} {kind}",
        f"{microbatch_size} x {model.sample}",
        *([f"1 of {tensor_parallel} tensor-parallel ranks"] if tensor_parallel > 1 else []),
        *(["activations recomputed"] if recompute else []),
        dtype,
        f"torch {torch.__version__}",
    ]
    stages = model_stages(model, layers, how)
    return TorchWorkload(stages, description=", ".join(parts), device=device)
