"""Arithmetic and memory traffic of a pipeline stage, for one microbatch on one GPU.

The counts follow published formulas; how often the saved activations of a transformer travel
through memory in a pass is calibrated, as said at the constants below. Nothing here knows a GPU:
`devices.modelled` turns work into seconds and joules by its totals, or `kernel_model` kernel by
kernel, for GPUs whose kernels are known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add
from typing import Final, NamedTuple

from envplan.profiling.kernels import ElementWise, Kernel, MatrixProduct

__all__ = [
    "HALF_BYTES",
    "MODULES_OF_A_LAYER",
    "MemoryPasses",
    "ModuleKernels",
    "ModuleWork",
    "NamedModule",
    "StageWork",
    "Unit",
    "Work",
    "kernels_work",
    "products_work",
]

# A backward multiplies by the weights and by the activations where a forward multiplies once.
_BACKWARD_FLOPS: Final = 2.0

#: Bytes of a weight or activation in mixed precision.
HALF_BYTES: Final = 2.0
_GRADIENT_BYTES: Final = 8.0  # to read and write a 32-bit gradient sum
#: Bytes of a gated activation's backward (reads three, writes two) over those of its forward (reads
#: two, writes one).
_ELEMENT_WISE_BACKWARD: Final = 5 / 3

#: Modules that every transformer layer has, in order.
MODULES_OF_A_LAYER: Final = ("linear_qkv", "core_attention", "mlp")


class MemoryPasses(NamedTuple):
    """How many times the saved activations of a module cross the memory bus."""

    forward: float
    backward: float


# A forward writes each activation of a layer once and reads most of them once. Both figures, with
# the compute efficiency of the A40, are set so that six layers of GPT-3 1.3B take what the Zeus
# documentation's A40 profile says of a first stage: 0.0937 s forward and 0.2453 s backward.
_TRANSFORMER_PASSES: Final = MemoryPasses(forward=1.8, backward=6.5)


@dataclass(frozen=True)
class Work:
    """Work of one operation on one GPU.

    Attributes:
        flops: floating-point operations of its matrix products.
        traffic: bytes its other kernels move between the GPU and its memory.
        kernels: how many of each there are, all of the work; empty where they are not known.
    """

    flops: float
    traffic: float
    kernels: Mapping[Kernel, float] = field(default_factory=dict)

    def __add__(self, other: Work) -> Work:
        return Work(
            self.flops + other.flops,
            self.traffic + other.traffic,
            _summed_kernels(self.kernels, other.kernels, sign=1),
        )

    def __sub__(self, other: Work) -> Work:
        return Work(
            self.flops - other.flops,
            self.traffic - other.traffic,
            _summed_kernels(self.kernels, other.kernels, sign=-1),
        )

    @classmethod
    def of_kernels(cls, kernels: Mapping[Kernel, float]) -> Work:
        """The work of some kernels: what matrix products move is hidden behind their arithmetic."""
        flops = traffic = 0.0
        for kernel, count in kernels.items():
            flops += count * float(kernel.flops)
            if isinstance(kernel, ElementWise):
                traffic += count * float(kernel.num_bytes)
        return cls(flops, traffic, kernels)


def _summed_kernels(
    kernels: Mapping[Kernel, float], others: Mapping[Kernel, float], *, sign: int
) -> dict[Kernel, float]:
    """Kernels with others added or taken away."""
    counts = dict(kernels)
    for kernel, count in others.items():
        counts[kernel] = counts.get(kernel, 0.0) + sign * count
    return {kernel: count for kernel, count in counts.items() if count}


@dataclass(frozen=True)
class ModuleKernels:
    """The kernels of a module, and how many there are of each.

    Attributes:
        forward: of the forward.
        backward_input: of the part of the backward that makes gradients of activations.
        backward_weight: of the part that makes gradients of weights.
    """

    forward: Mapping[Kernel, float] = field(default_factory=dict)
    backward_input: Mapping[Kernel, float] = field(default_factory=dict)
    backward_weight: Mapping[Kernel, float] = field(default_factory=dict)

    def __add__(self, other: ModuleKernels) -> ModuleKernels:
        return ModuleKernels(
            _summed_kernels(self.forward, other.forward, sign=1),
            _summed_kernels(self.backward_input, other.backward_input, sign=1),
            _summed_kernels(self.backward_weight, other.backward_weight, sign=1),
        )

    @property
    def backward(self) -> Mapping[Kernel, float]:
        """Of the whole backward."""
        return _summed_kernels(self.backward_input, self.backward_weight, sign=1)

    @classmethod
    def of_product(cls, rows: int, columns: int, depth: int, count: float = 1.0) -> ModuleKernels:
        """Of a product of activations (rows, depth) with weights (depth, columns).

        Its backward makes two: gradients of (rows, depth) activations and of the weights, whose
        sums in 32 bits are read and written.
        """
        if not (rows and columns and depth):
            return cls()
        return cls(
            forward={MatrixProduct(rows, columns, depth): count},
            backward_input={MatrixProduct(rows, depth, columns): count},
            backward_weight={
                MatrixProduct(depth, columns, rows): count,
                ElementWise(_GRADIENT_BYTES * depth * columns): count,
            },
        )

    @classmethod
    def of_activations(
        cls, rows: int, columns: int, depth: int, count: float = 1.0
    ) -> ModuleKernels:
        """Of products of activations: each of the two factors gets a gradient."""
        product = MatrixProduct(rows, columns, depth)
        return cls(forward={product: count}, backward_input={product: 2 * count})

    @classmethod
    def of_element_wise(cls, num_bytes: float) -> ModuleKernels:
        """Of norms, activations and sums that move so many bytes forward."""
        if not num_bytes:
            return cls()
        return cls(
            forward={ElementWise(num_bytes): 1.0},
            backward_input={ElementWise(_ELEMENT_WISE_BACKWARD * num_bytes): 1.0},
        )


@dataclass(frozen=True)
class ModuleWork:
    """Forward and backward of one microbatch through one module.

    Attributes:
        name: such as mlp; "" where parts are not told apart.
        forward: work of the forward.
        backward: work of the backward.
        backward_weight: the part of it that makes gradients of weights. Every product with
            weights costs as much again there as in the forward; attention's core has no weights.
            Of the traffic it is the sums of gradients alone: what else a backward moves is on the
            way to the inputs.
        num_weights: that a GPU has of it.
        saved_bytes: activations that the forward leaves for the backward on a GPU.
    """

    name: str
    forward: Work
    backward: Work
    backward_weight: Work
    num_weights: float = 0.0
    saved_bytes: float = 0.0

    @property
    def backward_input(self) -> Work:
        """The rest of the backward: gradients of activations, and recomputation if any."""
        return self.backward - self.backward_weight

    def with_recomputation(self) -> ModuleWork:
        """The same where the backward does the forward again."""
        return replace(self, backward=self.backward + self.forward, saved_bytes=0.0)

    def __add__(self, other: ModuleWork) -> ModuleWork:
        return ModuleWork(
            "",
            self.forward + other.forward,
            self.backward + other.backward,
            self.backward_weight + other.backward_weight,
            self.num_weights + other.num_weights,
            self.saved_bytes + other.saved_bytes,
        )


def kernels_work(name: str, kernels: ModuleKernels, num_weights: float) -> ModuleWork:
    """The work of a module that is known by its kernels alone.

    What its products and attentions read is kept for the backward.
    """
    saved_bytes = 0.0
    for kernel, count in kernels.forward.items():
        saved_bytes += count * float(kernel.saved_bytes)
    return ModuleWork(
        name,
        forward=Work.of_kernels(kernels.forward),
        backward=Work.of_kernels(kernels.backward),
        backward_weight=Work.of_kernels(kernels.backward_weight),
        num_weights=num_weights,
        saved_bytes=saved_bytes,
    )


#: What a stage boundary never separates: a transformer layer, or a block of a ResNet.
Unit = tuple[ModuleWork, ...]


class NamedModule(NamedTuple):
    """A module of a stage, by a name that no other one there has."""

    name: str
    work: ModuleWork


@dataclass(frozen=True)
class StageWork:
    """Work of a stage.

    Attributes:
        num_layers: transformer layers, or blocks of a ResNet.
        modules: in order.
    """

    num_layers: int
    modules: tuple[ModuleWork, ...]

    @property
    def whole(self) -> ModuleWork:
        """All modules together."""
        return reduce(add, self.modules)

    def named_modules(self) -> list[NamedModule]:
        """Modules by name; those of a layer with its number, as in layers.3.mlp."""
        num_seen: Counter[str] = Counter()
        modules = []
        for module in self.modules:
            name = module.name
            if name in MODULES_OF_A_LAYER:
                name = f"layers.{num_seen[module.name]}.{name}"
            modules.append(NamedModule(name, module))
            num_seen[module.name] += 1
        return modules


def products_work(
    name: str,
    flops: float,
    activation_bytes: float,
    num_weights: float,
    passes: MemoryPasses = _TRANSFORMER_PASSES,
    kernels: ModuleKernels | None = None,
) -> ModuleWork:
    """The work of matrix products.

    Args:
        name: of the module.
        flops: of a forward.
        activation_bytes: activations that cross the memory bus as often as `passes` says.
        num_weights: weights of the products; 0: what is multiplied are activations alone.
        passes: of the activations through memory.
        kernels: one by one; None: not known.
    """
    kernels = kernels or ModuleKernels()
    backward_weight_bytes = (HALF_BYTES + _GRADIENT_BYTES) * num_weights
    return ModuleWork(
        name,
        forward=Work(
            flops,
            passes.forward * activation_bytes + HALF_BYTES * num_weights,
            kernels.forward,
        ),
        backward=Work(
            _BACKWARD_FLOPS * flops,
            passes.backward * activation_bytes + backward_weight_bytes,
            kernels.backward,
        ),
        backward_weight=Work(
            flops if num_weights else 0.0, _GRADIENT_BYTES * num_weights, kernels.backward_weight
        ),
        num_weights=num_weights,
        saved_bytes=activation_bytes,
    )
