"""ResNets of bottleneck blocks, and their convolutions' work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final, NamedTuple

from envplan.errors import InputError
from envplan.profiling.work import HALF_BYTES, MemoryPasses, ModuleWork, Unit, products_work

__all__ = ["Bottleneck", "Convolution", "ConvolutionalModel"]

# How many times an activation of a ResNet crosses the memory bus. Forward: written by the
# convolution, read twice and written by the normalization, read and written by the activation,
# read by the next convolution. Backward: three by the activation, five by the normalization, and
# the convolution reads activation and gradient, the gradient once more, and writes its own twice.
_CONVOLUTION_PASSES: Final = MemoryPasses(forward=7.0, backward=13.0)

_STEM_CHANNELS: Final = 64
_STEM_SHRINKS: Final = 4  # how much a stem with pooling shrinks each side of an image


class Convolution(NamedTuple):
    """Sizes of a convolution with its normalization and activation.

    Attributes:
        channels: coming in.
        out: channels going out.
        kernel: its width.
        stride: of its steps.
        size: pixels on a side of the maps coming in.
    """

    channels: int
    out: int
    kernel: int
    stride: int
    size: int

    def work(self, microbatch_size: int) -> ModuleWork:
        """Its work for a microbatch."""
        pixels = microbatch_size * (self.size // self.stride) ** 2
        num_weights = self.channels * self.out * self.kernel**2
        return products_work(
            "",
            flops=2.0 * pixels * num_weights,
            activation_bytes=HALF_BYTES * pixels * self.out,
            num_weights=num_weights,
            passes=_CONVOLUTION_PASSES,
        )


class Bottleneck(NamedTuple):
    """A block of three convolutions.

    Attributes:
        narrow: makes few channels of many.
        spatial: the 3x3 convolution.
        widen: makes many channels again.
        around: beside the three, where channels or sizes change; None: the input itself.
    """

    narrow: Convolution
    spatial: Convolution
    widen: Convolution
    around: Convolution | None

    @property
    def convolutions(self) -> list[Convolution]:
        """All of them."""
        inner = [self.narrow, self.spatial, self.widen]
        return inner if self.around is None else [*inner, self.around]


@dataclass(frozen=True, kw_only=True)
class ConvolutionalModel:
    """A ResNet of bottleneck blocks (He et al., 2016), wide or not (Zagoruyko et al., 2016).

    Attributes:
        name: for people.
        blocks: bottleneck blocks of the four groups.
        width_factor: how much wider the 3x3 convolutions are than in the plain ResNet.
        image_size: pixels on a side.
        classes: rows of the head.
        downsampling_stem: a 7x7 convolution of stride 2 and pooling come first, as for ImageNet;
            otherwise a 3x3 convolution of stride 1 alone.
    """

    name: str
    blocks: tuple[int, int, int, int]
    width_factor: int
    image_size: int
    classes: int
    downsampling_stem: bool

    tokens: ClassVar[int | None] = None

    def units(
        self, microbatch_size: int, tensor_parallel: int, context_parallel: int = 1
    ) -> list[Unit]:
        """The blocks, with the stem on the first and the head on the last.

        Raises:
            InputError: GPUs shall share a stage: ResNets are not split that way here.
        """
        if tensor_parallel * context_parallel != 1:
            raise InputError(
                f"{self.name} cannot be split by tensor or context parallelism; leave --tp and "
                "--cp out"
            )
        bottlenecks = self.bottlenecks()
        blocks = [bottleneck.convolutions for bottleneck in bottlenecks]
        blocks[0].insert(0, self.stem)
        blocks[-1].append(Convolution(bottlenecks[-1].widen.out, self.classes, 1, 1, 1))
        return [
            tuple(convolution.work(microbatch_size) for convolution in block) for block in blocks
        ]

    @property
    def stem(self) -> Convolution:
        """The first convolution."""
        kernel, stride = (7, 2) if self.downsampling_stem else (3, 1)
        return Convolution(3, _STEM_CHANNELS, kernel, stride, self.image_size)

    def bottlenecks(self) -> list[Bottleneck]:
        """The convolutions of each block."""
        bottlenecks = []
        channels = _STEM_CHANNELS
        size = self.image_size // _STEM_SHRINKS if self.downsampling_stem else self.image_size
        for group, num_blocks in enumerate(self.blocks):
            width, out = 64 * 2**group * self.width_factor, 256 * 2**group
            for block in range(num_blocks):
                stride = 2 if group > 0 and block == 0 else 1
                around = Convolution(channels, out, 1, stride, size) if block == 0 else None
                bottlenecks.append(
                    Bottleneck(
                        narrow=Convolution(channels, width, 1, 1, size),
                        spatial=Convolution(width, width, 3, stride, size),
                        widen=Convolution(width, out, 1, 1, size // stride),
                        around=around,
                    )
                )
                channels, size = out, size // stride
        return bottlenecks

    def describe(self) -> str:
        """Its sizes, in a sentence without a full stop."""
        stem = "7x7 stem of stride 2 and pooling" if self.downsampling_stem else "3x3 stem"
        return (
            f"bottleneck blocks {list(self.blocks)} with 3x3 convolutions {self.width_factor} "
            f"times as wide as ResNet's, {stem}, images of {self.image_size} x "
            f"{self.image_size}, {self.classes} classes; a block is never split, stem on the "
            "first stage, pooling and classifier on the last"
        )

    @property
    def sample(self) -> str:
        """Size of a sample, for people."""
        return f"{self.image_size} x {self.image_size} pixels"
