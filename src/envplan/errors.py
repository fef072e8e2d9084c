"""Everything envplan raises on purpose.

EnvplanError                 exit code 2
 ├─ InputError               a file, table or argument is wrong; says where
 └─ NoAnswerError            the question is well put but has no answer; exit code 1

DoubtWarning                 a warning: a value is probably not meant
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class EnvplanError(Exception):
    """Base class: one line for the user, and the exit code the CLI returns for it."""

    exit_code = 2


class InputError(EnvplanError):
    """Input that cannot be used.

    Args:
        message: what is wrong and what to do about it, in one line.
        path: the file it is about.
        line: 1-based line in that file.
        column: the name of a column or field, or a 1-based column number.
    """

    def __init__(
        self,
        message: str,
        *,
        path: str | os.PathLike[str] | None = None,
        line: int | None = None,
        column: str | int | None = None,
    ) -> None:
        self.message = _printable(message)  # names of fields and columns come from files
        self.path = None if path is None else os.fspath(path)
        self.line = line
        self.column = column
        where = _printable(self.path or "")
        if line is not None:
            where += f":{line}" if where else f"line {line}"
        if column is not None:
            name = f"column {_printable(str(column))}"
            where += f", {name}" if where else name
        super().__init__(f"{where}: {self.message}" if where else self.message)


class NoAnswerError(EnvplanError):
    """No plan can do what was asked; the message states the nearest that can be done."""

    exit_code = 1


class DoubtWarning(UserWarning):
    """A value is probably not meant, such as a time in the wrong unit."""


def warn_of_doubt(text: str) -> None:
    """Warn that a value is probably not meant, at the line outside of envplan that led here."""
    level = 2  # whoever called this
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("envplan."):
        frame = frame.f_back
        level += 1
    warnings.warn(text, DoubtWarning, stacklevel=level)


@contextmanager
def naming(path: str | os.PathLike[str] | None) -> Iterator[None]:
    """Errors from within name this file, unless they name another.

    A question without an answer stays one.
    """
    try:
        yield
    except InputError as error:
        if error.path is not None:
            raise
        raise InputError(error.message, path=path, line=error.line, column=error.column) from None
    except NoAnswerError as error:
        where = "" if path is None else f"{os.fspath(path)}: "
        raise NoAnswerError(f"{where}{error}") from error
    except EnvplanError as error:
        raise InputError(str(error), path=path) from error


def _printable(text: str) -> str:
    """A text on one line: a file's name may have any character in it."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def shown(value: object) -> str:
    """`value` as an error message quotes it: short, on one line, in JSON's words."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and abs(value) > 10**18:
        return "a number beyond 1e18"
    if isinstance(value, dict | list | tuple):
        return "an object" if isinstance(value, dict) else "a list"
    if isinstance(value, str):
        text = value if len(value) <= 60 else value[:57] + "..."
        return f'"{_printable(text)}"'
    return repr(float(value) if isinstance(value, float) else value)[:60]


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """The message that a name is not known: with the nearest ones, or with all where none is near.

    Args:
        what: is named, such as "schedule".
    """
    return f"unknown {what} {shown(name)}{meant(name, known)}"


def meant(name: str, known: Iterable[str]) -> str:
    """Words about an unknown name: all known names, if they are few, and the one that was meant."""
    from difflib import get_close_matches

    names = {_plain(one): one for one in known}
    few = f"; known: {', '.join(names.values())}" if len(names) <= _FEW else ""
    if not (typed := _plain(name)):
        return few
    near = [text for text in names if text.startswith(typed)]
    near = near or [text for text in names if typed in text] or get_close_matches(typed, names)
    near = [typed] if typed in names else near[:3]
    return few + (f"; did you mean {' or '.join(names[text] for text in near)}?" if near else "")


#: Names that may all be listed in a line.
_FEW = 24


def _plain(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())
