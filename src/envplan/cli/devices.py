"""`envplan devices`: the GPUs there are, and whether their clocks may be set."""

from __future__ import annotations

from typing import Any

from envplan.cli.command import one_of, takes
from envplan.cli.options import OutputOptions
from envplan.devices import BACKENDS, DEFAULT_BACKEND


@takes(
    """
    Most used:
      --backend NAME  GPUs of this machine (nvml), or modelled ones.
      --gpu NAME  Which modelled GPU; default: all.
    """,
    backend=one_of(*BACKENDS),
)
def devices(
    show: OutputOptions,
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
    from envplan.cli.output import answer, print_table, say
    from envplan.devices import backend_class, describe_gpus
    from envplan.errors import InputError

    models = backend_class(backend).models()
    if gpu is not None and not models:
        raise InputError("--gpu names a modelled GPU; add --backend modelled")
    options = [{"gpu": model} for model in ([gpu] if gpu else models)]
    found = [entry for option in options or [{}] for entry in describe_gpus(backend, **option)]

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
