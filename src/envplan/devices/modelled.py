"""Known GPUs: a model of the time and energy they need at each clock, and devices that follow it.

Time of an operation at SM clock f (MHz) is t(f) = a + b / f: a is memory traffic over bandwidth,
which the SM clock does not touch, b is arithmetic. Power while computing is

    P(f) = P_static + activity x k f v(f)^2,    v(f) = 1 up to the knee, 1 + g (f - knee) above,

dynamic CMOS power with the voltage v relative to its floor. A GPU that would exceed its power
limit settles at the clock it can afford, so that asking for more changes nothing: time and energy
are flat there. What settles the clock is full activity; an operation of lower activity draws
less than the limit on average. P_static includes what the memory draws while it is busy.

The GPUs, their figures and where these come from are in gpus.toml, beside this file. A further GPU
is a table there.

How far the model is from every measured file is in docs/profiles.md, which the fit writes.

Two things to know. Energy of the A40 points of the Zeus documentation rises from 690 down to 660
MHz, so that stage's valley lies above 690 MHz; the measured 175B stages have theirs at 1050
(forward) and 945 MHz (backward), and the model puts it at 1050 to 1125 MHz. And the model saves
less at the valley than the A40 did (about 21% where 26% was measured): the measured backward gets
faster from 990 down to 960 MHz, which a + b / f cannot say.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Final, cast

from envplan._io.markup import read_toml
from envplan.devices import Backend, Device, DeviceError, DeviceInfo
from envplan.errors import InputError, meant

__all__ = ["ALIASES", "GPUS", "ModelledBackend", "ModelledDevice", "ModelledGpu", "gpu"]


#: A clock is searched for in steps of one MHz over this: about what a float can tell.
_STEPS_PER_MHZ: Final = 2**42


@dataclass(frozen=True, kw_only=True)
class PublishedLatency:
    """How late clocks come after they are asked for, as somebody else has found on some GPU.

    Attributes:
        gpu: that it was found on.
        most_ms: at most, ms.
        least_ms: at least, ms; None where the source does not say.
        source: where it is published.
    """

    gpu: str
    most_ms: float
    least_ms: float | None = None
    source: str

    def __str__(self) -> str:
        """Such as `5 to 22 ms on an A100 (arXiv 2502.20075)`."""
        least = "up to" if self.least_ms is None else f"{self.least_ms:g} to"
        return f"{least} {self.most_ms:g} ms on {self.gpu} ({self.source})"


@dataclass(frozen=True, kw_only=True)
class ModelledGpu:
    """A GPU's data sheet and the parameters of its model.

    Attributes:
        key: short name, as on the command line.
        name: the name NVML gives it.
        clocks_mhz: supported SM clocks, descending.
        memory_clock_mhz: the memory clock that goes with them under CUDA.
        memory_gb: its memory, GB.
        power_limit_w: the limit at which clocks settle, W.
        peak_flops_per_mhz: dense half-precision FLOP/s for each MHz of SM clock.
        single_flops_per_mhz: the same in single precision; None where no profile needs it.
        bandwidth: memory bandwidth, bytes/s.
        compute_efficiency: share of the peak that matrix products reach.
        memory_efficiency: share of the bandwidth that other kernels reach.
        static_power_w: P_static.
        dynamic_power_w_per_mhz: k at the voltage floor, W/MHz.
        knee_mhz: the clock above which voltage rises.
        voltage_slope_per_mhz: g, rise of the relative voltage for each MHz.
        idle_power_w: what waiting draws apart from its clock, W.
        waiting_activity: activity of a GPU that polls for its neighbour.
        host_wait_power_w: what it drew while the host of a measured workload kept it waiting, W;
            None where nothing was measured. Only `tools.gpu_models` uses it.
        published_latency: how late clocks come, by the literature; None where it has nothing. It
            is stated, and no plan is made with it.
    """

    key: str
    name: str
    clocks_mhz: tuple[int, ...]
    memory_clock_mhz: int
    memory_gb: float
    power_limit_w: float
    peak_flops_per_mhz: float
    bandwidth: float
    compute_efficiency: float
    memory_efficiency: float = 0.85
    static_power_w: float
    dynamic_power_w_per_mhz: float
    knee_mhz: float
    voltage_slope_per_mhz: float
    idle_power_w: float
    waiting_activity: float = 0.04
    single_flops_per_mhz: float | None = None
    host_wait_power_w: float | None = None
    published_latency: PublishedLatency | None = None

    def uncapped_power_w(self, clock_mhz: float, activity: float = 1.0) -> float:
        """P(f), W, were there no power limit."""
        voltage = 1.0 + self.voltage_slope_per_mhz * max(0.0, clock_mhz - self.knee_mhz)
        dynamic = self.dynamic_power_w_per_mhz * clock_mhz * voltage * voltage
        return self.static_power_w + activity * dynamic

    @cached_property
    def capped_clock_mhz(self) -> float:
        """The highest clock the power limit lets full activity hold, MHz.

        Power rises with the clock, so it is found by bisection: among the steps up to the highest
        clock, the first one whose end draws more than the limit.
        """

        def power_at_end_w(step: int) -> float:
            return self.uncapped_power_w((step + 1) / _STEPS_PER_MHZ)

        steps = range(self.clocks_mhz[0] * _STEPS_PER_MHZ)
        return bisect_right(steps, self.power_limit_w, key=power_at_end_w) / _STEPS_PER_MHZ

    def settled_clock_mhz(self, clock_mhz: float) -> float:
        """The clock an operation really runs at when `clock_mhz` is asked for."""
        return min(clock_mhz, self.capped_clock_mhz)

    def time_s(
        self, flops: float, traffic: float, clock_mhz: float, precision: str = "half"
    ) -> float:
        """t(f) of an operation, s.

        Args:
            flops: its floating-point operations.
            traffic: bytes that its memory-bound kernels move in half precision.
            clock_mhz: the clock asked for.
            precision: "half", or "single", which moves twice the bytes.
        """
        peak = self.peak_flops_per_mhz
        if precision == "single":
            if self.single_flops_per_mhz is None:
                raise InputError(f"single precision is not modelled for the {self.name}")
            peak, traffic = self.single_flops_per_mhz, 2 * traffic
        rate = self.compute_efficiency * peak * self.settled_clock_mhz(clock_mhz)
        return traffic / (self.memory_efficiency * self.bandwidth) + flops / rate

    def power_w(self, clock_mhz: float, activity: float = 1.0) -> float:
        """Power of an operation, W, at the clock it settles at."""
        return self.uncapped_power_w(self.settled_clock_mhz(clock_mhz), activity)

    def blocking_power_w(self, clock_mhz: float) -> float:
        """Power while waiting for a neighbour with the clock set to `clock_mhz`, W."""
        dynamic = self.uncapped_power_w(clock_mhz) - self.static_power_w
        return self.idle_power_w + self.waiting_activity * dynamic


def gpu(key: str) -> ModelledGpu:
    """The modelled GPU of a short name such as "a40" or "h100", or of the name NVML gives it.

    Raises:
        InputError: there is none; the message names the nearest.
    """
    name = key.lower()
    short_name = ALIASES.get(name, name)
    if short_name in GPUS:
        return GPUS[short_name]
    for model in GPUS.values():
        if model.name.lower() == name:
            return model
    known = f"; known: {', '.join(GPUS)}"
    raise InputError(f"there is no modelled GPU {key!r}{meant(key, [*GPUS, *ALIASES]) or known}")


def _read_gpus() -> dict[str, ModelledGpu]:
    tables = cast(Mapping[str, Mapping[str, Any]], read_toml(Path(__file__).parent / "gpus.toml"))
    return {key: _gpu_of_table(key, _complete_table(tables, key)) for key in tables}


def _complete_table(tables: Mapping[str, Mapping[str, Any]], key: str) -> dict[str, Any]:
    """A GPU's table, with what it shares with the one that it is like."""
    table = dict(tables[key])
    if "like" not in table:
        return table
    shared = _complete_table(tables, table.pop("like"))
    return {**shared, **table}


