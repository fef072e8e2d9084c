"""The `envplan` command: its subcommands in the order of work, and where errors become one line and
an exit code."""

from __future__ import annotations

import io
import json
import os
import re
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NoReturn

import typer

from envplan.cli.help import CommandGroup, add_command
from envplan.cli.invocation import Invocation, invocation
from envplan.errors import DoubtWarning, EnvplanError

_INTERRUPTED = 130
_LONGEST_LINE = 1000

#: What `--help` lists: commands by panel, each in a word.
PANELS: Final = {
    "Plan": {
        "profile": "Find out what each stage costs at each clock.",
        "frontier": "Trace the exact frontier of time against energy.",
        "solve": "Choose a frequency for every operation.",
        "apply": "Turn a plan into a frequency plan for every rank.",
    },
    "Look": {
        "savings": "Say what plans save: energy, money and CO2 a year.",
        "advise": "Find the schedule that suits a job best.",
        "compare": "Set every planner's plan beside ours.",
        "simulate": "Replay a plan: what runs when, and what it draws.",
        "timeline": "Draw what every stage does when.",
        "report": "Write a page about a plan.",
        "sweep": "Make many plans: jobs, schedules and targets combined.",
        "site": "Share a site's power budget among many jobs.",
    },
    "Run": {
        "devices": "List the GPUs, and whether you may set their clocks.",
        "guard": "Give back the clocks that killed trainings left set.",
        "refine": "Fit a plan to the times that a run measured.",
        "reset": "Give every GPU's clock back to the driver.",
    },
    "Data": {
        "profiles": "List the built-in profiles.",
        "smooth": "Take the noise out of a measured profile.",
        "check": "Prove that a file of envplan holds.",
        "schedule": "List, show, import and export schedules.",
    },
    "Serving": {"serving": "Plan clocks for inference fleets."},
}
#: Where commands stand that have no module of their own.
MODULES: Final = {
    "guard": "devices",
    "reset": "devices",
    "smooth": "profiles",
    "timeline": "report",
}


class Commands(CommandGroup):
    """Commands in panels, each imported when it is asked for."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        none_yet: Any = dict.fromkeys(chain.from_iterable(PANELS.values()))
        self.commands = none_yet

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in self.commands and self.commands[cmd_name] is None:
            module = import_module(f"envplan.cli.{MODULES.get(cmd_name, cmd_name)}")
            command = getattr(module, cmd_name)
            if not isinstance(command, typer.Typer):
                function = command
                command = typer.Typer(add_completion=False, rich_markup_mode=None)
                add_command(command, function)
            self.commands[cmd_name] = typer.main.get_command(command)
            self.commands[cmd_name].name = cmd_name
        return self.commands.get(cmd_name)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for panel, commands in PANELS.items():
            with formatter.section(panel):
                formatter.write_dl(list(commands.items()))


app = typer.Typer(
    name="envplan",
    cls=Commands,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_COLOURS = {"always": True, "never": False, "auto": None}


def _print_version(wanted: bool) -> None:
    """Print the version, and what else a report of a fault should name."""
    if not wanted:
        return
    import platform
    from importlib.metadata import version
    from importlib.util import find_spec

    kernel = find_spec("envplan._kernel")
    assert kernel is not None
    assert kernel.origin is not None
    build = json.loads(Path(kernel.origin).with_name("_build.json").read_text(encoding="utf-8"))
    tools = ", ".join(f"{name} {version(name)}" for name in ("numpy", "ortools"))
    typer.echo(f"envplan {version('envplan')}")
    typer.echo(f"kernel: {build['compiler']}, {build['build_type']}")
    machine = f"{platform.system()} {platform.machine()}"
    typer.echo(f"Python {platform.python_version()}, {tools}, {machine}")
    raise typer.Exit


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
    invocation().color = context.color = _COLOURS[color]
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit: 0 done, 1 no answer, 2 bad input or usage, 130 interrupted.

    Args:
        arguments: what follows `envplan`; default: the process's own.
    """
    sys.exit(_run(arguments))


def _run(arguments: Sequence[str] | None) -> int:
    """Run the command line; its exit code."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    call = Invocation(json="--json" in words)  # also for errors in options
    with call.running():
        return _run_words(words, call)


def _run_words(words: list[str], call: Invocation) -> int:
    # Releases of typer differ in whether click is inside it or beside it; its errors derive from
    # one class either way.
    usage_error: type[Any] = next(
        base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException"
    )
    _mend_streams()
    _keep_warnings(call)
    # Looking for plugins of pydantic that others have installed takes longer than a small plan.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    try:
        code = app(words, prog_name="envplan", standalone_mode=False)
        sys.stdout.flush()
        for warning in call.warnings:  # an error stands alone
            print(f"envplan: warning: {warning}", file=sys.stderr)
    except EnvplanError as error:
        return _fail(str(error), error.exit_code)
    except SystemExit as done:  # a shell's completion ends so
        code = done.code
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", _INTERRUPTED)
    except BrokenPipeError:
        _drop_output()  # whoever read it has left
        return 1
    except OSError as error:
        _drop_output()
        where = f"{error.filename}: " if error.filename else "the output "
        return _fail(f"{where}cannot be written or read ({error.strerror or error})", 2)
    except usage_error as error:
        return _fail(error.format_message(), 2)
    if code == _INTERRUPTED:
        return _fail("interrupted", _INTERRUPTED)
    return code if isinstance(code, int) else 0


def _mend_streams() -> None:
    """Have somewhere to print to, and print every file name, whatever bytes are in it."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # the caller has closed it
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _keep_warnings(call: Invocation) -> None:
    """Keep our warnings for the end of a call; those of libraries are for developers."""

    def keep(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        if issubclass(category, DoubtWarning):
            call.warnings[str(message)] = None

    warnings.simplefilter("always", DoubtWarning)
    warnings.showwarning = keep


def _drop_output() -> None:
    """Point stdout nowhere, or the exit would complain again of what is still to be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str, code: int) -> int:
    """One line on stderr, whatever characters are in the message; with --json also on stdout."""
    line = re.sub(r"\s*[\r\n]\s*", " ", message.strip())
    safe = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    if len(safe) > _LONGEST_LINE:  # it quotes something huge
        safe = f"{safe[: _LONGEST_LINE // 2]} ... {safe[-_LONGEST_LINE // 2 :]}"
    print(f"envplan: error: {safe}", file=sys.stderr)
    if invocation().json:
        document = {"schema": "envplan/error/v1", "error": safe, "exit_code": code}
        print(json.dumps(document, indent=2))
    return code


if __name__ == "__main__":
    main()
