"""How lower clocks act on serving: modelled, and held against what was measured.

At clock f, in place of the highest F, arithmetic takes F/f times as long; reading memory takes as
long as before, and the software of steps and requests, which runs on the host, too. Short kernels
and messages are in between. Power falls to

    P(f) = P_fixed + (P - P_fixed) f v(f)^2 / (F v(F)^2)

with the voltage v of the GPU's model (devices.modelled). P_fixed, what does not depend on the SM
clock, is mostly the memory's. docs/serving-profile.md has the measurements beside it.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from envplan.devices.modelled import ModelledGpu
from envplan.serving.classes import FloatArray
from envplan.serving.identify.terms import STEP_TERMS

#: Share of each term's time that goes with 1/f; those that are not here do not depend on the clock.
_CLOCKED: Final = {
    "layers": 0.3,
    "exchange": 0.3,
    "requests": 0.3,
    "arithmetic": 1.0,
    "prompts": 0.85,
    "expert_prompts": 0.85,
}
#: P_fixed, as a share of the power limit: 325 of 700 W, from how the energy of decoding Llama2-70B
#: on H100 depends on the clock (DynamoLLM, HPCA 2025).
_FIXED_POWER: Final = 0.46
#: Clocks of a profile, as shares of the highest.
_SHARES: Final = (0.4, 0.5, 0.6, 0.75, 1.0)


def profile_clocks(device: ModelledGpu) -> list[int]:
    """The clocks that a profile has, ascending: supported ones, the highest among them."""
    highest = max(device.clocks_mhz)
    clocks = set()
    for share in _SHARES:
        clocks.add(min(device.clocks_mhz, key=lambda mhz: abs(mhz - share * highest)))
    return sorted(clocks)


def term_slowness(device: ModelledGpu, clock_mhz: float) -> FloatArray:
    """How many times as long each term of a step takes as at the highest clock."""
    ratio = max(device.clocks_mhz) / clock_mhz
    clocked = np.array([_CLOCKED.get(name, 0.0) for name in STEP_TERMS])
    slowness: FloatArray = 1 - clocked + clocked * ratio
    return slowness


def power_at(
    device: ModelledGpu, power_limit_w: float, highest_w: FloatArray, clock_mhz: float
) -> FloatArray:
    """Power of a GPU at a clock, W, from that at the highest clock."""
    fixed_w = np.minimum(_FIXED_POWER * power_limit_w, highest_w)
    ratio = _dynamic_power(device, clock_mhz) / _dynamic_power(device, max(device.clocks_mhz))
    power_w: FloatArray = fixed_w + (highest_w - fixed_w) * ratio
    return power_w


def _dynamic_power(device: ModelledGpu, clock_mhz: float) -> float:
    """F v(f)^2."""
    rise = device.voltage_slope_per_mhz * max(0.0, clock_mhz - device.knee_mhz)
    return float(clock_mhz * (1 + rise) ** 2)
