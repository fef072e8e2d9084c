"""GPUs as they are now, in JSON types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

from envplan.devices import opened
from envplan.devices.base import Device, DeviceError, within

__all__ = ["describe_gpus"]

T = TypeVar("T")

#: How long one GPU may take to answer, s.
_PATIENCE_S: Final = 10.0


def describe_gpus(name: str, **options: Any) -> list[dict[str, Any]]:
    """What is known of each GPU of a backend, and why its clock may not be set (`refusal`).

    No clock is changed. Of a GPU that is lost, or hangs, only why nothing is known.
    """
    with opened(name, **options) as source:
        found = [_describe_or_say(device, k) for k, device in enumerate(source.devices())]
    return [{"gpu": options.get("gpu"), **entry} for entry in found]


def _describe_or_say(device: Device, index: int) -> dict[str, Any]:
    try:
        return within(_PATIENCE_S, lambda: _describe(device), f"GPU {index}")
    except DeviceError as error:
        return {**dict.fromkeys(_FIELDS), "index": index, "refusal": str(error)}


_FIELDS = (
    *("index", "name", "uuid", "driver", "source", "supported_clocks_mhz", "power_limit_w"),
    *("clock_mhz", "power_w", "throttle_reasons", "energy_source", "mig", "refusal"),
)


def _describe(device: Device) -> dict[str, Any]:
    info = device.info
    real = info.source == "measured"  # a modelled GPU is doing nothing now
    facts = (
        info.index,
        info.name,
        info.uuid,
        info.driver,
        info.source,
        list(info.supported_clocks),
        info.power_limit,
        _told(device.clock) if real else None,
        _told(device.power) if real else None,
        list(_told(device.throttle_reasons) or ()) if real else [],
        info.energy_source,
        info.mig,
        device.can_lock(),
    )
    return dict(zip(_FIELDS, facts, strict=True))


def _told(read: Callable[[], T]) -> T | None:
    """What a GPU says of its state now; some cards do not."""
    try:
        return read()
    except DeviceError:
        return None
