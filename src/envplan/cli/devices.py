"""`envplan devices`, `guard` and `reset`: the GPUs there are, and giving their clocks back."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from envplan._io.files import atomic_write, check_writable
from envplan.cli import output as ui
from envplan.cli.describe import span
from envplan.cli.invocation import invocation
from envplan.cli.progress import progress
from envplan.cli.shared import MOST_USED
from envplan.cli.tables import table_columns
from envplan.cli.types import InputFile, OutputFile, one_of, parser_of, quantity
from envplan.devices import BACKENDS, DEFAULT_BACKEND, LeftSetError, opened
from envplan.errors import InputError
from envplan.quantities import TIME, WHOLE

if TYPE_CHECKING:
    from envplan.devices import DeviceInfo, GpuState
    from envplan.devices.locks import GivenBack
    from envplan.profile import SwitchLatency

#: Between two looks for clocks to give back.
_PERIOD_S: Final = 0.5
#: How long the last look may take beyond the time for which GPUs are tried, s.
_LAST_LOOK_S: Final = 30.0
_DEFAULT_WAIT_S: Final = 30.0
_LATENCY: Final = "Measuring how late clocks come"
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
    measure_latency: Annotated[
        bool,
        typer.Option(
            "--measure-latency",
            help="Measure how late clocks come after they are asked for, in less than two minutes. "
            "This sets clocks, and gives them back.",
            rich_help_panel=_LATENCY,
        ),
    ] = False,
    device: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            parser=quantity(WHOLE),
            help="Of which GPU, by nvidia-smi; default: CUDA's first.",
            rich_help_panel=_LATENCY,
        ),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Between the clocks of this profile, into whose sidecar it is written, for solve.",
            rich_help_panel=_LATENCY,
        ),
        InputFile(),
    ] = None,
    slices: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="By slices of work that this function makes; default: products in torch.",
            rich_help_panel=_LATENCY,
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
      envplan devices --measure-latency --device 0
      envplan devices --measure-latency --profile profile.csv
    """
    from envplan.devices import backend_class, describe_gpus

    models = backend_class(backend).models()
    if measure_latency:
        if models:
            raise InputError(
                f"--measure-latency goes with --backend nvml or zeusd, not {backend}: clocks of "
                "modelled GPUs come at once"
            )
        _measure_latency(backend, device, profile, slices)
        return
    for option, value in (("--device", device), ("--profile", profile), ("--slices", slices)):
        if value is not None:
            raise InputError(f"{option} goes with --measure-latency")
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


def _measure_latency(
    backend: str, device: int | None, profile_file: Path | None, slices: str | None
) -> None:
    """Measure how late clocks come, say it, and write it beside the profile.

    Args:
        backend: whose GPU is measured.
        device: which GPU, as nvidia-smi counts; None: CUDA's first.
        profile_file: of the profile whose sidecar gets it, if any does.
        slices: module:function that makes slices of work; None: those of torch.
    """
    from envplan.profile import Profile
    from envplan.profile.sidecar import sidecar_path
    from envplan.profiling.entry import load_slices
    from envplan.profiling.measuring import measure_latency
    from envplan.profiling.queued_slices import torch_slices

    profile = None
    if profile_file is not None:
        profile = Profile.read_csv(profile_file)
        check_writable(sidecar_path(profile_file))
    with progress("Measuring") as running:
        gpu, latency = measure_latency(
            (lambda _: load_slices(slices)) if slices else torch_slices,
            source=backend,
            device=device,
            metadata=profile.metadata if profile else None,
            clocks_mhz=profile.clocks_mhz if profile else (),
            progress=running.reach,
        )
    sidecar = None
    if profile_file is not None and profile is not None:
        sidecar = sidecar_path(profile_file)
        metadata = profile.metadata.with_switch_latency(latency)
        atomic_write(sidecar, metadata.to_json())
    planned_s = latency.largest_median_s(profile.clocks_mhz if profile else ())
    if profile_file is None:
        solve_options = ["--switch-latency", f"{1e3 * planned_s:.1f}ms"]
    else:
        solve_options = [str(profile_file)]
    ui.answer(
        lambda: {
            "gpu": gpu.index,
            "name": gpu.name,
            "uuid": gpu.uuid,
            "switch_latency": latency.to_dict(),
            "largest_median_s": planned_s,
            "written": [] if sidecar is None else [str(sidecar)],
        },
        lambda: _print_latency(gpu, latency, planned_s, sidecar),
        next_command=["envplan", "solve", *solve_options],
    )


def _print_latency(
    gpu: DeviceInfo, latency: SwitchLatency, planned_s: float, sidecar: Path | None
) -> None:
    """A row for each clock, and the one number that plans are made with."""
    rows = []
    for mhz, to_clock in sorted(latency.by_mhz.items()):
        cells = [f"{1e3 * seconds:.1f}" for seconds in (to_clock.median_s, to_clock.p95_s)]
        rows.append([str(mhz), *cells])
    headers = ["to (MHz)", "median (ms)", "95th percentile (ms)"]
    title = f"GPU {gpu.index} ({gpu.name}): from asking for a clock until it is there"
    ui.show_table(title, table_columns(headers, rows, num_texts=0))
    ui.say(f"to plan with: {1e3 * planned_s:.1f} ms, the largest median")
    if sidecar is not None:
        ui.say(f"wrote {sidecar}; solve plans with it from now on")


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
