"""The hierarchical planner: three managers, each within what the next may assume."""

from __future__ import annotations

import numpy as np
import pytest

from envplan.errors import NoAnswerError
from envplan.serving.classes import Slo
from envplan.serving.plan import Asked
from envplan.serving.planners import able_within, powers, reshard, size_pools
from serving_helpers import Curves, small_serving_profile

CLOCKS = {("SS", 2, 1000): [(0, 10), (4, 50)], ("SS", 2, 2000): [(0, 20), (6, 90)]}
LARGE = {("SS", 4, 1000): [(0, 30), (10, 60)], ("SS", 4, 2000): [(0, 30), (12, 95)]}
DENSE = {("SS", 4, 1000): [(0, 1), (10, 10)], ("SS", 1, 1000): [(0, 1), (10, 50)]}


@pytest.mark.parametrize(
    ("curves", "load", "gpus", "tp", "power"),
    [
        # One on four GPUs at 2000 MHz draws 95 W, two on two 180 W.
        (CLOCKS | LARGE, 120.0, 16, 4, 95.0),
        (DENSE, 200.0, 8, 4, 20.0),
        (DENSE, 200.0, 7, 1, 100.0),  # denser where GPUs run short
    ],
)
def test_the_pool_manager_sizes_at_maximum_frequency(
    curves: Curves, load: float, gpus: int, tp: int, power: float
) -> None:
    profile = small_serving_profile(curves)
    (pool,) = size_pools(profile, Asked.about(profile, {"SS": load}, gpus))
    assert (pool.tp, pool.power_w) == (tp, power)
    with pytest.raises(NoAnswerError, match=r"[24] GPUs, [13] more than the 1 there are; class SS"):
        size_pools(profile, Asked.about(profile, {"SS": load}, 1))


def test_the_instance_manager_reshards_where_that_draws_less() -> None:
    profile = small_serving_profile(
        {("SS", 4, 1000): [(0, 40), (10, 60)], ("SS", 1, 1000): [(0, 4), (2, 30)]}
    )
    able = able_within(profile, "SS", Slo(1.0, 1.0))
    for load, best in ((10.0, {1: 1}), (80.0, {4: 1}), (110.0, None)):
        assert reshard(able, 4, load) == best


def test_the_gpu_manager_knows_what_each_clock_draws_at_a_load() -> None:
    known = able_within(small_serving_profile(CLOCKS), "SS", Slo(1.0, 1.0))[2]
    assert powers(known, np.array([0.0, 40.0, 50.0, 61.0])).tolist() == [
        [10.0, 50.0, np.inf, np.inf],
        pytest.approx([20.0, 20 + 70 * 4 / 6, 20 + 70 * 5 / 6, np.inf]),
    ]
    assert powers(known, 40.0).argmin() == 0
