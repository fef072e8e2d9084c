"""`envplan devices`, `guard` and `reset`: the GPUs there are, and giving their clocks back."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from envplan.cli import output as ui
from envplan.cli.describe import span
from envplan.cli.invocation import invocation
from envplan.cli.shared import MOST_USED
from envplan.cli.tables import table_columns
from envplan.cli.types import OutputFile, one_of, parser_of, quantity
from envplan.devices import BACKENDS, DEFAULT_BACKEND, LeftSetError, opened
from envplan.errors import InputError
from envplan.quantities import TIME

if TYPE_CHECKING:
    from envplan.devices import GpuState
    from envplan.devices.locks import GivenBack

#: Between two looks for clocks to give back.
_PERIOD_S: Final = 0.5
#: How long the last look may take beyond the time for which GPUs are tried, s.
_LAST_LOOK_S: Final = 30.0
_DEFAULT_WAIT_S: Final = 30.0
_INSTALL: Final = "systemctl enable --now envplan-guard"


def _listen_address(text: str, option: str) -> str:
    address, colon, port = text.rpartition(":")
    if not (colon and address and port.isdecimal() and int(port) < 2**16):
        raise InputError(f"{option} must be an address and a port, as in 0.0.0.0:9417, not {text}")
    return text


def devices(
    backend: Annotated[
        str,
        typer.Option(
            rich_help_panel=MOST_USED,
            metavar="NAME",
            help="GPUs of this machine (nvml), or modelled ones.",
            parser=one_of(*BACKENDS),
        ),
    ] = DEFAULT_BACKEND,
    gpu: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=MOST_USED,
            metavar="NAME",
            help="Which modelled GPU; default: all.",
            show_default=False,
        ),
    ] = None,
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
    if models:
        states = []
        for model in models if gpu is None else [gpu]:
            states += describe_gpus(backend, gpu=model)
        profile_options = ["--backend", "modelled", "--gpu", str(states[0].gpu)]
    else:
        states = describe_gpus(backend)
        profile_options = []
    ui.answer(
        lambda: {"gpus": [state.to_dict() for state in states]},
        lambda: _print_states(states),
        next_command=["envplan", "profile", *profile_options],
    )


def _print_states(states: Sequence[GpuState]) -> None:
    """A row for each GPU, and below the table why clocks may not be set."""
    headers = ["GPU", "name", "driver", "clocks (MHz)", "limit (W)", "now (MHz)", "now (W)"]
    headers += ["energy", "may set clocks"]
    ui.show_table("", table_columns(headers, [_cells(state) for state in states], num_texts=3))
    ui.say(*(state.refusal for state in states if state.refusal is not None))


def _cells(state: GpuState) -> list[str]:
    """A GPU's row: "-" where nothing is known."""
    info = state.info
    return [
        state.gpu or str(state.index),
        "-" if info is None else info.name,
        "-" if info is None else info.driver,
        "-" if info is None else span(info.supported_clocks) or "-",
        "-" if info is None or not info.power_limit else f"{info.power_limit:.0f}",
        _clock_now(state),
        "-" if state.power_w is None else f"{state.power_w:.0f}",
        "-" if info is None else info.energy_source,
        "yes" if state.refusal is None else "no",
    ]


def _clock_now(state: GpuState) -> str:
    """The clock, and in brackets why it is lower than asked for."""
    clock = str(state.clock_mhz or "-")
    reasons = ", ".join(state.throttle_reasons)
    return f"{clock} ({reasons})" if reasons else clock


WaitOption = Annotated[
    float,
    typer.Option(
        "--wait",
        metavar="TIME",
        parser=quantity(TIME),
        help="Try a GPU that cannot be reached, or fails, for so long.",
        rich_help_panel=MOST_USED,
    ),
]