def _gpu_of_table(key: str, table: dict[str, Any]) -> ModelledGpu:
    """The GPU that a complete table of gpus.toml describes."""
    lowest_mhz, highest_mhz, step_mhz = table.pop("clocks_mhz")  # a step may be a fraction
    published = table.pop("published_latency", None)
    multiples = range(round(highest_mhz / step_mhz), round(lowest_mhz / step_mhz) - 1, -1)
    return ModelledGpu(
        key=key,
        clocks_mhz=tuple(int(step_mhz * multiple) for multiple in multiples),
        published_latency=PublishedLatency(**published) if published else None,
        peak_flops_per_mhz=table.pop("peak_flops") / table.pop("peak_clock_mhz"),
        **table,
    )


#: The modelled GPUs by short name.
GPUS: Final = _read_gpus()

#: What people call them.
ALIASES: Final = {
    "a100": "a100-sxm4-80gb",
    "a100-pcie": "a100-pcie-80gb",
    "a100-sxm": "a100-sxm4-80gb",
    "h100": "h100-sxm",
    "h200-sxm": "h200",
    "b200-sxm": "b200",
    "v100-sxm2": "v100",
}


#: The function `gpu`, for where an option of that name hides it.
_gpu_by_name: Final = gpu


class ModelledBackend(Backend):
    """GPUs of one model, in this process only.

    Args:
        gpu: short name of the model, such as "a40".
        count: how many.
        now: tells the time, ns; a test's own clock.

    Raises:
        InputError: there is no such model, or fewer than one GPU is wanted.
    """

    name: ClassVar = "modelled"
    real: ClassVar = False

    def __init__(
        self, gpu: str = "a40", count: int = 1, now: Callable[[], int] = time.monotonic_ns
    ) -> None:
        if count < 1:
            raise InputError(f"there must be at least one GPU, not {count}")
        model = _gpu_by_name(gpu)
        self._devices = tuple(ModelledDevice(model, index, now) for index in range(count))

    def devices(self) -> Sequence[ModelledDevice]:
        """All GPUs, by index."""
        return self._devices

    @classmethod
    def models(cls) -> Sequence[str]:
        """The short names of the models."""
        return tuple(GPUS)


