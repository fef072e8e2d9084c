"""The Typer classes of our commands: help in panels, and a `--plot` without a file name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

from envplan.cli.invocation import invocation
from envplan.cli.shared import ARGUMENTS, JOB, MONEY, MOST_USED, NOISE, OUTPUT, SLOW_CLOCKS, TARGET
from envplan.cli.spread import spread_options
from envplan.cli.types import OPTIONAL_FILE, TERMINAL

#: Panels of `--help` in their order; others follow in the order of their options, then OUTPUT.
_PANELS: Final = (ARGUMENTS, MOST_USED, JOB, TARGET, SLOW_CLOCKS, NOISE, MONEY)


class Command(TyperCommand):
    """A command with help in panels, and with options that may stand without their file name."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command, and note its name for the schema of its document."""
        _, *names = ctx.command_path.split()
        invocation().command = "-".join(names)
        return super().invoke(ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the words after the command; `--plot` before an option stands alone."""
        may_stand_alone: set[str] = set()
        for param in self.params:
            if param.metavar == OPTIONAL_FILE:
                may_stand_alone.update(param.opts)
        words = []
        for word, following in pairwise([*args, "--"]):
            is_option = following.startswith("-") and following != str(TERMINAL)
            stands_alone = word in may_stand_alone and is_option
            words.append(f"{word}=" if stands_alone else word)
        return super().parse_args(ctx, words)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options of `--help`, panel by panel."""
        panels: dict[str, list[tuple[str, str]]] = {name: [] for name in _PANELS}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is None:
                continue
            names, about = record
            if param.param_type_name == "argument":
                panel, names = ARGUMENTS, param.metavar or names
            else:
                panel = getattr(param, "rich_help_panel", None) or OUTPUT
            panels.setdefault(panel, []).append((names, about))
        panels[OUTPUT] = panels.pop(OUTPUT, [])  # the last one
        for panel, rows in panels.items():
            if rows:
                with formatter.section(panel):
                    formatter.write_dl(rows)


class CommandGroup(TyperGroup):
    """A command of commands: bare, it prints its help."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the words after the command; none mean --help."""
        bare = not args and not self.invoke_without_command
        return super().parse_args(ctx, ["--help"] if bare else args)


def add_command(app: typer.Typer, function: Callable[..., None], name: str | None = None) -> None:
    """Make a function, with its groups of options, a command of an app."""
    app.command(name, cls=Command)(spread_options(function))


def command_group(about: str, functions: Mapping[str, Callable[..., None]]) -> typer.Typer:
    """A command of commands.

    Args:
        about: its help.
        functions: the commands, by their names.
    """
    app = typer.Typer(cls=CommandGroup, rich_markup_mode=None, add_completion=False, help=about)
    for name, function in functions.items():
        add_command(app, function, name)
    return app
