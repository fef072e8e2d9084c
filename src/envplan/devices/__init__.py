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
    "opened",
    "within",
]

#: Backends by name. A new one is one module and one line here.
_CLASSES: Final = {
    "nvml": ("envplan.devices.nvml", "NvmlBackend"),
    "zeusd": ("envplan.devices.zeusd", "ZeusdBackend"),
    "modelled": ("envplan.devices.modelled_backend", "ModelledBackend"),
}
BACKENDS: Final = tuple(_CLASSES)
#: As with Zeus, whoever names zeusd's socket has zeusd set clocks.
DEFAULT_BACKEND: Final = "zeusd" if os.environ.get("ZEUSD_SOCK_PATH") else "nvml"

#: How long a driver may take to start or to stop, s.
_PATIENCE_S: Final = 30.0
_CLOSE_S: Final = 5.0


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
