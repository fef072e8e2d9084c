"""Known GPUs and a model of the time and energy they need at each clock. All figures are modelled.

Time of an operation at SM clock f (MHz) is t(f) = a + b / f: a is memory traffic over bandwidth,
which the SM clock does not touch, b is arithmetic. Power while computing is

    P(f) = P_static + activity x k f v(f)^2,    v(f) = 1 up to the knee, 1 + g (f - knee) above,

dynamic CMOS power with the voltage v relative to its floor. A GPU that would exceed its power
limit settles at the clock it can afford, so that asking for more changes nothing: time and energy
are flat there. What settles the clock is full activity; an operation of lower activity draws
less than the limit on average. P_static includes what the memory draws while it is busy.

Where the figures come from:

- clocks, power limits, peak rates and bandwidths: NVIDIA's data sheets.
- A40: P_static, k, knee and g fitted to the sweep of SM clocks over GPT-3 175B stages that the
  Perseus artifact publishes (SOSP 2024; stage_profile/gpt3-175b+a40_bf16 in ml-energy/zeus,
  forward, 855 to 1455 MHz) and to the A40 points of the Zeus documentation (last stage's backward,
  660 to 690 MHz): relative error 0.4% rms, 1.2% at most, over times and powers.
- A100 SXM4: the same from stage_profile/gpt3-175b+a100_sxm_bf16, 855 to 1350 MHz: 0.6% rms, 1.6%
  at most. That machine drew up to 480 W; the limit here is the data sheet's 400 W.
- A100 PCIe: knee and g near those of the SXM4, P_static and k fitted to time and energy of whole
  iterations of GPT-3, Bloom and BERT under power limits of 225 to 300 W in the same artifact
  (zeus_global), with a, b and the busy share free for each: 0.8% at most. The 40 GB card is the
  same with its lower limit.
- V100, P100, RTX 6000: fitted by `tools.gpu_models` to time and energy under power limits
  that the Zeus repository publishes (summary_power_*.csv), with a, b, waits for the host and
  activity free for each workload; activity 1 is the transformers' median. The V100 measured took
  limits of 100 to 250 W and is taken for the PCIe card; the SXM2 card gets the same parameters
  (the same chip) with its own clocks and limit.
- RTX 3090 and H100: no points. The 3090 takes the A40's values (the same GA102 chip), the H100
  plausible ones that hold it at its limit under dense products.
- compute efficiency: A40 so that a GPT-3 1.3B stage meets the Zeus documentation's times, A100 so
  that it meets the forward of the Perseus artifact's gpt3-xl; others assumed. Memory: assumed.
- blocking power: 60 to 90 W were seen on waits for neighbours; its split between idle and clock
  is assumed.

How far the model is from every measured file is in docs/profiles.md, which the fit writes.

Two things to know. Energy of the A40 points of the Zeus documentation rises from 690 down to 660
MHz, so that stage's valley lies above 690 MHz; the measured 175B stages have theirs at 1050
(forward) and 945 MHz (backward), and the model puts it at 1050 to 1125 MHz. And the model saves
less at the valley than the A40 did (about 21% where 26% was measured): the measured backward gets
faster from 990 down to 960 MHz, which a + b / f cannot say.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

from envplan.errors import InputError

__all__ = ["GPUS", "ModelledGpu", "gpu"]


@dataclass(frozen=True, kw_only=True)
class ModelledGpu:
    """A GPU's data sheet and the parameters of its model.

    Attributes:
        key: short name, as on the command line.
        name: the name NVML gives it.
        clocks_mhz: supported SM clocks, descending.
        memory_clock_mhz: the memory clock that goes with them under CUDA.
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
    """

    key: str
    name: str
    clocks_mhz: tuple[int, ...]
    memory_clock_mhz: int
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

    def uncapped_power_w(self, clock_mhz: float, activity: float = 1.0) -> float:
        """P(f), W, were there no power limit."""
        voltage = 1.0 + self.voltage_slope_per_mhz * max(0.0, clock_mhz - self.knee_mhz)
        dynamic = self.dynamic_power_w_per_mhz * clock_mhz * voltage * voltage
        return self.static_power_w + activity * dynamic

    @cached_property
    def capped_clock_mhz(self) -> float:
        """The highest clock the power limit lets full activity hold, MHz."""
        low, high = 0.0, float(self.clocks_mhz[0])
        if self.uncapped_power_w(high) <= self.power_limit_w:
            return high
        for _ in range(60):  # bisection, down to the last bit
            middle = (low + high) / 2
            if self.uncapped_power_w(middle) <= self.power_limit_w:
                low = middle
            else:
                high = middle
        return low

    def settled_clock_mhz(self, clock_mhz: float) -> float:
        """The clock an operation really runs at when `clock_mhz` is asked for."""
        return min(clock_mhz, self.capped_clock_mhz)

    def time_s(
        self, flops: float, traffic: float, clock_mhz: float, precision: str = "half"
    ) -> float:
        """t(f) of an operation, s.

        Args:
            flops: its floating-point operations.
            traffic: bytes that its memory-bound kernels move.
            clock_mhz: the clock asked for.
            precision: of its matrix products, "half" or "single".
        """
        peak = self.peak_flops_per_mhz
        if precision == "single":
            if self.single_flops_per_mhz is None:
                raise InputError(f"single precision is not modelled for the {self.name}")
            peak = self.single_flops_per_mhz
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
    """The modelled GPU of a short name such as "a40".

    Raises:
        InputError: there is none; the message lists those there are.
    """
    try:
        return GPUS[key.lower()]
    except KeyError:
        raise InputError(
            f"there is no modelled GPU {key!r}; there are: {', '.join(GPUS)}"
        ) from None


def _steps(lowest: int, highest: int, step: int) -> tuple[int, ...]:
    return tuple(range(highest, lowest - 1, -step))


def _a100(
    key: str,
    name: str,
    *,
    memory_clock_mhz: int,
    power_limit_w: float,
    bandwidth: float,
    static_power_w: float,
    dynamic_power_w_per_mhz: float,
) -> ModelledGpu:
    return ModelledGpu(
        key=key,
        name=name,
        clocks_mhz=_steps(210, 1410, 15),
        memory_clock_mhz=memory_clock_mhz,
        power_limit_w=power_limit_w,
        peak_flops_per_mhz=312e12 / 1410,
        bandwidth=bandwidth,
        compute_efficiency=0.57,
        static_power_w=static_power_w,
        dynamic_power_w_per_mhz=dynamic_power_w_per_mhz,
        knee_mhz=1096.0,
        voltage_slope_per_mhz=7.0e-4,
        idle_power_w=66.0,
    )


def _v100(key: str, name: str, *, highest_mhz: int, power_limit_w: float) -> ModelledGpu:
    return ModelledGpu(
        key=key,
        name=name,
        clocks_mhz=tuple(
            135 + 15 * half // 2 for half in range((highest_mhz - 135) * 2 // 15, -1, -1)
        ),
        memory_clock_mhz=877,
        power_limit_w=power_limit_w,
        peak_flops_per_mhz=125e12 / 1530,
        single_flops_per_mhz=80 * 64 * 2 * 1e6,
        bandwidth=900e9,
        compute_efficiency=0.65,
        static_power_w=50.5,
        dynamic_power_w_per_mhz=0.1355,
        knee_mhz=807.0,
        voltage_slope_per_mhz=0.000489,
        idle_power_w=46.0,
        waiting_activity=0.06,
        host_wait_power_w=32.8,
    )


_PCIE: Final = {"static_power_w": 61.4, "dynamic_power_w_per_mhz": 0.1652}
_SXM4: Final = {"static_power_w": 50.5, "dynamic_power_w_per_mhz": 0.2153}

_ALL: Final = (
    _v100("v100", "Tesla V100-SXM2-16GB", highest_mhz=1530, power_limit_w=300.0),
    _v100("v100-pcie", "Tesla V100-PCIE-16GB", highest_mhz=1380, power_limit_w=250.0),
    ModelledGpu(
        key="p100",
        name="Tesla P100-PCIE-16GB",
        clocks_mhz=tuple(step * 405 // 32 for step in range(105, 42, -1)),
        memory_clock_mhz=715,
        power_limit_w=250.0,
        peak_flops_per_mhz=56 * 64 * 4 * 1e6,
        bandwidth=732e9,
        compute_efficiency=0.65,
        static_power_w=93.5,
        dynamic_power_w_per_mhz=0.0768,
        knee_mhz=465.0,
        voltage_slope_per_mhz=0.0,
        idle_power_w=40.0,
        host_wait_power_w=23.4,
    ),
    ModelledGpu(
        key="rtx6000",
        name="Quadro RTX 6000",
        clocks_mhz=_steps(300, 2100, 15),
        memory_clock_mhz=7001,
        power_limit_w=260.0,
        peak_flops_per_mhz=130.5e12 / 1770,
        bandwidth=672e9,
        compute_efficiency=0.65,
        static_power_w=83.8,
        dynamic_power_w_per_mhz=0.0341,
        knee_mhz=793.0,
        voltage_slope_per_mhz=0.00053,
        idle_power_w=55.0,
        host_wait_power_w=56.7,
    ),
    ModelledGpu(
        key="rtx3090",
        name="NVIDIA GeForce RTX 3090",
        clocks_mhz=_steps(210, 2100, 15),
        memory_clock_mhz=9501,
        power_limit_w=350.0,
        peak_flops_per_mhz=71e12 / 1695,
        bandwidth=936e9,
        compute_efficiency=0.80,
        static_power_w=85.7,
        dynamic_power_w_per_mhz=0.1064,
        knee_mhz=1128.0,
        voltage_slope_per_mhz=5.32e-4,
        idle_power_w=66.0,
    ),
    ModelledGpu(
        key="a40",
        name="NVIDIA A40",
        clocks_mhz=_steps(210, 1740, 15),
        memory_clock_mhz=7251,
        power_limit_w=300.0,
        peak_flops_per_mhz=149.7e12 / 1740,
        bandwidth=696e9,
        compute_efficiency=0.80,
        static_power_w=85.7,
        dynamic_power_w_per_mhz=0.1064,
        knee_mhz=1128.0,
        voltage_slope_per_mhz=5.32e-4,
        idle_power_w=64.0,
        host_wait_power_w=82.4,
    ),
    _a100(
        "a100-pcie-40gb",
        "NVIDIA A100-PCIE-40GB",
        memory_clock_mhz=1215,
        power_limit_w=250.0,
        bandwidth=1555e9,
        **_PCIE,
    ),
    _a100(
        "a100-pcie-80gb",
        "NVIDIA A100 80GB PCIe",
        memory_clock_mhz=1512,
        power_limit_w=300.0,
        bandwidth=1935e9,
        **_PCIE,
    ),
    _a100(
        "a100-sxm4-40gb",
        "NVIDIA A100-SXM4-40GB",
        memory_clock_mhz=1215,
        power_limit_w=400.0,
        bandwidth=1555e9,
        **_SXM4,
    ),
    _a100(
        "a100-sxm4-80gb",
        "NVIDIA A100-SXM4-80GB",
        memory_clock_mhz=1593,
        power_limit_w=400.0,
        bandwidth=2039e9,
        **_SXM4,
    ),
    ModelledGpu(
        key="h100-sxm",
        name="NVIDIA H100 80GB HBM3",
        clocks_mhz=_steps(345, 1980, 15),
        memory_clock_mhz=2619,
        power_limit_w=700.0,
        peak_flops_per_mhz=989.4e12 / 1830,
        bandwidth=3350e9,
        compute_efficiency=0.60,
        static_power_w=110.0,
        dynamic_power_w_per_mhz=0.26,
        knee_mhz=1200.0,
        voltage_slope_per_mhz=5.0e-4,
        idle_power_w=60.0,
    ),
)

#: The modelled GPUs by short name.
GPUS: Final = {model.key: model for model in _ALL}
