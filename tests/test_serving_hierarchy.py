"""The hierarchical planner: three managers, each within what the next may assume."""

from __future__ import annotations

import numpy as np
import pytest

from envplan.errors import NoAnswerError
from envplan.serving.classes import Slo
from envplan.serving.hierarchy import PoolModel, SizedPool, reshard, size_pools
from envplan.serving.plan import Asked
from envplan.serving.profile import ServingProfile
from serving_helpers import small_serving_profile


def sized(profile: ServingProfile, loads: dict[str, float], gpus: int) -> list[SizedPool]:
    return size_pools(profile, Asked.about(profile, loads, gpus))


def test_the_pool_manager_sizes_at_maximum_frequency() -> None:
    profile = small_serving_profile(
        {
            ("SS", 2, 1000): [(0, 10), (4, 50)],
            ("SS", 2, 2000): [(0, 10), (6, 90)],
            ("SS", 4, 1000): [(0, 30), (10, 60)],
            ("SS", 4, 2000): [(0, 30), (12, 95)],
        }
    )
    (pool,) = sized(profile, {"SS": 120.0}, 16)
    # One on four GPUs at 2000 MHz draws 95 W, two on two 180 W.
    assert (pool.tp, pool.instances, pool.power_w) == (4, 1, 95.0)


def test_the_pool_manager_goes_denser_where_gpus_run_short() -> None:
    profile = small_serving_profile(
        {("SS", 4, 1000): [(0, 1), (10, 10)], ("SS", 1, 1000): [(0, 1), (10, 50)]}
    )
    assert sized(profile, {"SS": 200.0}, 8)[0].tp == 4
    assert sized(profile, {"SS": 200.0}, 7)[0].tp == 1
    with pytest.raises(NoAnswerError, match="2 GPUs, 1 more than the 1 there are; class SS"):
        sized(profile, {"SS": 200.0}, 1)


def test_the_instance_manager_reshards_where_that_draws_less() -> None:
    profile = small_serving_profile(
        {("SS", 4, 1000): [(0, 40), (10, 60)], ("SS", 1, 1000): [(0, 4), (2, 30)]}
    )
    model = PoolModel(profile, "SS", Slo(1.0, 1.0))
    assert reshard(model, 4, 10.0) == {1: 1}
    assert reshard(model, 4, 80.0) == {4: 1}
    assert reshard(model, 4, 110.0) is None


def test_the_gpu_manager_takes_the_clock_that_draws_least_at_the_load() -> None:
    profile = small_serving_profile(
        {("SS", 2, 1000): [(0, 10), (4, 50)], ("SS", 2, 2000): [(0, 20), (6, 90)]}
    )
    model = PoolModel(profile, "SS", Slo(1.0, 1.0))
    assert model.best(2, 40.0).frequency_mhz == 1000
    assert model.best(2, 41.0).frequency_mhz == 2000
    loads = np.array([0.0, 20.0, 40.0, 50.0, 61.0])
    assert model.least_power(2, loads)[:-1].tolist() == [
        model.best(2, load).power_at(load) for load in loads[:-1]
    ]
    assert model.least_power(2, loads)[-1] == np.inf
