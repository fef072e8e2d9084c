"""GPUs that are not there: the models of `envplan.devices.modelled` behind the device protocol."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import ClassVar

from envplan.devices.base import DeviceError, DeviceInfo
from envplan.devices.modelled import GPUS, ModelledGpu
from envplan.devices.modelled import gpu as modelled_gpu
from envplan.errors import InputError

__all__ = ["ModelledBackend", "ModelledDevice", "VirtualClock"]


class VirtualClock:
    """A time that passes only when told to, for a backend whose work takes no real time."""

    def __init__(self) -> None:
        self._now = 0

    def __call__(self) -> int:
        """The time now, ns."""
        return self._now

    def advance(self, ns: int) -> None:
        """Let `ns` nanoseconds pass."""
        self._now += ns


class ModelledBackend:
    """GPUs of one model, in this process only.

    Args:
        gpu: short name of the model, such as "a40".
        count: how many.
        now: tells the time, ns. Default: real time; a VirtualClock passes when stepped.

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
        model = modelled_gpu(gpu)
        self._devices = tuple(ModelledDevice(model, index, now) for index in range(count))

    def devices(self) -> Sequence[ModelledDevice]:
        """All GPUs, by index."""
        return self._devices

    @classmethod
    def models(cls) -> Sequence[str]:
        """The models by short name."""
        return tuple(GPUS)

    def close(self) -> None:
        """Nothing to let go of."""


class ModelledDevice:
    """One modelled GPU: at work, drawing the power of its model, until told otherwise.

    Args:
        model: what it is.
        index: its index.
        now: tells the time, ns.
    """

    def __init__(self, model: ModelledGpu, index: int, now: Callable[[], int]) -> None:
        self.model = model
        self._now = now
        self._locked: int | None = None
        self._activity: float | None = 1.0
        self._picojoules = 0.0  # W x ns x 1000
        self._since = now()
        self._info = DeviceInfo(
            index=index,
            name=model.name,
            uuid=f"modelled-{model.key}-{index}",
            driver="modelled",
            supported_clocks=tuple(sorted(model.clocks_mhz)),
            max_clock=max(model.clocks_mhz),
            power_limit=model.power_limit_w,
            source="modelled",
            energy_source="modelled",
        )

    @property
    def info(self) -> DeviceInfo:
        """What stays the same about it."""
        return self._info

    @property
    def activity(self) -> float | None:
        """How hard it works, 1 for dense products; None while it waits for a neighbour."""
        return self._activity

    @activity.setter
    def activity(self, activity: float | None) -> None:
        self._settle()
        self._activity = activity

    def lock_clock(self, mhz: int) -> None:
        """Run at the supported clock nearest below `mhz`, or at the lowest.

        Raises:
            DeviceError: the clock is not positive.
        """
        if mhz <= 0:
            raise DeviceError(f"GPU {self._info.index}: cannot run at {mhz} MHz")
        self._settle()
        clocks = self._info.supported_clocks
        self._locked = max((clock for clock in clocks if clock <= mhz), default=clocks[0])

    def reset_clock(self) -> None:
        """Give the clock back: it runs as fast as it can."""
        self._settle()
        self._locked = None

    def can_lock(self, *, probe: bool = False) -> str | None:
        """None: everybody may."""
        return None

    def clock(self) -> int:
        """The SM clock now, MHz."""
        if self._activity is None:
            return self._asked()
        return int(self.model.settled_clock_mhz(self._asked()))

    def held_at(self) -> int:
        """The clock it is locked at, MHz, or 0."""
        return self._locked or 0

    def energy(self) -> int:
        """Energy used since it was created, mJ."""
        self._settle()
        return int(self._picojoules / 1e9)

    def power(self) -> float:
        """Power drawn now, W."""
        if self._activity is None:
            return self.model.blocking_power_w(self._asked())
        return self.model.power_w(self._asked(), self._activity)

    def throttle_reasons(self) -> Sequence[str]:
        """("power cap",) while it works at less than the clock it was given, else empty."""
        held = self._activity is not None and self.model.capped_clock_mhz < self._asked()
        return ("power cap",) if held else ()

    def _asked(self) -> int:
        return self._info.max_clock if self._locked is None else self._locked

    def _settle(self) -> None:
        """Account for the energy up to now, before what it depends on changes."""
        now = self._now()
        self._picojoules += self.power() * (now - self._since) * 1e3
        self._since = now
