"""Counts and numbers in words, as tables, pictures, pages and proofs show them."""

from __future__ import annotations

import math
from collections.abc import Sequence


def counted(count: int, noun: str) -> str:
    """`1 stage`, `2 stages`, `2 microbatches`, `2 classes`."""
    if count == 1:
        return f"1 {noun}"
    ending = "es" if noun.endswith(("ch", "ss")) else "s"
    return f"{count} {noun}{ending}"


def enumerated(names: Sequence[str]) -> str:
    """Names in a row, such as "a, b and c"."""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def exact_seconds(seconds: float) -> str:
    """A time to the nanosecond without trailing zeros: it may be pasted back as a target."""
    text = f"{seconds:.9f}".rstrip("0")
    return text.removesuffix(".")


def significant(value: float, digits: int = 4) -> str:
    """A number in fixed notation with about so many significant digits.

    Commas are between thousands.
    """
    return f"{value:,.{_decimals(value, digits)}f}"


def column(values: Sequence[float], digits: int = 4) -> list[str]:
    """A column of numbers, all with as many decimals as the largest needs for `digits` digits."""
    decimals = _decimals(max(map(abs, values), default=0.0), digits)
    return [f"{value:,.{decimals}f}" for value in values]


def signed_percent(percent: float) -> str:
    """A change in percent; one that rounds to nothing has no sign."""
    text = f"{percent:+.2f}"
    return text[1:] if float(text) == 0 else text


def _decimals(value: float, digits: int) -> int:
    """Decimals with which a number shows so many significant digits."""
    if not value:
        return digits - 1
    return max(0, digits - 1 - math.floor(math.log10(abs(value))))
