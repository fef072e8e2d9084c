"""The `envplan` command: its subcommands, and how a call ends, with an exit code or an error."""

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

from envplan._io.files import parse_json, read_bounded
from envplan.cli.help import CommandGroup, add_command
from envplan.cli.invocation import Invocation, invocation
from envplan.cli.logs import log_level, logging_to_stderr
from envplan.errors import DoubtWarning, EnvplanError

_INTERRUPTED: Final = 130
_MAX_LINE: Final = 1000

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
        "preflight": "Say whether a plan would be followed on this node.",
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
        not_imported: Any = dict.fromkeys(chain.from_iterable(PANELS.values()))  # None for each
        self.commands = not_imported

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of a name; None where there is none."""
        if cmd_name in self.commands and self.commands[cmd_name] is None:
            self.commands[cmd_name] = _imported_command(cmd_name)
        return self.commands.get(cmd_name)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands of `--help`, panel by panel."""
        for panel, commands in PANELS.items():
            with formatter.section(panel):
                formatter.write_dl(list(commands.items()))


def _imported_command(name: str) -> Any:
    """The command of a name, from the module that has it: a function, or a command of commands."""
    module = import_module(f"envplan.cli.{MODULES.get(name, name)}")
    function_or_app = getattr(module, name)
    if isinstance(function_or_app, typer.Typer):
        command_app = function_or_app
    else:
        command_app = typer.Typer(add_completion=False, rich_markup_mode=None)
        add_command(command_app, function_or_app)
    command = typer.main.get_command(command_app)
    command.name = name
    return command


app = typer.Typer(
    name="envplan",
    cls=Commands,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_COLOURS: Final = {"always": True, "never": False, "auto": None}


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
    build_file = Path(kernel.origin).with_name("_build.json")
    build = parse_json(read_bounded(build_file), build_file)
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
    verbose: Annotated[
        bool,
        typer.Option(
            "-v", "--verbose", help="Log on stderr what is done; ENVPLAN_LOG=debug logs more."
        ),
    ] = False,
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
    level = log_level(verbose=verbose)
    if level is not None:
        context.with_resource(logging_to_stderr(level))
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit; see `run`."""
    sys.exit(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: what follows `envplan`; default: the process's own.

    Returns:
        The exit code: 0 done, 1 no answer, 2 bad input or usage, 130 interrupted.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    call = Invocation(json="--json" in words)  # for errors in options, too
    _mend_streams()
    # Looking for plugins of pydantic that others have installed takes longer than a small plan.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    with call.running(), warnings.catch_warnings():
        _keep_warnings(call)
        return _exit_code(words, call)


def _exit_code(words: list[str], call: Invocation) -> int:
    """Run the command that the words name; an error becomes a line and an exit code."""
    try:
        with call.interruptible():
            code = app(words, prog_name="envplan", standalone_mode=False)
        sys.stdout.flush()
        for warning in call.warnings:  # an error stands alone
            print(f"envplan: warning: {warning}", file=sys.stderr)
    except EnvplanError as error:
        return _fail(_mixed_up_or_none(error, words) or str(error), error.exit_code)
    except SystemExit as end:  # a shell's completion ends so
        code = end.code
    except ModuleNotFoundError as error:  # a node on which plans are only followed
        if error.name is None or error.name.partition(".")[0] == "envplan":
            raise
        return _fail(f"{error.name} is not installed here; it comes with: pip install envplan", 2)
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", _INTERRUPTED)
    except BrokenPipeError:
        _drop_output()  # whoever read it has left
        return 1
    except OSError as error:
        _drop_output()
        subject = f"{error.filename}: " if error.filename else "the output "
        reason = error.strerror or error
        return _fail(f"{subject}cannot be written or read ({reason})", 2)
    except _usage_error() as error:
        return _fail(error.format_message(), 2)
    if code == _INTERRUPTED:
        return _fail("interrupted", _INTERRUPTED)
    return code if isinstance(code, int) else 0


def _mixed_up_or_none(error: EnvplanError, words: list[str]) -> str | None:
    """What to say where a command was given a file for another one; None where it was not."""
    from envplan.cli.mixed_up import mixed_up_or_none

    return mixed_up_or_none(error, words)


def _usage_error() -> type[Any]:
    """The class of errors in usage: click is inside some releases of typer and beside others."""
    return next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


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


def _fail(message: str, exit_code: int) -> int:
    """Print an error: a line on stderr, and with --json a document on stdout, too.

    Returns:
        The exit code.
    """
    line = _one_line(message)
    print(f"envplan: error: {line}", file=sys.stderr)
    if invocation().json:
        document = {"schema": "envplan/error/v1", "error": line, "exit_code": exit_code}
        print(json.dumps(document, indent=2))
    return exit_code


def _one_line(message: str) -> str:
    """A message in a line of printable characters, which is not too long."""
    line = re.sub(r"\s*[\r\n]\s*", " ", message.strip())
    line = "".join(map(_printable, line))
    if len(line) <= _MAX_LINE:
        return line
    half = _MAX_LINE // 2  # the message quotes something huge
    return f"{line[:half]} ... {line[-half:]}"


def _printable(character: str) -> str:
    if character.isprintable():
        return character
    return character.encode("unicode_escape").decode()


if __name__ == "__main__":
    main()
