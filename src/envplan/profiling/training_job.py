"""Training jobs, for profiles that are measured or modelled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate, chain, pairwise
from operator import add
from typing import Final

from envplan.errors import InputError
from envplan.profile import ProfileMetadata
from envplan.profile.sidecar import Workload
from envplan.profiling.language_model import LanguageModel
from envplan.profiling.partition import partition
from envplan.profiling.resnet import ConvolutionalModel
from envplan.profiling.transformer import TransformerModel
from envplan.profiling.work import HALF_BYTES, StageWork, Unit, Work

__all__ = ["Model", "TrainingJob"]

#: Of mixed-precision Adam: 16-bit weight; its gradient, both moments and a copy in 32 bits.
BYTES_PER_PARAMETER: Final = 18

#: What can be split over pipeline stages: its `units` are the chain of units for one microbatch on
#: one GPU, in half precision.
Model = TransformerModel | LanguageModel | ConvolutionalModel


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """A model, and how it is trained.

    Attributes:
        model: what is trained; None: only the user's own stages know.
        num_stages: pipeline stages.
        chunks: model chunks of each; the profile has a stage for each.
        num_microbatches: default for planning.
        microbatch_size: samples per microbatch; None: only the user's own stages know.
        tensor_parallel: GPUs that share a stage's layers.
        context_parallel: GPUs that share its sequences.
        replicas: of the pipeline.
        dtype: "bfloat16", "float16" or "float32" (without tensor cores).
        recompute: whether backwards recompute their forward.
        split_backward: whether gradients of inputs and of weights are operations of their own.
        schedule: that the job runs.
        microbatch_group: of an interleaved schedule; see Pipeline.
        p2p_latency: what a transfer between stages takes, s.
        overlap_p2p: whether the GPU that sends computes meanwhile; otherwise operations take as
            much longer, at the power of waiting, and wait for no transfer.
        layers: of each stage or chunk, in the model's order; None: the split of least imbalance.
    """

    model: Model | None
    num_stages: int
    chunks: int = 1
    num_microbatches: int = 32
    microbatch_size: int | None = 4
    tensor_parallel: int = 1
    context_parallel: int = 1
    replicas: int = 1
    dtype: str = "bfloat16"
    recompute: bool = False
    split_backward: bool = False
    schedule: str = "1f1b"
    microbatch_group: int | None = None
    p2p_latency: float = 0.0
    overlap_p2p: bool = True
    layers: Sequence[int] | None = None

    @property
    def known_model(self) -> Model:
        """The model of a job that has one."""
        assert self.model is not None
        return self.model

    @property
    def gpus_per_stage(self) -> int:
        """GPUs that share a stage."""
        return self.tensor_parallel * self.context_parallel

    def stages(self, cost: Callable[[Work], float]) -> list[StageWork]:
        """The work of each stage (or chunk), on one of the GPUs that share it.

        Args:
            cost: seconds (or any measure) of a piece of work, by which stages are balanced.

        Raises:
            InputError: there are more stages than units, or none, `layers` are not the model's, or
                GPUs cannot share it so.
        """
        units = self._units()
        counts = self._layers_per_stage(units, cost)
        ends = accumulate(counts, initial=0)
        return [
            StageWork(end - begin, tuple(chain.from_iterable(units[begin:end])))
            for begin, end in pairwise(ends)
        ]

    def saved_bytes(self, stage: StageWork) -> float:
        """Activations that a microbatch leaves on a stage for its backward, on one GPU.

        With recomputation it is what comes into each layer.
        """
        model = self.known_model
        if not self.recompute or isinstance(model, ConvolutionalModel):
            return stage.whole.saved_bytes
        assert self.microbatch_size is not None
        num_tokens = self.microbatch_size * model.sequence_length / self.context_parallel
        return stage.num_layers * HALF_BYTES * num_tokens * model.hidden_size

    def _units(self) -> list[Unit]:
        """The model's units, with recomputation if there is any."""
        assert self.microbatch_size is not None
        units = self.known_model.units(
            self.microbatch_size, self.tensor_parallel, self.context_parallel
        )
        if not self.recompute:
            return units
        return [tuple(module.with_recomputation() for module in unit) for unit in units]

    def _layers_per_stage(
        self, units: Sequence[Unit], cost: Callable[[Work], float]
    ) -> Sequence[int]:
        num_stages = self.num_stages * self.chunks
        if self.layers is None:
            wholes = [reduce(add, unit) for unit in units]
            costs = [cost(whole.forward) + cost(whole.backward) for whole in wholes]
            return partition(costs, num_stages)
        if len(self.layers) != num_stages or sum(self.layers) != len(units):
            raise InputError(
                f"--layers-per-stage has {sum(self.layers)} layers on {len(self.layers)} stages, "
                f"but {self.known_model.name} has {len(units)} layers and there are {num_stages} "
                "stages"
            )
        return self.layers

    def metadata(self, extra: Mapping[str, object]) -> ProfileMetadata:
        """The job as a sidecar states it.

        Args:
            extra: further fields; those without a value, or with 0, are left out.
        """
        is_chunked = self.chunks > 1
        return ProfileMetadata(
            microbatch_size=self.microbatch_size,
            tensor_parallel=self.tensor_parallel,
            schedule=self.schedule,
            num_microbatches=self.num_microbatches,
            job=Workload(
                stages=self.num_stages if is_chunked else None,
                chunks=self.chunks if is_chunked else None,
                microbatch_group=self.microbatch_group,
                p2p_latency_s=self.p2p_latency if self.overlap_p2p else 0.0,
                gpus_per_stage=self.gpus_per_stage if self.context_parallel > 1 else None,
                replicas=self.replicas,
            ),
            extra={name: value for name, value in extra.items() if value},
        )
