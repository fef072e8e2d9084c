"""The `envplan` command: its subcommands, and where errors become one line and an exit code."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn

import typer

from envplan.cli.command import Group
from envplan.errors import EnvplanError

#: What `--help` lists: commands by panel, each in a word. A command stands in the module of its
#: name, which is imported when the command is asked for.
_PANELS: Final = {
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
    },
    "Run": {
        "devices": "List the GPUs, and whether you may set their clocks.",
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


class _Commands(Group):
    panels = _PANELS


app = typer.Typer(
    name="envplan",
    cls=_Commands,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# Releases of typer differ in whether click is inside it or beside it; its errors derive from one
# class either way.
_UsageError: type[Any] = next(
    base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException"
)

_INTERRUPTED = 130
_LONGEST_LINE = 1000


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(_build_details())
        raise typer.Exit


def _build_details() -> str:
    """The version, and what else a report of a fault should name."""
    import json
    import platform
    from importlib.metadata import version
    from importlib.util import find_spec

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
) -> None:
    """Take the wasted joules out of pipeline-parallel training.

    A profile of the stages becomes the exact frontier of iteration time against energy, and a point
    on it becomes a plan: one frequency for every operation.

    \b
    Example:
      envplan profiles
      envplan frontier a40-gpt3-1.3b-4stage --microbatches 32 --plot
      envplan solve a40-gpt3-1.3b-4stage --microbatches 32 --slowdown 1
      envplan check plan.json
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit: 0 done, 1 no answer, 2 bad input or usage, 130 interrupted.

    Args:
        arguments: what follows `envplan`; default: the process's own.
    """
    sys.exit(_run(arguments))


def _run(arguments: Sequence[str] | None) -> int:
    _mend_streams()
    # Looking for plugins of pydantic that others have installed takes longer than a small plan.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    try:
        code = app(None if arguments is None else list(arguments), standalone_mode=False)
        sys.stdout.flush()
    except EnvplanError as error:
        return _fail(str(error), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", _INTERRUPTED)
    except BrokenPipeError:
        _drop_output()  # whoever read it has left
        return 1
    except OSError as error:
        _drop_output()
        where = f"{error.filename}: " if error.filename else "the output "
        return _fail(f"{where}cannot be written or read ({error.strerror or error})", 2)
    except _UsageError as error:
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


def _drop_output() -> None:
    """Point stdout nowhere, or the exit would complain again of what is still to be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str, code: int) -> int:
    """One line on stderr, whatever characters are in the message."""
    line = re.sub(r"\s*[\r\n]\s*", " ", message.strip())
    safe = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    if len(safe) > _LONGEST_LINE:  # it quotes something huge
        safe = f"{safe[: _LONGEST_LINE // 2]} ... {safe[-_LONGEST_LINE // 2 :]}"
    print(f"envplan: error: {safe}", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
