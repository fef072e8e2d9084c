"""Pipeline stages that run for real, in torch: those of a known workload, or the user's own."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
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
from envplan.profiling.torch_models import Stage, model_stages
from envplan.profiling.waiting import Peers
from envplan.profiling.workloads import ConvolutionalModel, TrainingJob

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
        self._run_weights: Callable[[], None] | None = None
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
            InputError: as in backward_input.
        """
        if self._run_weights is None:
            self._find_sources()
            weights = [weight for weight in self._module.parameters() if weight.requires_grad]
            self._run_weights = _weights_part(self._outputs, self._ones(), self._sources, weights)
        self._run_weights()

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
        self._outputs, self._sources, self._run_weights = [], [], None

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


def _weights_part(
    outputs: list[torch.Tensor],
    gradients: list[torch.Tensor],
    sources: list[torch.Tensor],
    weights: list[nn.Parameter],
) -> Callable[[], None]:
    """Run a backward down to the inputs; what is returned queues the weights' part, time and again.

    Args:
        outputs: of the stage, with their graph.
        gradients: of the outputs.
        sources: what the inputs' part makes gradients of.
        weights: the stage's.
    """
    from torch.distributed.pipelining import _backward

    for source in sources:
        source.retain_grad()
    # It cuts off the outputs it is given, so it gets some of its own.
    ends = [output.clone() for output in outputs]
    found, groups = _backward.stage_backward_input(ends, gradients, sources, iter(weights))
    groups = [group for group in groups if group.get("grads") is not None]
    # Weights in front of the sources, such as an embedding's.
    edges = [
        (source, gradient)
        for source, gradient in zip(sources, found, strict=True)
        if gradient is not None and not source.is_leaf
    ]
    grouped = {node for group in groups for node in group["params"]}
    edge_of = torch.autograd.graph.get_gradient_edge
    front = [weight for weight in weights if edge_of(weight).node not in grouped]

    def run() -> None:
        # It takes the groups apart.
        _backward.stage_backward_weight(iter(weights), list(map(dict, groups)), retain_graph=True)
        if edges and front:
            starts, ones = zip(*edges, strict=True)
            torch.autograd.backward(starts, ones, retain_graph=True, inputs=front)

    return run


def _wants_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _differentiable(outputs: Any) -> list[torch.Tensor]:
    """The tensors among a module's outputs that a backward can start from."""
    listed = outputs if isinstance(outputs, tuple | list) else [outputs]
    found = [one for one in listed if _wants_gradient(one)]
    if not found:
        raise InputError("a stage must return a tensor that depends on its parameters")
    return found


def torch_workload(job: TrainingJob, device: str) -> TorchWorkload:
    """The stages of a job: the shards of one rank, where several share a stage.

    Args:
        device: such as "cuda:0".

    Raises:
        InputError: the model cannot be split so.
    """
    modelled, model = gpu(_BALANCE), job.model
    assert model is not None
    clock = modelled.clocks_mhz[0]
    works = job.stages(lambda work: modelled.time_s(work.flops, work.traffic, clock))
    layers = [work.num_layers for work in works]
    kind = "blocks" if isinstance(model, ConvolutionalModel) else "layers"
    ranks = job.tensor_parallel
    parts = [
        f"{model.name} training, {len(layers)} stages of {'-'.join(map(str, layers))} {kind}",
        f"{job.microbatch_size} x {model.sample}",
        *([f"1 of {ranks} tensor-parallel ranks"] if ranks > 1 else []),
        *(["activations recomputed"] if job.recompute else []),
        job.dtype,
        f"torch {torch.__version__}",
    ]
    stages = model_stages(job, layers, device)
    return TorchWorkload(stages, description=", ".join(parts), device=device)
