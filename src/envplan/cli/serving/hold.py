"""`envplan serving hold`: the clocks of one node's GPUs, for as long as the fleet runs."""

from __future__ import annotations

import math
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from envplan.cli import output as ui
from envplan.cli.invocation import invocation
from envplan.cli.serving.service import FLEET
from envplan.cli.types import InputFile, quantity
from envplan.quantities import TIME, WHOLE


def hold(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="What `envplan serving apply` wrote."),
        InputFile(),
    ] = Path("serving.clocks.json"),
    node: Annotated[
        int,
        typer.Option(
            rich_help_panel=FLEET,
            metavar="K",
            help="Which node this is, from 0.",
            parser=quantity(WHOLE),
        ),
    ] = 0,
    backend: Annotated[
        str,
        typer.Option(
            rich_help_panel=FLEET,
            metavar="NAME",
            help="nvml: this machine's GPUs; modelled: none needed.",
        ),
    ] = "nvml",
    seconds: Annotated[
        float | None,
        typer.Option(
            rich_help_panel=FLEET,
            metavar="TIME",
            help="So long; default: until interrupted.",
            show_default=False,
            parser=quantity(TIME),
        ),
    ] = None,
) -> None:
    """Hold the clocks of this node's GPUs until interrupted.

    Then they are given back. A guard for each GPU sets its clock, and gives it back however this
    process ends.

    \b
    Example:
      envplan serving hold serving.clocks.json --node 0
      envplan serving hold --backend modelled --seconds 1
    """
    from envplan.serving.apply import ServingApplied
    from envplan.serving.hold import hold_clocks, modelled_model, watch_guards

    applied = ServingApplied.load(file)
    options: dict[str, str | int] = {}
    if backend == "modelled":
        options = {"gpu": modelled_model(applied.gpu), "count": applied.gpus_per_node}
    call = invocation()
    signal.signal(signal.SIGTERM, call.interrupt)
    with (
        suppress(KeyboardInterrupt),
        hold_clocks(applied, node, backend=backend, backend_options=options) as guards,
        call.until_interrupted(),
    ):
        if not (call.quiet or call.json):
            for device, mhz in sorted(applied.clocks_of(node).items()):
                ui.say(f"GPU {device}: {mhz} MHz")
        end_s = math.inf if seconds is None else time.monotonic() + seconds
        watch_guards(guards, end_s, _warn_at_once)
    ui.answer(
        lambda: {"node": node, "clocks_mhz": applied.clocks_of(node), "given_back": True},
        lambda: ui.say("clocks given back"),
        next_command=["envplan", "devices"],
    )


def _warn_at_once(problem: str) -> None:
    """Warnings are kept for a command's end, but holding may go on for days."""
    print(f"envplan: warning: {problem}", file=sys.stderr, flush=True)
