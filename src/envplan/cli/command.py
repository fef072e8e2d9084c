"""Commands as Typer sees them: options from dataclasses, help in panels, a `--plot` without a name.

A command takes its options in groups, each a dataclass whose fields are declared in options.py:

    def frontier(job: JobOptions, show: OutputOptions) -> None: ...

`add` gives the command to Typer with the fields of these dataclasses as options of its own.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, ClassVar, Final, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from envplan.errors import InputError
from envplan.quantities import Quantity

__all__ = [
    "Command",
    "Group",
    "add",
    "check_type",
    "file_of",
    "name_bare_plot",
    "numbers",
    "one_of",
    "option",
    "plot_option",
]

#: The panels of `--help` that come first and last; others keep the order of their options.
MOST, JOB, TARGET = "Most used", "Job", "Target"
CLOCKS, NOISE, MONEY, OUTPUT = "Slow clocks", "Noise", "Money", "Output"
_FIRST: Final = (MOST, JOB, TARGET, CLOCKS, NOISE, MONEY)
_OPTIONAL_FILE: Final = "[FILE]"


def option(
    spec: str,
    panel: str,
    help: str,  # noqa: A002  (Typer's name for it)
    takes: Quantity | Callable[[str, str], Any] | None = None,
    **more: Any,
) -> Any:
    """An option for an Annotated type.

    Args:
        spec: names and what follows them, as `--help` shows it: "-o, --output FILE".
        panel: under which heading of `--help` it stands.
        takes: what turns the text and the option's name into the value; None: the type does.
        more: for typer.Option.
    """
    words = spec.split()
    names = [word.rstrip(",") for word in words if word.startswith("-")]
    metavar = " ".join(words[len(names) :]) or None
    label = "/".join(name.split("/")[0] for name in names if name.startswith("--"))
    parser = None
    if takes is not None:
        parse = takes.parse if isinstance(takes, Quantity) else takes

        def parser(given: Any) -> Any:
            return parse(given, label) if isinstance(given, str) else given

    return typer.Option(
        *names, help=help, metavar=metavar, rich_help_panel=panel, parser=parser, **more
    )


def one_of(*choices: str) -> Callable[[str, str], str]:
    """What an option takes that has one of these values."""

    def chosen(text: str, name: str) -> str:
        if text not in choices:
            raise InputError(
                f"{name} must be {', '.join(choices[:-1])} or {choices[-1]}, not {text}"
            )
        return text

    return chosen


class Numbers(list[int]):
    """Whole numbers that one option lists. Typer takes a plain list for an option given often."""


def typed(group: Any) -> list[str]:
    """What to type for the options and arguments of a group that differ from their defaults."""
    words: list[str] = []
    hints = get_type_hints(type(group), include_extras=True)
    for field in dataclasses.fields(group):
        value, declared = getattr(group, field.name), hints[field.name].__metadata__[0]
        if value == field.default:
            continue
        # Typer takes the first name for a default.
        given = (declared.default, *(declared.param_decls or ()))
        names = [name for name in given if isinstance(name, str) and name.startswith("--")]
        text = ",".join(map(str, value)) if isinstance(value, Numbers) else str(value)
        words += [*names[:1], *([] if value is True else [text])]
    return words


def numbers(example: str, least: int = 1, most: int = 2**31 - 1) -> Callable[[str, str], Numbers]:
    """What an option takes that lists whole numbers, separated by commas."""

    def listed(text: str, name: str) -> Numbers:
        parts = [part.strip() for part in text.split(",")]
        if not all(part.isascii() and part.isdigit() and len(part) < 20 for part in parts):
            raise InputError(f"{name} must list numbers, as in {example}, not {text}")
        for number in map(int, parts):
            if not least <= number <= most:
                raise InputError(f"{name} must be from {least} to {most}, not {number}")
        return Numbers(map(int, parts))

    return listed


def file_of(types: tuple[str, ...], hint: str, default: str = "") -> Callable[[str, str], Path]:
    """What an option takes that names a file of one of these types.

    Args:
        hint: what to do about a file of another type.
        default: the file that an empty text names.
    """

    def named(text: str, name: str) -> Path:
        path = Path(text or default)
        check_type(path, name, types, hint)
        return path

    return named


def plot_option(
    default: str, types: tuple[str, ...], what: str, hint: str, panel: str = MOST
) -> Any:
    """A `--plot` that may stand without a file name.

    Args:
        default: the file name then.
        types: endings that there are.
        what: what is drawn, in words.
        hint: what to do about a file of another type.
    """
    endings = f"{', '.join(types[:-1])} or {types[-1]}"
    help_text = f"Draw {what}: {endings}; without a name: {default}."
    return option(f"--plot {_OPTIONAL_FILE}", panel, help_text, file_of(types, hint, default))


def check_type(path: Path | None, option: str, types: tuple[str, ...], hint: str) -> None:
    """Raises: InputError: the file an option names does not end in one of the types."""
    if path is not None and path.suffix.lower() not in types:
        raise InputError(f"{option} {path} must end in {' or '.join(types)}; {hint}")


def name_bare_plot(arguments: list[str], default: str = "frontier.png") -> list[str]:
    """Give a `--plot` that no file name follows its default one."""
    return [
        f"--plot={default}" if argument == "--plot" and following.startswith("-") else argument
        for argument, following in pairwise([*arguments, "--"])
    ]


class Command(TyperCommand):
    """A command with help in panels, and with options that may stand without their file name."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        bare = {
            name
            for param in self.params
            if param.metavar == _OPTIONAL_FILE
            for name in param.opts
            if name.startswith("--")
        }
        named = [
            f"{argument}=" if argument in bare and following.startswith("-") else argument
            for argument, following in pairwise([*args, "--"])
        ]
        return super().parse_args(ctx, named)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {name: [] for name in ("Arguments", *_FIRST)}
        last: list[tuple[str, str]] = []
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is None:
                continue
            if param.param_type_name == "argument":
                panels["Arguments"].append(record)
                continue
            panel = getattr(param, "rich_help_panel", None) or OUTPUT
            rows = last if panel == OUTPUT else panels.setdefault(panel, [])
            rows.append(record)
        for name, rows in {**panels, OUTPUT: last}.items():
            if rows:
                with formatter.section(name):
                    formatter.write_dl(rows)


