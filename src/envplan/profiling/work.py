"""Arithmetic and memory traffic of a pipeline stage, for one microbatch on one GPU.

The counts follow published formulas; how often the saved activations of a transformer travel
through memory in a pass is calibrated, as said at the constants below. Nothing here knows a GPU:
`devices.modelled` turns work into seconds and joules.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import Final, NamedTuple

__all__ = [
    "HALF_BYTES",
    "MODULES_OF_A_LAYER",
    "MemoryPasses",
    "ModuleWork",
    "NamedModule",
    "StageWork",
    "Unit",
    "Work",
    "products_work",
]

# A backward multiplies by the weights and by the activations where a forward multiplies once.
_BACKWARD_FLOPS: Final = 2.0

#: Bytes of a weight or activation in mixed precision.
HALF_BYTES: Final = 2.0
_GRADIENT_BYTES: Final = 8.0  # to read and write a 32-bit gradient sum

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
    """

    flops: float
    traffic: float

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.traffic + other.traffic)

    def __sub__(self, other: Work) -> Work:
        return Work(self.flops - other.flops, self.traffic - other.traffic)


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
    """

    name: str
    forward: Work
    backward: Work
    backward_weight: Work

    @property
    def backward_input(self) -> Work:
        """The rest of the backward: gradients of activations, and recomputation if any."""
        return self.backward - self.backward_weight

    def with_recomputation(self) -> ModuleWork:
        """The same where the backward does the forward again."""
        return replace(self, backward=self.backward + self.forward)

    def __add__(self, other: ModuleWork) -> ModuleWork:
        return ModuleWork(
            "",
            self.forward + other.forward,
            self.backward + other.backward,
            self.backward_weight + other.backward_weight,
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
) -> ModuleWork:
    """The work of matrix products.

    Args:
        name: of the module.
        flops: of a forward.
        activation_bytes: activations that cross the memory bus as often as `passes` says.
        num_weights: weights of the products; 0: what is multiplied are activations alone.
        passes: of the activations through memory.
    """
    backward_weight_bytes = (HALF_BYTES + _GRADIENT_BYTES) * num_weights
    return ModuleWork(
        name,
        forward=Work(flops, passes.forward * activation_bytes + HALF_BYTES * num_weights),
        backward=Work(
            _BACKWARD_FLOPS * flops, passes.backward * activation_bytes + backward_weight_bytes
        ),
        backward_weight=Work(flops if num_weights else 0.0, _GRADIENT_BYTES * num_weights),
    )
