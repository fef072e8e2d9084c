"""`envplan devices`: the GPUs there are, and whether their clocks may be set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from envplan.cli import output as ui
from envplan.cli.command import one_of, takes
from envplan.devices import BACKENDS, DEFAULT_BACKEND
from envplan.errors import InputError


@takes(
    """
    Most used:
      --backend NAME  GPUs of this machine (nvml), or modelled ones.
      --gpu NAME  Which modelled GPU; default: all.
    """,
    backend=one_of(*BACKENDS),
)
def devices(
    backend: str = DEFAULT_BACKEND,
    gpu: str | None = None,
) -> None:
    """List the GPUs, and whether this user may set their clocks.

    No clock is changed by looking.

    \b
    Example:
      envplan devices
      envplan devices --backend modelled
      envplan devices --backend modelled --gpu a40 --json
    """
    from envplan.devices import backend_class, describe_gpus

    models = backend_class(backend).models()
    if gpu is not None and not models:
        raise InputError("--gpu names a modelled GPU; add --backend modelled")
    options = [{"gpu": model} for model in ([gpu] if gpu else models)]
    found = [entry for option in options or [{}] for entry in describe_gpus(backend, **option)]
    modelled = ["--backend", "modelled", "--gpu", str(found[0]["gpu"])] if models else []
    ui.respond(
        lambda: {"gpus": found},
        lambda: _print(found),
        then=["envplan", "profile", *modelled],
    )


def _print(found: Sequence[dict[str, Any]]) -> None:
    columns = {
        "GPU": [one["gpu"] or one["index"] for one in found],
        "name": [one["name"] for one in found],
        "driver": [one["driver"] for one in found],
        "clocks (MHz)": [ui.span(one["supported_clocks_mhz"] or []) or "-" for one in found],
        "limit (W)": [_whole(one["power_limit_w"] or None) for one in found],
        "now (MHz)": [_now(one["clock_mhz"], one["throttle_reasons"] or ()) for one in found],
        "now (W)": [_whole(one["power_w"]) for one in found],
        "energy": [one["energy_source"] for one in found],
        "may set clocks": ["yes" if one["refusal"] is None else "no" for one in found],
    }
    ui.print_columns("", columns, words=3)
    ui.say(*(one["refusal"] for one in found if one["refusal"] is not None))


def _whole(watts: float | None) -> str:
    return "-" if watts is None else f"{watts:.0f}"


def _now(clock: int | None, throttled: Sequence[str]) -> str:
    return str(clock or "-") + (f" ({', '.join(throttled)})" if throttled else "")