def guard(
    once: Annotated[
        bool,
        typer.Option(
            "--once",
            rich_help_panel=MOST_USED,
            help="Give back what there is now, and end: for an epilog.",
        ),
    ] = False,
    unit: Annotated[
        bool,
        typer.Option(
            "--unit",
            rich_help_panel=MOST_USED,
            help="Print a systemd unit and a Slurm epilog, and end.",
        ),
    ] = False,
    wait: WaitOption = _DEFAULT_WAIT_S,
    metrics_file: Annotated[
        Path | None,
        typer.Option(
            "--metrics-file",
            metavar="FILE",
            parser=OutputFile(".prom"),
            help="Write metrics there every 5 s, for node_exporter's textfile collector.",
            rich_help_panel=MOST_USED,
        ),
    ] = None,
    metrics_listen: Annotated[
        str | None,
        typer.Option(
            "--metrics-listen",
            metavar="ADDRESS:PORT",
            parser=parser_of(_listen_address),
            help="Serve metrics there, as in 0.0.0.0:9417; needs envplan[metrics].",
            rich_help_panel=MOST_USED,
        ),
    ] = None,
) -> None:
    """Give back the clocks that killed trainings left set, until it is stopped.

    A training gives its clocks back by itself, however it ends. Only where the guard process that
    does so is killed together with it, as by a scheduler, the clock stays. Run this as root to look
    after all users, or as a user to look after your own trainings. Those that run are left alone.

    \b
    Example:
      envplan guard --unit > /etc/systemd/system/envplan-guard.service
      systemctl enable --now envplan-guard
      envplan guard --metrics-file /var/lib/prometheus/node-exporter/envplan.prom
    """
    if unit:
        _print_unit()
    else:
        _serve(once=once, wait_s=wait, metrics_file=metrics_file, metrics_listen=metrics_listen)


def _print_unit() -> None:
    from envplan.runtime.service import unit_file

    text = unit_file().rstrip()
    ui.answer(lambda: {"unit": text}, lambda: ui.say(text))
    if not invocation().json:  # stdout is for the unit's file
        typer.echo(f"next: {_INSTALL}", err=True)


def _serve(
    *, once: bool, wait_s: float, metrics_file: Path | None, metrics_listen: str | None
) -> None:
    from envplan.runtime.service import Service

    if once and metrics_listen:
        raise InputError("--once ends at once, and so would --metrics-listen; use --metrics-file")
    metrics = None
    if metrics_file or metrics_listen:
        from envplan.runtime.metrics import MetricsProcess

        metrics = MetricsProcess(metrics_file, metrics_listen, _log)
    service = Service(_log, wait_s)
    service.look()
    if once and metrics:
        metrics.run_once()
    if not once:
        _log("giving back what killed trainings leave set, until interrupted")
        _log("next: envplan guard --unit (makes it a service)")
    while not once:
        if metrics:
            metrics.keep_running()
        time.sleep(_PERIOD_S)
        service.look()
    if not service.finish(wait_s + _LAST_LOOK_S):
        raise LeftSetError("some clocks could not be given back; see the lines above")
    ui.answer(lambda: {"left_set": 0}, next_command=["envplan", "devices"])


def _log(line: str) -> None:
    """Say at once what happened; beside a JSON document on stderr."""
    if not invocation().quiet:
        typer.echo(line, err=invocation().json)


def reset(wait: WaitOption = _DEFAULT_WAIT_S) -> None:
    """Give every GPU's clock back to the driver.

    Clocks go back by themselves when training ends or dies. This is for a node where everything was
    killed at once, the processes that give clocks back included.

    \b
    Example:
      envplan reset
    """
    from envplan.devices.locks import give_back_all

    with opened() as source:
        outcomes = give_back_all(source.devices(), wait)
    problems = [outcome.problem for outcome in outcomes if outcome.problem is not None]
    if not (invocation().json and problems):  # there is one JSON document, and it is the error
        ui.answer(
            lambda: {"gpus": [asdict(outcome) for outcome in outcomes]},
            lambda: _print_given_back(outcomes),
            next_command=["envplan", "devices"],
        )
    if problems:
        others = f" (and {len(problems) - 1} more GPUs)" if len(problems) > 1 else ""
        raise LeftSetError(f"{problems[0]}{others}")


def _print_given_back(outcomes: Sequence[GivenBack]) -> None:
    """A line for each GPU whose clock was given back."""
    for outcome in outcomes:
        if outcome.problem is None:
            ui.say(f"GPU {outcome.index} ({outcome.name}): {_describe(outcome)}")


def _describe(outcome: GivenBack) -> str:
    if outcome.guard is not None:
        return (
            "clock given back, but a training that runs will set it again "
            f"(its guard is process {outcome.guard})"
        )
    if outcome.left_behind:
        return "clock given back; a training that was killed had left it set"
    return "clock given back"
