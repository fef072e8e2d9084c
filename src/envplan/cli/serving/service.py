"""What commands about a service share: its profile and its SLOs, and values for each class."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Final

from envplan.cli import command as cmd
from envplan.errors import InputError
from envplan.quantities import NUMBER

if TYPE_CHECKING:
    from envplan.serving.profile import ServingProfile

_BUILTIN: Final = "h100-llama2-70b"
_SECONDS: Final = NUMBER.within(1e-9, 1e9)


@cmd.options(
    """
    Most used:
      PROFILE  Serving profile CSV; default: h100-llama2-70b.
    Job:
      --slo CLASS=TTFT,TBT  SLO of a class: seconds to the first token, and between tokens. May be
          repeated.
      --slo-scale X  All SLOs, X times as long; default: 1.
    """,
    slo_scale=NUMBER.within(1e-6, 1e6),
)
class ServiceOptions:
    """A serving profile, and the SLOs to be met with it."""

    profile: str = _BUILTIN
    slo: list[str] | None = None
    slo_scale: float = 1.0

    @cached_property
    def known(self) -> ServingProfile:
        """The profile, with these SLOs."""
        from envplan.serving.classes import Slo
        from envplan.serving.profile import ServingProfile

        slos = {}
        form = "--slo must be CLASS=TTFT,TBT in seconds, as in LL=2,0.1"
        for name, values in values_by_class(self.slo or [], form):
            times = [_SECONDS.parse(value, f"--slo {name}") for value in values.split(",")]
            if len(times) != 2:
                raise InputError(f"{form}, not {name}={values}")
            slos[name] = Slo(*times)
        profile = ServingProfile.open(self.profile)
        cmd.refuse_overwriting(profile.path, profile.sidecar)
        return profile.with_slos(slos, self.slo_scale)


def values_by_class(texts: Sequence[str], form: str) -> Iterator[tuple[str, str]]:
    """Class and value of every CLASS=VALUE; `form` says what it must be."""
    from envplan.serving.classes import check_class

    for text in texts:
        name, _, value = (word.strip() for word in text.partition("="))
        if not value:
            raise InputError(f"{form}, not {text!r}")
        yield check_class(name), value
