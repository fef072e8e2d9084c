"""Exact integer units, and the only place where seconds, joules and watts become integers.

Inside envplan time is in nanoseconds, power in units of 10 uW and energy in units of 10 fJ, all
Python or 64-bit integers: 10 uW x 1 ns = 10 fJ, so nothing is lost between them. A profile's times
and energies are rounded to these units once, when it is read; every makespan, target, energy and
bound after that is exact.
"""

from __future__ import annotations

from decimal import ROUND_CEILING, ROUND_FLOOR, ROUND_HALF_EVEN, Decimal
from itertools import pairwise

NS_PER_S = 10**9
POWER_UNITS_PER_W = 10**5
ENERGY_UNITS_PER_J = 10**14
J_PER_KWH = 3.6e6

#: Largest magnitude any single time, power or energy may have: the sum of two stays in 64 bits.
#: Sums of energies over operations have 128 bits in the core and no limit in Python.
MAX_INTEGER = 2**62

#: The most energy of one operation on one GPU, J: whole joules below MAX_INTEGER units.
MAX_OPERATION_J = MAX_INTEGER // ENERGY_UNITS_PER_J

#: envplan 0.1 counted power in uW and energy in fJ. What its files state may lie so far from what
#: comes out in these units, as a fraction: half a unit of power of the 50 W that a GPU draws.
FINER_UNITS_TOLERANCE = 2e-7


def _scaled(value: float, scale: int, rounding: str) -> int:
    # Through the shortest decimal of the float: 14.2 s is 14_200_000_000 ns, not one less.
    return int((Decimal(repr(float(value))) * scale).to_integral_value(rounding=rounding))


def ns_from_s(seconds: float) -> int:
    """Nearest whole nanosecond."""
    # Profiles have many times, and floats are much faster than decimals. Below 2**40 ns the product
    # is off by less than 2**-12, so unless it lies near to the middle its nearest integer is right.
    ns = float(seconds) * NS_PER_S
    if abs(ns) < 2**40:
        nearest = round(ns)
        if abs(ns - nearest) < 0.49:
            return nearest
    return _scaled(seconds, NS_PER_S, ROUND_HALF_EVEN)


def ns_from_s_floor(seconds: float) -> int:
    """Whole nanoseconds not after `seconds`: for deadlines, which must not be overrun."""
    return _scaled(seconds, NS_PER_S, ROUND_FLOOR)


def ns_from_s_ceil(seconds: float) -> int:
    """Whole nanoseconds not before `seconds`."""
    return _scaled(seconds, NS_PER_S, ROUND_CEILING)


def in_10uw(watts: float) -> int:
    """Nearest whole number of 10 uW."""
    return _scaled(watts, POWER_UNITS_PER_W, ROUND_HALF_EVEN)


def in_10fj(joules: float) -> int:
    """Nearest whole number of 10 fJ."""
    return _scaled(joules, ENERGY_UNITS_PER_J, ROUND_HALF_EVEN)


def s_from_ns(ns: int) -> float:
    """Seconds, correctly rounded: below 2**53 ns (104 days) ns_from_s gives the same ns back."""
    return int(ns) / NS_PER_S


def j_from_10fj(energy_10fj: int) -> float:
    """Joules, correctly rounded."""
    return int(energy_10fj) / ENERGY_UNITS_PER_J


def w_from_10uw(power_10uw: int) -> float:
    """Watts, correctly rounded."""
    return int(power_10uw) / POWER_UNITS_PER_W


_SECONDS = {"years": 365 * 86400, "d": 86400, "h": 3600, "m": 60, "s": 1}


def duration_text(seconds: float) -> str:
    """A duration in its two largest units, rounded: "13 d 7 h"; years with a decimal."""
    if seconds >= _SECONDS["years"]:
        return f"{seconds / _SECONDS['years']:,.1f} years"
    for larger, smaller in pairwise(_SECONDS):
        unit, part = _SECONDS[larger], _SECONDS[smaller]
        if seconds >= unit:
            whole, rest = divmod(round(seconds / part), unit // part)
            return f"{whole} {larger} {rest} {smaller}" if rest else f"{whole} {larger}"
    return f"{seconds:.4g} s"
