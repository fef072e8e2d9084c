"""The settling of a clock is found in drawn steps and ramps with noise and outliers."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from envplan.profiling.switch_latency import settled_after

OLD_S, TARGET_S, TOLERANCE_S = 0.0004, 0.0006, 0.00002


@given(
    change=st.integers(5, 400),
    ramp=st.integers(0, 5),
    faster=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
    outliers=st.integers(0, 3),
)
def test_settling_is_found_within_a_millisecond(
    change: int, ramp: int, faster: bool, seed: int, outliers: int
) -> None:
    random = np.random.default_rng(seed)
    old_s, target_s = (TARGET_S, OLD_S) if faster else (OLD_S, TARGET_S)
    durations_s = np.full(600, target_s)
    durations_s[:change] = old_s
    durations_s[change - ramp : change] = (old_s + target_s) / 2
    durations_s += random.uniform(-TOLERANCE_S, TOLERANCE_S, 600) * 0.9
    # Outliers lie apart and away from the change, where one slice could not be told from another.
    places = random.choice(np.arange(1, 55), outliers, replace=False) * 10
    durations_s[[place for place in places if abs(place - change) > 8]] *= 3
    begins_s = np.concatenate([[0.0], np.cumsum(durations_s)[:-1]])
    found_s = settled_after(
        begins_s, durations_s, requested_s=0.0, target_duration_s=target_s, tolerance_s=TOLERANCE_S
    )
    assert found_s is not None
    assert abs(found_s - begins_s[change]) < 0.001


def test_slices_that_never_reach_the_target_do_not_settle() -> None:
    durations_s = np.full(50, OLD_S)
    begins_s = np.arange(50) * OLD_S
    found_s = settled_after(
        begins_s, durations_s, requested_s=0.0, target_duration_s=TARGET_S, tolerance_s=TOLERANCE_S
    )
    assert found_s is None


def test_no_slices_after_the_request_do_not_settle() -> None:
    found_s = settled_after(
        np.array([0.0]),
        np.array([OLD_S]),
        requested_s=1.0,
        target_duration_s=OLD_S,
        tolerance_s=TOLERANCE_S,
    )
    assert found_s is None
