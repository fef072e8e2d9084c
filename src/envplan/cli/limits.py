"""Options of `envplan solve` that say what a plan keeps besides its deadline, one for each number.

They are made from what each limit says of itself (`envplan.request.limits.LIMIT_OPTIONS`).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import typer

from envplan.cli.types import quantity
from envplan.request.limits import LIMIT_OPTIONS, LimitOption


def _annotation(option: LimitOption) -> Any:
    """The option as Typer takes it."""
    declaration = typer.Option(
        metavar=option.metavar,
        parser=quantity(option.quantity),
        help=option.help,
        rich_help_panel=option.panel,
    )
    return Annotated[float | None, declaration]


_OPTIONS = {option.parameter: option for option in LIMIT_OPTIONS if option.flag}

if TYPE_CHECKING:

    class LimitOptions:
        """Limits that a plan keeps besides its deadline."""

else:
    LimitOptions = dataclasses.make_dataclass(
        "LimitOptions",
        [
            (name, _annotation(option), dataclasses.field(default=None))
            for name, option in _OPTIONS.items()
        ],
        frozen=True,
        kw_only=True,
    )


def limit_keywords(options: LimitOptions) -> dict[str, float]:
    """The keyword arguments of `Request.from_options` that the options stand for."""
    keywords = {}
    for name, option in _OPTIONS.items():
        number = getattr(options, name)
        if number is not None:
            keywords[option.keyword] = number / option.divisor
    return keywords
