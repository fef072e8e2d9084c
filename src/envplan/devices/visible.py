"""Which GPUs are this process's own: CUDA may hide some, and the driver shows all.

CUDA counts the GPUs that CUDA_VISIBLE_DEVICES names; the driver's indices stay what they are. A
clock set by the wrong count is that of somebody else's GPU. (CUDA's order is taken for the
driver's, as it is where all GPUs are alike or CUDA_DEVICE_ORDER is PCI_BUS_ID.)
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from enum import StrEnum
from typing import Final

from envplan.devices import Backend, Device, DeviceError

__all__ = ["Counted", "choose", "uuid_of", "visible_gpus"]

_VARIABLE: Final = "CUDA_VISIBLE_DEVICES"


class Counted(StrEnum):
    """Who counts GPUs."""

    BY_DRIVER = "driver"
    BY_PLAN = "plan"
    BY_CUDA = "cuda"


def choose(source: Backend, number: int, counted: Counted) -> Device:
    """The GPU of a number, as the driver, a plan or CUDA count them.

    Where this process has one GPU only, a plan and CUDA mean that one.

    Raises:
        DeviceError: there is none, or CUDA hides it from this process.
    """
    devices = source.devices()
    index: int | None = number
    count, where = len(devices), ""
    if source.real and counted is not Counted.BY_DRIVER and _VARIABLE in os.environ:
        visible = visible_gpus(devices)
        shown = f"{_VARIABLE}={os.environ[_VARIABLE]}"
        if len(visible) == 1:
            index = visible[0]
        elif counted is Counted.BY_CUDA:
            count, where = len(visible), f", with {shown}"
            index = visible[number] if number < count else None
        elif number not in visible:
            raise DeviceError(
                f"GPU {number}, which the plan names, is hidden by {shown}; name this job's GPUs "
                "with envplan apply --devices, or this rank's with device="
            )
    if index is not None and 0 <= index < len(devices):
        return devices[index]
    raise DeviceError(f"there is no GPU {number}; there are {count}, counted from 0{where}")


def visible_gpus(devices: Sequence[Device]) -> list[int]:
    """Driver indices of the GPUs that CUDA shows this process, as CUDA counts them.

    Args:
        devices: all GPUs, by driver index.
    """
    if _VARIABLE not in os.environ:
        return list(range(len(devices)))
    found: list[int] = []
    for name in os.environ[_VARIABLE].split(","):
        index = _index(devices, name.strip())
        if index is None:  # CUDA, too, takes no notice of what follows
            break
        found.append(index)
    return found


def _index(devices: Sequence[Device], name: str) -> int | None:
    """The GPU of a number, or of a UUID or its beginning."""
    if name.isdecimal():
        return int(name) if int(name) < len(devices) else None
    fits = [k for k, device in enumerate(devices) if uuid_of(device).startswith(name)]
    return fits[0] if name.startswith("GPU-") and len(fits) == 1 else None


def uuid_of(device: Device) -> str:
    """A GPU's UUID, or "" for one that does not tell it."""
    try:
        return device.info.uuid
    except DeviceError:  # it is lost, so nobody uses it
        return ""
