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

from envplan.devices.base import Backend, Device, DeviceError, device_at

__all__ = ["Counted", "choose", "gpu_of_rank", "planned_gpu", "uuid_of", "visible_gpus"]

_VARIABLE: Final = "CUDA_VISIBLE_DEVICES"


class Counted(StrEnum):
    """Who counts GPUs."""

    BY_DRIVER = "driver"
    BY_PLAN = "plan"
    BY_CUDA = "cuda"


def choose(source: Backend, number: int, counted: Counted) -> Device:
    """The GPU of a number, as the driver, a plan or CUDA count them.

    Raises:
        DeviceError: there is none, or CUDA hides it from this process.
    """
    devices = source.devices()
    if source.real and counted is Counted.BY_PLAN:
        number = planned_gpu(devices, number)
    elif source.real and counted is Counted.BY_CUDA:
        number = gpu_of_rank(devices, number)
    return device_at(devices, number)


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


def planned_gpu(devices: Sequence[Device], planned: int) -> int:
    """The GPU that a plan names, unless this process has one only, which then is it.

    Raises:
        DeviceError: CUDA hides it from this process.
    """
    visible = visible_gpus(devices)
    if _VARIABLE not in os.environ or planned in visible:
        return planned
    if len(visible) == 1:
        return visible[0]
    raise DeviceError(
        f"GPU {planned}, which the plan names, is hidden by {_VARIABLE}="
        f"{os.environ[_VARIABLE]}; name this job's GPUs with envplan apply --devices, or this "
        "rank's with device="
    )


def gpu_of_rank(devices: Sequence[Device], local_rank: int) -> int:
    """The GPU of a rank, of those that this process has: the only one, or that of its number.

    Raises:
        DeviceError: there are not so many.
    """
    visible = visible_gpus(devices)
    if local_rank < len(visible):
        return visible[local_rank]
    if _VARIABLE in os.environ and len(visible) == 1:
        return visible[0]
    raise DeviceError(
        f"there is no GPU {local_rank}; there are {len(visible)}, counted from 0"
        + (f", with {_VARIABLE}={os.environ[_VARIABLE]}" if _VARIABLE in os.environ else "")
    )


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
