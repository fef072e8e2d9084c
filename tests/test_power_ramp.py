"""A limit on how steeply power changes, against sums of fractions on a dense grid of times."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from envplan.request.limits.power_ramp import PowerOverTime

Steps = list[tuple[int, int]]  # how long, ns, and power, uW


def power_over_time(steps: Steps) -> PowerOverTime:
    times_ns = np.cumsum([0, *(length for length, _ in steps)])
    return PowerOverTime(times_ns, np.array([power for _, power in steps], np.int64))


def energy(steps: Steps, begin: Fraction, length: Fraction) -> Fraction:
    """Energy of a window, in any iteration, one step after the other."""
    period = sum(step for step, _ in steps)
    begin -= begin // period * period
    used, end, at = Fraction(0), begin + length, Fraction(0)
    while at < end:
        for step, power in steps:
            overlap = min(end, at + step) - max(begin, at)
            used += max(overlap, Fraction(0)) * power
            at += step
    return used


def steepest(steps: Steps, window: int, parts: int = 2) -> Fraction:
    """The most by which neighbouring windows differ, at `parts` times in every ns."""
    period = sum(step for step, _ in steps)
    length = Fraction(window)
    return max(
        abs(energy(steps, at, length) - energy(steps, at - length, length))
        for at in (Fraction(part, parts) for part in range(period * parts))
    )


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 9)), min_size=1, max_size=5),
    st.integers(1, 40),
)
@example([(3, 0), (3, 9)], 6)
@example([(3, 0), (3, 9)], 3)
@example([(5, 4)], 7)
def test_the_steepest_change_is_that_of_a_dense_grid(steps: Steps, window: int) -> None:
    assert power_over_time(steps).steepest_change(window).change_fj == steepest(steps, window)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 9)), min_size=1, max_size=4),
    st.integers(1, 20),
)
def test_numbers_beyond_64_bits_are_as_exact(steps: Steps, window: int) -> None:
    scale = 2**59
    large = power_over_time([(length, power * scale) for length, power in steps])
    assert large.steepest_change(window).change_fj == steepest(steps, window) * scale


def test_a_window_of_one_iteration_or_several_has_no_ramp() -> None:
    power = power_over_time([(2, 1), (3, 7)])
    assert [power.steepest_change(window).change_fj for window in (5, 10, 50)] == [0, 0, 0]


def test_windows_longer_than_an_iteration_differ_as_their_remainder_does() -> None:
    power = power_over_time([(2, 1), (3, 7), (1, 4)])
    assert power.steepest_change(4).change_fj == power.steepest_change(4 + 3 * 6).change_fj
    assert power.steepest_change(4).change_fj == power.steepest_change(6 - 4).change_fj


def test_powers_of_replicas_add_up_moment_by_moment() -> None:
    one, other = power_over_time([(2, 1), (3, 7)]), power_over_time([(4, 2), (1, 0)])
    total = PowerOverTime.sum([(one, 3), (other, 10)])
    assert total.times_ns.tolist() == [0, 2, 4, 5]
    assert total.power_uw.tolist() == [23, 41, 21]


@pytest.mark.parametrize(("window", "steepest_fj"), [(1, 9), (2, 18), (3, 27), (5, 9)])
def test_a_square_wave_is_steepest_at_its_edge(window: int, steepest_fj: int) -> None:
    assert power_over_time([(3, 0), (3, 9)]).steepest_change(window).change_fj == steepest_fj
