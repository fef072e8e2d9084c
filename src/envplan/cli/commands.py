"""The subcommands of `envplan`, in the order of work."""

from __future__ import annotations

import json
import platform
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import typer

from envplan.cli import state
from envplan.cli.advise import advise
from envplan.cli.apply import apply
from envplan.cli.check import check
from envplan.cli.command import Group, add
from envplan.cli.compare import compare
from envplan.cli.devices import devices
from envplan.cli.frontier import frontier
from envplan.cli.guard import guard
from envplan.cli.profile import profile
from envplan.cli.profiles import profiles
from envplan.cli.refine import refine
from envplan.cli.report import report
from envplan.cli.reset import reset
from envplan.cli.savings import savings
from envplan.cli.schedule import schedule_app
from envplan.cli.serving import serving
from envplan.cli.simulate import simulate
from envplan.cli.smooth import smooth
from envplan.cli.solve import solve
from envplan.cli.sweep import sweep
from envplan.cli.timeline import timeline

app = typer.Typer(
    name="envplan",
    cls=Group,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for panel, functions in {
    "Plan": (profile, frontier, solve, apply),
    "Look": (savings, advise, compare, simulate, timeline, report, sweep),
    "Run": (devices, guard, refine, reset),
    "Data": (profiles, smooth, check),
}.items():
    for command in functions:
        add(app, command, panel=panel)
app.add_typer(schedule_app, rich_help_panel="Data")
app.add_typer(serving, rich_help_panel="Serving")

_COLOURS = {"always": True, "never": False, "auto": None}


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(_build_details())
        raise typer.Exit


def _build_details() -> str:
    """The version, and what else a report of a fault should name."""
    from envplan import __version__

    kernel = find_spec("envplan._kernel")
    assert kernel is not None
    assert kernel.origin is not None
    build = json.loads(Path(kernel.origin).with_name("_build.json").read_text(encoding="utf-8"))
    tools = ", ".join(f"{name} {version(name)}" for name in ("numpy", "ortools"))
    return (
        f"envplan {__version__}\n"
        f"kernel: {build['compiler']}, {build['build_type']}\n"
        f"Python {platform.python_version()}, {tools}, {platform.system()} {platform.machine()}"
    )


@app.callback(invoke_without_command=True)
def envplan(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Print the version and stop."
        ),
    ] = False,
    color: Annotated[
        Literal["auto", "always", "never"],
        typer.Option(metavar="WHEN", help="auto (also by NO_COLOR), always or never."),
    ] = "auto",
) -> None:
    """Take the wasted joules out of pipeline-parallel training.

    A profile of the stages becomes the exact frontier of iteration time against energy, and a point
    on it becomes a plan: one frequency for every operation.

    \b
    Example:
      envplan savings sosp24-a100-gpt3-xl-4stage --gpus 64 --price 0.12
      envplan profile --model llama3-8b --gpu h100 --pp 4
      envplan frontier --plot
      envplan solve --slowdown 1
      envplan check plan.json
    """
    state.command = context.invoked_subcommand or ""
    state.color = context.color = _COLOURS[color]
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