class Group(TyperGroup):
    """Commands in panels, each imported from the module of its name when it is asked for.

    Attributes:
        panels: for each panel of `--help` its commands, and what it says of each.
    """

    panels: ClassVar[Mapping[str, Mapping[str, str]]]

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = _Imported(list(chain.from_iterable(self.panels.values())))

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for panel, commands in self.panels.items():
            with formatter.section(panel):
                formatter.write_dl(list(commands.items()))


class _Imported(dict[str, Any]):
    """Commands by name, each imported when it is first looked up."""

    def __init__(self, names: list[str]) -> None:
        super().__init__(dict.fromkeys(names))

    def __getitem__(self, name: str) -> Any:
        if super().__getitem__(name) is None:
            found = getattr(import_module(f"envplan.cli.{name}"), name)
            if not isinstance(found, typer.Typer):
                alone = typer.Typer(add_completion=False, rich_markup_mode=None)
                add(alone, found)
                found = alone
            self[name] = typer.main.get_command(found)
            self[name].name = name
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        with suppress(KeyError):
            return self[name]
        return default

    def items(self) -> Any:
        return [(name, self[name]) for name in self]

    def values(self) -> Any:
        return [self[name] for name in self]


def add(app: typer.Typer, function: Callable[..., None], name: str | None = None) -> None:
    """Make a function a command of an app."""
    app.command(name, cls=Command)(expanded(function))


def expanded(function: Callable[..., None]) -> Callable[..., None]:
    """The function with, for each parameter that is a dataclass, its fields as parameters.

    Fields and parameters keep their annotations and defaults; no name may come twice.
    """
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, type[Any]] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(function).parameters.values():
        kind = hints[parameter.name]
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            groups[parameter.name] = kind
            parameters += _parameters(kind)
        else:
            parameters.append(parameter.replace(annotation=kind))
    keywords = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]

    def command(**given: Any) -> None:
        built = {
            name: kind(**{f.name: given.pop(f.name) for f in dataclasses.fields(kind)})
            for name, kind in groups.items()
        }
        function(**built, **given)

    command.__name__, command.__doc__ = function.__name__, function.__doc__
    command.__module__ = function.__module__
    command.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in keywords}
    return command


def _parameters(kind: type[Any]) -> list[inspect.Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty
            if field.default is dataclasses.MISSING
            else field.default,
            annotation=hints[field.name],
        )
        for field in dataclasses.fields(kind)
    ]
