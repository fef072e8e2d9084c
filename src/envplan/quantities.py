"""Quantities as people write them: `5ms`, `7.5s`, `1d12h`, `100k`, `15T`, `2%`, `1.2kW`.

A number without a unit is in seconds, joules, watts or percent. Only latencies of clocks, which
were in milliseconds before they took units, still are: with a warning.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Final, Self

from envplan.errors import InputError, shown, warn_of_doubt

_PART: Final = re.compile(
    r"([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,4})?)\s*([A-Za-z%]*)", re.ASCII
)
_LONGEST: Final = 400
_DIGITS: Final = "0123456789."


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """A kind of number that people write with a unit.

    Attributes:
        what: in words, after "must be".
        units: how much one of each unit is, in the unit of the result.
        plain: the unit of a number that stands alone; None: a unit must be given.
        least, most: the range, in the unit of the result.
        whole: whether the result is an int.
        warns: whether to warn how a number without a unit is read, unless it is 0.
    """

    what: str
    units: Mapping[str, str]
    plain: str | None = ""
    least: float = 0.0
    most: float = sys.float_info.max
    whole: bool = False
    warns: bool = False

    def within(self, least: float, most: float | None = None) -> Self:
        """The same in another range."""
        return replace(self, least=least, most=self.most if most is None else most)

    def plainly(self, unit: str) -> Self:
        """The same, with numbers that stand alone in another unit."""
        return replace(self, plain=unit)

    def with_unit(self) -> Self:
        """The same, with a warning where a number stands alone."""
        return replace(self, warns=True)

    def parse(self, text: str, name: str) -> float:
        """The number that a text gives: an int where `whole`.

        Args:
            name: of the option or field, for errors.

        Raises:
            InputError: the text is no such quantity or out of range.
        """
        value = self._value(text.strip())
        if value is None or value in (math.inf, -math.inf):
            raise InputError(f"{name} must be {self.what}, not {text if len(text) < 60 else '...'}")
        if not self.least <= value <= self.most:
            bound = "least" if value < self.least else "most"
            limit = self._shown(self.least if bound == "least" else self.most)
            given = self._shown(value) if self.whole else text
            raise InputError(f"{name} must be at {bound} {limit}, not {given}")
        if self.warns and value and text.strip()[-1:] in _DIGITS:
            read = f"{text.strip()}{self.plain}"
            warn_of_doubt(f"{name} {text} is read as {read}; say so: {read}".lstrip())
        return value

    def _value(self, text: str) -> float | None:
        parts = _PART.findall(text)
        if not parts or len(text) > _LONGEST or _PART.sub("", text).strip():
            return None
        total = Decimal(0)
        for number, unit in parts:
            name = unit or (self.plain if len(parts) == 1 else None)
            if name is None or name not in self.units:
                return None
            total += Decimal(number) * Decimal(self.units[name])
        if not self.whole:
            return float(total)
        return int(total) if total == int(total) else None

    def _shown(self, value: float) -> str:
        unit = " s" if value and self.units.get("s") else ""
        return shown(int(value)) if self.whole else f"{value:g}{unit}"


TIME: Final = Quantity(
    most=1e9,
    what="a time, such as 5ms, 7.5s, 2h or 1d12h",
    units={
        "ns": "1e-9", "us": "1e-6", "ms": "0.001", "s": "1", "m": "60", "min": "60", "h": "3600",
        "d": "86400",
    },
    plain="s",
)  # fmt: skip
LONG_TIME: Final = replace(TIME, what="a time with a unit, such as 14d, 36h or 1d12h", plain=None)
COUNT: Final = Quantity(
    what="a whole number, such as 100, 100k or 15T",
    units={"": "1", "k": "1e3", "K": "1e3", "M": "1e6", "B": "1e9", "G": "1e9", "T": "1e12"},
    whole=True,
    least=1,
    most=2**31 - 1,
)
WHOLE: Final = Quantity(what="a whole number", units={"": "1"}, whole=True, most=2**31 - 1)
NUMBER: Final = Quantity(what="a number", units={"": "1"})
PERCENT: Final = Quantity(what="a percentage, such as 2 or 2%", units={"": "1", "%": "1"})
POWER: Final = Quantity(
    what="a power, such as 300, 300W or 1.2kW",
    units={"": "1", "W": "1", "kW": "1e3", "MW": "1e6"},
)
MEMORY: Final = Quantity(
    what="an amount of memory, such as 141 or 141GB", units={"": "1", "GB": "1", "TB": "1000"}
)
ENERGY: Final = Quantity(
    what="an energy, such as 5000, 5kJ or 0.2kWh",
    units={"": "1", "J": "1", "kJ": "1e3", "MJ": "1e6", "Wh": "3600", "kWh": "3.6e6"},
)
