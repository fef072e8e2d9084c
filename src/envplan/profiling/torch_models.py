"""The stages of the known models as torch modules, with the sizes of `models.py`.

Each stage takes what the one before sends and returns what the next one needs: tokens or images
come in at the first stage, hidden states (feature maps) go on, a loss comes out of the last. With
tensor parallelism the module is the shard of one rank: products are split by columns, then by
rows, heads and vocabulary over the ranks, and what the ranks would send each other is left out.

Only `torch_stages` imports this module, and says so if torch is not installed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import nn

from envplan.errors import InputError
from envplan.profiling.language_model import LanguageModel
from envplan.profiling.torch_layers import LayerRange
from envplan.profiling.torch_resnet import resnet_inputs, resnet_stage
from envplan.profiling.torch_transformer import TransformerStage, transformer_inputs
from envplan.profiling.training_job import TrainingJob
from envplan.profiling.transformer import TransformerModel

__all__ = ["MakeStage", "SampledModule", "model_stages"]


class SampledModule(NamedTuple):
    """A stage's module, and a random microbatch for it."""

    module: nn.Module
    inputs: tuple[torch.Tensor, ...]


#: Makes a stage when its turn comes: a module, and a tuple of sample inputs of any kind.
MakeStage = Callable[[], tuple[nn.Module, tuple[object, ...]]]


def model_stages(job: TrainingJob, layers: Sequence[int], device: str) -> list[MakeStage]:
    """A function for each stage that makes its module and a random microbatch for it.

    Args:
        job: what is trained and how.
        layers: of each stage, as in `StageWork.num_layers`; for T5 encoder layers come first.
        device: where, such as "cuda:0".

    Raises:
        InputError: widths or words do not divide by the tensor-parallel ranks.
    """
    if isinstance(job.model, TransformerModel):
        _require_divisible(job.model, job.tensor_parallel)
    ends = list(accumulate(layers, initial=0))
    ranges = [LayerRange(begin, end, is_last=end == ends[-1]) for begin, end in pairwise(ends)]
    return [partial(_make_stage, job, layer_range, device) for layer_range in ranges]


def _require_divisible(model: TransformerModel, num_ranks: int) -> None:
    sizes = {
        "units of a feed-forward": model.feed_forward_width,
        "words": model.vocabulary_size,
    }
    for noun, count in sizes.items():
        if count % num_ranks:
            raise InputError(f"--tp {num_ranks} does not divide the {count} {noun} of the workload")


def _make_stage(job: TrainingJob, layers: LayerRange, device: str) -> SampledModule:
    """The module of some layers, with the same weights and inputs each time."""
    model, dtype = job.known_model, getattr(torch, job.dtype)
    module: nn.Module
    with torch.device(device):
        torch.manual_seed(0)
        if isinstance(model, TransformerModel):
            module = TransformerStage(job, model, layers)
            inputs = transformer_inputs(job, model, layers, dtype)
        elif isinstance(model, LanguageModel):  # --model is modelled only
            raise InputError(f"stages of {model.name} cannot be measured; give them with --entry")
        else:
            module = resnet_stage(job, model, layers)
            inputs = resnet_inputs(job, model, layers, dtype)
        return SampledModule(module.to(dtype), inputs)
