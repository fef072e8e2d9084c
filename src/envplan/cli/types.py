"""Values of options: each kind has a parser, for `typer.Option(parser=...)`.

A parser turns the text of an option into its value. Typer also hands it the default, which goes
through as it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import typer

from envplan.errors import InputError, unknown
from envplan.quantities import WHOLE, Quantity

#: What `typer.Option(parser=...)` takes: turns the text of an option into its value.
Parser = Callable[[Any], Any]

#: Turns the text of an option into its value; an error says the option's name, the second argument.
Parse = Callable[[str, str], Any]

#: The metavar of an option that may stand without its file.
OPTIONAL_FILE: Final = "[FILE]"


class InputFile:
    """Marks an option or argument that names a file to be read: no output may be that file."""


class InPlace:
    """Marks an option or argument that names a file to be read, which an output may replace."""


class OptionError(typer.BadParameter):
    """A value that an option does not take; what it says names the option as typed."""

    def __init__(self, parse: Parse, text: str) -> None:
        super().__init__("")
        self._parse = parse
        self._text = text

    def format_message(self) -> str:
        """The error, as in `--error must be a percentage, such as 2 or 2%, not x`."""
        names = self.param.opts if self.param else []
        option = "/".join(name for name in names if name.startswith("--"))
        try:  # once more, now that the option's name is known
            self._parse(self._text, option)
        except InputError as error:
            return str(error)
        raise AssertionError(f"{option} {self._text} was refused and is fine")


def parser_of(parse: Parse) -> Parser:
    """A parser for `typer.Option(parser=...)`, which knows no names of options."""

    def parser(value: Any) -> Any:
        if not isinstance(value, str):
            return value  # the default
        try:
            return parse(value, "")
        except InputError:
            raise OptionError(parse, value) from None

    return parser


def quantity(kind: Quantity) -> Parser:
    """A number with a unit, such as `5ms` or `2%`."""
    return parser_of(kind.parse)


class Numbers(list[int]):
    """Whole numbers that one option lists. Typer takes a plain list for an option given often."""


def numbers(example: str, lowest: int = 1, highest: int = 2**31 - 1) -> Parser:
    """Whole numbers, separated by commas."""
    description = f"numbers separated by commas, as in {example}"
    number = dataclasses.replace(WHOLE, what=description, least=lowest, most=highest)

    def parse(text: str, option: str) -> Numbers:
        return Numbers(int(number.parse(part, option)) for part in text.split(","))

    return parser_of(parse)


def one_of(*choices: str) -> Parser:
    """One of a few words."""

    def parse(text: str, option: str) -> str:
        if text not in choices:
            raise InputError(f"{option} must be {either(choices)}, not {text}")
        return text

    return parser_of(parse)


def member_of(kind: type[StrEnum]) -> Parser:
    """A member of an enumeration, by its value."""

    def parse(text: str, option: str) -> StrEnum:
        if text not in list(kind):
            raise InputError(f"{option} must be {either(kind)}, not {text}")
        return kind(text)

    return parser_of(parse)


def completing(names: Iterable[str]) -> Callable[[str], list[str]]:
    """A completion for `typer.Option(autocompletion=...)`: names that begin with what is typed."""

    def complete(incomplete: str) -> list[str]:
        return [name for name in names if name.startswith(incomplete)]

    return complete


def registered(kind: str, names: Collection[str]) -> Parser:
    """A name of a registry, such as that of schedules; an error lists or suggests names."""

    def parse(text: str, option: str) -> str:
        if text not in names:
            raise InputError(f"{option}: {unknown(kind, text, names)}")
        return text

    return parser_of(parse)


#: Stands for the terminal in the place of a file's name.
TERMINAL: Final = Path("-")


class OutputFile:
    """Parses the name of a file to be written.

    Args:
        suffixes: the name must have one of these; none: any.
        bare: what the file is called where the option stands alone; "" where it may not. The
            command may complete a name such as "serving-*.png".
        terminal: whether `-` stands for the terminal, on which it is drawn.
    """

    __name__ = "FILE"  # Typer asks for the name of a parser

    def __init__(self, *suffixes: str, bare: str = "", terminal: bool = False) -> None:
        self._suffixes = suffixes
        self._bare = bare
        self._terminal = terminal
        self._parser = parser_of(self._parse)

    def __call__(self, value: Any) -> Any:
        """The path of a text; a default as it is."""
        return self._parser(value)

    def _parse(self, text: str, option: str) -> Path:
        path = Path(text or self._bare)
        if self._terminal and path == TERMINAL:
            return path
        if self._suffixes and path.suffix.lower() not in self._suffixes:
            endings = " or ".join(self._suffixes)
            message = f"{option} {path} must end in {endings}"
            if self._bare:
                message += f"; other arguments go before {option}"
            raise InputError(message)
        return path


def either(names: Iterable[str]) -> str:
    """`a`, `a or b`, `a, b or c`."""
    *firsts, final = names
    return f"{', '.join(firsts)} or {final}" if firsts else final
