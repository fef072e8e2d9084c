"""`envplan devices`: the GPUs there are, and whether their clocks may be set."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from envplan.cli.command import MOST, one_of, option
from envplan.cli.options import OutputOptions
from envplan.devices import BACKENDS, DEFAULT_BACKEND

if TYPE_CHECKING:
    from collections.abc import Callable

    from envplan.devices import Device

T = TypeVar("T")

#: How long one GPU may take to answer, s.
_PATIENCE_S = 10.0


def devices(
    show: OutputOptions,
    backend: str = option(
        "--backend NAME",
        MOST,
        "GPUs of this machine (nvml), or modelled ones.",
        one_of(*BACKENDS),
        default=DEFAULT_BACKEND,
    ),
    gpu: str | None = option("--gpu NAME", MOST, "Which modelled GPU; default: all."),
) -> None:
    """List the GPUs, and whether this user may set their clocks.

    No clock is changed by looking.

    \b
    Example:
      envplan devices
      envplan devices --backend modelled
      envplan devices --backend modelled --gpu a40 --json
    """
    from envplan.cli.output import answer, print_table, say
    from envplan.devices import backend_class
    from envplan.errors import InputError

    models = backend_class(backend).models()
    if gpu is not None and not models:
        raise InputError("--gpu names a modelled GPU; add --backend modelled")
    options = [{"gpu": model} for model in ([gpu] if gpu else models)]
    found = [entry for option in options or [{}] for entry in _describe_all(backend, **option)]

    def tell() -> None:
        print_table("", _HEADERS, [_row(entry) for entry in found], words=3)
        for entry in found:
            if entry["refusal"] is not None:
                say(entry["refusal"])

    then = ["envplan", "profile", *(["--backend", "modelled"] if models else [])]
    answer(
        show,
        lambda: {"gpus": found},
        tell,
        then=[*then, "--gpu", str(found[0]["gpu"])] if models else then,
    )


_HEADERS = (
    *("GPU", "name", "driver", "clocks (MHz)", "limit (W)"),
    *("now (MHz)", "now (W)", "energy", "may set clocks"),
)


def _describe_all(name: str, **options: Any) -> list[dict[str, Any]]:
    from envplan.devices import opened

    with opened(name, **options) as source:
        found = [_describe_or_say(device, k) for k, device in enumerate(source.devices())]
    return [{"gpu": options.get("gpu"), **entry} for entry in found]


def _describe_or_say(device: Device, index: int) -> dict[str, Any]:
    """What is known of a GPU; of one that is lost or hangs, only why it is not."""
    from envplan.devices import DeviceError, within

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
    from envplan.devices import DeviceError

    try:
        return read()
    except DeviceError:
        return None


def _row(entry: dict[str, Any]) -> tuple[str, ...]:
    clocks = entry["supported_clocks_mhz"] or ["-"]
    limit = entry["power_limit_w"]
    clock, power, throttled = entry["clock_mhz"], entry["power_w"], entry["throttle_reasons"]
    return (
        entry["gpu"] or str(entry["index"]),
        entry["name"] or "-",
        entry["driver"] or "-",
        f"{clocks[0]}-{clocks[-1]}" if len(clocks) > 1 else str(clocks[0]),
        f"{limit:.0f}" if limit else "-",
        str(clock or "-") + (f" ({', '.join(throttled)})" if throttled else ""),
        "-" if power is None else f"{power:.0f}",
        entry["energy_source"] or "-",
        "yes" if entry["refusal"] is None else "no",
    )
