"""Times, counts, powers and energies as people write them."""

from __future__ import annotations

from decimal import ROUND_HALF_EVEN, Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envplan.errors import InputError
from envplan.quantities import COUNT, ENERGY, LONG_TIME, PERCENT, POWER, TIME, WHOLE, Quantity
from envplan.units import ns_from_s


@pytest.mark.parametrize(
    ("quantity", "text", "value"),
    [
        (TIME, "5ms", 0.005),
        (TIME, "7.5s", 7.5),
        (TIME, "2h", 7200.0),
        (TIME, "1d12h", 129600.0),
        (TIME, "1h 30m", 5400.0),
        (TIME, "14.2", 14.2),
        (TIME, "1e-3", 0.001),
        (TIME.plainly("ms"), "20", 0.02),
        (TIME.plainly("ms"), "20us", 0.00002),
        (LONG_TIME, "0.1h", 360.0),
        (COUNT, "100k", 100_000),
        (COUNT.within(1, 10**18), "15T", 15 * 10**12),
        (COUNT.within(1, 10**18), "300e9", 300 * 10**9),
        (COUNT, "2.5M", 2_500_000),
        (PERCENT, "2%", 2.0),
        (POWER, "1.2kW", 1200.0),
        (ENERGY, "0.5kWh", 1.8e6),
        (WHOLE, "0", 0),
    ],
)
def test_text_gives_the_number(quantity: Quantity, text: str, value: float) -> None:
    found = quantity.parse(text, "--x")
    assert found == value
    assert isinstance(found, int) == quantity.whole


@pytest.mark.parametrize(
    ("quantity", "text", "words"),
    [
        (TIME, "", "--x must be a time, such as 5ms"),
        (TIME, "soon", "a time"),
        (TIME, "5 parsecs", "a time"),
        (TIME, "nan", "not nan"),
        (TIME, "inf", "not inf"),
        (TIME, "1e999", "a time"),
        (TIME, "1_000", "a time"),
        (TIME, "1h30", "a time"),
        (TIME, "-1", "at least 0, not -1"),
        (TIME.within(0, 10), "11s", "at most 10 s, not 11s"),
        (LONG_TIME, "14", "a time with a unit"),
        (COUNT, "0", "at least 1, not 0"),
        (COUNT, "2.5", "a whole number"),
        (COUNT, "3T", "at most 2147483647, not 3000000000000"),
        (WHOLE, "1k", "a whole number"),
        (POWER, "300J", "a power"),
    ],
)
def test_what_is_no_such_quantity_is_refused(quantity: Quantity, text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        quantity.parse(text, "--x")


@given(st.floats(0, 1e9), st.integers(0, 10**9), st.sampled_from([("ns", 9), ("us", 6), ("ms", 3)]))
def test_numbers_are_read_exactly(value: float, count: int, unit: tuple[str, int]) -> None:
    assert TIME.parse(repr(value), "--x") == value
    assert TIME.parse(f"{count}{unit[0]}", "--x") == count / 10 ** unit[1]


@given(st.one_of(st.floats(-1e12, 1e12), st.integers(-(10**12), 10**12).map(lambda k: k / 2e9)))
def test_seconds_are_rounded_to_the_nearest_nanosecond_of_their_decimals(seconds: float) -> None:
    exact = Decimal(repr(seconds)) * 10**9
    assert ns_from_s(seconds) == int(exact.to_integral_value(rounding=ROUND_HALF_EVEN))
