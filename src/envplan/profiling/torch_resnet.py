"""Stages of ResNets in torch: bottleneck blocks, the stem before and the classifier after."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from envplan.profiling.resnet import Bottleneck, Convolution, ConvolutionalModel
from envplan.profiling.torch_layers import LayerRange, Loss, Recomputed
from envplan.profiling.training_job import TrainingJob

__all__ = ["resnet_inputs", "resnet_stage"]


def resnet_inputs(
    job: TrainingJob, model: ConvolutionalModel, layers: LayerRange, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """A random microbatch for a stage: images for the first one, feature maps for others."""
    if layers.begin == 0:
        shape = (job.microbatch_size, 3, model.image_size, model.image_size)
        return (torch.randint(256, shape, dtype=torch.uint8),)
    convolution = model.bottlenecks()[layers.begin].narrow
    size = convolution.size
    maps = torch.randn(job.microbatch_size, convolution.channels, size, size, dtype=dtype)
    return (maps,)


def resnet_stage(job: TrainingJob, model: ConvolutionalModel, layers: LayerRange) -> nn.Module:
    """A stage's blocks; the stem is before the model's first, the classifier after its last."""
    bottlenecks = model.bottlenecks()
    modules: list[nn.Module] = []
    if layers.begin == 0:
        modules.append(_Stem(model))
    for bottleneck in bottlenecks[layers.begin : layers.end]:
        block = _Bottleneck(bottleneck)
        modules.append(Recomputed(block) if job.recompute else block)
    if layers.is_last:
        classifier = nn.Linear(bottlenecks[-1].widen.out, model.classes)
        modules += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), classifier, Loss()]
    return nn.Sequential(*modules)


class _Stem(nn.Module):
    """From the bytes of images to the first feature maps."""

    def __init__(self, model: ConvolutionalModel) -> None:
        super().__init__()
        self.convolve = _convolution(model.stem)
        self.pool = nn.MaxPool2d(3, 2, 1) if model.downsampling_stem else nn.Identity()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Feature maps of images."""
        dtype = self.convolve[0].weight.dtype
        maps = functional.relu_(self.convolve(images.to(dtype) / 255))
        pooled: torch.Tensor = self.pool(maps)
        return pooled


class _Bottleneck(nn.Module):
    """Three convolutions, and a way around them."""

    def __init__(self, block: Bottleneck) -> None:
        super().__init__()
        self.narrow = _convolution(block.narrow)
        self.spatial = _convolution(block.spatial)
        self.widen = _convolution(block.widen)
        self.around = nn.Identity() if block.around is None else _convolution(block.around)

    def forward(self, maps: torch.Tensor) -> torch.Tensor:
        """Feature maps of feature maps."""
        inner = functional.relu_(self.narrow(maps))
        inner = functional.relu_(self.spatial(inner))
        return functional.relu_(self.widen(inner) + self.around(maps))


def _convolution(sizes: Convolution) -> nn.Sequential:
    """A convolution and its normalization."""
    convolve = nn.Conv2d(
        sizes.channels,
        sizes.out,
        sizes.kernel,
        sizes.stride,
        padding=sizes.kernel // 2,
        bias=False,
    )
    return nn.Sequential(convolve, nn.BatchNorm2d(sizes.out))
