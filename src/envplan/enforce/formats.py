"""The formats that frequency plans are written in.

A format more is a method of `FrequencyPlan` that makes its text, and a `Format` in FORMATS.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from envplan.enforce.freqplan import FrequencyPlan

__all__ = ["CSV", "ENVPLAN", "FORMATS", "ZEUS", "Format"]


@dataclass(frozen=True, kw_only=True)
class Format:
    """A format that frequency plans are written in.

    Attributes:
        name: as users type it.
        default_output: the file that is written where users name none.
        text: makes the content of the file.
        has_ladder: whether the file holds slower plans for stragglers.
        has_configs: whether the file holds the config of every operation.
    """

    name: str
    default_output: Path
    text: Callable[[FrequencyPlan], str]
    has_ladder: bool
    has_configs: bool


#: Our own format, which the runtime reads.
ENVPLAN: Final = Format(
    name="envplan",
    default_output=Path("run.freqplan.json"),
    text=lambda applied: applied.to_json(),
    has_ladder=True,
    has_configs=True,
)

#: What the server of Zeus's pipeline frequency optimizer reads.
ZEUS: Final = Format(
    name="zeus",
    default_output=Path("run.freqplan.py"),
    text=lambda applied: applied.to_zeus(),
    has_ladder=False,
    has_configs=False,
)

#: A row for every operation.
CSV: Final = Format(
    name="csv",
    default_output=Path("run.freqplan.csv"),
    text=lambda applied: applied.to_csv(),
    has_ladder=False,
    has_configs=True,
)

#: All formats by name.
FORMATS: Final = {format_.name: format_ for format_ in (ENVPLAN, ZEUS, CSV)}
