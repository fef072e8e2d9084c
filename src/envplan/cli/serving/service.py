"""Options of commands about a service: its profile, its SLOs, and values for each class."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

import typer

from envplan.cli.invocation import invocation
from envplan.cli.shared import JOB
from envplan.cli.types import InputFile, parser_of, quantity
from envplan.errors import InputError
from envplan.quantities import COUNT, NUMBER
from envplan.serving.builtin import BUILTIN
from envplan.serving.classes import Slo, check_class

if TYPE_CHECKING:
    from envplan.serving.profile import ServingProfile

_SECONDS: Final = NUMBER.within(1e-9, 1e9)


class ClassSlo(NamedTuple):
    """The SLOs of a request class."""

    request_class: str
    slo: Slo


def split_class(text: str, form: str) -> tuple[str, str]:
    """Class and value of CLASS=VALUE.

    Args:
        text: what an option was given.
        form: what it must be, for the error.

    Raises:
        InputError: there is no value, or no such class.
    """
    name, _, value = (word.strip() for word in text.partition("="))
    if not value:
        raise InputError(f"{form}, not {text!r}")
    return check_class(name), value


def parse_slo(text: str, option: str) -> ClassSlo:
    """`LL=2,0.1`: seconds to the first token, and between tokens."""
    form = f"{option} must be CLASS=TTFT,TBT in seconds, as in LL=2,0.1"
    name, value = split_class(text, form)
    times_s = [_SECONDS.parse(part, f"{option} {name}") for part in value.split(",")]
    if len(times_s) != 2:
        raise InputError(f"{form}, not {name}={value}")
    return ClassSlo(name, Slo(*times_s))


#: A panel of `--help`.
FLEET: Final = "Fleet"

FleetGpus = Annotated[
    int,
    typer.Option(
        rich_help_panel=FLEET, metavar="N", help="GPUs of the fleet.", parser=quantity(COUNT)
    ),
]


@dataclass(frozen=True, kw_only=True)
class ServiceOptions:
    """A serving profile, and the SLOs to be met with it."""

    profile: Annotated[
        str,
        typer.Argument(
            metavar="PROFILE",
            help=f"Serving profile CSV; default: {BUILTIN}.",
            show_default=False,
        ),
        InputFile(),
    ] = BUILTIN
    slo: Annotated[
        list[ClassSlo] | None,
        typer.Option(
            rich_help_panel=JOB,
            metavar="CLASS=TTFT,TBT",
            help="SLO of a class: seconds to the first token, and between tokens. May be repeated.",
            parser=parser_of(parse_slo),
        ),
    ] = None
    slo_scale: Annotated[
        float,
        typer.Option(
            rich_help_panel=JOB,
            metavar="X",
            help="All SLOs, X times as long; default: 1.",
            show_default=False,
            parser=quantity(NUMBER.within(1e-6, 1e6)),
        ),
    ] = 1.0

    @cached_property
    def serving_profile(self) -> ServingProfile:
        """The profile, with these SLOs."""
        from envplan.serving.profile import ServingProfile

        profile = ServingProfile.open(self.profile)
        invocation().will_read(profile.path, profile.sidecar)
        return profile.with_slos(dict(self.slo or []), self.slo_scale)
