"""How commands answer: with words, tables and pictures, or with a JSON document."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING

import typer

from envplan._io.files import atomic_write
from envplan.cli.invocation import invocation
from envplan.errors import warn_of_doubt

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from envplan.cli.tables import Column

#: A JSON document: what json.dumps takes.
Document = Mapping[str, object]


def answer(
    make_document: Callable[[], Document],
    show: Callable[[], None] | None = None,
    *,
    closing: str = "",
    next_command: Sequence[str] = (),
) -> None:
    """End a command: with a JSON document, or with words and the names of the files it wrote.

    Nothing is printed with --quiet.

    Args:
        make_document: makes the document; its schema is the command's unless it names one.
        show: prints the words.
        closing: a sentence for the last line.
        next_command: what to type next, word by word.
    """
    call = invocation()
    if call.json:
        document = {"schema": f"envplan/{call.command}/v1", **make_document()}
        if next_command:
            document["next"] = shlex.join(next_command)
        typer.echo(json.dumps(document, indent=2, allow_nan=False))
    elif not call.quiet:
        if show is not None:
            show()
        say(*(f"wrote {path}" for path in call.outputs))
        _say_last_line(closing, next_command)


def _say_last_line(closing: str, next_command: Sequence[str]) -> None:
    parts = [closing] if closing else []
    if next_command:
        parts.append(f"next: {shlex.join(next_command)}")
    if parts:
        say("; ".join(parts))


def show_table(title: str, columns: Sequence[Column]) -> None:
    """Print a table as wide as the terminal at most; in a file or a pipe nothing is cut."""
    from envplan.cli.tables import UNLIMITED, table_lines

    width = get_terminal_size().columns if on_terminal() else UNLIMITED
    say(*table_lines(title, columns, width=width, bold=colored()))


def draw(
    path: Path | None,
    make_figure: Callable[[], Figure],
    make_page: Callable[[], str] | None = None,
) -> None:
    """Write a picture, or a page where the file's name ends in .html; nothing without a file.

    Args:
        path: of the file.
        make_figure: makes the picture.
        make_page: makes the page; None where there is none.
    """
    from envplan.plotting.figures import save_figure

    if path is None:
        return
    if make_page is not None and path.suffix.lower() == ".html":
        atomic_write(path, make_page())
    else:
        save_figure(make_figure(), path)


def colored() -> bool:
    """Whether to print in colours: as --color says, else on terminals unless NO_COLOR is set."""
    color = invocation().color
    if color is not None:
        return color
    return on_terminal() and not os.environ.get("NO_COLOR")


def on_terminal() -> bool:
    """Whether stdout is a terminal."""
    return sys.stdout.isatty()


def say(*lines: str) -> None:
    """Print lines on stdout."""
    for line in lines:
        typer.echo(line, color=invocation().color)


def warn(line: str) -> None:
    """Warn on stderr, at the end of the command, about something that is probably not meant."""
    warn_of_doubt(line)
