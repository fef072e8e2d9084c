"""Whether a job fits into the memory of its GPUs, and the parallelism with which it does."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Final, NamedTuple

from envplan.devices.modelled import gpu
from envplan.errors import InputError
from envplan.profile import Profile
from envplan.profile.memory import RankMemory, memory_by_rank
from envplan.profiling.resnet import ConvolutionalModel
from envplan.profiling.training_job import BYTES_PER_PARAMETER, Model, TrainingJob

__all__ = ["MemoryShortage", "gpu_memory_gb", "memory_shortage"]

#: Share of a GPU's memory that a job may take: the framework and fragments take the rest.
USABLE_SHARE: Final = 0.92
_TENSOR_PARALLEL: Final = (1, 2, 4, 8)


class Parallelism(NamedTuple):
    """Pipeline stages, and GPUs that share each of them."""

    stages: int
    tensor_parallel: int

    @property
    def num_gpus(self) -> int:
        """All of them."""
        return self.stages * self.tensor_parallel


@dataclass(frozen=True)
class MemoryShortage:
    """A job that does not fit.

    Attributes:
        needed: by the rank that needs most.
        gpu_gb: memory of a GPU, GB.
        fitting: the parallelism with the fewest GPUs that fits; None: none does.
    """

    needed: RankMemory
    gpu_gb: float
    fitting: Parallelism | None

    def __str__(self) -> str:
        model_gb, activation_gb = self.needed.model_bytes / 1e9, self.needed.activation_bytes / 1e9
        sentence = (
            f"this does not fit: it needs {self.needed.total_gb:.0f} GB of a GPU; "
            f"{USABLE_SHARE * self.gpu_gb:.0f} of its {self.gpu_gb:g} can be used "
            f"({model_gb:.0f} for weights, gradients and Adam's state, {activation_gb:.0f} for "
            f"activations of {self.needed.microbatches_in_flight} microbatches in flight)"
        )
        if self.fitting is None:
            return f"{sentence}; spread experts or the optimizer over replicas, or recompute"
        return (
            f"{sentence}; --pp {self.fitting.stages} --tp {self.fitting.tensor_parallel} would, as "
            "would spreading experts or the optimizer over replicas"
        )


def gpu_memory_gb(name: str | None) -> float | None:
    """The memory of a GPU by the name NVML gives it, GB; None where it is not known."""
    if name is None:
        return None
    try:
        return gpu(name).memory_gb
    except InputError:
        return None


def memory_shortage(profile: Profile, job: TrainingJob) -> MemoryShortage | None:
    """What a job needs beyond its GPUs' memory; None: it fits, or is not known to.

    Args:
        profile: of the job.
        job: what is trained, and how.
    """
    gpu_gb = gpu_memory_gb(profile.metadata.gpu)
    ranks = memory_by_rank(profile.pipeline(), profile)
    if gpu_gb is None or ranks is None:
        return None
    needed = max(ranks, key=lambda rank: rank.total_gb)
    usable_gb = USABLE_SHARE * gpu_gb
    if needed.total_gb <= usable_gb:
        return None
    model_gb = sum(rank.model_bytes for rank in ranks) * job.tensor_parallel / 1e9
    shapes = _shapes_that_hold(model_gb / usable_gb, job.known_model)
    fitting = (shape for shape in shapes if _needed_gb(job, shape) <= usable_gb)
    return MemoryShortage(needed, gpu_gb, next(fitting, None))


def _shapes_that_hold(least_gpus: float, model: Model) -> Iterator[Parallelism]:
    """Ways to share a model over so many GPUs at least, those with the fewest first."""
    num_layers = 1 if isinstance(model, ConvolutionalModel) else model.num_layers
    counts = [2**power for power in range(7) if 2**power <= num_layers]
    shapes = [Parallelism(*shape) for shape in product(counts, _TENSOR_PARALLEL)]
    for shape in sorted(shapes, key=lambda shape: (shape.num_gpus, shape.stages)):
        if shape.num_gpus >= least_gpus:
            yield shape


def _needed_gb(job: TrainingJob, shape: Parallelism) -> float:
    """What the job needs of a GPU in 1F1B, GB; infinite where it cannot be shared so.

    Stages have equal numbers of layers, or one more.
    """
    model = job.known_model
    if isinstance(model, ConvolutionalModel):
        return math.inf
    num_layers, longer = divmod(model.num_layers, shape.stages)
    layers = [num_layers + (stage < longer) for stage in range(shape.stages)]
    shared = replace(
        job,
        num_stages=shape.stages,
        tensor_parallel=shape.tensor_parallel,
        chunks=1,
        layers=layers[::-1],  # later stages hold fewer microbatches
    )
    try:
        stages = shared.stages(lambda work: work.flops)
    except InputError:
        return math.inf
    needed_bytes = 0.0
    for index, stage in enumerate(stages):
        in_flight = min(shape.stages - index, job.num_microbatches)
        model_bytes = BYTES_PER_PARAMETER * stage.whole.num_weights
        needed_bytes = max(needed_bytes, model_bytes + in_flight * shared.saved_bytes(stage))
    return needed_bytes / 1e9
