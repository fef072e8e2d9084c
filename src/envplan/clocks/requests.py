"""Requests for clocks within an operation, and the config that stands for them.

An option with clocks by part is known by a config that says which part runs at which clock:

    @attention=1410 @mlp=990

means: request 1410 MHz as `attention` starts and 990 MHz as `mlp` starts. Clocks that come late
are requested ahead, so `@attention=990+2000000ns` means: 2 ms after `attention` starts. A config
that begins with "@" is never a plain label: profiles refuse it, plans parse it.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final, NamedTuple

from envplan.errors import InputError

#: A name that a part may have.
PART_NAME: Final = re.compile(r"[^\s@=/,\"]+")
#: How a config that stands for requests begins.
MARK: Final = "@"
_REQUEST: Final = re.compile(
    rf"@(?P<part>{PART_NAME.pattern})=(?P<mhz>\d+)(?:\+(?P<delay_ns>\d+)ns)?(?:/(?P<config>.*))?"
)


class ClockRequest(NamedTuple):
    """A request for a clock while an operation runs.

    Attributes:
        part: as it begins, the request is made, or so long after that.
        frequency_mhz: the clock, MHz.
        config: of this part and those after it.
        delay_ns: from the begin of the part to the request, ns.
    """

    part: str
    frequency_mhz: int
    config: str
    delay_ns: int = 0

    def __str__(self) -> str:
        """The request as a config writes it."""
        delay = f"+{self.delay_ns}ns" if self.delay_ns else ""
        label = f"/{self.config}" if self.config else ""
        return f"@{self.part}={self.frequency_mhz}{delay}{label}"


@lru_cache(maxsize=65536)
def parse_clock_requests(config: str) -> tuple[ClockRequest, ...]:
    """The requests that a config stands for; none where it is a plain label.

    Raises:
        InputError: it begins with "@" but does not go on as requests do.
    """
    if not config.startswith(MARK):
        return ()
    requests = []
    for text in re.split(" (?=@)", config):
        match = _REQUEST.fullmatch(text)
        if match is None:
            raise InputError(
                f"{config!r} does not say clocks by part, as in @attention=1410 @mlp=990"
            )
        requests.append(
            ClockRequest(
                part=match["part"],
                frequency_mhz=int(match["mhz"]),
                config=match["config"] or "",
                delay_ns=int(match["delay_ns"] or 0),
            )
        )
    return tuple(requests)