class ModelledDevice(Device):
    """One modelled GPU, always at work, drawing the power of its model. Everybody may lock it.

    A clock that is asked for becomes the supported one nearest below, or the lowest.

    Args:
        model: what it is.
        index: its index.
        now: tells the time, ns.
    """

    def __init__(self, model: ModelledGpu, index: int, now: Callable[[], int]) -> None:
        self.model = model
        self._index = index
        self._now_ns = now
        self._locked_mhz = 0  # 0: not locked
        self._energy_pj = 0.0
        self._accounted_until_ns = now()

    @cached_property
    def info(self) -> DeviceInfo:
        """The properties of the model."""
        return DeviceInfo(
            index=self._index,
            name=self.model.name,
            uuid=f"modelled-{self.model.key}-{self._index}",
            driver="modelled",
            supported_clocks=self.model.clocks_mhz[::-1],
            max_clock=self.model.clocks_mhz[0],
            power_limit=self.model.power_limit_w,
            source="modelled",
            energy_source="modelled",
        )

    def lock_clock(self, mhz: int) -> None:
        """Run at the supported clock nearest below, or the lowest."""
        if mhz <= 0:
            raise DeviceError(f"GPU {self._index}: cannot run at {mhz} MHz")
        self._account_energy()
        clocks = self.model.clocks_mhz
        self._locked_mhz = next((clock for clock in clocks if clock <= mhz), clocks[-1])

    def reset_clock(self) -> None:
        """Run at the highest clock."""
        self._account_energy()
        self._locked_mhz = 0

    def lock_refusal(self, *, probe: bool = False) -> str | None:
        """Everybody may lock it, so None."""
        return None

    def clock(self) -> int:
        """The requested clock, or what the power limit leaves of it, MHz."""
        return int(self.model.settled_clock_mhz(self._requested_mhz()))

    def apparent_locked_clock(self) -> int:
        """The clock it is locked at, MHz; 0: none."""
        return self._locked_mhz

    def energy(self) -> int:
        """Energy used since it was made, mJ."""
        self._account_energy()
        return int(self._energy_pj / 1e9)

    def power(self) -> float:
        """Power at the present clock, W."""
        return self.model.power_w(self._requested_mhz())

    def throttle_reasons(self) -> Sequence[str]:
        """The power cap, where that holds the clock back."""
        return ("power cap",) if self.model.capped_clock_mhz < self._requested_mhz() else ()

    def _requested_mhz(self) -> int:
        """The clock it is locked at, or else the highest."""
        return self._locked_mhz or self.model.clocks_mhz[0]

    def _account_energy(self) -> None:
        """Account for the energy up to now, before the power changes."""
        now_ns = self._now_ns()
        # W times ns are nJ.
        self._energy_pj += self.power() * (now_ns - self._accounted_until_ns) * 1e3
        self._accounted_until_ns = now_ns
