"""Options of commands about a service: its profile, its SLOs, and values for each class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

import typer

from envplan.cli.invocation import invocation
from envplan.cli.shared import JOB
from envplan.cli.types import InputFile, parser_of, quantity
from envplan.errors import InputError
from envplan.quantities import COUNT, NUMBER
from envplan.serving.builtin import BUILTIN
from envplan.serving.classes import RequestClasses, Slo

if TYPE_CHECKING:
    from envplan.serving.profile import ServingProfile

#: Of files that state classes.
_CLASS_SUFFIXES: Final = (".toml", ".json")
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
        InputError: there is no class, or no value.
    """
    name, _, value = (word.strip() for word in text.partition("="))
    if not name or not value:
        raise InputError(f"{form}, not {text!r}")
    return name, value


def parse_slo(text: str, option: str) -> ClassSlo:
    """`LL=2,0.1`: seconds to the first token, and between tokens."""
    form = f"{option} must be CLASS=TTFT,TBT in seconds, as in LL=2,0.1"
    name, value = split_class(text, form)
    times_s = [_SECONDS.parse(part, f"{option} {name}") for part in value.split(",")]
    if len(times_s) != 2:
        raise InputError(f"{form}, not {name}={value}")
    return ClassSlo(name, Slo(*times_s))


def _parse_classes_file(text: str, option: str) -> Path:
    """The name of a file in TOML or JSON."""
    path = Path(text)
    if path.suffix.lower() not in _CLASS_SUFFIXES:
        raise InputError(f"{option} {path} must end in {' or '.join(_CLASS_SUFFIXES)}")
    return path


def example_loads(names: Sequence[str]) -> str:
    """A value of --load for a next command, such as SS=20000,MM=8000.

    Args:
        names: of the classes that there are.
    """
    common = [name for name in ("SS", "MM") if name in names]
    loads = zip(common or names, (20_000, 8_000), strict=False)
    return ",".join(f"{name}={tokens_s}" for name, tokens_s in loads)


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
    """A serving profile, the classes of requests, and the SLOs to be met."""

    profile: Annotated[
        str,
        typer.Argument(
            metavar="PROFILE",
            help=f"Serving profile CSV; default: {BUILTIN}.",
            show_default=False,
        ),
        InputFile(),
    ] = BUILTIN
    classes: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=JOB,
            metavar="FILE",
            help="Classes of requests, their lengths and SLOs: .toml or .json. Default: the "
            "profile's, else SS, SM, ... LL: short, medium or long input, then output.",
            show_default=False,
            parser=parser_of(_parse_classes_file),
        ),
        InputFile(),
    ] = None
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

    def to_words(self) -> list[str]:
        """What is typed for this service, for a next command."""
        words = [] if self.profile == BUILTIN else [self.profile]
        if self.classes is not None:
            words += ["--classes", str(self.classes)]
        for name, slo in self.slo or []:
            words += ["--slo", f"{name}={slo.ttft_s:g},{slo.tbt_s:g}"]
        if self.slo_scale != 1.0:
            words += ["--slo-scale", f"{self.slo_scale:g}"]
        return words

    @cached_property
    def serving_profile(self) -> ServingProfile:
        """The profile, for these classes and SLOs."""
        return self.profile_for(None)

    def profile_for(self, classes: RequestClasses | None) -> ServingProfile:
        """The profile, for these SLOs and, without --classes, for other classes than its own.

        Args:
            classes: None: its own.
        """
        from envplan.serving.profile import ServingProfile

        profile = ServingProfile.open(self.profile)
        invocation().will_read(profile.path, profile.sidecar)
        if classes is not None:
            profile = profile.with_classes(classes)
        return self.adjusted(profile)

    @cached_property
    def stated_classes(self) -> RequestClasses | None:
        """The classes of --classes."""
        from envplan.serving.class_file import read_classes

        return None if self.classes is None else read_classes(self.classes)

    def adjusted(self, profile: ServingProfile) -> ServingProfile:
        """A profile for these classes and SLOs."""
        if self.stated_classes is not None:
            profile = profile.with_classes(self.stated_classes)
        return profile.with_slos(dict(self.slo or []), self.slo_scale)
