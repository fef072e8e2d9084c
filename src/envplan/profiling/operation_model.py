"""Time and energy of an operation on a modelled GPU, with how far off they may be.

GPUs whose kernels were measured, and GPUs like them, are modelled kernel by kernel
(`kernel_model`); the others by the totals of arithmetic and traffic (`devices.modelled`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final, NamedTuple, Protocol

import numpy as np

from envplan.devices.modelled import ModelledGpu
from envplan.profiling.kernel_model import KernelCost, KernelModel, kernel_model
from envplan.profiling.kernels import FloatArray, Kernel
from envplan.profiling.work import Work

__all__ = ["OperationCost", "OperationModel", "operation_model"]

#: Average over an operation of its activity, 1 being what settles the clock under the power limit.
#: The backward's lies between that of the A40 stages in the Perseus artifact (0.966) and that of
#: the Zeus documentation's A40 profile (283.6 W under a limit of 300 W: 0.92).
_FORWARD_ACTIVITY: Final = 1.0
_BACKWARD_ACTIVITY: Final = 0.94


class OperationCost(NamedTuple):
    """What an operation costs at a clock.

    Attributes:
        time_s: seconds.
        energy_j: J.
        time_error_s: standard deviation by the model's error; None: not known.
        energy_error_j: the same of energy.
    """

    time_s: float
    energy_j: float
    time_error_s: float | None = None
    energy_error_j: float | None = None


class OperationModel(Protocol):
    """Costs of operations on a GPU."""

    @property
    def gpu(self) -> ModelledGpu:
        """The GPU."""

    def costs(
        self, work: Work, clocks_mhz: Sequence[int], *, is_forward: bool
    ) -> Iterator[OperationCost]:
        """What an operation of such work costs at each clock."""

    def time_at_highest_s(self, work: Work) -> float:
        """Its time at the highest clock, s."""

    @property
    def error_between_clocks(self) -> float | None:
        """By how much energies at two clocks of an operation may be off against each other.

        Standard deviation as a fraction; None: not known, and no errors are stated.
        """

    def describe(self) -> str:
        """The model, in sentences for a sidecar."""

    def describe_rates(self) -> str:
        """The rates that it takes for all work, to end a sentence; nothing if there are none."""


def operation_model(device: ModelledGpu, precision: str, *, has_kernels: bool) -> OperationModel:
    """The model of a GPU.

    Args:
        device: the GPU.
        precision: "half" or "single".
        has_kernels: whether the kernels of the work are known.
    """
    kernels = kernel_model(device)
    if kernels is None or not has_kernels or precision != "half":
        return _ByTotals(device, precision)
    return _ByKernels(kernels)


@dataclass(frozen=True)
class _ByTotals:
    """Arithmetic over a rate, and traffic over a bandwidth."""

    gpu: ModelledGpu
    precision: str
    error_between_clocks: ClassVar = None

    def costs(
        self, work: Work, clocks_mhz: Sequence[int], *, is_forward: bool
    ) -> Iterator[OperationCost]:
        activity = _FORWARD_ACTIVITY if is_forward else _BACKWARD_ACTIVITY
        for clock_mhz in clocks_mhz:
            time_s = self._time_s(work, clock_mhz)
            yield OperationCost(time_s, time_s * self.gpu.power_w(clock_mhz, activity))

    def time_at_highest_s(self, work: Work) -> float:
        return self._time_s(work, self.gpu.clocks_mhz[0])

    def _time_s(self, work: Work, clock_mhz: int) -> float:
        return self.gpu.time_s(work.flops, work.traffic, clock_mhz, self.precision)

    def describe(self) -> str:
        return (
            "Modelled, not measured: t = a + b / f, P = P_static + k f V(f)^2, held to "
            f"{self.gpu.power_limit_w:g} W; parameters and their sources are in "
            "envplan.devices.modelled, residuals against measured points in docs/profiles.md."
        )

    def describe_rates(self) -> str:
        return (
            f"; {self.gpu.compute_efficiency:.0%} of the peak reached in matrix products and "
            f"{self.gpu.memory_efficiency:.0%} of the bandwidth elsewhere"
        )


@dataclass(frozen=True)
class _ByKernels:
    """The sum of an operation's kernels.

    The error of a kernel's shape is the same in every layer, and those of different shapes are
    taken for independent.
    """

    kernels: KernelModel
    _settled_mhz: dict[Kernel, FloatArray] = field(default_factory=dict)

    @property
    def gpu(self) -> ModelledGpu:
        return self.kernels.gpu

    @property
    def error_between_clocks(self) -> float:
        """As the model of the kernels says."""
        return self.kernels.error_between_clocks

    def costs(
        self, work: Work, clocks_mhz: Sequence[int], *, is_forward: bool
    ) -> Iterator[OperationCost]:
        clocks = np.array(clocks_mhz, dtype=np.float64)
        time_s, energy_j, time_variance, energy_variance = np.zeros((4, len(clocks)))
        for kernel, count in work.kernels.items():
            cost = self._cost(kernel, clocks)
            kind = self.kernels.kinds[kernel.kind]
            kernel_s = count * cost.time_s
            kernel_j = kernel_s * cost.power_w
            time_s = time_s + kernel_s
            energy_j = energy_j + kernel_j
            time_variance = time_variance + (kind.time_error * kernel_s) ** 2
            error = math.hypot(kind.time_error, kind.power_error)
            energy_variance = energy_variance + (error * kernel_j) ** 2
        energy_variance = energy_variance + (self.error_between_clocks * energy_j) ** 2
        costs = np.stack([time_s, energy_j, np.sqrt(time_variance), np.sqrt(energy_variance)])
        for row in costs.T.tolist():
            yield OperationCost(*row)

    def _cost(self, kernel: Kernel, clocks_mhz: FloatArray) -> KernelCost:
        """What a kernel costs; the clock that the limit leaves it is found once."""
        if kernel not in self._settled_mhz:
            self._settled_mhz[kernel] = self.kernels.capped_clock_mhz(kernel)
        settled_mhz = np.minimum(clocks_mhz, self._settled_mhz[kernel])
        return self.kernels.cost_without_limit(kernel, settled_mhz)

    def time_at_highest_s(self, work: Work) -> float:
        highest_mhz = self.gpu.clocks_mhz[:1]
        return next(self.costs(work, highest_mhz, is_forward=True)).time_s

    def describe(self) -> str:
        return (
            "Modelled kernel by kernel, not measured: time and power of each shape as fitted to "
            f"{self.kernels.source}; how both change with the clock, P = P_static + k f V(f)^2, is "
            f"assumed; held to {self.gpu.power_limit_w:g} W. time_std and energy_std are the "
            "model's error on kernels kept aside from its fit, not spread from run to run; "
            "residuals are in docs/profiles.md."
        )

    def describe_rates(self) -> str:
        return ""
