"""The power that a site may draw, as a step function of time."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from typing import NamedTuple, Self

from envplan.costs.rate_file import read_rate
from envplan.costs.rates import Rate
from envplan.errors import InputError
from envplan.quantities import POWER

__all__ = ["Budget", "Interval", "read_budget"]

#: A text that begins so is meant as a power, not as a file.
_NUMBER_BEGINS = re.compile(r"[-+.]?\d")
#: A fixed budget is planned for one interval of this length, s: an hour.
_FIXED_S = 3600.0


class Interval(NamedTuple):
    """A time in which nothing about the site changes.

    Attributes:
        start_s, end_s: since the plan's start.
        budget_w: the power that the site may draw, W.
        reserved_w: the part of it that others draw, W.
    """

    start_s: float
    end_s: float
    budget_w: float
    reserved_w: float


class Budget(NamedTuple):
    """The power that a site may draw over time.

    Attributes:
        intervals: one after the other, without gaps; at least one.
    """

    intervals: tuple[Interval, ...]

    @classmethod
    def fixed(cls, power_w: float, *, reserved_w: float = 0.0) -> Self:
        """The same power for an hour."""
        return cls((Interval(0.0, _FIXED_S, power_w, reserved_w),))


def read_budget(power: str, reserved: str | None = None, *, start: str | None = None) -> Budget:
    """Read a budget, and what others draw of it.

    Each is a power, such as 600kW, or a CSV file with a column `time` (ISO 8601) or `hour`, and a
    column `power` in W; a row holds until the next one, as in files of prices.

    Args:
        power: the power that the site may draw.
        reserved: the power of others, such as an inference fleet; default: none.
        start: ISO 8601; when the plan starts, for files with `time`. Default: with the file.

    Raises:
        InputError: one of them is neither a power nor such a file, or others are not known for as
            long as the budget is.
    """
    site = _read_series(power, "--power", start)
    others = _read_series("0" if reserved is None else reserved, "--reserved", start)
    end_s = min(site.lasts_s, others.lasts_s)
    if others.lasts_s < site.lasts_s < math.inf:
        raise InputError(
            f"--reserved is known for {others.lasts_s:g} s and --power for {site.lasts_s:g} s; "
            "give both for the same time"
        )
    if end_s == math.inf:
        end_s = _FIXED_S
    starts_s = sorted({0.0, *site.changes(0.0, end_s), *others.changes(0.0, end_s)})
    intervals = []
    for start_s, next_start_s in pairwise([*starts_s, end_s]):
        interval = Interval(
            start_s=start_s,
            end_s=next_start_s,
            budget_w=site.at(start_s),
            reserved_w=others.at(start_s),
        )
        intervals.append(interval)
    return Budget(tuple(intervals))


def _read_series(text: str, option: str, start: str | None) -> Rate:
    """A power or a file of powers."""
    try:
        return Rate.fixed(POWER.parse(text, option))
    except InputError as error:
        if _NUMBER_BEGINS.match(text):
            raise error from None
    return read_rate(text, "power", start=start)
