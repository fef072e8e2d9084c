"""Which options of a group were given: what they exclude, what they need, how they are typed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, get_type_hints

from typer.models import ArgumentInfo

from envplan.cli.types import Numbers, either
from envplan.errors import InputError


def flag(name: str) -> str:
    """The option of a field, as in `--time-limit`."""
    return f"--{name.replace('_', '-')}"


def options_given(group: Any, *names: str) -> list[str]:
    """The options of a group that differ from their defaults, as typed.

    Args:
        names: of the fields that are meant; default: all.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(group)}
    return [flag(name) for name in names or defaults if getattr(group, name) != defaults[name]]


def refuse(options: Iterable[str], why: str) -> None:
    """Refuse options that are given.

    Args:
        options: those that are given; none: nothing is refused.
        why: what the error says of the first.

    Raises:
        InputError: there is one.
    """
    option = next(iter(options), None)
    if option is not None:
        raise InputError(f"{option} {why}")


def refuse_both(options: Iterable[str]) -> None:
    """Refuse two options that exclude each other.

    Args:
        options: those of them that are given.

    Raises:
        InputError: there are two.
    """
    excluding = list(options)
    if len(excluding) > 1:
        raise InputError(f"{excluding[0]} and {excluding[1]} exclude each other; give one of them")


def require_with(group: Any, name: str, *companions: str) -> None:
    """Refuse an option that is given without any of the options that it goes with.

    Raises:
        InputError: it is.
    """
    if not options_given(group, *companions):
        refuse(options_given(group, name), f"goes with {either(map(flag, companions))}")


def as_typed(group: Any) -> list[str]:
    """The words to type for what differs from its default in a group."""
    words: list[str] = []
    hints = get_type_hints(type(group), include_extras=True)
    for field in dataclasses.fields(group):
        value = getattr(group, field.name)
        if value == field.default:
            continue
        declaration, *_ = hints[field.name].__metadata__
        if not isinstance(declaration, ArgumentInfo):
            words.append(flag(field.name))
        if isinstance(value, Numbers):
            words.append(",".join(map(str, value)))
        elif value is not True:
            words.append(str(value))
    return words
