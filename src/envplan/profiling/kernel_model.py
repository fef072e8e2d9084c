"""How long kernels take and what they draw, at every clock of a GPU.

A kernel computes and moves data at once. At SM clock f (MHz) it takes

    t(f) = start + (math(f)^s + memory^s)^(1/s) + serial,
    math(f) = padded flops / (efficiency peak f)

where memory is bytes over the bandwidth that it reaches, s says how well one hides behind the
other, and serial is what is moved before and after. Power is that of the GPU (`devices.modelled`)
at an activity of

    activity(f) = base + math_weight math(f) / t(f) + memory_weight (memory + serial) / t(f)

A kernel that would draw more than the limit runs at the highest clock at which it does not.

Coefficients are in kernels.toml, beside this file. `tools.kernels` fits them to published
measurements, and docs/profiles.md says how far off they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from envplan._io.markup import read_toml
from envplan.devices.modelled import ModelledGpu, gpu
from envplan.profiling.kernels import Demand, FloatArray, Kernel, KernelKind

__all__ = ["KernelCost", "KernelModel", "kernel_model", "read_kernel_models"]

#: Halvings of the range of clocks: to a ten-thousandth of a MHz.
_BISECTIONS: Final = 24


class KernelCost(NamedTuple):
    """Time and power of a kernel.

    Attributes:
        time_s: seconds.
        power_w: on average over them, W.
        clock_mhz: that it ran at.
    """

    time_s: FloatArray
    power_w: FloatArray
    clock_mhz: FloatArray


@dataclass(frozen=True)
class KernelModel:
    """A GPU whose kernels are modelled one by one.

    Attributes:
        gpu: data sheet, and power by clock and activity.
        multiprocessors: SMs.
        base_activity: activity of any kernel.
        limit_share: of the power limit that the GPU keeps to.
        error_between_clocks: by how much energies at two clocks of a kernel may be off against each
            other, standard deviation as a fraction.
        kinds: coefficients by kind of kernel.
        source: what they are fitted to.
    """

    gpu: ModelledGpu
    multiprocessors: int
    base_activity: float
    limit_share: float
    error_between_clocks: float
    kinds: Mapping[str, KernelKind]
    source: str

    def cost(self, kernel: Kernel, clock_mhz: float | FloatArray) -> KernelCost:
        """Time and power of a kernel where a clock, or one of many, is asked for."""
        return self.cost_without_limit(kernel, np.minimum(clock_mhz, self.capped_clock_mhz(kernel)))

    def cost_without_limit(self, kernel: Kernel, clock_mhz: float | FloatArray) -> KernelCost:
        """The same, were there no power limit."""
        kind = self.kinds[kernel.kind]
        demand = kernel.demand(kind, self.multiprocessors)
        clocks_mhz = np.asarray(clock_mhz, dtype=np.float64)
        return self._cost_at(kind, demand, clocks_mhz)

    def _cost_at(self, kind: KernelKind, demand: Demand, clock_mhz: FloatArray) -> KernelCost:
        """Time and power at the clock that the GPU runs at."""
        rate = kind.efficiency * self.gpu.peak_flops_per_mhz * clock_mhz
        bandwidth = kind.memory_efficiency * self.gpu.bandwidth
        math_s = demand.padded_flops / rate
        memory_s = demand.num_bytes / bandwidth
        serial_s = demand.serial_bytes / bandwidth

        start_s = kind.start_us * 1e-6
        body_s = _overlapped_s(math_s, memory_s, kind.sharpness)
        time_s = start_s + body_s + serial_s

        math_share = math_s / time_s
        memory_share = (memory_s + serial_s) / time_s
        math_activity = kind.math_weight * math_share
        memory_activity = kind.memory_weight * memory_share
        activity = self.base_activity + math_activity + memory_activity
        return KernelCost(
            time_s=time_s,
            power_w=self._power_w(clock_mhz, activity),
            clock_mhz=clock_mhz,
        )

    def _power_w(self, clock_mhz: FloatArray, activity: FloatArray) -> FloatArray:
        """Power of the GPU at an activity."""
        gpu = self.gpu
        above_knee_mhz = np.maximum(0.0, clock_mhz - gpu.knee_mhz)
        voltage = 1 + gpu.voltage_slope_per_mhz * above_knee_mhz
        dynamic_w = gpu.dynamic_power_w_per_mhz * clock_mhz * voltage * voltage
        return gpu.static_power_w + activity * dynamic_w

    def capped_clock_mhz(self, kernel: Kernel) -> FloatArray:
        """The highest clock at which a kernel draws no more than the limit, by bisection."""
        kind = self.kinds[kernel.kind]
        demand = kernel.demand(kind, self.multiprocessors)
        limit_w = self.limit_share * self.gpu.power_limit_w

        def is_within_limit(clock_mhz: FloatArray) -> npt.NDArray[np.bool_]:
            cost = self._cost_at(kind, demand, clock_mhz)
            return cost.power_w <= limit_w

        shape = demand.num_bytes.shape
        lowest_mhz = np.full(shape, float(self.gpu.clocks_mhz[-1]))
        highest_mhz = np.full(shape, float(self.gpu.clocks_mhz[0]))
        within_mhz, beyond_mhz = lowest_mhz, highest_mhz
        for _ in range(_BISECTIONS):
            middle_mhz = (within_mhz + beyond_mhz) / 2
            is_within = is_within_limit(middle_mhz)
            within_mhz = np.where(is_within, middle_mhz, within_mhz)
            beyond_mhz = np.where(is_within, beyond_mhz, middle_mhz)
        is_free = is_within_limit(highest_mhz)
        return cast(FloatArray, np.where(is_free, highest_mhz, within_mhz))


def _overlapped_s(math_s: FloatArray, memory_s: FloatArray, sharpness: float) -> FloatArray:
    """Time of computing and moving data at once: the sum of their powers, and its root."""
    longer_s = np.maximum(math_s, memory_s)
    shorter_s = np.minimum(math_s, memory_s)
    # Without powers of small numbers.
    share = (shorter_s / longer_s) ** sharpness
    return longer_s * (1 + share) ** (1 / sharpness)


def kernel_model(device: ModelledGpu) -> KernelModel | None:
    """The model of a GPU's kernels; None where there is none for it."""
    return read_kernel_models().get(device.key)


@cache
def read_kernel_models() -> Mapping[str, KernelModel]:
    """The models in kernels.toml by the short name of their GPU."""
    path = Path(__file__).parent / "kernels.toml"
    tables = cast(Mapping[str, Mapping[str, Any]], read_toml(path))
    models = {}
    for key in tables:
        table = _complete_table(tables, key)
        models[key] = _model_of_table(key, table)
    return models


def _complete_table(tables: Mapping[str, Mapping[str, Any]], key: str) -> Mapping[str, Any]:
    """A GPU's table, with what it shares with the one that it is like."""
    table = tables[key]
    if "like" not in table:
        return table
    shared = tables[table["like"]]
    return {**shared, **table}


def _model_of_table(key: str, table: Mapping[str, Any]) -> KernelModel:
    kinds = {}
    for name, coefficients in table["kinds"].items():
        kinds[name] = KernelKind(**coefficients)
    return KernelModel(
        gpu=gpu(key),
        multiprocessors=table["multiprocessors"],
        base_activity=table["base_activity"],
        limit_share=table["limit_share"],
        error_between_clocks=table["error_between_clocks"],
        kinds=kinds,
        source=table["source"],
    )
