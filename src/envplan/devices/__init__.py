"""GPUs: how fast they compute, what they draw at each clock, and how to set their clocks."""

from __future__ import annotations

from typing import Any

from envplan.devices.base import Backend, Device, DeviceError, DeviceInfo, PermissionDeniedError
from envplan.errors import InputError

__all__ = [
    "BACKENDS",
    "Backend",
    "Device",
    "DeviceError",
    "DeviceInfo",
    "PermissionDeniedError",
    "backend",
]

#: Names of the backends, the real one first.
BACKENDS = ("nvml", "modelled")


def backend(name: str, **options: Any) -> Backend:
    """A source of GPUs, ready for use. Close it when done.

    Args:
        name: "nvml" for the GPUs of this machine, "modelled" for GPUs that are not there.
        options: for "modelled": see `envplan.devices.modelled_backend.ModelledBackend`.

    Raises:
        DeviceError: there is no driver, or it does not work; says what to do.
        InputError: there is no such backend, or no such modelled GPU.
    """
    if name == "nvml":
        from envplan.devices.nvml import NvmlBackend

        return NvmlBackend(**options)
    if name == "modelled":
        from envplan.devices.modelled_backend import ModelledBackend

        return ModelledBackend(**options)
    raise InputError(f"there is no backend {name!r}; there are: {', '.join(BACKENDS)}")
