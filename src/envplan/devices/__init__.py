"""GPUs: how fast they compute, what they draw at each clock, and how to set their clocks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any, Final

from envplan.devices.base import (
    Backend,
    Device,
    DeviceError,
    DeviceInfo,
    PermissionDeniedError,
    spaced_clocks,
    within,
)
from envplan.errors import InputError, unknown

__all__ = [
    "BACKENDS",
    "DEFAULT_BACKEND",
    "Backend",
    "Device",
    "DeviceError",
    "DeviceInfo",
    "PermissionDeniedError",
    "backend",
    "backend_class",
    "describe_gpus",
    "opened",
    "spaced_clocks",
    "within",
]

#: Backends by name. A new one is one module and one line here.
_CLASSES: Final = {
    "nvml": ("envplan.devices.nvml", "NvmlBackend"),
    "zeusd": ("envplan.devices.zeusd", "ZeusdBackend"),
    "modelled": ("envplan.devices.modelled", "ModelledBackend"),
}
BACKENDS: Final = tuple(_CLASSES)
#: As with Zeus, whoever names zeusd's socket has zeusd set clocks.
DEFAULT_BACKEND: Final = "zeusd" if os.environ.get("ZEUSD_SOCK_PATH") else "nvml"

#: How long a driver may take to start or to stop, s.
_PATIENCE_S: Final = 30.0
_CLOSE_S: Final = 5.0
#: How long one GPU may take to answer, s.
_ANSWER_S: Final = 10.0


def backend_class(name: str = DEFAULT_BACKEND) -> type[Backend]:
    """What a backend is and can do, without starting it.

    Raises:
        InputError: there is no such backend.
    """
    if name not in _CLASSES:
        raise InputError(unknown("backend", name, BACKENDS))
    module, class_name = _CLASSES[name]
    found: type[Backend] = getattr(import_module(module), class_name)
    return found


def backend(name: str = DEFAULT_BACKEND, **options: Any) -> Backend:
    """A source of GPUs, ready for use. Close it when done.

    Args:
        name: "nvml" for the GPUs of this machine, "zeusd" for the same with clocks set by the
            Zeus daemon, "modelled" for GPUs that are not there.
        options: see the backend's class.

    Raises:
        DeviceError: there is no driver, or it does not work; says what to do.
        InputError: there is no such backend, or no such modelled GPU.
    """
    return backend_class(name)(**options)


@contextmanager
def opened(name: str = DEFAULT_BACKEND, **options: Any) -> Iterator[Backend]:
    """A source of GPUs for as long as the context lasts; a driver that hangs is not waited for.

    Raises:
        DeviceError: as for `backend`, or the driver does not start in time.
        InputError: as for `backend`.
    """
    source = within(_PATIENCE_S, lambda: backend(name, **options), "the driver")
    try:
        yield source
    finally:
        with suppress(DeviceError):
            within(_CLOSE_S, source.close, "the driver")


def describe_gpus(name: str, **options: Any) -> list[dict[str, Any]]:
    """GPUs of a backend as they are now, in JSON types, and why a clock may not be set (`refusal`).

    No clock is changed. Of a GPU that is lost, or hangs, only why nothing is known.
    """
    with opened(name, **options) as source:
        found = [_describe_or_say(device, k) for k, device in enumerate(source.devices())]
    return [{"gpu": options.get("gpu"), **entry} for entry in found]


def _describe_or_say(device: Device, index: int) -> dict[str, Any]:
    try:
        return within(_ANSWER_S, lambda: _describe(device), f"GPU {index}")
    except DeviceError as error:
        return {**dict.fromkeys(_FIELDS), "index": index, "refusal": str(error)}


_FIELDS: Final = (
    *("index", "name", "uuid", "driver", "source", "supported_clocks_mhz", "power_limit_w"),
    *("clock_mhz", "power_w", "throttle_reasons", "energy_source", "mig", "refusal"),
)


def _describe(device: Device) -> dict[str, Any]:
    info, now = device.info, dict[str, Any]()
    reads = {"clock": device.clock, "power": device.power, "reasons": device.throttle_reasons}
    for name, read in reads.items() if info.source == "measured" else ():  # others do nothing now
        with suppress(DeviceError):  # some cards do not say
            now[name] = read()
    facts = (
        *(info.index, info.name, info.uuid, info.driver, info.source),
        *(list(info.supported_clocks), info.power_limit, now.get("clock"), now.get("power")),
        *(list(now.get("reasons", ())), info.energy_source, info.mig, device.can_lock()),
    )
    return dict(zip(_FIELDS, facts, strict=True))
