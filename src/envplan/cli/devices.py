"""`envplan devices`: the GPUs there are, and whether their clocks may be set."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from envplan.cli.inputs import JsonOption

if TYPE_CHECKING:
    from envplan.devices import Device


class BackendName(StrEnum):
    """Where GPUs come from."""

    nvml = "nvml"
    modelled = "modelled"


BackendOption = Annotated[
    BackendName,
    typer.Option("--backend", help="GPUs of this machine (nvml), or modelled ones."),
]


def devices(
    backend: BackendOption = BackendName.nvml,
    gpu: Annotated[
        str | None, typer.Option("--gpu", metavar="NAME", help="Which modelled GPU; default: all.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """List the GPUs, and whether this user may set their clocks.

    No clock is changed by looking.

    \b
    Example:
      envplan devices
      envplan devices --backend modelled
      envplan devices --backend modelled --gpu a40 --json
    """
    from envplan.cli.output import print_json, print_table, say
    from envplan.errors import InputError

    if backend is BackendName.nvml:
        if gpu is not None:
            raise InputError("--gpu names a modelled GPU; add --backend modelled")
        found = _describe_all("nvml")
    else:
        found = [entry for key in _models(gpu) for entry in _describe_all("modelled", gpu=key)]
    if json:
        print_json(found)
        return
    print_table("", _HEADERS, [_row(entry) for entry in found], words=3)
    for refusal in (entry["refusal"] for entry in found):
        if refusal is not None:
            say(refusal)


_HEADERS = (
    "GPU",
    "name",
    "driver",
    "clocks (MHz)",
    "limit (W)",
    "now (MHz)",
    "now (W)",
    "energy",
    "may set clocks",
)


def _models(key: str | None) -> list[str]:
    from envplan.devices.modelled import GPUS

    return list(GPUS) if key is None else [key]


def _describe_all(name: str, **options: Any) -> list[dict[str, Any]]:
    from envplan.devices import backend

    source = backend(name, **options)
    try:
        label = options.get("gpu")
        return [{"gpu": label, **_describe(device)} for device in source.devices()]
    finally:
        source.close()


def _describe(device: Device) -> dict[str, Any]:
    info = device.info
    real = info.source == "measured"  # a modelled GPU is doing nothing now
    return {
        "index": info.index,
        "name": info.name,
        "uuid": info.uuid,
        "driver": info.driver,
        "source": info.source,
        "supported_clocks_mhz": list(info.supported_clocks),
        "power_limit_w": info.power_limit,
        "clock_mhz": device.clock() if real else None,
        "power_w": device.power() if real else None,
        "throttle_reasons": list(device.throttle_reasons()) if real else [],
        "energy_source": info.energy_source,
        "mig": info.mig,
        "refusal": device.can_lock(),
    }


def _row(entry: dict[str, Any]) -> tuple[str, ...]:
    clocks = entry["supported_clocks_mhz"]
    limit = entry["power_limit_w"]
    clock, power, throttled = entry["clock_mhz"], entry["power_w"], entry["throttle_reasons"]
    return (
        entry["gpu"] or str(entry["index"]),
        entry["name"],
        entry["driver"],
        f"{clocks[0]}-{clocks[-1]}" if len(clocks) > 1 else str(clocks[0]),
        f"{limit:.0f}" if limit else "-",
        str(clock or "-") + (f" ({', '.join(throttled)})" if throttled else ""),
        "-" if power is None else f"{power:.0f}",
        entry["energy_source"],
        "yes" if entry["refusal"] is None else "no",
    )
