"""Which options of a group were given: what they exclude, what they need, how they are typed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, get_type_hints

from typer.models import ArgumentInfo

from envplan.cli.types import Numbers, either
from envplan.errors import InputError


def flag(name: str) -> str:
    """What to type for an option, by the name of its field: `--time-limit`."""
    return f"--{name.replace('_', '-')}"


def options_given(group: Any, *names: str) -> list[str]:
    """The options of a group that differ from their defaults, as typed.

    Args:
        names: of the fields that are meant; default: all.
    """
    fields = {field.name: field for field in dataclasses.fields(group)}
    return [flag(name) for name in names or fields if getattr(group, name) != fields[name].default]


def refuse(options: Iterable[str], why: str) -> None:
    """Raises: InputError: there is an option, which `why` says more of."""
    for option in options:
        raise InputError(f"{option} {why}")


def refuse_both(options: Iterable[str]) -> None:
    """Raises: InputError: of options that exclude each other there are two."""
    for first, second in pairwise(options):
        raise InputError(f"{first} and {second} exclude each other; give one of them")


def require_with(group: Any, name: str, *others: str) -> None:
    """Raises: InputError: an option is given without any of the others that it goes with."""
    if not options_given(group, *others):
        refuse(options_given(group, name), f"goes with {either(map(flag, others))}")


def as_typed(group: Any) -> list[str]:
    """What to type for the options and arguments of a group that differ from their defaults."""
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
