"""Pipeline stages that run for real, in torch: those of a known model, or the user's own."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any, Final, TypeGuard

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
from envplan.profiling.queued_slices import QueuedSlices, torch_slices
from envplan.profiling.resnet import ConvolutionalModel
from envplan.profiling.timers import EventTimer, Timer
from envplan.profiling.torch_models import MakeStage, model_stages
from envplan.profiling.training_job import TrainingJob
from envplan.profiling.waiting import Peers

__all__ = ["TorchStages", "torch_stages"]

# The GPU by whose times layers are shared out; all with tensor cores share them out alike.
_BALANCING_GPU: Final = "a100-sxm4-80gb"


class TorchStages:
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
        timer: times its work; None leaves it to the host's clock.
        peers: two processes of which one waits for the other on this GPU; without, `wait` spins.

    Raises:
        InputError: this torch cannot use that device.
    """

    def __init__(self, stages: Sequence[MakeStage], *, description: str, device: str) -> None:
        self.description = description
        self.num_stages = len(stages)
        self.timer: Timer | None = None
        self.peers: Peers | None = None
        self._stages = stages
        self._device = torch.device(device)
        self._loaded: int | None = None
        self._module = nn.Module()
        self._inputs: tuple[object, ...] = ()
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
    def module(self) -> nn.Module:
        """The module of the stage that ran last."""
        return self._module

    @property
    def inputs(self) -> tuple[object, ...]:
        """The inputs of the stage that ran last."""
        return self._inputs

    @property
    def outputs(self) -> list[torch.Tensor]:
        """The differentiable outputs of the last forward."""
        return self._outputs

    @property
    def waiting(self) -> str | None:
        """The kind of waiting that `wait` does, for people; None if it spins."""
        return None if self.peers is None else self.peers.description

    @property
    def slices(self) -> QueuedSlices | None:
        """Slices of work on the GPU, by which it is measured how late clocks come; CPUs have none.

        They are made anew each time.
        """
        return torch_slices(str(self._device)) if self._device.type == "cuda" else None

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
        sources = [value for value in self._inputs if _wants_gradient(value)]

        def note_source(module: nn.Module, inputs: Any, output: Any) -> None:
            if _wants_gradient(output) and not any(map(_wants_gradient, inputs)):
                sources.append(output)

        innermost = [part for part in self._module.modules() if not any(part.children())]
        hooks = [part.register_forward_hook(note_source) for part in innermost]
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
        """Let go of the last forward, and of all that was found out about its graph."""
        self._outputs, self._sources, self._run_weights = [], [], None

    def _ones(self) -> list[torch.Tensor]:
        """Gradients of the outputs, as the next stage would send them."""
        if not self._gradients:
            self._gradients = [torch.ones_like(output) for output in self._outputs]
        return self._gradients

    def _load(self, stage: int) -> None:
        # The memory of the stage before is free by the time the next one is made.
        self._forget()
        self._loaded = None
        self._module = nn.Module()
        self._inputs = ()
        self._gradients = []
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        module, inputs = self._stages[stage]()
        self._module = module.to(self._device).train()
        self._inputs = tuple(self._on_device(value) for value in inputs)
        self._loaded = stage

    def _on_device(self, value: object) -> object:
        """An input as it stands on the device; those that are no tensors stay as they are."""
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
    """The function that queues the weights' part of a backward, any number of times.

    The part before it, down to the inputs, is run here once: torch finds out by that which nodes of
    the graph are left for the weights.

    Args:
        outputs: of the stage, with their graph.
        gradients: of the outputs.
        sources: what the inputs' part makes gradients of.
        weights: the stage's.
    """
    from torch.distributed.pipelining import _backward

    for source in sources:
        source.retain_grad()
    # torch detaches the outputs it is given, so it gets copies.
    copies = [output.clone() for output in outputs]
    source_gradients, groups = _backward.stage_backward_input(
        copies, gradients, sources, iter(weights)
    )
    groups = [group for group in groups if group.get("grads") is not None]
    # Weights in front of the sources, such as an embedding's, get theirs through the sources.
    starts, start_gradients = [], []
    for source, gradient in zip(sources, source_gradients, strict=True):
        if gradient is not None and not source.is_leaf:
            starts.append(source)
            start_gradients.append(gradient)
    front = _weights_outside(groups, weights)

    def run_weights() -> None:
        # torch takes the groups apart, so it gets copies.
        copied_groups = [dict(group) for group in groups]
        _backward.stage_backward_weight(iter(weights), copied_groups, retain_graph=True)
        if starts and front:
            torch.autograd.backward(starts, start_gradients, retain_graph=True, inputs=front)

    return run_weights


def _weights_outside(
    groups: Sequence[dict[str, Any]], weights: Sequence[nn.Parameter]
) -> list[nn.Parameter]:
    """The weights that are in none of torch's groups."""
    grouped_nodes = set(chain.from_iterable(group["params"] for group in groups))
    edge_of = torch.autograd.graph.get_gradient_edge
    return [weight for weight in weights if edge_of(weight).node not in grouped_nodes]


def _wants_gradient(value: object) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _differentiable(outputs: Any) -> list[torch.Tensor]:
    """The tensors among a module's outputs that a backward can start from."""
    values = outputs if isinstance(outputs, tuple | list) else [outputs]
    tensors = [value for value in values if _wants_gradient(value)]
    if not tensors:
        raise InputError("a stage must return a tensor that depends on its parameters")
    return tensors


def torch_stages(job: TrainingJob, device: str) -> TorchStages:
    """The stages of a job: the shards of one rank, where several share a stage.

    Args:
        device: such as "cuda:0".

    Raises:
        InputError: the model cannot be split so.
    """
    modelled = gpu(_BALANCING_GPU)
    clock_mhz = modelled.clocks_mhz[0]
    works = job.stages(lambda work: modelled.time_s(work.flops, work.traffic, clock_mhz))
    layers = [work.num_layers for work in works]
    stages = model_stages(job, layers, device)
    return TorchStages(stages, description=_describe(job, layers), device=device)


def _describe(job: TrainingJob, layers: Sequence[int]) -> str:
    """The stages of a job in a phrase, which tells sweeps of different ones apart."""
    model = job.known_model
    kind = "blocks" if isinstance(model, ConvolutionalModel) else "layers"
    parts = [
        f"{model.name} training, {len(layers)} stages of {'-'.join(map(str, layers))} {kind}",
        f"{job.microbatch_size} x {model.sample}",
    ]
    if job.tensor_parallel > 1:
        parts.append(f"1 of {job.tensor_parallel} tensor-parallel ranks")
    if job.recompute:
        parts.append("activations recomputed")
    parts += [job.dtype, f"torch {torch.__version__}"]
    return ", ".join(parts)
